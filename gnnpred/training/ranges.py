"""Rows that lie outside what their training rows covered: does the warning that ``predict`` prints mean anything?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gnnpred.features import GLOBAL_FEATURE_NAMES, NUM_KINDS
from gnnpred.metrics import summarise_errors
from gnnpred.training.data import FlatRows
from gnnpred.training.evaluate import TrackResult
from gnnpred.training.experiments import Corpus, Fold

# The same limits as the warnings of a checkpoint: they are kept in its card from all training rows.
RANGE_FEATURES = ("log_batch", "log_physics_ms", "log_launches")
RANGE_QUANTILES = (0.001, 0.999)
MAX_UNSEEN_KIND_SHARE = 0.02
_TOLERANCE = 1e-6


def roofline_by_class(rows: FlatRows, class_idx: np.ndarray, num_classes: int) -> np.ndarray:
    """(num_rows, num_classes) float64 ms: roofline time of each row's nodes by their class; class_idx (num_nodes,)."""
    row_of_node = np.repeat(np.arange(rows.num_rows), np.diff(rows.node_start))
    roofline_ms = rows.physics_ms.sum(1).astype(np.float64) * rows.count
    slot = row_of_node * num_classes + class_idx
    return np.bincount(slot, roofline_ms, minlength=rows.num_rows * num_classes).reshape(-1, num_classes)


def out_of_range(corpus: Corpus, fold: Fold) -> np.ndarray:
    """(num_test,) bool: batch, roofline time or kernel count beyond the fold's training rows, an op kind or a
    precision that none of them had. That the GPU itself is unseen is no reason here: on that track it always is."""
    training = fold.train_idx[~corpus.is_inference[fold.train_idx]]
    flags = np.zeros(len(fold.test_idx), bool)
    for name in RANGE_FEATURES:
        column = corpus.aware.globals[:, GLOBAL_FEATURE_NAMES.index(name)]
        low, high = np.quantile(column[training], RANGE_QUANTILES)
        flags |= (column[fold.test_idx] < low - _TOLERANCE) | (column[fold.test_idx] > high + _TOLERANCE)
    flags |= ~np.isin(corpus.precisions[fold.test_idx], np.unique(corpus.precisions[fold.train_idx]))
    by_kind = roofline_by_class(corpus.aware, corpus.aware.kind_idx, NUM_KINDS)
    is_known = (by_kind[fold.train_idx] > 0).any(0)
    unseen_share = by_kind[fold.test_idx][:, ~is_known].sum(1) / by_kind[fold.test_idx].sum(1)
    return flags | (unseen_share > MAX_UNSEEN_KIND_SHARE)


def range_table(result: TrackResult, corpus: Corpus, folds: Sequence[Fold]) -> dict[str, Any]:
    """Errors of rows with and without a range warning; an empty side is left out."""
    flagged = np.concatenate([out_of_range(corpus, fold) for fold in folds])
    measured = corpus.target_ms[result.row_idx]
    sides = {"warned": flagged, "not_warned": ~flagged}
    return {
        name: summarise_errors(result.shipped_ms[side], measured[side]).as_dict()
        for name, side in sides.items()
        if side.any()
    }
