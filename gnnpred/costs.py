"""What one op costs: flops and bytes, by a formula, free, or unsupported (counted, never silently 0).

Conventions
-----------
* 1 multiply-add = 2 flops. Products (conv, linear, matmul, sdpa, RNNs) have exact counts; other ops count the
  arithmetic of their formula per element, which never decides their time.
* bytes = DRAM traffic of the kernels that eager PyTorch launches, each tensor read or written once per pass over it.
  The number of passes is taken from the CUDA kernels in aten/src/ATen/native/cuda and the backward formulas in
  tools/autograd/derivatives.yaml; it stands beside each rule below.
* ``num_launches`` counts kernels that the host launches; views launch none.
* Attention is counted fused (flash): q, k, v and the result only. ``unfused_attention_bytes`` gives the traffic of
  frameworks that materialise the scores.
* Data made from constants alone costs nothing: it can be made once, outside the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import ceil, prod
from typing import Any

from gnnpred.graph import Component, DType, Op, OpGraph, OpPhase, Role
from gnnpred.op_kinds import OP_KINDS, Category, category_of


class CostState(StrEnum):
    FORMULA = "formula"  # a formula of ours, tested by hand
    FREE = "free"  # a view or nothing at run time
    UNSUPPORTED = "unsupported"  # guessed as one pass over inputs and outputs


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one op at the graph's batch: 2 flops per multiply-add; bytes as DRAM traffic of the eager kernel."""

    flops: float
    bytes_read: float
    bytes_written: float
    state: CostState
    num_launches: int = 1  # kernels that the host launches

    @property
    def bytes_moved(self) -> float:
        return self.bytes_read + self.bytes_written


FREE_COST = OpCost(0.0, 0.0, 0.0, CostState.FREE, 0)

# (flops, bytes read, bytes written, launches) of one run of an op
_Raw = tuple[float, float, float, int]


class _Sizes:
    """Per-tensor sizes of one graph, computed once: elements, bytes, and bytes really stored (expanded views)."""

    def __init__(self, graph: OpGraph) -> None:
        self.tensors = graph.tensors
        self.ops = graph.ops
        self.elements = [prod(t.shape) for t in graph.tensors]
        width = {dtype: dtype.bytes_per_element for dtype in DType}
        self.width = [width[t.dtype] for t in graph.tensors]
        self.bytes = [n * w for n, w in zip(self.elements, self.width, strict=True)]
        self.is_training = False
        # What reading the tensor moves: an expanded view is as small as its base.
        self.stored = list(self.bytes)
        for op in graph.ops:
            if op.phase is OpPhase.FORWARD:
                if op.kind in ("expand", "view", "transpose", "identity") and op.inputs and op.outputs:
                    base, result = op.inputs[0], op.outputs[0]
                    self.stored[result] = min(self.stored[result], self.stored[base])
            else:
                self.is_training = True
                break

    def read(self, indices: tuple[int, ...]) -> float:
        stored = self.stored
        return sum([stored[i] for i in indices])

    def written(self, indices: tuple[int, ...]) -> float:
        return sum([self.bytes[i] for i in indices])


def op_costs(graph: OpGraph) -> tuple[OpCost, ...]:
    """Costs in the order of ``graph.ops``; an op that repeats (loop bodies) is counted that many times.

    Batch norm and dropout cost as in training if the graph has a backward pass, as in inference otherwise.
    """
    sizes = _Sizes(graph)
    constant = bytearray(t.role is Role.CONSTANT for t in graph.tensors)
    costs = []
    for op in graph.ops:
        if op.phase is OpPhase.FORWARD and op.component is Component.FORWARD and _is_constant(op, constant):
            for o in op.outputs:
                constant[o] = 1
            costs.append(FREE_COST)
            continue
        rule = _rule_for(op.kind, op.phase, op.component)
        if rule is None:
            costs.append(FREE_COST)
            continue
        flops, read, written, launches = rule(op, sizes)
        if op.repeats != 1:
            flops, read, written, launches = (value * op.repeats for value in (flops, read, written, launches))
        state = CostState.FORMULA
        if op.kind in _UNSUPPORTED_KINDS or op.kind not in OP_KINDS:
            state = CostState.UNSUPPORTED
        elif launches == 0 and flops == read == written == 0:
            costs.append(FREE_COST)
            continue
        costs.append(OpCost(float(flops), float(read), float(written), state, launches))
    return tuple(costs)


def _is_constant(op: Op, constant: bytearray) -> bool:
    if not op.inputs:
        return bool(op.outputs) and all(constant[o] for o in op.outputs)
    return all(constant[i] for i in op.inputs)


