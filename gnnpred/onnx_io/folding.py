"""Small constants, evaluated with numpy: shapes, indices, axes and scalars, never weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from gnnpred.graph import DType
from gnnpred.onnx_io.builder import MAX_FOLDED_TOTAL, Builder
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.values import MAX_FOLDED_ELEMENTS, Value, value_of_array

Arrays = Sequence[np.ndarray | None]
_NUMPY_BY_DTYPE = {
    DType.FP64: np.float64, DType.FP32: np.float32, DType.FP16: np.float16, DType.BF16: np.float32,
    DType.INT64: np.int64, DType.INT32: np.int32, DType.INT16: np.int16, DType.INT8: np.int8,
    DType.UINT8: np.uint8, DType.BOOL: np.bool_,
}  # fmt: skip


class TooLarge(ValueError):  # noqa: N818 - a state, not a failure
    """The constant would pass the size that we evaluate."""


def fold(builder: Builder, node: Node, inputs: Sequence[Value | None]) -> list[Value] | None:
    """The node's outputs as known constants, or None where they cannot or should not be evaluated."""
    evaluate = _EVALUATORS.get(node.op_type)
    if evaluate is None or node.domain or builder.folded_elements > MAX_FOLDED_TOTAL:
        return None
    arrays: list[np.ndarray | None] = []
    for value in inputs:
        array = None if value is None else value.array
        if value is not None and array is None:
            return None
        arrays.append(array)
    try:
        with np.errstate(all="ignore"):
            results = evaluate(node, arrays, builder)
    except (ValueError, IndexError, TypeError, OverflowError, ZeroDivisionError, MemoryError):
        return None  # the shape rule decides; a node that breaks its contract is reported there
    half = next((v.dtype for v in inputs if v is not None and v.dtype is DType.BF16), None)
    exact = all(value.exact for value in inputs if value is not None)
    folded = []
    for result in results:
        array = np.asarray(result)
        if array.size > MAX_FOLDED_ELEMENTS:
            return None
        builder.folded_elements += array.size
        dtype = half if half and array.dtype == np.float32 and node.op_type != "Cast" else None
        folded.append(value_of_array(array, dtype=dtype, exact=exact))
    return folded


def _guard(*shape: int) -> None:
    if prod(int(dim) for dim in shape) > MAX_FOLDED_ELEMENTS:
        raise TooLarge


def _elementwise(function: Callable[..., np.ndarray]) -> Callable:
    def evaluate(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
        _guard(*np.broadcast_shapes(*(array.shape for array in arrays)))
        result = np.asarray(function(*arrays))
        if result.dtype != arrays[-1].dtype and result.dtype != np.bool_ and arrays[-1].dtype != np.bool_:
            result = result.astype(arrays[-1].dtype)
        return [result]

    return evaluate


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind in "iu":
        if np.any(b == 0):
            raise ZeroDivisionError
        return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)  # ONNX truncates
    return a / b


def _power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.power(a, b.astype(np.float64)).astype(a.dtype)


