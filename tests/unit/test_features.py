"""Features: nodes, components, physics, merging."""

import dataclasses

import numpy as np
import pytest

from gnnpred.costs import op_costs
from gnnpred.errors import UsageError
from gnnpred.features import (
    COMPONENTS,
    FULL_TENSOR_EFFICIENCY,
    GLOBAL_FEATURE_NAMES,
    KERNEL_FLOOR_US,
    NODE_FEATURE_NAMES,
    SPEC_FEATURE_NAMES,
    encode,
    graph_structure,
    has_fused_attention,
    sustained_share,
    tensor_share,
)
from gnnpred.graph import Component, DType, Op, OpGraph, Role, TensorSpec
from gnnpred.hardware import find_device
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.passes.step import complete_step, lower_forward
from gnnpred.software import framework_version_number, has_foreach_optimizer
from tests.helpers.graph_builder import GraphBuilder

A100 = find_device("A100-SXM4-80GB")
V100 = find_device("V100-SXM2-16GB")


def _mlp(num_layers: int, *, batch: int = 64, width: int = 1024) -> OpGraph:
    """A chain of equal linear + relu layers."""
    tensors = [TensorSpec((batch, width), DType.FP32, Role.INPUT, (0,))]
    ops = []
    current = 0
    for _ in range(num_layers):
        tensors.append(TensorSpec((width, width), DType.FP32, Role.PARAMETER))
        tensors.append(TensorSpec((batch, width), DType.FP32, Role.ACTIVATION, (0,)))
        tensors.append(TensorSpec((batch, width), DType.FP32, Role.ACTIVATION, (0,)))
        weight, hidden, out = len(tensors) - 3, len(tensors) - 2, len(tensors) - 1
        ops.append(Op("linear", (current, weight), (hidden,)))
        ops.append(Op("relu", (hidden,), (out,)))
        current = out
    return OpGraph(tuple(tensors), tuple(ops), (0,), (current,), batch_size=batch)


def _structure(graph, *, precision=Precision.FP32, phase=Phase.TRAIN, batch=None):
    full = complete_step(lower_forward(graph, batch_size=batch, precision=precision), phase=phase, optimizer="sgd")
    return full, graph_structure(full, op_costs(full))


def test_physics_of_a_linear_is_its_flops_over_the_peak():
    _, structure = _structure(_mlp(1, batch=8192, width=8192), phase=Phase.INFERENCE)
    arrays = encode(structure, JobSpec(device=A100, precision=Precision.FP32, phase=Phase.INFERENCE))
    flops = 2 * 8192**3
    expected_ms = flops / (A100.peak_tflops(DType.FP32) * 1e12) * 1e3 + KERNEL_FLOOR_US / 1e3
    assert arrays.physics_ms[:, 0].max() == pytest.approx(expected_ms, rel=1e-4)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.MIXED, Precision.TF32])
def test_lower_precision_makes_large_products_faster(precision):
    times = []
    for p in (Precision.FP32, precision):
        _, structure = _structure(_mlp(4, batch=8192, width=4096), precision=p)
        times.append(float((encode(structure, JobSpec(device=A100, precision=p)).physics_ms.sum(1)).sum()))
    assert times[1] < 0.6 * times[0]


