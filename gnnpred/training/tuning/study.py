"""The study: its sampler, its first trial, whom it admits, and trials until there are enough."""

from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial

from gnnpred.errors import UsageError
from gnnpred.training.experiments import Progress, RecipeSettings
from gnnpred.training.search_space import SearchSpace
from gnnpred.training.tuning.objective import Objective
from gnnpred.training.tuning.pruning import FINISHED, BestShare
from gnnpred.training.tuning.storage import open_storage, retry


class SeededByTrial(optuna.samplers.BaseSampler):
    """TPE whose seed is the study's plus the trial's number.

    Workers of one study draw different trials then, and one that is killed and started again draws what it would have.
    """

    def __init__(self, seed: int, startup_trials: int) -> None:
        self._seed, self._startup_trials = seed, startup_trials
        self._sampler = self._seeded(0)

    def _seeded(self, number: int) -> optuna.samplers.TPESampler:
        return optuna.samplers.TPESampler(
            seed=self._seed + number, n_startup_trials=self._startup_trials, multivariate=True, constant_liar=True
        )

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._sampler = self._seeded(trial.number)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, distribution: Any) -> Any:
        return self._sampler.sample_independent(study, trial, param_name, distribution)


def open_study(
    storage: str, name: str, recipe: RecipeSettings, space: SearchSpace, digests: dict[str, str]
) -> optuna.Study:
    """Create a study, with the recipe's own values as its first trial, or join one of the same search."""
    study = optuna.create_study(
        storage=open_storage(storage), study_name=name, direction="minimize", load_if_exists=True,
        sampler=SeededByTrial(space.seed, space.startup_trials),
    )  # fmt: skip
    for what, digest in digests.items():
        known = study.user_attrs.get(f"gnnpred {what}")
        if known is None and study.trials:
            raise UsageError(f"study {name!r} holds trials that gnnpred tune did not make: choose another --study")
        if known is None:
            study.set_user_attr(f"gnnpred {what}", digest)
        elif known != digest:
            raise UsageError(
                f"study {name!r} is of another {what}: its trials cannot be compared with new ones, choose another "
                "--study"
            )
    if not study.trials:
        study.enqueue_trial(space.defaults(recipe), user_attrs={"is_default": True}, skip_if_exists=True)
    return study


def run_trials(
    study: optuna.Study, objective: Objective, space: SearchSpace, trials: int, on_progress: Progress
) -> None:
    """Run trials until the study, with those of other workers, has ``trials`` finished ones."""
    study.pruner = BestShare(len(objective.folds), space.keep_share, space.startup_trials)

    def stop(study: optuna.Study, trial: FrozenTrial) -> None:
        finished = num_finished(study)
        on_progress("trials", min(finished, trials), trials)
        if finished >= trials:
            study.stop()

    def run(trial: Trial) -> float:
        try:
            return objective(trial)
        except KeyboardInterrupt:
            retry(study, study.trials[trial.number])
            raise

    on_progress("trials", num_finished(study), trials)
    study.optimize(run, callbacks=[stop])


def num_finished(study: optuna.Study) -> int:
    return len(study.get_trials(deepcopy=False, states=FINISHED))
