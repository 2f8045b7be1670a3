"""Collectives among real GPUs, and Ray lanes on them."""

import csv

import pytest

torch = pytest.importorskip("torch")

from gnnpred.collect.collective_recipe import CollectiveCall  # noqa: E402
from gnnpred.collect.collective_runner import collect_collectives  # noqa: E402
from gnnpred.collect.recipe import Configuration, MeasureSettings, Recipe  # noqa: E402
from gnnpred.collect.runner import collect  # noqa: E402
from gnnpred.communication.collectives import COLLECTIVE_KINDS  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.models,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_operation_is_timed_by_nccl_and_never_faster_than_the_links(tmp_path):
    calls = tuple(
        CollectiveCall(operation=operation, num_bytes=size, dtype=dtype, gpus=2)
        for dtype in ("fp32", "bf16")
        for size in (4 << 10, 64 << 20)
        for operation in COLLECTIVE_KINDS
    )
    recipe = Recipe(name="calls", kind="collectives", configurations=calls, measure=MeasureSettings(steps=20))
    report = collect_collectives(recipe, tmp_path, device="cuda")
    assert report.by_status == {"ok": len(calls)}
    with report.runs_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["backend"] for row in rows} == {"nccl"}
    assert all(row["nccl_version"].startswith("2.") for row in rows)
    assert all(0 < float(row["busbw_gbs"]) < 2000 for row in rows)  # above any link there is
    times_us = {(row["collective"], row["dtype"], row["bytes"]): float(row["time_us"]) for row in rows}
    for operation in COLLECTIVE_KINDS:
        assert times_us[operation, "fp32", str(64 << 20)] > times_us[operation, "fp32", str(4 << 10)]


def test_a_ray_lane_measures_on_the_gpu_that_ray_gave_it(tmp_path):
    pytest.importorskip("ray", reason="needs the ray extra")
    from gnnpred.collect.ray_engine import RayEngine

    configurations = tuple(
        Configuration(model="torchvision:resnet18", batch_size=batch_size, image_size=64) for batch_size in (8, 16)
    )
    recipe = Recipe(name="two", configurations=configurations, measure=MeasureSettings(steps=10))
    report = collect(recipe, tmp_path, make_engine=lambda workers: RayEngine(address="local"))
    assert report.by_status == {"ok": 2}
    with report.runs_file.open(newline="") as file:
        assert {row["gpu"] for row in csv.DictReader(file)} == {report.device}
