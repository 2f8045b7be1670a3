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


def node_rows(rows: FlatRows) -> np.ndarray:
    """(num_nodes,) int64: the row of each node."""
    return np.repeat(np.arange(rows.num_rows), np.diff(rows.node_start))


def node_roofline_ms(rows: FlatRows) -> np.ndarray:
    """(num_nodes,) float64: roofline time of each node, all that it stands for."""
    return rows.physics_ms.sum(1).astype(np.float64) * rows.count


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
    row_of_node = node_rows(corpus.aware)
    is_known = np.zeros(NUM_KINDS, bool)
    is_known[corpus.aware.kind_idx[np.isin(row_of_node, fold.train_idx)]] = True
    roofline = node_roofline_ms(corpus.aware)
    total = np.bincount(row_of_node, roofline, minlength=corpus.aware.num_rows)
    unseen = np.bincount(row_of_node, roofline * ~is_known[corpus.aware.kind_idx], minlength=corpus.aware.num_rows)
    return flags | (unseen[fold.test_idx] > MAX_UNSEEN_KIND_SHARE * total[fold.test_idx])


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
