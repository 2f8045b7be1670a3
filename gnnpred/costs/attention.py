"""Attention where the framework materialises the scores."""

from math import prod

from gnnpred.graph import AUTOCAST_KEY, Component, DType, Op, OpGraph, OpPhase


def unfused_attention_bytes(op: Op, graph: OpGraph) -> float:
    """Bytes of an sdpa op in a framework that materialises the scores (PyTorch before 2.0, older exports).

    Forward: QK^T writes the scores; scaling and mask read and write them; softmax reads them and writes the
    probabilities (in fp32 under autocast, then a cast); dropout; PV reads them.
    Backward: dP written, read with P, dS written (softmax backward), scaling, and three products that read P, dS, dS.
    """
    tensors = graph.tensors
    forward = op if op.phase is OpPhase.FORWARD or op.forward_op_idx is None else graph.ops[op.forward_op_idx]
    q, k, v = (tensors[i] for i in forward.inputs[:3])
    out = tensors[forward.outputs[0]]
    scores = prod(q.shape[:-1]) * k.shape[-2]
    narrow = q.dtype.bytes_per_element
    wide = DType.FP32.bytes_per_element if AUTOCAST_KEY in graph.metadata else narrow
    cast = scores * (wide + narrow) if wide != narrow else 0
    has_mask = len(forward.inputs) > 3 or bool(forward.attributes.get("causal"))
    touch = 2 * scores * narrow
    dropout = scores * (2 * wide + 1) if forward.attributes.get("dropout") else 0  # with a mask of one byte
    data = q.num_bytes + k.num_bytes + v.num_bytes + out.num_bytes
    if op.component is Component.FORWARD:
        softmax = scores * (narrow + wide)
        return data + scores * narrow + touch * (2 if has_mask else 1) + softmax + dropout + cast + scores * narrow
    # products: dV (P, dO), dP (dO, V), dQ (dS, K), dK (dS, Q); softmax backward reads dP and P, writes dS
    return 2 * data + 4 * scores * narrow + scores * (2 * wide + narrow) + dropout + cast + touch
