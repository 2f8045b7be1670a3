"""Lanes of one machine with stand-in workers: what runs at once, what waits for what, and how ranks fail together."""

import functools
import io
import itertools
import time
from dataclasses import replace

import pytest

from gnnpred.collect.engine import Task
from gnnpred.collect.local_engine import LocalEngine, visible_gpus
from gnnpred.collect.lookahead import Lookahead
from gnnpred.collect.rank_group import RankGroup, most_telling
from gnnpred.collect.recipe import Configuration, MeasureSettings
from gnnpred.collect.runner import collect
from gnnpred.collect.store import CollectionStore
from gnnpred.collect.workers import Worker, Workers
from gnnpred.runs import run_of_row
from tests.unit.collect.test_runner import WORKER, recipe_of, table


@pytest.fixture(autouse=True)
def busy(tmp_path, monkeypatch):
    """Where workers note when which of them was busy."""
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "worker.log"))
    monkeypatch.setenv("STAND_IN_BUSY", str(tmp_path / "busy"))
    (tmp_path / "worker.log").touch()
    return tmp_path / "busy"


def run(recipe, out, *, lanes=None, overlaps=None):
    make_engine = functools.partial(LocalEngine, num_lanes=lanes, overlaps=overlaps)
    return collect(recipe, out, make_engine=make_engine, worker_command=WORKER)


def with_layouts(recipe, *layouts):
    """The recipe's configurations, each on every (gpus, strategy)."""
    configurations = tuple(
        replace(each, gpus=gpus, strategy=strategy) for each in recipe.configurations for gpus, strategy in layouts
    )
    return replace(recipe, configurations=configurations)


def spans(busy):
    """(began, ended, GPUs, number of ranks, rank) of every measurement."""
    lines = [line.split() for line in busy.read_text().splitlines()]
    return [(float(a), float(b), gpus, int(num), int(rank)) for a, b, gpus, num, rank in lines]


def content(out):
    with CollectionStore(out) as store:
        return sorted((row.config_id, row.status, row.reason) for row in store.rows()), table(out / "runs.csv")


@pytest.mark.parametrize("overlaps", [False, True])
def test_two_lanes_measure_at_the_same_time_and_give_the_rows_of_one(tmp_path, overlaps):
    met = recipe_of("meet", batches=(1, 2))  # each ends only when the other has begun
    assert run(met, tmp_path / "meet", lanes=2, overlaps=overlaps).by_status == {"ok": 2}
    recipe = recipe_of("good", "crash", "oom", batches=range(1, 5))
    run(recipe, tmp_path / "two", lanes=2, overlaps=overlaps)
    run(recipe, tmp_path / "one", lanes=1)
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_on_a_cpu_nothing_prepares_while_another_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_DELAY_S", "0.1")
    started = []
    start = Workers.start

    def noting(workers, task):
        started.append(sum(not each.has_ended for each in workers._started))
        return start(workers, task)

    monkeypatch.setattr(Workers, "start", noting)
    run(recipe_of("good", batches=(1, 2, 3)), tmp_path / "out")
    assert started == [0] * 5  # the probe, the export and three measurements


def test_every_gpu_has_one_configuration_at_a_time_and_all_are_used(tmp_path, monkeypatch, busy):
    monkeypatch.setenv("STAND_IN_DEVICE", "cuda")
    monkeypatch.setenv("STAND_IN_NUM_GPUS", "3")
    monkeypatch.setenv("STAND_IN_DELAY_S", "0.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    run(recipe_of("good", batches=range(1, 10)), tmp_path / "out")
    by_gpu = {gpu: sorted(each[:2] for each in spans(busy) if each[2] == gpu) for gpu in ("2", "5", "7")}
    assert sum(map(len, by_gpu.values())) == 9
    for each in by_gpu.values():
        assert each
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(each))


def test_ranks_have_their_gpus_alone_and_come_first(tmp_path, monkeypatch, busy):
    monkeypatch.setenv("STAND_IN_DEVICE", "cuda")
    monkeypatch.setenv("STAND_IN_DELAY_S", "0.1")
    recipe = with_layouts(recipe_of("good", batches=range(1, 4)), (1, ""), (2, "ddp"))
    report = run(recipe, tmp_path / "out")
    assert report.by_status == {"ok": 6}
    found = sorted(spans(busy))
    assert [each[3] for each in found] == [2] * 6 + [1] * 3
    assert {each[2] for each in found if each[3] == 2} == {"0,1"}
    shared = [each for each in found if each[3] == 2]
    for a, b in itertools.pairwise(shared[i : i + 2] for i in range(0, 6, 2)):
        assert {rank for *_, rank in a} == {0, 1}
        assert max(end for _, end, *_ in a) <= min(begin for begin, *_ in b)
    assert max(end for _, end, *_ in shared) <= min(each[0] for each in found if each[3] == 1)
    rows = [row for row in table(report.runs_file) if row["gpus"] == "2"]
    job = run_of_row(rows[0]).job
    assert (job.gpus, job.nodes, job.strategy) == (2, 1, "ddp")


