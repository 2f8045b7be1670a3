"""Precision lowering on graphs built by hand; what torch.autocast does is compared in tests/integration."""

import pytest

from gnnpred.errors import UsageError
from gnnpred.graph import Component, DType, Role
from gnnpred.job import ActivationRule, Precision
from gnnpred.passes.precision import autocast_rules, has_fused_upcast, lower_precision, parse_version
from tests.helpers.graph_builder import GraphBuilder


def _casts(graph):
    """(from, to, role of the source) of every cast op."""
    return [
        (graph.tensors[op.inputs[0]].dtype, graph.tensors[op.outputs[0]].dtype, graph.tensors[op.inputs[0]].role)
        for op in graph.ops
        if op.component is Component.CAST
    ]


def _result_dtype(graph, kind):
    return next(graph.tensors[op.outputs[0]].dtype for op in graph.ops if op.kind == kind)


def _mlp():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(16, 8), b.parameter(16)], (4, 16))
    h = b.op("gelu", [h], (4, 16))
    h = b.op("layer_norm", [h, b.parameter(16), b.parameter(16)], (4, 16), normalized_size=16)
    return b.build(b.op("linear", [h, b.parameter(3, 16)], (4, 3)))


@pytest.mark.parametrize(
    ("precision", "storage", "compute"),
    [
        (Precision.FP64, DType.FP64, DType.FP64),
        (Precision.FP32, DType.FP32, DType.FP32),
        (Precision.TF32, DType.FP32, DType.TF32),
        (Precision.FP16, DType.FP16, DType.FP16),
        (Precision.BF16, DType.BF16, DType.BF16),
    ],
)
def test_pure_precisions_store_everything_in_one_type(precision, storage, compute):
    graph = lower_precision(_mlp(), precision)
    assert {t.dtype for t in graph.tensors} == {storage}
    assert {op.compute_dtype for op in graph.ops if op.kind == "linear"} == {compute}
    assert all(op.compute_dtype is storage for op in graph.ops if op.kind != "linear")
    assert not _casts(graph)


def _conv_and_matmul():
    b = GraphBuilder()
    x, y = b.input(1, 2, 4, 4), b.input(2, 4, 4)
    conv = b.op("conv", [x, b.parameter(2, 2, 1, 1)], (1, 2, 4, 4), groups=1)
    return b.build(conv, b.op("matmul", [y, y], (2, 4, 4)))


@pytest.mark.parametrize(("tf32_matmul", "expected"), [(True, DType.TF32), (False, DType.FP32)])
def test_the_matmul_switch_of_tf32_leaves_convolutions_alone(tf32_matmul, expected):
    graph = lower_precision(_conv_and_matmul(), Precision.TF32, tf32_matmul=tf32_matmul)
    assert [op.compute_dtype for op in graph.ops] == [DType.TF32, expected]


def test_the_convolution_switch_of_tf32():
    graph = lower_precision(_conv_and_matmul(), Precision.TF32, tf32_conv=False)
    assert [op.compute_dtype for op in graph.ops] == [DType.FP32, DType.TF32]


@pytest.mark.parametrize("precision", list(Precision))
def test_integer_and_boolean_tensors_keep_their_type(precision):
    b = GraphBuilder()
    indices = b.input(2, 5, dtype=DType.INT64)
    rows = b.op("embedding", [b.parameter(10, 4), indices], (2, 5, 4))
    mask = b.op("equal", [indices, b.constant(value=0, dtype=DType.INT64)], (2, 5), dtype=DType.BOOL)
    graph = lower_precision(b.build(rows, mask), precision)
    assert graph.tensors[indices].dtype is DType.INT64
    assert graph.tensors[mask].dtype is DType.BOOL
    assert graph.ops[1].compute_dtype is DType.INT64


@pytest.mark.parametrize("precision", list(Precision))
def test_every_op_gets_a_compute_type(precision):
    assert all(op.compute_dtype is not None for op in lower_precision(_mlp(), precision).ops)


def test_autocast_runs_products_in_half_and_norms_in_fp32():
    graph = lower_precision(_mlp(), Precision.MIXED)
    assert [(op.kind, op.compute_dtype) for op in graph.ops if op.component is Component.FORWARD] == [
        ("linear", DType.FP16),
        ("gelu", DType.FP16),
        ("layer_norm", DType.FP32),
        ("linear", DType.FP16),
    ]
    assert _casts(graph) == [
        (DType.FP32, DType.FP16, Role.INPUT),
        (DType.FP32, DType.FP16, Role.PARAMETER),
        (DType.FP32, DType.FP16, Role.PARAMETER),
        (DType.FP16, DType.FP32, Role.ACTIVATION),  # into the norm
        (DType.FP32, DType.FP16, Role.ACTIVATION),  # out of it
        (DType.FP32, DType.FP16, Role.PARAMETER),
    ]


