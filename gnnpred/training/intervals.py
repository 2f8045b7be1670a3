"""90 % intervals fitted and calibrated on held-out rows, and how many measured times they hold.

Normalised cross-conformal prediction: a log-linear model of the size of errors (:class:`IntervalModel`), whose
effects have the sign that they must have (more disagreement, a stranger GPU: wider), and quantiles of the errors
divided by it. For the coverage of one fold neither the model nor the quantiles have seen that fold; the scores that
the quantiles are taken of come from models without their own fold as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from gnnpred.errors import GnnpredError
from gnnpred.intervals import INTERVAL_FEATURES, IntervalModel, interval_features
from gnnpred.known_devices import KnownDevices
from gnnpred.training.evaluate import TrackResult, source_family
from gnnpred.training.experiments import Corpus, Fold, folds_of
from gnnpred.training.trees import summed_features

COVERAGE = 0.9
MIN_GROUP_ROWS = 20  # the coverage of a smaller group says little
LOW_COVERAGE = 0.8  # a group below it is called badly covered
MIN_QUANTILE_ROWS = 100  # fewer do not tell quantiles of 5 %
MIN_FOLDS = 3  # with fewer, nothing is left to fit a scale to once two are left out
_RIDGE = 20.0  # rows' worth of pull of each coefficient to 0
# A wider interval where these grow, never a narrower one.
_NOT_NEGATIVE = frozenset(INTERVAL_FEATURES) - {"is_half", "is_tf32", "is_fp64"}


@dataclass(frozen=True)
class Scheme:
    """How the intervals of a regime are fitted."""

    features: tuple[str, ...]
    equal_devices: bool  # every GPU counts alike, however many rows it has
    symmetric: bool  # one quantile of absolute scores: the sign of a new GPU's error is unknown


KNOWN_SCHEME = Scheme(INTERVAL_FEATURES, equal_devices=False, symmetric=False)
# An unseen GPU errs as a whole: 21 held-out ones fit two effects, not eight.
UNSEEN_SCHEME = Scheme(("device_distance", "few_generation_rows"), equal_devices=True, symmetric=True)


def scheme_of(track: str) -> Scheme:
    return UNSEEN_SCHEME if track == "device" else KNOWN_SCHEME


def log_errors(result: TrackResult, corpus: Corpus) -> np.ndarray:
    """(m,) log(measured / predicted) of the predictor that ships."""
    return np.log(corpus.target_ms[result.row_idx] / result.shipped_ms)


def known_devices(corpus: Corpus, row_idx: np.ndarray) -> KnownDevices:
    """The GPUs of those training rows; forward passes do not count."""
    names, counts = np.unique(corpus.devices[row_idx[~corpus.is_inference[row_idx]]], return_counts=True)
    return KnownDevices(dict(zip(names.tolist(), counts.tolist(), strict=True)), corpus.device_specs)


def features_of(result: TrackResult, corpus: Corpus, folds: Sequence[Fold] | None = None) -> np.ndarray:
    """(m, len(INTERVAL_FEATURES)) as ``predict`` would know them with the training rows of each row's fold."""
    folds = list(folds_of(corpus, result.track)) if folds is None else folds
    novelty = np.empty(len(result.row_idx), object)
    devices = corpus.devices[result.row_idx]
    for number, fold in enumerate(folds):
        known = known_devices(corpus, fold.train_idx)
        for device in np.unique(devices[result.fold == number]):
            novelty[(result.fold == number) & (devices == device)] = known.novelty(corpus.device_specs[str(device)])
    gnn, trees = result.predicted_ms.get("gnn"), result.predicted_ms.get("trees")
    apart = np.zeros(len(novelty)) if gnn is None or trees is None else np.log(gnn / trees)
    return interval_features(summed_features(corpus.aware)[result.row_idx], apart, novelty)


def fit_intervals(result: TrackResult, corpus: Corpus) -> IntervalModel:
    """What a checkpoint ships for the regime of the track: fitted to all its folds."""
    return _Fitter(result, corpus).shipped()


