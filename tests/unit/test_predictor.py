"""The straight line with a checkpoint that can be checked by hand."""

import json

import numpy as np
import pytest

from gnnpred import JobSpec, Phase, Precision, Predictor, find_device
from gnnpred.communication import step_spread
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.memory import estimate_memory_gib
from tests.helpers.graphs import tiny_cnn
from tests.helpers.roofline import RooflineCheckpoint

A100 = find_device("A100-SXM4-80GB")


@pytest.fixture
def predictor():
    return Predictor(RooflineCheckpoint())


def test_the_breakdown_adds_up_to_the_step_and_the_ops_to_the_compute_time(predictor):
    prediction = predictor.predict(tiny_cnn(), JobSpec(device=A100))
    parts = prediction.breakdown_ms
    assert set(parts) == {"forward", "backward", "optimizer", "communication"}
    assert sum(parts.values()) == pytest.approx(prediction.step_time_ms)
    assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
    assert sum(op.predicted_ms for op in prediction.ops) == pytest.approx(prediction.compute_time_ms)
    assert parts["communication"] == prediction.exposed_communication_ms == 0


def test_the_interval_holds_the_prediction_and_the_throughput_fits(predictor):
    prediction = predictor.predict(tiny_cnn(), JobSpec(device=A100, batch_size=64))
    low, high = prediction.interval_90_ms
    assert (low, high) == pytest.approx((0.8 * prediction.step_time_ms, 1.3 * prediction.step_time_ms))
    assert prediction.throughput_samples_per_s == pytest.approx(64e3 / prediction.step_time_ms)


def test_the_interval_widens_by_the_measured_spread_of_communication(predictor):
    one = predictor.predict(tiny_cnn(), JobSpec(device=A100, batch_size=64))
    widths = []
    for gpus, strategy in ((1, "ddp"), (2, "ddp"), (8, "ddp"), (2, "dp")):
        job = JobSpec(device=A100, batch_size=64, gpus=gpus, strategy=strategy)
        found = predictor.predict(tiny_cnn(), job)
        low, high = (bound / found.step_time_ms for bound in found.interval_90_ms)
        spread = step_spread(job)
        assert np.log(low) == pytest.approx(-np.hypot(np.log(0.8), spread[0]))
        assert np.log(high) == pytest.approx(np.hypot(np.log(1.3), spread[1]))
        widths.append(high / low)
    assert widths[0] == pytest.approx(one.interval_90_ms[1] / one.interval_90_ms[0])
    assert widths == sorted(widths)
    assert widths[0] < widths[1]


