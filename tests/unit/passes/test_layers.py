"""Where layers begin, how many heads there are, which weights are experts'."""

from itertools import pairwise

from gnnpred.graph import OpPhase
from gnnpred.job import Phase, Precision
from gnnpred.passes.layers import attention_heads, find_experts, layer_spans, segments_of_ops
from gnnpred.passes.step import complete_step, lower_forward
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.graphs import tiny_cnn
from tests.helpers.transformers import small_transformer


def test_layers_begin_at_the_same_place_of_each_repetition():
    graph = small_transformer(5)
    spans = layer_spans(graph)
    assert spans.num_layers == 5
    assert spans.are_alike
    length = spans.starts[1] - spans.starts[0]
    assert [b - a for a, b in pairwise(spans.starts)] == [length] * 4
    assert {graph.ops[start].kind for start in spans.starts} == {"linear"}
    assert spans.segment_of(0) == 0  # the embedding
    assert spans.segment_of(len(graph.ops) - 1) == 6  # the output layer


def test_backward_ops_casts_and_second_runs_belong_to_the_segment_of_their_forward_op():
    lowered = lower_forward(small_transformer(3), batch_size=None, precision=Precision.MIXED)
    step = complete_step(lowered, phase=Phase.TRAIN, optimizer="adam", checkpointing=True)
    spans = layer_spans(step)
    segments = segments_of_ops(step, spans)
    backward = [s for s, op in zip(segments, step.ops, strict=True) if op.phase is OpPhase.BACKWARD]
    assert set(backward) == {0, 1, 2, 3, 4}
    assert backward[0] == 4
    assert backward[-1] == 0
    # gradients of layer 3 are made before those of layer 1
    assert max(i for i, s in enumerate(backward) if s == 3) < min(i for i, s in enumerate(backward) if s == 1)
    optimizer = [s for s, op in zip(segments, step.ops, strict=True) if op.phase is OpPhase.OPTIMIZER]
    assert set(optimizer) == {-1}


def test_a_model_of_unlike_layers_counts_every_product():
    b = GraphBuilder()
    x = b.input(8, 16)
    for width in (16, 16, 32, 64, 64, 64, 64):
        x = b.op("linear", [x, b.parameter(width, b.tensors[x].shape[-1])], (8, width))
    spans = layer_spans(b.build(x))
    assert not spans.are_alike
    assert spans.num_layers == 7
    assert not layer_spans(tiny_cnn()).are_alike


def test_heads_come_from_the_attention():
    assert attention_heads(small_transformer(heads=8)) == 8
    assert attention_heads(tiny_cnn()) is None


def test_experts_are_stacked_weights_beside_a_top_k():
    experts = find_experts(small_transformer(3, experts=4))
    assert experts.num_experts == 4
    assert len(experts.products) == 3
    assert len(experts.parameters) == 6
    assert find_experts(small_transformer(3)) is None
