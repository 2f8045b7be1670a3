"""Workers that a process with the libraries forks: each ends alone, whatever ends it, and none outlives its parent."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from gnnpred.collect.fork_server import fork_problem
from gnnpred.collect.forking import ForkError, ForkServer
from gnnpred.collect.recipe import Configuration, MeasureSettings
from gnnpred.collect.workers import WORKER_COMMAND, Workers

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone"),
]
MODELS = Path(__file__).with_name("small_modules.py")
ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 600.0  # generous: nothing here depends on it


def task_of(function, **options):
    return {
        "task": "measure",
        "configuration": asdict(Configuration(model=f"{MODELS}:{function}", batch_size=2, **options)),
        "settings": asdict(MeasureSettings(steps=3, max_warmup_steps=4, max_warmup_s=0.5)),
        "device": "cpu",
    }


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    workers = Workers(WORKER_COMMAND, tmp_path_factory.mktemp("scratch"), forked=["timm"])
    yield workers
    workers.end_all()


def test_each_worker_ends_alone_and_says_how(workers):
    assert workers.run(task_of("mlp"), limit_s=LIMIT_S)["status"] == "ok"
    server = workers._server
    assert server is not None
    crash = workers.run(task_of("segfault"), limit_s=LIMIT_S)
    assert (crash["status"], crash["reason"][:37]) == ("crash", "the worker was ended by SIGSEGV: it g")
    assert workers.run(task_of("quits"), limit_s=LIMIT_S)["reason"] == "the worker ended with exit code 7"
    hang = workers.run(task_of("hangs"), limit_s=1)
    assert hang == {"status": "timeout", "reason": "not done after 1 s", "result": {}}
    assert workers.run(task_of("mlp"), limit_s=LIMIT_S)["status"] == "ok"
    assert workers._server is server


def test_what_a_worker_started_ends_with_it(workers, tmp_path, monkeypatch):
    worker = workers.start(task_of("starts_a_child", image_size=1))
    worker.release(limit_s=LIMIT_S)
    while not (note := Path(worker._log)).read_text().endswith("\n"):
        time.sleep(0.02)
    child = int(note.read_text())
    worker.end()
    wait_for(lambda: not is_running(child))


def test_without_its_server_a_worker_counts_as_ended_and_the_next_imports_for_itself(tmp_path):
    workers = Workers(WORKER_COMMAND, tmp_path, forked=[])
    worker = workers.start(task_of("hangs"))
    worker.release(limit_s=LIMIT_S)
    workers._server._process.kill()
    assert worker.wait(deadline=None)["status"] == "crash"
    assert workers.run(task_of("mlp"), limit_s=LIMIT_S)["status"] == "ok"
    assert workers._server is None or workers._forked is None
    workers.end_all()


def test_workers_and_server_end_when_their_parent_is_killed(tmp_path):
    program = """
import json, sys, time
from pathlib import Path
from gnnpred.collect.workers import WORKER_COMMAND, Workers
workers = Workers(WORKER_COMMAND, Path(sys.argv[1]), forked=[])
worker = workers.start(json.loads(sys.argv[2]))
worker.release(limit_s=600)
print(worker._process.pid, workers._server._process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), json.dumps(task_of("hangs"))],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    pids = [int(text) for text in parent.stdout.readline().split()]
    parent.stdout.close()
    assert all(map(is_running, pids))
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(map(is_running, pids)))


def test_a_process_with_threads_does_not_fork_workers():
    assert fork_problem() == "" or "threads" in fork_problem()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert "threads" in fork_problem()
    release.set()
    thread.join()


def test_threads_of_the_linear_algebra_do_not_keep_the_server_from_forking(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "3"}
    server = ForkServer(["timm"], environment=environment, log=tmp_path / "log")
    server.close()


def test_a_server_that_cannot_start_says_so(tmp_path):
    with pytest.raises(ForkError, match="ended"):
        ForkServer([], environment={"PYTHONPATH": str(tmp_path), "PYTHONHOME": str(tmp_path)}, log=tmp_path / "log")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition):
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)
