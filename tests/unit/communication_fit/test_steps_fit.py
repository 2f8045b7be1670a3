"""The step fits: the vectorised walks are the product's timeline, pairs are what they say, constants are found."""

from dataclasses import replace

import numpy as np
import pytest

from gnnpred.communication.step_work import StepConstants, scaled_constants
from gnnpred.communication.timeline import bucket_time_ms, fill_buckets, overlap, step_constants
from gnnpred.communication_fit import step_model
from gnnpred.communication_fit.collectives import pattern_search
from gnnpred.communication_fit.gradient_profile import NUM_SEGMENTS, GradientProfile
from gnnpred.communication_fit.pairs import fabric_of, is_usable, make_pairs, match_rows, thin
from gnnpred.communication_fit.sharded import (
    compute_of,
    match_sharded,
    predict_sharded,
    run_arrays,
    step_ms,
    without_overhead,
)
from gnnpred.communication_fit.step_model import START, LearnedConstants, pair_arrays, predict_ms
from gnnpred.corpus.store import MeasurementRow
from gnnpred.job import ActivationRule, Phase, Precision

PROFILE = GradientProfile(
    elements=tuple(5e5 for _ in range(NUM_SEGMENTS)),
    num_tensors=160,
    num_layers=10,
    backward_share=0.64,
    num_kernels=400,
    work_gflop=24.0,
)


def _row(**changes):
    row = MeasurementRow(
        row_id="a", source_id="dle-pytorch-x", source="repo@c:file#L1", model="resnet50", graph_id="g",
        architecture="n", family="resnet", phase=Phase.TRAIN, framework="pytorch", framework_version="ngc-20.06",
        cuda="", device="V100-SXM2-16GB", precision=Precision.FP32, activation_rule=ActivationRule.AUTOCAST,
        tf32_matmul=True, memory_format="nchw", compiler="eager", batch_size=128, input="3x224x224", optimizer="sgd",
        grad_accum=1, host_copy=False, data_loader=True, input_gradient=False, os="", step_time_ms=350.0,
        superseded=False, suspect=False, unstable=False, few_iterations=False, duplicate_of="", excluded_reason="",
        used_for_training=True, note="",
    )  # fmt: skip
    return replace(row, **changes)


def _many(gpus, step_time_ms, **changes):
    return _row(row_id=f"m{gpus}{step_time_ms}", gpus=gpus, step_time_ms=step_time_ms, strategy="ddp",
                interconnect="nvlink2", **changes)  # fmt: skip


def test_a_pair_shares_everything_but_the_gpus_and_is_the_median_of_its_repeats():
    multi = [_many(8, ms) for ms in (370.0, 360.0, 390.0)] + [_many(8, 100.0, batch_size=64)]
    pairs = make_pairs(match_rows(multi, [_row()]), {"g": PROFILE})
    assert [(pair.single_ms, pair.multi_ms, pair.repeats) for pair in pairs] == [(350.0, 370.0, 3)]
    assert pairs[0].measured_efficiency == pytest.approx(350 / 370)


def test_rows_with_a_known_defect_make_no_pair():
    for defect in ({"suspect": True}, {"strategy": "fsdp"}, {"graph_id": ""}, {"family": "tacotron"}):
        assert not is_usable(replace(_many(8, 370.0), **defect))
    assert is_usable(_many(8, 370.0))


def test_grids_of_a_simulator_are_thinned_to_one_batch_per_doubling():
    single = [_row(source_id="sia-dgx", batch_size=b, row_id=f"s{b}") for b in (60, 62, 64, 128)]
    multi = [_many(8, 300.0 + b, source_id="sia-dgx", batch_size=b) for b in (60, 62, 64, 128)]
    pairs = make_pairs(match_rows(multi, single), {"g": PROFILE})
    assert len(pairs) == 4
    assert sorted(pair.row.batch_size for pair in thin(pairs)) in ([60, 128], [62, 128], [64, 128])


