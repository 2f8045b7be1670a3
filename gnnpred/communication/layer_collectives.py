"""Collectives inside the layers, which the next op waits for: tensor and expert parallelism.

Tensor parallelism: the all-reduces that :mod:`gnnpred.passes.tensor_parallel` found; with sequence parallelism each is
a reduce-scatter and an all-gather of the same activation (Korthikanti et al., arXiv 2205.05198, section 4.2).
Expert parallelism: tokens go to their experts and back, two all-to-alls per mixture-of-experts layer and pass
(Lepikhin et al., arXiv 2006.16668). Under activation checkpointing the forward ones run again with the forward ops.
"""

from collections import defaultdict
from collections.abc import Iterable

from gnnpred.communication.collectives import collective_ms
from gnnpred.communication.layout import Layout
from gnnpred.communication.step_work import Blocking
from gnnpred.graph import Component, OpGraph, OpPhase, Role
from gnnpred.passes.layers import Experts
from gnnpred.passes.tensor_parallel import LayerCollective


def blocking_collectives(
    graph: OpGraph, collectives: Iterable[LayerCollective], layout: Layout, *, sequence_parallel: bool
) -> dict[int, tuple[Blocking, ...]]:
    """The collectives of a step by the op that they follow, with their times on idle links: no kernel runs beside."""
    again: dict[int, int] = {}  # forward op -> its second run
    last_backward: dict[int, int] = {}
    for op_idx, op in enumerate(graph.ops):
        if op.phase is not OpPhase.BACKWARD or op.forward_op_idx is None:
            continue
        if op.component is Component.FORWARD:
            again[op.forward_op_idx] = op_idx
        elif op.component in (Component.INPUT_GRADIENT, Component.WEIGHT_GRADIENT):
            last_backward[op.forward_op_idx] = op_idx
    found: dict[int, list[Blocking]] = defaultdict(list)
    has_backward = bool(last_backward)
    for collective in collectives:
        fabric = layout.expert if collective.kind == "all_to_all" else layout.tensor
        if fabric.gpus == 1:
            continue
        is_split = sequence_parallel and collective.kind == "all_reduce"
        kinds = ("reduce_scatter", "all_gather") if is_split else (collective.kind,)
        items = [
            Blocking(kind, collective.num_bytes, collective_ms(kind, collective.num_bytes, fabric)) for kind in kinds
        ]
        if collective.phase is OpPhase.FORWARD:
            found[collective.op_idx] += items
            if collective.op_idx in again:
                found[again[collective.op_idx]] += items
        elif has_backward and collective.op_idx in last_backward:
            found[last_backward[collective.op_idx]] += items
    return {op_idx: tuple(items) for op_idx, items in found.items()}


def expert_collectives(graph: OpGraph, experts: Experts) -> list[LayerCollective]:
    """Dispatch and return of tokens: before and behind the experts' products of each layer, forward and backward."""
    collectives = []
    for products in experts.products:
        num_bytes = _dispatched_bytes(graph, products)
        for op_idx in (products[0], products[-1]):
            for phase in (OpPhase.FORWARD, OpPhase.BACKWARD):
                collectives.append(LayerCollective("all_to_all", num_bytes, phase, op_idx))
    return collectives


def _dispatched_bytes(graph: OpGraph, products: tuple[int, ...]) -> float:
    """Bytes of the tokens that a layer's experts read: inputs that no other expert product of the layer made."""
    own = set(products)
    made: set[int] = set()
    read: dict[int, float] = {}
    for op_idx in range(products[0], products[-1] + 1):
        op = graph.ops[op_idx]
        derived = any(i in made for i in op.inputs)
        if op_idx in own and not derived:
            for i in op.inputs:
                if graph.tensors[i].role in (Role.ACTIVATION, Role.INPUT):
                    read[i] = graph.tensors[i].num_bytes
        if op_idx in own or derived:
            made.update(op.outputs)
    return sum(read.values())
