"""What several pattern families share: constants, commutative operands, and whether pieces are real.

Pieces: a file from an exporter that has the composite op writes the pieces only where the model's own code
does, so eager PyTorch runs them one by one. Below the opset that brought the op nobody can tell, and the
framework's fused op is assumed.
"""

from collections.abc import Iterable
from typing import Any

from gnnpred.graph import Op
from gnnpred.passes.canonical.editor import GraphEditor

TOLERANCE = 0.01  # constants written in fp16, or 0.044715 as 0.0447

# First ONNX opset whose op set holds the composite; traced modules (no opset) show composites whole.
_COMPOSITE_SINCE_OPSET = {
    "gelu": 20, "gelu_tanh": 20, "mish": 18, "hardswish": 14, "hardsigmoid": 1, "layer_norm": 17, "rms_norm": 23,
    "group_norm": 21, "batch_norm": 1,
}  # fmt: skip


def near(value: float | None, target: float) -> bool:
    return value is not None and abs(value - target) <= TOLERANCE * max(abs(target), 1e-6)


def split_scalar(editor: GraphEditor, op: Op) -> tuple[int, float] | None:
    """(data operand, number) of a binary op with one scalar constant, in either order."""
    if len(op.inputs) != 2:
        return None
    first, second = op.inputs
    number = editor.number(second)
    if number is not None:
        return first, number
    number = editor.number(first)
    return (second, number) if number is not None else None


def pieces_are_real(editor: GraphEditor, kind: str) -> bool:
    """Whether a decomposed ``kind`` in this graph is what the model's own code runs."""
    opset = editor.metadata.get("opset")
    if opset is None:
        return True
    since = _COMPOSITE_SINCE_OPSET.get(kind)
    return since is not None and int(opset) >= since


def unfused_attributes(editor: GraphEditor, op_idxs: Iterable[int], output: int) -> dict[str, Any]:
    """How the pieces differ from one fused kernel.

    ``fused`` False; ``num_launches`` kernels; ``reads`` and ``writes`` in passes over a tensor of the size of
    ``output`` (so that they hold at any batch).
    """
    size = max(editor.tensors[output].num_elements, 1)
    reads = writes = 0.0
    launches = 0
    for op_idx in op_idxs:
        op = editor.ops[op_idx]
        if op is None or op.kind in ("view", "transpose", "expand", "slice", "identity"):
            continue
        if all(not editor.depends_on_data(tensor) for tensor in op.outputs) and editor.depends_on_data(output):
            continue
        launches += 1
        for tensor in op.inputs:
            # an expanded operand is read from cache, whatever its nominal size
            source = editor.producer_op(tensor, "expand")
            reads += editor.tensors[source.inputs[0] if source else tensor].num_elements / size
        writes += sum(editor.tensors[tensor].num_elements for tensor in op.outputs) / size
    return {"fused": False, "num_launches": launches, "reads": round(reads, 3), "writes": round(writes, 3)}
