"""Workers that are forked and first touch a GPU afterwards, and ranks on two GPUs with NCCL."""

import csv
from dataclasses import asdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gnnpred.collect.gpu_monitor import ask, nvml_handle, open_nvml  # noqa: E402
from gnnpred.collect.recipe import Configuration, MeasureSettings, Recipe  # noqa: E402
from gnnpred.collect.runner import collect  # noqa: E402
from gnnpred.collect.workers import WORKER_COMMAND, Workers  # noqa: E402
from gnnpred.job import Precision  # noqa: E402
from gnnpred.runs import run_of_row  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.models,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS = Path(__file__).parents[1] / "unit" / "collect" / "small_modules.py"
SETTINGS = MeasureSettings(steps=10)


def test_forked_workers_use_the_gpu_one_after_the_other(tmp_path):
    workers = Workers(WORKER_COMMAND, tmp_path, forked=["timm", "torchvision", "hf"])
    task = {
        "task": "measure",
        "configuration": asdict(Configuration(model=f"{MODELS}:cnn", batch_size=4)),
        "settings": asdict(SETTINGS),
        "device": "cuda",
    }
    try:
        for _ in range(2):
            reply = workers.run(task, limit_s=300)
            assert reply["status"] == "ok", reply
            assert reply["result"]["clock"] == "cuda events"
        assert workers._server is not None, "the imports leave the fork server unfit"
    finally:
        workers.end_all()


@pytest.mark.parametrize("names", ["number", "uuid"])
def test_a_collection_is_alone_on_its_gpu_while_others_prepare_and_export(tmp_path, monkeypatch, names):
    properties = torch.cuda.get_device_properties(0)
    nvml = open_nvml()
    handle = None if nvml is None else nvml_handle(nvml, properties)
    before = None if handle is None else ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if before is None:
        pytest.skip("NVML does not tell the GPU's processes")
    if names == "uuid":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{properties.uuid}")
    models = ("torchvision:resnet18", "torchvision:squeezenet1_1", "timm:vit_tiny_patch16_224", "torchvision:resnet34")
    recipe = Recipe(
        name="alone",
        configurations=tuple(
            Configuration(model=model, batch_size=8, precision=precision)
            for model in models
            for precision in (Precision.FP32, Precision.MIXED)
        ),
        measure=SETTINGS,
    )
    report = collect(recipe, tmp_path / "out", device="cuda")
    assert report.by_status == {"ok": 8}, report.failed_file.read_text()
    assert report.num_graphs_missing == 0
    with report.runs_file.open(newline="") as file:
        assert {row["other_gpu_processes"] for row in csv.DictReader(file)} == {str(len(before))}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_measure_alone_and_together(tmp_path):
    shapes = [{}, {"gpus": 2, "strategy": "ddp"}, {"gpus": 2, "strategy": "fsdp"}]
    recipe = Recipe(
        name="two",
        configurations=tuple(
            Configuration(model=f"{MODELS}:blocks", batch_size=batch_size, precision=precision, **shape)
            for shape in shapes
            for precision in (Precision.FP32, Precision.MIXED)
            for batch_size in (4, 8)
        ),
        measure=SETTINGS,
    )
    report = collect(recipe, tmp_path / "out", device="cuda")
    assert report.by_status == {"ok": 12}, report.failed_file.read_text()
    with report.runs_file.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["gpus"] == "2"]
    assert {row["strategy"] for row in rows} == {"ddp", "fsdp"}
    for row in rows:
        assert float(row["step_time_slowest_ms"]) >= float(row["step_time_ms"]) > 0
        assert run_of_row(row).job.gpus == 2
