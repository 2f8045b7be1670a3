"""ONNX Runtime's own operators (com.microsoft): fused forms, taken apart into what a framework runs."""

from __future__ import annotations

from gnnpred.graph import DType
from gnnpred.onnx_io.builder import Builder, ShapeUnknown, normalise_axis
from gnnpred.onnx_io.handlers import HANDLERS, MICROSOFT, Handler, Inputs, handles, optional, required
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.ops_matmul import (
    append_past,
    emit_conv,
    emit_product,
    emit_recurrent,
    emit_sdpa,
    merge_heads,
    split_heads,
)
from gnnpred.onnx_io.ops_movement import emit_concat
from gnnpred.onnx_io.ops_reduce import emit_pool, emit_reduction
from gnnpred.onnx_io.ops_shape import emit_split
from gnnpred.onnx_io.values import Value

_ACTIVATIONS = {
    "Relu": "relu", "LeakyRelu": "leaky_relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Clip": "clamp",
    "HardSigmoid": "hardsigmoid", "Gelu": "gelu",
}  # fmt: skip

# operators of the standard set that also live in com.microsoft
for _op_type in (
    "Gelu", "Trilu", "Unique", "Range", "Pad", "DequantizeLinear", "QuantizeLinear", "GridSample",
    "MatMulInteger",
):  # fmt: skip
    if ("", _op_type) in HANDLERS:
        HANDLERS[MICROSOFT, _op_type] = HANDLERS["", _op_type]


def _add_bias(builder: Builder, x: Value, bias: Value | None) -> Value:
    return x if bias is None else builder.emit("add", [x, bias], builder.broadcast(x.shape, bias.shape), x.dtype)


