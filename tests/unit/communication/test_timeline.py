"""The step timeline: a bucket example worked by hand, DDP's rules, and properties of the whole step."""

import time
from dataclasses import replace

import numpy as np
import pytest

from gnnpred.communication import step_timeline
from gnnpred.communication.timeline import (
    Gradient,
    GradientBucket,
    StepConstants,
    fill_buckets,
    overlap,
    step_constants,
)
from gnnpred.costs import CostState, OpCost
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.graph import Component, DType, Op, OpGraph, OpPhase, Role, TensorSpec
from gnnpred.hardware import find_device
from gnnpred.job import ActivationRule, JobSpec, Phase, Precision

MIB = 2**20
A100 = find_device("A100-SXM4-80GB")


def _bucket(last_op, num_bytes=1.0):
    return GradientBucket(num_bytes=num_bytes, last_op=last_op, num_gradients=1)


def _chain_graph(num_layers=20, width=1024, dtype=DType.FP32):
    """A chain of linear layers with its backward and zero_grad, as the passes build it."""
    tensors = [TensorSpec((32, width), dtype, Role.INPUT, (0,))]
    ops, weights = [], []
    x = 0
    for _ in range(num_layers):
        tensors += [TensorSpec((width, width), dtype, Role.PARAMETER), TensorSpec((32, width), dtype, Role.ACTIVATION)]
        weight, y = len(tensors) - 2, len(tensors) - 1
        ops.append(Op("linear", (x, weight), (y,)))
        weights.append((x, weight))
        x = y
    gradients = []
    tensors.append(TensorSpec((32, width), dtype, Role.GRADIENT))
    grad = len(tensors) - 1
    ops.append(Op("fill", (), (grad,), phase=OpPhase.BACKWARD, component=Component.INPUT_GRADIENT))
    for forward_idx in reversed(range(num_layers)):
        x, weight = weights[forward_idx]
        tensors.append(TensorSpec((width, width), dtype, Role.GRADIENT))
        weight_grad = len(tensors) - 1
        ops.append(
            Op(
                "linear",
                (x, grad),
                (weight_grad,),
                {},
                "",
                OpPhase.BACKWARD,
                Component.WEIGHT_GRADIENT,
                None,
                forward_idx,
            )
        )
        gradients.append(weight_grad)
        tensors.append(TensorSpec((32, width), dtype, Role.GRADIENT))
        new_grad = len(tensors) - 1
        ops.append(
            Op(
                "linear",
                (grad, weight),
                (new_grad,),
                {},
                "",
                OpPhase.BACKWARD,
                Component.INPUT_GRADIENT,
                None,
                forward_idx,
            )
        )
        grad = new_grad
    ops.append(Op("zero_grad", tuple(gradients), (), {}, "", OpPhase.OPTIMIZER, Component.OPTIMIZER))
    return OpGraph(tuple(tensors), tuple(ops), (0,), (2 * num_layers,), 32)


def _timeline(graph=None, *, op_ms=1.0, **job):
    graph = graph or _chain_graph()
    job.setdefault("device", A100)
    costs = [OpCost(1.0, 1.0, 1.0, CostState.FORMULA) for _ in graph.ops]
    times = np.full(len(graph.ops), op_ms)
    return step_timeline(graph, costs, times, JobSpec(batch_size=32, **job))


def test_buckets_close_with_the_gradient_that_reaches_the_limit():
    gradients = [Gradient(size * MIB, position) for position, size in enumerate([0.5, 0.75, 20, 10, 3, 1])]
    buckets = fill_buckets(gradients)
    # 0.5 + 0.75 >= 1; 20 + 10 >= 25; the rest is what remains.
    assert [bucket.num_bytes / MIB for bucket in buckets] == [1.25, 30, 4]
    assert [bucket.last_op for bucket in buckets] == [1, 3, 5]
    assert [bucket.num_gradients for bucket in buckets] == [2, 2, 2]


