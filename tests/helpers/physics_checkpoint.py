"""A checkpoint folder whose network answers with the physics: loads and verifies like a trained one, needs no torch."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from gnnpred.checkpoint import arrays_to_json
from gnnpred.costs import op_costs
from gnnpred.features import (
    COMPONENTS,
    FEATURE_SCHEMA_VERSION,
    GLOBAL_FEATURE_NAMES,
    NODE_FEATURE_NAMES,
    encode,
    graph_structure,
)
from gnnpred.hardware import find_device
from gnnpred.intervals import KNOWN_DEVICE, UNSEEN_DEVICE, IntervalModel
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.op_kinds import OP_KINDS
from gnnpred.passes.step import complete_step, lower_forward
from tests.helpers.graphs import tiny_cnn

_FLOAT, _INT = TensorProto.FLOAT, TensorProto.INT64
_INPUTS = (
    ("node_features", _FLOAT, ["n", len(NODE_FEATURE_NAMES)]), ("kind_idx", _INT, ["n"]),
    ("physics_ms", _FLOAT, ["n", len(COMPONENTS)]), ("count", _FLOAT, ["n"]), ("in_edges", _INT, [2, "e"]),
    ("out_edges", _INT, [2, "f"]), ("globals", _FLOAT, [1, len(GLOBAL_FEATURE_NAMES)]), ("specs_known", _FLOAT, [1]),
    ("host_launches", _FLOAT, [1]), ("host_copy_ms", _FLOAT, [1]),
)  # fmt: skip
_OUTPUTS = (("op_ms", _FLOAT, ["n", "c"]), ("step_ms", _FLOAT, [1]))


def write_physics_checkpoint(folder: Path, *, devices: Sequence[str], name: str = "physics") -> Path:
    """op_ms = physics_ms, step_ms = sum of physics_ms x count; interval 0.8 to 1.25, twice as wide for unseen GPUs."""
    nodes = [
        helper.make_node("Identity", ["physics_ms"], ["op_ms"]),
        helper.make_node("ReduceSum", ["physics_ms", "axis"], ["node_ms"], keepdims=0),
        helper.make_node("Mul", ["node_ms", "count"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted"], ["step_ms"], keepdims=1),
    ]
    graph = helper.make_graph(
        nodes, "physics", [helper.make_tensor_value_info(*fields) for fields in _INPUTS],
        [helper.make_tensor_value_info(*fields) for fields in _OUTPUTS],
        [helper.make_tensor("axis", _INT, [1], [1])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    content = model.SerializeToString()
    step = complete_step(
        lower_forward(tiny_cnn(), batch_size=8, precision=Precision.FP32), phase=Phase.TRAIN, optimizer="sgd"
    )
    arrays = encode(graph_structure(step, op_costs(step)), JobSpec(device=find_device("V100")))
    step_ms = float((arrays.physics_ms.sum(1) * arrays.count).sum())
    golden = {"examples": [{"name": "tiny", "specs_known": True, "step_ms": step_ms, "arrays": arrays_to_json(arrays)}]}
    card = {
        "name": name, "feature_schema": FEATURE_SCHEMA_VERSION, "model_sha256": hashlib.sha256(content).hexdigest(),
        "trees_sha256": "", "tree_weight": 0.0, "default_framework_version": "2.1", "devices": sorted(devices),
        "device_rows": dict.fromkeys(devices, 500),
        "intervals": {
            KNOWN_DEVICE: IntervalModel.constant(-0.22, 0.22).as_dict(),
            UNSEEN_DEVICE: IntervalModel.constant(-0.44, 0.44).as_dict(),
        },
        "global_ranges": {"log_batch": [0, 12], "log_physics_ms": [-9, 19], "log_launches": [0, 19]},
        "known_kinds": list(OP_KINDS), "op_kinds": list(OP_KINDS), "node_features": list(NODE_FEATURE_NAMES),
        "global_features": list(GLOBAL_FEATURE_NAMES),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(content)
    (folder / "golden.json").write_text(json.dumps(golden))
    (folder / "card.json").write_text(json.dumps(card))
    return folder
