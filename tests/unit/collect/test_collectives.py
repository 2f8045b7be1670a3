"""Recipes of collectives: what they stand for, timed for real between two gloo ranks, and what fails."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gnnpred.collect.collective_recipe import CollectiveCall
from gnnpred.collect.collective_runner import collect_collectives
from gnnpred.collect.collective_table import predicted
from gnnpred.collect.recipe import MeasureSettings, Recipe, find_recipe, load_recipe
from gnnpred.collect.store import CollectionStore
from gnnpred.communication.collectives import COLLECTIVE_KINDS
from gnnpred.communication_fit.collectives import rows_of_collected
from gnnpred.errors import GnnpredError

ROOT = Path(__file__).resolve().parents[3]
WORKER = (sys.executable, str(ROOT / "tests" / "helpers" / "stand_in_ranks.py"))
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs the models extra")
QUICK = {"steps": 5, "max_warmup_steps": 10, "max_warmup_s": 0.2, "max_timed_s": 0.2}


def recipe_of(*calls, **settings) -> Recipe:
    return Recipe(
        name="calls", kind="collectives", measure=MeasureSettings(**{**QUICK, **settings}),
        configurations=tuple(
            CollectiveCall(operation=operation, num_bytes=num_bytes, dtype=dtype, gpus=gpus, nodes=nodes)
            for operation, num_bytes, dtype, gpus, nodes in calls
        ),
    )  # fmt: skip


def load(tmp_path, text):
    path = tmp_path / "calls.toml"
    path.write_text('kind = "collectives"\n' + text)
    return load_recipe(path)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------- recipes


def test_sizes_double_and_operations_vary_fastest(tmp_path):
    recipe = load(tmp_path, '[[collective]]\noperations = ["all-reduce", "send_recv"]\nmin_size = "4KiB"\n'
                            'max_size = "20KiB"\nsizes = ["1MB"]\ngpus = [2, 4]\n')  # fmt: skip
    sizes = [4096, 8192, 16384, 1_000_000]
    assert [(c.operation, c.num_bytes, c.gpus) for c in recipe.configurations] == [
        (operation, size, gpus) for gpus in (2, 4) for size in sizes for operation in ("all_reduce", "send_recv")
    ]


def test_the_shipped_recipe_covers_every_operation_from_4_kib_to_1_gib_on_2_4_and_8_gpus():
    calls = load_recipe(find_recipe("collectives")).configurations
    one_node = [call for call in calls if call.nodes == 1 and call.dtype == "fp32"]
    assert {call.operation for call in one_node} == set(COLLECTIVE_KINDS)
    assert {call.gpus for call in one_node} == {2, 4, 8}
    assert (min(c.num_bytes for c in one_node), max(c.num_bytes for c in one_node)) == (4 << 10, 1 << 30)
    assert {(call.gpus, call.nodes) for call in calls if call.nodes > 1} == {(16, 2), (16, 4), (32, 2), (32, 4)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one table"),
        ('[[sweep]]\nmodels = ["x:y"]\n', "unknown field 'sweep'"),
        ('[[collective]]\nopperations = ["reduce"]\n', "did you mean 'operations'"),
        ('[[collective]]\noperations = ["all_redduce"]\n', "did you mean all_reduce?"),
        ('[[collective]]\nsizes = ["4 apples"]\n', "sizes '4 apples' is no size"),
        ('[[collective]]\nsizes = [4096]\n', "sizes holds 4096"),
        ('[[collective]]\nmin_size = "4KiB"\n', "min_size is alone"),
        ('[[collective]]\nmin_size = "4KiB"\nmax_size = "1KiB"\n', "must not be above"),
        ('[[collective]]\nmin_size = 4\nmax_size = "1KiB"\n', 'min_size must be a text'),
        ('[[collective]]\ngpus = [2]\n', "say which sizes"),
        ('[[collective]]\nsizes = ["4KiB"]\ngpus = [1]\n', "needs from 2"),
        ('[[collective]]\nsizes = ["4KiB"]\ngpus = [3]\nnodes = [2]\n', "spread evenly"),
        ('[[collective]]\nsizes = ["4KiB"]\ndtypes = ["pf32"]\n', "did you mean 'fp32'?"),
        ('kind = "colectives"\n', ""),
    ],
)  # fmt: skip
def test_a_wrong_recipe_names_the_field(tmp_path, text, words):
    with pytest.raises(GnnpredError, match=r"calls\.toml") as caught:
        load(tmp_path, text)
    assert words in str(caught.value)


def test_an_unknown_kind_is_told(tmp_path):
    path = tmp_path / "calls.toml"
    path.write_text('kind = "colectives"\n')
    with pytest.raises(GnnpredError, match="kind must be one of steps, collectives"):
        load_recipe(path)


# ---------------------------------------------------------------------------------------- timed for real


@needs_torch
@pytest.mark.models
def test_every_operation_is_timed_between_two_gloo_ranks(tmp_path):
    calls = [(operation, 4100, "fp32", 2, 1) for operation in COLLECTIVE_KINDS]
    calls += [("all_reduce", 4096, "fp8", 2, 1), ("all_gather", 4, "fp32", 2, 1), ("all_reduce", 4096, "fp32", 4096, 1)]
    recipe = recipe_of(*calls)
    report = collect_collectives(recipe, tmp_path / "out", device="cpu")
    assert report.by_status == {"ok": 7, "unsupported": 2}
    assert any("1 collectives among 4096 ranks" in warning for warning in report.warnings)
    rows = {row["collective"]: row for row in table(report.runs_file)}
    assert set(rows) == set(COLLECTIVE_KINDS)
    for name, row in rows.items():
        # split buffers hold whole elements of every rank, as nccl-tests has it
        assert int(row["bytes"]) == (4096 if name in ("all_gather", "reduce_scatter", "all_to_all") else 4100)
        time_us, algbw = float(row["time_us"]), float(row["algbw_gbs"])
        assert algbw == pytest.approx(int(row["bytes"]) / time_us / 1e3, rel=1e-4)
        factor = 0.5 if name in ("all_gather", "reduce_scatter", "all_to_all") else 1.0  # n = 2
        assert float(row["busbw_gbs"]) == pytest.approx(factor * algbw, rel=1e-4)
        assert float(row["time_p10_us"]) <= time_us <= float(row["time_p90_us"])
        assert (row["backend"], row["nccl_version"], row["predicted_us"]) == ("gloo", "", "")
    reasons = {row["dtype"] + row["operation"]: row["reason"] for row in table(report.failed_file)}
    assert "Invalid scalar type" in reasons["fp8all_reduce"]
    assert "4 bytes are too few for 2 ranks" in reasons["fp32all_gather"]
    again = collect_collectives(recipe, tmp_path / "out", device="cpu")
    assert (again.num_measured_now, again.num_rows) == (0, 9)


@needs_torch
@pytest.mark.models
def test_two_nodes_that_torchrun_started_time_what_needs_two(tmp_path):
    recipe = tmp_path / "calls.toml"
    recipe.write_text(
        'kind = "collectives"\n[measure]\nsteps = 5\nmax_warmup_steps = 10\n'
        '[[collective]]\noperations = ["all_reduce", "broadcast"]\nsizes = ["4KiB"]\ngpus = [2, 4]\nnodes = [2, 3]\n'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "gnnpred", "collect", "--recipe", str(recipe), "--out", str(tmp_path / "out"),
             "--device", "cpu"],
            env={**os.environ, **variables, "RANK": str(rank), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    rows = table(tmp_path / "out" / "collectives.csv")
    assert [(row["collective"], row["gpus"], row["nodes"]) for row in rows] == [
        (operation, gpus, "2") for gpus in ("2", "4") for operation in ("all_reduce", "broadcast")
    ]


# ---------------------------------------------------------------------------------------- what fails


def test_a_hang_or_a_crash_takes_its_own_row_alone(tmp_path):
    # the stand-in hangs at 3 bytes, crashes at 5
    calls = [("all_reduce", num_bytes, "fp32", 2, 1) for num_bytes in (1, 3, 2, 5, 4)]
    report = collect_collectives(recipe_of(*calls, time_limit_s=5.0), tmp_path, device="cpu", worker_command=WORKER)
    assert [row["bytes"] for row in table(report.runs_file)] == ["1", "2", "4"]
    assert {row["num_bytes"]: (row["status"], row["reason"]) for row in table(report.failed_file)} == {
        "3": ("timeout", "not done after 5 s"),
        "5": ("crash", "rank 1: the worker was ended by SIGSEGV"),
    }


def test_ranks_that_cannot_start_are_one_line_and_no_row(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_START", "no network")
    with pytest.raises(GnnpredError, match=r"2 ranks cannot start: .*no network"):
        collect_collectives(recipe_of(("reduce", 1, "fp32", 2, 1)), tmp_path, device="cpu", worker_command=WORKER)
    assert table(tmp_path / "collectives.csv") == []


def test_the_time_budget_stops_between_calls_and_the_next_call_continues(tmp_path, monkeypatch):
    calls = [("all_reduce", 10 * i, "fp32", 2, 1) for i in range(1, 9)]
    monkeypatch.setenv("STAND_IN_DELAY_S", "0.5")
    first = collect_collectives(recipe_of(*calls), tmp_path, device="cpu", worker_command=WORKER, time_budget_s=2.5)
    assert first.is_cut_off
    assert first.num_rows < 8
    monkeypatch.setenv("STAND_IN_DELAY_S", "0")
    second = collect_collectives(recipe_of(*calls), tmp_path, device="cpu", worker_command=WORKER)
    assert (second.num_rows, second.num_measured_now) == (8, 8 - first.num_rows)


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gnnpred.collect.collective_runner import collect_collectives
from tests.unit.collect.test_collectives import WORKER, recipe_of
calls = [("all_reduce", 10 * i, "fp32", 2, 1) for i in range(1, 6)]
collect_collectives(recipe_of(*calls), Path(sys.argv[2]), device="cpu", worker_command=WORKER)
"""


