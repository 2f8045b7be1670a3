"""gnnpred tune: a study of a recipe, from its storage to ``best.toml``."""

from dataclasses import replace
from pathlib import Path

from gnnpred.files import json_digest
from gnnpred.training.experiments import Progress, RecipeSettings, corpus_rows, encoding_digest, load_encoded_corpus
from gnnpred.training.recipe import values_of, with_values
from gnnpred.training.search_space import SearchSpace
from gnnpred.training.tuning.objective import Objective, untouched_errors
from gnnpred.training.tuning.results import TuneResult, write_results
from gnnpred.training.tuning.storage import quiet_optuna, shown_storage, storage_errors
from gnnpred.training.tuning.study import num_finished, open_study, run_trials


def tune_recipe(
    name: str,
    recipe: RecipeSettings,
    space: SearchSpace,
    *,
    datasets: Path,
    work: Path,
    out: Path,
    trials: int,
    storage: str | None = None,
    study_name: str | None = None,
    test_seeds: int = 0,
    num_workers: int = 2,
    on_progress: Progress = lambda what, done, total: None,
) -> TuneResult:
    """Run trials until the study has ``trials`` finished ones, then write table, plots and ``best.toml`` to ``out``.

    ``storage`` is a database URL, an SQLite file in ``work`` without one; workers that name the same study share it.
    ``test_seeds`` networks of the default and the tuned recipe are scored on the families that were set aside.
    """
    study_name = study_name or name
    if storage is None:
        work.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{work / 'tune.db'}"
    with quiet_optuna(), storage_errors(storage):
        rows, _ = corpus_rows(datasets, recipe)
        digests = {
            "recipe": json_digest(values_of(recipe)),
            "search space": space.digest,
            "corpus": encoding_digest(datasets, rows),
        }
        study = open_study(storage, study_name, recipe, space, digests)
        objective: Objective | None = None
        if trials > num_finished(study) or test_seeds:
            corpus = load_encoded_corpus(datasets, recipe, work, num_workers, on_progress, with_blind=False)
            objective = Objective(corpus, recipe, space, on_progress)
        if objective and trials > num_finished(study):
            run_trials(study, objective, space, trials, on_progress)
        result = write_results(study, recipe, space, out=out, storage=shown_storage(storage))
        if objective and test_seeds:
            tuned = with_values(recipe, result.best.params, where="the best trial")
            errors = untouched_errors(objective, {"default": recipe, "tuned": tuned}, test_seeds, on_progress)
            result = replace(result, test_errors_pct=errors)
    return result