def coverage(graph: OpGraph, costs: tuple[OpCost, ...]) -> dict[str, Any]:
    """How much of the graph rests on formulas.

    ``flops`` and ``bytes``: shares in 0..1 of the total that ops with a formula have (1.0 for an empty total);
    ``unsupported_ops``: name of each unsupported operator -> how often it occurs in the forward pass.
    """
    flops = bytes_moved = guessed_flops = guessed_bytes = 0.0
    unsupported: dict[str, int] = {}
    for op, cost in zip(graph.ops, costs, strict=True):
        flops += cost.flops
        bytes_moved += cost.bytes_moved
        if cost.state is CostState.UNSUPPORTED:
            guessed_flops += cost.flops
            guessed_bytes += cost.bytes_moved
            if op.phase is OpPhase.FORWARD:
                name = unsupported_name(op)
                unsupported[name] = unsupported.get(name, 0) + 1
    return {
        "flops": 1.0 - guessed_flops / flops if flops else 1.0,
        "bytes": 1.0 - guessed_bytes / bytes_moved if bytes_moved else 1.0,
        "unsupported_ops": unsupported,
    }


def unsupported_name(op: Op) -> str:
    """The operator as the file or framework calls it, for reports."""
    return str(op.attributes.get("op_type") or (op.name if op.kind == "unsupported" and op.name else op.kind))


# ---------------------------------------------------------------------------------------------------------------------
# Shapes of products


def _conv_macs(op: Op, s: _Sizes) -> float:
    """Multiply-adds of a convolution forward op: output (transposed: input) positions x weight elements per channel.

    Weight is (C_out, C_in / groups, *kernel), transposed (C_in, C_out / groups, *kernel); its own shape thus holds
    groups, and dilation and stride do not change the count.
    """
    weight = s.tensors[op.inputs[1]].shape
    base = op.inputs[0] if op.kind == "conv_transpose" else op.outputs[0]
    return s.elements[base] * s.elements[op.inputs[1]] / max(weight[0], 1)


def _linear_macs(op: Op, s: _Sizes) -> float:
    out = op.outputs[0]
    n = s.tensors[out].shape[-1] if s.tensors[out].shape else 1
    return s.elements[out] / max(n, 1) * s.elements[op.inputs[1]]


def _matmul_macs(op: Op, s: _Sizes) -> float:
    a = s.tensors[op.inputs[0]].shape
    return s.elements[op.outputs[0]] * (a[-1] if a else 1)


def _attention_dims(op: Op, s: _Sizes) -> tuple[int, int, int, int, int]:
    """(batch * heads, seq_q, seq_k, head_dim, value_dim) of an sdpa forward op."""
    q, k, v = (s.tensors[i].shape for i in op.inputs[:3])
    return prod(q[:-2]), q[-2], k[-2], q[-1], v[-1]


_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def _recurrent_dims(op: Op, s: _Sizes) -> tuple[int, float, float, int]:
    """(tokens, elements of the weight matrices, elements of all weights, steps) of an RNN op.

    Biases are told from matrices by shape: rank 1, or ONNX's (directions, 2 * gates * hidden).
    """
    x = s.tensors[op.inputs[0]].shape
    gates = _GATES[op.kind]
    hidden = int(op.attributes.get("hidden_size") or s.tensors[op.outputs[0]].shape[-1])
    matrices = weights = 0
    for i in op.inputs[1:]:
        spec = s.tensors[i]
        if spec.role not in (Role.PARAMETER, Role.PARAMETER_DERIVED):
            continue
        weights += s.elements[i]
        is_bias = len(spec.shape) < 2 or (len(spec.shape) == 2 and spec.shape[-1] == 2 * gates * hidden)
        if not is_bias:
            matrices += s.elements[i]
    axis = int(op.attributes.get("num_steps_axis", 0))
    steps = x[axis] if len(x) > 2 else x[0] if x else 1
    return s.elements[op.inputs[0]] // max(x[-1] if x else 1, 1), matrices, weights, steps


def _forward_op(op: Op, s: _Sizes) -> Op:
    return op if op.phase is OpPhase.FORWARD or op.forward_op_idx is None else s.ops[op.forward_op_idx]


