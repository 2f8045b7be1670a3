"""Softmax attention in the forms that exporters and models write becomes one sdpa op."""

import pytest

from gnnpred.graph import DType
from tests.helpers.hand_graph import HandGraph

B, H, S, D = 2, 3, 5, 4


def heads(g):
    """q, k, v as (B, H, S, D)."""
    return g.input(B, H, S, D), g.input(B, H, S, D), g.input(B, H, S, D)


def scores(g, q, k):
    return g.op("matmul", q, g.transpose(k, 0, 1, 3, 2), shape=(B, H, S, S))


def weighted(g, weights, v):
    return g.op("matmul", weights, v, shape=(B, H, S, D))


def only_op(g, y):
    graph = g.canonical(y)
    assert [op.kind for op in graph.ops if op.kind not in ("transpose", "view", "expand")] == ["sdpa"]
    return graph, graph.ops[-1]


@pytest.mark.parametrize("scale", ["scores", "scores divided", "q", "k", "q and k", "none"])
def test_the_scale_is_part_of_attention_wherever_it_stands(scale):
    g = HandGraph()
    q, k, v = heads(g)
    scaled_q = g.op("mul", q, 0.5) if scale in ("q", "q and k") else q
    scaled_k = g.op("mul", k, 0.5) if scale in ("k", "q and k") else k
    s = scores(g, scaled_q, scaled_k)
    s = g.op("mul", s, 0.5) if scale == "scores" else g.op("div", s, 2.0) if scale == "scores divided" else s
    graph, op = only_op(g, weighted(g, g.op("softmax", s, axis=3), v))
    assert op.inputs == graph.inputs
    assert dict(op.attributes) == {"causal": False}


def test_keys_transposed_by_the_exporters_view_dance_are_found():
    g = HandGraph()
    q, k, v = heads(g)
    flat = g.transpose(g.view(k, B * H, S, D), 0, 2, 1)
    k_transposed = g.op("mul", g.view(flat, B, H, D, S), 0.7)
    s = g.op("matmul", g.op("mul", q, 0.7), k_transposed, shape=(B, H, S, S))
    graph, op = only_op(g, weighted(g, g.op("softmax", s, axis=3), v))
    assert op.inputs == graph.inputs


def test_keys_permuted_straight_from_the_projection_get_their_own_order_back():
    g = HandGraph()
    q, packed, v = g.input(B, H, S, D), g.input(B, S, H, D), g.input(B, H, S, D)
    s = g.op("matmul", q, g.transpose(packed, 0, 2, 3, 1), shape=(B, H, S, S))
    graph, op = only_op(g, weighted(g, g.op("softmax", s, axis=3), v))
    assert graph.tensors[op.inputs[1]].shape == (B, H, S, D)


def test_an_additive_mask_becomes_the_fourth_input():
    g = HandGraph()
    q, k, v = heads(g)
    mask = g.input(B, 1, 1, S)
    s = g.op("add", g.op("mul", scores(g, q, k), 0.5), mask)
    graph, op = only_op(g, weighted(g, g.op("softmax", s, axis=3), v))
    assert op.inputs == graph.inputs


def test_a_learned_position_bias_is_a_mask():
    g = HandGraph()
    q, k, v = heads(g)
    s = g.op("add", scores(g, q, k), g.weight(1, H, S, S))
    graph, op = only_op(g, weighted(g, g.op("softmax", s, axis=3), v))
    assert graph.tensors[op.inputs[3]].shape == (1, H, S, S)


@pytest.mark.parametrize("order", ["condition scores fill", "scores condition fill"])
def test_a_boolean_mask_by_where_is_a_mask(order):
    g = HandGraph()
    q, k, v = heads(g)
    mask = g.input(B, 1, S, S, dtype=DType.BOOL)
    s = scores(g, q, k)
    operands = (mask, s, -1e9) if order.startswith("condition") else (s, mask, -1e9)
    graph, op = only_op(g, weighted(g, g.op("softmax", g.op("where", *operands, dtype=DType.FP32), axis=3), v))
    assert graph.tensors[op.inputs[3]].shape == (B, 1, S, S)


@pytest.mark.parametrize("write", ["add", "where"])
def test_a_constant_square_mask_is_causality(write):
    g = HandGraph()
    q, k, v = heads(g)
    s = scores(g, q, k)
    triangle = g.constant(1, 1, S, S, dtype=DType.FP32 if write == "add" else DType.BOOL)
    s = g.op("add", s, triangle) if write == "add" else g.op("where", triangle, s, -1e9, dtype=DType.FP32)
    _, op = only_op(g, weighted(g, g.op("softmax", s, axis=3), v))
    assert (op.attributes["causal"], len(op.inputs)) == (True, 3)


