"""Running a recipe with a stand-in worker: what fails becomes a row, and no end of the program loses or doubles one."""

import csv
import random
import signal
import sqlite3
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gnnpred.collect.local_engine import LocalEngine
from gnnpred.collect.recipe import Configuration, MeasureSettings, Recipe
from gnnpred.collect.runner import collect, export_graphs, unsupported_reason
from gnnpred.collect.store import STORE_FILE, CollectionStore
from gnnpred.collect.workers import Worker
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.job import Precision
from gnnpred.runs import run_of_row

ROOT = Path(__file__).resolve().parents[3]
WORKER = (sys.executable, str(ROOT / "tests" / "helpers" / "stand_in_worker.py"))


def recipe_of(*models: str, batches=(1,), precisions=("fp32",), time_limit_s=30.0) -> Recipe:
    return Recipe(
        name="stand-in",
        configurations=tuple(
            Configuration(model=f"x:{model}", batch_size=batch, precision=Precision(precision))
            for model in models
            for batch in batches
            for precision in precisions
        ),
        measure=MeasureSettings(time_limit_s=time_limit_s),
    )


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    """Every measurement that a worker began, one a line."""
    path = tmp_path / "worker.log"
    path.touch()
    monkeypatch.setenv("STAND_IN_LOG", str(path))
    return path


def run(recipe, out, **options):
    return collect(recipe, out, device="cpu", worker_command=WORKER, **options)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_measured_rows_are_runs_that_score_can_read(tmp_path):
    report = run(recipe_of("good", batches=(1, 2)), tmp_path / "out")
    rows = table(report.runs_file)
    assert [float(row["step_time_ms"]) for row in rows] == [10.0, 20.0]
    read = run_of_row(rows[1])
    assert (read.job.device.name, read.job.batch_size, read.measured_ms) == ("V100-SXM2-16GB", 2, 20.0)
    assert (read.job.host_copy, read.job.data_loader, read.notes) == (False, False, ())
    assert (tmp_path / "out" / rows[0]["onnx"]).read_text() == "graph of x:good"


def test_a_recipe_of_which_the_machine_runs_nothing_is_one_line_and_leaves_no_rows(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"none of the recipe's 2 configurations: tf32 is a format of GPUs"):
        run(recipe_of("good", batches=(1, 2), precisions=("tf32",)), tmp_path / "out")
    assert not (tmp_path / "out" / "runs.csv").exists()
    monkeypatch.setenv("STAND_IN_DEVICE", "cuda")
    monkeypatch.setenv("STAND_IN_CAPABILITY", "7.0")
    with pytest.raises(UsageError, match=r"V100 \(compute capability 7\) has no (mixed-)?bf16 units"):
        run(recipe_of("good", precisions=("bf16", "mixed-bf16")), tmp_path / "out")
    report = run(recipe_of("good", precisions=("bf16", "fp16")), tmp_path / "out")
    assert report.by_status == {"unsupported": 1, "ok": 1}


def test_tf32_rows_say_that_matmul_uses_it(tmp_path, monkeypatch):
    out = tmp_path / "out"
    recipe = recipe_of("good", precisions=("fp32", "tf32"))
    report = run(recipe, out)
    assert report.by_status == {"ok": 1, "unsupported": 1}  # the stand-in says it is a CPU
    from gnnpred.collect import table as tables

    with CollectionStore(out) as store:
        row = next(row for row in store.rows() if row.status == "ok")
    cells = tables._run_cells(recipe.configurations[1], row, ("m.onnx", "", ""), recipe)
    assert run_of_row({name: str(value) for name, value in cells.items()}).job.tf32_matmul