def gemm_dims(op: Op, graph: OpGraph) -> tuple[int, int, int, int] | None:
    """(b, m, n, k) of the matrix product that an op is, per component; None if it is none.

    2 * b * m * n * k are its flops (sdpa: of the first of its two products; a strided convolution's input gradient:
    rounded). A convolution is its implicit product: forward (groups, N * out positions, C_out / groups,
    C_in / groups * kernel), input gradient (groups, N * in positions, C_in / groups, ...), weight gradient
    (groups, C_out / groups, C_in / groups * kernel, N * out positions).
    """
    if op.kind not in ("conv", "conv_transpose", "linear", "matmul", "sdpa", "lstm", "gru", "rnn"):
        return None
    if op.component not in (Component.FORWARD, Component.INPUT_GRADIENT, Component.WEIGHT_GRADIENT):
        return None
    tensors = graph.tensors
    forward = op
    if op.phase is not OpPhase.FORWARD and op.forward_op_idx is not None:
        forward = graph.ops[op.forward_op_idx]
    if forward.kind != op.kind:
        return None
    if op.kind in ("conv", "conv_transpose"):
        return _conv_gemm(op, forward, tensors)
    x = tensors[forward.inputs[0]].shape
    out = tensors[forward.outputs[0]].shape
    if op.kind == "linear":
        n = out[-1] if out else 1
        m = prod(out[:-1])
        k = max(1, prod(tensors[forward.inputs[1]].shape) // max(n, 1))
        if op.component is Component.INPUT_GRADIENT:
            return 1, m, k, n
        if op.component is Component.WEIGHT_GRADIENT:
            return 1, n, k, m
        return 1, m, n, k
    if op.kind == "matmul":
        b_shape = tensors[forward.inputs[1]].shape
        k = x[-1] if x else 1
        n = b_shape[-1] if len(b_shape) > 1 else 1
        m = x[-2] if len(x) > 1 else 1
        b = max(1, prod(out) // max(m * n, 1))
        operand = op.attributes.get("operand")
        if operand == 0:
            return b, m, k, n
        if operand == 1:
            return b, k, n, m
        return b, m, n, k
    if op.kind == "sdpa":
        k_shape = tensors[forward.inputs[1]].shape
        return prod(x[:-2]), x[-2], k_shape[-2], x[-1]
    hidden = int(forward.attributes.get("hidden_size") or out[-1])
    axis = int(forward.attributes.get("num_steps_axis", 0))
    batch = max(1, prod(x[:-1]) // max(x[axis], 1)) if len(x) > 2 else 1
    return int(forward.attributes.get("num_directions", 1)), batch, _GATES[op.kind] * hidden, hidden


def _conv_gemm(op: Op, forward: Op, tensors: tuple[Any, ...]) -> tuple[int, int, int, int]:
    x = tensors[forward.inputs[0]].shape
    w = tensors[forward.inputs[1]].shape
    out = tensors[forward.outputs[0]].shape
    groups = max(1, int(forward.attributes.get("groups", 1)))
    kernel = prod(w[2:])
    transposed = forward.kind == "conv_transpose"
    # (wide side, narrow side): a transposed convolution is the input gradient of a plain one.
    small, large = (x, out) if transposed else (out, x)
    c_small, c_large = small[1] // groups, large[1] // groups
    positions_small = small[0] * prod(small[2:])
    positions_large = large[0] * prod(large[2:])
    if op.component is Component.WEIGHT_GRADIENT:
        return groups, c_small, c_large * kernel, positions_small
    gathers = (op.component is Component.FORWARD) != transposed
    if gathers:
        return groups, positions_small, c_small, c_large * kernel
    macs = groups * positions_small * c_small * c_large * kernel
    k = max(1, round(macs / max(1, groups * positions_large * c_large)))
    return groups, positions_large, c_large, k


# ---------------------------------------------------------------------------------------------------------------------
# Forward rules


# Arithmetic per element of elementwise ops (special functions as the instructions they expand to, roughly).
_FLOPS_PER_ELEMENT = {
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


def _one_pass(op: Op, s: _Sizes) -> _Raw:
    """One kernel that reads its inputs and writes its outputs."""
    work = sum([s.elements[o] for o in op.outputs])
    return work * _FLOPS_PER_ELEMENT.get(op.kind, 1), s.read(op.inputs), s.written(op.outputs), 1


def _reduction(op: Op, s: _Sizes) -> _Raw:
    return sum([s.elements[i] for i in op.inputs]), s.read(op.inputs), s.written(op.outputs), 1


def _conv(op: Op, s: _Sizes) -> _Raw:
    """x, weight -> y; a bias is a second kernel that reads and writes y (``add_`` after cudnn_convolution)."""
    read, written, launches = s.read(op.inputs), s.written(op.outputs), 1
    if len(op.inputs) > 2:
        read, written, launches = read + written, 2 * written, 2
    return 2 * _conv_macs(op, s), read, written, launches


def _linear(op: Op, s: _Sizes) -> _Raw:
    """x, weight, bias -> y in one kernel (the bias is cuBLASLt's epilogue)."""
    return 2 * _linear_macs(op, s), s.read(op.inputs), s.written(op.outputs), 1


def _matmul(op: Op, s: _Sizes) -> _Raw:
    return 2 * _matmul_macs(op, s), s.read(op.inputs), s.written(op.outputs), 1


def _sdpa(op: Op, s: _Sizes) -> _Raw:
    """Flash attention: two products (QK^T and PV), counted in full for causal masks too, as FlopCounterMode does.

    Reads q, k, v and a mask; writes the result and one fp32 logsumexp per query.
    """
    heads, seq_q, seq_k, dim, value_dim = _attention_dims(op, s)
    return (
        2.0 * heads * seq_q * seq_k * (dim + value_dim),
        s.read(op.inputs),
        s.written(op.outputs[:1]) + (4 * heads * seq_q if s.is_training else 0),
        1,
    )


def _recurrent(op: Op, s: _Sizes) -> _Raw:
    """cuDNN RNN: every weight matrix meets every token; training keeps the gates of all steps (reserve space)."""
    tokens, matrices, _, steps = _recurrent_dims(op, s)
    reserve = 0.0
    if s.is_training:
        out = op.outputs[0]
        reserve = s.bytes[out] * (_GATES[op.kind] + 1)
    return 2 * tokens * matrices, s.read(op.inputs), s.written(op.outputs) + reserve, 2 * steps + 1


def _batch_norm(op: Op, s: _Sizes) -> _Raw:
    """Training: one pass over x for the statistics, a second one to normalise. Inference: one pass."""
    x = op.inputs[0]
    read = s.read(op.inputs)
    if s.is_training and op.attributes.get("training", True):
        read += s.stored[x]
    return 8 * s.elements[x], read, s.written(op.outputs), 1


def _group_norm(op: Op, s: _Sizes) -> _Raw:
    """Row moments, then an elementwise kernel: x is read twice (group_norm_kernel.cu)."""
    x = op.inputs[0]
    return 8 * s.elements[x], s.read(op.inputs) + s.stored[x], s.written(op.outputs), 2


def _l2_norm(op: Op, s: _Sizes) -> _Raw:
    """F.normalize: vector_norm reads x, div reads x and writes y."""
    x = op.inputs[0]
    return 3 * s.elements[x], 2 * s.read(op.inputs), s.written(op.outputs), 3


def _local_response_norm(op: Op, s: _Sizes) -> _Raw:
    """F.local_response_norm: mul, pad, avg_pool, mul, add, pow, div: 9 reads and 7 writes of the size of x."""
    size = s.bytes[op.outputs[0]]
    return 8 * s.elements[op.inputs[0]], 9 * size, 7 * size, 7


def _dropout(op: Op, s: _Sizes) -> _Raw:
    """Writes a mask of one byte per element (fused_dropout); inference and ratio 0 run nothing."""
    if not s.is_training or not op.attributes.get("ratio", 0.5):
        return 0, 0, 0, 0
    elements = s.elements[op.inputs[0]]
    return 3 * elements, s.read(op.inputs), s.written(op.outputs[:1]) + elements, 1


def _max_pool(op: Op, s: _Sizes) -> _Raw:
    """Writes an int64 index beside every output, with or without a gradient (max_pool2d_with_indices)."""
    out = op.outputs[0]
    kernel = prod(op.attributes.get("kernel") or (1,))
    return s.elements[out] * kernel, s.read(op.inputs), s.bytes[out] + 8 * s.elements[out], 1


def _avg_pool(op: Op, s: _Sizes) -> _Raw:
    return s.elements[op.inputs[0]], s.read(op.inputs), s.written(op.outputs), 1


def _lookup(op: Op, s: _Sizes) -> _Raw:
    """Embedding and index_select: the looked-up rows are read, not the table."""
    out = s.written(op.outputs)
    indices = sum([s.bytes[i] for i in op.inputs if not s.tensors[i].dtype.is_float])
    table = max([s.bytes[i] for i in op.inputs], default=0)
    return 0, min(out, table) + indices, out, 1


def _scatter(op: Op, s: _Sizes) -> _Raw:
    """The target is cloned, then updated in place."""
    target, rest = op.inputs[0], op.inputs[1:]
    updates = sum([s.bytes[i] for i in rest if s.tensors[i].dtype.is_float])
    return 0, s.read(op.inputs) + updates, s.written(op.outputs) + updates, 2 if s.bytes[target] else 1


def _sort(op: Op, s: _Sizes) -> _Raw:
    """Radix sort of value-index pairs: about four passes of reading and writing both (16 key bits per two passes)."""
    pairs = s.read(op.inputs[:1]) + 8 * s.elements[op.inputs[0]]
    return 0, 4 * pairs, 3 * pairs + s.written(op.outputs), 4


def _topk(op: Op, s: _Sizes) -> _Raw:
    """Radix select: two passes over x (sbtopk), then the k winners."""
    return s.elements[op.inputs[0]], 2 * s.read(op.inputs[:1]), s.written(op.outputs), 2


def _pad(op: Op, s: _Sizes) -> _Raw:
    """Fill of the result, then a copy of x into it."""
    x = op.inputs[0]
    return 0, s.stored[x], s.written(op.outputs) + s.bytes[x], 2


def _quick_gelu(op: Op, s: _Sizes) -> _Raw:
    """x * sigmoid(1.702 x): mul, sigmoid, mul."""
    size = s.bytes[op.outputs[0]]
    return 6 * s.elements[op.outputs[0]], 4 * size, 3 * size, 3


def _softsign(op: Op, s: _Sizes) -> _Raw:
    """x / (1 + |x|): abs, add, div."""
    size = s.bytes[op.outputs[0]]
    return 3 * s.elements[op.outputs[0]], 4 * size, 3 * size, 3


def _rope(op: Op, s: _Sizes) -> _Raw:
    """q * cos + rotate_half(q) * sin: neg of a half, cat, two muls, add: 5.5 reads, 4.5 writes of q."""
    x, rest = op.inputs[0], op.inputs[1:]
    size = s.bytes[x]
    return 3 * s.elements[x], 5.5 * size + s.read(rest), 4.5 * size, 5


def _cross_entropy(op: Op, s: _Sizes) -> _Raw:
    """log_softmax reads logits and writes log-probabilities in the loss's type; nll_loss reads one per row."""
    logits = op.inputs[0]
    elements = s.elements[logits]
    axis = op.attributes.get("axis", -1)
    shape = s.tensors[logits].shape
    rows = elements // max(shape[axis] if shape else 1, 1)
    width = s.width[op.outputs[0]]
    return 5 * elements, s.read((logits,)) + rows * (width + 8), elements * width, 2


def _pointwise_loss(op: Op, s: _Sizes) -> _Raw:
    """mse, bce: one elementwise kernel with a result of the size of x, then its mean."""
    x = op.inputs[0]
    size = s.bytes[x]
    read = s.read(op.inputs) + (size if len(op.inputs) < 2 else 0)  # a target of the same size
    return 4 * s.elements[x], read + size, size + s.written(op.outputs), 2


def _full_cost_guess(op: Op, s: _Sizes) -> _Raw:
    """Unsupported: one pass over inputs and outputs, one flop per output element."""
    return sum([s.elements[o] for o in op.outputs]), s.read(op.inputs), s.written(op.outputs), 1


_FORWARD: dict[str, Callable[[Op, _Sizes], _Raw]] = {
    "conv": _conv, "conv_transpose": _conv, "linear": _linear, "matmul": _matmul, "sdpa": _sdpa,
    "lstm": _recurrent, "gru": _recurrent, "rnn": _recurrent,
    "batch_norm": _batch_norm, "group_norm": _group_norm, "l2_norm": _l2_norm,
    "local_response_norm": _local_response_norm, "dropout": _dropout,
    "max_pool": _max_pool, "adaptive_max_pool": _max_pool, "avg_pool": _avg_pool, "adaptive_avg_pool": _avg_pool,
    "lp_pool": _avg_pool, "embedding": _lookup, "gather": _lookup, "gather_elements": _lookup, "compress": _lookup,
    "scatter": _scatter, "sort": _sort, "unique": _sort, "topk": _topk, "pad": _pad,
    "quick_gelu": _quick_gelu, "softsign": _softsign, "rope": _rope,
    "cross_entropy": _cross_entropy, "mse_loss": _pointwise_loss, "bce_loss": _pointwise_loss, "sum_loss": _reduction,
}  # fmt: skip

_UNSUPPORTED_KINDS = frozenset({"unsupported", "einsum", "fft", "control_flow", "selective_scan"})


# ---------------------------------------------------------------------------------------------------------------------
# Backward rules. ``op.inputs`` are the gradients and saved tensors that the kernels read, ``op.outputs`` the gradients.


def _backward_one_pass(op: Op, s: _Sizes) -> _Raw:
    work = sum([s.elements[o] for o in op.outputs])
    return work * 2 * max(1, _FLOPS_PER_ELEMENT.get(op.kind, 1)), s.read(op.inputs), s.written(op.outputs), 1


def _weight_product_backward(op: Op, s: _Sizes) -> _Raw:
    """Each gradient of a convolution or linear has the multiply-adds of the forward."""
    forward = _forward_op(op, s)
    macs = _linear_macs(forward, s) if op.kind == "linear" else _conv_macs(forward, s)
    return 2 * macs, s.read(op.inputs), s.written(op.outputs), 1


def _matmul_backward(op: Op, s: _Sizes) -> _Raw:
    """One product per operand; a broadcast operand has its gradient summed from the full batch afterwards."""
    forward = _forward_op(op, s)
    read, written, launches = s.read(op.inputs), s.written(op.outputs), 1
    out = s.tensors[forward.outputs[0]].shape
    target = s.tensors[op.outputs[0]].shape
    if len(target) > 2 or len(out) > 2:
        batch = prod(out[:-2]) if len(out) > 2 else 1
        own = prod(target[:-2]) if len(target) > 2 else 1
        if 1 < own < batch:
            full = written * batch / own
            read, written, launches = read + full, written + full, 2
    return 2 * _matmul_macs(forward, s), read, written, launches


def _sdpa_backward(op: Op, s: _Sizes) -> _Raw:
    """Flash backward: five products (scores again, dV, dP, dQ, dK) against two forward; rowsum(dO * O) before them.

    Dao et al., FlashAttention (arXiv 2205.14135), algorithm 4; FlopCounterMode counts the same.
    """
    heads, seq_q, seq_k, dim, value_dim = _attention_dims(_forward_op(op, s), s)
    flops = 2.0 * heads * seq_q * seq_k * (3 * dim + 2 * value_dim)
    return flops, s.read(op.inputs) + 8 * heads * seq_q, s.written(op.outputs) + 4 * heads * seq_q, 2


def _recurrent_backward(op: Op, s: _Sizes) -> _Raw:
    """Through time: one product with every weight per token, gates re-read; weight gradients: one product each."""
    forward = _forward_op(op, s)
    tokens, matrices, _, steps = _recurrent_dims(forward, s)
    flops = 2 * tokens * matrices
    gates = s.bytes[forward.outputs[0]] * _GATES[op.kind]
    if op.component is Component.WEIGHT_GRADIENT:
        return flops, s.read(op.inputs) + gates, s.written(op.outputs), 2
    return flops, s.read(op.inputs) + gates, s.written(op.outputs) + gates, 2 * steps + 1


def _norm_backward(op: Op, s: _Sizes) -> _Raw:
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


def _l2_norm_backward(op: Op, s: _Sizes) -> _Raw:
    """div backward (3 kernels), norm backward (2), accumulation: 9 reads, 6 writes of the size of x."""
    size = s.bytes[op.outputs[0]]
    return 8 * s.elements[op.outputs[0]], 9 * size, 6 * size, 6


def _local_response_norm_backward(op: Op, s: _Sizes) -> _Raw:
    """div (5 kernels), pow (3), mul, avg_pool, pad, mul (2), accumulation: 21 reads and 14 writes of x."""
    size = s.bytes[op.outputs[0]]
    return 20 * s.elements[op.outputs[0]], 21 * size, 14 * size, 14


def _passes(flops: float, reads: float, writes: float, launches: int) -> Callable[[Op, _Sizes], _Raw]:
    """A chain of elementwise kernels that reads ``reads`` and writes ``writes`` times the size of each result."""

    def rule(op: Op, s: _Sizes) -> _Raw:
        size = s.written(op.outputs)
        return flops * sum([s.elements[o] for o in op.outputs]), reads * size, writes * size, launches

    return rule


def _add_backward(op: Op, s: _Sizes) -> _Raw:
    """add, sub: a sum over the axes of a broadcast operand, a negation for the subtrahend."""
    num_outputs = len(op.outputs)
    dy = op.inputs[0]
    return s.elements[dy] * num_outputs, s.stored[dy] * num_outputs, s.written(op.outputs), num_outputs


def _broadcast_product(kernels: int, reads_per_kernel: float) -> Callable[[Op, _Sizes], _Raw]:
    """Per operand: ``kernels`` full-size kernels, then a sum where the operand was broadcast.

    mul: grad * other (1 kernel of 2 reads). div: grad / other, and for the divisor four kernels; taken as 2.5 each.
    """

    def rule(op: Op, s: _Sizes) -> _Raw:
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


def _max_pool_backward(op: Op, s: _Sizes) -> _Raw:
    """Reads gradient and int64 indices; fills the result with zero and writes it (DilatedMaxPool2d.cu)."""
    dy = op.inputs[0]
    return s.elements[dy], s.read(op.inputs) + 8 * s.elements[dy], 2 * s.written(op.outputs), 2


def _dropout_backward(op: Op, s: _Sizes) -> _Raw:
    dy = op.inputs[0]
    return 2 * s.elements[dy], s.read(op.inputs) + s.elements[dy], s.written(op.outputs), 1


def _lookup_backward(op: Op, s: _Sizes) -> _Raw:
    """Dense table gradient: zero fill, a sort of the indices, rows read, added and written (Embedding.cu)."""
    dy = op.inputs[0]
    table = s.written(op.outputs)
    rows = min(s.bytes[dy], table)
    indices = s.read(op.inputs[1:])
    return s.elements[dy], s.stored[dy] + rows + 8 * indices, table + rows + 8 * indices, 8


def _slice_backward(op: Op, s: _Sizes) -> _Raw:
    """Zero fill of the whole, then a copy of the gradient into it."""
    dy = op.inputs[0]
    return 0, s.stored[dy], s.written(op.outputs) + s.bytes[dy], 2


def _write_once(op: Op, s: _Sizes) -> _Raw:
    """A small or already read gradient spread over the input: mean, expand of a sum in another type."""
    dy = op.inputs[0]
    return sum([s.elements[o] for o in op.outputs]), s.stored[dy], s.written(op.outputs), 1


def _sum_backward(op: Op, s: _Sizes) -> _Raw:
    """An expanded view; a kernel only where the type changes (or where a bias gradient is summed)."""
    if op.component is Component.WEIGHT_GRADIENT:
        return s.elements[op.inputs[0]], s.read(op.inputs), s.written(op.outputs), 1
    if s.width[op.inputs[0]] == s.width[op.outputs[0]]:
        return 0, 0, 0, 0
    return _write_once(op, s)


def _expand_backward(op: Op, s: _Sizes) -> _Raw:
    return s.elements[op.inputs[0]], s.read(op.inputs), s.written(op.outputs), 1


def _pad_backward(op: Op, s: _Sizes) -> _Raw:
    """A negative pad: the inner part is copied out."""
    size = s.written(op.outputs)
    return 0, size, size, 1


def _cross_entropy_backward(op: Op, s: _Sizes) -> _Raw:
    """nll_loss: zero fill and one write per row; log_softmax: reads that and the log-probabilities, writes dlogits."""
    logits = op.inputs[-1]
    elements = s.elements[logits]
    wide = elements * s.width[op.inputs[0]]  # the loss's type is that of the log-probabilities
    return 5 * elements, 2 * wide, wide + s.written(op.outputs), 3


def _pointwise_loss_backward(op: Op, s: _Sizes) -> _Raw:
    size = s.written(op.outputs)
    return 3 * sum([s.elements[o] for o in op.outputs]), 2 * size, size, 1


_BACKWARD: dict[str, Callable[[Op, _Sizes], _Raw] | None] = {
    "conv": _weight_product_backward, "conv_transpose": _weight_product_backward, "linear": _weight_product_backward,
    "matmul": _matmul_backward, "sdpa": _sdpa_backward,
    "lstm": _recurrent_backward, "gru": _recurrent_backward, "rnn": _recurrent_backward,
    "batch_norm": _norm_backward, "layer_norm": _norm_backward, "rms_norm": _norm_backward,
    "group_norm": _norm_backward, "l2_norm": _l2_norm_backward, "local_response_norm": _local_response_norm_backward,
    # derivatives.yaml: number of kernels and of full-size passes
    "pow_scalar": _passes(12, 4, 3, 3),  # pow, mul by the exponent, mul with the gradient
    "square": _passes(12, 4, 3, 3),
    "pow": _passes(30, 8, 5, 5),
    "quick_gelu": _passes(15, 9, 6, 6),
    "softsign": _passes(10, 9, 6, 6),
    "rope": _passes(5, 5.5, 4.5, 6),
    "reciprocal": _passes(3, 4, 3, 3),
    "rsqrt": _passes(4, 4, 3, 3),  # -0.5 * grad * result.pow(3)
    "sqrt": _passes(2, 3, 2, 2),
    "log": _backward_one_pass, "exp": _backward_one_pass,
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


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer. Bytes per parameter as (reads, writes) of the stored type; states have the parameter's type.

OPTIMIZER_PASSES = {
    "sgd": (3, 2),  # p, g, momentum -> p, momentum: 20 bytes per fp32 parameter
    "adam": (4, 3),  # p, g, m, v -> p, m, v: 28 bytes
    "adamw": (4, 3),
    "lamb": (8, 4),  # adam's states, the update written out, both norms, then p and update again: 48 bytes
}
# Elementwise kernels per tensor in a loop over tensors, and list kernels of the foreach form
# (torch/optim/sgd.py, adam.py): sgd with weight decay and momentum 4, adam 8.
_OPTIMIZER_KERNELS = {"sgd": 4, "adam": 8, "adamw": 8, "lamb": 14}
_OPTIMIZER_FLOPS = {"sgd": 6, "adam": 14, "adamw": 14, "lamb": 20}
# multi_tensor_apply of aten/src/ATen/native/cuda/MultiTensorApply.cuh: at most 64 tensors of two lists and 320 blocks
# of 65536 elements per launch.
_FOREACH_TENSORS = 64
_FOREACH_ELEMENTS = 320 * 65536


def foreach_launches(num_tensors: int, num_elements: int) -> int:
    """Launches of one multi-tensor kernel over that many tensors."""
    return max(1, ceil(num_tensors / _FOREACH_TENSORS), ceil(num_elements / _FOREACH_ELEMENTS))


def _optimizer_step(op: Op, s: _Sizes) -> _Raw:
    name, num_bytes = op.attributes["optimizer"], op.attributes["num_bytes"]
    num_tensors, num_elements = op.attributes["num_tensors"], op.attributes["num_elements"]
    reads, writes = OPTIMIZER_PASSES.get(name, (0, 0))
    per_kernel = foreach_launches(num_tensors, num_elements) if op.attributes["foreach"] else num_tensors
    launches = _OPTIMIZER_KERNELS.get(name, 0) * per_kernel
    return _OPTIMIZER_FLOPS.get(name, 0) * num_elements, reads * num_bytes, writes * num_bytes, launches


def _zero_grad(op: Op, s: _Sizes) -> _Raw:
    """Dropped gradients cost nothing. Zeroed ones are filled, and backward then adds to each instead of storing it."""
    if op.attributes["set_to_none"]:
        return 0, 0, 0, 0
    num_bytes, num_tensors = op.attributes["num_bytes"], op.attributes["num_tensors"]
    return op.attributes["num_elements"], 2 * num_bytes, 2 * num_bytes, 2 * num_tensors


def _unscale(op: Op, s: _Sizes) -> _Raw:
    """GradScaler: every gradient is read, checked, scaled and written (always a multi-tensor kernel)."""
    num_bytes = op.attributes["num_bytes"]
    launches = foreach_launches(op.attributes["num_tensors"], op.attributes["num_elements"])
    return 2 * op.attributes["num_elements"], num_bytes, num_bytes, launches


_OPTIMIZER = {"optimizer_step": _optimizer_step, "zero_grad": _zero_grad, "unscale": _unscale}


@cache
def _rule_for(kind: str, phase: OpPhase, component: Component) -> Callable[[Op, _Sizes], _Raw] | None:
    """The rule of an op; None where nothing runs."""
    if phase is OpPhase.OPTIMIZER:
        return _OPTIMIZER[kind]
    if component in (Component.CAST, Component.ACCUMULATE):
        return _one_pass
    category = category_of(kind)
    if kind in _UNSUPPORTED_KINDS or kind not in OP_KINDS:
        return _full_cost_guess
    if phase is OpPhase.FORWARD:
        if category is Category.VIEW:
            return None
        if category is Category.REDUCTION:
            return _reduction
        return _FORWARD.get(kind, _one_pass)
    if kind == "fill":
        return _one_pass
    return _BACKWARD.get(kind, _backward_one_pass)


# ---------------------------------------------------------------------------------------------------------------------
# Helpers for features


def unfused_attention_bytes(op: Op, graph: OpGraph, *, softmax_dtype: DType | None = None) -> float:
    """Bytes of an sdpa op in a framework that materialises the scores (PyTorch before 2.0, older exports).

    Forward: QK^T writes the scores; scaling and mask read and write them; softmax reads them and writes the
    probabilities in ``softmax_dtype`` (fp32 under autocast, then a cast; default: the op's type); PV reads them.
    Backward: dP written, read with P, dS written (softmax backward), scaling, and three products that read P, dS, dS.
    """
    tensors = graph.tensors
    forward = op if op.phase is OpPhase.FORWARD or op.forward_op_idx is None else graph.ops[op.forward_op_idx]
    q, k, v = (tensors[i] for i in forward.inputs[:3])
    out = tensors[forward.outputs[0]]
    scores = prod(q.shape[:-1]) * k.shape[-2]
    narrow = q.dtype.bytes_per_element
    wide = (softmax_dtype or q.dtype).bytes_per_element
    cast = scores * (wide + narrow) if wide != narrow else 0
    has_mask = len(forward.inputs) > 3 or bool(forward.attributes.get("causal"))
    touch = 2 * scores * narrow
    data = q.num_bytes + k.num_bytes + v.num_bytes + out.num_bytes
    if op.phase is OpPhase.FORWARD:
        softmax = scores * (narrow + wide)
        return data + scores * narrow + touch * (2 if has_mask else 1) + softmax + cast + scores * narrow
    # products: dV (P, dO), dP (dO, V), dQ (dS, K), dK (dS, Q); softmax backward reads dP and P, writes dS
    return 2 * data + 4 * scores * narrow + scores * (2 * wide + narrow) + cast + touch


def num_views(graph: OpGraph) -> int:
    """How many ops of the graph run no kernel at all."""
    return sum(category_of(op.kind) is Category.VIEW for op in graph.ops)


def total_by_phase(graph: OpGraph, costs: tuple[OpCost, ...]) -> Mapping[OpPhase, tuple[float, float]]:
    """(flops, bytes moved) of each phase."""
    totals = dict.fromkeys(OpPhase, (0.0, 0.0))
    for op, cost in zip(graph.ops, costs, strict=True):
        flops, bytes_moved = totals[op.phase]
        totals[op.phase] = (flops + cost.flops, bytes_moved + cost.bytes_moved)
    return totals
