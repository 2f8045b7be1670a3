"""Activation checkpointing: which ops run again, and what that costs."""

import pytest

from gnnpred import JobSpec, Phase, Precision, find_device
from gnnpred.costs import op_costs, total_by_phase
from gnnpred.features import COMPONENTS, graph_structure
from gnnpred.graph import Component, OpPhase
from gnnpred.memory import estimate_memory_gib
from gnnpred.passes.checkpointing import checkpointed_region
from gnnpred.passes.precision import lower_precision
from gnnpred.passes.step import complete_step
from tests.helpers.graph_builder import GraphBuilder

TOKENS, WIDTH, VOCAB, LAYERS = 64, 32, 1000, 3


def _language_model():
    b = GraphBuilder()
    h = b.op("linear", [b.input(TOKENS, 8), b.parameter(WIDTH, 8)], (TOKENS, WIDTH))  # stem: a shape of its own
    for _ in range(LAYERS):
        h = b.op("linear", [h, b.parameter(4 * WIDTH, WIDTH)], (TOKENS, 4 * WIDTH))
        h = b.op("gelu", [h], (TOKENS, 4 * WIDTH))
        h = b.op("linear", [h, b.parameter(WIDTH, 4 * WIDTH)], (TOKENS, WIDTH))
    return b.build(b.op("linear", [h, b.parameter(VOCAB, WIDTH)], (TOKENS, VOCAB)))


def _step(precision=Precision.FP32, **options):
    lowered = lower_precision(_language_model(), precision)
    return complete_step(lowered, phase=Phase.TRAIN, optimizer="adamw", **options)


def _second_runs(graph):
    return [op for op in graph.ops if op.phase is OpPhase.BACKWARD and op.component is Component.FORWARD]


def test_the_region_holds_the_repeated_layers_without_stem_and_head():
    graph = _language_model()
    region, num_layers = checkpointed_region(graph.ops, graph.tensors)
    assert num_layers == LAYERS
    assert list(region) == list(range(1, 1 + 3 * LAYERS))


def test_every_op_of_the_layers_runs_again_just_before_its_backward():
    graph = _step(checkpointing=True)
    assert [op.kind for op in _second_runs(graph)] == ["linear", "gelu", "linear"] * LAYERS
    first = graph.ops.index(_second_runs(graph)[0])
    assert graph.ops[first + 1].forward_op_idx == graph.ops[first].forward_op_idx
    assert not _second_runs(_step())


def test_a_second_run_costs_what_the_first_did():
    plain, again = _step(), _step(checkpointing=True)
    layers = 2 * TOKENS * (4 * WIDTH * WIDTH) * 2 * LAYERS
    extra = total_by_phase(again, op_costs(again))[OpPhase.BACKWARD][0]
    extra -= total_by_phase(plain, op_costs(plain))[OpPhase.BACKWARD][0]
    assert extra == pytest.approx(layers, rel=0.2)  # and the GELUs
    assert extra > layers
    costs = op_costs(again)
    for op_idx, op in enumerate(again.ops):
        if op in _second_runs(again):
            assert costs[op_idx] == costs[op.forward_op_idx]


def test_casts_of_autocast_run_again_and_belong_to_the_second_run():
    graph = _step(Precision.MIXED_BF16, checkpointing=True)
    casts = [
        op
        for op in graph.ops
        if op.phase is OpPhase.BACKWARD
        and op.component is Component.CAST
        and graph.ops[op.forward_op_idx].phase is OpPhase.BACKWARD
    ]
    assert len(casts) >= 2 * LAYERS  # one for each weight
    assert all(graph.ops[op.forward_op_idx].component is Component.FORWARD for op in casts)


def test_features_see_the_second_run_as_forward_work_of_nodes_without_gradients():
    plain, again = _step(), _step(checkpointing=True)
    forward = COMPONENTS.index(Component.FORWARD)
    work = []
    for graph in (plain, again):
        structure = graph_structure(graph, op_costs(graph))
        work.append((structure.flops[:, forward] * structure.count).sum())
        assert len(structure.op_node_idx) == len(graph.ops)
    layers = 2 * TOKENS * (4 * WIDTH * WIDTH) * 2 * LAYERS
    assert work[1] - work[0] >= layers


def test_checkpointed_layers_keep_less():
    lowered = lower_precision(_language_model(), Precision.FP32)
    device = find_device("A100-SXM4-80GB")
    kept, dropped = (
        estimate_memory_gib(lowered, JobSpec(device=device, optimizer="none", activation_checkpointing=name))
        for name in ("none", "full")
    )
    layer_bytes = 4 * TOKENS * (4 * WIDTH + 4 * WIDTH + WIDTH)
    inputs_bytes = 4 * TOKENS * WIDTH * LAYERS
    assert (kept - dropped) * 2**30 == pytest.approx((LAYERS - 1) * layer_bytes - inputs_bytes)


def test_a_model_without_repeated_weights_is_one_layer():
    b = GraphBuilder()
    graph = b.build(b.op("linear", [b.input(4, 8), b.parameter(3, 8)], (4, 3)))
    assert checkpointed_region(graph.ops, graph.tensors) == (range(1), 1)
