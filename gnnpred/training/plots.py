"""Parity plots: predicted against measured time on held-out rows."""

from pathlib import Path

import numpy as np

from gnnpred.files import replaced_when_done
from gnnpred.training.evaluate import TrackResult
from gnnpred.training.experiments import Corpus

_COLOURS = {
    "fp32": "#1b6ca8", "tf32": "#3fa796", "fp16": "#d1495b", "mixed": "#edae49", "fp64": "#8d6a9f", "bf16": "#555555",
}  # fmt: skip
PLOTTED_TRACKS = {"architecture": "unseen architecture", "family": "unseen family", "device": "unseen GPU"}


def write_parity_plots(folder: Path, results: dict[str, TrackResult], corpus: Corpus) -> list[Path]:
    """One PNG per track with a panel per predictor; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for track, title in PLOTTED_TRACKS.items():
        if track not in results:
            continue
        result = results[track]
        names = [name for name in ("ensemble", "gnn", "trees", "roofline") if name in result.predicted_ms]
        figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4.6), squeeze=False, sharey=True)
        measured = corpus.target_ms[result.row_idx]
        precision = corpus.precisions[result.row_idx]
        limits = (measured.min() * 0.5, measured.max() * 2)
        for axis, name in zip(axes[0], names, strict=True):
            predicted = result.predicted_ms[name]
            for label in [p for p in _COLOURS if np.any(precision == p)]:
                own = precision == label
                axis.scatter(measured[own], predicted[own], s=4, alpha=0.35, color=_COLOURS[label], label=label, lw=0)
            axis.plot(limits, limits, color="black", lw=0.8)
            axis.set(xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="measured step, ms")
            error = np.abs(predicted / measured - 1) * 100
            axis.set_title(f"{name}: MAPE {error.mean():.1f} %, median {np.median(error):.1f} %", fontsize=10)
        axes[0][0].set_ylabel("predicted step, ms")
        legend = axes[0][0].legend(markerscale=4, fontsize=8, frameon=False)
        for handle in legend.legend_handles:
            handle.set_alpha(1)
        figure.suptitle(f"{title}, n = {len(measured):,}")
        figure.tight_layout()
        path = folder / f"parity-{track}.png"
        with replaced_when_done(path) as partial:
            figure.savefig(partial, dpi=110, format="png")
        pyplot.close(figure)
        paths.append(path)
    return paths