def _pow(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    _guard(*np.broadcast_shapes(arrays[0].shape, arrays[1].shape))
    return [np.asarray(_power(arrays[0], arrays[1]))]


def _variadic(function: Callable) -> Callable:
    def evaluate(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
        result = arrays[0]
        for array in arrays[1:]:
            _guard(*np.broadcast_shapes(result.shape, array.shape))
            result = np.asarray(function(result, array))
        return [result]

    return evaluate


def _axes(node: Node, arrays: Arrays, position: int = 1) -> tuple[int, ...] | None:
    if len(arrays) > position and arrays[position] is not None:
        return tuple(int(axis) for axis in arrays[position].reshape(-1))
    axes = node.get("axes")
    return None if axes is None else tuple(axes)


def _reduce(function: Callable) -> Callable:
    def evaluate(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
        axes = _axes(node, arrays)
        if not axes:
            if node.get("noop_with_empty_axes", 0):
                return [arrays[0]]
            axes = None
        result = function(arrays[0], axis=axes, keepdims=bool(node.get("keepdims", 1)))
        return [np.asarray(result).astype(arrays[0].dtype)]

    return evaluate


def _arg_reduce(function: Callable) -> Callable:
    def evaluate(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
        axis = node.get("axis", 0)
        result = function(arrays[0], axis=axis)
        return [np.expand_dims(result, axis) if node.get("keepdims", 1) else np.asarray(result)]

    return evaluate


def fold_cast(builder: Builder, value: Value, dtype: DType) -> Value | None:
    """A constant cast to ``dtype``, None where its content is not known."""
    array, target = value.array, _NUMPY_BY_DTYPE.get(dtype)
    if array is None or target is None:
        return None
    with np.errstate(all="ignore"):
        return value_of_array(array.astype(target), dtype=dtype, exact=value.exact)


def _gather(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    data, indices = arrays[0], arrays[1]
    axis = node.get("axis", 0)
    _guard(data.size // max(1, data.shape[axis]), max(1, indices.size))
    return [np.take(data, indices.astype(np.int64), axis=axis)]


def _slice(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    data = arrays[0]
    if len(arrays) > 1:
        starts, ends = arrays[1].reshape(-1), arrays[2].reshape(-1)
        axes = _axes(node, arrays, 3)
        steps = arrays[4].reshape(-1) if len(arrays) > 4 and arrays[4] is not None else None
    else:
        starts, ends, axes, steps = node.get("starts"), node.get("ends"), node.get("axes"), None
    axes = tuple(range(len(starts))) if axes is None else axes
    index: list[slice] = [slice(None)] * data.ndim
    for position, axis in enumerate(axes):
        start, end = int(starts[position]), int(ends[position])
        step = 1 if steps is None else int(steps[position])
        if step < 0 and end < -data.shape[axis]:
            end = None  # beyond the front: numpy would wrap
        index[axis] = slice(start, end, step)
    return [data[tuple(index)]]


def _squeeze(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    axes = _axes(node, arrays)
    return [np.squeeze(arrays[0], axis=axes)]


def _unsqueeze(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    return [np.expand_dims(arrays[0], _axes(node, arrays))]


def _reshape(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    target = [int(dim) for dim in arrays[1].reshape(-1)]
    if not node.get("allowzero", 0):
        target = [arrays[0].shape[axis] if dim == 0 else dim for axis, dim in enumerate(target)]
    return [arrays[0].reshape(target)]


def _constant_of_shape(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    shape = tuple(int(dim) for dim in arrays[0].reshape(-1))
    _guard(*shape)
    fill = node.get("value")
    if fill is None:
        return [np.zeros(shape, np.float32)]
    from onnx import numpy_helper

    content = numpy_helper.to_array(fill)
    if content.dtype.kind not in "iufb":
        raise TooLarge
    return [np.full(shape, content.reshape(-1)[0], content.dtype)]


def _expand(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    shape = np.broadcast_shapes(arrays[0].shape, tuple(int(dim) for dim in arrays[1].reshape(-1)))
    _guard(*shape)
    return [np.broadcast_to(arrays[0], shape)]


def _range(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    start, limit, delta = (array.reshape(-1)[0] for array in arrays[:3])
    if delta == 0:
        raise TooLarge
    _guard(max(0, int(np.ceil((float(limit) - float(start)) / float(delta)))))
    return [np.arange(start, limit, delta, dtype=arrays[0].dtype)]


def _tile(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    repeats = [int(count) for count in arrays[1].reshape(-1)]
    _guard(arrays[0].size, *repeats)
    return [np.tile(arrays[0], repeats)]


def _concat(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    return [np.concatenate(arrays, axis=node.get("axis", 1))]


def _split(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    axis = node.get("axis", 0)
    sizes = arrays[1].reshape(-1) if len(arrays) > 1 and arrays[1] is not None else node.get("split")
    num_outputs = len(node.outputs)
    if sizes is None:
        chunk = -(-arrays[0].shape[axis] // num_outputs)
        points = [chunk * (position + 1) for position in range(num_outputs - 1)]
    else:
        points = np.cumsum(sizes)[:-1]
    return list(np.split(arrays[0], points, axis=axis))


def _transpose(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    return [np.transpose(arrays[0], node.get("perm"))]


def _where(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    _guard(*np.broadcast_shapes(*(array.shape for array in arrays)))
    return [np.where(arrays[0], arrays[1], arrays[2]).astype(arrays[1].dtype)]


def _scatter_nd(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    if node.text("reduction", "none") != "none":
        raise TooLarge
    data, indices, updates = np.array(arrays[0]), arrays[1].astype(np.int64), arrays[2]
    data[tuple(np.moveaxis(indices, -1, 0))] = updates
    return [data]


def _clip(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    low = arrays[1] if len(arrays) > 1 else node.get("min")
    high = arrays[2] if len(arrays) > 2 else node.get("max")
    if low is None and high is None:
        return [arrays[0]]
    return [np.clip(arrays[0], low, high).astype(arrays[0].dtype)]


def _nonzero(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    _guard(arrays[0].size, max(1, arrays[0].ndim))
    return [np.array(np.nonzero(arrays[0]), dtype=np.int64)]


def _trilu(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    k = int(arrays[1].reshape(-1)[0]) if len(arrays) > 1 and arrays[1] is not None else 0
    return [np.triu(arrays[0], k) if node.get("upper", 1) else np.tril(arrays[0], k)]


def _cumsum(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    if node.get("exclusive", 0) or node.get("reverse", 0):
        raise TooLarge
    return [np.cumsum(arrays[0], axis=int(arrays[1].reshape(-1)[0]), dtype=arrays[0].dtype)]


def _mod(node: Node, arrays: Arrays, builder: Builder) -> list[np.ndarray]:
    _guard(*np.broadcast_shapes(arrays[0].shape, arrays[1].shape))
    if arrays[0].dtype.kind in "iu" and np.any(arrays[1] == 0):
        raise ZeroDivisionError
    return [(np.fmod if node.get("fmod", 0) else np.mod)(arrays[0], arrays[1])]


_EVALUATORS: dict[str, Callable[[Node, Arrays, Builder], list[np.ndarray]]] = {
    "Add": _elementwise(np.add), "Sub": _elementwise(np.subtract), "Mul": _elementwise(np.multiply),
    "Div": _elementwise(_divide), "Mod": _mod, "Pow": _pow, "Neg": _elementwise(np.negative),
    "Abs": _elementwise(np.abs), "Floor": _elementwise(np.floor), "Ceil": _elementwise(np.ceil),
    "Round": _elementwise(np.round), "Sqrt": _elementwise(np.sqrt), "Exp": _elementwise(np.exp),
    "Log": _elementwise(np.log), "Sign": _elementwise(np.sign), "Reciprocal": _elementwise(lambda a: 1 / a),
    "Sin": _elementwise(np.sin), "Cos": _elementwise(np.cos), "Tanh": _elementwise(np.tanh),
    "Equal": _elementwise(np.equal), "Less": _elementwise(np.less), "LessOrEqual": _elementwise(np.less_equal),
    "Greater": _elementwise(np.greater), "GreaterOrEqual": _elementwise(np.greater_equal),
    "And": _elementwise(np.logical_and), "Or": _elementwise(np.logical_or), "Xor": _elementwise(np.logical_xor),
    "Not": _elementwise(np.logical_not), "IsNaN": _elementwise(np.isnan), "IsInf": _elementwise(np.isinf),
    "Min": _variadic(np.minimum), "Max": _variadic(np.maximum), "Sum": _variadic(np.add),
    "ReduceSum": _reduce(np.sum), "ReduceProd": _reduce(np.prod), "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min), "ReduceMean": _reduce(np.mean), "ArgMax": _arg_reduce(np.argmax),
    "ArgMin": _arg_reduce(np.argmin), "Gather": _gather, "Slice": _slice, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Reshape": _reshape, "ConstantOfShape": _constant_of_shape, "Expand": _expand,
    "Range": _range, "Tile": _tile, "Concat": _concat, "Split": _split, "Transpose": _transpose, "Where": _where,
    "ScatterND": _scatter_nd, "Clip": _clip, "NonZero": _nonzero, "Trilu": _trilu, "CumSum": _cumsum,
}  # fmt: skip
