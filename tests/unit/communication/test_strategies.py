"""Sharded, tensor-parallel, expert-parallel and accumulated steps: hand-worked times, properties, what is refused."""

import time

import numpy as np
import pytest

from gnnpred.communication import sharded, step_spread, step_timeline, step_work, timeline
from gnnpred.communication.trace import Trace
from gnnpred.costs import op_costs
from gnnpred.errors import UsageError
from gnnpred.graph import OpPhase
from gnnpred.hardware import find_device
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.passes.layers import layer_spans
from gnnpred.passes.step import complete_step, lower_forward
from gnnpred.passes.tensor_parallel import split_products
from tests.helpers.transformers import small_transformer

A100 = find_device("A100-SXM4-80GB")


def _timeline(*, op_ms=1.0, num_layers=4, experts=0, graph=None, trace=None, **options):
    options = {"precision": Precision.FP32, "optimizer": "adam", "batch_size": 1, **options}
    job = JobSpec(device=options.pop("device", A100), **options)
    graph = graph or small_transformer(num_layers, heads=8, experts=experts)
    lowered = lower_forward(graph, batch_size=None, precision=job.precision)
    share = split_products(lowered, job.tensor_parallel)
    step = complete_step(
        share.graph, phase=job.phase, optimizer=job.optimizer, checkpointing=job.activation_checkpointing == "full"
    )
    return step_timeline(
        step, op_costs(step), np.full(len(step.ops), op_ms), job,
        collectives=share.collectives, repeated_ops=share.repeated_ops, trace=trace,
    )  # fmt: skip


def _adds_up(found):
    parts = found.forward_ms + found.backward_ms + found.optimizer_ms + found.exposed_ms + found.bubble_ms
    assert found.step_ms == pytest.approx(parts)


@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "zero3"}, {"strategy": "zero2"}, {"strategy": "zero1"},
        {"strategy": "fsdp", "grad_accum": 6}, {"grad_accum": 6}, {"tensor_parallel": 4}, {"tensor_parallel": 8},
        {"tensor_parallel": 2, "sequence_parallel": True}, {"pipeline_parallel": 4, "microbatches": 8},
        {"pipeline_parallel": 2, "tensor_parallel": 2, "grad_accum": 4, "strategy": "zero1"},
    ],
)  # fmt: skip
def test_the_parts_of_every_strategy_add_up(layout):
    found = _timeline(gpus=8, **layout)
    _adds_up(found)
    assert found.exposed_ms > 0
    assert found.communication_ms > 0


def test_accumulated_passes_repeat_compute_but_ddp_reduces_in_the_last_alone(monkeypatch):
    monkeypatch.setattr(step_work.StepConstants, "sync_ms", lambda *_: 1.0)  # stragglers grow with the compute
    one, many = _timeline(gpus=8), _timeline(gpus=8, grad_accum=7)
    assert many.forward_ms == pytest.approx(7 * one.forward_ms)
    assert many.backward_ms == pytest.approx(7 * one.backward_ms)
    assert (many.optimizer_ms, many.communication_ms) == pytest.approx((one.optimizer_ms, one.communication_ms))
    assert many.exposed_ms == pytest.approx(one.exposed_ms)
    alone = _timeline(gpus=1, grad_accum=7)
    assert alone.step_ms == pytest.approx(7 * (one.forward_ms + one.backward_ms) + one.optimizer_ms)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "dp"])
def test_skipped_passes_are_those_that_would_be_simulated(monkeypatch, strategy):
    short = _timeline(gpus=8, strategy=strategy, grad_accum=9, op_ms=0.01)
    monkeypatch.setattr(timeline, "_SIMULATED_PASSES", 100)
    full = _timeline(gpus=8, strategy=strategy, grad_accum=9, op_ms=0.01)
    assert short.step_ms == pytest.approx(full.step_ms)
    assert short.communication_ms == pytest.approx(full.communication_ms)


def test_fsdp_by_hand(monkeypatch):
    # Every op takes 1 ms, an all-gather 2 ms, a reduce-scatter 3 ms, nothing slows anything down.
    monkeypatch.setattr(sharded, "in_step_ms", lambda kind, *_: {"all_gather": 2.0, "reduce_scatter": 3.0}[kind])
    monkeypatch.setattr(step_work.StepConstants, "sync_ms", lambda *_: 0.0)
    constants = step_work.step_constants()
    monkeypatch.setattr(
        step_work, "step_constants", lambda *_: type(constants)(**{**vars(constants), "contention": 0.0})
    )
    found = _timeline(gpus=8, strategy="fsdp", num_layers=4)
    # Forward: 2 ms for the outer weights; the first layer's arrive at 4, by when the embedding and the first norm have
    # ended. Every other all-gather hides behind a layer. Backward: the last layer's weights hide behind the output
    # layer; behind the embedding's backward remain the reduce-scatters of layer 1 (partly) and of the outer weights.
    first = layer_spans(small_transformer(4, heads=8)).starts[0]
    behind = 3 + 3 - 3  # three ops (norm, sum of gradients, embedding) run beside the first of the two
    assert found.exposed_ms == pytest.approx(2 + max(0, 2 - first) + behind)
    assert found.communication_ms == pytest.approx(2 * (1 + 4 + 4) + 3 * 5)


