"""What one op costs: flops and bytes, by a formula, free, or unsupported (counted, never silently 0).

Conventions
-----------
* 1 multiply-add = 2 flops. Products (conv, linear, matmul, sdpa, RNNs) have exact counts; other ops count the
  arithmetic of their formula per element, which never decides their time.
* bytes = DRAM traffic of the kernels that eager PyTorch launches, each tensor read or written once per pass over it.
  The number of passes is taken from the CUDA kernels in aten/src/ATen/native/cuda and the backward formulas in
  tools/autograd/derivatives.yaml; it stands beside each rule.
* ``num_launches`` counts kernels that the host launches; views launch none.
* Attention is counted fused (flash): q, k, v and the result only. ``unfused_attention_bytes`` gives the traffic of
  frameworks that materialise the scores.
* Data made from constants alone costs nothing: it can be made once, outside the step.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from gnnpred.costs.attention import unfused_attention_bytes
from gnnpred.costs.backward import BACKWARD_RULES, backward_one_pass
from gnnpred.costs.base import FREE_COST, CostRule, CostState, OpCost, RawCost, Sizes
from gnnpred.costs.forward import FORWARD_RULES, one_pass, reduction
from gnnpred.costs.optimizer import OPTIMIZER_RULES, foreach_launches
from gnnpred.costs.products import gemm_dims
from gnnpred.costs.unfused import with_pieces
from gnnpred.graph import Component, Op, OpGraph, OpPhase, Role
from gnnpred.op_kinds import OP_KINDS, Category, category_of

__all__ = [
    "CostState", "OpCost", "coverage", "foreach_launches", "gemm_dims", "op_costs", "total_by_phase",
    "unfused_attention_bytes", "unsupported_name",
]  # fmt: skip

UNSUPPORTED_KINDS = frozenset({"unsupported", "einsum", "fft", "control_flow", "selective_scan"})


def op_costs(graph: OpGraph) -> tuple[OpCost, ...]:
    """Costs in the order of ``graph.ops``, each of one run: an op in a loop body costs this ``op.repeats`` times.

    Batch norm and dropout cost as in training if the graph has a backward pass, as in inference otherwise.
    """
    sizes = Sizes(graph)
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
        flops, read, written, launches = with_pieces(op, sizes, rule(op, sizes))
        state = CostState.FORMULA
        if op.kind in UNSUPPORTED_KINDS or op.kind not in OP_KINDS:
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
        op_flops, op_bytes = cost.flops * op.repeats, cost.bytes_moved * op.repeats
        flops += op_flops
        bytes_moved += op_bytes
        if cost.state is CostState.UNSUPPORTED:
            guessed_flops += op_flops
            guessed_bytes += op_bytes
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


def _guess(op: Op, s: Sizes) -> RawCost:
    """Unsupported: one pass over inputs and outputs, one flop per output element."""
    return sum([s.elements[o] for o in op.outputs]), s.read(op.inputs), s.written(op.outputs), 1


@cache
def _rule_for(kind: str, phase: OpPhase, component: Component) -> CostRule | None:
    """The rule of an op; None where nothing runs."""
    if phase is OpPhase.OPTIMIZER:
        return OPTIMIZER_RULES[kind]
    if component in (Component.CAST, Component.ACCUMULATE):
        return one_pass
    category = category_of(kind)
    if kind in UNSUPPORTED_KINDS or kind not in OP_KINDS:
        return _guess
    if phase is OpPhase.FORWARD or component is Component.FORWARD:  # a forward op, or its second run
        if category is Category.VIEW:
            return None
        if category is Category.REDUCTION:
            return reduction
        return FORWARD_RULES.get(kind, one_pass)
    if kind == "fill":
        return one_pass
    return BACKWARD_RULES.get(kind, backward_one_pass)


def total_by_phase(graph: OpGraph, costs: tuple[OpCost, ...]) -> Mapping[OpPhase, tuple[float, float]]:
    """(flops, bytes moved) of each phase, repeats included."""
    totals = dict.fromkeys(OpPhase, (0.0, 0.0))
    for op, cost in zip(graph.ops, costs, strict=True):
        flops, bytes_moved = totals[op.phase]
        totals[op.phase] = (flops + cost.flops * op.repeats, bytes_moved + cost.bytes_moved * op.repeats)
    return totals
