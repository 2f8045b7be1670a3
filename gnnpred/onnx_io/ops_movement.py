"""Operators that write data somewhere else: Concat, Pad, Tile, Resize ..."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from gnnpred.onnx_io.builder import Builder, ShapeUnknown, normalise_axis
from gnnpred.onnx_io.handlers import Inputs, axes_of, handles, optional, required
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.values import Value


@handles("Concat")
def concat(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [emit_concat(builder, [value for value in inputs if value is not None], node.get("axis", 1))]


def emit_concat(builder: Builder, parts: Sequence[Value], axis: int) -> Value:
    first = required(parts, 0)
    axis = normalise_axis(axis, first.rank)
    shape = list(first.shape)
    for part in parts[1:]:
        if part.rank != first.rank:
            raise ShapeUnknown("Concat of different ranks")
        for other, dim in enumerate(part.shape):
            if other == axis:
                shape[axis] += dim
            elif shape[other] != dim:
                shape[other] = builder.reconcile(shape[other], dim)
    if len(parts) == 1:
        return first
    return builder.emit("concat", parts, shape, first.dtype, axis=axis)


@handles("Pad")
def pad(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    pads = builder.ints(inputs[1]) if len(inputs) > 1 else (node.get("pads") or node.get("paddings"))
    if pads is None:
        raise ShapeUnknown("the paddings are not constant")
    axes = axes_of(builder, node, inputs, 3) or tuple(range(x.rank))
    axes = [normalise_axis(axis, x.rank) for axis in axes]
    shape = list(x.shape)
    for position, axis in enumerate(axes):
        shape[axis] += pads[position] + pads[position + len(axes)]
    if all(amount == 0 for amount in pads):
        return [x]
    return [builder.emit("pad", [x], shape, mode=node.text("mode", "constant"))]


@handles("CenterCropPad")
def center_crop_pad(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, target = required(inputs, 0), builder.ints(required(inputs, 1))
    if target is None:
        raise ShapeUnknown("the target shape is not constant")
    shape = list(x.shape)
    for axis, dim in zip(node.get("axes") or range(x.rank), target, strict=True):
        shape[normalise_axis(axis, x.rank)] = dim
    return [builder.emit("pad", [x], shape)]


@handles("Tile")
def tile(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, repeats = required(inputs, 0), builder.ints(required(inputs, 1))
    if repeats is None or len(repeats) != x.rank:
        raise ShapeUnknown("the repeats of Tile are not constant")
    baked = builder.binding.baked_size
    if baked and baked > 1 and repeats[0] == baked and builder.batch_axis(x.shape) is None:
        builder.batch_guesses += 1
        repeats = (builder.binding.prime, *repeats[1:])
    if all(count == 1 for count in repeats):
        return [x]
    return [builder.emit("tile", [x], [dim * count for dim, count in zip(x.shape, repeats, strict=True)])]


@handles("Resize", "Upsample")
def resize(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    mode = node.text("mode", "nearest")
    if node.op_type == "Upsample" or builder.opset < 11:
        scales = node.get("scales") or (optional(inputs, 1) is not None and _floats(inputs[1]))
        sizes = None
    else:
        scales_value, sizes_value = optional(inputs, 2), optional(inputs, 3)
        sizes = builder.ints(sizes_value) if sizes_value is not None else None
        scales = _floats(scales_value) if scales_value is not None and scales_value.num_elements else None
        if sizes_value is not None and sizes is None:
            raise ShapeUnknown("the sizes of Resize are not constant")
    axes = node.get("axes") or tuple(range(x.rank))
    axes = [normalise_axis(axis, x.rank) for axis in axes]
    shape = list(x.shape)
    if sizes is not None:
        sizes = _keep_aspect(node.text("keep_aspect_ratio_policy", "stretch"), [shape[axis] for axis in axes], sizes)
        for axis, dim in zip(axes, sizes, strict=True):
            baked = builder.binding.baked_size
            old = builder.binding.at([shape[axis]], baked)[0] if baked else None
            shape[axis] = shape[axis] if dim == old else dim
    elif scales:
        for axis, scale in zip(axes, scales, strict=True):
            shape[axis] = floor(shape[axis] * scale + 1e-6)
    else:
        raise ShapeUnknown("Resize without constant scales or sizes")
    return [builder.emit("resize", [x], shape, mode=mode)]


def _keep_aspect(policy: str, old: Sequence[int], sizes: Sequence[int]) -> Sequence[int]:
    if policy == "stretch":
        return sizes
    scales = [size / dim for size, dim in zip(sizes, old, strict=True)]
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [floor(dim * scale + 0.5) for dim in old]


def _floats(value: Value) -> list[float] | None:
    array = value.array
    return None if array is None else [float(number) for number in array.reshape(-1)]


@handles("DepthToSpace")
def depth_to_space(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, block = required(inputs, 0), node.get("blocksize", 1)
    batch, channels, height, width = x.shape
    return [builder.emit("pixel_shuffle", [x], (batch, channels // block**2, height * block, width * block))]


@handles("SpaceToDepth")
def space_to_depth(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, block = required(inputs, 0), node.get("blocksize", 1)
    batch, channels, height, width = x.shape
    return [builder.emit("pixel_shuffle", [x], (batch, channels * block**2, height // block, width // block))]


@handles("OneHot")
def one_hot(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    indices, depth, values = (required(inputs, position) for position in range(3))
    classes = builder.number(depth)
    if classes is None:
        raise ShapeUnknown("the depth of OneHot is not constant")
    axis = normalise_axis(node.get("axis", -1), indices.rank + 1)
    shape = (*indices.shape[:axis], int(classes), *indices.shape[axis:])
    return [builder.emit("one_hot", [indices], shape, values.dtype)]


@handles("Trilu")
def trilu(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("tril", [x], x.shape)]


@handles("ReverseSequence")
def reverse_sequence(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("flip", [x], x.shape)]