def test_a_constant_mask_per_window_stays_a_mask():
    g = HandGraph()
    q, k, v = heads(g)
    s = g.op("add", scores(g, q, k), g.constant(1, H, S, S))
    _, op = only_op(g, weighted(g, g.op("softmax", s, axis=3), v))
    assert (op.attributes["causal"], len(op.inputs)) == (False, 4)


def test_dropout_and_the_guard_against_empty_rows_are_inside():
    g = HandGraph()
    q, k, v = heads(g)
    weights = g.op("softmax", scores(g, q, k), axis=3)
    weights = g.op("where", g.op("isnan", weights), 0.0, weights, dtype=DType.FP32)
    weights = g.op("dropout", weights, ratio=0.1)
    _, op = only_op(g, weighted(g, weights, v))
    assert op.attributes["dropout"] == 0.1


def test_heads_repeated_for_grouped_queries_are_read_once():
    g = HandGraph()
    q, k, v = g.input(B, 4, S, D), g.input(B, 2, S, D), g.input(B, 2, S, D)

    def repeated(x):
        return g.view(g.op("expand", g.view(x, B, 2, 1, S, D), shape=(B, 2, 2, S, D)), B, 4, S, D)

    s = g.op("matmul", q, g.transpose(repeated(k), 0, 1, 3, 2), shape=(B, 4, S, S))
    graph, op = only_op(g, g.op("matmul", g.op("softmax", s, axis=3), repeated(v), shape=(B, 4, S, D)))
    assert op.inputs == graph.inputs


def test_repeated_heads_are_found_behind_the_view_dance():
    g = HandGraph()
    q, k, v = g.input(B, 4, S, D), g.input(B, 2, S, D), g.input(B, 4, S, D)
    repeated = g.op("expand", g.view(k, B, 2, 1, S, D), shape=(B, 2, 2, S, D))
    k_transposed = g.view(g.transpose(g.view(repeated, B * 4, S, D), 0, 2, 1), B, 4, D, S)
    s = g.op("matmul", q, k_transposed, shape=(B, 4, S, S))
    graph, op = only_op(g, g.op("matmul", g.op("softmax", s, axis=3), v, shape=(B, 4, S, D)))
    assert op.inputs == graph.inputs


def test_attention_on_merged_heads_is_found():
    g = HandGraph()
    q, k, v = g.input(B * H, S, D), g.input(B * H, S, D), g.input(B * H, S, D)
    s = g.op("matmul", q, g.transpose(k, 0, 2, 1), shape=(B * H, S, S))
    masked = g.view(g.op("add", g.view(s, B, H, S, S), g.input(B, 1, 1, S)), B * H, S, S)
    graph, op = only_op(g, g.op("matmul", g.op("softmax", masked, axis=2), v, shape=(B * H, S, D)))
    assert op.inputs == graph.inputs


def test_attention_weights_that_the_model_returns_keep_the_pieces():
    g = HandGraph()
    q, k, v = heads(g)
    weights = g.op("softmax", scores(g, q, k), axis=3)
    y = weighted(g, weights, v)
    assert g.kinds(y, weights) == ["transpose", "matmul", "softmax", "matmul"]


def test_softmax_over_another_axis_is_no_attention():
    g = HandGraph()
    q, k, v = heads(g)
    y = weighted(g, g.op("softmax", scores(g, q, k), axis=1), v)
    assert "sdpa" not in g.kinds(y)


def test_scores_squeezed_through_tanh_cannot_be_fused():
    g = HandGraph()
    q, k, v = heads(g)
    s = g.op("tanh", scores(g, q, k))
    assert "sdpa" not in g.kinds(weighted(g, g.op("softmax", s, axis=3), v))


def test_a_product_with_a_vector_is_left_alone():
    """Additive attention scores tokens with one learned vector: (B, 1, S, D) @ (D,)."""
    g = HandGraph()
    keys, v = g.input(B, 1, S, D), g.input(B, S, D)
    s = g.op("matmul", keys, g.weight(D), shape=(B, 1, S))
    y = g.op("matmul", g.op("softmax", s, axis=2), v, shape=(B, 1, D))
    assert [op.kind for op in g.canonical(y).ops] == ["matmul", "softmax", "matmul"]
