"""Ray as the engine: an instance of its own and a cluster of this machine, both with two cores and stand-in workers."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from gnnpred.collect.recipe import Configuration, Recipe
from gnnpred.errors import GnnpredError, UsageError
from tests.unit.collect.test_runner import ROOT, WORKER, content, log, recipe_of, run  # noqa: F401  (log is a fixture)

ray = pytest.importorskip("ray", reason="needs the ray extra")
from gnnpred.collect.ray_cluster import RayCluster  # noqa: E402
from gnnpred.collect.ray_engine import RayEngine  # noqa: E402

RAY = (sys.executable, "-m", "ray.scripts.scripts")


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster that other processes can join and leave."""
    environment = pytest.MonkeyPatch()
    environment.setenv("RAY_AUTH_MODE", "disabled")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = None
    try:
        for _ in range(3):  # its processes wait 15 s for each other, too little where the machine is busy
            process = head_of(address)
            if any("Ray runtime started" in line for line in process.stdout):
                break
        assert process.poll() is None, "Ray did not start"
        yield address
    finally:
        environment.undo()
        process.terminate()
        process.communicate(timeout=60)


def head_of(address):
    host, port = address.split(":")
    return subprocess.Popen(
        [*RAY, "start", "--head", "--block", "--node-ip-address", host, "--port", port, "--num-cpus", "2",
         "--object-store-memory", "80000000", "--include-dashboard", "false", "--disable-usage-stats"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_enable_metrics_collection": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def command(log, **variables):  # noqa: F811
    """The stand-in worker with its variables: a cluster's nodes do not have this process's."""
    variables = {"STAND_IN_LOG": log, **variables}
    return ("env", *(f"{name}={value}" for name, value in variables.items()), *WORKER)


def run_on(address, recipe, out, log, *, engine=RayEngine, delay_s=0, **options):  # noqa: F811
    workers = command(log, STAND_IN_DELAY_S=delay_s)
    return run(recipe, out, make_engine=lambda _: engine(address=address, num_cpus=None if address != "local" else 2,
                                                         command=workers), **options)  # fmt: skip


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.collect.test_ray_engine import recipe_of, run_on
recipe = recipe_of("good", "crash", batches=range(1, 5))
run_on(sys.argv[4], recipe, Path(sys.argv[2]), sys.argv[3], delay_s=sys.argv[5])
"""


def start(out, log, address, *, delay_s=0.5):  # noqa: F811
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(ROOT), str(out), str(log), address, str(delay_s)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_two_lanes_of_an_own_instance_give_the_rows_of_one_without_ray(tmp_path, log):  # noqa: F811
    # in a process of its own: one that was at this instance loses its actors at the next (seen with Ray 2.60)
    process = start(tmp_path / "ray", log, "local", delay_s=0)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    run(recipe_of("good", "crash", batches=range(1, 5)), tmp_path / "plain")
    assert content(tmp_path / "ray") == content(tmp_path / "plain")


def test_a_cluster_gives_the_same_rows_and_a_second_call_measures_nothing(tmp_path, log, cluster):  # noqa: F811
    recipe = recipe_of("good", "crash", "exit", "hang", "oom", "nan", "other", batches=(1, 2), time_limit_s=5.0)
    run(recipe, tmp_path / "plain")
    report = run_on(cluster, recipe, tmp_path / "ray", log)
    assert report.by_status == {"ok": 4, "crash": 4, "timeout": 2, "oom": 2, "nan": 2}
    assert content(tmp_path / "ray") == content(tmp_path / "plain")
    begun = log.read_text()
    assert run_on(cluster, recipe, tmp_path / "ray", log).num_measured_now == 0
    assert log.read_text() == begun


class EndsSoon(RayEngine):
    """The time is over a second after measuring began, however long the cluster took until then."""

    def measure(self, tasks, *, deadline):
        assert deadline is not None
        return super().measure(tasks, deadline=time.monotonic() + 1.0)


def test_the_time_budget_ends_lanes_and_the_next_call_continues(tmp_path, log, cluster):  # noqa: F811
    recipe = recipe_of("good", batches=range(1, 5))
    first = run_on(cluster, recipe, tmp_path, log, engine=EndsSoon, delay_s=60, time_budget_s=900)
    assert (first.is_cut_off, first.num_rows) == (True, 0)
    assert run_on(cluster, recipe, tmp_path, log).num_rows == 4


def wait_for_work(process, log, num_begun):  # noqa: F811
    while process.poll() is None and log.read_text().count("\n") < num_begun:
        time.sleep(0.02)
    assert process.poll() is None, process.stderr.read()


def test_a_killed_driver_frees_the_cluster_and_the_next_call_continues(tmp_path, log, cluster):  # noqa: F811
    process = start(tmp_path / "out", log, cluster)
    wait_for_work(process, log, 3)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    recipe = recipe_of("good", "crash", batches=range(1, 5))
    report = run_on(cluster, recipe, tmp_path / "out", log)
    assert report.num_rows == 8
    assert 0 < report.num_measured_now < 8
    run(recipe, tmp_path / "plain")
    assert content(tmp_path / "out") == content(tmp_path / "plain")


def test_an_interrupt_ends_the_workers_and_leaves_the_tables(tmp_path, log, cluster):  # noqa: F811
    process = start(tmp_path / "out", log, cluster)
    wait_for_work(process, log, 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert b"KeyboardInterrupt" in process.stderr.read()
    process.stderr.close()
    begun = log.read_text()
    time.sleep(1.0)
    assert log.read_text() == begun
    rows, _, runs = content(tmp_path / "out")
    assert len(rows) >= len(runs) >= 1


class LosesLanes(RayEngine):
    """All lanes die when the first configuration is done."""

    is_over = False

    def _reply_of(self, answer):
        if not self.is_over:
            self.is_over = True
            for lane in self._cluster._lanes:
                ray.kill(lane)
        return super()._reply_of(answer)


class LosesItsNode(RayEngine):
    """Every lane but the one that looks at the node dies."""

    def _measure_alike(self, *arguments):
        new_lane = self._cluster.new_lane

        def short_lived(*needs):
            lane = new_lane(*needs)
            ray.kill(lane)
            return lane

        self._cluster.new_lane = short_lived
        return super()._measure_alike(*arguments)


def test_what_a_lost_lane_was_doing_is_done_again(tmp_path, log, cluster):  # noqa: F811
    recipe = recipe_of("good", batches=range(1, 6))
    report = run_on(cluster, recipe, tmp_path, log, engine=LosesLanes)
    assert report.by_status == {"ok": 5}
    assert log.read_text().count("\n") >= 5


def test_what_loses_its_lane_again_and_again_is_a_row(tmp_path, log, cluster):  # noqa: F811
    report = run_on(cluster, recipe_of("good"), tmp_path, log, engine=LosesItsNode)
    assert report.by_status == {"crash": 1}
    assert "its Ray node or process was lost 3 times" in (tmp_path / "failed.csv").read_text()


def test_a_node_of_another_device_is_refused(tmp_path, log, cluster):  # noqa: F811
    class OtherNode(RayEngine):
        def probe(self, *args, **options):
            reply = super().probe(*args, **options)
            self._bound = "cpu (T4)"
            return reply

    with pytest.raises(GnnpredError, match=r"has cpu \(V100\), the first one cpu \(T4\), which do not make one"):
        run_on(cluster, recipe_of("good"), tmp_path, log, engine=OtherNode)


@pytest.mark.parametrize("address", ["head", "ray://head:10001", "head:", "1.2.3.4:port"])
def test_what_is_no_address_is_told(address, tmp_path, log):  # noqa: F811
    with pytest.raises(UsageError, match="write HOST:PORT"):
        run_on(address, recipe_of("good"), tmp_path, log)


def test_an_address_without_a_cluster_is_one_line_in_bounded_time(tmp_path, log, monkeypatch):  # noqa: F811
    monkeypatch.setattr("gnnpred.collect.ray_cluster._HEALTH_LIMIT_S", 3.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(GnnpredError, match=r"no Ray cluster answers at 127\.0\.0\.1:"):
            run_on(f"127.0.0.1:{other.getsockname()[1]}", recipe_of("good"), tmp_path / "refused", log)
        other.listen()
        began = time.monotonic()
        with pytest.raises(GnnpredError, match="no Ray cluster answers"):
            run_on(f"127.0.0.1:{other.getsockname()[1]}", recipe_of("good"), tmp_path / "silent", log)
        assert time.monotonic() - began < 60
    assert not (tmp_path / "silent" / "runs.csv").exists()


class OneMachine(RayCluster):
    """Several nodes' shares of one machine."""

    def new_group(self, num_nodes, num_gpus, *, limit_s):
        group = ray.util.placement_group([{"CPU": num_gpus}] * num_nodes, strategy="PACK")
        assert group.wait(limit_s)
        return group


def test_what_needs_two_nodes_gets_a_lane_on_each_and_one_reply(tmp_path, log, cluster):  # noqa: F811
    class TwoNodes(RayEngine):
        def __init__(self, **options):
            super().__init__(**options)
            self._cluster = OneMachine(**{"accelerator": None, **options})

        def probe(self, *arguments, **options):
            reply = super().probe(*arguments, **options)
            reply["result"]["manifest"]["num_nodes"] = 2
            return reply

    configurations = [
        Configuration(model=f"x:{name}", batch_size=1, gpus=2, nodes=2, strategy="ddp")
        for name in ("good", "crash", "other")
    ]
    recipe = Recipe(name="spread", configurations=tuple(configurations))
    report = run_on(cluster, recipe, tmp_path, log, engine=TwoNodes)
    assert report.by_status == {"ok": 2, "crash": 1}
    assert sorted(log.read_text().splitlines()) == sorted(2 * [f"x:{name} 1" for name in ("good", "crash", "other")])
    with (tmp_path / "failed.csv").open() as file:
        assert "ended by SIGSEGV" in file.read()


class Nodes(RayCluster):
    """A cluster's nodes as Ray describes them."""

    def __init__(self, *resources, accelerator=None):
        super().__init__(address="auto", accelerator=accelerator, num_cpus=None, command=None)
        self._resources = resources

    def nodes(self):
        return [{"Alive": True, "Resources": each} for each in self._resources]


def test_gpus_of_several_types_are_not_mixed():
    nodes = ({"GPU": 8.0, "accelerator_type:A100": 1.0}, {"GPU": 4.0, "accelerator_type:H100": 1.0}, {"CPU": 64.0})
    with pytest.raises(UsageError, match=r"A100 \(8\), H100 \(4\).*--ray-accelerator A100"):
        Nodes(*nodes).choose_device("cuda")
    with pytest.raises(UsageError, match="'V100': the Ray cluster has A100, H100"):
        Nodes(*nodes, accelerator="V100").choose_device("cuda")
    chosen = Nodes(*nodes, accelerator="H100")
    chosen.choose_device("cuda")
    assert chosen.node_sizes() == [4]
    alike = Nodes(*nodes[::2])
    alike.choose_device("cuda")
    assert alike.node_sizes() == [8]