def _activation_with_bias(kind: str) -> Handler:
    def handler(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
        x = _add_bias(builder, required(inputs, 0), optional(inputs, 1))
        return [builder.emit(kind, [x], x.shape)]

    return handler


for _op_type, _kind in (("BiasGelu", "gelu"), ("FastGelu", "gelu_tanh"), ("QuickGelu", "quick_gelu")):
    HANDLERS[MICROSOFT, _op_type] = _activation_with_bias(_kind)


@handles("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    a, b = required(inputs, 0), required(inputs, 1)
    a = _swap_last(builder, a) if node.get("transA", 0) else a
    b = _swap_last(builder, b) if node.get("transB", 0) else b
    product = emit_product(builder, a, b)
    if node.get("alpha", 1.0) != 1.0:
        product = builder.emit(
            "mul", [product, builder.constant(node.get("alpha"), dtype=product.dtype)], product.shape
        )
    return [product]


def _swap_last(builder: Builder, value: Value) -> Value:
    if value.rank < 2:
        return value
    return builder.transpose(value, (*range(value.rank - 2), value.rank - 1, value.rank - 2))


@handles("FusedGemm", domain=MICROSOFT)
def fused_gemm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    product = HANDLERS["", "Gemm"](builder, node, inputs)[0]
    return [_activate(builder, node, product)]


def _activate(builder: Builder, node: Node, x: Value) -> Value:
    kind = _ACTIVATIONS.get(node.text("activation"))
    return x if kind is None else builder.emit(kind, [x], x.shape)


@handles("FusedConv", domain=MICROSOFT)
def fused_conv(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    output = emit_conv(builder, node, required(inputs, 0), required(inputs, 1), optional(inputs, 2))
    residual = optional(inputs, 3)
    if residual is not None:
        output = builder.emit("add", [output, residual], output.shape)
    return [_activate(builder, node, output)]


@handles("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", domain=MICROSOFT)
def matmul_packed_weight(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    """A product with a weight packed to 4 or 8 bits; the weight keeps its logical shape (n, k)."""
    x, packed = required(inputs, 0), required(inputs, 1)
    depth, columns = node.get("K"), node.get("N")
    if not depth or not columns:
        raise ShapeUnknown("the sizes K and N are missing")
    bits = node.get("bits", 4)
    weight = Value((columns, depth), DType.INT4 if bits <= 4 else DType.INT8, packed.role, name=packed.name)
    output = (*x.shape[:-1], columns)
    return [builder.emit("linear", [x, weight, optional(inputs, 5)], output, x.dtype)]


@handles("MatMulIntegerToFloat", "DynamicQuantizeMatMul", domain=MICROSOFT)
def matmul_to_float(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    position = 6 if node.op_type == "MatMulIntegerToFloat" else 4
    product = emit_product(builder, required(inputs, 0), required(inputs, 1), dtype=DType.FP32)
    return [_add_bias(builder, product, optional(inputs, position))]


# --- normalisation ----------------------------------------------------------------------------


@handles("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_layer_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, skip, weight = (required(inputs, position) for position in range(3))
    if "Simplified" in node.op_type:
        kind, norm_inputs, bias = "rms_norm", [weight], optional(inputs, 3)
    else:
        kind, norm_inputs, bias = "layer_norm", [weight, optional(inputs, 3)], optional(inputs, 4)
    total = builder.emit("add", [x, skip], builder.broadcast(x.shape, skip.shape), x.dtype)
    total = _add_bias(builder, total, bias)
    output = builder.emit(kind, [total, *norm_inputs], total.shape, normalized_size=total.shape[-1])
    return [output, output, output, total][: max(1, len(node.outputs))]


@handles("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_norm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    ids, segments = required(inputs, 0), optional(inputs, 1)
    word, position, segment = required(inputs, 2), required(inputs, 3), optional(inputs, 4)
    shape = (*ids.shape, word.shape[1])
    total = builder.emit("embedding", [word, ids], shape, word.dtype)
    positions = builder.emit("slice", [position], (ids.shape[1], word.shape[1]), axes=(0,), steps=(1,))
    total = builder.emit("add", [total, positions], shape)
    if segment is not None and segments is not None:
        total = builder.emit("add", [total, builder.emit("embedding", [segment, segments], shape, word.dtype)], shape)
    norm = [total, optional(inputs, 5), optional(inputs, 6)]
    output = builder.emit("layer_norm", norm, shape, normalized_size=word.shape[1])
    mask_index = Value((ids.shape[0],), DType.INT32, output.role)
    if len(node.outputs) > 1 and node.outputs[1]:
        mask = optional(inputs, 7) or ids
        mask_index = builder.emit("reduce_sum", [mask], (ids.shape[0],), DType.INT32, axes=(1,), keepdims=False)
    return [output, mask_index, total][: max(1, len(node.outputs))]


@handles("GroupNorm", "SkipGroupNorm", domain=MICROSOFT)
def group_norm_nhwc(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    weight, bias = required(inputs, 1), required(inputs, 2)
    if node.op_type == "SkipGroupNorm":
        x = builder.emit("add", [x, required(inputs, 3)], x.shape)
        x = _add_bias(builder, x, optional(inputs, 4))
    output = builder.emit("group_norm", [x, weight, bias], x.shape, groups=node.get("groups", 1))
    if node.get("activation", 0):
        output = builder.emit("silu", [output], output.shape)
    return [output, x][: max(1, len(node.outputs))]


@handles("BiasAdd", domain=MICROSOFT)
def bias_add(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = _add_bias(builder, required(inputs, 0), optional(inputs, 1))
    return [x if optional(inputs, 2) is None else builder.emit("add", [x, inputs[2]], x.shape)]


@handles("BiasDropout", "BitmaskBiasDropout", domain=MICROSOFT)
def bias_dropout(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = _add_bias(builder, required(inputs, 0), optional(inputs, 1))
    ratio = builder.number(optional(inputs, 3))
    x = builder.emit("dropout", [x], x.shape, ratio=0.5 if ratio is None else float(ratio))
    residual = optional(inputs, 2)
    x = x if residual is None else builder.emit("add", [x, residual], x.shape)
    return [x, x][: max(1, len(node.outputs))]


@handles("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = _add_bias(builder, required(inputs, 0), optional(inputs, 1))
    return [builder.emit("softmax", [x], x.shape, axis=normalise_axis(node.get("axis", -1), x.rank))]


@handles("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = _add_bias(builder, required(inputs, 0), optional(inputs, 1))
    first, second = emit_split(builder, x, x.rank - 1, [x.shape[-1] // 2] * 2)
    return [builder.emit("mul", [first, builder.emit("gelu", [second], second.shape)], first.shape)]


# --- attention --------------------------------------------------------------------------------


@handles("Attention", "QAttention", domain=MICROSOFT)
def packed_projection_attention(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    """Attention with its own projection: input (B, S, H), one weight (H, q + k + v)."""
    x, weight, bias = required(inputs, 0), required(inputs, 1), optional(inputs, 2)
    quantized = node.op_type == "QAttention"
    past, mask = (optional(inputs, 8), None) if quantized else (optional(inputs, 4), optional(inputs, 5))
    heads = node.get("num_heads", 0)
    sizes = node.get("qkv_hidden_sizes") or (weight.shape[1] // 3,) * 3
    dtype = DType.FP32 if quantized and not x.dtype.is_float else x.dtype
    packed = builder.emit("linear", [x, weight, bias], (*x.shape[:-1], weight.shape[1]), dtype)
    q, k, v = (split_heads(builder, part, heads) for part in emit_split(builder, packed, 2, sizes))
    if past is not None and past.rank == 5:  # (2, B, heads, past, d)
        past_key, past_value = (
            builder.emit("slice", [past], past.shape[1:], axes=(0,), steps=(1,), drop_axes=True) for _ in range(2)
        )
        k, v = append_past(builder, past_key, k), append_past(builder, past_value, v)
    out = merge_heads(builder, emit_sdpa(builder, q, k, v, mask, causal=bool(node.get("unidirectional", 0))))
    if len(node.outputs) < 2 or not node.outputs[1]:
        return [out]
    return [out, builder.emit("stack", [k, v], (2, *k.shape), k.dtype)]


@handles("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    q, k, v = required(inputs, 0), optional(inputs, 1), optional(inputs, 2)
    bias = optional(inputs, 3) if node.op_type == "MultiHeadAttention" else optional(inputs, 10)
    mask = optional(inputs, 5) if node.op_type == "MultiHeadAttention" else optional(inputs, 4)
    past_key, past_value = (
        (optional(inputs, 6), optional(inputs, 7))
        if node.op_type == "MultiHeadAttention"
        else (optional(inputs, 5), optional(inputs, 6))
    )
    heads = node.get("num_heads", 0)
    if q.rank == 5:  # packed (B, S, heads, 3, d)
        batch, length, heads, _, width = q.shape
        q, k, v = (
            builder.transpose(
                builder.emit("slice", [q], (batch, length, heads, width), axes=(3,), steps=(1,), drop_axes=True),
                (0, 2, 1, 3),
            )
            for _ in range(3)
        )
    elif k is None:
        raise ShapeUnknown("keys are missing")
    elif k.rank == 5:  # packed (B, S, heads, 2, d)
        batch, length, heads, _, width = k.shape
        packed = k
        k, v = (
            builder.transpose(
                builder.emit("slice", [packed], (batch, length, heads, width), axes=(3,), steps=(1,), drop_axes=True),
                (0, 2, 1, 3),
            )
            for _ in range(2)
        )
        q = split_heads(builder, q, heads)
    else:
        if bias is not None:
            q = builder.emit("add", [q, bias], q.shape)
            k = builder.emit("add", [k, bias], k.shape) if k.rank == 3 else k
            v = builder.emit("add", [v, bias], v.shape) if v is not None and v.rank == 3 else v
        q = split_heads(builder, q, heads)
        k = k if k.rank == 4 else split_heads(builder, k, heads)
        if v is None:
            raise ShapeUnknown("values are missing")
        v = v if v.rank == 4 else split_heads(builder, v, heads)
    k, v = append_past(builder, past_key, k), append_past(builder, past_value, v)
    out = emit_sdpa(builder, q, k, v, mask, causal=bool(node.get("unidirectional", 0)))
    return [merge_heads(builder, out), k, v][: max(1, len(node.outputs))]


@handles("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    q, k, v = required(inputs, 0), optional(inputs, 1), optional(inputs, 2)
    heads, kv_heads = node.get("num_heads", 0), node.get("kv_num_heads", 0)
    if k is None or v is None:  # packed (B, S, (heads + 2*kv_heads) * d)
        width = q.shape[2] // (heads + 2 * kv_heads)
        q, k, v = emit_split(builder, q, 2, [heads * width, kv_heads * width, kv_heads * width])
    q = split_heads(builder, q, heads)
    k, v = (split_heads(builder, value, kv_heads) for value in (k, v))
    if node.get("do_rotary", 0):
        tables = [value for value in (optional(inputs, 7), optional(inputs, 8)) if value is not None]
        q, k = (builder.emit("rope", [value, *tables], value.shape) for value in (q, k))
    k, v = append_past(builder, optional(inputs, 3), k), append_past(builder, optional(inputs, 4), v)
    out = emit_sdpa(builder, q, k, v, None, causal=True)
    return [merge_heads(builder, out), k, v][: max(1, len(node.outputs))]


# --- quantized --------------------------------------------------------------------------------


@handles("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, weight, recurrence, bias = (optional(inputs, position) for position in range(4))
    # quantized recurrence weights are stored transposed: (directions, hidden, 4*hidden)
    if recurrence is None or not node.get("hidden_size"):
        raise ShapeUnknown("hidden_size is missing")
    return emit_recurrent(builder, node, "lstm", x, weight, recurrence, bias)


@handles("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def qlinear_binary(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    a, b = required(inputs, 0), required(inputs, 3)
    kind = "add" if node.op_type == "QLinearAdd" else "mul"
    return [builder.emit(kind, [a, b], builder.broadcast(a.shape, b.shape), a.dtype)]


@handles("QLinearSigmoid", "QLinearLeakyRelu", domain=MICROSOFT)
def qlinear_unary(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("sigmoid" if node.op_type == "QLinearSigmoid" else "leaky_relu", [x], x.shape)]


@handles("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("softmax", [x], x.shape, axis=normalise_axis(node.get("axis", -1), x.rank))]


@handles("QLinearAveragePool", domain=MICROSOFT)
def qlinear_average_pool(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    if node.get("channels_last", 0):
        raise ShapeUnknown("channels last")
    return emit_pool(builder, node, "avg_pool", x, [x.dtype])


@handles("QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_global_average_pool(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axes = range(1, x.rank - 1) if node.get("channels_last", 0) else range(2, x.rank)
    return [emit_reduction(builder, "reduce_mean", x, axes, keepdims=True)]


@handles("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [
        emit_concat(builder, [required(inputs, position) for position in range(2, len(inputs), 3)], node.get("axis"))
    ]
