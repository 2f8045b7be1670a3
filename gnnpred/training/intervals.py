"""90 % intervals calibrated on held-out rows, and how many measured times they hold."""

from typing import Any

import numpy as np

from gnnpred.errors import GnnpredError
from gnnpred.training.evaluate import PRECISION_GROUPS, TrackResult, source_family
from gnnpred.training.experiments import Corpus

INTERVAL_QUANTILES = (0.05, 0.95)
MIN_INTERVAL_ROWS = 100  # a regime with fewer rows borrows the interval of all
MIN_GROUP_ROWS = 20  # the coverage of a smaller group says little


def conformal_intervals(result: TrackResult, corpus: Corpus) -> dict[str, tuple[float, float]]:
    """5 % and 95 % quantile of log(measured / predicted), over all rows and per precision."""
    error = log_errors(result, corpus)
    intervals = {"all": _quantiles(error)}
    for precision in PRECISION_GROUPS:
        own = error[corpus.precisions[result.row_idx] == precision]
        if len(own) >= MIN_INTERVAL_ROWS:
            intervals[precision] = _quantiles(own)
    return intervals


def log_errors(result: TrackResult, corpus: Corpus) -> np.ndarray:
    """(m,) log(measured / predicted) of the predictor that ships."""
    return np.log(corpus.target_ms[result.row_idx] / result.shipped_ms)


def _quantiles(error: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(error, INTERVAL_QUANTILES)
    return float(low), float(high)


def cross_conformal_bounds(result: TrackResult, corpus: Corpus) -> np.ndarray:
    """(m, 2) interval of log(measured / predicted) for each tested row, calibrated on the other folds.

    Per precision, as the checkpoint does for a GPU that it knows; on unseen GPUs over all precisions together, as the
    checkpoint does there. Raises GnnpredError where there is a single fold.
    """
    if len(np.unique(result.fold)) < 2:
        raise GnnpredError(f"track {result.track!r} has one fold: no other rows to calibrate its intervals on")
    error = log_errors(result, corpus)
    precision = corpus.precisions[result.row_idx]
    if result.track == "device":
        precision = np.full(len(error), "all")
    bounds = np.empty((len(error), 2))
    for fold in np.unique(result.fold):
        own, other = result.fold == fold, result.fold != fold
        for name in np.unique(precision[own]):
            calibration = error[other & (precision == name)]
            if len(calibration) < MIN_INTERVAL_ROWS:
                calibration = error[other]
            bounds[own & (precision == name)] = _quantiles(calibration)
    return bounds


def coverage_table(result: TrackResult, corpus: Corpus, fold_names: list[str]) -> dict[str, Any]:
    """Share of measured times inside their interval: all, by precision, source and fold; and the interval's width."""
    error = log_errors(result, corpus)
    bounds = cross_conformal_bounds(result, corpus)
    inside = (error >= bounds[:, 0]) & (error <= bounds[:, 1])
    keys = {
        "by_precision": corpus.precisions[result.row_idx],
        "by_source": source_family(corpus)[result.row_idx],
        "by_fold": np.array(fold_names)[result.fold],
    }
    return {
        "all": _share(inside),
        "median_low_factor": float(np.exp(np.median(bounds[:, 0]))),
        "median_high_factor": float(np.exp(np.median(bounds[:, 1]))),
        **{name: _shares_by(inside, key) for name, key in keys.items()},
    }


def _share(inside: np.ndarray) -> dict[str, Any]:
    return {"n": len(inside), "share": float(inside.mean())}


def _shares_by(inside: np.ndarray, keys: np.ndarray) -> dict[str, dict[str, Any]]:
    names, counts = np.unique(keys, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {str(names[i]): _share(inside[keys == names[i]]) for i in order if counts[i] >= MIN_GROUP_ROWS}
