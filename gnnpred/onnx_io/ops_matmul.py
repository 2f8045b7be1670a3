"""Products: MatMul, Gemm, Einsum, convolutions, recurrent layers and attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gnnpred.graph import DType
from gnnpred.onnx_io.builder import Builder, ShapeUnknown
from gnnpred.onnx_io.handlers import Inputs, handles, optional, required
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.values import Value


def emit_product(
    builder: Builder, a: Value, b: Value, *, bias: Value | None = None, dtype: DType | None = None
) -> Value:
    """``a @ b``: ``linear`` where b is a weight matrix, else ``matmul``."""
    shape = matmul_shape(builder, a.shape, b.shape)
    if b.rank == 2 and not b.depends_on_data and a.rank >= 1:
        return builder.emit("linear", [a, b, bias], shape, dtype or a.dtype)
    result = builder.emit("matmul", [a, b], shape, dtype or a.dtype)
    if bias is not None:
        result = builder.emit("add", [result, bias], shape, result.dtype)
    return result


def matmul_shape(builder: Builder, a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """Shape of numpy's matmul."""
    if not a or not b:
        raise ShapeUnknown("MatMul of a scalar")
    left = (1, *a) if len(a) == 1 else tuple(a)
    right = (*b, 1) if len(b) == 1 else tuple(b)
    if left[-1] != right[-2]:
        builder.reconcile(left[-1], right[-2])
    batch = builder.broadcast(left[:-2], right[:-2])
    rows = () if len(a) == 1 else (left[-2],)
    columns = () if len(b) == 1 else (right[-1],)
    return (*batch, *rows, *columns)


