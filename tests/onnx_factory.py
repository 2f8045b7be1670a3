"""Graphs in a line or two, for tests of what reads them."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gnnpred.graph import Op, OpGraph, TensorSpec
from gnnpred.onnx_io import read_graph
from tests.helpers.onnx_files import model_of, value, weight

FLOAT, INT64, BOOL, FLOAT16 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT16
node = helper.make_node


def ints(name: str, *numbers: int) -> TensorProto:
    """A one-dimensional int64 initializer."""
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def scalar(name: str, number: float | int | bool, dtype=np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(number, dtype), name)


def single(
    op_type: str, x_shape, *weights: TensorProto, opset: int = 20, domain: str = "", **attributes
) -> onnx.ModelProto:
    """x -> one node (with initializers as further inputs) -> y."""
    made = node(op_type, ["x", *(tensor.name for tensor in weights)], ["y"], domain=domain, **attributes)
    return model_of([made], [value("x", x_shape)], [value("y", None)], weights, opset=opset)


def chain(*op_types: str, shape=("batch", 4), opset: int = 17) -> onnx.ModelProto:
    """x -> unary nodes one after another -> y."""
    names = ["x", *(f"t{i}" for i in range(len(op_types) - 1)), "y"]
    nodes = [node(op, [names[i]], [names[i + 1]]) for i, op in enumerate(op_types)]
    return model_of(nodes, [value("x", list(shape))], [value("y", None)], opset=opset)


def kinds(graph: OpGraph) -> list[str]:
    return [op.kind for op in graph.ops]


def output(graph: OpGraph, position: int = 0) -> TensorSpec:
    return graph.tensors[graph.outputs[position]]


def only(graph: OpGraph, kind: str) -> Op:
    """The one op of a kind."""
    (op,) = [op for op in graph.ops if op.kind == kind]
    return op


def shapes(graph: OpGraph, positions: Sequence[int]) -> list[tuple[int, ...]]:
    return [graph.tensors[position].shape for position in positions]


__all__ = [
    "BOOL", "FLOAT", "FLOAT16", "INT64", "chain", "ints", "kinds", "model_of", "node", "only", "output", "read_graph",
    "scalar", "shapes", "single", "value", "weight",
]  # fmt: skip
