"""The best trials once more, with other seeds: the least of many noisy errors is partly luck."""

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import optuna
from optuna.trial import FrozenTrial

from gnnpred.training.experiments import Progress, RecipeSettings
from gnnpred.training.recipe import with_values
from gnnpred.training.tuning.objective import MAX_ENSEMBLE, DivergedError, Objective

CONFIRM_SEEDS = 2  # other than the trial's own, by which it was chosen and which therefore counts no more
CONFIRM_PROGRESS = "folds of the best trials, other seeds"
_SEEDS = range(1, CONFIRM_SEEDS + 1)


def confirm_trials(
    study: optuna.Study,
    objective: Objective,
    recipe: RecipeSettings,
    trials: Sequence[FrozenTrial],
    on_progress: Progress,
) -> None:
    """Train complete ``trials`` as the recipe says with ``CONFIRM_SEEDS`` further seeds and keep their errors.

    What is kept is not trained again. The order is each caller's own, so that commands on one study share the work.
    """
    wanted = list(itertools.product(trials, _SEEDS, objective.folds))
    random.Random().shuffle(wanted)
    for done, (trial, seed, fold) in enumerate(wanted):
        on_progress(CONFIRM_PROGRESS, done, len(wanted))
        key = _key(trial, seed, fold.name)
        if key in study.user_attrs:
            continue
        settings = with_values(recipe, trial.params, where=f"trial {trial.number}")
        try:
            error_pct = objective.error_pct(settings, fold, first_seed=seed * MAX_ENSEMBLE)
        except DivergedError:
            error_pct = None
        study.set_user_attr(key, error_pct)
    on_progress(CONFIRM_PROGRESS, len(wanted), len(wanted))


def confirmed_errors(study: optuna.Study, trials: Sequence[FrozenTrial]) -> dict[int, list[float]]:
    """By number of each of ``trials`` its mean error over the inner folds in per cent, one per other seed.

    Infinite for a seed whose networks diverged. All of them must have been confirmed.
    """
    kept = study.user_attrs
    errors = {}
    for trial in trials:
        folds = trial.user_attrs["fold_errors_pct"]
        by_seed = [[kept[_key(trial, seed, fold)] for fold in folds] for seed in _SEEDS]
        errors[trial.number] = [math.inf if None in of_folds else float(np.mean(of_folds)) for of_folds in by_seed]
    return errors


def _key(trial: FrozenTrial, seed: int, fold: str) -> str:
    """User attribute of the study: a finished trial takes none."""
    return f"gnnpred confirmed {trial.number}/{seed}/{fold}"