def test_a_cast_points_to_the_op_that_it_feeds():
    graph = lower_precision(_mlp(), Precision.MIXED)
    for op_idx, op in enumerate(graph.ops):
        if op.component is Component.CAST:
            assert op.forward_op_idx > op_idx
            assert op.outputs[0] in graph.ops[op.forward_op_idx].inputs


def test_a_weight_is_cast_once_per_step_and_an_activation_at_every_reader():
    b = GraphBuilder()
    x, w = b.input(4, 8), b.parameter(8, 8)
    h = b.op("exp", [b.op("linear", [x, w], (4, 8))], (4, 8))  # fp32
    graph = lower_precision(b.build(b.op("linear", [h, w], (4, 8)), b.op("linear", [h, w], (4, 8))), Precision.MIXED)
    casts = _casts(graph)
    assert casts.count((DType.FP32, DType.FP16, Role.PARAMETER)) == 1
    assert casts.count((DType.FP32, DType.FP16, Role.ACTIVATION)) == 2


def test_a_tensor_computed_from_weights_is_not_in_the_weight_cache():
    b = GraphBuilder()
    w = b.op("mul", [b.parameter(8, 8), b.constant(value=2.0)], (8, 8))
    x = b.input(4, 8)
    graph = lower_precision(b.build(b.op("linear", [x, w], (4, 8)), b.op("linear", [x, w], (4, 8))), Precision.MIXED)
    assert _casts(graph).count((DType.FP32, DType.FP16, Role.PARAMETER_DERIVED)) == 2


def test_softmax_reads_fp16_itself_but_needs_a_cast_from_bf16():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    graph = b.build(b.op("softmax", [h], (4, 8), axis=1))
    half, bfloat = (lower_precision(graph, p) for p in (Precision.MIXED, Precision.MIXED_BF16))
    assert _result_dtype(half, "softmax") is _result_dtype(bfloat, "softmax") is DType.FP32
    assert (DType.BF16, DType.FP32, Role.ACTIVATION) in _casts(bfloat)
    assert len(_casts(half)) == len(_casts(bfloat)) - 1
    assert has_fused_upcast("softmax", DType.FP16)
    assert not has_fused_upcast("softmax", DType.BF16)
    assert has_fused_upcast("reduce_sum", DType.BF16)


def test_addition_promotes_without_a_cast():
    b = GraphBuilder()
    x = b.input(4, 8)
    h = b.op("linear", [x, b.parameter(8, 8)], (4, 8))
    graph = lower_precision(b.build(b.op("add", [h, x], (4, 8))), Precision.MIXED)
    assert _result_dtype(graph, "add") is DType.FP32
    assert len(_casts(graph)) == 2


@pytest.mark.parametrize("kind", ["constant", "parameter"])
def test_scalars_do_not_promote(kind):
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    scalar = b.constant(value=0.5) if kind == "constant" else b.parameter()
    graph = lower_precision(b.build(b.op("mul", [h, scalar], (4, 8))), Precision.MIXED)
    assert _result_dtype(graph, "mul") is DType.FP16


def test_a_weight_with_dimensions_promotes():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    graph = lower_precision(b.build(b.op("mul", [h, b.parameter(8)], (4, 8))), Precision.MIXED)
    assert _result_dtype(graph, "mul") is DType.FP32


def test_a_random_mask_takes_the_type_of_what_it_meets():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    keep = b.op("random", [], (4, 1))
    keep = b.op("div", [keep, b.constant(value=0.9)], (4, 1))
    graph = lower_precision(b.build(b.op("mul", [h, keep], (4, 8))), Precision.MIXED)
    assert _result_dtype(graph, "mul") is DType.FP16


def test_batch_norm_keeps_its_input_type_and_fp32_weights():
    b = GraphBuilder()
    h = b.op("conv", [b.input(1, 4, 4, 4), b.parameter(4, 4, 1, 1)], (1, 4, 4, 4), groups=1)
    scale = b.parameter(4)
    graph = lower_precision(b.build(b.op("batch_norm", [h, scale], (1, 4, 4, 4))), Precision.MIXED)
    assert _result_dtype(graph, "batch_norm") is DType.FP16
    assert graph.tensors[scale].dtype is DType.FP32
    assert len(_casts(graph)) == 2


def test_instance_norm_is_not_on_the_list_of_group_norm():
    for groups, expected in ((4, DType.FP16), (2, DType.FP32)):
        b = GraphBuilder()
        h = b.op("conv", [b.input(1, 4, 4, 4), b.parameter(4, 4, 1, 1)], (1, 4, 4, 4), groups=1)
        graph = b.build(b.op("group_norm", [h], (1, 4, 4, 4), groups=groups))
        assert _result_dtype(lower_precision(graph, Precision.MIXED), "group_norm") is expected


