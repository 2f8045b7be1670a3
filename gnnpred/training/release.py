"""Trained networks -> a checkpoint folder that runs without torch."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from gnnpred.checkpoint import Checkpoint, CheckpointCard, arrays_to_json, blend
from gnnpred.features import (
    FEATURE_SCHEMA_VERSION,
    GLOBAL_FEATURE_NAMES,
    NODE_FEATURE_NAMES,
    NUM_COMPONENTS,
    GraphArrays,
)
from gnnpred.files import replaced_when_done
from gnnpred.graph_summary import SUMMARY_FEATURE_NAMES
from gnnpred.op_kinds import OP_KINDS
from gnnpred.training.data import FlatRows
from gnnpred.training.model import GraphBatch, StepTimeGNN
from gnnpred.training.trees import export_trees, roofline_of, summed_features

OPSET = 18
_INPUT_NAMES = (
    "node_features", "kind_idx", "physics_ms", "count", "in_edges", "out_edges", "globals", "specs_known",
    "host_launches", "host_copy_ms",
)  # fmt: skip


class SingleGraphEnsemble(nn.Module):
    """Members' answers for one graph, combined by their shares: geometric mean of step times, mean of op times."""

    def __init__(self, members: Sequence[StepTimeGNN], shares: np.ndarray) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.shares = [float(share) for share in shares]

    def forward(
        self, node_features: Tensor, kind_idx: Tensor, physics_ms: Tensor, count: Tensor, in_edges: Tensor,
        out_edges: Tensor, globals: Tensor, specs_known: Tensor, host_launches: Tensor, host_copy_ms: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Op times (N, C) and step time (1,), ms."""
        batch = GraphBatch(
            node_features, kind_idx, physics_ms, count, torch.zeros_like(kind_idx), in_edges, out_edges, globals,
            specs_known, host_launches, host_copy_ms,
        )  # fmt: skip
        op_ms, log_step = [], []
        for member, share in zip(self.members, self.shares, strict=True):
            member_op_ms, member_step_ms, _ = member(batch)
            op_ms.append(member_op_ms * share)
            log_step.append(torch.log(member_step_ms) * share)
        return torch.stack(op_ms).sum(0), torch.exp(torch.stack(log_step).sum(0))


def export_onnx(members: Sequence[StepTimeGNN], shares: np.ndarray) -> bytes:
    """The ensemble as a self-contained ONNX file with dynamic node and edge counts; shares (m,) sum to 1."""
    num_nodes, num_edges = 5, 7
    example = (
        torch.zeros(num_nodes, len(NODE_FEATURE_NAMES)), torch.zeros(num_nodes, dtype=torch.int64),
        torch.ones(num_nodes, NUM_COMPONENTS), torch.ones(num_nodes),
        torch.zeros(2, num_edges, dtype=torch.int64), torch.zeros(2, num_edges + 1, dtype=torch.int64),
        torch.zeros(1, len(GLOBAL_FEATURE_NAMES)), torch.ones(1), torch.ones(1), torch.ones(1),
    )  # fmt: skip
    nodes, in_count, out_count = (torch.export.Dim(name) for name in ("nodes", "in_edges_count", "out_edges_count"))
    shapes = ({0: nodes}, {0: nodes}, {0: nodes}, {0: nodes}, {1: in_count}, {1: out_count}, *[None] * 4)
    program = torch.onnx.export(
        SingleGraphEnsemble(members, shares).eval(), example, dynamo=True, opset_version=OPSET, verbose=False,
        input_names=list(_INPUT_NAMES), output_names=["op_ms", "step_ms"], dynamic_shapes=shapes,
    )  # fmt: skip
    model = program.model_proto
    for node in model.graph.node:  # stack traces with local paths
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    del model.metadata_props[:]
    buffer = io.BytesIO()
    onnx.save_model(model, buffer)
    return buffer.getvalue()


def write_checkpoint(
    folder: Path,
    *,
    name: str,
    members: Sequence[StepTimeGNN],
    shares: np.ndarray,
    trees: Any | None = None,
    tree_weight: float = 0.0,
    golden: Mapping[str, tuple[GraphArrays, bool]],
    known_kinds: Sequence[str],
    device_rows: Mapping[str, int],
    global_ranges: Mapping[str, tuple[float, float]],
    intervals: Mapping[str, Mapping[str, Any]],
    default_framework_version: str,
    details: Mapping[str, Any],
) -> None:
    """model.onnx, trees.onnx, card.json and golden.json, each through a temporary file.

    ``shares`` (m,) are the members' in the geometric mean of step times and sum to 1.
    ``trees`` is the regressor of :func:`gnnpred.training.trees.fit_trees`. The golden answers are torch's and
    scikit-learn's, so that loading also checks onnxruntime against both. ``device_rows`` are whole-step training rows
    by GPU, 0 for one with inference rows alone; ``intervals`` is what :func:`gnnpred.intervals.interval_models` reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model_bytes = export_onnx(members, shares)
    trees_bytes = export_trees(trees) if trees is not None else b""
    content = {
        "name": name,
        "feature_schema": FEATURE_SCHEMA_VERSION,
        "model_sha256": hashlib.sha256(model_bytes).hexdigest(),
        "trees_sha256": hashlib.sha256(trees_bytes).hexdigest() if trees_bytes else "",
        "tree_weight": tree_weight if trees_bytes else 0.0,
        "summary_features": list(SUMMARY_FEATURE_NAMES),
        "default_framework_version": default_framework_version,
        "devices": sorted(device_rows),
        "device_rows": {name: int(count) for name, count in sorted(device_rows.items())},
        "intervals": {name: dict(model) for name, model in intervals.items()},
        "global_ranges": {k: [round(float(v), 5) for v in pair] for k, pair in global_ranges.items()},
        "known_kinds": sorted(known_kinds),
        "op_kinds": list(OP_KINDS),
        "node_features": list(NODE_FEATURE_NAMES),
        "global_features": list(GLOBAL_FEATURE_NAMES),
        **details,
    }
    checkpoint = Checkpoint(CheckpointCard.from_json(content), model_bytes, trees_bytes)
    examples = []
    for example_name, (arrays, known) in golden.items():
        step_ms = _torch_step_ms(members, shares, arrays, known=known)
        if trees is not None:
            row = FlatRows.from_arrays([arrays])
            trees_ms = float(np.exp(trees.predict(summed_features(row))[0]) * roofline_of(row)[0])
            step_ms = float(blend(step_ms, trees_ms, tree_weight))
        _, runtime_ms = checkpoint.run(arrays, specs_known=known)
        if abs(runtime_ms / step_ms - 1) > 1e-4:
            raise RuntimeError(f"onnxruntime gives {runtime_ms} ms for {example_name}, the members {step_ms}")
        examples.append(
            {"name": example_name, "specs_known": known, "step_ms": step_ms, "arrays": arrays_to_json(arrays)}
        )
    _replace(folder / "model.onnx", model_bytes)
    if trees_bytes:
        _replace(folder / "trees.onnx", trees_bytes)
    else:
        (folder / "trees.onnx").unlink(missing_ok=True)
    _replace(folder / "golden.json", json.dumps({"examples": examples}, separators=(",", ":")).encode())
    _replace(folder / "card.json", (json.dumps(content, indent=1) + "\n").encode())


def _torch_step_ms(members: Sequence[StepTimeGNN], shares: np.ndarray, arrays: GraphArrays, *, known: bool) -> float:
    batch = FlatRows.from_arrays([arrays]).batch(np.array([0]), specs_known=np.array([float(known)]))
    with torch.no_grad():
        return float(np.exp(np.dot(shares, [float(torch.log(member(batch)[1])) for member in members])))


def _replace(path: Path, content: bytes) -> None:
    with replaced_when_done(path) as partial:
        partial.write_bytes(content)
