"""Cost rules of backward ops.

``op.inputs`` are the gradients and saved tensors that the kernels read, ``op.outputs`` the gradients they write
(``passes.backward``).
"""

from math import prod

from gnnpred.costs.base import CostRule, RawCost, Sizes
from gnnpred.costs.forward import FLOPS_PER_ELEMENT
from gnnpred.costs.products import (
    GATES,
    attention_dims,
    conv_macs,
    forward_of,
    linear_macs,
    matmul_macs,
    recurrent_dims,
)
from gnnpred.graph import Component, Op


def backward_one_pass(op: Op, s: Sizes) -> RawCost:
    work = sum([s.elements[o] for o in op.outputs])
    return work * 2 * max(1, FLOPS_PER_ELEMENT.get(op.kind, 1)), s.read(op.inputs), s.written(op.outputs), 1


def _weight_product_backward(op: Op, s: Sizes) -> RawCost:
    """Each gradient of a convolution or linear has the multiply-adds of the forward."""
    forward = forward_of(op, s)
    macs = linear_macs(forward, s) if op.kind == "linear" else conv_macs(forward, s)
    return 2 * macs, s.read(op.inputs), s.written(op.outputs), 1


def _matmul_backward(op: Op, s: Sizes) -> RawCost:
    """One product per operand; a broadcast operand has its gradient summed from the full batch afterwards."""
    forward = forward_of(op, s)
    read, written, launches = s.read(op.inputs), s.written(op.outputs), 1
    out = s.tensors[forward.outputs[0]].shape
    target = s.tensors[op.outputs[0]].shape
    if len(target) > 2 or len(out) > 2:
        batch = prod(out[:-2]) if len(out) > 2 else 1
        own = prod(target[:-2]) if len(target) > 2 else 1
        if 1 < own < batch:
            full = written * batch / own
            read, written, launches = read + full, written + full, 2
    return 2 * matmul_macs(forward, s), read, written, launches


def _sdpa_backward(op: Op, s: Sizes) -> RawCost:
    """Flash backward: five products (scores again, dV, dP, dQ, dK) against two forward; rowsum(dO * O) before them.

    Dao et al., FlashAttention (arXiv 2205.14135), algorithm 4; FlopCounterMode counts the same.
    """
    heads, seq_q, seq_k, dim, value_dim = attention_dims(forward_of(op, s), s)
    flops = 2.0 * heads * seq_q * seq_k * (3 * dim + 2 * value_dim)
    return flops, s.read(op.inputs) + 8 * heads * seq_q, s.written(op.outputs) + 4 * heads * seq_q, 2


def _recurrent_backward(op: Op, s: Sizes) -> RawCost:
    """Through time: one product with every weight per token, gates re-read; weight gradients: one product each."""
    forward = forward_of(op, s)
    tokens, matrices, _, steps = recurrent_dims(forward, s)
    flops = 2 * tokens * matrices
    gates = s.bytes[forward.outputs[0]] * GATES[op.kind]
    if op.component is Component.WEIGHT_GRADIENT:
        return flops, s.read(op.inputs) + gates, s.written(op.outputs), 2
    return flops, s.read(op.inputs) + gates, s.written(op.outputs) + gates, 2 * steps + 1


def _norm_backward(op: Op, s: Sizes) -> RawCost:
    """Two passes over gradient and x: the sums (or weight gradients) first, then the input gradient.

    batch_norm: Normalization.cuh; layer_norm and rms_norm: layer_norm_kernel.cu (GammaBetaBackward beside the input
    gradient kernel); group_norm: group_norm_kernel.cu.
    """
    dy, x = op.inputs[0], op.inputs[1]
    read = s.read(op.inputs)
    launches = 1 if op.kind == "batch_norm" else 2
    if (op.kind != "layer_norm" and op.kind != "rms_norm") or len(op.outputs) > 1:
        read += s.stored[dy] + s.stored[x]
    return 11 * s.elements[x], read, s.written(op.outputs), launches


def _l2_norm_backward(op: Op, s: Sizes) -> RawCost:
    """div backward (3 kernels), norm backward (2), accumulation: 9 reads, 6 writes of the size of x."""
    size = s.bytes[op.outputs[0]]
    return 8 * s.elements[op.outputs[0]], 9 * size, 6 * size, 6


