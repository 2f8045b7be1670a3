"""Cost rules of forward ops."""

from math import prod

from gnnpred.costs.base import CostRule, RawCost, Sizes
from gnnpred.costs.products import GATES, attention_dims, conv_macs, linear_macs, matmul_macs, recurrent_dims
from gnnpred.graph import Op

# Arithmetic per element of elementwise ops (special functions as the instructions they expand to, roughly).
FLOPS_PER_ELEMENT = {
    **dict.fromkeys(["gelu", "gelu_tanh", "mish", "softplus", "erf", "pow", "pow_scalar", "atan2"], 10),
    **dict.fromkeys(["silu", "sigmoid", "tanh", "quick_gelu", "elu", "selu", "celu", "exp", "log", "sin", "cos"], 5),
    **dict.fromkeys(["lerp", "addcmul", "hardswish", "hardsigmoid", "dropout", "local_response_norm"], 3),
    **dict.fromkeys(["softmax", "log_softmax", "logsumexp", "cross_entropy"], 5),
    **dict.fromkeys(["batch_norm", "layer_norm", "group_norm", "rms_norm", "l2_norm"], 8),
    **dict.fromkeys(["cast", "copy", "concat", "stack", "pad", "roll", "tile", "flip", "fill", "range", "one_hot"], 0),
    **dict.fromkeys(["pixel_shuffle", "tril", "embedding", "gather", "gather_elements", "scatter", "im2col"], 0),
    **dict.fromkeys(["view", "transpose", "slice", "split", "expand", "identity", "random", "topk", "sort"], 0),
    "resize": 7,
    "rope": 3,
    "grid_sample": 20,
}


def one_pass(op: Op, s: Sizes) -> RawCost:
    """One kernel that reads its inputs and writes its outputs."""
    work = sum([s.elements[o] for o in op.outputs])
    return work * FLOPS_PER_ELEMENT.get(op.kind, 1), s.read(op.inputs), s.written(op.outputs), 1


def reduction(op: Op, s: Sizes) -> RawCost:
    return sum([s.elements[i] for i in op.inputs]), s.read(op.inputs), s.written(op.outputs), 1


def _conv(op: Op, s: Sizes) -> RawCost:
    """x, weight -> y; a bias is a second kernel that reads and writes y (``add_`` after cudnn_convolution)."""
    read, written, launches = s.read(op.inputs), s.written(op.outputs), 1
    if len(op.inputs) > 2:
        read, written, launches = read + written, 2 * written, 2
    return 2 * conv_macs(op, s), read, written, launches


def _linear(op: Op, s: Sizes) -> RawCost:
    """x, weight, bias -> y in one kernel (the bias is cuBLASLt's epilogue)."""
    return 2 * linear_macs(op, s), s.read(op.inputs), s.written(op.outputs), 1


def _matmul(op: Op, s: Sizes) -> RawCost:
    return 2 * matmul_macs(op, s), s.read(op.inputs), s.written(op.outputs), 1


def _sdpa(op: Op, s: Sizes) -> RawCost:
    """Flash attention: two products (QK^T and PV), counted in full for causal masks too, as FlopCounterMode does.

    Reads q, k, v and a mask; writes the result and one fp32 logsumexp per query.
    """
    heads, seq_q, seq_k, dim, value_dim = attention_dims(op, s)
    return (
        2.0 * heads * seq_q * seq_k * (dim + value_dim),
        s.read(op.inputs),
        s.written(op.outputs[:1]) + (4 * heads * seq_q if s.is_training else 0),
        1,
    )


def _recurrent(op: Op, s: Sizes) -> RawCost:
    """cuDNN RNN: every weight matrix meets every token; training keeps the gates of all steps (reserve space)."""
    tokens, matrices, _, steps = recurrent_dims(op, s)
    reserve = 0.0
    if s.is_training:
        out = op.outputs[0]
        reserve = s.bytes[out] * (GATES[op.kind] + 1)
    return 2 * tokens * matrices, s.read(op.inputs), s.written(op.outputs) + reserve, 2 * steps + 1


def _batch_norm(op: Op, s: Sizes) -> RawCost:
    """Training: one pass over x for the statistics, a second one to normalise. Inference: one pass.

    Training also counts the batches (``num_batches_tracked.add_(1)``): a launch, no bytes to speak of.
    """
    x = op.inputs[0]
    read, launches = s.read(op.inputs), 1
    if s.is_training and op.attributes.get("training", True):
        read += s.stored[x]
        launches = 2
    return 8 * s.elements[x], read, s.written(op.outputs), launches


def _group_norm(op: Op, s: Sizes) -> RawCost:
    """Row moments, then an elementwise kernel: x is read twice (group_norm_kernel.cu)."""
    x = op.inputs[0]
    return 8 * s.elements[x], s.read(op.inputs) + s.stored[x], s.written(op.outputs), 2


def _l2_norm(op: Op, s: Sizes) -> RawCost:
    """F.normalize: vector_norm reads x, div reads x and writes y."""
    x = op.inputs[0]
    return 3 * s.elements[x], 2 * s.read(op.inputs), s.written(op.outputs), 3


def _local_response_norm(op: Op, s: Sizes) -> RawCost:
    """F.local_response_norm: mul, pad, avg_pool, mul, add, pow, div: 9 reads and 7 writes of the size of x."""
    size = s.bytes[op.outputs[0]]
    return 8 * s.elements[op.inputs[0]], 9 * size, 7 * size, 7