def test_every_way_to_fail_becomes_a_row_with_its_reason(tmp_path):
    report = run(recipe_of("hang", "crash", "exit", "oom", "nan", "error", "good", time_limit_s=1.0), tmp_path / "out")
    found = {row["model"]: (row["status"], row["reason"]) for row in table(report.failed_file)}
    assert found == {
        "x:hang": ("timeout", "not done after 1 s"),
        "x:crash": ("crash", "the worker was ended by SIGSEGV: something broke badly"),
        "x:exit": ("crash", "the worker ended with exit code 7"),
        "x:oom": ("oom", "it is oom"),
        "x:nan": ("nan", "it is nan"),
        "x:error": ("error", "it is error"),
    }
    assert [row["model"] for row in table(report.runs_file)] == ["x:good"]


def test_a_finished_folder_measures_nothing_again(tmp_path, log):
    recipe = recipe_of("good", "crash")
    run(recipe, tmp_path / "out")
    before = log.read_text()
    report = run(recipe, tmp_path / "out")
    assert log.read_text() == before
    assert (report.num_measured_now, report.num_rows) == (0, 2)


def test_a_folder_of_another_recipe_is_refused(tmp_path):
    run(recipe_of("good"), tmp_path / "out")
    with pytest.raises(UsageError, match="rows of another recipe"):
        run(recipe_of("good", batches=(2,)), tmp_path / "out")


def test_a_folder_of_another_device_is_refused(tmp_path, monkeypatch):
    run(recipe_of("good"), tmp_path / "out")
    monkeypatch.setenv("STAND_IN_GPU", "T4")
    with pytest.raises(UsageError, match=r"rows of cpu \(V100\), this machine has cpu \(T4\)"):
        run(recipe_of("good"), tmp_path / "out")


def test_two_calls_do_not_share_a_folder(tmp_path):
    with CollectionStore(tmp_path / "out"), pytest.raises(GnnpredError, match="another collect is working"):
        run(recipe_of("good"), tmp_path / "out")


def test_the_time_budget_stops_and_the_next_call_continues(tmp_path, monkeypatch):
    recipe = recipe_of("good", batches=range(1, 6))
    late_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0], sleep=time.sleep)
    monkeypatch.setattr("gnnpred.collect.local_engine.time", clock)

    def end_after_two(_what, done, _total):
        late_s[0] = 1e6 if done == 2 else 0.0

    first = run(recipe, tmp_path / "out", time_budget_s=1e5, on_progress=end_after_two)
    assert first.is_cut_off
    assert len(table(first.runs_file)) == first.num_rows == 2
    late_s[0] = 0.0
    second = run(recipe, tmp_path / "out", time_budget_s=1e5)
    assert not second.is_cut_off
    assert (second.num_rows, second.num_measured_now) == (5, 3)


def test_graphs_that_a_budget_cut_off_are_exported_later_on_any_machine(tmp_path, monkeypatch, log):
    out, recipe = tmp_path / "out", recipe_of("good", "other", "crash", batches=(1, 2))
    run(recipe, out)
    whole = content(out)
    with CollectionStore(out) as store:
        store._db.execute("DELETE FROM graphs")
    for path in (out / "models").iterdir():
        path.unlink()
    before = log.read_text()
    monkeypatch.setenv("STAND_IN_GPU", "T4")  # a machine on which collect itself would be refused
    left = export_graphs(recipe, out, worker_command=WORKER, time_budget_s=1e-9)
    assert (left.is_cut_off, left.num_graphs_missing) == (True, 2)
    done = []
    report = export_graphs(recipe, out, worker_command=WORKER, on_progress=lambda *each: done.append(each))
    assert (report.is_cut_off, report.num_graphs_missing, report.num_measured_now) == (False, 0, 0)
    assert (done[0], done[-1]) == (("graphs", 0, 2), ("graphs", 2, 2))
    assert content(out) == whole
    assert log.read_text() == before
    with pytest.raises(UsageError, match="another recipe"):
        export_graphs(recipe_of("good"), out, worker_command=WORKER)
    with pytest.raises(UsageError, match="holds no rows"):
        export_graphs(recipe, tmp_path / "nothing", worker_command=WORKER)
    assert not (tmp_path / "nothing").exists()


