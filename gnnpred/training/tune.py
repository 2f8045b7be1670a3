"""gnnpred tune: a study of a recipe, from its storage to ``best.toml``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import optuna

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.training.experiments import Progress, RecipeSettings, load_encoded_corpus
from gnnpred.training.recipe import with_values
from gnnpred.training.search_space import SearchSpace
from gnnpred.training.tuning.confirm import confirm_trials, confirmed_errors
from gnnpred.training.tuning.costs import ERROR
from gnnpred.training.tuning.objective import FOLDS_PROGRESS, Objective, untouched_errors
from gnnpred.training.tuning.results import TuneResult, candidates, write_results
from gnnpred.training.tuning.storage import (
    absolute_storage,
    is_one_machine,
    is_one_process,
    quiet_optuna,
    shown_storage,
    storage_errors,
)
from gnnpred.training.tuning.study import Search, num_finished, open_study, run_trials
from gnnpred.training.tuning.trials import OnTrials, trial_rows
from gnnpred.training.tuning.workers import LocalPool, WorkerPool, run_on_workers

LOCAL_RAY = "local"


def tune_recipe(
    name: str,
    recipe: RecipeSettings,
    space: SearchSpace,
    *,
    datasets: Path,
    work: Path,
    out: Path,
    trials: int,
    objectives: Sequence[str] = (ERROR,),
    storage: str | None = None,
    study_name: str | None = None,
    engine: str = "local",
    num_workers: int = 1,
    ray_address: str = LOCAL_RAY,
    confirm: int = 0,
    test_seeds: int = 0,
    num_encoders: int = 2,
    on_progress: Progress = lambda what, done, total: None,
    on_trials: OnTrials = lambda rows: None,
) -> TuneResult:
    """Run trials until the study has ``trials`` finished ones, then write tables, plots and recipes to ``out``.

    ``storage`` is a database URL or a journal file, an SQLite file in ``work`` without one; commands that name the same
    study share it. ``num_workers`` processes run trials: this one alone, several here, or actors on a Ray cluster
    (``engine`` "ray"; ``ray_address`` "local" starts a Ray here). ``on_trials`` is told the trials as they go on.
    The ``confirm`` best trials are trained again with other seeds, and the best of them is taken.
    ``test_seeds`` ensembles of the default and the tuned recipe are scored on the families that were set aside.
    """
    for folder in (out, work):  # before anything is trained
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GnnpredError(f"cannot write to {folder}: {error.strerror}") from error
    if storage is None:
        storage = f"sqlite:///{work / 'tune.db'}"
    with quiet_optuna(), storage_errors(storage):
        is_pooled = engine == "ray" or num_workers > 1
        _check_storage(storage, is_pooled=is_pooled, ray_address=ray_address)
        search = Search(
            recipe=recipe, space=space, objectives=tuple(objectives), datasets=datasets, work=work, storage=storage,
            study_name=study_name or name,
        )  # fmt: skip
        digests = search.digests()
        study = open_study(search, digests)
        objective: Objective | None = None
        if trials > num_finished(study) or confirm or test_seeds:
            corpus = load_encoded_corpus(datasets, recipe, work, num_encoders, on_progress, with_blind=False)
            objective = Objective(corpus, recipe, space, on_progress, search.objectives)
        if objective and trials > num_finished(study):
            show = _shown_trials(study, objective, on_trials)
            if is_pooled:
                pool = _pool_of(search, digests, engine, num_workers, ray_address)
                run_on_workers(study, pool, num_workers, trials, on_progress, show)
            else:
                objective.on_progress = _with_trials(on_progress, show)
                run_trials(study, objective, search, trials, on_progress, show)
                objective.on_progress = on_progress
        confirmed_pct: dict[int, list[float]] = {}
        if objective and confirm:
            best = candidates(study, search, confirm)
            confirm_trials(study, objective, recipe, best, on_progress)
            confirmed_pct = confirmed_errors(study, best)
        try:
            result = write_results(
                study, search, out=out, storage=shown_storage(storage), confirmed_pct=confirmed_pct
            )  # fmt: skip
        except OSError as error:
            raise GnnpredError(f"cannot write to {out}: {error.strerror or error}") from error
        if objective and test_seeds:
            tuned = with_values(recipe, result.best.params, where="the best trial")
            errors = untouched_errors(objective, {"default": recipe, "tuned": tuned}, test_seeds, on_progress)
            result = replace(result, test_errors_pct=errors)
    return result


def _check_storage(storage: str, *, is_pooled: bool, ray_address: str) -> None:
    """Whether all workers can reach it."""
    if is_pooled and is_one_process(storage):
        raise UsageError("several workers cannot share an SQLite database in memory: name a file")
    if ray_address != LOCAL_RAY and is_one_machine(storage):
        raise UsageError(
            f"workers on other machines cannot share the SQLite file of {shown_storage(storage)}: give --storage the "
            "URL of a database server, or journal:FILE on a file system that all of them mount"
        )


def _pool_of(search: Search, digests: dict[str, str], engine: str, num_workers: int, ray_address: str) -> WorkerPool:
    # workers start in folders of their own
    absolute = replace(
        search, datasets=search.datasets.resolve(), work=search.work.resolve(), storage=absolute_storage(search.storage)
    )
    if engine == "ray":
        from gnnpred.training.tuning.ray_workers import RayPool

        return RayPool(absolute, digests, num_workers, ray_address)
    return LocalPool(absolute, digests)


def _shown_trials(study: optuna.Study, objective: Objective, on_trials: OnTrials) -> Callable[[], None]:
    num_stages, num_folds = len(objective.space.stages), len(objective.folds)
    return lambda: on_trials(trial_rows(study, num_stages=num_stages, num_folds=num_folds))


def _with_trials(on_progress: Progress, show: Callable[[], None]) -> Progress:
    """Progress that shows the trials again after every fold."""

    def advance(what: str, done: int, total: int) -> None:
        on_progress(what, done, total)
        if what == FOLDS_PROGRESS:
            show()

    return advance
