"""No-ops, spellings, biases, losses, splits; and that canonical graphs stay canonical."""

import time

import pytest

from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec
from gnnpred.passes.canonical import canonicalise
from tests.helpers.hand_graph import HandGraph


@pytest.mark.parametrize(
    "write",
    [
        lambda g, x: g.op("identity", x),
        lambda g, x: g.op("dropout", x, ratio=0.0),
        lambda g, x: g.op("cast", x),
        lambda g, x: g.op("view", x),
        lambda g, x: g.op("pad", x),
        lambda g, x: g.op("concat", x, axis=0),
        lambda g, x: g.op("expand", x),
    ],
)
def test_what_runs_nothing_is_removed(write):
    g = HandGraph()
    graph = g.canonical(g.op("relu", write(g, g.input(2, 8))))
    assert [op.kind for op in graph.ops] == ["relu"]
    assert graph.ops[0].inputs == graph.inputs


def test_a_no_op_at_the_end_hands_the_output_on():
    g = HandGraph()
    graph = g.canonical(g.op("identity", g.op("relu", g.input(2, 8))))
    assert graph.outputs == graph.ops[-1].outputs


def test_ops_that_no_output_needs_are_removed():
    g = HandGraph()
    x = g.input(2, 8)
    g.op("exp", g.op("sin", x))
    assert g.kinds(g.op("relu", x)) == ["relu"]


def test_parameters_stay_even_when_unread():
    g = HandGraph()
    g.weight(7, 3)
    graph = g.canonical(g.op("relu", g.input(2, 8)))
    assert graph.num_parameters == 21


def test_half_precision_storage_is_read_as_the_model_and_noted():
    g = HandGraph()
    x = g.op("cast", g.input(2, 8), dtype=DType.FP16)
    y = g.op("cast", g.op("linear", x, g.weight(8, 4, dtype=DType.FP16), shape=(2, 4)), dtype=DType.FP32)
    graph = g.canonical(y)
    assert [op.kind for op in graph.ops] == ["linear"]
    assert {spec.dtype for spec in graph.tensors} == {DType.FP32}
    assert len(graph.notes) == 1


def test_a_cast_from_integers_is_a_kernel():
    g = HandGraph()
    x = g.input(2, 8, dtype=DType.INT64)
    assert g.kinds(g.op("cast", x, dtype=DType.FP32)) == ["cast"]


def test_random_draws_cost_what_reads_them_only():
    g = HandGraph()
    x = g.input(2, 8)
    noise = g.multi_op("identity", x, [(2, 1)])[0]
    g.ops[-1] = Op("random", (), (noise,))
    keep = g.op("div", g.op("floor", g.op("add", noise, 0.9)), 0.9)
    assert g.kinds(g.op("mul", x, keep)) == ["mul"]


@pytest.mark.parametrize(
    ("write", "kind", "attributes"),
    [
        (lambda g, x: g.op("square", x), "pow_scalar", {"exponent": 2}),
        (lambda g, x: g.op("pow", x, 3.0), "pow_scalar", {"exponent": 3.0}),
        (lambda g, x: g.op("clamp", x, min=0.0, max=6.0), "relu6", {}),
        (lambda g, x: g.op("hardtanh", x, min=-1.0, max=1.0), "clamp", {"min": -1.0, "max": 1.0}),
        (lambda g, x: g.op("minimum", g.op("maximum", x, 0.0), 6.0), "relu6", {}),
        (lambda g, x: g.op("maximum", x, 0.5), "clamp", {"min": 0.5}),
        (lambda g, x: g.op("div", 1.0, x), "reciprocal", {}),
        (lambda g, x: g.op("reciprocal", g.op("sqrt", x)), "rsqrt", {}),
        (lambda g, x: g.op("div", 1.0, g.op("sqrt", x)), "rsqrt", {}),
    ],
)
def test_spellings_of_one_op_are_unified(write, kind, attributes):
    g = HandGraph()
    (op,) = g.canonical(write(g, g.input(2, 8))).ops
    assert (op.kind, dict(op.attributes)) == (kind, attributes)


