"""One GPU's share of the products: shapes by hand, collectives counted, what does not divide refused."""

import pytest

from gnnpred.costs import op_costs
from gnnpred.errors import UsageError
from gnnpred.graph import OpPhase
from gnnpred.job import Phase, Precision
from gnnpred.passes.step import complete_step, lower_forward
from gnnpred.passes.tensor_parallel import split_products
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.graphs import tiny_cnn
from tests.helpers.transformers import small_transformer


def _lowered(graph, precision=Precision.FP32):
    return lower_forward(graph, batch_size=None, precision=precision)


def _shapes(graph, kind):
    return [graph.tensors[op.outputs[0]].shape for op in graph.ops if op.kind == kind]


def test_columns_then_rows_heads_and_vocabulary_are_split():
    share = split_products(_lowered(small_transformer(1, heads=4, width=64, tokens=16, vocabulary=5000)), 2).graph
    # q, k, v by columns; out by rows (whole result); up by columns, down by rows; logits by vocabulary
    assert _shapes(share, "linear") == [
        (1, 16, 32), (1, 16, 32), (1, 16, 32), (1, 16, 64), (1, 16, 128), (1, 16, 64), (1, 16, 2500),
    ]  # fmt: skip
    assert _shapes(share, "sdpa") == [(1, 2, 16, 16)]
    weights = [share.tensors[op.inputs[1]].shape for op in share.ops if op.kind == "linear"]
    assert weights == [(32, 64), (32, 64), (32, 64), (64, 32), (128, 64), (64, 128), (2500, 64)]
    biases = [share.tensors[op.inputs[2]].shape for op in share.ops if op.kind == "linear" and len(op.inputs) > 2]
    assert biases == [(32,), (32,), (32,), (64,)]  # the bias behind the sum is whole
    assert _shapes(share, "layer_norm") == [(1, 16, 64)] * 3
    assert [share.tensors[op.inputs[0]].shape for op in share.ops if op.kind == "embedding"] == [(2500, 64)]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.MIXED])
def test_two_all_reduces_forward_and_two_backward_per_layer(precision):
    split = split_products(_lowered(small_transformer(3), precision), 4)
    forward = [c for c in split.collectives if c.phase is OpPhase.FORWARD]
    backward = [c for c in split.collectives if c.phase is OpPhase.BACKWARD]
    assert len(forward) == 2 * 3 + 1  # and the embedding's
    assert len(backward) == 2 * 3 + 1  # and that of the output layer's input
    width = 4 if precision is Precision.FP32 else 2
    assert {c.num_bytes for c in backward} == {16 * 64 * width}
    assert {c.kind for c in split.collectives} == {"all_reduce"}


@pytest.mark.parametrize("ways", [2, 4])
def test_the_shares_of_all_gpus_are_the_whole_work_of_the_products(ways):
    lowered = _lowered(small_transformer(2))
    whole = complete_step(lowered, phase=Phase.TRAIN, optimizer="adam")
    share = complete_step(split_products(lowered, ways).graph, phase=Phase.TRAIN, optimizer="adam")

    def flops(graph):
        return sum(
            cost.flops for op, cost in zip(graph.ops, op_costs(graph), strict=True) if op.kind in ("linear", "sdpa")
        )

    assert flops(share) * ways == pytest.approx(flops(whole))
    assert share.num_parameters * ways == pytest.approx(whole.num_parameters, rel=0.01)


def test_a_product_whose_result_is_needed_whole_stays_whole():
    b = GraphBuilder()
    x = b.input(8, 64)
    lone = b.op("linear", [x, b.parameter(64, 64)], (8, 64))
    normed = b.op("layer_norm", [lone, b.parameter(64), b.parameter(64)], (8, 64), normalized_size=64)
    up = b.op("linear", [normed, b.parameter(256, 64)], (8, 256))
    down = b.op("linear", [b.op("relu", [up], (8, 256)), b.parameter(64, 256)], (8, 64))
    share = split_products(b.build(b.op("add", [normed, down], (8, 64))), 4)
    assert _shapes(share.graph, "linear") == [(8, 64), (8, 64), (8, 64)]
    assert len(share.collectives) == 2


