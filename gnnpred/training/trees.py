"""Gradient-boosted trees on summed features: a baseline, and the second member of a checkpoint."""

import numpy as np
from onnx import TensorProto, checker, helper

from gnnpred.graph_summary import SUMMARY_FEATURE_NAMES, roofline_ms, summarise_graphs
from gnnpred.training.data import FlatRows

OPSET = 18
OPSET_ML = 3
IR_VERSION = 10  # what the oldest onnxruntime that we support reads


def summed_features(rows: FlatRows) -> np.ndarray:
    """(num_rows, len(SUMMARY_FEATURE_NAMES)) float32."""
    return summarise_graphs(rows.node_features, rows.physics_ms, rows.count, rows.globals, rows.node_start[:-1])


def roofline_of(rows: FlatRows) -> np.ndarray:
    """Roofline time of every row, (num_rows,) ms."""
    return roofline_ms(rows.physics_ms, rows.count, rows.node_start[:-1])


def fit_trees(features: np.ndarray, log_ratio: np.ndarray, train_idx: np.ndarray, *, seed: int = 0):
    """Gradient-boosted trees on log(measured / roofline); a scikit-learn regressor."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    trees = HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=400, learning_rate=0.06, max_leaf_nodes=31, min_samples_leaf=10,
        l2_regularization=1.0, random_state=seed,
    )  # fmt: skip
    return trees.fit(features[train_idx], log_ratio[train_idx])


def export_trees(trees) -> bytes:
    """The regressor as an ONNX TreeEnsemble: features (B, K) float32 -> log_ratio (B, 1) float32.

    Written node by node: skl2onnx 1.20 fails on these trees with current onnx. A checkpoint's golden examples compare
    the result with scikit-learn.
    """
    columns = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    nodes: dict[str, list] = {name: [] for name in columns}
    leaves: dict[str, list] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}
    for tree_idx, (tree,) in enumerate(trees._predictors):
        for node_idx, node in enumerate(tree.nodes):
            is_leaf = bool(node["is_leaf"])
            row = (
                tree_idx, node_idx, int(node["feature_idx"]), float(_float32_below(node["num_threshold"])),
                "LEAF" if is_leaf else "BRANCH_LEQ", int(node["left"]), int(node["right"]),
            )  # fmt: skip
            for name, value in zip(columns, row, strict=True):
                nodes[name].append(value)
            if is_leaf:
                for name, value in zip(leaves, (tree_idx, node_idx, 0, float(node["value"])), strict=True):
                    leaves[name].append(value)
    ensemble = helper.make_node(
        "TreeEnsembleRegressor", ["features"], ["log_ratio"], domain="ai.onnx.ml", n_targets=1,
        aggregate_function="SUM", post_transform="NONE", base_values=[float(trees._baseline_prediction.item())],
        **{f"nodes_{name}": values for name, values in nodes.items()},
        **{f"target_{name}": values for name, values in leaves.items()},
    )  # fmt: skip
    graph = helper.make_graph(
        [ensemble],
        "trees",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, [None, len(SUMMARY_FEATURE_NAMES)])],
        [helper.make_tensor_value_info("log_ratio", TensorProto.FLOAT, [None, 1])],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", OPSET_ML)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="gnnpred")
    checker.check_model(model)
    return model.SerializeToString()


def _float32_below(threshold: float) -> np.float32:
    """The largest float32 that is not above: float32 features then take the branch that scikit-learn takes."""
    rounded = np.float32(threshold)
    return rounded if rounded <= threshold else np.nextafter(rounded, np.float32(-np.inf))
