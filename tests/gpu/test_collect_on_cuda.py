"""Measuring on a real GPU: CUDA events, every precision, and a configuration that does not fit."""

from dataclasses import asdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gnnpred.collect.recipe import Configuration, MeasureSettings  # noqa: E402
from gnnpred.collect.runner import unsupported_reason  # noqa: E402
from gnnpred.collect.worker import run_task  # noqa: E402
from gnnpred.job import Precision  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.models,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS = Path(__file__).parents[1] / "unit" / "collect" / "small_modules.py"


def reply_to(function, **options):
    configuration = Configuration(model=f"{MODELS}:{function}", **{"batch_size": 4, **options})
    settings = asdict(MeasureSettings(steps=10))
    return run_task({"task": "measure", "configuration": asdict(configuration), "settings": settings, "device": "cuda"})


@pytest.mark.parametrize("precision", list(Precision))
def test_events_and_the_wall_clock_agree_in_every_precision(precision):
    reply = reply_to("cnn", precision=precision)
    manifest = run_task({"task": "probe", "device": "cuda", "models": []})["result"]["manifest"]
    if reason := unsupported_reason(Configuration(model="x:cnn", batch_size=4, precision=precision), manifest):
        pytest.skip(reason)
    assert reply["status"] == "ok", reply
    result = reply["result"]
    assert result["clock"] == "cuda events"
    assert result["wall_clock_ms"] == pytest.approx(result["step_time_ms"], rel=0.5)
    assert result["manifest"]["compute_capability"] > 0


def test_the_largest_batch_keeps_to_the_memory_that_it_is_given():
    settings = MeasureSettings(steps=3, max_warmup_steps=3, largest_batch_memory_gib=2.0, largest_batch_limit=512)
    task = {
        "task": "measure",
        "configuration": asdict(
            Configuration(model="torchvision:resnet18", batch_size=None, precision=Precision.MIXED)
        ),
        "settings": asdict(settings),
        "device": "cuda",
    }
    reply = run_task(task)
    assert reply["status"] == "ok", reply
    result = reply["result"]
    assert 8 <= result["batch_size"] < 512
    assert 0.6 * 2048 < result["peak_memory_mib"] <= 2048
    assert result["warning"].count("the search for the largest batch") == 0


@pytest.mark.parametrize("host_copy", ["pinned", "pageable"])
def test_copies_from_the_host_are_in_the_step(host_copy):
    # 768 MiB: tens of milliseconds over any PCIe link, and nothing on the GPU's own memory
    with_copy = reply_to("large_input", host_copy=host_copy, phase="inference", optimizer="none")
    without = reply_to("large_input", phase="inference", optimizer="none")
    assert with_copy["status"] == without["status"] == "ok"
    assert with_copy["result"]["step_time_ms"] > without["result"]["step_time_ms"] + 5


def test_a_watched_gpu_tells_its_clocks_and_energy():
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML does not answer: {error}")
    result = reply_to("cnn")["result"]
    assert result["sm_clock_mhz"] > 100
    assert result["power_w"] > 5
    assert result["energy_per_step_j"] == pytest.approx(result["power_w"] * result["step_time_ms"] / 1e3, rel=0.5)
    assert result["manifest"]["driver"]


def test_kernels_of_a_step_have_kinds_and_add_up_to_less_than_it():
    configuration = Configuration(model="torchvision:resnet18", batch_size=64, image_size=224)
    settings = asdict(MeasureSettings(steps=10, profile_share=1.0))
    task = {"task": "measure", "configuration": asdict(configuration), "settings": settings, "device": "cuda"}
    reply = run_task(task)
    assert reply["status"] == "ok", reply
    result = reply["result"]
    if "operators not timed" in result["warning"] or not result["operators"]:
        pytest.skip("this driver does not let processes profile")
    found = {(kind, phase) for kind, phase, *_ in result["operators"]}
    assert {("conv", "fwd"), ("conv", "bwd"), ("conv", "bwd_weight"), ("batch_norm", "fwd"), ("relu", "bwd")} <= found
    in_kernels_ms = sum(calls * time_us for *_, calls, time_us in result["operators"]) / 1e3
    assert 0.5 * result["step_time_ms"] < in_kernels_ms < 1.1 * result["step_time_ms"]
    assert result["operator_time_share"] > 0.6


def test_what_does_not_fit_is_out_of_memory():
    assert reply_to("greedy")["status"] == "oom"