def cross_conformal_bounds(result: TrackResult, corpus: Corpus) -> np.ndarray:
    """(m, 2) interval of log(measured / predicted) for each tested row, fitted and calibrated on the other folds.

    Raises GnnpredError where there is a single fold.
    """
    if len(np.unique(result.fold)) < 2:
        raise GnnpredError(f"track {result.track!r} has one fold: no other rows to calibrate its intervals on")
    return _Fitter(result, corpus).cross_conformal()


class _Fitter:
    """Errors and features of a track, from which models without some folds are fitted."""

    def __init__(self, result: TrackResult, corpus: Corpus) -> None:
        self.scheme = scheme_of(result.track)
        self.fold = result.fold
        self.folds = np.unique(result.fold)
        self.error = log_errors(result, corpus)
        self.features = features_of(result, corpus)
        self.weight = np.ones(len(self.error))
        if self.scheme.equal_devices:
            _, device, counts = np.unique(corpus.devices[result.row_idx], return_inverse=True, return_counts=True)
            self.weight = 1.0 / counts[device]

    def scale_without(self, *left_out: int) -> IntervalModel:
        """Model of the size of errors, fitted to the rows of all other folds; quantiles still to come."""
        if len(self.folds) < MIN_FOLDS:
            return IntervalModel.constant(-1.0, 1.0)
        rows = ~np.isin(self.fold, left_out)
        chosen = [INTERVAL_FEATURES.index(name) for name in self.scheme.features]
        found = _fit_log_scale(self.features[rows][:, chosen], np.abs(self.error[rows]), self.weight[rows],
                               np.array([name in _NOT_NEGATIVE for name in self.scheme.features]))  # fmt: skip
        return IntervalModel(
            float(found[0]), dict(zip(self.scheme.features, found[1:].tolist(), strict=True)), (-1.0, 1.0)
        )

    def scores(self, rows: np.ndarray, model_of: Callable[[int], IntervalModel]) -> np.ndarray:
        """(rows,) error / scale, each by the model of its own fold."""
        scores = np.empty(int(rows.sum()))
        own_fold = self.fold[rows]
        for number in np.unique(own_fold):
            own = own_fold == number
            log_scale = model_of(int(number)).log_scale(self.features[rows][own])
            scores[own] = self.error[rows][own] / np.exp(log_scale)
        return scores

    def quantiles(self, scores: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
        tail = (1 - COVERAGE) / 2
        if self.scheme.symmetric:
            high = _weighted_quantile(np.abs(scores), weight, COVERAGE)
            return -high, high
        return _weighted_quantile(scores, weight, tail), _weighted_quantile(scores, weight, 1 - tail)

    def cross_conformal(self) -> np.ndarray:
        pairs = {frozenset(pair): self.scale_without(*pair) for pair in combinations(self.folds.tolist(), 2)}
        bounds = np.empty((len(self.error), 2))
        for number in self.folds.tolist():
            own, other = self.fold == number, self.fold != number
            scores = self.scores(other, lambda of, number=number: pairs[frozenset((of, number))])
            model = self.scale_without(number)
            low, high = self.quantiles(scores, self.weight[other])
            bounds[own] = IntervalModel(model.intercept, model.coefficients, (low, high)).bounds(self.features[own])
        return bounds

    def shipped(self) -> IntervalModel:
        without = {number: self.scale_without(number) for number in self.folds.tolist()}
        everything = np.ones(len(self.error), bool)
        low, high = self.quantiles(self.scores(everything, without.__getitem__), self.weight)
        model = self.scale_without()
        return IntervalModel(model.intercept, model.coefficients, (low, high))


def _fit_log_scale(features: np.ndarray, size: np.ndarray, weight: np.ndarray, not_negative: np.ndarray) -> np.ndarray:
    """(1 + K,) intercept and coefficients of the log of the mean of ``size``: exponential regression, which is convex.

    features (n, K); size (n,) >= 0; weight (n,); not_negative (K,) bool.
    """
    from scipy.optimize import minimize

    design = np.column_stack([np.ones(len(size)), features])
    weight = weight / weight.mean()

    def loss(beta: np.ndarray) -> tuple[float, np.ndarray]:
        log_scale = design @ beta
        ratio = weight * size * np.exp(-log_scale)
        pull = np.r_[0.0, beta[1:]]
        value = (ratio + weight * log_scale).sum() + _RIDGE * (pull**2).sum()
        return float(value), design.T @ (weight - ratio) + 2 * _RIDGE * pull

    start = np.zeros(design.shape[1])
    start[0] = np.log(max(np.average(size, weights=weight), 1e-6))
    bounds = [(-12.0, 6.0), *((0.0 if sign else -6.0, 6.0) for sign in not_negative)]
    return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 200}).x


