"""`gnnpred tune` with several workers and several objectives, through its arguments."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("optuna")

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from gnnpred.training.recipe import find_recipe, load_recipe
from gnnpred.training.search_space import default_space, load_space
from gnnpred.training.tuning.pruning import FINISHED
from gnnpred.training.tuning.study import Search, open_study
from gnnpred.training.tuning.workers import LocalPool, run_on_workers

pytestmark = pytest.mark.train
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def arguments(datasets, work, tmp_path):
    return ["tune", "--recipe", "smoke", "--datasets", datasets, "--work", work, "--out", tmp_path / "out",
            "--storage", f"journal:{tmp_path / 'study.log'}"]  # fmt: skip


def trials_of(tmp_path: Path) -> list[optuna.trial.FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    return optuna.load_study(study_name="smoke", storage=storage).trials


def test_two_workers_run_the_trials_of_one_command(cli, arguments, tmp_path):
    outcome = cli(*arguments, "--workers", 2, "--trials", 3)
    assert outcome.code == 0, outcome.err
    trials = trials_of(tmp_path)
    assert len(trials) == 3
    assert all(trial.state in FINISHED for trial in trials)
    # the last to end may be pruned, for then the two startup trials are there to compare with
    assert sum(trial.state is TrialState.COMPLETE for trial in trials) >= 2
    assert len({trial.user_attrs["worker"] for trial in trials}) == 2
    assert trials[0].params["train.learning_rate"] == load_recipe(find_recipe("smoke")).train.learning_rate
    assert sorted(line.split()[:3] for line in outcome.err.replace(",", "").splitlines()) == [
        ["trial", str(trial.number), trial.state.name.lower()] for trial in trials
    ]


def test_a_killed_worker_is_replaced_and_its_trial_runs_again(datasets, work, tmp_path):
    recipe = load_recipe(find_recipe("smoke"))
    search = Search(
        recipe=recipe, space=load_space(default_space("smoke"), recipe), objectives=("error",), datasets=datasets,
        work=work, storage=f"journal:{tmp_path / 'study.log'}", study_name="smoke",
    )  # fmt: skip
    digests = search.digests()
    study = open_study(search, digests)

    class Murderous(LocalPool):
        """Kills the first worker that has begun a trial."""

        victim = ""

        def run_trial(self, worker):
            super().run_trial(worker)
            if not self.victim:
                self.victim = worker
                process = self._processes[worker]
                while not [trial for trial in study.trials if trial.user_attrs.get("worker") == worker]:
                    time.sleep(0.01)
                os.kill(process.pid, signal.SIGKILL)

    pool = Murderous(search, digests)
    run_on_workers(study, pool, 2, 2, lambda what, done, total: None, lambda: None)
    trials = trials_of(tmp_path)
    (lost,) = [trial for trial in trials if trial.user_attrs.get("worker") == pool.victim]
    assert lost.state is TrialState.FAIL
    (again,) = [trial for trial in trials if trial.user_attrs.get("retry_of") == lost.number]
    assert again.state is TrialState.COMPLETE
    assert again.params.items() >= lost.params.items()
    assert [trial.state for trial in trials].count(TrialState.COMPLETE) == 2


def living_processes(group: int) -> list[str]:
    """Processes of a group, those left aside that only wait for their parent to take notice."""
    listed = subprocess.run(["ps", "-e", "-o", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [line[-1] for line in lines if line[0] == str(group) and not line[1].startswith("Z")]


def test_an_interrupt_keeps_what_is_finished_and_leaves_no_process(arguments, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, arguments), "--workers", "2", "--trials", "1000"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # a job that a shell put into the background ignores interrupts, and would hand that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:  # fmt: skip
        first = running.stderr.readline()
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
        try:
            _, rest = running.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise
    assert "complete" in first
    assert running.returncode == 130, rest
    assert rest.splitlines()[-1] == "interrupted: finished trials are kept, the same command goes on"
    assert "Traceback" not in rest
    deadline = time.monotonic() + 60
    while living_processes(running.pid) and time.monotonic() < deadline:
        time.sleep(0.1)  # Python's own helper of spawned processes ends a moment after the command
    assert not living_processes(running.pid)
    states = [trial.state for trial in trials_of(tmp_path)]
    assert TrialState.COMPLETE in states
    assert TrialState.RUNNING not in states


def test_workers_on_a_local_ray_share_the_study(arguments, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    # in a process of its own: one that was at this instance loses its actors at the next (seen with Ray 2.60)
    command = [
        sys.executable,
        ROOT / "cli.py",
        *arguments,
        "--engine",
        "ray",
        "--workers",
        "2",
        "--trials",
        "2",
        "--json",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_complete"] == 2
    trials = trials_of(tmp_path)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 2
    assert all(":ray-" in trial.user_attrs["worker"] for trial in trials)


def test_a_front_of_recipes_for_several_objectives(cli, arguments, tmp_path):
    outcome = cli(*arguments, "--trials", 2, "--objectives", "error,latency,size", "--json")
    assert outcome.code == 0, outcome.err
    answer = json.loads(outcome.out)  # and nothing else on standard output
    assert answer["objectives"] == ["error", "latency", "size"]
    out = tmp_path / "out"
    with (out / "trials.csv").open(encoding="utf-8", newline="") as file:
        default, other = csv.DictReader(file)
    assert float(default["latency_ratio"]) == 1.0
    assert float(other["latency_ratio"]) > 0
    assert int(default["size_bytes"]) > 1000
    front = {trial["trial"] for trial in answer["front"]}
    assert front == {int(row["trial"]) for row in (default, other) if row["on_front"] == "1"}
    assert {path.name for path in (out / "pareto").iterdir()} == {f"{number}.toml" for number in front}
    for trial in answer["front"]:
        recipe = load_recipe(out / "pareto" / f"{trial['trial']}.toml")
        assert recipe.train.model.width == trial["params"]["train.model.width"]
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    again = cli(*arguments, "--trials", 2, "--objectives", "error,latency,size")  # has them: shows them
    assert again.code == 0
    assert "Pareto front" in again.out
    refused = cli(*arguments, "--trials", 2)
    assert refused.code == 2
    assert refused.is_one_error_line(), refused
    assert "is of the objectives error,latency,size" in refused.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--objectives", "error,speed"), "unknown objective 'speed'"),
        (("--objectives", "size"), "the error must be among the objectives"),
        (("--engine", "slurm"), "unknown engine 'slurm'"),
        (("--ray-address", "auto"), "--ray-address goes with --engine ray"),
        (("--storage", "sqlite://", "--workers", 2), "cannot share an SQLite database in memory"),
        (("--workers", 0), "--workers"),
    ],
)
def test_wrong_options_are_one_line(cli, arguments, options, text):
    outcome = cli(*arguments, *options)
    assert outcome.code == 2, outcome
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err


@pytest.mark.parametrize(
    ("storage", "code", "text"),
    [
        ("sqlite:///study.db", 2, "on a file system that all of them mount"),
        ("journal:{}/a.log", 1, "no Ray cluster answers at"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_one_line(cli, arguments, tmp_path, storage, code, text):
    pytest.importorskip("ray", reason="ray is not installed")
    outcome = cli(*arguments, "--storage", storage.format(tmp_path), "--engine", "ray", "--ray-address", "127.0.0.1:1")
    assert outcome.code == code, outcome
    assert outcome.err.splitlines()[-1].startswith("error: "), outcome
    assert text in outcome.err