def _local_response_norm_backward(op: Op, s: Sizes) -> RawCost:
    """div (5 kernels), pow (3), mul, avg_pool, pad, mul (2), accumulation: 21 reads and 14 writes of x."""
    size = s.bytes[op.outputs[0]]
    return 20 * s.elements[op.outputs[0]], 21 * size, 14 * size, 14


def _passes(flops: float, reads: float, writes: float, launches: int) -> CostRule:
    """A chain of elementwise kernels that reads ``reads`` and writes ``writes`` times the size of each result."""

    def rule(op: Op, s: Sizes) -> RawCost:
        size = s.written(op.outputs)
        return flops * sum([s.elements[o] for o in op.outputs]), reads * size, writes * size, launches

    return rule


_POW_SCALAR = _passes(12, 4, 3, 3)  # pow, mul by the exponent, mul with the gradient
_POW_TENSOR = _passes(30, 8, 5, 5)


def _pow_backward(op: Op, s: Sizes) -> RawCost:
    """A number as exponent has the short formula."""
    has_scalar_exponent = len(op.inputs) < 3 or s.elements[op.inputs[2]] == 1
    return (_POW_SCALAR if has_scalar_exponent else _POW_TENSOR)(op, s)


def _add_backward(op: Op, s: Sizes) -> RawCost:
    """add, sub: a sum over the axes of a broadcast operand, a negation for the subtrahend."""
    num_outputs = len(op.outputs)
    dy = op.inputs[0]
    return s.elements[dy] * num_outputs, s.stored[dy] * num_outputs, s.written(op.outputs), num_outputs


def _broadcast_product(kernels: int, reads_per_kernel: float) -> CostRule:
    """Per operand: ``kernels`` full-size kernels, then a sum where the operand was broadcast.

    mul: grad * other (1 kernel of 2 reads). div: grad / other, and for the divisor four kernels; taken as 2.5 each.
    """

    def rule(op: Op, s: Sizes) -> RawCost:
        dy = op.inputs[0]
        saved = s.read(op.inputs[1:])
        full = s.elements[dy]
        flops = read = written = 0.0
        launches = 0
        num_saved = max(1, len(op.inputs) - 1)
        for o in op.outputs:
            size = full * s.width[o]
            flops += full * kernels
            read += kernels * (size + (reads_per_kernel - 1) * saved / num_saved)
            written += kernels * size
            launches += kernels
            if s.elements[o] < full:
                read += size
                written += s.bytes[o]
                launches += 1
        return flops, read, written, launches

    return rule


def _max_pool_backward(op: Op, s: Sizes) -> RawCost:
    """Reads gradient and int64 indices; fills the result with zero and writes it (DilatedMaxPool2d.cu)."""
    dy = op.inputs[0]
    return s.elements[dy], s.read(op.inputs) + 8 * s.elements[dy], 2 * s.written(op.outputs), 2


def _dropout_backward(op: Op, s: Sizes) -> RawCost:
    dy = op.inputs[0]
    return 2 * s.elements[dy], s.read(op.inputs) + s.elements[dy], s.written(op.outputs), 1


def _lookup_backward(op: Op, s: Sizes) -> RawCost:
    """Dense table gradient: zero fill, a sort of the indices, rows read, added and written (Embedding.cu)."""
    dy = op.inputs[0]
    table = s.written(op.outputs)
    rows = min(s.bytes[dy], table)
    indices = s.read(op.inputs[1:])
    return s.elements[dy], s.stored[dy] + rows + 8 * indices, table + rows + 8 * indices, 8


def _slice_backward(op: Op, s: Sizes) -> RawCost:
    """Zero fill of the whole, then a copy of the gradient into it."""
    dy = op.inputs[0]
    return 0, s.stored[dy], s.written(op.outputs) + s.bytes[dy], 2


def _write_once(op: Op, s: Sizes) -> RawCost:
    """A small or already read gradient spread over the input: mean, expand of a sum in another type."""
    dy = op.inputs[0]
    return sum([s.elements[o] for o in op.outputs]), s.stored[dy], s.written(op.outputs), 1


def _sum_backward(op: Op, s: Sizes) -> RawCost:
    """An expanded view; a kernel only where the type changes (or where a bias gradient is summed)."""
    if op.component is Component.WEIGHT_GRADIENT:
        return s.elements[op.inputs[0]], s.read(op.inputs), s.written(op.outputs), 1
    if s.width[op.inputs[0]] == s.width[op.outputs[0]]:
        return 0, 0, 0, 0
    return _write_once(op, s)