def test_a_linear_reads_its_parameter_and_takes_the_added_bias():
    g = HandGraph()
    x, weight, bias = g.input(2, 5, 8), g.weight(4, 8), g.weight(4)
    product = g.op("linear", x, g.transpose(weight, 1, 0), shape=(2, 5, 4))
    graph = g.canonical(g.op("add", product, bias))
    (op,) = graph.ops
    assert op.kind == "linear"
    assert [graph.tensors[i].shape for i in op.inputs] == [(2, 5, 8), (4, 8), (4,)]


def test_the_bias_of_flattened_rows_is_found_behind_the_view():
    g = HandGraph()
    x, weight, bias = g.input(10, 8), g.weight(8, 4), g.weight(4)
    product = g.view(g.op("linear", x, weight, shape=(10, 4)), 2, 5, 4)
    graph = g.canonical(g.op("add", product, bias))
    assert [op.kind for op in graph.ops] == ["linear", "view"]
    assert len(graph.ops[0].inputs) == 3


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1, 1)])
def test_a_conv_takes_the_added_channel_bias(shape):
    g = HandGraph()
    x = g.input(2, 3, 9, 9)
    y = g.op("conv", x, g.weight(8, 3, 3, 3), shape=(2, 8, 7, 7), kernel=(3, 3), groups=1)
    graph = g.canonical(g.op("add", y, g.weight(*shape)))
    assert [(op.kind, len(op.inputs)) for op in graph.ops] == [("conv", 3)]


def test_a_linear_of_a_constant_table_takes_its_bias_too():
    g = HandGraph()
    table = g.op("linear", g.constant(5, 2), g.weight(8, 2), shape=(5, 8))
    biased = g.op("add", table, g.weight(8))
    assert g.kinds(g.op("add", g.input(5, 8), biased)) == ["linear", "add"]


def test_an_added_activation_is_no_bias():
    g = HandGraph()
    x, other = g.input(2, 8), g.input(2, 4)
    assert g.kinds(g.op("add", g.op("linear", x, g.weight(8, 4), shape=(2, 4)), other)) == ["linear", "add"]


def test_a_position_table_is_no_bias():
    g = HandGraph()
    product = g.op("linear", g.input(2, 5, 8), g.weight(8, 4), shape=(2, 5, 4))
    assert g.kinds(g.op("add", product, g.weight(5, 4))) == ["linear", "add"]


def test_the_zero_bias_that_an_exporter_makes_up_is_dropped():
    g = HandGraph()
    x, weight = g.input(2, 3, 9, 9), g.weight(8, 3, 3, 3)
    made_up = g.constant(8, value=(0.0,) * 8, name="val_12")
    (op,) = g.canonical(g.op("conv", x, weight, made_up, shape=(2, 8, 7, 7), kernel=(3, 3), groups=1)).ops
    assert len(op.inputs) == 2


@pytest.mark.parametrize("form", ["nll", "log of softmax", "gathered"])
def test_cross_entropy_in_its_forms_is_one_op(form):
    g = HandGraph()
    logits, target = g.input(4, 10), g.input(4, dtype=DType.INT64)
    if form == "log of softmax":
        log_softmax = g.op("log", g.op("softmax", logits, axis=1))
    else:
        log_softmax = g.op("log_softmax", logits, axis=1)
    if form == "gathered":
        picked = g.op("gather_elements", log_softmax, g.view(target, 4, 1), shape=(4, 1), axis=1)
        loss = g.op("neg", g.op("reduce_mean", g.view(picked, 4), shape=(), axes=(0,)))
    else:
        loss = g.op("cross_entropy", log_softmax, target, shape=())
    graph = g.canonical(loss)
    assert [op.kind for op in graph.ops if op.kind != "view"] == ["cross_entropy"]
    assert graph.ops[-1].inputs[0] == graph.inputs[0]


def test_slices_that_make_up_a_tensor_are_one_split():
    g = HandGraph()
    x = g.input(2, 12)
    parts = [g.op("slice", x, shape=(2, 4), axes=(1,), starts=(start,), steps=(1,)) for start in (0, 4, 8)]
    graph = g.canonical(*[g.op(kind, part) for kind, part in zip(("relu", "exp", "tanh"), parts, strict=True)])
    assert [op.kind for op in graph.ops] == ["split", "relu", "exp", "tanh"]
    assert len(graph.ops[0].outputs) == 3