@handles("MatMul")
def matmul(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [emit_product(builder, required(inputs, 0), required(inputs, 1))]


@handles("MatMulInteger")
def matmul_integer(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [emit_product(builder, required(inputs, 0), required(inputs, 1), dtype=DType.INT32)]


@handles("QLinearMatMul")
def qlinear_matmul(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    a, b, zero_point = required(inputs, 0), required(inputs, 3), required(inputs, 7)
    return [emit_product(builder, a, b, dtype=zero_point.dtype)]


@handles("Gemm")
def gemm(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    a, b, bias = required(inputs, 0), required(inputs, 1), optional(inputs, 2)
    if a.rank != 2:  # old exporters flatten implicitly
        a = builder.view(a, (a.shape[0], prod(a.shape[1:])) if a.rank else (1, 1))
    if b.rank != 2:
        raise ShapeUnknown("Gemm wants matrices")
    if node.get("transA", 0):
        a = builder.transpose(a, (1, 0))
    columns = b.shape[0] if node.get("transB", 0) else b.shape[1]
    depth = b.shape[1] if node.get("transB", 0) else b.shape[0]
    if a.shape[1] != depth:
        builder.reconcile(a.shape[1], depth)
    if bias is not None and bias.array is not None and not bias.array.any() and bias.is_constant:
        bias = None  # a zero C is how "no bias" was written
    if not b.depends_on_data:  # a linear's weight may be stored either way round
        return [builder.emit("linear", [a, b, bias], (a.shape[0], columns), a.dtype)]
    if node.get("transB", 0):
        b = builder.transpose(b, (1, 0))
    return [emit_product(builder, a, b, bias=bias)]


# --- Einsum -----------------------------------------------------------------------------------


@handles("Einsum")
def einsum(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    """Two operands with a contraction become permute, view and matmul, as torch.einsum runs them."""
    operands = [value for value in inputs if value is not None]
    terms, out_term = _einsum_terms(node.text("equation"), [value.rank for value in operands])
    size: dict[str, int] = {}
    for term, value in zip(terms, operands, strict=True):
        for letter, dim in zip(term, value.shape, strict=True):
            known = size.get(letter, 1)
            size[letter] = dim if known == 1 else known if dim == 1 else builder.reconcile(known, dim)
    shape = tuple(size[letter] for letter in out_term)
    if len(operands) == 2 and all(len(set(term)) == len(term) for term in terms):
        a, b = (set(term) for term in terms)
        contracted = [letter for letter in terms[0] if letter in b and letter not in out_term]
        lost = (a ^ b) - set(out_term)
        if contracted and not lost:
            return [_einsum_product(builder, operands, terms, out_term, contracted, size)]
        if not contracted and not lost and not _broadcasts(terms, operands, size):
            return [builder.emit("mul", operands, shape, operands[0].dtype)]
    return [builder.emit("einsum", operands, shape, operands[0].dtype, equation=node.text("equation"))]


def _broadcasts(terms: Sequence[str], operands: Sequence[Value], size: dict[str, int]) -> bool:
    return any(
        size[c] != d for term, v in zip(terms, operands, strict=True) for c, d in zip(term, v.shape, strict=True)
    )


def _einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Subscripts without ellipses (free letters stand for their axes) and the output's subscript."""
    equation = equation.replace(" ", "")
    left, arrow, out_term = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks) or not equation or len(equation) > 200:
        raise ShapeUnknown(f"einsum equation {equation!r}")
    free = [chr(0x4E00 + position) for position in range(32)]
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    widest = max((w for w, term in zip(widths, terms, strict=True) if "..." in term), default=0)
    if widest > len(free) or min(widths) < 0:
        raise ShapeUnknown(f"einsum equation {equation!r}")
    expanded = [
        term.replace("...", "".join(free[widest - width : widest])) for term, width in zip(terms, widths, strict=True)
    ]
    if not arrow:
        letters = "".join(expanded)
        named = sorted(c for c in set(letters) if letters.count(c) == 1 and c not in free)
        out_term = ("..." if "..." in left else "") + "".join(named)
    return expanded, out_term.replace("...", "".join(free[:widest]))


def _einsum_product(
    builder: Builder,
    operands: Sequence[Value],
    terms: Sequence[str],
    out_term: str,
    contracted: Sequence[str],
    size: dict[str, int],
) -> Value:
    a, b = operands
    batch = [c for c in out_term if c in terms[0] and c in terms[1]]
    rows = [c for c in out_term if c in terms[0] and c not in terms[1]]
    columns = [c for c in out_term if c in terms[1] and c not in terms[0]]
    if not a.depends_on_data and b.depends_on_data and not batch:  # weight first: the product is symmetric
        a, b, terms, rows, columns = b, a, [terms[1], terms[0]], columns, rows

    def sizes(letters: Sequence[str]) -> list[int]:
        return [size[c] for c in letters]

    def arranged(value: Value, term: str, order: Sequence[str], shape: Sequence[int]) -> Value:
        value = builder.transpose(value, [term.index(c) for c in order])
        return builder.view(value, shape)

    depth = prod(sizes(contracted))
    if not batch and not b.depends_on_data:
        left = arranged(a, terms[0], [*rows, *contracted], [*sizes(rows), depth])
        right = arranged(b, terms[1], [*contracted, *columns], [depth, prod(sizes(columns))])
        product = builder.emit("linear", [left, right], [*sizes(rows), prod(sizes(columns))], a.dtype)
        order = [*rows, *columns]
    else:
        head = sizes(batch)
        left = arranged(a, terms[0], [*batch, *rows, *contracted], [*head, prod(sizes(rows)), depth])
        right = arranged(b, terms[1], [*batch, *contracted, *columns], [*head, depth, prod(sizes(columns))])
        product = builder.emit("matmul", [left, right], [*head, prod(sizes(rows)), prod(sizes(columns))], a.dtype)
        order = [*batch, *rows, *columns]
    product = builder.view(product, sizes(order))
    return builder.transpose(product, [order.index(c) for c in out_term])


# --- convolution ------------------------------------------------------------------------------


@handles("Conv")
def conv(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [emit_conv(builder, node, required(inputs, 0), required(inputs, 1), optional(inputs, 2))]


@handles("ConvInteger")
def conv_integer(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [emit_conv(builder, node, required(inputs, 0), required(inputs, 1), None, dtype=DType.INT32)]


@handles("QLinearConv")
def qlinear_conv(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    zero_point = required(inputs, 7)
    x, weight, bias = required(inputs, 0), required(inputs, 3), optional(inputs, 8)
    return [emit_conv(builder, node, x, weight, bias, dtype=zero_point.dtype)]


@handles("DeformConv")
def deform_conv(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, weight, _, bias = (optional(inputs, position) for position in range(4))
    if x is None or weight is None:
        raise ShapeUnknown("DeformConv without input or weight")
    return [emit_conv(builder, node, x, weight, bias)]


def emit_conv(
    builder: Builder, node: Node, x: Value, weight: Value, bias: Value | None, *, dtype: DType | None = None
) -> Value:
    """A convolution with the node's attributes."""
    rank = x.rank - 2
    if rank < 1 or weight.rank != x.rank:
        raise ShapeUnknown("Conv input and weight ranks differ")
    groups = node.get("group", 1)
    if groups < 1 or weight.shape[1] * groups != x.shape[1]:
        raise ShapeUnknown(f"a Conv weight {weight.shape} in {groups} groups does not fit an input {x.shape}")
    kernel = tuple(weight.shape[2:])
    stride, dilation, pads = window(node, x.shape[2:], kernel)
    spatial = [
        window_size(dim, kernel[i], stride[i], dilation[i], pads[i] + pads[i + rank])
        for i, dim in enumerate(x.shape[2:])
    ]
    return builder.emit(
        "conv",
        [x, weight, bias],
        (x.shape[0], weight.shape[0], *spatial),
        dtype or x.dtype,
        kernel=kernel,
        stride=stride,
        dilation=dilation,
        padding=_padding(pads, rank),
        groups=groups,
    )


def _padding(pads: Sequence[int], rank: int) -> tuple[int, ...]:
    begin, end = tuple(pads[:rank]), tuple(pads[rank:])
    return begin if begin == end else (*begin, *end)


def window(
    node: Node, spatial: Sequence[int], kernel: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Stride, dilation and pads (begins, then ends) of a convolution or pooling node."""
    rank = len(kernel)
    stride = tuple(node.get("strides") or (1,) * rank)
    dilation = tuple(node.get("dilations") or (1,) * rank)
    pads = tuple(node.get("pads") or (0,) * (2 * rank))
    if min(stride) < 1 or min(dilation) < 1 or len(stride) != rank or len(dilation) != rank or len(pads) != 2 * rank:
        raise ShapeUnknown(f"stride {stride}, dilation {dilation} and pads {pads} do not fit rank {rank}")
    auto_pad = node.text("auto_pad", "NOTSET")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        begin, end = [], []
        for axis, dim in enumerate(spatial):
            out = -(-dim // stride[axis])
            total = max(0, (out - 1) * stride[axis] + (kernel[axis] - 1) * dilation[axis] + 1 - dim)
            small = total // 2
            begin.append(small if auto_pad == "SAME_UPPER" else total - small)
            end.append(total - begin[-1])
        pads = (*begin, *end)
    elif auto_pad == "VALID":
        pads = (0,) * (2 * rank)
    return stride, dilation, pads


def window_size(dim: int, kernel: int, stride: int, dilation: int, padding: int, *, ceil_mode: bool = False) -> int:
    """Output size of a sliding window along one axis."""
    free = dim + padding - ((kernel - 1) * dilation + 1)
    size = (-(-free // stride) if ceil_mode else free // stride) + 1
    if size < 1:
        raise ShapeUnknown(f"a window of {kernel} does not fit a dimension of {dim} with padding {padding}")
    return size


@handles("ConvTranspose")
def conv_transpose(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, weight, bias = required(inputs, 0), required(inputs, 1), optional(inputs, 2)
    rank = x.rank - 2
    if rank < 1 or weight.rank != x.rank:
        raise ShapeUnknown("ConvTranspose input and weight ranks differ")
    kernel = tuple(weight.shape[2:])
    stride = tuple(node.get("strides") or (1,) * rank)
    dilation = tuple(node.get("dilations") or (1,) * rank)
    pads = tuple(node.get("pads") or (0,) * (2 * rank))
    output_padding = tuple(node.get("output_padding") or (0,) * rank)
    groups = node.get("group", 1)
    spatial = node.get("output_shape")
    if spatial is None:
        if node.text("auto_pad", "NOTSET").startswith("SAME"):
            spatial = [dim * stride[i] for i, dim in enumerate(x.shape[2:])]
        else:
            spatial = [
                (dim - 1) * stride[i] + output_padding[i] + (kernel[i] - 1) * dilation[i] + 1 - pads[i] - pads[i + rank]
                for i, dim in enumerate(x.shape[2:])
            ]
    return [
        builder.emit(
            "conv_transpose",
            [x, weight, bias],
            (x.shape[0], weight.shape[1] * groups, *tuple(spatial)[-rank:]),
            x.dtype,
            kernel=kernel,
            stride=stride,
            dilation=dilation,
            padding=_padding(pads, rank),
            groups=groups,
        )
    ]


# --- recurrent --------------------------------------------------------------------------------


@handles("LSTM", "GRU", "RNN")
def recurrent(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, weight, recurrence, bias = (optional(inputs, position) for position in range(4))
    return emit_recurrent(builder, node, node.op_type.lower(), x, weight, recurrence, bias)


def emit_recurrent(
    builder: Builder,
    node: Node,
    kind: str,
    x: Value | None,
    weight: Value | None,
    recurrence: Value | None,
    bias: Value | None,
) -> list[Value]:
    """One recurrent layer; initial states, sequence lengths and peepholes are left out."""
    if x is None or x.rank != 3 or recurrence is None:
        raise ShapeUnknown("a recurrent layer wants an input of rank 3 and its weights")
    num_directions = 2 if node.text("direction", "forward") == "bidirectional" else 1
    hidden_size = node.get("hidden_size") or recurrence.shape[-1]
    batch_first = bool(node.get("layout", 0))
    batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    if batch_first:
        sequence = (batch, steps, num_directions, hidden_size)
        state = (batch, num_directions, hidden_size)
    else:
        sequence = (steps, num_directions, batch, hidden_size)
        state = (num_directions, batch, hidden_size)
    shapes = [sequence, state, state][: 3 if kind == "lstm" else 2]
    return builder.emit_multi(
        kind,
        [x, weight, recurrence, bias],
        shapes,
        [x.dtype] * len(shapes),
        hidden_size=hidden_size,
        num_directions=num_directions,
        num_steps_axis=1 if batch_first else 0,
    )


# --- attention --------------------------------------------------------------------------------


def split_heads(builder: Builder, value: Value, num_heads: int) -> Value:
    """(B, S, heads*d) -> (B, heads, S, d), as views."""
    if value.rank != 3 or num_heads < 1 or value.shape[2] % num_heads:
        raise ShapeUnknown(f"{value.shape} does not split into {num_heads} heads")
    batch, length, width = value.shape
    value = builder.view(value, (batch, length, num_heads, width // num_heads))
    return builder.transpose(value, (0, 2, 1, 3))


def merge_heads(builder: Builder, value: Value) -> Value:
    """(B, heads, S, d) -> (B, S, heads*d), as views."""
    batch, heads, length, width = value.shape
    return builder.view(builder.transpose(value, (0, 2, 1, 3)), (batch, length, heads * width))


def emit_sdpa(builder: Builder, q: Value, k: Value, v: Value, mask: Value | None, *, causal: bool) -> Value:
    """Attention on (B, heads, S, d); fewer key heads than query heads are grouped-query attention."""
    if q.rank != 4 or k.rank != 4 or v.rank != 4:
        raise ShapeUnknown("attention wants rank 4")
    return builder.emit("sdpa", [q, k, v, mask], (*q.shape[:3], v.shape[3]), q.dtype, causal=causal)


def append_past(builder: Builder, past: Value | None, present: Value) -> Value:
    """Cached keys or values in front of the new ones (concatenated along the sequence)."""
    if past is None or past.rank != 4:
        return present
    batch, heads, length, width = present.shape
    return builder.emit("concat", [past, present], (batch, heads, past.shape[2] + length, width), present.dtype, axis=2)


@handles("Attention")
def attention(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    q, k, v = (required(inputs, position) for position in range(3))
    mask, past_key, past_value = (optional(inputs, position) for position in (3, 4, 5))
    packed = q.rank == 3
    if packed:
        q_heads, kv_heads = node.get("q_num_heads", 0), node.get("kv_num_heads", 0)
        q, k, v = (split_heads(builder, t, h) for t, h in ((q, q_heads), (k, kv_heads), (v, kv_heads)))
    k, v = append_past(builder, past_key, k), append_past(builder, past_value, v)
    out = emit_sdpa(builder, q, k, v, mask, causal=bool(node.get("is_causal", 0)))
    outputs = [merge_heads(builder, out) if packed else out, k, v]
    if len(node.outputs) > 3:  # the scores are asked for as well
        outputs.append(builder.emit("matmul", [q, k], (*q.shape[:3], k.shape[2]), q.dtype))
    return outputs[: max(1, len(node.outputs))]