def _expand_backward(op: Op, s: Sizes) -> RawCost:
    return s.elements[op.inputs[0]], s.read(op.inputs), s.written(op.outputs), 1


def _pad_backward(op: Op, s: Sizes) -> RawCost:
    """A negative pad: the inner part is copied out."""
    size = s.written(op.outputs)
    return 0, size, size, 1


def _cross_entropy_backward(op: Op, s: Sizes) -> RawCost:
    """nll_loss: zero fill and one write per row, in the loss's type, converted to that of the logits where it differs;
    log_softmax: reads that and the log-probabilities, writes the gradient of the logits."""
    grad, result = op.inputs[0], op.outputs[0]
    size = s.bytes[result]
    wide = s.elements[result] * s.width[grad]
    if s.width[grad] != s.width[result]:
        return 5 * s.elements[result], wide + 2 * size, wide + 2 * size, 4
    return 5 * s.elements[result], 2 * size, 2 * size, 3


def _pointwise_loss_backward(op: Op, s: Sizes) -> RawCost:
    size = s.written(op.outputs)
    return 3 * sum([s.elements[o] for o in op.outputs]), 2 * size, size, 1


BACKWARD_RULES: dict[str, CostRule | None] = {
    "conv": _weight_product_backward, "conv_transpose": _weight_product_backward, "linear": _weight_product_backward,
    "matmul": _matmul_backward, "sdpa": _sdpa_backward,
    "lstm": _recurrent_backward, "gru": _recurrent_backward, "rnn": _recurrent_backward,
    "batch_norm": _norm_backward, "layer_norm": _norm_backward, "rms_norm": _norm_backward,
    "group_norm": _norm_backward, "l2_norm": _l2_norm_backward, "local_response_norm": _local_response_norm_backward,
    # derivatives.yaml: number of kernels and of full-size passes
    "pow_scalar": _POW_SCALAR, "square": _POW_SCALAR, "pow": _pow_backward,
    "quick_gelu": _passes(15, 9, 6, 6),
    "softsign": _passes(10, 9, 6, 6),
    "rope": _passes(5, 5.5, 4.5, 6),
    "reciprocal": _passes(3, 4, 3, 3),
    "rsqrt": _passes(4, 4, 3, 3),  # -0.5 * grad * result.pow(3)
    "sqrt": _passes(2, 3, 2, 2),
    "log": backward_one_pass, "exp": backward_one_pass,
    "abs": _passes(2, 3, 2, 2), "sin": _passes(6, 3, 2, 2), "cos": _passes(6, 4, 3, 3),
    "erf": _passes(12, 6, 5, 5),
    "clamp": _passes(3, 5, 3, 3),  # two comparisons, where
    "maximum": _passes(3, 5, 3, 3), "minimum": _passes(3, 5, 3, 3),
    "where": _passes(1, 1.5, 1, 1),
    "add": _add_backward, "sub": _add_backward,
    "mul": _broadcast_product(1, 2), "div": _broadcast_product(2, 2), "addcmul": _broadcast_product(1, 2),
    "lerp": _broadcast_product(1, 2), "atan2": _broadcast_product(4, 2), "prelu": _broadcast_product(1, 2),
    "max_pool": _max_pool_backward, "adaptive_max_pool": _max_pool_backward, "dropout": _dropout_backward,
    "embedding": _lookup_backward, "gather": _lookup_backward, "gather_elements": _slice_backward,
    "topk": _slice_backward, "sort": _slice_backward, "compress": _slice_backward,
    "slice": _slice_backward, "pad": _pad_backward, "expand": _expand_backward,
    "reduce_mean": _write_once, "reduce_sum": _sum_backward, "sum_loss": _sum_backward,
    "reduce_max": _passes(4, 5, 3, 4), "reduce_min": _passes(4, 5, 3, 4),  # x == max, its count, div, mul
    "reduce_var": _passes(4, 4, 2, 3), "reduce_l2": _passes(3, 2, 2, 2), "reduce_prod": _passes(3, 4, 3, 3),
    "logsumexp": _passes(6, 4, 3, 3), "cumsum": _passes(1, 3, 3, 3),  # flip, cumsum, flip
    "cross_entropy": _cross_entropy_backward, "mse_loss": _pointwise_loss_backward,
    "bce_loss": _pointwise_loss_backward,
    # The gradient of a concat is views of one tensor; of a clone, the same tensor.
    "concat": None, "stack": None, "copy": None, "view": None, "transpose": None, "identity": None,
}  # fmt: skip
