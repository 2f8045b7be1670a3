"""Norms from their pieces."""

import pytest

from gnnpred.graph import DType
from tests.helpers.hand_graph import HandGraph


def layer_norm_pieces(g, x, *axes, square="pow_scalar", root="sqrt", twice=False):
    """x centred and divided by the root of its variance, in the ways exporters write it."""
    mean = g.mean(x, *axes)
    centred = g.op("sub", x, mean)
    squared = g.op("pow_scalar", centred, exponent=2.0) if square == "pow_scalar" else g.op("mul", centred, centred)
    variance = g.op("add", g.mean(squared, *axes), 1e-5)
    if twice:
        centred = g.op("sub", x, g.mean(x, *axes) if twice == "mean" else mean)
    if root == "sqrt":
        return g.op("div", centred, g.op("sqrt", variance))
    if root == "rsqrt":
        return g.op("mul", centred, g.op("rsqrt", variance))
    if root == "reciprocal":
        return g.op("mul", g.op("reciprocal", g.op("sqrt", variance)), centred)
    if root == "one over":
        return g.op("mul", centred, g.op("div", 1.0, g.op("sqrt", variance)))
    return g.op("mul", centred, g.op("pow_scalar", variance, exponent=-0.5))


@pytest.mark.parametrize("square", ["pow_scalar", "mul"])
@pytest.mark.parametrize("root", ["sqrt", "rsqrt", "reciprocal", "one over", "power"])
@pytest.mark.parametrize("twice", [False, "sub", "mean"])
def test_layer_norm_in_every_order_is_one_op(square, root, twice):
    g = HandGraph(opset=13)
    x = g.input(2, 7, 16)
    y = layer_norm_pieces(g, x, -1, square=square, root=root, twice=twice)
    weight, bias = g.weight(16), g.weight(16)
    graph = g.canonical(g.op("add", g.op("mul", y, weight), bias))
    (op,) = graph.ops
    assert (op.kind, dict(op.attributes)) == ("layer_norm", {"normalized_size": 16})
    assert [graph.tensors[i].shape for i in op.inputs] == [(2, 7, 16), (16,), (16,)]


def test_layer_norm_without_weights_keeps_what_follows():
    g = HandGraph(opset=13)
    x, other = g.input(2, 7, 16), g.input(2, 7, 16)
    y = g.op("mul", layer_norm_pieces(g, x, -1), other)
    assert g.kinds(y) == ["layer_norm", "mul"]


def test_layer_norm_over_channels_of_an_image_has_the_channels_size():
    g = HandGraph(opset=13)
    x = g.input(2, 16, 7, 7)
    y = g.op("mul", layer_norm_pieces(g, x, 1), g.weight(16, 1, 1))
    (op,) = g.canonical(y).ops
    assert (op.kind, op.attributes["normalized_size"], len(op.inputs)) == ("layer_norm", 16, 2)


def test_layer_norm_of_a_half_precision_file_survives_its_casts():
    g = HandGraph(opset=13)
    x = g.input(2, 7, 16, dtype=DType.FP16)
    y = layer_norm_pieces(g, g.op("cast", x, dtype=DType.FP32), -1)
    half = g.op("mul", g.op("cast", y, dtype=DType.FP16), g.weight(16, dtype=DType.FP16))
    graph = g.canonical(g.op("add", half, g.weight(16, dtype=DType.FP16)))
    assert [op.kind for op in graph.ops] == ["layer_norm"]
    assert any("half-precision" in note for note in graph.notes)


def rms_norm(g, x, root, *, weight_first):
    square = g.op("pow_scalar", x, exponent=2.0)
    variance = g.op("add", g.mean(square, -1), 1e-6)
    if root == "rsqrt":
        y = g.op("mul", x, g.op("rsqrt", variance))
    elif root == "sqrt":
        y = g.op("div", x, g.op("sqrt", variance))
    else:
        y = g.op("mul", x, g.op("reciprocal", g.op("sqrt", variance)))
    weight = g.weight(16)
    return g.op("mul", weight, y) if weight_first else g.op("mul", y, weight)


@pytest.mark.parametrize("root", ["rsqrt", "sqrt", "reciprocal"])
def test_rms_norm_is_one_op(root):
    g = HandGraph(opset=20)
    (op,) = g.canonical(rms_norm(g, g.input(2, 7, 16), root, weight_first=False)).ops
    assert (op.kind, dict(op.attributes), len(op.inputs)) == ("rms_norm", {"normalized_size": 16}, 2)


