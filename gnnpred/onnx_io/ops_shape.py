"""Operators that move, view or index data: Reshape, Slice, Concat, Gather, Resize ..."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod

import numpy as np

from gnnpred.graph import DType, Role
from gnnpred.onnx_io.builder import Builder, ShapeUnknown, normalise_axis
from gnnpred.onnx_io.handlers import HANDLERS, Inputs, axes_of, handles, optional, required
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.values import Value, dtype_of

# --- constants and shapes ---------------------------------------------------------------------


@handles("Constant")
def constant(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    attributes = node.attributes
    if "value" in attributes:
        tensor = attributes["value"]
        dtype = dtype_of(tensor.data_type, f"node {node.label}")
        external = bool(tensor.external_data)
        return [Value(tuple(tensor.dims), dtype, Role.CONSTANT, proto=None if external else tensor)]
    if "value_int" in attributes:
        return [builder.constant(np.int64(attributes["value_int"]))]
    if "value_float" in attributes:
        return [builder.constant(np.float32(attributes["value_float"]))]
    if "value_ints" in attributes:
        return [builder.constant(np.array(attributes["value_ints"], np.int64))]
    if "value_floats" in attributes:
        return [builder.constant(np.array(attributes["value_floats"], np.float32))]
    if "value_string" in attributes:
        return [Value((), DType.STRING, Role.CONSTANT)]
    if "value_strings" in attributes:
        return [Value((len(attributes["value_strings"]),), DType.STRING, Role.CONSTANT)]
    if "sparse_value" in attributes:
        sparse = attributes["sparse_value"]
        return [Value(tuple(sparse.dims), dtype_of(sparse.values.data_type, f"node {node.label}"), Role.CONSTANT)]
    raise ShapeUnknown("Constant without a value")


@handles("Shape")
def shape(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    dims = x.shape[slice(node.get("start", 0), node.get("end"))]
    return [builder.constant(np.array(dims, np.int64), exact=x.exact)]


@handles("Size")
def size(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.constant(np.int64(min(x.num_elements, 2**62)), exact=x.exact)]


@handles("ConstantOfShape")
def constant_of_shape(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    target = builder.ints(required(inputs, 0))
    if target is None:
        raise ShapeUnknown("the shape is not constant")
    fill = node.get("value")
    dtype = DType.FP32 if fill is None else dtype_of(fill.data_type, f"node {node.label}")
    return [builder.emit("fill", [inputs[0]], target, dtype)]


@handles("EyeLike")
def eye_like(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    dtype = dtype_of(node.get("dtype"), f"node {node.label}") if node.get("dtype") else x.dtype
    return [Value(x.shape, dtype, Role.CONSTANT, exact=x.exact)]


@handles("Range")
def range_(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    start, limit, delta = (builder.number(required(inputs, position)) for position in range(3))
    if start is None or limit is None or not delta:
        raise ShapeUnknown("the bounds of Range are not constant")
    return [builder.emit("range", [inputs[0]], (max(0, -int(-(limit - start) // delta)),), inputs[0].dtype)]


# --- views ------------------------------------------------------------------------------------


@handles("Identity")
def identity(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [required(inputs, 0)]


@handles("Reshape")
def reshape(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    target = node.get("shape") if len(inputs) < 2 else builder.ints(inputs[1])
    if target is None:
        raise ShapeUnknown("the target shape is not constant")
    if node.get("allowzero", 0) == 0:
        target = tuple(x.shape[axis] if dim == 0 else dim for axis, dim in enumerate(target))
    return [reshape_to(builder, x, target)]


def reshape_to(builder: Builder, x: Value, target: Sequence[int]) -> Value:
    """``x`` viewed as ``target`` (may hold one -1); a baked batch in the target follows the bound one."""
    binding = builder.binding
    carries_batch = builder.batch_axis(x.shape) is not None
    if carries_batch and binding.baked_size is not None and builder.batch_axis(target) is None:
        old_elements = prod(binding.at(x.shape, binding.baked_size))
        carried = builder.carry_batch(x, _without_minus_one(target, old_elements))
        if carried is not None:
            return _batch_view(builder, x, *carried)
        builder.batch_guesses += 1
    resolved = _without_minus_one(target, x.num_elements)
    if prod(resolved) != x.num_elements:
        carried = builder.carry_batch(x, resolved) if carries_batch else None
        if carried is None or prod(carried[0]) != x.num_elements:
            raise ShapeUnknown(f"a tensor of shape {x.shape} does not reshape to {tuple(target)}")
        builder.batch_guesses += 1
        return _batch_view(builder, x, *carried)
    return builder.view(x, resolved)


def _batch_view(builder: Builder, x: Value, new_shape: tuple[int, ...], batch_inner: int | None) -> Value:
    if prod(new_shape) != x.num_elements:
        raise ShapeUnknown(f"a tensor of shape {x.shape} does not reshape to {new_shape}")
    if new_shape == x.shape:
        return x
    view = builder.view(x, new_shape)
    view.batch_inner = batch_inner
    return view


def _without_minus_one(target: Sequence[int], num_elements: int) -> tuple[int, ...]:
    if -1 not in target:
        return tuple(target)
    known = -prod(target)
    if known <= 0 or target.count(-1) > 1 or num_elements % known:
        raise ShapeUnknown(f"{num_elements} elements do not reshape to {tuple(target)}")
    return tuple(num_elements // known if dim == -1 else dim for dim in target)


@handles("Flatten")
def flatten(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axis = node.get("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    return [builder.view(x, (prod(x.shape[:axis]), prod(x.shape[axis:])))]


@handles("Squeeze")
def squeeze(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axes = axes_of(builder, node, inputs)
    if axes is None:
        axes = tuple(axis for axis, dim in enumerate(x.shape) if dim == 1)
    drop = {normalise_axis(axis, x.rank) for axis in axes}
    if any(x.shape[axis] != 1 for axis in drop):
        if not (
            builder.binding.baked_size == 1
            and all(x.shape[a] == 1 or builder.binding.is_batch(x.shape[a]) for a in drop)
        ):
            raise ShapeUnknown(f"cannot squeeze axes {sorted(drop)} of {x.shape}")
        builder.batch_guesses += 1  # the file squeezes its batch of one away; keep it as an axis of the next one
        rest = [dim for axis, dim in enumerate(x.shape) if axis not in drop]
        grow = prod(x.shape[axis] for axis in drop)
        return [builder.view(x, [rest[0] * grow, *rest[1:]] if rest else [grow])]
    return [builder.view(x, [dim for axis, dim in enumerate(x.shape) if axis not in drop])]


@handles("Unsqueeze")
def unsqueeze(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axes = axes_of(builder, node, inputs)
    if axes is None:
        raise ShapeUnknown("Unsqueeze without axes")
    rank = x.rank + len(axes)
    new = {normalise_axis(axis, rank) for axis in axes}
    dims = iter(x.shape)
    return [builder.view(x, [1 if axis in new else next(dims) for axis in range(rank)])]


@handles("Transpose")
def transpose(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    perm = node.get("perm") or tuple(range(x.rank - 1, -1, -1))
    if sorted(perm) != list(range(x.rank)):
        raise ShapeUnknown(f"permutation {perm} does not fit rank {x.rank}")
    return [builder.transpose(x, perm)]


@handles("Expand")
def expand(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, target = required(inputs, 0), builder.ints(required(inputs, 1))
    if target is None:
        raise ShapeUnknown("the target shape is not constant")
    baked = builder.binding.baked_size
    if baked and baked > 1 and target and target[0] == baked and builder.batch_axis(x.shape) is None:
        builder.batch_guesses += 1
        target = (builder.binding.prime, *target[1:])
    shape = builder.broadcast(x.shape, target)
    return [x if shape == x.shape else builder.emit("expand", [x], shape)]


@handles("Slice")
def slice_(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    if len(inputs) > 1:
        starts, ends = builder.ints(required(inputs, 1)), builder.ints(required(inputs, 2))
        steps = builder.ints(optional(inputs, 4)) if optional(inputs, 4) is not None else None
        axes = builder.ints(optional(inputs, 3)) if optional(inputs, 3) is not None else None
    else:
        starts, ends, steps, axes = node.get("starts"), node.get("ends"), None, node.get("axes")
    if starts is None or ends is None:
        raise ShapeUnknown("the bounds of Slice are not constant")
    axes = tuple(range(len(starts))) if axes is None else tuple(normalise_axis(axis, x.rank) for axis in axes)
    steps = (1,) * len(starts) if steps is None else steps
    shape = list(x.shape)
    kept = []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        dim = x.shape[axis]
        if step == 0:
            raise ShapeUnknown("Slice with step 0")
        baked = builder.binding.baked_size
        if (
            baked
            and builder.binding.is_batch(dim)
            and step == 1
            and start == 0
            and end == dim // builder.binding.prime * baked
        ):
            continue  # the whole baked batch
        bounds = range(dim)[slice(start, end if step > 0 or end >= -dim else None, step)]
        shape[axis] = len(bounds)
        if len(bounds) != dim or step != 1:
            kept.append((axis, bounds.start, step))
    if not kept:
        return [x]
    attributes = {"axes": tuple(axis for axis, _, _ in kept), "steps": tuple(step for _, _, step in kept)}
    if not any(builder.binding.is_batch(x.shape[axis]) for axis, _, _ in kept):
        attributes["starts"] = tuple(start for _, start, _ in kept)
    kind = "slice" if all(step > 0 for step in attributes["steps"]) else "flip"
    return [builder.emit(kind, [x], shape, **attributes)]


@handles("Split")
def split(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axis = normalise_axis(node.get("axis", 0), x.rank)
    sizes = builder.ints(inputs[1]) if optional(inputs, 1) is not None else node.get("split")
    if optional(inputs, 1) is not None and sizes is None:
        raise ShapeUnknown("the sizes of Split are not constant")
    num_outputs = len(node.outputs)
    if sizes is None:
        chunk = -(-x.shape[axis] // num_outputs)
        sizes = [min(chunk, max(0, x.shape[axis] - chunk * i)) for i in range(num_outputs)]
    if sum(sizes) != x.shape[axis]:
        raise ShapeUnknown(f"parts {tuple(sizes)} do not make up a dimension of {x.shape[axis]}")
    return emit_split(builder, x, axis, sizes)


def emit_split(builder: Builder, x: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Parts of ``x`` along ``axis``, as views."""
    if len(sizes) == 1:
        return [x]
    shapes = [(*x.shape[:axis], part, *x.shape[axis + 1 :]) for part in sizes]
    return builder.emit_multi("split", [x], shapes, [x.dtype] * len(sizes), axis=axis)


