"""Rows that lie outside what their training rows covered: does the warning that ``predict`` prints mean anything?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gnnpred.features import GLOBAL_FEATURE_NAMES, NUM_KINDS
from gnnpred.known_devices import device_warnings
from gnnpred.metrics import summarise_errors
from gnnpred.training.data import FlatRows
from gnnpred.training.evaluate import TrackResult
from gnnpred.training.experiments import Corpus, Fold
from gnnpred.training.intervals import known_devices

# The same limits as the warnings of a checkpoint: they are kept in its card from all training rows.
RANGE_FEATURES = ("log_batch", "log_physics_ms", "log_launches")
RANGE_QUANTILES = (0.001, 0.999)
LAUNCH_FEATURE, LAUNCH_QUANTILE = "log_host_to_gpu", 0.98
DEVICE_REASONS = ("unseen_vendor", "unseen_generation", "far_specification")
WARNING_TEXTS = {
    "size": "batch, roofline time or number of kernels beyond the middle 99.8 % of training",
    "op_kinds": "op kinds that no training run had",
    "precision": "a precision that no training run had",
    "launch_bound": "launch-bound as hardly a training run",
    "unseen_vendor": "GPU of a vendor that training lacks",
    "unseen_generation": "GPU of a generation that training lacks",
    "far_specification": "no well-known GPU has a like specification",
}
MAX_UNSEEN_KIND_SHARE = 0.02
_TOLERANCE = 1e-6


def roofline_by_class(rows: FlatRows, class_idx: np.ndarray, num_classes: int) -> np.ndarray:
    """(num_rows, num_classes) float64 ms: roofline time of each row's nodes by their class; class_idx (num_nodes,)."""
    row_of_node = np.repeat(np.arange(rows.num_rows), np.diff(rows.node_start))
    roofline_ms = rows.physics_ms.sum(1).astype(np.float64) * rows.count
    slot = row_of_node * num_classes + class_idx
    return np.bincount(slot, roofline_ms, minlength=rows.num_rows * num_classes).reshape(-1, num_classes)


def training_ranges(corpus: Corpus, row_idx: np.ndarray) -> dict[str, tuple[float, float]]:
    """What those training rows cover of the features that a checkpoint watches; ``row_idx`` without forward passes.

    Launch-bound is a step whose launches take longer than the work of the GPU, where fewer than 2 % of the training
    rows are as launch-bound as that.
    """
    column = {name: corpus.aware.globals[row_idx, GLOBAL_FEATURE_NAMES.index(name)] for name in RANGE_FEATURES}
    ranges = {name: tuple(float(v) for v in np.quantile(column[name], RANGE_QUANTILES)) for name in RANGE_FEATURES}
    host = corpus.aware.globals[row_idx, GLOBAL_FEATURE_NAMES.index(LAUNCH_FEATURE)]
    ranges[LAUNCH_FEATURE] = (float(host.min()), max(0.0, float(np.quantile(host, LAUNCH_QUANTILE))))
    return ranges


def warning_flags(corpus: Corpus, fold: Fold) -> dict[str, np.ndarray]:
    """Reason -> (num_test,) bool: which rows of the fold ``predict`` would warn of, knowing the fold's training rows.

    That the GPU itself is unseen is no reason here: on that track it always is.
    """
    training = fold.train_idx[~corpus.is_inference[fold.train_idx]]
    tested = corpus.aware.globals[fold.test_idx]
    ranges = training_ranges(corpus, training)

    def column(name: str) -> np.ndarray:
        return tested[:, GLOBAL_FEATURE_NAMES.index(name)]

    size = np.zeros(len(fold.test_idx), bool)
    for name in RANGE_FEATURES:
        low, high = ranges[name]
        size |= (column(name) < low - _TOLERANCE) | (column(name) > high + _TOLERANCE)
    by_kind = roofline_by_class(corpus.aware, corpus.aware.kind_idx, NUM_KINDS)
    is_known = (by_kind[fold.train_idx] > 0).any(0)
    unseen_share = by_kind[fold.test_idx][:, ~is_known].sum(1) / by_kind[fold.test_idx].sum(1)
    known = known_devices(corpus, fold.train_idx)
    devices = corpus.devices[fold.test_idx]
    of_device = {name: device_warnings(known, corpus.device_specs[str(name)]) for name in np.unique(devices)}
    return {
        "size": size,
        "op_kinds": unseen_share > MAX_UNSEEN_KIND_SHARE,
        "precision": ~np.isin(corpus.precisions[fold.test_idx], np.unique(corpus.precisions[fold.train_idx])),
        "launch_bound": column(LAUNCH_FEATURE) > ranges[LAUNCH_FEATURE][1] + _TOLERANCE,
        **{reason: np.array([reason in of_device[name] for name in devices], bool) for reason in DEVICE_REASONS},
    }


def out_of_range(corpus: Corpus, fold: Fold) -> np.ndarray:
    """(num_test,) bool: batch, roofline time or kernel count beyond the fold's training rows, an op kind or a
    precision that none of them had."""
    flags = warning_flags(corpus, fold)
    return flags["size"] | flags["op_kinds"] | flags["precision"]


def range_table(result: TrackResult, corpus: Corpus, folds: Sequence[Fold]) -> dict[str, Any]:
    """Errors of rows with and without a warning, and with each reason; an empty side is left out."""
    by_fold = [warning_flags(corpus, fold) for fold in folds]
    flags = {reason: np.concatenate([flags[reason] for flags in by_fold]) for reason in by_fold[0]}
    warned = np.logical_or.reduce(list(flags.values()))
    measured = corpus.target_ms[result.row_idx]

    def summaries(sides: dict[str, np.ndarray]) -> dict[str, Any]:
        return {
            name: summarise_errors(result.shipped_ms[side], measured[side]).as_dict()
            for name, side in sides.items()
            if side.any()
        }

    return {**summaries({"warned": warned, "not_warned": ~warned}), "by_reason": summaries(flags)}