def _dropout(op: Op, s: Sizes) -> RawCost:
    """Writes a mask of one byte per element (fused_dropout); inference and ratio 0 run nothing."""
    if not s.is_training or not op.attributes.get("ratio", 0.5):
        return 0, 0, 0, 0
    elements = s.elements[op.inputs[0]]
    return 3 * elements, s.read(op.inputs), s.written(op.outputs[:1]) + elements, 1


def _max_pool(op: Op, s: Sizes) -> RawCost:
    """Writes an int64 index beside every output, with or without a gradient (max_pool2d_with_indices)."""
    out = op.outputs[0]
    kernel = prod(op.attributes.get("kernel") or (1,))
    return s.elements[out] * kernel, s.read(op.inputs), s.bytes[out] + 8 * s.elements[out], 1


def _avg_pool(op: Op, s: Sizes) -> RawCost:
    return s.elements[op.inputs[0]], s.read(op.inputs), s.written(op.outputs), 1


def _lookup(op: Op, s: Sizes) -> RawCost:
    """Embedding and index_select: the looked-up rows are read, not the table."""
    out = s.written(op.outputs)
    indices = sum([s.bytes[i] for i in op.inputs if not s.tensors[i].dtype.is_float])
    table = max([s.bytes[i] for i in op.inputs], default=0)
    return 0, min(out, table) + indices, out, 1


def _scatter(op: Op, s: Sizes) -> RawCost:
    """The target is cloned, then updated in place."""
    target, rest = op.inputs[0], op.inputs[1:]
    updates = sum([s.bytes[i] for i in rest if s.tensors[i].dtype.is_float])
    return 0, s.read(op.inputs) + updates, s.written(op.outputs) + updates, 2 if s.bytes[target] else 1


def _sort(op: Op, s: Sizes) -> RawCost:
    """Radix sort of value-index pairs: about four passes of reading and writing both (16 key bits per two passes)."""
    pairs = s.read(op.inputs[:1]) + 8 * s.elements[op.inputs[0]]
    return 0, 4 * pairs, 3 * pairs + s.written(op.outputs), 4


def _topk(op: Op, s: Sizes) -> RawCost:
    """Radix select: two passes over x (sbtopk), then the k winners."""
    return s.elements[op.inputs[0]], 2 * s.read(op.inputs[:1]), s.written(op.outputs), 2


def _pad(op: Op, s: Sizes) -> RawCost:
    """Fill of the result, then a copy of x into it."""
    x = op.inputs[0]
    return 0, s.stored[x], s.written(op.outputs) + s.bytes[x], 2


def _quick_gelu(op: Op, s: Sizes) -> RawCost:
    """x * sigmoid(1.702 x): mul, sigmoid, mul."""
    size = s.bytes[op.outputs[0]]
    return 6 * s.elements[op.outputs[0]], 4 * size, 3 * size, 3


def _softsign(op: Op, s: Sizes) -> RawCost:
    """x / (1 + |x|): abs, add, div."""
    size = s.bytes[op.outputs[0]]
    return 3 * s.elements[op.outputs[0]], 4 * size, 3 * size, 3


def _rope(op: Op, s: Sizes) -> RawCost:
    """q * cos + rotate_half(q) * sin: neg of a half, cat, two muls, add: 5.5 reads, 4.5 writes of q."""
    x, rest = op.inputs[0], op.inputs[1:]
    size = s.bytes[x]
    return 3 * s.elements[x], 5.5 * size + s.read(rest), 4.5 * size, 5


def _cross_entropy(op: Op, s: Sizes) -> RawCost:
    """log_softmax reads logits and writes log-probabilities of their type; nll_loss reads one of them per row.

    Where the loss is wider than the logits (autocast), the log-probabilities are converted in between.
    """
    logits = op.inputs[0]
    elements = s.elements[logits]
    shape = s.tensors[logits].shape
    axis = op.attributes.get("axis", 1 if len(shape) > 1 else -1)
    rows = elements // max(shape[axis] if shape else 1, 1)
    size, width = s.bytes[logits], s.width[op.outputs[0]]
    cast = elements * width if width != s.width[logits] else 0
    read = s.read((logits,)) + rows * (width + 8)  # with an int64 target per row
    return 5 * elements, read + (size if cast else 0), size + cast, 3 if cast else 2


def _pointwise_loss(op: Op, s: Sizes) -> RawCost:
    """mse, bce: one elementwise kernel with a result of the size of x, then its mean."""
    x = op.inputs[0]
    size = s.bytes[x]
    read = s.read(op.inputs) + (size if len(op.inputs) < 2 else 0)  # a target of the same size
    return 4 * s.elements[x], read + size, size + s.written(op.outputs), 2


FORWARD_RULES: dict[str, CostRule] = {
    "conv": _conv, "conv_transpose": _conv, "linear": _linear, "matmul": _matmul, "sdpa": _sdpa,
    "lstm": _recurrent, "gru": _recurrent, "rnn": _recurrent,
    "batch_norm": _batch_norm, "group_norm": _group_norm, "l2_norm": _l2_norm,
    "local_response_norm": _local_response_norm, "dropout": _dropout,
    "max_pool": _max_pool, "adaptive_max_pool": _max_pool, "avg_pool": _avg_pool, "adaptive_avg_pool": _avg_pool,
    "lp_pool": _avg_pool, "embedding": _lookup, "gather": _lookup, "gather_elements": _lookup, "compress": _lookup,
    "scatter": _scatter, "sort": _sort, "unique": _sort, "topk": _topk, "pad": _pad,
    "quick_gelu": _quick_gelu, "softsign": _softsign, "rope": _rope,
    "cross_entropy": _cross_entropy, "mse_loss": _pointwise_loss, "bce_loss": _pointwise_loss, "sum_loss": reduction,
}  # fmt: skip