def test_every_op_that_costs_time_maps_to_a_node_and_weights_add_up_to_its_components():
    full, structure = _structure(_mlp(6), precision=Precision.MIXED)
    counted = structure.op_node_idx >= 0
    costs = op_costs(full)
    assert counted.tolist() == [c.flops > 0 or c.bytes_moved > 0 or c.state != "free" for c in costs]
    slots = structure.op_node_idx[counted] * len(COMPONENTS) + structure.op_component_idx[counted]
    sums = np.bincount(slots, structure.op_weight[counted])
    present = np.flatnonzero((structure.launches > 0).ravel())
    repeats = structure.count[present // len(COMPONENTS)]
    assert sums[present] == pytest.approx(repeats)


def test_merging_keeps_total_cost_and_shrinks_repeated_layers():
    full, structure = _structure(_mlp(40))
    costs = op_costs(full)
    assert len(structure.kind_idx) <= 14  # both ends differ, the middle is one linear and one relu
    assert (structure.flops.sum(1) * structure.count).sum() == pytest.approx(sum(c.flops for c in costs))
    assert (structure.bytes_moved.sum(1) * structure.count).sum() == pytest.approx(sum(c.bytes_moved for c in costs))
    forward_or_optimizer = {
        i if op.forward_op_idx is None else op.forward_op_idx
        for i, op in enumerate(full.ops)
        if structure.op_node_idx[i] >= 0
    }
    assert structure.count.sum() == len(forward_or_optimizer)


def test_casts_of_autocast_belong_to_the_op_they_feed():
    full, structure = _structure(_mlp(3), precision=Precision.MIXED)
    assert any(op.component is Component.CAST for op in full.ops)
    cast = COMPONENTS.index(Component.CAST)
    kinds = {op.kind for i, op in enumerate(full.ops) if structure.op_component_idx[i] == cast}
    assert kinds == {"cast"}
    assert not np.any(
        (structure.flops[:, 0] == 0) & (structure.launches[:, 0] == 0) & (structure.launches[:, cast] > 0)
    )


def test_weight_gradients_of_products_run_at_the_half_rate_under_autocast():
    _, structure = _structure(_mlp(2, batch=8192, width=8192), precision=Precision.MIXED)
    weight_gradient = COMPONENTS.index(Component.WEIGHT_GRADIENT)
    products = structure.flops[:, weight_gradient] > 1e9
    assert products.any()
    assert structure.on_tensor_cores[products, weight_gradient].all()


def test_a_device_without_tensor_cores_gains_no_flop_rate_from_half():
    titan = find_device("GTX1080Ti")
    rates = []
    for p in (Precision.FP32, Precision.FP16):
        _, structure = _structure(_mlp(1, batch=8192, width=8192), precision=p, phase=Phase.INFERENCE)
        arrays = encode(structure, JobSpec(device=titan, precision=p, phase=Phase.INFERENCE))
        rates.append(arrays.physics_ms[:, 0].max())
    assert rates[0] == pytest.approx(rates[1], rel=1e-3)


def test_feature_columns_match_their_names_and_are_finite():
    _, structure = _structure(_mlp(2))
    arrays = encode(structure, JobSpec(device=V100, framework_version="1.12"))
    assert arrays.node_features.shape == (len(structure.kind_idx), len(NODE_FEATURE_NAMES))
    assert arrays.globals.shape == (len(GLOBAL_FEATURE_NAMES),)
    assert GLOBAL_FEATURE_NAMES[: len(SPEC_FEATURE_NAMES)] == SPEC_FEATURE_NAMES
    assert np.isfinite(arrays.node_features).all()
    assert np.isfinite(arrays.globals).all()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.12.1", 1.6),
        ("2.4.0a0+git", 2.2),
        ("", 0.0),
        ("nightly", 0.0),
        ("2", 2.0),
        ("ngc-20.03 (1.5)", 1.25),
        ("ngc-20.06", 1.265),
    ],
)
def test_framework_versions_grow_with_releases(text, number):
    assert framework_version_number(text) == pytest.approx(number, abs=1e-3)