def test_the_spread_is_that_of_the_measured_count_below_and_grows_beyond_the_largest():
    jobs = [JobSpec(device=A100, batch_size=8, gpus=gpus, nodes=gpus // 8 or 1) for gpus in (3, 2, 16, 64)]
    three, two, sixteen, many = (step_spread(job) for job in jobs)
    assert three == two
    assert many[0] < sixteen[0]
    assert many[1] > sixteen[1]
    assert all(low < 0 < high for low, high in (two, sixteen))


def test_batch_none_keeps_the_graphs_batch_and_another_one_rebinds(predictor):
    kept = predictor.predict(tiny_cnn(8), JobSpec(device=A100))
    larger = predictor.predict(tiny_cnn(8), JobSpec(device=A100, batch_size=80))
    assert (kept.job.batch_size, larger.job.batch_size) == (8, 80)
    conv = [next(op for op in p.ops if op.kind == "conv") for p in (kept, larger)]
    assert conv[1].flops == pytest.approx(10 * conv[0].flops)
    assert larger.graph.tensors[0].shape == (80, 3, 32, 32)


def test_inference_is_forward_alone(predictor):
    train = predictor.predict(tiny_cnn(), JobSpec(device=A100))
    inference = predictor.predict(tiny_cnn(), JobSpec(device=A100, phase=Phase.INFERENCE))
    assert inference.breakdown_ms["backward"] == inference.breakdown_ms["optimizer"] == 0
    assert inference.step_time_ms < train.step_time_ms


def test_half_precision_is_not_slower_and_is_reported(predictor):
    full = predictor.predict(tiny_cnn(256), JobSpec(device=A100))
    half = predictor.predict(tiny_cnn(256), JobSpec(device=A100, precision=Precision.FP16))
    assert half.step_time_ms < full.step_time_ms
    assert half.as_dict()["precision"] == "fp16"


def test_tf32_on_a_volta_is_predicted_as_fp32_with_a_warning(predictor):
    prediction = predictor.predict(tiny_cnn(), JobSpec(device=find_device("V100"), precision=Precision.TF32))
    assert prediction.job.precision is Precision.FP32
    assert any("runs as fp32" in warning for warning in prediction.warnings)


def test_bf16_on_a_volta_is_refused(predictor):
    with pytest.raises(UsageError, match="no bf16 units"):
        predictor.predict(tiny_cnn(), JobSpec(device=find_device("V100"), precision=Precision.BF16))


def test_an_empty_graph_is_refused(predictor):
    empty = tiny_cnn().replace(ops=(), outputs=())
    with pytest.raises(GnnpredError, match="no ops"):
        predictor.predict(empty, JobSpec(device=A100))


def test_an_absurd_batch_is_refused_in_one_line(predictor):
    with pytest.raises(GnnpredError, match="elements"):
        predictor.predict(tiny_cnn(), JobSpec(device=A100, batch_size=10**15))


def test_a_model_that_cannot_fit_gets_a_warning_that_calls_itself_an_estimate(predictor):
    prediction = predictor.predict(tiny_cnn(), JobSpec(device=find_device("P4"), batch_size=2_000_000))
    assert any("would not fit" in warning and "estimate" in warning for warning in prediction.warnings)


def test_memory_by_hand():
    # parameters: 16*3*9 + 10*16 = 592 elements; SGD keeps weight, gradient, momentum: 3 * 592 * 4 bytes
    # activations at batch 8: conv and relu 8*16*32*32, pool 8*16, logits 8*10 elements of 4 bytes
    expected_bytes = 3 * 592 * 4 + 4 * (2 * 8 * 16 * 32 * 32 + 8 * 16 + 8 * 10)
    assert estimate_memory_gib(tiny_cnn(), JobSpec(device=A100)) == pytest.approx(expected_bytes / 2**30)


def test_an_unsupported_op_is_named_and_lowers_coverage(predictor):
    graph = tiny_cnn()
    ops = (graph.ops[0], type(graph.ops[1])("unsupported", (2,), (3,), {"op_type": "MyOp"}), *graph.ops[2:])
    prediction = predictor.predict(graph.replace(ops=ops), JobSpec(device=A100))
    assert prediction.unsupported_ops == {"MyOp": 1}
    assert prediction.as_dict()["unsupported_ops"] == ["MyOp"]
    assert 0 < prediction.coverage < 1
    assert any("MyOp" in warning for warning in prediction.warnings)


def test_the_json_object_has_every_promised_key_and_is_plain(predictor):
    content = json.loads(json.dumps(predictor.predict(tiny_cnn(), JobSpec(device=A100)).as_dict()))
    promised = (
        "step_time_ms interval_90_ms compute_time_ms exposed_communication_ms breakdown_ms throughput_samples_per_s "
        "device gpus nodes precision batch_size strategy phase coverage unsupported_ops warnings checkpoint"
    )
    assert set(promised.split()) <= set(content)
    assert content["coverage"] == 1
    assert content["unsupported_ops"] == []


def test_slowest_ops_are_sorted_and_leave_out_what_is_free(predictor):
    prediction = predictor.predict(tiny_cnn(), JobSpec(device=A100))
    times = [op.predicted_ms for op in prediction.slowest_ops(10)]
    assert times == sorted(times, reverse=True)
    assert times[0] == max(prediction.op_ms)
    assert min(times) > 0


def test_several_gpus_add_exposed_communication_and_scale_throughput(predictor):
    one = predictor.predict(tiny_cnn(), JobSpec(device=A100))
    eight = predictor.predict(tiny_cnn(), JobSpec(device=A100, gpus=8))
    assert eight.compute_time_ms == pytest.approx(one.compute_time_ms)
    assert eight.exposed_communication_ms > 0
    assert sum(eight.breakdown_ms.values()) == pytest.approx(eight.step_time_ms)
    assert eight.throughput_samples_per_s == pytest.approx(8 * 8e3 / eight.step_time_ms)
    assert eight.fabric


def test_graphs_are_prepared_once_and_devices_share_them(predictor):
    graph = tiny_cnn()
    first = predictor.predict(graph, JobSpec(device=A100))
    second = predictor.predict(graph, JobSpec(device=find_device("T4")))
    assert first.graph is second.graph
    assert second.step_time_ms > first.step_time_ms


def test_checkpointed_layers_lengthen_the_backward_alone(predictor):
    plain, again = (
        predictor.predict(tiny_cnn(), JobSpec(device=A100, activation_checkpointing=name)).breakdown_ms
        for name in ("none", "full")
    )
    assert again["forward"] == pytest.approx(plain["forward"])
    assert again["backward"] > plain["backward"]