def test_a_collective_longer_than_a_layer_is_exposed():
    hidden, exposed = (_timeline(gpus=8, strategy="fsdp", op_ms=ms) for ms in (2.0, 0.001))
    assert exposed.exposed_ms - hidden.exposed_ms > 0
    assert hidden.communication_ms == pytest.approx(exposed.communication_ms)


def test_the_update_works_on_the_shard():
    whole = _timeline(gpus=8).optimizer_ms
    assert _timeline(gpus=8, strategy="fsdp").optimizer_ms == pytest.approx(whole / 8)
    assert _timeline(gpus=16, nodes=2, strategy="zero1", shard_group=4).optimizer_ms == pytest.approx(whole / 4)


def test_zero2_reduces_in_every_pass_and_zero1_in_the_last():
    passes = 5
    one = _timeline(gpus=8, strategy="zero1").communication_ms
    zero1 = _timeline(gpus=8, strategy="zero1", grad_accum=passes).communication_ms
    zero2 = _timeline(gpus=8, strategy="zero2", grad_accum=passes).communication_ms
    assert zero1 == pytest.approx(one)
    assert one < zero2 < passes * one  # the weights are gathered once


def test_gathered_weights_and_reduced_gradients_are_half_under_mixed_precision():
    found = {}
    for precision in (Precision.FP32, Precision.MIXED_BF16, Precision.BF16):
        trace = Trace()
        _timeline(gpus=8, strategy="fsdp", precision=precision, trace=trace)
        found[precision] = {
            kind: sum(e.arguments["bytes"] for e in trace.events if e.name.startswith(kind))
            for kind in ("all-gather", "reduce-scatter")
        }
    parameters = small_transformer(4, heads=8).num_parameters
    assert found[Precision.FP32]["reduce-scatter"] == 4 * parameters
    assert found[Precision.MIXED_BF16]["reduce-scatter"] == 2 * parameters
    assert found[Precision.BF16] == found[Precision.MIXED_BF16]
    assert parameters * 2 < found[Precision.BF16]["all-gather"] < parameters * 4  # the outer weights once


def test_hybrid_sharding_gathers_inside_the_node_and_reduces_between_nodes():
    options = {"gpus": 32, "nodes": 4, "strategy": "fsdp", "inter_node": "eth10", "num_layers": 4, "op_ms": 0.01}
    full, hybrid = _timeline(**options), _timeline(**options, shard_group=8)
    assert hybrid.step_ms < full.step_ms  # a slow network carries 1/8 of the gradients only
    assert "shard 8: nvlink3" in hybrid.fabric


def test_tensor_parallel_collectives_are_exposed_and_stay_inside_the_node():
    trace = Trace()
    found = _timeline(gpus=16, nodes=2, tensor_parallel=8, trace=trace)
    blocking = [e for e in trace.events if e.stream == "blocking"]
    assert len(blocking) == 2 * (2 * 4 + 1)
    assert found.exposed_ms > sum(e.duration_ms for e in blocking)
    assert "tp 8: nvlink3" in found.fabric
    assert "dp 2: ib200" in found.fabric


def test_recomputed_layers_repeat_their_forward_all_reduces():
    names = []
    for checkpointing in ("none", "full"):
        trace = Trace()
        _timeline(gpus=8, tensor_parallel=8, activation_checkpointing=checkpointing, trace=trace)
        names.append(sum(e.stream == "blocking" for e in trace.events))
    assert names[1] == names[0] + 2 * 4


def test_sequence_parallelism_moves_the_same_bytes_and_splits_the_rest():
    plain, split = Trace(), Trace()
    whole = _timeline(gpus=8, tensor_parallel=8, trace=plain)
    less = _timeline(gpus=8, tensor_parallel=8, sequence_parallel=True, trace=split)
    assert {e.name for e in split.events if e.stream == "blocking"} == {"reduce-scatter", "all-gather"}
    assert less.forward_ms < whole.forward_ms
    assert less.backward_ms < whole.backward_ms