def _conv_ms(*, kernel=3, stride=1, groups=1, channels=128, precision=Precision.FP32, **job):
    """Physics (C,) in ms of one convolution on an RTX 3090, and its "slow grouped" flag."""
    b = GraphBuilder()
    weight = b.parameter(channels, channels // groups, kernel, kernel)
    out = b.op(
        "conv", [b.op("relu", [b.input(64, channels, 56, 56)], (64, channels, 56, 56)), weight],
        (64, channels, 56 // stride, 56 // stride),
        kernel=(kernel, kernel), stride=(stride, stride), dilation=(1, 1), padding=(kernel // 2,) * 2, groups=groups,
    )  # fmt: skip
    _, structure = _structure(b.build(out), precision=precision)
    arrays = encode(structure, JobSpec(device=find_device("RTX3090"), precision=precision, **job))
    node = int(np.argmax(arrays.node_features[:, NODE_FEATURE_NAMES.index("category_conv")]))
    return arrays.physics_ms[node], arrays.node_features[node, NODE_FEATURE_NAMES.index("slow_grouped_conv")]


@pytest.mark.parametrize(("kernel", "stride", "gain"), [(3, 1, 2.25), (5, 1, 2.25), (1, 1, 1), (7, 1, 1), (3, 2, 1)])
def test_winograd_divides_the_flop_time_of_dense_fp32_convolutions_it_fits(kernel, stride, gain):
    physics, _ = _conv_ms(kernel=kernel, stride=stride, channels=512)
    flops = 2 * 64 * (56 // stride) ** 2 * 512 * 512 * kernel**2
    device = find_device("RTX3090")
    expected_ms = flops / gain / (device.fp32_tflops * sustained_share(device) * 1e9) + KERNEL_FLOOR_US / 1e3
    assert physics[0] == pytest.approx(expected_ms, rel=1e-3)


def test_winograd_is_not_assumed_on_tensor_cores():
    tf32, half = (_conv_ms(channels=512, precision=p)[0][0] for p in (Precision.TF32, Precision.FP16))
    flops = 2 * 64 * 56**2 * 512 * 512 * 9
    assert tf32 == pytest.approx(flops / (find_device("RTX3090").peak_tflops(DType.TF32) * 1e9), rel=0.01)
    assert half == pytest.approx(flops / (find_device("RTX3090").peak_tflops(DType.FP16) * 1e9), rel=0.01)


@pytest.mark.parametrize(
    ("groups", "channels", "version", "is_slow"),
    [
        (2, 128, "1.12", True),  # too few groups
        (8, 512, "1.12", True),  # too wide
        (16, 512, "1.12", False),
        (16, 512, "1.10", True),  # width 32 came with cuDNN 8.3
        (32, 128, "1.10", False),
        (12, 96, "1.10", True),  # not a multiple of eight groups
        (128, 128, "1.12", False),  # depthwise
        (1, 128, "1.12", False),
    ],
)
def test_grouped_nhwc_half_convolutions_without_a_fast_backward(groups, channels, version, is_slow):
    job = {"precision": Precision.MIXED, "framework_version": version}
    nchw, nchw_flag = _conv_ms(groups=groups, channels=channels, memory_format="nchw", **job)
    nhwc, flag = _conv_ms(groups=groups, channels=channels, memory_format="nhwc", **job)
    assert (nchw_flag, flag) == (0, is_slow)
    assert nhwc[0] == pytest.approx(nchw[0])
    assert (nhwc[1:3].sum() > 2 * nchw[1:3].sum()) == is_slow
    assert _conv_ms(groups=groups, channels=channels, memory_format="nhwc", precision=Precision.FP32)[1] == 0


@pytest.mark.parametrize(
    ("framework", "version", "optimizer", "expected"),
    [
        ("pytorch", "1.13", "sgd", False),
        ("pytorch", "ngc-20.06", "adam", False),
        ("pytorch", "2.0", "sgd", True),
        ("pytorch", "", "sgd", True),
        ("pytorch", "1.5", "lamb", True),
        ("tensorflow", "1.15", "sgd", True),
    ],
)
def test_old_pytorch_updates_one_tensor_after_the_other(framework, version, optimizer, expected):
    assert has_foreach_optimizer(framework, version, optimizer) is expected


def test_power_caps_the_fp32_peak_of_small_boards_alone():
    assert sustained_share(A100) == 1
    assert sustained_share(V100) > 0.97
    assert 0.4 < sustained_share(find_device("T4")) < 0.7
    assert 0.25 < sustained_share(find_device("L4")) < 0.45
    # no power stated: nothing is known of a cap
    assert sustained_share(dataclasses.replace(find_device("L4"), tdp_w=0.0)) == 1


def _attention(*, causal: bool, head_dim: int = 128, seq: int = 4096) -> OpGraph:
    spec = TensorSpec((4, 16, seq, head_dim), DType.FP32, Role.INPUT, (0,))
    out = TensorSpec((4, 16, seq, head_dim), DType.FP32, Role.ACTIVATION, (0,))
    op = Op("sdpa", (0, 1, 2), (3,), {"causal": causal})
    return OpGraph((spec, spec, spec, out), (op,), (0, 1, 2), (3,), batch_size=4)


def _attention_ms(graph, **changes):
    _, structure = _structure(graph, precision=Precision.FP16, phase=Phase.INFERENCE)
    job = JobSpec(device=A100, precision=Precision.FP16, phase=Phase.INFERENCE, **changes)
    return float(encode(structure, job).physics_ms[:, 0].max())


def test_a_causal_mask_halves_fused_attention_and_no_other():
    full, causal = (_attention_ms(_attention(causal=c)) for c in (False, True))
    assert causal / full == pytest.approx(0.5 + 64 / 4096, rel=0.02)
    old = {"framework_version": "1.13"}
    assert _attention_ms(_attention(causal=True), **old) >= _attention_ms(_attention(causal=False), **old)


def test_fused_attention_pads_the_head():
    assert _attention_ms(_attention(causal=False, head_dim=72)) == pytest.approx(
        _attention_ms(_attention(causal=False, head_dim=96)), rel=0.01
    )


def test_a_halved_tensor_rate_is_reached_in_full():
    assert tensor_share(find_device("RTX3090")) == 1
    assert tensor_share(A100) == tensor_share(V100) == FULL_TENSOR_EFFICIENCY
    # no tensor cores, and units of another vendor
    assert tensor_share(find_device("P100-PCIe-16GB")) == tensor_share(find_device("MI210")) == 1


@pytest.mark.parametrize(
    ("version", "attention", "expected"),
    [("2.1", "auto", True), ("1.13", "auto", False), ("1.13", "fused", True), ("2.1", "eager", False)],
)
def test_attention_is_what_the_job_says_else_by_version(version, attention, expected):
    job = JobSpec(device=find_device("A100-SXM4-80GB"), framework_version=version, attention=attention)
    assert has_fused_attention(job) is expected


def test_a_job_with_unknown_attention_or_checkpointing_is_refused():
    device = find_device("A100-SXM4-80GB")
    with pytest.raises(UsageError, match="unknown attention 'flash'"):
        JobSpec(device=device, attention="flash")
    with pytest.raises(UsageError, match="unknown activation checkpointing 'selective'"):
        JobSpec(device=device, activation_checkpointing="selective")
