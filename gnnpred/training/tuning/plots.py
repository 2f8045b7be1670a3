"""Plots of a study: history, parameter importances, parallel coordinates and, of several objectives, the front."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from gnnpred.files import replaced_when_done
from gnnpred.training.tuning.costs import ERROR, LATENCY, LATENCY_RATIO, SIZE, SIZE_BYTES
from gnnpred.training.tuning.trials import error_of

_COST_AXES = {
    LATENCY: (LATENCY_RATIO, 1.0, "latency of a prediction, times the recipe's"),
    SIZE: (SIZE_BYTES, 1e-3, "weights, kB"),
}


def write_plots(
    study: optuna.Study, objectives: Sequence[str], front: Sequence[FrozenTrial], out: Path
) -> tuple[list[Path], dict[str, str]]:
    """PNG files in ``out``; plots of the error that need more trials are named with the reason."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as drawing

    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    target = None if len(study.directions) == 1 else error_of
    paths: list[Path] = []
    missing: dict[str, str] = {}
    drawn: dict[str, Callable[..., Any]] = {
        "history": drawing.plot_optimization_history,
        "importances": drawing.plot_param_importances,
        "parallel": drawing.plot_parallel_coordinate,
    }
    for name, draw in drawn.items():
        if name != "history" and len({error_of(trial) for trial in complete}) < 2:
            missing[name] = "needs two complete trials that differ"
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layouts; the figure is there all the same
            target_name = "importance for the error" if name == "importances" else "error %"
            figure = draw(study, target=target, target_name=target_name).figure
            figure.set_size_inches(12 if name == "parallel" else 8, 5)
            paths.append(_save(figure, out / f"{name}.png"))
        pyplot.close(figure)
    if tuple(objectives) != (ERROR,):
        figure = _draw_front(pyplot, complete, objectives, front)
        paths.append(_save(figure, out / "pareto.png"))
        pyplot.close(figure)
    return paths, missing


def _draw_front(
    pyplot: Any, complete: Sequence[FrozenTrial], objectives: Sequence[str], front: Sequence[FrozenTrial]
) -> Any:
    """A panel per cost: complete trials, those of the front in colour with their numbers."""
    costs = [name for name in objectives if name != ERROR]
    figure, axes = pyplot.subplots(1, len(costs), figsize=(6 * len(costs), 5), squeeze=False, sharey=True)
    on_front = {trial.number for trial in front}
    others = [trial for trial in complete if trial.number not in on_front]
    for axis, name in zip(axes[0], costs, strict=True):
        attribute, scale, label = _COST_AXES[name]
        for trials, colour, legend in ((others, "#999999", "other trials"), (front, "#d1495b", "Pareto front")):
            x = [trial.user_attrs[attribute] * scale for trial in trials]
            axis.scatter(x, [error_of(trial) for trial in trials], s=22, color=colour, label=legend)
        for trial in front:
            at = (trial.user_attrs[attribute] * scale, error_of(trial))
            axis.annotate(str(trial.number), at, xytext=(4, 4), textcoords="offset points", fontsize=8)
        axis.set_xlabel(label)
    axes[0][0].set_ylabel("mean error over the inner folds, %")
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def _save(figure: Any, path: Path) -> Path:
    with replaced_when_done(path) as partial:
        figure.savefig(partial, dpi=110, format="png", bbox_inches="tight")
    return path
