"""Distributed steps on a CPU with gloo: two processes, their gradients joined, one row."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnpred.collect.ranks import join_results, repeated_layers
from gnnpred.collect.recipe import Configuration, MeasureSettings, Recipe
from gnnpred.collect.runner import collect
from gnnpred.job import Precision
from gnnpred.runs import run_of_row
from tests.unit.collect.test_runner import table

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.models

ROOT = Path(__file__).resolve().parents[3]
MODELS = Path(__file__).with_name("small_modules.py")
SETTINGS = MeasureSettings(steps=3, max_warmup_steps=6, max_warmup_s=0.1, time_limit_s=600)

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from gnnpred.collect.ranks import Ranks
rank = int(sys.argv[1])
ranks = Ranks("cpu", rank=rank, local_rank=rank, world_size=2, init_method=f"file://{sys.argv[2]}")
assert ranks.agree(7.0 + rank) == 7.0
for strategy in ("ddp", "fsdp"):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(2)))
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(2)))
    module = ranks.spread(module, strategy, None)
    batches = [torch.full((3, 4), 1.0 + i) for i in range(2)]
    sum(plain(batch).sum() for batch in batches).backward()
    module(batches[rank]).sum().backward()
    for expected, found in zip(plain.parameters(), module.parameters(), strict=True):
        gradient = found.grad.full_tensor() if hasattr(found.grad, "full_tensor") else found.grad
        # gloo knows no average: some versions of FSDP leave it the sum
        factor = 0.5 if strategy == "ddp" or torch.allclose(gradient, expected.grad / 2) else 1.0
        assert torch.allclose(gradient, expected.grad * factor), (strategy, gradient, expected.grad)
    local = sum(each.to_local().numel() if hasattr(each, "to_local") else each.numel() for each in module.parameters())
    print(strategy, local)
dist.destroy_process_group()
"""


def test_gradients_of_all_ranks_are_joined_and_fsdp_keeps_half_of_the_weights(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "rendezvous")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
        assert out.split() == ["ddp", "40", "fsdp", "20"]


def configuration(function, **options):
    return Configuration(model=f"{MODELS}:{function}", **{"batch_size": 2, "gpus": 2, "strategy": "ddp", **options})


def test_two_processes_measure_one_step_and_score_reads_it(tmp_path):
    configurations = (
        configuration("blocks"),
        configuration("blocks", precision=Precision.MIXED),
        configuration("blocks", strategy="fsdp"),
        configuration("blocks", strategy="fsdp", precision=Precision.MIXED_BF16, optimizer="adamw"),
        configuration("blocks", strategy="fsdp", precision=Precision.MIXED),
        configuration("fails_in_rank_1"),
    )
    recipe = Recipe(name="two", configurations=configurations, measure=SETTINGS)
    report = collect(recipe, tmp_path / "out", device="cpu")
    failed = [(row["status"], row["reason"]) for row in table(report.failed_file)]
    assert failed == [("error", "rank 1: ValueError: not here")]
    rows = table(report.runs_file)
    assert [(row["gpus"], row["nodes"], row["strategy"], row["precision"]) for row in rows] == [
        ("2", "1", each.strategy, str(each.precision)) for each in configurations[:5]
    ]
    for row in rows:
        assert float(row["step_time_slowest_ms"]) >= float(row["step_time_ms"]) > 0
        assert float(row["throughput"]) == pytest.approx(2 * 2 / float(row["step_time_ms"]) * 1e3, rel=1e-4)
        assert row["onnx"]
    job = run_of_row({**rows[2], "gpu": "A100-SXM4-80GB"}).job
    assert (job.gpus, job.nodes, job.strategy) == (2, 1, "fsdp")


def result(**values):
    return {"step_time_ms": 1.0, "peak_memory_mib": 10.0, "loss": 0.5, "warning": "", **values}


def test_rank_0_speaks_the_slowest_and_the_fullest_are_kept():
    joined = join_results(
        [result(warning="not steady"), result(step_time_ms=1.5, peak_memory_mib=12.0, warning="throttled: heat")]
    )
    assert joined == {
        "step_time_ms": 1.0,
        "step_time_slowest_ms": 1.5,
        "peak_memory_mib": 12.0,
        "loss": 0.5,
        "warning": "not steady; throttled: heat (rank 1)",
    }
    assert join_results([result(), result(loss="nan")])["loss"] == "nan"


def test_repeated_blocks_are_units_and_single_products_are_not():
    def block():
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())

    first, second, inner = torch.nn.ModuleList([block(), block()]), torch.nn.Sequential(block(), block()), block()
    module = torch.nn.ModuleDict({"embed": torch.nn.Linear(2, 2), "a": first, "rest": torch.nn.ModuleList([inner])})
    module["deep"] = torch.nn.ModuleDict({"b": second})
    assert repeated_layers(module) == [*first, *second]
    assert repeated_layers(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))) == []
