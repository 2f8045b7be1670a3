"""Two nodes, here two processes of one machine that meet as torchrun lets them: one folder, rows of two nodes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gnnpred.collect.nodes import NodePlace
from gnnpred.errors import UsageError
from tests.unit.collect.test_runner import table

pytestmark = pytest.mark.models
ROOT = Path(__file__).resolve().parents[3]
MODELS = Path(__file__).with_name("small_modules.py")
PLACE = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29400"}
LIMIT_S = 900


def start_node(node, port, recipe, out):
    place = {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "gnnpred", "collect", "--recipe", str(recipe), "--out", str(out), "--device", "cpu"],
        env={**os.environ, **place, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def write_recipe(folder, models, more=""):
    path = folder / "nodes.toml"
    names = ", ".join(f'"{MODELS}:{model}"' for model in models)
    path.write_text(
        "[measure]\nsteps = 3\nmax_warmup_steps = 5\nmax_warmup_s = 0.1\ntime_limit_s = 600\n"
        f"[[sweep]]\nmodels = [{names}]\nbatch_sizes = [2]\ngpus = [2]\nnodes = [2]\n{more}"
    )
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="names Linux's loopback interface")
def test_ranks_on_two_nodes_measure_one_step_and_the_first_keeps_the_rows(tmp_path):
    pytest.importorskip("torch")
    recipe = write_recipe(tmp_path, ["mlp", "fails_in_rank_1"])
    port = free_port()
    first, second = (start_node(node, port, recipe, tmp_path / f"out{node}") for node in range(2))
    for process in (first, second):
        _, error = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, error
    assert not (tmp_path / "out1").exists()
    (row,) = table(tmp_path / "out0" / "runs.csv")
    assert (row["gpus"], row["nodes"], row["strategy"]) == ("2", "2", "ddp")
    assert float(row["step_time_slowest_ms"]) > 0
    (failed,) = table(tmp_path / "out0" / "failed.csv")
    assert failed["reason"] == "rank 1: ValueError: not here"


@pytest.mark.skipif(sys.platform != "linux", reason="names Linux's loopback interface")
def test_a_node_ends_with_one_line_when_the_first_is_killed(tmp_path):
    pytest.importorskip("torch")
    recipe = write_recipe(tmp_path, ["hangs"])
    port = free_port()
    first, second = (start_node(node, port, recipe, tmp_path / "out") for node in range(2))
    while not (tmp_path / "out" / "device.toml").exists():  # they have met
        assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    _, error = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 1
    assert "lost the first node at 127.0.0.1" in error
    assert "Traceback" not in error


def test_a_process_that_no_one_placed_is_the_only_node():
    assert NodePlace.of_environment({}) is None
    assert NodePlace.of_environment({"WORLD_SIZE": "1", "MASTER_ADDR": "head"}) is None
    assert NodePlace.of_environment(PLACE) == NodePlace(node=1, num_nodes=2, address="head:29400")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, "--nproc-per-node=1"),
        ({"MASTER_PORT": "x"}, "must all be set"),
        ({"WORLD_SIZE": "two"}, "must all be set"),
    ],
)
def test_several_processes_per_node_and_half_a_place_are_refused(changes, words):
    environment = {**PLACE, **changes}
    if environment["MASTER_PORT"] == "x":
        del environment["MASTER_PORT"]
    with pytest.raises(UsageError, match=words):
        NodePlace.of_environment(environment)