def test_an_all_reduce_waits_for_its_bucket_and_for_the_one_before_it():
    # Backward ops of 10, 10, 10 ms; buckets complete after op 0 (25 ms), op 1 (10 ms) and op 2 (5 ms), no contention.
    # All-reduces: 10..35, 35..45, 45..50.
    buckets = [_bucket(0), _bucket(1), _bucket(2)]
    assert overlap(np.array([10.0, 10.0, 10.0]), buckets, [25.0, 10.0, 5.0], contention=0.0) == pytest.approx(50)


def test_backward_ops_run_slower_while_an_all_reduce_runs():
    # Op 0: 0..10. All-reduce 10..22. Op 1 needs 10 ms at half speed 1/1.5: 8 ms of it done by 22, the rest by 24.
    assert overlap(np.array([10.0, 10.0]), [_bucket(0)], [12.0], contention=0.5) == pytest.approx(24)
    # A long all-reduce covers the op: 10 + 15, and the all-reduce ends at 40.
    assert overlap(np.array([10.0, 10.0]), [_bucket(0)], [30.0], contention=0.5) == pytest.approx(40)


def test_hidden_communication_exposes_only_the_last_bucket():
    backward_ms = np.full(100, 1.0)
    buckets = [_bucket(49), _bucket(99)]
    assert overlap(backward_ms, buckets, [20.0, 3.0], contention=0.0) == pytest.approx(103)


def test_gradients_are_grouped_in_the_order_in_which_they_become_ready():
    # 20 gradients of 4 MiB: first bucket 1 (>= 1 MiB), then 7 each (28 MiB >= 25): 1 + 7 + 7 + 5.
    timeline = _timeline(gpus=8, interconnect="nvlink3")
    assert timeline.num_buckets == 4
    assert timeline.gradient_bytes == 20 * 4 * MIB


def test_the_parts_add_up_to_the_step():
    timeline = _timeline(gpus=8, interconnect="nvlink3")
    parts = timeline.forward_ms + timeline.backward_ms + timeline.optimizer_ms + timeline.exposed_ms
    assert timeline.step_ms == pytest.approx(parts)
    assert (timeline.forward_ms, timeline.backward_ms, timeline.optimizer_ms) == (20, 41, 1)


def test_one_gpu_and_inference_add_nothing():
    assert _timeline(gpus=1).step_ms == pytest.approx(62)
    assert _timeline(gpus=1).warnings == ()
    inference = _timeline(gpus=8, phase=Phase.INFERENCE)
    assert inference.exposed_ms == inference.communication_ms == 0


def test_gradient_bytes_follow_the_type_of_the_gradients():
    half = _timeline(_chain_graph(dtype=DType.FP16), gpus=8, precision=Precision.FP16)
    full = _timeline(gpus=8)
    assert half.gradient_bytes == full.gradient_bytes / 2
    assert half.communication_ms < full.communication_ms


def test_apex_o2_reduces_half_gradients_and_fp32_variables_reduce_fp32():
    job = {"gpus": 8, "precision": Precision.MIXED, "activation_rule": ActivationRule.ALL_HALF}
    assert _timeline(framework="pytorch", **job).gradient_bytes == 20 * 2 * MIB
    assert _timeline(framework="tensorflow", **job).gradient_bytes == 20 * 4 * MIB
    assert _timeline(gpus=8, precision=Precision.MIXED).gradient_bytes == 20 * 4 * MIB