def test_a_split_that_is_repeated_for_each_part_is_one_split():
    g = HandGraph()
    x = g.input(2, 12)
    first, _ = g.multi_op("split", x, [(2, 6), (2, 6)], axis=1)
    _, second = g.multi_op("split", x, [(2, 6), (2, 6)], axis=1)
    graph = g.canonical(g.op("sub", first, second))
    assert [op.kind for op in graph.ops] == ["split", "sub"]
    assert graph.ops[1].inputs == graph.ops[0].outputs


def test_slices_that_leave_a_rest_stay_slices():
    g = HandGraph()
    x = g.input(2, 12)
    parts = [g.op("slice", x, shape=(2, 4), axes=(1,), starts=(start,), steps=(1,)) for start in (0, 4)]
    results = [g.op("relu", part) for part in parts]
    assert g.kinds(*results) == ["slice", "slice", "relu", "relu"]


def test_parts_in_swapped_order_are_a_roll_along_both_axes():
    g = HandGraph()
    x = g.input(2, 6, 6, 3)
    for axis in (1, 2):
        tail = g.op(
            "slice", x, shape=[3 if i == axis else d for i, d in enumerate((2, 6, 6, 3))], axes=(axis,), starts=(3,)
        )
        head = g.op(
            "slice", x, shape=[3 if i == axis else d for i, d in enumerate((2, 6, 6, 3))], axes=(axis,), starts=(0,)
        )
        x = g.op("concat", tail, head, shape=(2, 6, 6, 3), axis=axis)
    graph = g.canonical(g.op("relu", x))
    assert [(op.kind, op.attributes.get("axes")) for op in graph.ops] == [("roll", (1, 2)), ("relu", None)]


def test_the_exporters_factor_of_one_marks_addcmul():
    g = HandGraph()
    a, b, c = g.input(2, 8), g.input(2, 8), g.input(2, 8)
    y = g.op("add", c, g.op("mul", g.op("mul", 1.0, a), b))
    assert g.kinds(y) == ["addcmul"]


def test_learned_operands_first_are_addcmul_and_last_a_models_own_affine():
    g = HandGraph()
    x, scale, shift = g.input(2, 8), g.weight(8), g.weight(8)
    assert g.kinds(g.op("add", shift, g.op("mul", scale, x))) == ["addcmul"]
    assert g.kinds(g.op("add", g.op("mul", x, scale), shift)) == ["mul", "add"]


@pytest.mark.parametrize(("kind", "number"), [("mul", 1.0), ("div", 1.0), ("add", 0.0), ("sub", 0.0)])
def test_arithmetic_with_a_neutral_number_is_removed(kind, number):
    g = HandGraph()
    assert g.kinds(g.op("relu", g.op(kind, g.input(2, 8), number))) == ["relu"]


def test_one_over_x_and_zero_minus_x_are_real():
    g = HandGraph()
    assert g.kinds(g.op("sub", 0.0, g.input(2, 8))) == ["sub"]


def test_the_guard_of_softplus_against_large_numbers_is_inside_it():
    g = HandGraph()
    x = g.input(2, 8)
    y = g.op("where", g.op("greater", x, 20.0), x, g.op("softplus", x), dtype=DType.FP32)
    assert g.kinds(y) == ["softplus"]


def test_picking_from_the_flat_tensor_by_position_is_a_view():
    g = HandGraph()
    x = g.op("relu", g.input(2, 8))
    y = g.op("gather", g.view(x, 16), g.constant(2, 8, dtype=DType.INT64), shape=(2, 8), axis=0)
    assert g.kinds(g.op("exp", y)) == ["relu", "view", "view", "exp"]


def test_a_lookup_by_data_is_a_gather():
    g = HandGraph()
    x, index = g.op("relu", g.input(16)), g.input(2, 8, dtype=DType.INT64)
    assert "gather" in g.kinds(g.op("gather", x, index, shape=(2, 8), axis=0))


def test_writing_over_a_whole_tensor_is_no_scatter():
    g = HandGraph()
    x = g.input(2, 8)
    y = g.op("add", x, g.op("relu", x))
    written = g.op("scatter", x, g.constant(1, 1, dtype=DType.INT64), y, shape=(2, 8))
    assert g.kinds(g.op("exp", written)) == ["relu", "add", "exp"]