def test_an_inference_under_tensor_parallelism_waits_for_its_forward_all_reduces():
    found = _timeline(gpus=8, tensor_parallel=8, phase=Phase.INFERENCE)
    assert found.exposed_ms == pytest.approx(found.communication_ms)
    assert found.exposed_ms > 0


def test_expert_parallelism_sends_tokens_four_times_a_layer():
    trace = Trace()
    found = _timeline(gpus=8, expert_parallel=4, experts=4, trace=trace)
    sent = [e for e in trace.events if e.name == "all-to-all"]
    assert len(sent) == 4 * 4
    assert {e.arguments["bytes"] for e in sent} == {16 * 64 * 4}
    assert found.optimizer_ms < _timeline(gpus=8, experts=4).optimizer_ms
    with pytest.raises(UsageError, match="shows no experts"):
        _timeline(gpus=8, expert_parallel=4)
    with pytest.raises(UsageError, match="more than the 4 experts"):
        _timeline(gpus=8, expert_parallel=8, experts=4)


@pytest.mark.parametrize(
    "layout",
    [
        {}, {"strategy": "fsdp"}, {"strategy": "zero1"}, {"tensor_parallel": 8},
        {"tensor_parallel": 2, "pipeline_parallel": 4, "microbatches": 8},
    ],
)  # fmt: skip
def test_a_thousand_gpus_cost_no_more_work_than_eight(monkeypatch, layout):
    calls = []
    original = step_work.collective_ms
    monkeypatch.setattr(step_work, "collective_ms", lambda *a, **k: calls.append(1) or original(*a, **k))
    seconds, counts = [], []
    for gpus, nodes in ((16, 2), (1024, 128), (16, 2), (1024, 128)):
        calls.clear()
        start = time.perf_counter()
        _timeline(gpus=gpus, nodes=nodes, **layout)
        seconds.append(time.perf_counter() - start)
        counts.append(len(calls))
    assert counts[1] <= 2 * counts[0]  # a group that crosses nodes has a part inside them and one between
    assert min(seconds[1::2]) < 3 * min(seconds[::2]) + 0.05


def test_impossible_layouts_are_one_clear_line():
    with pytest.raises(UsageError, match=r"16 GPUs in one node: a A100.*holds 8.*--nodes 2"):
        _timeline(gpus=16)
    with pytest.raises(UsageError, match="--tp 8 is more than the 4 GPUs that a node joins"):
        _timeline(gpus=8, nodes=2, tensor_parallel=8)
    with pytest.raises(UsageError, match="--tp 4 does not divide the 6 GPUs of a node"):
        _timeline(gpus=12, nodes=2, tensor_parallel=4)
    with pytest.raises(UsageError, match="--pp 8 is more than the 4 layers"):
        _timeline(gpus=8, pipeline_parallel=8, microbatches=8)
    with pytest.raises(UsageError, match=r"--pp 2 x --interleave 4 is more than the 4 layers"):
        _timeline(gpus=2, pipeline_parallel=2, microbatches=8, interleave=4)
    with pytest.raises(UsageError, match="modelled for training"):
        _timeline(gpus=2, pipeline_parallel=2, microbatches=8, phase=Phase.INFERENCE)


def test_too_few_micro_batches_are_named():
    few = _timeline(gpus=4, pipeline_parallel=4, microbatches=2)
    assert any("--microbatches 4 or more" in warning for warning in few.warnings)
    enough = _timeline(gpus=4, pipeline_parallel=4, microbatches=4)
    assert not any("--microbatches" in warning for warning in enough.warnings)


def test_the_interval_is_wider_where_nothing_was_measured():
    def width(**layout):
        low, high = step_spread(JobSpec(device=A100, gpus=8, batch_size=1, **layout))
        assert low < 0 < high
        return high - low

    ddp = width()
    for layout in (
        {"tensor_parallel": 8},
        {"pipeline_parallel": 2, "microbatches": 4},
        {"expert_parallel": 2},
        {"tensor_parallel": 2, "pipeline_parallel": 2, "microbatches": 4},
    ):
        assert width(**layout) > ddp
    three = width(tensor_parallel=2, pipeline_parallel=2, microbatches=4)
    assert three > width(tensor_parallel=2)


def test_backward_ops_of_every_phase_are_timed_once():
    trace = Trace()
    found = _timeline(gpus=8, strategy="fsdp", trace=trace)
    for phase, total in ((OpPhase.FORWARD, found.forward_ms), (OpPhase.OPTIMIZER, found.optimizer_ms)):
        drawn = sum(e.duration_ms for e in trace.events if e.category == phase)
        assert drawn >= total * (1 - 1e-9)
