"""Hyperparameter search: an Optuna study over the fields of a recipe that a search space names.

The families of one fold of ``splits/family.json`` are set aside: no trial trains on them or is scored on them, so that
they can tell afterwards whether the tuned recipe is better or was merely fitted to the study. The other folds are the
inner folds: a trial holds each of them out in turn, and its value is the mean over them of the MAPE of what ships,
networks and trees together.
"""

import csv
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import sqlalchemy
import torch
from optuna.trial import FrozenTrial, Trial, TrialState

from gnnpred.checkpoint import blend
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import json_digest, replaced_when_done
from gnnpred.metrics import summarise_errors
from gnnpred.training.experiments import (
    Corpus,
    Fold,
    Progress,
    RecipeSettings,
    blend_networks,
    corpus_rows,
    encoding_digest,
    fit_fold,
    load_encoded_corpus,
    partners_of,
    row_weights,
)
from gnnpred.training.loop import predict_rows
from gnnpred.training.recipe import recipe_text, values_of, with_values
from gnnpred.training.search_space import Parameter, SearchSpace, Stage
from gnnpred.training.trees import fit_trees, roofline_of, summed_features

HEARTBEAT_S = 30  # a worker signs its running trial this often
GRACE_S = 120  # a trial unsigned for this long is given to another worker
MAX_RETRIES = 3  # of one trial whose worker died
CONNECT_TIMEOUT_S = 10
MAX_ENSEMBLE = 1000  # seeds of two repeats do not meet
NUM_OPENINGS = 5  # of a database whose tables another worker is making
HOPELESS_QUANTILE = 0.75  # a trial among the worst quarter part-way through a stage is pruned at once
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_TIMEOUT_ARGUMENT = {
    "pysqlite": ("timeout", 60), "psycopg2": ("connect_timeout", CONNECT_TIMEOUT_S),
    "psycopg": ("connect_timeout", CONNECT_TIMEOUT_S), "pymysql": ("connect_timeout", CONNECT_TIMEOUT_S),
    "mysqldb": ("connect_timeout", CONNECT_TIMEOUT_S),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """A study after its trials. Errors are means over the inner folds, in per cent."""

    study_name: str
    storage: str  # without password
    trials: tuple[FrozenTrial, ...]  # complete and pruned ones, by number
    defaults: dict[str, int | float | bool]
    default_error_pct: float | None  # None where no trial of the defaults is complete
    best: FrozenTrial
    recipe: Path
    files: tuple[Path, ...]
    missing_plots: dict[str, str]  # name -> why it could not be drawn
    test_errors_pct: dict[str, list[float]] = field(default_factory=dict)  # default, tuned -> one per seed


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
    with _quiet_optuna(), _storage_errors(storage):
        rows, _ = corpus_rows(datasets, recipe)
        digests = {
            "recipe": _digest_of(recipe), "search space": space.digest, "corpus": encoding_digest(datasets, rows),
        }  # fmt: skip
        study = open_study(storage, study_name, recipe, space, digests)
        objective: Objective | None = None
        if trials > _num_finished(study) or test_seeds:
            corpus = load_encoded_corpus(datasets, recipe, work, num_workers, on_progress, with_blind=False)
            objective = Objective(corpus, recipe, space, on_progress)
        if objective and trials > _num_finished(study):
            run_trials(study, objective, space, trials, on_progress)
        result = write_results(study, recipe, space, out=out, storage=_shown(storage))
        if objective and test_seeds:
            tuned = with_values(recipe, result.best.params, where="the best trial")
            errors = untouched_errors(objective, {"default": recipe, "tuned": tuned}, test_seeds, on_progress)
            result = replace(result, test_errors_pct=errors)
    return result


# -- what a trial runs -----------------------------------------------------------------------------
def inner_folds(corpus: Corpus, test_fold: int) -> list[Fold]:
    """One fold per family fold other than ``test_fold``, whose rows are in none of them."""
    fold_of_row = corpus.fold_of("family")
    numbers = sorted({int(number) for number in fold_of_row})
    if test_fold not in numbers:
        raise UsageError(f"test_fold = {test_fold} has no rows: the corpus has rows of the family folds {numbers}")
    folds = []
    for number in numbers:
        tested = (fold_of_row == number) & ~corpus.is_inference
        if number != test_fold and tested.any():
            trained = (fold_of_row != number) & (fold_of_row != test_fold)
            folds.append(Fold("inner", str(number), np.flatnonzero(trained), np.flatnonzero(tested)))
    if len(folds) < 2:
        raise UsageError("a search needs rows of at least three family folds: two to compare on and one set aside")
    return folds


def outer_fold(corpus: Corpus, test_fold: int) -> Fold:
    """The families that were set aside, against all others."""
    fold_of_row = corpus.fold_of("family")
    tested = (fold_of_row == test_fold) & ~corpus.is_inference
    return Fold("test", str(test_fold), np.flatnonzero(fold_of_row != test_fold), np.flatnonzero(tested))


def stage_settings(settings: RecipeSettings, stage: Stage) -> RecipeSettings:
    """The recipe with a stage's share of epochs and, where an epoch draws rows, of rows."""
    train = settings.train
    rows_per_epoch = train.rows_per_epoch and max(1, round(train.rows_per_epoch * stage.rows))
    epochs = max(1, round(train.epochs * stage.epochs))
    return replace(settings, train=replace(train, rows_per_epoch=rows_per_epoch, epochs=epochs))


class Objective:
    """The value of a trial: mean error over the inner folds, after every stage of the schedule."""

    def __init__(self, corpus: Corpus, recipe: RecipeSettings, space: SearchSpace, on_progress: Progress) -> None:
        torch.set_num_threads(1)  # figures of a seed depend on it
        self.corpus, self.recipe, self.space = corpus, recipe, space
        self.folds = inner_folds(corpus, space.test_fold)
        self.on_progress = on_progress
        self._partner_idx = partners_of(corpus.rows)
        self._features = summed_features(corpus.aware)
        self._roofline_ms = roofline_of(corpus.aware)
        self._trees_ms: dict[tuple[str, str], np.ndarray] = {}

    @property
    def num_steps(self) -> int:
        return len(self.folds) * len(self.space.stages)

    def __call__(self, trial: Trial) -> float:
        settings = with_values(self.recipe, suggest(trial, self.space.parameters), where=f"trial {trial.number}")
        errors: list[float] = []
        step = 0
        for stage in self.space.stages:
            errors = []
            for fold in self.folds:
                self.on_progress("folds of the running trial", step, self.num_steps)
                try:
                    error_pct = self.error_pct(stage_settings(settings, stage), fold, rows_share=stage.rows)
                except DivergedError as error:
                    trial.set_user_attr("diverged", True)
                    raise optuna.TrialPruned from error
                errors.append(error_pct)
                trial.report(float(np.mean(errors)), step)
                step += 1
                if step < self.num_steps and trial.should_prune():
                    raise optuna.TrialPruned
        self.on_progress("folds of the running trial", step, self.num_steps)
        trial.set_user_attr("fold_errors_pct", {fold.name: e for fold, e in zip(self.folds, errors, strict=True)})
        return float(np.mean(errors))

    def error_pct(self, settings: RecipeSettings, fold: Fold, *, rows_share: float = 1.0, first_seed: int = 0) -> float:
        """MAPE of networks (seeds from ``first_seed`` on) and trees on the fold's test rows; raises DivergedError."""
        corpus = self.corpus
        epochs = settings.train.epochs
        weights = row_weights(corpus, settings)
        known = np.isin(corpus.devices[fold.test_idx], corpus.devices[fold.train_idx]).astype(np.float32)

        def on_epoch(epoch: int, loss: float) -> None:
            self.on_progress("epochs of the running network", epoch + 1, epochs)
            if not math.isfinite(loss):
                raise DivergedError

        trained = fold
        if rows_share < 1 and not settings.train.rows_per_epoch:  # an epoch is all rows: take fewer
            kept = np.random.default_rng(0).permutation(len(fold.train_idx))
            kept = np.sort(kept[: max(settings.train.graphs_per_batch, round(len(kept) * rows_share))])
            trained = replace(fold, train_idx=fold.train_idx[kept])
        members = settings.members_of("family")
        answers = []
        for member in members:
            shifted = replace(member, seed=member.seed + first_seed)
            model = fit_fold(
                corpus, trained, settings, shifted, weights=weights, partner_idx=self._partner_idx, on_epoch=on_epoch
            )
            answers.append(predict_rows(model, corpus.aware, fold.test_idx, specs_known=known))
        networks_ms = blend_networks(answers, settings.shares_of(members))
        predicted_ms = blend(networks_ms, self._trees(fold), settings.tree_weight)
        error_pct = summarise_errors(predicted_ms, corpus.target_ms[fold.test_idx]).mape_pct
        if not math.isfinite(error_pct):
            raise DivergedError
        return error_pct

    def _trees(self, fold: Fold) -> np.ndarray:
        """(num_test,) ms by the boosted trees, which no parameter changes: fitted once per fold."""
        key = fold.track, fold.name
        if key not in self._trees_ms:
            log_ratio = np.log(self.corpus.target_ms / self._roofline_ms)
            trees = fit_trees(self._features, log_ratio, fold.train_idx)
            own = self._features[fold.test_idx]
            self._trees_ms[key] = np.exp(trees.predict(own)) * self._roofline_ms[fold.test_idx]
        return self._trees_ms[key]


class DivergedError(Exception):
    """A network whose loss or predictions are no longer numbers."""


def suggest(trial: Trial, parameters: Sequence[Parameter]) -> dict[str, int | float | bool]:
    """A value for every parameter of the space."""
    values: dict[str, int | float | bool] = {}
    for p in parameters:
        if p.kind == "categorical":
            values[p.name] = trial.suggest_categorical(p.name, list(p.choices))
        elif p.kind == "int":
            values[p.name] = trial.suggest_int(p.name, int(p.low), int(p.high), log=p.log, step=p.step)
        else:
            values[p.name] = trial.suggest_float(p.name, p.low, p.high, log=p.log)
    return values


def untouched_errors(
    objective: Objective, recipes: dict[str, RecipeSettings], num_seeds: int, on_progress: Progress
) -> dict[str, list[float]]:
    """Errors on the families that were set aside, one per seed, of networks trained on all other families."""
    fold = outer_fold(objective.corpus, objective.space.test_fold)
    errors: dict[str, list[float]] = {name: [] for name in recipes}
    what = "networks for the untouched families"
    on_progress(what, 0, num_seeds * len(recipes))
    for seed in range(num_seeds):
        for name, settings in recipes.items():
            errors[name].append(objective.error_pct(settings, fold, first_seed=seed * MAX_ENSEMBLE))
            on_progress(what, sum(map(len, errors.values())), num_seeds * len(recipes))
    return errors


# -- the study -------------------------------------------------------------------------------------
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


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """A database with heartbeats: a trial whose worker died is found and run again."""
    timeout = _TIMEOUT_ARGUMENT.get(sqlalchemy.make_url(url).get_driver_name())
    for attempt in range(NUM_OPENINGS):
        try:
            return optuna.storages.RDBStorage(
                url,
                engine_kwargs={"connect_args": dict([timeout]) if timeout else {}, "pool_pre_ping": True},
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=retry,
            )
        except sqlalchemy.exc.DBAPIError as error:
            # another worker makes the tables of a new database at this moment
            is_race = any(words in str(error.orig).lower() for words in ("already exists", "duplicate", "unique"))
            if not is_race or attempt == NUM_OPENINGS - 1:
                raise
            time.sleep(1)
    raise AssertionError("unreachable")


def retry(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the parameters of a trial that did not finish, unless it was tried too often."""
    retries = trial.user_attrs.get("retries", 0)
    params = trial.params or trial.system_attrs.get("fixed_params", {})
    if params and retries < MAX_RETRIES:
        kept = {key: trial.user_attrs[key] for key in ("is_default",) if key in trial.user_attrs}
        study.enqueue_trial(params, user_attrs={**kept, "retries": retries + 1, "retry_of": trial.number})


def run_trials(
    study: optuna.Study, objective: Objective, space: SearchSpace, trials: int, on_progress: Progress
) -> None:
    """Run trials until the study, with those of other workers, has ``trials`` finished ones."""
    study.pruner = BestShare(len(objective.folds), space.keep_share, space.startup_trials)

    def stop(study: optuna.Study, trial: FrozenTrial) -> None:
        finished = _num_finished(study)
        on_progress("trials", min(finished, trials), trials)
        if finished >= trials:
            study.stop()

    def run(trial: Trial) -> float:
        try:
            return objective(trial)
        except KeyboardInterrupt:
            retry(study, study.trials[trial.number])
            raise

    on_progress("trials", _num_finished(study), trials)
    study.optimize(run, callbacks=[stop])


def _num_finished(study: optuna.Study) -> int:
    return len(study.get_trials(deepcopy=False, states=FINISHED))


def _digest_of(recipe: RecipeSettings) -> str:
    return json_digest(values_of(recipe))


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Progress and errors are ours to print."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


@contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    """Whatever a database says, as one line without its password."""
    try:
        yield
    except (sqlalchemy.exc.NoSuchModuleError, ImportError) as error:
        if isinstance(error, ImportError) and "DB access module" not in str(error):
            raise
        wanted = "a database that SQLAlchemy knows"
        if isinstance(error, ImportError):
            wanted = f"the Python package {sqlalchemy.make_url(url).get_driver_name()}"
        raise UsageError(f"no driver for the storage {_shown(url)}: it needs {wanted}") from error
    except sqlalchemy.exc.ArgumentError as error:
        raise UsageError(
            "--storage is not a database URL: write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
        ) from error
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).strip().splitlines()[0]
        raise GnnpredError(f"the storage {_shown(url)} cannot be used: {reason}") from error


def _shown(url: str) -> str:
    return sqlalchemy.make_url(url).render_as_string(hide_password=True)


# -- what a study leaves ---------------------------------------------------------------------------
def write_results(
    study: optuna.Study, recipe: RecipeSettings, space: SearchSpace, *, out: Path, storage: str
) -> TuneResult:
    """``trials.csv``, ``best.toml`` and the plots; raises GnnpredError where no trial is complete."""
    finished = study.get_trials(states=FINISHED)
    complete = [trial for trial in finished if trial.state is TrialState.COMPLETE]
    if not complete:
        raise GnnpredError(f"no trial of study {study.study_name!r} is complete: raise --trials")
    best = min(complete, key=lambda trial: (trial.value, trial.number))
    defaults = space.defaults(recipe)
    default_errors = [trial.value for trial in complete if trial.params == defaults]
    out.mkdir(parents=True, exist_ok=True)
    best_path = out / "best.toml"
    comment = (
        f"Trial {best.number} of {len(finished)} of study {study.study_name}: {best.value:.2f} % mean error over the "
        "inner folds"
    )
    if default_errors:
        comment += f"\nThe recipe that it was made from: {default_errors[0]:.2f} %"
    text = recipe_text(with_values(recipe, best.params, where=f"trial {best.number}"), comment=comment)
    with replaced_when_done(best_path) as partial:
        partial.write_text(text, encoding="utf-8")
    csv_path = out / "trials.csv"
    _write_trials(csv_path, study, space)
    plots, missing = write_plots(study, out)
    return TuneResult(
        study_name=study.study_name,
        storage=storage,
        trials=tuple(finished),
        defaults=defaults,
        default_error_pct=default_errors[0] if default_errors else None,
        best=best,
        recipe=best_path,
        files=(csv_path, *plots),
        missing_plots=missing,
    )


def _write_trials(path: Path, study: optuna.Study, space: SearchSpace) -> None:
    """Every trial of the study, also failed and running ones, one a line."""
    names = [parameter.name for parameter in space.parameters]
    trials = study.get_trials()
    folds = sorted({name for trial in trials for name in trial.user_attrs.get("fold_errors_pct", {})})
    with replaced_when_done(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["trial", "state", "error_pct", "last_error_pct", "folds_done", "seconds", "retry_of"]
            + [f"fold_{name}_error_pct" for name in folds]
            + names
        )
        for trial in trials:
            values = trial.intermediate_values
            fold_errors = trial.user_attrs.get("fold_errors_pct", {})
            writer.writerow(
                [
                    trial.number,
                    trial.state.name.lower(),
                    "" if trial.state is not TrialState.COMPLETE else f"{trial.value:.4f}",
                    f"{values[max(values)]:.4f}" if values else "",
                    len(values),
                    f"{trial.duration.total_seconds():.1f}" if trial.duration else "",
                    trial.user_attrs.get("retry_of", ""),
                ]
                + [f"{fold_errors[name]:.4f}" if name in fold_errors else "" for name in folds]
                + [trial.params.get(name, "") for name in names]
            )


def write_plots(study: optuna.Study, out: Path) -> tuple[list[Path], dict[str, str]]:
    """History, parameter importances and parallel coordinates as PNG; those that need more trials are named."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as drawing

    complete = [trial.value for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))]
    paths: list[Path] = []
    missing: dict[str, str] = {}
    drawn: dict[str, Callable[..., Any]] = {
        "history": drawing.plot_optimization_history,
        "importances": drawing.plot_param_importances,
        "parallel": drawing.plot_parallel_coordinate,
    }
    for name, draw in drawn.items():
        if name != "history" and len(set(complete)) < 2:
            missing[name] = "needs two complete trials that differ"
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layouts; the figure is there all the same
            axes = draw(study, target_name="importance for the error" if name == "importances" else "error %")
            figure = axes.figure
            figure.set_size_inches(12 if name == "parallel" else 8, 5)
            path = out / f"{name}.png"
            with replaced_when_done(path) as partial:
                figure.savefig(partial, dpi=110, format="png", bbox_inches="tight")
        pyplot.close(figure)
        paths.append(path)
    return paths, missing