def test_resizing_went_to_fp32_with_pytorch_2_4():
    b = GraphBuilder()
    h = b.op("conv", [b.input(1, 4, 4, 4), b.parameter(4, 4, 1, 1)], (1, 4, 4, 4), groups=1)
    graph = b.build(b.op("resize", [h], (1, 4, 8, 8), mode="nearest"))
    for version, expected in (("1.12", DType.FP16), ("2.3.1+cu121", DType.FP16), ("2.4", DType.FP32), ("", DType.FP32)):
        lowered = lower_precision(graph, Precision.MIXED, framework_version=version)
        assert _result_dtype(lowered, "resize") is expected


def test_versions_compare_as_numbers():
    assert parse_version("1.13.1+cu117") == (1, 13)
    assert parse_version("2.10") > parse_version("2.9")
    assert parse_version("") > parse_version("2.9")
    assert parse_version("nightly") == parse_version("")


def test_all_half_keeps_activations_in_half_and_weights_as_masters():
    graph = lower_precision(_mlp(), Precision.MIXED, activation_rule=ActivationRule.ALL_HALF)
    for tensor in graph.tensors:
        expected = DType.FP32 if tensor.role in (Role.PARAMETER, Role.INPUT) else DType.FP16
        assert tensor.dtype is expected
    # input, two weights and a bias; the norm reads its fp32 weights
    assert len(_casts(graph)) == 4
    assert {op.compute_dtype for op in graph.ops} == {DType.FP16}


def test_all_half_takes_a_loss_in_fp32():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    graph = b.build(b.op("cross_entropy", [h], ()))
    graph = lower_precision(graph, Precision.MIXED, activation_rule=ActivationRule.ALL_HALF)
    assert _result_dtype(graph, "cross_entropy") is DType.FP32


def _half_file():
    b = GraphBuilder()
    x = b.input(4, 8, dtype=DType.FP32)
    h = b.op("cast", [x], (4, 8), dtype=DType.FP16)
    h = b.op("linear", [h, b.parameter(8, 8, dtype=DType.FP16)], (4, 8), dtype=DType.FP16)
    return b.build(b.op("cast", [h], (4, 8), dtype=DType.FP32))


def test_the_types_of_a_half_file_are_set_aside_with_a_note():
    graph = lower_precision(_half_file(), Precision.FP32)
    assert {t.dtype for t in graph.tensors} == {DType.FP32}
    assert [op.kind for op in graph.ops] == ["linear"]
    assert graph.tensors[graph.outputs[0]].dtype is DType.FP32
    assert graph.outputs == graph.ops[0].outputs
    assert "fp16" in graph.notes[0]


def test_a_half_file_lowers_to_the_same_as_a_full_one():
    b = GraphBuilder()
    full = b.build(b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8)))
    for precision in Precision:
        ours, theirs = lower_precision(full, precision), lower_precision(_half_file(), precision)
        assert [(op.kind, op.compute_dtype) for op in ours.ops] == [(op.kind, op.compute_dtype) for op in theirs.ops]


def test_an_fp32_graph_gets_no_note():
    assert not any(lower_precision(_mlp(), precision).notes for precision in Precision)


def test_casts_from_integers_stay():
    b = GraphBuilder()
    mask = b.op("cast", [b.input(4, 8, dtype=DType.INT64)], (4, 8))
    graph = lower_precision(b.build(mask), Precision.FP16)
    assert [op.kind for op in graph.ops] == ["cast"]
    assert graph.tensors[mask].dtype is DType.FP16


def test_lowering_leaves_the_graph_it_was_given_alone():
    graph = _mlp()
    before = (graph.tensors, graph.ops)
    lower_precision(graph, Precision.MIXED)
    assert (graph.tensors, graph.ops) == before


def test_loop_bodies_keep_their_repeats_and_cast_weights_once():
    b = GraphBuilder()
    x, w = b.input(4, 8), b.parameter(8, 8)
    graph = lower_precision(b.build(b.op("linear", [x, w], (4, 8), repeats=5)), Precision.MIXED)
    assert [op.repeats for op in graph.ops] == [5, 1, 5]


def test_an_unknown_autocast_device_is_refused():
    with pytest.raises(UsageError, match="cuda or cpu"):
        lower_precision(_mlp(), Precision.MIXED, autocast_device="tpu")


def test_every_kind_in_the_table_is_in_the_vocabulary():
    from gnnpred.op_kinds import OP_KINDS
    from gnnpred.passes.precision import autocast_table

    assert set(autocast_table()["kinds"]) <= set(OP_KINDS)
    assert {"conv", "linear", "matmul", "sdpa", "lstm"} <= {
        k for k, r in autocast_rules().items() if r == "lower_precision"
    }
