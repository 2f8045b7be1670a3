"""What a trial runs: networks of every inner fold, from cheap to full.

The families of one fold of ``splits/family.json`` are set aside: no trial trains on them or is scored on them, so that
they can tell afterwards whether the tuned recipe is better or was merely fitted to the study. The other folds are the
inner folds: a trial holds each of them out in turn, and its error is the mean over them of the MAPE of what ships,
networks and trees together. A study of several objectives adds what that ensemble costs.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import torch
from optuna.trial import Trial

from gnnpred.checkpoint import blend
from gnnpred.errors import UsageError
from gnnpred.metrics import summarise_errors
from gnnpred.training.experiments import Corpus, Fold, Progress, RecipeSettings, partners_of, row_weights
from gnnpred.training.loop import predict_rows
from gnnpred.training.networks import blend_networks, fit_fold
from gnnpred.training.recipe import with_values
from gnnpred.training.search_space import Parameter, SearchSpace, Stage
from gnnpred.training.trees import fit_trees, roofline_of, summed_features
from gnnpred.training.tuning.costs import (
    ERROR,
    LATENCY,
    LATENCY_RATIO,
    NETWORKS,
    SIZE,
    SIZE_BYTES,
    CostMeter,
)
from gnnpred.training.tuning.pruning import is_hopeless, report

MAX_ENSEMBLE = 1000  # seeds of two repeats do not meet
FOLDS_PROGRESS = "folds of the running trial"


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
    """The value of a trial: mean error over the inner folds, after every stage of the schedule, and costs."""

    def __init__(
        self,
        corpus: Corpus,
        recipe: RecipeSettings,
        space: SearchSpace,
        on_progress: Progress,
        objectives: Sequence[str] = (ERROR,),
    ) -> None:
        torch.set_num_threads(1)  # figures of a seed depend on it
        self.corpus, self.recipe, self.space, self.objectives = corpus, recipe, space, tuple(objectives)
        self.folds = inner_folds(corpus, space.test_fold)
        self.on_progress = on_progress
        self._partner_idx = partners_of(corpus.rows)
        self._features = summed_features(corpus.aware)
        self._roofline_ms = roofline_of(corpus.aware)
        self._trees_ms: dict[tuple[str, str], np.ndarray] = {}
        self._cost_meter: CostMeter | None = None

    @property
    def num_steps(self) -> int:
        return len(self.folds) * len(self.space.stages)

    def __call__(self, trial: Trial) -> float | tuple[float, ...]:
        """The error in per cent; with other objectives the values in their order."""
        settings = with_values(self.recipe, suggest(trial, self.space.parameters), where=f"trial {trial.number}")
        costs = self._costs(trial, settings)
        errors: list[float] = []
        step = 0
        for stage in self.space.stages:
            errors = []
            for fold in self.folds:
                self.on_progress(FOLDS_PROGRESS, step, self.num_steps)
                try:
                    error_pct = self.error_pct(stage_settings(settings, stage), fold, rows_share=stage.rows)
                except DivergedError as error:
                    trial.set_user_attr("diverged", True)
                    raise optuna.TrialPruned from error
                errors.append(error_pct)
                report(trial, float(np.mean(errors)), step)
                step += 1
                if step < self.num_steps and is_hopeless(trial):
                    raise optuna.TrialPruned
        self.on_progress(FOLDS_PROGRESS, step, self.num_steps)
        trial.set_user_attr("fold_errors_pct", {fold.name: e for fold, e in zip(self.folds, errors, strict=True)})
        error_pct = float(np.mean(errors))
        return (error_pct, *costs.values()) if costs else error_pct

    def _costs(self, trial: Trial, settings: RecipeSettings) -> dict[str, float]:
        """The costs among the objectives, in their order, kept as user attributes of the trial."""
        if self.objectives == (ERROR,):
            return {}
        if self._cost_meter is None:
            self._cost_meter = CostMeter(self.corpus, self.recipe, self._fit_trees(self.folds[0]))
        known_ratios = None
        if LATENCY in self.objectives:
            earlier = [other.user_attrs for other in trial.study.get_trials(deepcopy=False)]
            known_ratios = {each[NETWORKS]: each[LATENCY_RATIO] for each in earlier if LATENCY_RATIO in each}
        measured = self._cost_meter.costs_of(settings, known_ratios)
        by_objective = {LATENCY: (LATENCY_RATIO, measured.latency_ratio), SIZE: (SIZE_BYTES, measured.size_bytes)}
        costs = dict(by_objective[name] for name in self.objectives if name != ERROR)
        for name, value in ((NETWORKS, measured.networks), *costs.items()):
            trial.set_user_attr(name, value)
        return costs

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
            trees = self._fit_trees(fold)
            own = self._features[fold.test_idx]
            self._trees_ms[key] = np.exp(trees.predict(own)) * self._roofline_ms[fold.test_idx]
        return self._trees_ms[key]

    def _fit_trees(self, fold: Fold) -> Any:
        log_ratio = np.log(self.corpus.target_ms / self._roofline_ms)
        return fit_trees(self._features, log_ratio, fold.train_idx)


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
