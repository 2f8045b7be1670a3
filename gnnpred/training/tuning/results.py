"""What a study leaves: the best recipe, the table of trials, plots."""

import csv
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done
from gnnpred.training.experiments import RecipeSettings
from gnnpred.training.recipe import recipe_text, with_values
from gnnpred.training.search_space import SearchSpace
from gnnpred.training.tuning.pruning import FINISHED


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