def test_more_gpus_never_make_a_step_faster():
    for names in ({}, {"interconnect": "pcie4"}, {"interconnect": "pcie4-no-p2p"}, {"inter_node": "eth25"}):
        layouts = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 2), (32, 4), (1024, 128)]
        steps = [_timeline(gpus=gpus, nodes=nodes, **names).step_ms for gpus, nodes in layouts]
        assert steps == sorted(steps), names


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_faster_interconnect_is_never_slower(gpus):
    chains = (
        ["pcie3", "pcie4", "pcie5", "nvlink2", "nvlink3", "nvlink4", "nvlink5"],
        ["pcie3-no-p2p", "pcie4-no-p2p", "pcie5-no-p2p"],
        ["pcie3-no-p2p", "pcie3"],
        ["pcie4-no-p2p", "pcie4"],
        ["pcie5-no-p2p", "pcie5"],
    )
    for chain in chains:
        for op_ms in (0.01, 1.0, 20.0):
            steps = [_timeline(op_ms=op_ms, gpus=gpus, interconnect=name).step_ms for name in chain]
            assert steps == sorted(steps, reverse=True), (chain, steps)


def test_a_faster_network_is_never_slower():
    for chain in (["eth10", "eth25", "eth100", "ib100", "ib200", "ib400"], ["ib100", "2xib100", "4xib100", "8xib100"]):
        steps = [_timeline(gpus=16, nodes=2, inter_node=name).step_ms for name in chain]
        assert steps == sorted(steps, reverse=True)


def test_faster_compute_grows_the_share_of_communication_but_not_the_overhead_of_an_idle_network():
    shares = []
    for op_ms in (8.0, 4.0, 2.0, 1.0, 0.5, 0.1):
        timeline = _timeline(op_ms=op_ms, gpus=8, interconnect="pcie4")
        shares.append(timeline.exposed_ms / timeline.step_ms)
    assert shares == sorted(shares)


def test_a_thousand_gpus_take_as_long_to_predict_as_eight():
    graph = _chain_graph(400)

    def seconds(gpus, nodes):
        start = time.perf_counter()
        for _ in range(3):
            _timeline(graph, gpus=gpus, nodes=nodes)
        return time.perf_counter() - start

    seconds(8, 1)
    assert seconds(1024, 128) < 3 * seconds(8, 1) + 0.05


def test_data_parallel_overlaps_nothing_and_costs_more_than_ddp():
    ddp = _timeline(gpus=4, strategy="ddp")
    threads = _timeline(gpus=4, strategy="dp")
    assert threads.step_ms > ddp.step_ms
    assert threads.exposed_ms > threads.communication_ms > 0
    assert threads.num_buckets == 0
    with pytest.raises(UsageError, match="one node"):
        _timeline(gpus=16, nodes=2, strategy="dp")


def test_an_unknown_strategy_or_fabric_is_refused():
    with pytest.raises(UsageError, match="ddp"):
        _timeline(gpus=8, strategy="horovod")
    with pytest.raises(UsageError, match="unknown fabric"):
        _timeline(gpus=8, interconnect="carrier pigeon")
    with pytest.raises(UsageError, match="unknown fabric"):
        _timeline(gpus=16, nodes=2, inter_node="token ring")


def test_times_and_costs_must_match_the_ops():
    graph = _chain_graph()
    with pytest.raises(GnnpredError, match="times"):
        step_timeline(graph, [], np.ones(3), JobSpec(device=A100, gpus=8))


def test_the_synchronisation_overhead_is_the_same_in_every_precision_and_grows_with_the_logarithm():
    constants = step_constants()
    assert constants.sync_ms(1) == 0
    assert constants.sync_ms(64) - constants.sync_ms(8) == pytest.approx(
        constants.sync_ms(8) - constants.sync_ms(1 + 0) - constants.sync_base_ms
    )


def test_a_crowd_is_never_quicker_than_a_few():
    constants = StepConstants(
        contention=0.1,
        sync_base_ms=1,
        sync_ms_per_log2_gpu=1,
        nvlink_slowdown=1,
        pcie_slowdown=3,
        pcie_crowd_slowdown=2,
        host_staged_slowdown=1,
        host_staged_crowd_slowdown=1,
        network_slowdown=1,
    )
    assert constants.slowdown_of("pcie_crowd_slowdown") == 3
    assert replace(constants, pcie_crowd_slowdown=5).slowdown_of("pcie_crowd_slowdown") == 5
