"""Shapes and multiply-add counts of matrix products: convolutions, linear, matmul, attention, RNNs."""

from math import prod

from gnnpred.costs.base import Sizes
from gnnpred.graph import Component, Op, OpGraph, OpPhase, Role, TensorSpec


def conv_macs(op: Op, s: Sizes) -> float:
    """Multiply-adds of a convolution forward op: output (transposed: input) positions x weight elements per channel.

    Weight is (C_out, C_in / groups, *kernel), transposed (C_in, C_out / groups, *kernel); its own shape thus holds
    groups, and dilation and stride do not change the count.
    """
    weight = s.tensors[op.inputs[1]].shape
    base = op.inputs[0] if op.kind == "conv_transpose" else op.outputs[0]
    return s.elements[base] * s.elements[op.inputs[1]] / max(weight[0], 1)


def linear_macs(op: Op, s: Sizes) -> float:
    out = op.outputs[0]
    n = s.tensors[out].shape[-1] if s.tensors[out].shape else 1
    return s.elements[out] / max(n, 1) * s.elements[op.inputs[1]]


def matmul_macs(op: Op, s: Sizes) -> float:
    a = s.tensors[op.inputs[0]].shape
    return s.elements[op.outputs[0]] * (a[-1] if a else 1)


def attention_dims(op: Op, s: Sizes) -> tuple[int, int, int, int, int]:
    """(batch * heads, seq_q, seq_k, head_dim, value_dim) of an sdpa forward op."""
    q, k, v = (s.tensors[i].shape for i in op.inputs[:3])
    return prod(q[:-2]), q[-2], k[-2], q[-1], v[-1]


GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def recurrent_dims(op: Op, s: Sizes) -> tuple[int, float, float, int]:
    """(tokens, elements of the weight matrices, elements of all weights, steps) of an RNN op.

    Biases are told from matrices by shape: rank 1, or ONNX's (directions, 2 * gates * hidden).
    """
    x = s.tensors[op.inputs[0]].shape
    gates = GATES[op.kind]
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


def forward_of(op: Op, s: Sizes) -> Op:
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
    return int(forward.attributes.get("num_directions", 1)), batch, GATES[op.kind] * hidden, hidden


def _conv_gemm(op: Op, forward: Op, tensors: tuple[TensorSpec, ...]) -> tuple[int, int, int, int]:
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