def test_exports_see_no_gpu(tmp_path, monkeypatch):
    released = []
    release = Worker.release

    def noting(worker, *, limit_s, go=None):
        released.append((worker.task["task"], go))
        release(worker, limit_s=limit_s, go=go)

    monkeypatch.setattr(Worker, "release", noting)
    monkeypatch.setenv("STAND_IN_DEVICE", "cuda")
    monkeypatch.setenv("STAND_IN_NUM_GPUS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    collect(recipe_of("good"), tmp_path / "out", worker_command=WORKER)
    assert released == [("probe", None), ("measure", {"gpus": "GPU-1234"}), ("export", {"gpus": ""})]


def test_a_full_disk_is_one_line_and_keeps_the_rows(tmp_path, monkeypatch):
    recipe = recipe_of("good", batches=range(1, 40))
    connect = sqlite3.connect

    def with_little_space(path, **options):
        connection = connect(path, **options)
        if Path(path).name == STORE_FILE:
            connection.execute("PRAGMA max_page_count = 12")
        return connection

    monkeypatch.setattr("gnnpred.collect.store.sqlite3.connect", with_little_space)
    with pytest.raises(GnnpredError, match=r"collection.sqlite: the disk is full; all earlier rows are kept"):
        run(recipe, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "worker.log"))
    with CollectionStore(tmp_path / "out") as store:
        kept = len(store.rows())
    assert 0 < kept < 39
    assert run(recipe, tmp_path / "out").num_measured_now == 39 - kept


def test_a_disk_that_is_full_for_a_worker_costs_no_row(tmp_path, monkeypatch):
    recipe = recipe_of("good", "full")
    monkeypatch.setenv("STAND_IN_FULL", "1")
    with pytest.raises(GnnpredError, match=r"the disk is full .* free space"):
        run(recipe, tmp_path / "out")
    assert table(tmp_path / "out" / "failed.csv") == []
    monkeypatch.delenv("STAND_IN_FULL")
    assert run(recipe, tmp_path / "out").by_status == {"ok": 2}


def test_a_gpu_that_does_not_answer_ends_the_call_and_costs_no_row(tmp_path):
    once = run(recipe_of("lost", "good"), tmp_path / "once")
    assert (once.num_rows, once.by_status) == (1, {"ok": 1})
    with pytest.raises(GnnpredError, match=r"a GPU cannot be used any more \(it is lost\): all rows are kept"):
        run(recipe_of("good", "lost", batches=(1, 2, 3)), tmp_path / "out")
    assert len(table(tmp_path / "out" / "runs.csv")) == 3
    assert table(tmp_path / "out" / "failed.csv") == []


def test_overlapped_work_leaves_the_device_idle_less_than_35_per_cent_and_gives_the_same_rows(tmp_path, monkeypatch):
    recipe = recipe_of("good", "other", "crash", batches=range(1, 5))
    run(recipe, tmp_path / "plain")
    busy = tmp_path / "busy"
    for name, value in (("DELAY_S", 0.5), ("IMPORT_S", 0.4), ("EXPORT_S", 1.0), ("BUSY", busy)):
        monkeypatch.setenv(f"STAND_IN_{name}", str(value))
    run(recipe, tmp_path / "overlapped", make_engine=partial(LocalEngine, overlaps=True, max_ahead=2))
    spans = [tuple(map(float, line.split()[:2])) for line in busy.read_text().splitlines()]
    assert len(spans) == 12
    assert all(spans[i][1] <= spans[i + 1][0] for i in range(11)), "two measurements at once disturb each other"
    assert 1 - sum(end - begin for begin, end in spans) / (spans[-1][1] - spans[0][0]) < 0.35
    assert content(tmp_path / "overlapped") == content(tmp_path / "plain")


