"""What a worker measures on the CPU, in every precision and phase, and how it names what cannot be measured."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from gnnpred.collect.recipe import Configuration, MeasureSettings
from gnnpred.errors import UsageError
from gnnpred.job import Phase, Precision

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.models

ROOT = Path(__file__).resolve().parents[3]
MODELS = Path(__file__).with_name("small_modules.py")
SETTINGS = MeasureSettings(steps=4, max_warmup_steps=12, max_warmup_s=1.0)


def reply_to(function, **options):
    from gnnpred.collect.worker import run_task

    configuration = Configuration(model=f"{MODELS}:{function}", **{"batch_size": 2, **options})
    task = {"task": "measure", "configuration": asdict(configuration), "settings": asdict(SETTINGS), "device": "cpu"}
    return run_task(task)


@pytest.mark.parametrize("precision", [precision for precision in Precision if precision is not Precision.TF32])
def test_a_step_in_every_precision_is_timed(precision):
    reply = reply_to("mlp", precision=precision)
    assert reply["status"] == "ok", reply
    result = reply["result"]
    assert 0 < result["step_p10_ms"] <= result["step_time_ms"] <= result["step_p90_ms"]
    assert (result["num_steps"], result["input"], result["allow_tf32"]) == (4, "8", False)
    assert result["peak_memory_mib"] > 1
    assert result["manifest"]["torch"] == torch.__version__


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_only_training_moves_the_weights(phase, optimizer, monkeypatch):
    from gnnpred.collect import step

    kept = {}
    build = step.build_model

    def remembering(*args, **options):
        built = build(*args, **options)
        kept.update({name: (value, value.detach().clone()) for name, value in built.module.named_parameters()})
        return built

    monkeypatch.setattr(step, "build_model", remembering)
    monkeypatch.setattr(step, "_LEARNING_RATE", 0.1)
    assert reply_to("mlp", phase=phase, optimizer=optimizer if phase is Phase.TRAIN else "none")["status"] == "ok"
    moved = any(not torch.equal(now, before) for now, before in kept.values())
    has_gradient = all(now.grad is not None for now, _ in kept.values())
    assert (moved, has_gradient) == (phase is Phase.TRAIN, phase is not Phase.INFERENCE)


def test_tf32_and_algorithm_search_are_set_explicitly():
    from gnnpred.collect.measure import _set_flags

    _set_flags(Precision.TF32, MeasureSettings(cudnn_benchmark=True))
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.benchmark
    _set_flags(Precision.FP32, MeasureSettings(cudnn_benchmark=False))
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.benchmark


def test_fp16_autocast_scales_the_loss_and_bf16_does_not(monkeypatch):
    made = []
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: made.append(enabled) or scaler(device, enabled=enabled)
    )
    reply_to("mlp", precision=Precision.MIXED)
    reply_to("mlp", precision=Precision.MIXED_BF16)
    assert made == [True, False]


@pytest.mark.parametrize("host_copy", ["pinned", "pageable"])
def test_inputs_are_copied_in_every_step_where_asked(host_copy, monkeypatch):
    from gnnpred.collect import step

    copied = []
    fetcher = step._fetcher

    def counting(inputs, kind, device):
        fetch = fetcher(inputs, kind, device)
        return lambda: copied.append((kind, fetch()[0].data_ptr() != inputs[0].data_ptr())) or fetch()

    monkeypatch.setattr(step, "_fetcher", counting)
    for asked, has_moved in ((host_copy, True), ("none", False)):
        copied.clear()
        result = reply_to("mlp", host_copy=asked)["result"]
        assert set(copied) == {(asked, has_moved)}
        assert len(copied) >= result["num_warmup_steps"] + result["num_steps"]


def test_adam_in_fp16_keeps_the_weights_finite():
    for optimizer in ("adam", "adamw"):
        reply = reply_to("mlp", precision=Precision.FP16, optimizer=optimizer)
        assert reply["status"] == "ok", reply


def test_images_are_laid_out_as_asked_and_nothing_else_can_be():
    assert reply_to("cnn", memory_format="nhwc")["status"] == "ok"
    reply = reply_to("mlp", memory_format="nhwc")
    assert reply["status"] == "error"
    assert "takes no images" in reply["reason"]


def test_nan_oom_and_a_wrong_batch_have_their_reasons():
    assert [reply_to("not_a_number")[key] for key in ("status", "reason")] == ["nan", "the loss is nan"]
    assert reply_to("greedy")["status"] == "oom"
    wrong = reply_to("fixed_batch", batch_size=3)
    assert wrong["status"] == "error"
    assert "example of batch 2, the recipe asks for 3" in wrong["reason"]


def test_warm_up_ends_when_two_windows_agree():
    from gnnpred.collect.measure import has_settled

    assert not has_settled([10.0] * 9)
    assert has_settled([10.0] * 10)
    assert has_settled([50.0] * 5 + [10.0] * 5 + [10.2] * 5)
    assert not has_settled([12.0] * 5 + [10.0] * 5)


def test_a_warm_up_that_time_ends_is_judged_by_the_steps_there_are():
    from gnnpred.collect.measure import has_settled

    assert has_settled([50.0, 10.0, 10.1], window=1)
    assert not has_settled([50.0, 12.0, 10.0], window=1)
    assert not has_settled([10.0], window=0)


def test_steps_that_get_slower_are_warned_of():
    from gnnpred.collect.measure import _drift_warning, drift_pct

    assert drift_pct([10.0] * 4 + [10.5] * 3 + [11.0] * 4) == pytest.approx(10.0)
    assert "took +10 %" in _drift_warning([10.0] * 4 + [10.5] * 3 + [11.0] * 4)
    assert "took -20 %" in _drift_warning([10.0, 9.0, 8.0])
    assert _drift_warning([10.0, 30.0, 10.2]) == ""


def test_the_sample_whose_operators_are_timed_is_the_same_every_time():
    from gnnpred.collect.measure import is_profiled

    ids = [Configuration(model=f"x:{i}", batch_size=1).config_id for i in range(400)]
    chosen = [each for each in ids if is_profiled(each, 0.25)]
    assert 60 < len(chosen) < 140
    assert [each for each in chosen if not is_profiled(each, 0.3)] == []
    assert all(is_profiled(each, 1.0) for each in ids)
    assert not any(is_profiled(each, 0.0) for each in ids)


def test_a_gpu_that_is_watched_adds_figures_and_warnings(monkeypatch):
    from gnnpred.collect import measure
    from gnnpred.collect.gpu_monitor import GpuReadings

    class Monitor:
        def start(self):
            pass

        def stop(self):
            return GpuReadings(
                sm_clock_mhz=1400, sm_clock_min_mhz=1400, sm_clock_max_mhz=1400, throttle_reasons=("hw_slowdown",),
                other_gpu_processes=1, power_w=500.0, energy_j=300.0,
            )  # fmt: skip

    monkeypatch.setattr(measure, "open_monitor", lambda device: Monitor())
    result = reply_to("mlp")["result"]
    assert (result["sm_clock_mhz"], result["power_w"], result["memory_clock_mhz"]) == (1400, 500.0, None)
    # the window goes on after the timed steps until power is averaged for min_energy_s
    num_steps = 300.0 / result["energy_per_step_j"]
    assert num_steps == pytest.approx(SETTINGS.min_energy_s * 1e3 / result["wall_clock_ms"], rel=0.01, abs=1.01)
    assert "throttled: hw_slowdown; other processes on the GPU: 1" in result["warning"]
    assert "energy_j" not in result


def test_profiling_that_is_not_allowed_leaves_the_row(monkeypatch):
    from gnnpred.collect import measure

    def forbidden(*_args, **_options):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nmore")

    monkeypatch.setattr(measure, "profile_step", forbidden)
    monkeypatch.setattr(measure, "is_profiled", lambda *_: True)
    reply = reply_to("mlp")
    assert reply["status"] == "ok"
    assert "operators not timed: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in reply["result"]["warning"]


def test_unsteady_times_are_warned_of():
    from gnnpred.collect.measure import _steadiness_warning

    assert "not steady" in _steadiness_warning(True, 10, 40.0)
    assert "after 60 warm-up steps" in _steadiness_warning(False, 60, 1.0)
    assert _steadiness_warning(True, 10, 1.0) == ""


def test_a_profiler_of_another_version_leaves_the_row(monkeypatch):
    from gnnpred.collect import measure

    def changed(*_args, **_options):
        raise AttributeError

    monkeypatch.setattr(measure, "profile_step", changed)
    monkeypatch.setattr(measure, "is_profiled", lambda *_: True)
    reply = reply_to("mlp")
    assert reply["status"] == "ok"
    assert "operators not timed: AttributeError" in reply["result"]["warning"]


def test_a_compiled_step_compiles_nothing_but_the_step(monkeypatch):
    from gnnpred.collect.step import build_step

    with_gradients = []

    class Compiled(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs):
            with_gradients.append(torch.is_grad_enabled())
            return self.module(*inputs)

    monkeypatch.setattr(torch, "compile", Compiled)
    step = build_step(Configuration(model=f"{MODELS}:mlp", batch_size=2, compile=True), "cpu")
    assert with_gradients == []
    step()
    assert with_gradients == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_does_not_answer_says_nothing_of_the_configuration():
    from gnnpred.collect.worker import run_task

    configuration = Configuration(model=f"{MODELS}:mlp", batch_size=2)
    task = {"task": "measure", "configuration": asdict(configuration), "settings": asdict(SETTINGS), "device": "cuda"}
    reply = run_task(task)
    assert (reply["status"], reply["lost_device"]) == ("error", True)
    assert reply["reason"]


def test_gpus_of_several_types_are_refused_with_their_names():
    from gnnpred.collect.probe import require_one_type

    require_one_type(["NVIDIA H200", "NVIDIA H200"])
    require_one_type([])
    with pytest.raises(UsageError, match=r"0: NVIDIA H200; 1: Tesla T4\): choose some with CUDA_VISIBLE_DEVICES"):
        require_one_type(["NVIDIA H200", "Tesla T4"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_a_worker_without_room_for_its_reply_says_so():
    from gnnpred.collect.worker import EXIT_DISK_FULL

    worker = subprocess.Popen(
        [sys.executable, "-m", "gnnpred.collect.worker", "/dev/full"],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    task = {"task": "probe", "device": "cpu", "models": ["no model"]}
    worker.stdin.write(json.dumps(task).encode() + b"\n{}\n")
    worker.stdin.flush()
    assert worker.wait(600) == EXIT_DISK_FULL
    worker.stdin.close()
