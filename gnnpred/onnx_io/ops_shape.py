"""Constants, shapes and views: Reshape, Transpose, Slice, Split ..."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from gnnpred.graph import DType, Role
from gnnpred.onnx_io.builder import Builder, ShapeUnknown, normalise_axis
from gnnpred.onnx_io.handlers import Inputs, axes_of, handles, optional, required
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
