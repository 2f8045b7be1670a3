"""What a worker measures on the CPU, in every precision and phase, and how it names what cannot be measured."""

from dataclasses import asdict
from pathlib import Path

import pytest

from gnnpred.collect.recipe import Configuration, MeasureSettings
from gnnpred.job import Phase, Precision

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.models

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
    from gnnpred.collect import measure

    kept = {}
    build = measure.build_model

    def remembering(*args, **options):
        built = build(*args, **options)
        kept.update({name: (value, value.detach().clone()) for name, value in built.module.named_parameters()})
        return built

    monkeypatch.setattr(measure, "build_model", remembering)
    monkeypatch.setattr(measure, "_LEARNING_RATE", 0.1)
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


def test_unsteady_times_are_warned_of():
    from gnnpred.collect.measure import _steadiness_warning

    assert "not steady" in _steadiness_warning(True, 10, 40.0)
    assert "after 60 warm-up steps" in _steadiness_warning(False, 60, 1.0)
    assert _steadiness_warning(True, 10, 1.0) == ""