def test_the_rank_that_caused_it_names_the_reason(tmp_path):
    recipe = recipe_of("crash-in-rank-1", "oom-in-rank-1", "exit-in-rank-1", "good", time_limit_s=20.0)
    report = run(with_layouts(recipe, (2, "fsdp")), tmp_path / "out")
    assert report.by_status["ok"] == 1
    assert {row["model"]: (row["status"], row["reason"]) for row in table(report.failed_file)} == {
        "x:crash-in-rank-1": ("crash", "rank 1: the worker was ended by SIGSEGV: something broke badly"),
        "x:oom-in-rank-1": ("oom", "rank 1: it is oom"),
        "x:exit-in-rank-1": ("crash", "rank 1: the worker ended with exit code 7"),
    }


def test_ranks_that_hang_are_ended_by_the_time_limit(tmp_path):
    report = run(with_layouts(recipe_of("hang", "good", time_limit_s=1.0), (2, "ddp")), tmp_path / "out")
    assert report.by_status == {"timeout": 1, "ok": 1}


def test_what_needs_more_gpus_than_there_are_is_a_row_with_the_reason(tmp_path):
    report = run(with_layouts(recipe_of("good"), (1, ""), (4, "ddp")), tmp_path / "out")
    assert report.by_status == {"unsupported": 1, "ok": 1}
    (row,) = table(report.failed_file)
    assert (row["gpus"], row["reason"]) == ("4", "needs 4 processes, this CPU takes 2")


def test_the_reply_that_says_most_is_taken():
    replies = [{"status": status, "reason": status} for status in ("ok", "error", "oom", "timeout")]
    assert most_telling(replies) == {"status": "oom", "reason": "oom"}
    assert most_telling(replies[:1]) is None
    lost = {"status": "error", "reason": "rank 0: RuntimeError: Read error: Connection reset by peer"}
    assert most_telling([lost, replies[1]]) == replies[1]


def test_a_node_that_does_not_answer_is_waited_for_no_longer_than_the_limit(tmp_path, monkeypatch):
    class Silent:
        num_nodes, init_method, has_ended = 1, "store://nowhere:1/x", False

        def poll(self):
            return {}

        def end(self):
            self.has_ended = True

    monkeypatch.setattr("gnnpred.collect.rank_group.REMOTE_GRACE_S", 0.0)
    workers, remote = Workers(WORKER, tmp_path), Silent()
    configuration = Configuration(model="x:good", batch_size=1, gpus=2, nodes=2, strategy="ddp")
    task = Task(configuration=configuration, settings=MeasureSettings(time_limit_s=1.0), device="cpu")
    group = RankGroup(workers, task, world_size=2)
    group.release(gpus=None, remote=remote)
    while (reply := group.poll()) is None:
        time.sleep(0.01)
    assert (reply["status"], reply["reason"]) == ("crash", "node 1 does not answer")
    assert remote.has_ended


def test_a_process_that_no_signal_ends_is_not_waited_for_for_ever(tmp_path, monkeypatch, caplog):
    class Stuck:
        pid, stdin = 2**30, io.BytesIO()

        def poll(self):
            return None

    killed = []
    monkeypatch.setattr("gnnpred.collect.workers.os.killpg", lambda pid, _signal: killed.append(pid))
    monkeypatch.setattr("gnnpred.collect.workers._END_LIMIT_S", 0.0)
    worker = Worker(Stuck(), {}, tmp_path / "answer", tmp_path / "log")
    worker.end()
    assert "was killed and has not ended" in caplog.text
    worker.end()
    assert killed == [2**30]


def test_as_many_prepare_ahead_as_keep_the_lanes_busy():
    lookahead = Lookahead(2, limit=20)
    assert lookahead.num_workers == 4
    for _ in range(3):
        lookahead.add(prepare_s=8.0, busy_s=2.0)
    assert lookahead.num_workers == 2 + 2 * 4  # 2 lanes take a worker a second, which takes 8 s to prepare; 2 are ready
    lookahead.add(prepare_s=None, busy_s=100.0)  # it crashed: nothing is known of its preparation
    assert lookahead.num_workers == 10
    assert Lookahead(2, limit=3).num_workers == 3


@pytest.mark.parametrize(
    ("environment", "names"),
    [(None, ["0", "1"]), ("", ["0", "1"]), ("3,1", ["3", "1"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])],
)
def test_gpus_are_named_as_the_environment_names_them(environment, names):
    assert visible_gpus(2, environment) == names


def test_gpus_per_node_are_what_a_task_needs():
    assert Configuration(model="x:y", batch_size=1, gpus=8, nodes=2, strategy="ddp").gpus_per_node == 4