def test_rms_norm_written_by_the_model_itself_says_how_many_kernels_it_is():
    g = HandGraph()  # a trace: composites would be whole
    (op,) = g.canonical(rms_norm(g, g.input(2, 7, 16), "rsqrt", weight_first=True)).ops
    # pow, mean, add, rsqrt, mul, mul; x is read by pow, mean (its square) and mul, the product once more
    assert (op.kind, op.attributes["fused"], op.attributes["num_launches"]) == ("rms_norm", False, 6)
    assert op.attributes["reads"] == pytest.approx(4, abs=0.5)
    assert op.attributes["writes"] == pytest.approx(3, abs=0.3)


def test_transformers_order_of_operands_marks_a_handwritten_rms_norm_below_opset_23():
    handwritten, composite = HandGraph(opset=20), HandGraph(opset=20)
    (own,) = handwritten.canonical(rms_norm(handwritten, handwritten.input(2, 7, 16), "rsqrt", weight_first=True)).ops
    (fused,) = composite.canonical(rms_norm(composite, composite.input(2, 7, 16), "rsqrt", weight_first=False)).ops
    assert own.attributes["fused"] is False
    assert "fused" not in fused.attributes


@pytest.mark.parametrize("form", ["instance_norm", "batch_norm", "layer_norm"])
def test_group_norm_through_views_is_one_op(form):
    g = HandGraph(opset=17)
    x = g.input(2, 8, 6, 6)
    if form == "instance_norm":
        inner = g.op("group_norm", g.view(x, 2, 4, 72), g.constant(4), g.constant(4), groups=4, shape=(2, 4, 72))
    elif form == "batch_norm":
        inner = g.op("batch_norm", g.view(x, 1, 8, 72), shape=(1, 8, 72))
    else:
        inner = layer_norm_pieces(g, g.view(x, 2, 4, 72), -1)
    y = g.op("mul", g.view(inner, 2, 8, 6, 6), g.weight(8, 1, 1))
    graph = g.canonical(g.op("add", y, g.weight(8, 1, 1)))
    (op,) = graph.ops
    assert (op.kind, dict(op.attributes), len(op.inputs)) == ("group_norm", {"groups": 4}, 3)


def test_statistics_over_everything_but_the_channels_are_a_batch_norm():
    g = HandGraph(opset=13)
    x = g.input(4, 8, 6, 6)
    y = layer_norm_pieces(g, x, 0, 2, 3)
    graph = g.canonical(g.op("add", g.op("mul", y, g.weight(8, 1, 1)), g.weight(8, 1, 1)))
    assert [(op.kind, len(op.inputs)) for op in graph.ops] == [("batch_norm", 3)]


def test_normalising_by_the_length_is_an_l2_norm():
    g = HandGraph(opset=17)
    x = g.input(2, 7, 16)
    length = g.op("clamp", g.mean(x, -1, kind="reduce_l2"), min=1e-12)
    assert g.kinds(g.op("div", x, g.op("expand", length, shape=(2, 7, 16)))) == ["l2_norm"]


def test_length_from_squares_is_an_l2_norm_too():
    g = HandGraph(opset=17)
    x = g.input(2, 7, 16)
    length = g.op("sqrt", g.mean(g.op("mul", x, x), -1, kind="reduce_sum"))
    assert g.kinds(g.op("div", x, g.op("maximum", length, 1e-12))) == ["l2_norm"]


@pytest.mark.parametrize("divide_first", ["weight", "length"])
def test_a_weight_of_learned_length_is_weight_norm(divide_first):
    g = HandGraph(opset=17)
    direction, magnitude = g.weight(8, 16), g.weight(8, 1)
    norm = g.mean(direction, -1, kind="reduce_l2")
    if divide_first == "weight":
        weight = g.op("mul", g.op("div", direction, norm), magnitude)
    else:
        weight = g.op("mul", direction, g.op("div", magnitude, norm))
    graph = g.canonical(g.op("linear", g.input(2, 16), weight, shape=(2, 8)))
    assert [(op.kind, len(op.inputs)) for op in graph.ops] == [("l2_norm", 2), ("linear", 2)]


def test_a_standard_deviation_alone_is_no_norm():
    g = HandGraph(opset=13)
    x = g.input(2, 7, 16)
    centred = g.op("sub", x, g.mean(x, -1))
    y = g.op("sqrt", g.op("add", g.mean(g.op("mul", centred, centred), -1), 1e-5))
    assert g.kinds(y) == ["reduce_mean", "sub", "mul", "reduce_mean", "add", "sqrt"]