PROGRAM = """
import functools
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gnnpred.collect.local_engine import LocalEngine
from gnnpred.collect.runner import collect
from tests.unit.collect.test_runner import WORKER, recipe_of
num_lanes = int(sys.argv[3])
make_engine = functools.partial(LocalEngine, num_lanes=num_lanes, overlaps=num_lanes > 1)
recipe = recipe_of("good", "crash", batches=range(1, 7))
collect(recipe, Path(sys.argv[2]), device="cpu", make_engine=make_engine, worker_command=WORKER)
"""


def start(out, delay_s, log, *, num_lanes=1):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(ROOT), str(out), str(num_lanes)],
        env={"STAND_IN_DELAY_S": str(delay_s), "STAND_IN_LOG": str(log), "PATH": "/usr/bin:/bin"},
        stderr=subprocess.PIPE,
        # a job that a shell put into the background ignores interrupts, and would hand that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def content(out):
    with CollectionStore(out) as store:
        rows = sorted((row.config_id, row.status, row.reason) for row in store.rows())
        runs = [{name: cell for name, cell in row.items() if name != "prepare_s"} for row in table(out / "runs.csv")]
        return rows, store.graphs(), runs


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_killed_five_times_at_random_and_resumed_equals_an_uninterrupted_run(tmp_path, log, num_lanes):
    assert start(tmp_path / "whole", 0, log).wait(600) == 0
    killed = tmp_path / "killed"
    num_kills, seed = 0, random.Random(5)
    for _ in range(5):
        process = start(killed, 0.3 * num_lanes, log, num_lanes=num_lanes)
        before = log.stat().st_size
        while process.poll() is None and log.stat().st_size == before:  # at work, not still importing
            time.sleep(0.01)
        time.sleep(seed.uniform(0, 0.35))
        process.kill()
        num_kills += process.wait() == -signal.SIGKILL
        process.stderr.close()
    assert num_kills == 5
    assert start(killed, 0, log, num_lanes=num_lanes).wait(600) == 0
    assert content(killed) == content(tmp_path / "whole")
    assert len(content(killed)[0]) == 12


def test_interrupting_ends_the_worker_and_leaves_the_tables(tmp_path, log):
    process = start(tmp_path / "out", 0.3, log)
    while log.read_text().count("\n") < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert b"KeyboardInterrupt" in process.stderr.read()
    process.stderr.close()
    num_begun = log.read_text().count("\n")
    time.sleep(0.5)
    assert log.read_text().count("\n") == num_begun
    rows, _, runs = content(tmp_path / "out")
    assert len(runs) == len(rows) >= 2
    assert not list((tmp_path / "out").glob("**/*.partial*"))


@pytest.mark.parametrize(
    ("precision", "capability", "words"),
    [
        (Precision.BF16, 7.0, "has no bf16 units"),
        (Precision.MIXED_BF16, 7.5, "has no mixed-bf16 units"),
        (Precision.TF32, 7.0, "has no tf32 units"),
        (Precision.BF16, 8.0, ""),
        (Precision.MIXED, 7.0, ""),
    ],
)
def test_a_gpu_without_the_unit_is_told_before_anything_runs(precision, capability, words):
    manifest = {"device": "cuda", "gpu": "T4", "compute_capability": capability}
    reason = unsupported_reason(Configuration(model="x:good", batch_size=1, precision=precision), manifest)
    assert words in reason
    assert bool(reason) == bool(words)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"gpus": 4, "strategy": "ddp"}, ""),
        ({"gpus": 8, "strategy": "ddp"}, "needs 8 GPUs, there are 4"),
        ({"gpus": 8, "nodes": 2, "strategy": "ddp"}, "needs 2 nodes, there are 1"),
    ],
)
def test_more_gpus_or_nodes_than_there_are_is_told_before_anything_runs(layout, words):
    manifest = {"device": "cuda", "gpu": "H100", "compute_capability": 9.0, "num_gpus": 4}
    assert unsupported_reason(Configuration(model="x:good", batch_size=1, **layout), manifest) == words