def _weighted_quantile(values: np.ndarray, weight: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    cumulated = np.cumsum(weight[order]) - weight[order] / 2
    return float(np.interp(share * weight.sum(), cumulated, values[order]))


def coverage_table(result: TrackResult, corpus: Corpus, fold_names: list[str]) -> dict[str, Any]:
    """Share of measured times inside their interval: all, by precision, source, GPU and fold; the interval's width;
    and how even the coverage is over GPUs, beside one interval for all rows (per precision on known GPUs)."""
    error = log_errors(result, corpus)
    bounds = cross_conformal_bounds(result, corpus)
    inside = (error >= bounds[:, 0]) & (error <= bounds[:, 1])
    devices = corpus.devices[result.row_idx]
    keys = {
        "by_precision": corpus.precisions[result.row_idx],
        "by_source": source_family(corpus)[result.row_idx],
        "by_device": devices,
        "by_fold": np.array(fold_names)[result.fold],
    }
    flat = _flat_bounds(result, corpus, error)
    flat_inside = (error >= flat[:, 0]) & (error <= flat[:, 1])
    return {
        "all": _share(inside),
        "median_low_factor": float(np.exp(np.median(bounds[:, 0]))),
        "median_high_factor": float(np.exp(np.median(bounds[:, 1]))),
        "evenness": _evenness(inside, bounds, devices),
        "evenness_of_one_interval": {**_evenness(flat_inside, flat, devices), "share": float(flat_inside.mean())},
        **{name: _shares_by(inside, key) for name, key in keys.items()},
    }


def _flat_bounds(result: TrackResult, corpus: Corpus, error: np.ndarray) -> np.ndarray:
    """(m, 2) what plain quantiles of the other folds give: per precision on known GPUs, of all rows on unseen ones."""
    precision = corpus.precisions[result.row_idx]
    if result.track == "device":
        precision = np.full(len(error), "all")
    bounds = np.empty((len(error), 2))
    for number in np.unique(result.fold):
        own, other = result.fold == number, result.fold != number
        for name in np.unique(precision[own]):
            calibration = error[other & (precision == name)]
            if len(calibration) < MIN_QUANTILE_ROWS:
                calibration = error[other]
            bounds[own & (precision == name)] = np.quantile(calibration, ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    return bounds


def _evenness(inside: np.ndarray, bounds: np.ndarray, devices: np.ndarray) -> dict[str, Any]:
    shares = [s["share"] for s in _shares_by(inside, devices).values()]
    return {
        "num_devices": len(shares),
        "num_badly_covered": sum(share < LOW_COVERAGE for share in shares),
        "lowest_share": min(shares, default=0.0),
        "mean_log_width": float((bounds[:, 1] - bounds[:, 0]).mean()),
    }


def _share(inside: np.ndarray) -> dict[str, Any]:
    return {"n": len(inside), "share": float(inside.mean())}


def _shares_by(inside: np.ndarray, keys: np.ndarray) -> dict[str, dict[str, Any]]:
    names, counts = np.unique(keys, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {str(names[i]): _share(inside[keys == names[i]]) for i in order if counts[i] >= MIN_GROUP_ROWS}
