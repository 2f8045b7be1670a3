"""One vector per graph and job: what the boosted trees of a checkpoint read."""

import numpy as np

from gnnpred.features import CATEGORIES, COMPONENTS, GLOBAL_FEATURE_NAMES, NODE_FEATURE_NAMES

_FIRST_CATEGORY = NODE_FEATURE_NAMES.index(f"category_{CATEGORIES[0]}")
_AVERAGED = NODE_FEATURE_NAMES[:_FIRST_CATEGORY]

SUMMARY_FEATURE_NAMES: tuple[str, ...] = (
    *GLOBAL_FEATURE_NAMES,
    *(f"share_{c}" for c in COMPONENTS),
    *(f"share_{c}" for c in CATEGORIES),
    *(f"mean_{name}" for name in _AVERAGED),
    "log_roofline_ms",
)


def roofline_ms(physics_ms: np.ndarray, count: np.ndarray, node_start: np.ndarray) -> np.ndarray:
    """Sum over ops of max(flops / peak, bytes / bandwidth) with the launch floor, (B,) float64.

    physics_ms (N, C), count (N,) of all graphs side by side; node_start (B,) is the first node of each.
    """
    return np.add.reduceat(physics_ms.sum(1).astype(np.float64) * count, node_start)


def summarise_graphs(
    node_features: np.ndarray,
    physics_ms: np.ndarray,
    count: np.ndarray,
    globals_: np.ndarray,
    node_start: np.ndarray,
) -> np.ndarray:
    """(B, len(SUMMARY_FEATURE_NAMES)) float32 of B graphs whose nodes stand side by side.

    Globals as they are, shares of the roofline time by component and op category, and the node features' means
    weighted by roofline time. node_features (N, F), physics_ms (N, C), count (N,), globals_ (B, G), node_start (B,).
    """
    physics = physics_ms.astype(np.float64) * count[:, None]
    node_ms = physics.sum(1)
    total_ms = np.add.reduceat(node_ms, node_start)[:, None]
    weighted = node_features[:, : _FIRST_CATEGORY + len(CATEGORIES)].astype(np.float64) * node_ms[:, None]
    means = np.add.reduceat(weighted, node_start) / total_ms
    return np.concatenate(
        [
            globals_,
            np.add.reduceat(physics, node_start) / total_ms,
            means[:, _FIRST_CATEGORY:],
            means[:, :_FIRST_CATEGORY],
            np.log(total_ms),
        ],
        axis=1,
    ).astype(np.float32)