# --- movement ---------------------------------------------------------------------------------


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


# --- indexing ---------------------------------------------------------------------------------


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
    is_table = x.role in (Role.PARAMETER, Role.PARAMETER_DERIVED) and axis == 0 and x.rank == 2
    if is_table and indices.depends_on_data:
        return [builder.emit("embedding", [x, indices], shape, x.dtype)]
    return [builder.emit("gather", [x, indices], shape, x.dtype, axis=axis)]


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


# --- sequences and optionals ------------------------------------------------------------------


def _sequence(elements: list[Value], like: Value | None = None) -> Value:
    first = elements[0] if elements else like
    value = Value(first.shape if first else (), first.dtype if first else DType.FP32, Role.CONSTANT)
    value.elements = list(elements)
    return value


def _element_list(value: Value) -> list[Value]:
    if value.elements is None:
        raise ShapeUnknown("not a sequence")
    return value.elements


@handles("SequenceConstruct")
def sequence_construct(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [_sequence([value for value in inputs if value is not None])]


@handles("SequenceEmpty")
def sequence_empty(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [_sequence([])]


@handles("SequenceInsert")
def sequence_insert(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    elements = list(_element_list(required(inputs, 0)))
    position = builder.number(optional(inputs, 2))
    elements.insert(len(elements) if position is None else int(position), required(inputs, 1))
    return [_sequence(elements)]


@handles("SequenceErase")
def sequence_erase(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    elements = list(_element_list(required(inputs, 0)))
    position = builder.number(optional(inputs, 1))
    elements.pop(-1 if position is None else int(position))
    return [_sequence(elements)]


@handles("SequenceAt")
def sequence_at(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    position = builder.number(optional(inputs, 1))
    return [_element_list(required(inputs, 0))[0 if position is None else int(position)]]


@handles("SequenceLength")
def sequence_length(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [builder.constant(np.int64(len(_element_list(required(inputs, 0)))))]


@handles("SplitToSequence")
def split_to_sequence(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axis = normalise_axis(node.get("axis", 0), x.rank)
    split_value = optional(inputs, 1)
    sizes = (1,) * min(x.shape[axis], 10_000) if split_value is None else builder.ints(split_value)
    if sizes is None:
        raise ShapeUnknown("the sizes of SplitToSequence are not constant")
    if split_value is not None and split_value.rank == 0:
        chunk = max(1, sizes[0])
        count = -(-x.shape[axis] // chunk)
        if count > 10_000:
            raise ShapeUnknown("too many parts")
        sizes = [min(chunk, x.shape[axis] - chunk * i) for i in range(count)]
    parts = emit_split(builder, x, axis, sizes)
    if split_value is None and not node.get("keepdims", 1):
        parts = [builder.view(part, (*part.shape[:axis], *part.shape[axis + 1 :])) for part in parts]
    return [_sequence(parts)]


@handles("ConcatFromSequence")
def concat_from_sequence(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    parts = _element_list(required(inputs, 0))
    axis = node.get("axis", 0)
    if node.get("new_axis", 0):
        axis = normalise_axis(axis, parts[0].rank + 1)
        parts = [builder.view(part, (*part.shape[:axis], 1, *part.shape[axis:])) for part in parts]
    return [emit_concat(builder, parts, axis)]


@handles("Optional", "OptionalGetElement")
def optional_element(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [required(inputs, 0)]


@handles("OptionalHasElement")
def optional_has_element(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [builder.constant(np.bool_(optional(inputs, 0) is not None))]


SEQUENCE_OPS = {op_type for _, op_type in HANDLERS if op_type.startswith(("Sequence", "Optional"))}