def test_killed_and_resumed_loses_and_doubles_no_row(tmp_path, monkeypatch):
    environment = {**os.environ, "STAND_IN_DELAY_S": "0.3"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(ROOT), str(tmp_path / "out")], env=environment)
    store = tmp_path / "out" / "collection.sqlite-wal"
    while process.poll() is None and not (store.exists() and b"all_reduce" in store.read_bytes()):
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL
    subprocess.run([sys.executable, "-c", PROGRAM, str(ROOT), str(tmp_path / "out")], check=True, timeout=120)
    with CollectionStore(tmp_path / "out") as kept:
        assert sorted(row.configuration["num_bytes"] for row in kept.rows()) == [10, 20, 30, 40, 50]


# ---------------------------------------------------------------------------------------- what reads the rows


def test_the_fit_reads_the_table_and_a_prediction_stands_beside_each_row(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "STAND_IN_MANIFEST",
        json.dumps({"device": "cuda", "gpu": "V100-SXM2-16GB", "nccl": "2.21.5", "interconnect": "nvlink"}),
    )
    recipe = recipe_of(("all_reduce", 1 << 20, "fp16", 2, 1))
    report = collect_collectives(recipe, tmp_path, device="cpu", worker_command=WORKER)
    row = next(iter(rows_of_collected(report.runs_file)))
    assert (row.gpu, row.collective, row.num_bytes, row.time_us) == ("V100-SXM2-16GB", "all_reduce", 1 << 20, 100.0)
    assert (row.dtype, row.nccl_version, row.fabric.gpus, row.fabric.intra.name) == ("fp16", "2.21.5", 2, "nvlink2")
    cells = table(report.runs_file)[0]
    assert 5 < float(cells["predicted_us"]) < 500
    assert "measured" in cells["predicted_basis"]


def test_an_unknown_machine_has_no_prediction():
    call = CollectiveCall(operation="reduce", num_bytes=8, dtype="fp32", gpus=2)
    assert predicted(call, 8, {"device": "cuda", "gpu": "Voodoo 2", "nccl": "", "interconnect": "", "network": ""}) == (
        None,
        "",
    )
