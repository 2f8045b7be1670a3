"""Reductions, pooling, softmax, normalisation, losses and transforms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gnnpred.graph import DType, Role
from gnnpred.onnx_io.builder import Builder, ShapeUnknown, normalise_axis
from gnnpred.onnx_io.handlers import HANDLERS, Handler, Inputs, axes_of, handles, optional, required
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.ops_matmul import window, window_size
from gnnpred.onnx_io.values import Value

_REDUCTIONS = {
    "ReduceMean": "reduce_mean", "ReduceSum": "reduce_sum", "ReduceMax": "reduce_max", "ReduceMin": "reduce_min",
    "ReduceProd": "reduce_prod", "ReduceL2": "reduce_l2", "ReduceSumSquare": "reduce_l2", "ReduceL1": "reduce_sum",
    "ReduceLogSumExp": "logsumexp", "ReduceLogSum": "logsumexp",
}  # fmt: skip


def emit_reduction(builder: Builder, kind: str, x: Value, axes: Sequence[int], *, keepdims: bool) -> Value:
    axes = tuple(sorted({normalise_axis(axis, x.rank) for axis in axes}))
    shape = [1 if axis in axes else dim for axis, dim in enumerate(x.shape) if keepdims or axis not in axes]
    return builder.emit(kind, [x], shape, axes=axes, keepdims=keepdims)


def _reduction(kind: str) -> Handler:
    def handler(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
        x = required(inputs, 0)
        axes = axes_of(builder, node, inputs)
        if not axes:
            if node.get("noop_with_empty_axes", 0):
                return [x]
            axes = tuple(range(x.rank))
        return [emit_reduction(builder, kind, x, axes, keepdims=bool(node.get("keepdims", 1)))]

    return handler


for _op_type, _kind in _REDUCTIONS.items():
    HANDLERS["", _op_type] = _reduction(_kind)


@handles("ArgMax", "ArgMin")
def arg_reduction(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axis = normalise_axis(node.get("axis", 0), x.rank)
    keepdims = bool(node.get("keepdims", 1))
    shape = [1 if i == axis else dim for i, dim in enumerate(x.shape) if keepdims or i != axis]
    return [builder.emit(node.op_type.lower(), [x], shape, DType.INT64, axes=(axis,), keepdims=keepdims)]


@handles("CumSum", "CumProd")
def cumulative(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit(node.op_type.lower(), [x], x.shape)]


# --- softmax ----------------------------------------------------------------------------------


@handles("Softmax", "LogSoftmax", "Hardmax")
def softmax(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    kind = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Hardmax": "softmax"}[node.op_type]
    axis = normalise_axis(node.get("axis", 1 if builder.opset < 13 else -1), x.rank)
    # up to opset 12 all axes from this one on are normalised together; exporters meant the last real one
    if builder.opset < 13 and axis != x.rank - 1 and prod(x.shape[axis + 1 :]) > 1:
        builder.note(f"{node.label}: opset {builder.opset} normalises all axes from {axis} on together")
    return [builder.emit(kind, [x], x.shape, axis=axis)]


@handles("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def cross_entropy(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    logits, target = required(inputs, 0), required(inputs, 1)
    shape = target.shape if node.text("reduction", "mean") == "none" else ()
    attributes = {"log_probabilities": True} if node.op_type == "NegativeLogLikelihoodLoss" else {}
    loss = builder.emit("cross_entropy", [logits, target], shape, logits.dtype, **attributes)
    if len(node.outputs) > 1 and node.outputs[1]:
        return [loss, builder.emit("log_softmax", [logits], logits.shape, axis=1)]
    return [loss]


# --- pooling ----------------------------------------------------------------------------------


@handles("MaxPool", "AveragePool", "LpPool")
def pool(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    kind = {"MaxPool": "max_pool", "AveragePool": "avg_pool", "LpPool": "lp_pool"}[node.op_type]
    dtypes = [x.dtype, DType.INT64] if len(node.outputs) > 1 and node.outputs[1] else [x.dtype]
    return emit_pool(builder, node, kind, x, dtypes)


def emit_pool(builder: Builder, node: Node, kind: str, x: Value, dtypes: Sequence[DType]) -> list[Value]:
    """A pooling op; a second dtype asks for the indices of the maxima."""
    kernel = tuple(node.get("kernel_shape") or ())
    rank = x.rank - 2
    if rank < 1 or len(kernel) != rank:
        raise ShapeUnknown(f"a pooling window of {kernel} does not fit rank {x.rank}")
    stride, dilation, pads = window(node, x.shape[2:], kernel)
    spatial = []
    for i, dim in enumerate(x.shape[2:]):
        ceil_mode = bool(node.get("ceil_mode", 0))
        size = window_size(dim, kernel[i], stride[i], dilation[i], pads[i] + pads[i + rank], ceil_mode=ceil_mode)
        if ceil_mode and (size - 1) * stride[i] >= dim + pads[i]:
            size -= 1  # a window must start inside the input
        spatial.append(size)
    shape = (*x.shape[:2], *spatial)
    return builder.emit_multi(kind, [x], [shape] * len(dtypes), dtypes, kernel=kernel, stride=stride)


@handles("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    kind = {"GlobalAveragePool": "reduce_mean", "GlobalMaxPool": "reduce_max", "GlobalLpPool": "reduce_l2"}
    return [emit_reduction(builder, kind[node.op_type], x, range(2, x.rank), keepdims=True)]


@handles("MaxUnpool")
def max_unpool(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, indices = required(inputs, 0), required(inputs, 1)
    target = builder.ints(optional(inputs, 2))
    if target is None:
        kernel = node.get("kernel_shape")
        stride = node.get("strides") or (1,) * len(kernel)
        pads = node.get("pads") or (0,) * (2 * len(kernel))
        spatial = [
            (dim - 1) * stride[i] - pads[i] - pads[i + len(kernel)] + kernel[i] for i, dim in enumerate(x.shape[2:])
        ]
        target = (*x.shape[:2], *spatial)
    return [builder.emit("scatter", [x, indices], target, x.dtype)]


# --- normalisation ----------------------------------------------------------------------------


@handles("BatchNormalization")
def batch_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, weight, bias = required(inputs, 0), optional(inputs, 1), optional(inputs, 2)
    channels = x.shape[1] if x.rank > 1 else 1
    output = builder.emit("batch_norm", [x, weight, bias], x.shape, x.dtype)
    # updated running statistics come out of the same kernel and are buffers
    return [output, *(Value((channels,), x.dtype, Role.CONSTANT) for _ in node.outputs[1:])]


@handles("InstanceNormalization")
def instance_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("group_norm", inputs[:3], x.shape, x.dtype, groups=x.shape[1])]


@handles("GroupNormalization")
def group_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("group_norm", inputs[:3], x.shape, x.dtype, groups=node.get("num_groups", 1))]


@handles("LayerNormalization")
def layer_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return _trailing_norm(builder, node, inputs, "layer_norm", 3)


@handles("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return _trailing_norm(builder, node, inputs, "rms_norm", 2)


HANDLERS["com.microsoft", "LayerNormalization"] = layer_norm
HANDLERS["com.microsoft", "SimplifiedLayerNormalization"] = rms_norm


def _trailing_norm(builder: Builder, node: Node, inputs: Inputs, kind: str, num_inputs: int) -> list[Value]:
    x = required(inputs, 0)
    axis = normalise_axis(node.get("axis", -1), x.rank)
    statistics = [1 if i >= axis else dim for i, dim in enumerate(x.shape)]
    shapes = [x.shape, *[statistics] * (len(node.outputs) - 1)]
    return builder.emit_multi(
        kind, inputs[:num_inputs], shapes, [x.dtype] * len(shapes), normalized_size=prod(x.shape[axis:])
    )


@handles("LRN")
def local_response_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("local_response_norm", [x], x.shape, size=node.get("size", 1))]


@handles("LpNormalization")
def l2_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("l2_norm", [x], x.shape)]


@handles("MeanVarianceNormalization")
def mean_variance_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axes = node.get("axes", (0, 2, 3))
    size = prod(x.shape[axis] for axis in axes if not builder.binding.is_batch(x.shape[axis]))
    return [builder.emit("layer_norm", [x], x.shape, normalized_size=size)]


# --- transforms -------------------------------------------------------------------------------


@handles("DFT")
def dft(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axis = node.get("axis", 1) if builder.opset < 20 else builder.number(optional(inputs, 2))
    axis = normalise_axis(-2 if axis is None else int(axis), x.rank)
    shape = list(x.shape)
    length = builder.number(optional(inputs, 1))
    if length is not None:
        shape[axis] = int(length)
    if node.get("onesided", 0):
        if node.get("inverse", 0):
            shape[axis] = int(length) if length is not None else 2 * (shape[axis] - 1)
            shape[-1] = 1
        else:
            shape[axis] = shape[axis] // 2 + 1
            shape[-1] = 2
    else:
        shape[-1] = 2
    return [builder.emit("fft", [x], shape)]


@handles("STFT")
def stft(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    signal, window_value = required(inputs, 0), optional(inputs, 2)
    step, frame = builder.number(required(inputs, 1)), builder.number(optional(inputs, 3))
    if frame is None and window_value is not None:
        frame = window_value.shape[0]
    if not step or not frame:
        raise ShapeUnknown("the frame of STFT is not constant")
    frames = (signal.shape[1] - int(frame)) // int(step) + 1
    bins = int(frame) // 2 + 1 if node.get("onesided", 1) else int(frame)
    return [builder.emit("fft", [signal, window_value], (signal.shape[0], frames, bins, 2), signal.dtype)]


@handles("Col2Im")
def col2im(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, image, block = required(inputs, 0), builder.ints(required(inputs, 1)), builder.ints(required(inputs, 2))
    if image is None or block is None:
        raise ShapeUnknown("the sizes of Col2Im are not constant")
    return [builder.emit("col2im", [x], (x.shape[0], x.shape[1] // prod(block), *image))]


@handles("RotaryEmbedding")
def rotary_embedding(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("rope", [value for value in inputs if value is not None], x.shape, x.dtype)]


HANDLERS["com.microsoft", "RotaryEmbedding"] = rotary_embedding