@pytest.mark.parametrize("framework", ["pytorch", "mxnet"])
def test_the_vectorised_walk_equals_the_timeline(framework, monkeypatch):
    monkeypatch.setattr(step_model, "_BLOCK", 1)  # one segment at a time, as the timeline walks
    monkeypatch.setattr(step_model, "_STEPS", NUM_SEGMENTS)
    multi = [
        _many(8, 370.0, framework=framework),
        _many(32, 400.0, framework=framework, nodes=4, ),
        _many(8, 370.0, framework=framework, device="RTX3090"),
    ]  # fmt: skip
    multi[2] = replace(multi[2], interconnect="pcie")
    single = [_row(framework=framework), _row(framework=framework, device="RTX3090", row_id="b", step_time_ms=90.0)]
    pairs = make_pairs(match_rows(multi, single), {"g": PROFILE})
    assert len(pairs) == 3
    factors = {"mxnet": {"contention": 2.0, "sync": 0.5, "link": 1.5, "network": 1.2}}
    learned = LearnedConstants(dict(START), factors)
    constants = scaled_constants(StepConstants(**START), factors.get(framework, {}))
    expected = []
    for pair in pairs:
        backward_ms = PROFILE.backward_share * pair.single_ms
        buckets = fill_buckets(PROFILE.gradients(pair.gradient_width))
        bucket_ms = [bucket_time_ms(bucket.num_bytes, pair.fabric, constants) for bucket in buckets]
        finish_ms = overlap(
            np.full(NUM_SEGMENTS, backward_ms / NUM_SEGMENTS), buckets, bucket_ms, contention=constants.contention
        )
        sync_ms = constants.sync_ms(pair.fabric.gpus, pair.single_ms)
        expected.append(pair.single_ms + finish_ms - backward_ms + sync_ms)
    assert predict_ms(pair_arrays(pairs), learned) == pytest.approx(expected, rel=1e-9)


def test_stragglers_add_a_share_of_the_compute_per_doubling():
    constants = StepConstants(**START)
    added = [constants.sync_ms(n, 1000.0) - constants.sync_ms(n) for n in (2, 4, 16)]
    assert added == pytest.approx([4.0, 8.0, 16.0])
    assert constants.sync_ms(1, 1000.0) == 0


def test_zero_has_the_constants_of_fsdp_and_each_framework_its_own():
    assert step_constants("zero3") == step_constants("zero1") == step_constants("fsdp") != step_constants("ddp")
    assert step_constants("ddp", "tensorflow") != step_constants("ddp", "pytorch")
    assert step_constants("ddp", "a framework of tomorrow") == step_constants("ddp")


# -- sharded runs ----------------------------------------------------------------------------------------
CONSTANTS = {
    "contention": 0.1, "nvlink_slowdown": 1.5, "network_slowdown": 1.2, "sync_base_ms": 2.0,
    "sync_ms_per_log2_gpu": 1.0,
}  # fmt: skip
LARGE = replace(PROFILE, elements=tuple(1.4e8 for _ in range(NUM_SEGMENTS)), num_layers=32)


def _sharded(gpus, step_time_ms, **changes):
    nodes = max(1, gpus // 8)
    network = " + 1600Gb/s RoCE per node" if nodes > 1 else ""
    changes = {"precision": Precision.MIXED_BF16} | changes
    return _row(row_id=f"f{gpus}", source_id="llm-foundry-x", model="mpt-7b", device="A100-SXM4-80GB", gpus=gpus,
                nodes=nodes, interconnect=f"nvlink3/nvswitch{network}", strategy="fsdp",
                step_time_ms=step_time_ms, **changes)  # fmt: skip


def test_the_compute_of_a_sharded_run_explains_its_step():
    runs = run_arrays([_sharded(8, 2000.0), _sharded(64, 2100.0, grad_accum=2)], {"g": LARGE})
    assert step_ms(runs, compute_of(runs, CONSTANTS), CONSTANTS) == pytest.approx(runs.step_ms, rel=1e-4)


def test_a_larger_run_is_predicted_from_the_smallest_of_its_configuration():
    rows = [_sharded(8, 2000.0), _sharded(64, 2100.0), _sharded(64, 4200.0, batch_size=256)]
    rows.append(_sharded(64, 1.0, precision=Precision.BF16))  # no run on fewer GPUs: no pair
    pairs = match_sharded(rows, {"g": LARGE})
    assert [row.gpus for row in pairs.few_rows] == [8, 8]
    assert without_overhead(pairs) == pytest.approx([2000.0, 4000.0])
    predicted = predict_sharded(pairs, CONSTANTS)
    assert 2000 < predicted[0] < 2600
    assert predicted[1] / predicted[0] == pytest.approx(2, rel=0.1)


def test_ports_that_a_source_sums_up_are_split_over_the_node():
    fabric = fabric_of(_sharded(64, 1.0))
    assert (fabric.inter.name, fabric.ports_per_node) == ("roce200", 8)


def test_the_search_finds_a_minimum_off_the_axes():
    target = np.array([1.3, -0.7])

    def loss(point):
        skewed = point - target
        return abs(skewed.sum()) * 5 + abs(skewed[0] - skewed[1])

    found, value = pattern_search(loss, np.zeros(2), step=0.5, smallest_step=0.001)
    assert value < 0.02
    assert found == pytest.approx(target, abs=0.02)
