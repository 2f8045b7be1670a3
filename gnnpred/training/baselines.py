"""Baselines that stand beside the GNN in every table: what simpler predictors reach on the same rows."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gnnpred.features import CATEGORIES, NODE_FEATURE_NAMES
from gnnpred.training.data import FlatRows


def roofline_ms(rows: FlatRows) -> np.ndarray:
    """Sum over ops of max(flops / peak, bytes / bandwidth) with the launch floor, (num_rows,) ms."""
    per_node = rows.physics_ms.sum(1).astype(np.float64) * rows.count
    return np.add.reduceat(per_node, rows.node_start[:-1])


def fit_roofline_constants(
    roofline: np.ndarray, target_ms: np.ndarray, groups: Sequence[tuple[str, str]], train_idx: np.ndarray
) -> dict[tuple[str, str], float]:
    """Median of measured / roofline per (device, precision), per precision (device "") and over all ("", "")."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for i in train_idx:
        device, precision = groups[i]
        ratio = float(target_ms[i] / roofline[i])
        for key in ((device, precision), ("", precision), ("", "")):
            ratios[key].append(ratio)
    return {key: float(np.median(values)) for key, values in ratios.items()}


def predict_roofline(
    roofline: np.ndarray, groups: Sequence[tuple[str, str]], constants: dict[tuple[str, str], float], idx: np.ndarray
) -> np.ndarray:
    """Roofline times the constant of the row's device and precision, else of its precision, else of all."""
    predicted = np.empty(len(idx))
    for out, i in enumerate(idx):
        device, precision = groups[i]
        constant = constants.get((device, precision)) or constants.get(("", precision)) or constants[("", "")]
        predicted[out] = roofline[i] * constant
    return predicted


def summed_features(rows: FlatRows) -> np.ndarray:
    """One vector per row for the tree baseline, (num_rows, K): globals and physics summed by op class."""
    start = rows.node_start[:-1]
    physics = rows.physics_ms.astype(np.float64) * rows.count[:, None]
    first = NODE_FEATURE_NAMES.index(f"category_{CATEGORIES[0]}")
    category = rows.node_features[:, first : first + len(CATEGORIES)].astype(np.float64)
    total = np.add.reduceat(physics.sum(1), start)
    by_component = np.add.reduceat(physics, start) / total[:, None]
    by_category = np.add.reduceat(category * physics.sum(1)[:, None], start) / total[:, None]
    flags = [NODE_FEATURE_NAMES.index(n) for n in ("is_depthwise", "m_mod8", "n_mod8", "wave_efficiency")]
    flag_shares = np.add.reduceat(rows.node_features[:, flags] * physics.sum(1)[:, None], start) / total[:, None]
    means = (
        np.add.reduceat(rows.node_features[:, :first].astype(np.float64) * physics.sum(1)[:, None], start)
        / total[:, None]
    )
    return np.concatenate(
        [rows.globals, by_component, by_category, flag_shares, means, np.log(total)[:, None]], axis=1
    ).astype(np.float32)


def fit_trees(features: np.ndarray, log_ratio: np.ndarray, train_idx: np.ndarray, *, seed: int = 0):
    """Gradient-boosted trees on log(measured / roofline); a scikit-learn regressor."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    trees = HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=400, learning_rate=0.06, max_leaf_nodes=31, min_samples_leaf=10,
        l2_regularization=1.0, random_state=seed,
    )  # fmt: skip
    return trees.fit(features[train_idx], log_ratio[train_idx])