def test_many_layers_with_such_products_need_no_more_rounds():
    b = GraphBuilder()
    x = b.input(8, 64)
    for _ in range(30):
        lone = b.op("linear", [x, b.parameter(64, 64)], (8, 64))
        normed = b.op("layer_norm", [lone, b.parameter(64), b.parameter(64)], (8, 64), normalized_size=64)
        up = b.op("linear", [normed, b.parameter(256, 64)], (8, 256))
        down = b.op("linear", [b.op("relu", [up], (8, 256)), b.parameter(64, 256)], (8, 64))
        x = b.op("add", [normed, down], (8, 64))
    share = split_products(b.build(x), 4)
    assert len(share.collectives) == 2 * 30
    (note,) = share.graph.notes
    assert "leaves 11% of the layers' weights whole" in note


@pytest.mark.parametrize("name", ["axes", "perm"])
def test_fused_projections_split_by_heads_through_reshape_transpose_and_unbind(name):
    b = GraphBuilder()
    x = b.input(1, 16, 64)
    qkv = b.op("linear", [x, b.parameter(192, 64)], (1, 16, 192))
    qkv = b.op("view", [qkv], (1, 16, 3, 4, 16))
    qkv = b.op("transpose", [qkv], (3, 1, 4, 16, 16), **{name: (2, 0, 3, 1, 4)})
    q = b.op("split", [qkv], *[(1, 4, 16, 16)] * 3, axis=0)
    mixed = b.op("sdpa", [q, q + 1, q + 2], (1, 4, 16, 16))
    mixed = b.op("transpose", [mixed], (1, 16, 4, 16), **{name: (0, 2, 1, 3)})
    out = b.op("linear", [b.op("view", [mixed], (1, 16, 64)), b.parameter(64, 64)], (1, 16, 64))
    share = split_products(b.build(out), 4).graph
    assert _shapes(share, "sdpa") == [(1, 1, 16, 16)]
    assert _shapes(share, "linear") == [(1, 16, 48), (1, 16, 64)]


def test_fewer_key_heads_than_gpus_are_made_by_all():
    b = GraphBuilder()
    x = b.input(1, 16, 64)

    def heads_of(count):
        y = b.op("linear", [x, b.parameter(count * 8, 64)], (1, 16, count * 8))
        y = b.op("view", [y], (1, 16, count, 8))
        return b.op("transpose", [y], (1, count, 16, 8), axes=(0, 2, 1, 3))

    def repeated(y):
        y = b.op("view", [y], (1, 2, 1, 16, 8))
        return b.op("view", [b.op("expand", [y], (1, 2, 4, 16, 8))], (1, 8, 16, 8))

    mixed = b.op("sdpa", [heads_of(8), repeated(heads_of(2)), repeated(heads_of(2))], (1, 8, 16, 8))
    mixed = b.op("view", [b.op("transpose", [mixed], (1, 16, 8, 8), axes=(0, 2, 1, 3))], (1, 16, 64))
    out = b.op("linear", [mixed, b.parameter(64, 64)], (1, 16, 64))
    graph = b.build(out)
    assert _shapes(split_products(graph, 2).graph, "linear") == [(1, 16, 32), (1, 16, 8), (1, 16, 8), (1, 16, 64)]
    assert _shapes(split_products(graph, 4).graph, "linear") == [(1, 16, 16), (1, 16, 16), (1, 16, 16), (1, 16, 64)]
    assert _shapes(split_products(graph, 4).graph, "sdpa") == [(1, 2, 16, 8)]


def test_experts_of_stacked_weights_split_by_their_inner_width():
    share = split_products(_lowered(small_transformer(1, experts=4)), 2).graph
    stacked = [share.tensors[op.inputs[1]].shape for op in share.ops if op.kind == "matmul"]
    assert stacked == [(4, 64, 128), (4, 128, 64)]


def test_what_cannot_be_split_is_one_clear_line():
    with pytest.raises(UsageError, match="--tp 8 is more than the 4 attention heads"):
        split_products(_lowered(small_transformer(heads=4)), 8)
    with pytest.raises(UsageError, match="--tp 3 does not divide the 4 attention heads"):
        split_products(_lowered(small_transformer(heads=4)), 3)
    with pytest.raises(UsageError, match="no pair of products"):
        split_products(_lowered(tiny_cnn()), 2)


def test_one_way_is_the_graph_itself():
    lowered = _lowered(small_transformer())
    assert split_products(lowered, 1).graph is lowered
