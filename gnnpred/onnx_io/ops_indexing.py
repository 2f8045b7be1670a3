"""Operators that pick elements: Gather, Scatter, TopK, NonZero, GridSample ..."""

from __future__ import annotations

from math import prod

from gnnpred.graph import DType, Role
from gnnpred.onnx_io.builder import Builder, ShapeUnknown, normalise_axis
from gnnpred.onnx_io.handlers import Inputs, handles, optional, required
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.ops_shape import reshape_to
from gnnpred.onnx_io.values import Value, dtype_of


@handles("Gather")
def gather(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, indices = required(inputs, 0), required(inputs, 1)
    axis = normalise_axis(node.get("axis", 0), x.rank)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    if indices.is_constant and indices.rank == 0:  # x[:, 3] is a view
        attributes = {"axes": (axis,), "steps": (1,), "drop_axes": True}
        position = builder.number(indices)
        if position is not None and not builder.binding.is_batch(x.shape[axis]):
            attributes["starts"] = (position + x.shape[axis] if position < 0 else position,)
        return [builder.emit("slice", [x], shape, **attributes)]
    if indices.is_constant and _picks_all(builder, x, indices):
        return [reshape_to(builder, x, indices.shape)]
    is_table = x.role in (Role.PARAMETER, Role.PARAMETER_DERIVED) and axis == 0 and x.rank == 2
    if is_table and indices.depends_on_data:
        return [builder.emit("embedding", [x, indices], shape, x.dtype)]
    return [builder.emit("gather", [x, indices], shape, x.dtype, axis=axis)]


def _picks_all(builder: Builder, x: Value, indices: Value) -> bool:
    """as_strided of a flat tensor at the batch of the file: every element by its position."""
    baked = builder.binding.baked_size
    if x.rank != 1 or indices.rank < 2 or baked is None or builder.batch_axis(x.shape) != 0:
        return False
    return builder.binding.at(x.shape, baked)[0] == indices.num_elements


@handles("GatherElements")
def gather_elements(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, indices = required(inputs, 0), required(inputs, 1)
    axis = normalise_axis(node.get("axis", 0), x.rank)
    return [builder.emit("gather_elements", [x, indices], indices.shape, x.dtype, axis=axis)]


@handles("GatherND")
def gather_nd(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, indices = required(inputs, 0), required(inputs, 1)
    batch_dims = node.get("batch_dims", 0)
    shape = (*indices.shape[:-1], *x.shape[indices.shape[-1] + batch_dims :])
    return [builder.emit("gather", [x, indices], shape, x.dtype, axis=batch_dims)]


@handles("Scatter", "ScatterElements", "ScatterND", "TensorScatter")
def scatter(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("scatter", [value for value in inputs if value is not None], x.shape, x.dtype)]


@handles("TopK")
def top_k(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    count = node.get("k") if len(inputs) < 2 else builder.number(inputs[1])
    if count is None:
        raise ShapeUnknown("the k of TopK is not constant")
    axis = normalise_axis(node.get("axis", -1), x.rank)
    shape = (*x.shape[:axis], int(count), *x.shape[axis + 1 :])
    return builder.emit_multi("topk", [x], [shape, shape], [x.dtype, DType.INT64], axis=axis)


def _upper_bound(builder: Builder, node: Node, what: str) -> None:
    builder.note(f"{node.label}: the number of {what} depends on the data; counted as the largest it can be")


@handles("NonZero")
def nonzero(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    _upper_bound(builder, node, "nonzero elements")
    output = builder.emit("nonzero", [x], (x.rank, x.num_elements), DType.INT64)
    output.exact = False
    return [output]


@handles("Compress")
def compress(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, condition = required(inputs, 0), required(inputs, 1)
    _upper_bound(builder, node, "selected elements")
    axis = node.get("axis")
    shape = (x.num_elements,) if axis is None else x.shape
    output = builder.emit("compress", [x, condition], shape, x.dtype)
    output.exact = False
    return [output]


@handles("Unique")
def unique(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    _upper_bound(builder, node, "unique elements")
    axis = node.get("axis")
    count = x.num_elements if axis is None else x.shape[normalise_axis(axis, x.rank)]
    values = (x.num_elements,) if axis is None else x.shape
    outputs = builder.emit_multi("unique", [x], [values, (count,), (count,), (count,)], [x.dtype] + [DType.INT64] * 3)
    for output in outputs:
        output.exact = False
    return outputs[: len(node.outputs)]


@handles("NonMaxSuppression")
def non_max_suppression(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    boxes, scores = required(inputs, 0), required(inputs, 1)
    limit = builder.number(optional(inputs, 2))
    _upper_bound(builder, node, "boxes that survive")
    per_class = boxes.shape[1] if not limit else min(int(limit), boxes.shape[1])
    output = builder.emit("nms", [boxes, scores], (scores.shape[0] * scores.shape[1] * per_class, 3), DType.INT64)
    output.exact = False
    return [output]


@handles("GridSample")
def grid_sample(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, grid = required(inputs, 0), required(inputs, 1)
    return [builder.emit("grid_sample", [x, grid], (*x.shape[:2], *grid.shape[1:-1]), x.dtype)]


@handles("AffineGrid")
def affine_grid(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    """theta (N, d, d + 1) -> grid (N, *spatial, d): a product with the base grid."""
    theta, size_value = required(inputs, 0), builder.ints(required(inputs, 1))
    if size_value is None:
        raise ShapeUnknown("the size is not constant")
    spatial = size_value[2:]
    base = Value((1, prod(spatial), theta.shape[2]), theta.dtype, Role.CONSTANT)
    transposed = builder.transpose(theta, (0, 2, 1))
    grid = builder.emit("matmul", [base, transposed], (theta.shape[0], prod(spatial), theta.shape[1]), theta.dtype)
    return [builder.view(grid, (theta.shape[0], *spatial, theta.shape[1]))]


@handles("BitCast")
def bit_cast(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("view", [x], x.shape, dtype_of(node.get("to", 0), f"node {node.label}"))]


@handles("RoiAlign", "MaxRoiPool")
def roi_align(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, rois = required(inputs, 0), required(inputs, 1)
    height, width = node.get("pooled_shape") or (node.get("output_height", 1), node.get("output_width", 1))
    return [builder.emit("roi_align", [x, rois], (rois.shape[0], x.shape[1], height, width), x.dtype)]
