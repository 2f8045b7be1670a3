"""When a trial is given up before its last stage."""

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

HOPELESS_QUANTILE = 0.75  # a trial among the worst quarter part-way through a stage is pruned at once
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


class BestShare(optuna.pruners.BasePruner):
    """Prunes a trial that ends a stage outside the best share of trials, or is among the worst quarter within one."""

    def __init__(self, num_folds: int, keep_share: float, startup_trials: int) -> None:
        self._num_folds, self._keep_share, self._startup_trials = num_folds, keep_share, startup_trials

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        step = trial.last_step
        if step is None:
            return False
        others = study.get_trials(deepcopy=False, states=FINISHED)
        values = [t.intermediate_values[step] for t in others if step in t.intermediate_values]
        if len(values) < self._startup_trials:
            return False
        ends_stage = (step + 1) % self._num_folds == 0
        limit = np.quantile(values, self._keep_share if ends_stage else HOPELESS_QUANTILE)
        return bool(trial.intermediate_values[step] > limit)