def test_windows_picked_by_row_and_column_are_im2col():
    g = HandGraph()
    padded = g.op("pad", g.input(2, 4, 6, 6), shape=(2, 4, 8, 8))
    rows = g.op("gather", padded, g.constant(3, 6, dtype=DType.INT64), shape=(2, 4, 3, 6, 8), axis=2)
    windows = g.op("gather", rows, g.constant(3, 6, dtype=DType.INT64), shape=(2, 4, 3, 6, 3, 6), axis=4)
    y = g.view(g.transpose(windows, 0, 1, 2, 4, 3, 5), 2, 36, 36)
    assert g.kinds(g.op("exp", y)) == ["im2col", "exp"]


@pytest.mark.parametrize(("size", "kind"), [(12, "avg_pool"), (14, "adaptive_avg_pool")])
def test_adaptive_pooling_is_plain_pooling_where_windows_divide_the_input(size, kind):
    g = HandGraph()
    (op,) = g.canonical(
        g.op("adaptive_avg_pool", g.input(2, 3, size, size), shape=(2, 3, 4, 4), output_size=(4, 4))
    ).ops
    assert op.kind == kind
    if kind == "avg_pool":
        assert dict(op.attributes) == {"kernel": (3, 3), "stride": (3, 3)}


@pytest.mark.parametrize("unrolled", [False, True])
def test_windows_gathered_by_pairs_and_averaged_are_adaptive_pooling(unrolled):
    g = HandGraph()
    front = g.transpose(g.input(2, 3, 14, 14), 2, 3, 0, 1)
    picked = g.op(
        "gather", front, g.constant(4, 2, 4, 2, 2, dtype=DType.INT64), shape=(4, 2, 4, 2, 2, 3), axis=0, batch_axes=(4,)
    )
    windows = g.transpose(picked, 4, 5, 0, 1, 2, 3)
    if unrolled:
        parts = [
            g.view(g.op("slice", windows, shape=(2, 3, 4, 1, 4, 1), axes=(3, 5), starts=(i, j)), 2, 3, 4, 4)
            for i in range(2)
            for j in range(2)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = g.op("add", total, part)
        y = g.op("div", total, 4.0)
    else:
        y = g.op("reduce_mean", windows, shape=(2, 3, 4, 4), axes=(3, 5))
    (op,) = g.canonical(y).ops
    assert (op.kind, dict(op.attributes)) == ("adaptive_avg_pool", {"output_size": (4, 4)})


def test_stacking_is_concatenation_along_a_new_axis():
    g = HandGraph()
    x = g.input(2, 8)
    assert g.kinds(g.op("stack", x, x, shape=(2, 2, 8), axis=0)) == ["concat"]


def test_every_other_element_twice_is_a_split():
    g = HandGraph()
    x = g.input(2, 8)
    even, odd = (g.op("slice", x, shape=(2, 4), axes=(1,), starts=(start,), steps=(2,)) for start in (0, 1))
    assert g.kinds(g.op("add", even, odd)) == ["split", "add"]


def long_chain(num_ops: int) -> OpGraph:
    """A network-like chain in which every eighth op is a GELU in pieces; all read the same scalars."""
    shape, fp32 = (2, 64), DType.FP32
    tensors = [TensorSpec(shape, fp32, Role.INPUT, (0,))]
    tensors += [TensorSpec((), fp32, Role.CONSTANT, value=value) for value in (1.4142135, 1.0, 0.5)]
    ops: list[Op] = []

    def op(kind, *inputs):
        tensors.append(TensorSpec(shape, fp32, Role.ACTIVATION, (0,)))
        ops.append(Op(kind, inputs, (len(tensors) - 1,)))
        return len(tensors) - 1

    x = 0
    while len(ops) < num_ops:
        gate = op("add", op("erf", op("div", x, 1)), 2)
        x = op("add", op("relu", op("mul", op("mul", x, gate), 3)), x)
    return OpGraph(tuple(tensors), tuple(ops), (0,), (x,), 2)


def test_time_grows_linearly_with_the_number_of_ops():
    def seconds(num_ops):
        graph = long_chain(num_ops)
        best = float("inf")
        for _ in range(3):
            started = time.process_time()
            canonicalise(graph)
            best = min(best, time.process_time() - started)
        return best

    # 8 times the ops: 8 times the time if linear, 64 times if every op looked at all others
    assert seconds(16_000) < 20 * max(seconds(2_000), 0.005)


def test_canonicalising_twice_changes_nothing_more():
    once = canonicalise(long_chain(200))
    assert canonicalise(once) == once
