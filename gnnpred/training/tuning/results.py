"""What a study leaves: the best recipes, the table of trials, plots."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done
from gnnpred.training.recipe import recipe_text, with_values
from gnnpred.training.search_space import SearchSpace
from gnnpred.training.tuning.costs import ERROR, LATENCY_RATIO, SIZE_BYTES
from gnnpred.training.tuning.plots import write_plots
from gnnpred.training.tuning.pruning import FINISHED, step_errors
from gnnpred.training.tuning.study import Search
from gnnpred.training.tuning.trials import error_of

PARETO_FOLDER = "pareto"


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """A study after its trials. Errors are means over the inner folds, in per cent."""

    study_name: str
    storage: str  # without password
    objectives: tuple[str, ...]
    trials: tuple[FrozenTrial, ...]  # complete and pruned ones, by number
    defaults: dict[str, int | float | bool | str]
    default: FrozenTrial | None  # None where no trial of the defaults is complete
    best: FrozenTrial  # of least error; where trials were confirmed, of least mean error with other seeds
    front: tuple[FrozenTrial, ...]  # complete trials that no other betters in every objective, by error
    recipe: Path
    files: tuple[Path, ...]
    missing_plots: dict[str, str]  # name -> why it could not be drawn
    confirmed_pct: dict[int, list[float]] = field(default_factory=dict)  # trial -> mean error, one per other seed
    test_errors_pct: dict[str, list[float]] = field(default_factory=dict)  # default, tuned -> one per seed

    @property
    def complete(self) -> tuple[FrozenTrial, ...]:
        """Complete trials by error."""
        return by_error(trial for trial in self.trials if trial.state is TrialState.COMPLETE)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "study": self.study_name,
            "storage": self.storage,
            "objectives": list(self.objectives),
            "num_complete": len(self.complete),
            "num_pruned": len(self.trials) - len(self.complete),
            "default_error_pct": None if self.default is None else error_of(self.default),
            "best": _plain(self.best),
            "front": [_plain(trial) for trial in self.front],
            "confirmed_pct": {
                str(number): [error if math.isfinite(error) else None for error in errors]
                for number, errors in self.confirmed_pct.items()
            },
            "test_errors_pct": self.test_errors_pct,
            "recipe": str(self.recipe),
            "files": [str(path) for path in self.files],
            "not_drawn": self.missing_plots,
        }


def _plain(trial: FrozenTrial) -> dict[str, Any]:
    costs = {name: trial.user_attrs[name] for name in (LATENCY_RATIO, SIZE_BYTES) if name in trial.user_attrs}
    return {"trial": trial.number, "error_pct": error_of(trial), **costs, "params": trial.params}


def by_error(trials: Any) -> tuple[FrozenTrial, ...]:
    """Complete trials, of least error first; the earlier of two equal ones."""
    return tuple(sorted(trials, key=lambda trial: (error_of(trial), trial.number)))


def candidates(study: optuna.Study, search: Search, num_trials: int) -> list[FrozenTrial]:
    """The ``num_trials`` complete trials of least error and, to compare with, that of the recipe itself."""
    complete = by_error(study.get_trials(states=(TrialState.COMPLETE,)))
    best = list(complete[:num_trials])
    default = _default_of(complete, search)
    return best if default is None or default in best else [*best, default]


def _default_of(complete: Sequence[FrozenTrial], search: Search) -> FrozenTrial | None:
    """The first trial of the recipe itself."""
    defaults = search.space.defaults(search.recipe)
    return min((t for t in complete if t.params == defaults), key=lambda t: t.number, default=None)


def write_results(
    study: optuna.Study,
    search: Search,
    *,
    out: Path,
    storage: str,
    confirmed_pct: Mapping[int, Sequence[float]] = MappingProxyType({}),
) -> TuneResult:
    """``trials.csv``, ``best.toml``, the plots and, with several objectives, a recipe per trial of the Pareto front.

    With ``confirmed_pct``, errors by other seeds of some trials, ``best.toml`` is the one of them with the least mean.
    Raises GnnpredError where no trial is complete.
    """
    finished = study.get_trials(states=FINISHED)
    complete = by_error(trial for trial in finished if trial.state is TrialState.COMPLETE)
    if not complete:
        raise GnnpredError(f"no trial of study {study.study_name!r} is complete: raise --trials")
    confirmed = [trial for trial in complete if trial.number in confirmed_pct]
    best = min(confirmed, key=lambda trial: mean(confirmed_pct[trial.number]), default=complete[0])
    default = _default_of(confirmed or complete, search)  # compared with the best on like terms
    front = (best,) if search.objectives == (ERROR,) else by_error(study.best_trials)
    out.mkdir(parents=True, exist_ok=True)

    def values_of(trial: FrozenTrial) -> str:
        return _values_text(trial, confirmed_pct.get(trial.number))

    def write_recipe(path: Path, trial: FrozenTrial) -> None:
        comment = f"Trial {trial.number} of {len(finished)} of study {study.study_name}: {values_of(trial)}"
        if default is not None:
            comment += f"\nThe recipe that it was made from: {values_of(default)}"
        settings = with_values(search.recipe, trial.params, where=f"trial {trial.number}")
        with replaced_when_done(path) as partial:
            partial.write_text(recipe_text(settings, comment=comment), encoding="utf-8")

    best_path, csv_path = out / "best.toml", out / "trials.csv"
    write_recipe(best_path, best)
    _write_trials(csv_path, study, search.space, front, confirmed_pct)
    files = [csv_path]
    if search.objectives != (ERROR,):
        files += _write_front(out / PARETO_FOLDER, front, write_recipe)
    plots, missing = write_plots(study, search.objectives, front, out)
    return TuneResult(
        study_name=study.study_name,
        storage=storage,
        objectives=search.objectives,
        trials=tuple(finished),
        defaults=search.space.defaults(search.recipe),
        default=default,
        best=best,
        front=front,
        recipe=best_path,
        files=(*files, *plots),
        missing_plots=missing,
        confirmed_pct={number: list(errors) for number, errors in confirmed_pct.items()},
    )


def _values_text(trial: FrozenTrial, confirmed_pct: Sequence[float] | None) -> str:
    text = f"{error_of(trial):.2f} % mean error over the inner folds"
    if confirmed_pct:
        text += f", {mean(confirmed_pct):.2f} % with {len(confirmed_pct)} other seeds"
    if LATENCY_RATIO in trial.user_attrs:
        text += f", {trial.user_attrs[LATENCY_RATIO]:.2f} times the recipe's latency"
    if SIZE_BYTES in trial.user_attrs:
        text += f", {trial.user_attrs[SIZE_BYTES] / 1e3:.0f} kB"
    return text


def _write_front(folder: Path, front: Sequence[FrozenTrial], write_recipe: Any) -> list[Path]:
    """``NUMBER.toml`` of every trial of the front; those of trials that are no longer on it go."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{trial.number}.toml" for trial in front]
    for path, trial in zip(paths, front, strict=True):
        write_recipe(path, trial)
    for path in folder.glob("*.toml"):
        if path.stem.isdecimal() and path not in paths:
            path.unlink()
    return paths


