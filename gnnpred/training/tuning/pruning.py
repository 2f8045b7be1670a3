"""When a trial is given up before its last stage.

Optuna neither takes intermediate values of a study of several objectives nor prunes it. There the errors by step are
kept as a user attribute, and a trial is compared with those alone that cost no more: what is worse than dearer trials
may still be the best at its price.
"""

from collections.abc import Sequence

import numpy as np
import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from gnnpred.training.search_space import Stage
from gnnpred.training.tuning.costs import LATENCY_RATIO, SIZE_BYTES

HOPELESS_QUANTILE = 0.75  # a trial among the worst quarter part-way through a stage is pruned at once
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_STEP_ERRORS = "step_errors_pct"


def report(trial: Trial, error_pct: float, step: int) -> None:
    """Keep the mean error over the folds of the present stage after a step (one fold of one stage)."""
    if len(trial.study.directions) == 1:
        trial.report(error_pct, step)
    else:
        trial.set_user_attr(_STEP_ERRORS, {**trial.user_attrs.get(_STEP_ERRORS, {}), str(step): error_pct})


def step_errors(trial: FrozenTrial) -> dict[int, float]:
    """What :func:`report` kept, in per cent by step."""
    kept = trial.user_attrs.get(_STEP_ERRORS, {})
    return trial.intermediate_values or {int(step): error_pct for step, error_pct in kept.items()}


def is_hopeless(trial: Trial) -> bool:
    """Whether the study's pruner gives the trial up after its last step."""
    study = trial.study
    return study.pruner.prune(study, study.get_trials(deepcopy=False)[trial.number])


class BestShare(optuna.pruners.BasePruner):
    """Prunes a trial outside the best ``keep`` of a stage at its end, or among the worst quarter within one."""

    def __init__(self, num_folds: int, stages: Sequence[Stage], startup_trials: int) -> None:
        self._num_folds, self._stages, self._startup_trials = num_folds, stages, startup_trials

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        errors = step_errors(trial)
        if not errors:
            return False
        step = max(errors)
        others = study.get_trials(deepcopy=False, states=FINISHED)
        values = [step_errors(t)[step] for t in others if step in step_errors(t) and _costs_no_more(t, trial)]
        if len(values) < self._startup_trials:
            return False
        ends_stage = (step + 1) % self._num_folds == 0
        limit = np.quantile(values, self._stages[step // self._num_folds].keep if ends_stage else HOPELESS_QUANTILE)
        return bool(errors[step] > limit)


def _costs_no_more(other: FrozenTrial, trial: FrozenTrial) -> bool:
    """In every cost that is an objective of the study."""
    costs = [name for name in (LATENCY_RATIO, SIZE_BYTES) if name in trial.user_attrs]
    return all(name in other.user_attrs and other.user_attrs[name] <= trial.user_attrs[name] for name in costs)
