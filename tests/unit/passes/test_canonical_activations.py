"""Activations written as arithmetic become one op."""

import pytest

from tests.helpers.hand_graph import HandGraph

OPSET_BEFORE_GELU = 17


def gelu_product_last(g, x):
    erf = g.op("erf", g.op("div", x, 1.4142135))
    return g.op("mul", g.op("mul", x, g.op("add", erf, 1.0)), 0.5)


def gelu_half_first(g, x):
    erf = g.op("erf", g.op("mul", x, 0.70710678))
    return g.op("mul", g.op("mul", x, 0.5), g.op("add", erf, 1.0))


def gelu_half_on_sum(g, x):
    erf = g.op("erf", g.op("div", x, 1.4142135))
    return g.op("mul", g.op("mul", g.op("add", 1.0, erf), 0.5), x)


def gelu_tanh_cube_as_power(g, x):
    cube = g.op("mul", g.op("pow_scalar", x, exponent=3.0), 0.044715)
    tanh = g.op("tanh", g.op("mul", g.op("add", x, cube), 0.7978845608))
    return g.op("mul", g.op("mul", x, 0.5), g.op("add", tanh, 1.0))


def gelu_tanh_cube_as_products(g, x):
    cube = g.op("mul", g.op("mul", g.op("mul", x, x), x), 0.044715)
    tanh = g.op("tanh", g.op("mul", 0.7978845608, g.op("add", x, cube)))
    return g.op("mul", 0.5, g.op("mul", x, g.op("add", 1.0, tanh)))


def gelu_tanh_factored(g, x):
    inner = g.op("add", 1.0, g.op("mul", g.op("mul", x, 0.044715), x))
    tanh = g.op("tanh", g.op("mul", g.op("mul", x, 0.7978845608), inner))
    return g.op("mul", g.op("mul", 0.5, x), g.op("add", 1.0, tanh))


def silu(g, x):
    return g.op("mul", g.op("sigmoid", x), x)


def quick_gelu(g, x):
    return g.op("mul", x, g.op("sigmoid", g.op("mul", x, 1.702)))


def mish(g, x):
    return g.op("mul", x, g.op("tanh", g.op("softplus", x)))


def hardswish_over_six(g, x):
    return g.op("div", g.op("mul", x, g.op("relu6", g.op("add", x, 3.0))), 6.0)


def hardswish_of_clamp(g, x):
    gate = g.op("div", g.op("clamp", g.op("add", x, 3.0), min=0.0, max=6.0), 6.0)
    return g.op("mul", x, gate)


def hardswish_of_hardsigmoid(g, x):
    return g.op("mul", g.op("hardsigmoid", x), x)


def hardsigmoid(g, x):
    return g.op("div", g.op("relu6", g.op("add", x, 3.0)), 6.0)


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("gelu", gelu_product_last), ("gelu", gelu_half_first), ("gelu", gelu_half_on_sum),
        ("gelu_tanh", gelu_tanh_cube_as_power), ("gelu_tanh", gelu_tanh_cube_as_products),
        ("gelu_tanh", gelu_tanh_factored), ("silu", silu), ("quick_gelu", quick_gelu), ("mish", mish),
        ("hardswish", hardswish_over_six), ("hardswish", hardswish_of_clamp), ("hardswish", hardswish_of_hardsigmoid),
        ("hardsigmoid", hardsigmoid),
    ],
)  # fmt: skip
def test_arithmetic_of_an_activation_becomes_one_op(kind, write):
    g = HandGraph(opset=OPSET_BEFORE_GELU)
    x = g.input(2, 8)
    graph = g.canonical(write(g, x))
    assert [op.kind for op in graph.ops] == [kind]
    assert graph.ops[0].inputs == graph.inputs


@pytest.mark.parametrize(
    "write",
    [
        lambda g, x: g.op("mul", g.op("mul", x, g.op("add", g.op("erf", g.op("div", x, 2.0)), 1.0)), 0.5),  # not sqrt 2
        lambda g, x: g.op("mul", g.op("sigmoid", g.op("mul", x, 3.0)), x),
        lambda g, x: g.op("mul", g.op("sigmoid", g.op("neg", x)), x),
        lambda g, x: g.op("div", g.op("relu6", g.op("add", x, 2.0)), 6.0),
        lambda g, x: g.op("mul", x, g.op("add", g.op("erf", g.op("div", x, 1.4142135)), 1.0)),  # without the half
    ],
)
def test_similar_arithmetic_is_left_alone(write):
    g = HandGraph(opset=OPSET_BEFORE_GELU)
    y = write(g, g.input(2, 8))
    assert g.kinds(y) == [op.kind for op in g.ops]


def test_a_gate_on_another_tensor_is_no_silu():
    g = HandGraph()
    x, gate = g.input(2, 8), g.input(2, 8)
    assert g.kinds(g.op("mul", x, g.op("sigmoid", gate))) == ["sigmoid", "mul"]


def test_an_inner_value_that_is_read_elsewhere_keeps_the_pieces():
    g = HandGraph(opset=OPSET_BEFORE_GELU)
    x = g.input(2, 8)
    gate = g.op("sigmoid", x)
    y = g.op("mul", x, gate)
    assert g.kinds(y, gate) == ["sigmoid", "mul"]


def test_constants_rounded_to_half_precision_still_match():
    g = HandGraph(opset=13)
    x = g.input(2, 8)
    cube = g.op("mul", g.op("pow_scalar", x, exponent=3.0), 0.04471)
    tanh = g.op("tanh", g.op("mul", g.op("add", x, cube), 0.798))
    assert g.kinds(g.op("mul", g.op("mul", x, 0.5), g.op("add", tanh, 1.0))) == ["gelu_tanh"]


def test_pieces_in_a_file_that_could_say_gelu_are_the_models_own_kernels():
    write = gelu_tanh_cube_as_power
    new, old = HandGraph(opset=20), HandGraph(opset=17)
    (op,) = new.canonical(write(new, new.input(2, 8))).ops
    assert op.kind == "gelu_tanh"
    # pow 1 read; + 0.044715 * cube 1 + 1/16 (the scalar) and 2; times 0.797 1 + 1/16; tanh 1; + 1 and x * 0.5
    # 1 + 1/16 each; the last product 2
    assert dict(op.attributes) == {"fused": False, "num_launches": 8, "reads": 10.25, "writes": 8.0}
    # below opset 20 the exporters' own order (the half first) means the function
    (op,) = old.canonical(gelu_tanh_factored(old, old.input(2, 8))).ops
    assert dict(op.attributes) == {}


def test_half_of_x_marks_a_handwritten_gelu_where_the_opset_cannot_tell():
    g = HandGraph(opset=17)
    (op,) = g.canonical(gelu_tanh_cube_as_power(g, g.input(2, 8))).ops
    assert (op.kind, op.attributes["fused"]) == ("gelu_tanh", False)