def _write_trials(
    path: Path,
    study: optuna.Study,
    space: SearchSpace,
    front: Sequence[FrozenTrial],
    confirmed_pct: Mapping[int, Sequence[float]],
) -> None:
    """Every trial of the study, also failed and running ones, one a line."""
    names = [parameter.name for parameter in space.parameters]
    trials = study.get_trials()
    folds = sorted({name for trial in trials for name in trial.user_attrs.get("fold_errors_pct", {})}, key=int)
    is_multi = len(study.directions) > 1
    on_front = {trial.number for trial in front}
    with replaced_when_done(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["trial", "state", "error_pct", "last_error_pct", "folds_done", "seconds", "retry_of"]
            + [LATENCY_RATIO, SIZE_BYTES, "on_front"] * is_multi
            + ["confirmed_error_pct"] * bool(confirmed_pct)
            + [f"fold_{name}_error_pct" for name in folds]
            + names
        )
        for trial in trials:
            values = step_errors(trial)
            fold_errors = trial.user_attrs.get("fold_errors_pct", {})
            latency_ratio = trial.user_attrs.get(LATENCY_RATIO)
            writer.writerow(
                [
                    trial.number,
                    trial.state.name.lower(),
                    "" if trial.state is not TrialState.COMPLETE else f"{error_of(trial):.4f}",
                    f"{values[max(values)]:.4f}" if values else "",
                    len(values),
                    f"{trial.duration.total_seconds():.1f}" if trial.duration else "",
                    trial.user_attrs.get("retry_of", ""),
                ]
                + [
                    "" if latency_ratio is None else f"{latency_ratio:.4f}",
                    trial.user_attrs.get(SIZE_BYTES, ""),
                    int(trial.number in on_front),
                ]
                * is_multi
                + [f"{mean(confirmed_pct[trial.number]):.4f}" if trial.number in confirmed_pct else ""]
                * bool(confirmed_pct)
                + [f"{fold_errors[name]:.4f}" if name in fold_errors else "" for name in folds]
                + [trial.params.get(name, "") for name in names]
            )
