"""`gnnpred tune` through its arguments, on a corpus of five tiny families."""

import csv
import os
import shutil
import signal
import socket
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

from gnnpred.training.recipe import find_recipe, load_recipe

pytestmark = pytest.mark.train
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def arguments(datasets, work, tmp_path):
    """Options of a study in a file of its own."""
    return ["tune", "--recipe", "smoke", "--datasets", datasets, "--work", work, "--out", tmp_path / "out",
            "--storage", f"sqlite:///{tmp_path / 'study.db'}"]  # fmt: skip


def trials_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_two_trials_leave_a_recipe_that_trains(cli, arguments, datasets, work, tmp_path):
    outcome = cli(*arguments, "--trials", 2, "--test-seeds", 1)
    assert outcome.code == 0, outcome.err
    assert "nothing: the recipe itself" in outcome.out
    assert "untouched families, tuned:" in outcome.out
    out = tmp_path / "out"
    for name in ("history.png", "importances.png", "parallel.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG"), name
    first, second = trials_in(out)
    assert (first["state"], second["state"]) == ("complete", "complete")
    assert float(first["train.learning_rate"]) == load_recipe(find_recipe("smoke")).train.learning_rate
    assert second["train.learning_rate"] != first["train.learning_rate"]
    folds = [float(value) for name, value in first.items() if name.startswith("fold_")]
    assert len(folds) == 4
    assert float(first["error_pct"]) == pytest.approx(sum(folds) / 4, abs=1e-3)
    best = min((first, second), key=lambda trial: float(trial["error_pct"]))
    recipe = load_recipe(out / "best.toml")
    assert recipe.train.learning_rate == float(best["train.learning_rate"])
    assert recipe.train.model.width == int(best["train.model.width"])

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    shutil.copy(ROOT / "checkpoints" / "base" / "intervals.json", checkpoint)
    trained = cli("train", "--recipe", out / "best.toml", "--datasets", datasets, "--work", work, "--out", checkpoint,
                  "--workers", 1)  # fmt: skip
    assert trained.code == 0, trained.err
    assert "checkpoint written" in trained.out


def test_a_recipe_that_is_best_comes_back_unchanged(cli, arguments, tmp_path):
    assert cli(*arguments, "--trials", 1).code == 0
    assert load_recipe(tmp_path / "out" / "best.toml") == load_recipe(find_recipe("smoke"))


def test_the_best_trials_are_confirmed_with_other_seeds(cli, arguments, tmp_path):
    outcome = cli(*arguments, "--trials", 2, "--confirm", 1)
    assert outcome.code == 0, outcome.err
    assert "other seeds %" in outcome.out
    assert "the recipe itself with other seeds: " in outcome.out
    trials = trials_in(tmp_path / "out")
    best_by_own_seed = min(trials, key=lambda trial: float(trial["error_pct"]))
    confirmed = [trial for trial in trials if trial["confirmed_error_pct"]]
    assert trials[0] in confirmed
    assert best_by_own_seed in confirmed
    best = min(confirmed, key=lambda trial: float(trial["confirmed_error_pct"]))
    assert best["confirmed_error_pct"] != best["error_pct"]
    learning_rate = load_recipe(tmp_path / "out" / "best.toml").train.learning_rate
    assert learning_rate == float(best["train.learning_rate"])
    assert f"best: trial {best['trial']}, " in outcome.out


def test_a_study_goes_on_where_it_stopped(cli, arguments, tmp_path, monkeypatch):
    assert cli(*arguments, "--trials", 1).code == 0
    (before,) = trials_in(tmp_path / "out")
    assert cli(*arguments, "--trials", 3).code == 0
    after = trials_in(tmp_path / "out")
    assert len(after) == 3
    assert after[0] == before
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr("gnnpred.training.tune.load_encoded_corpus", None)  # has them: nothing is read or trained
    outcome = cli(*arguments, "--trials", 2)
    assert outcome.code == 0, outcome.err
    assert trials_in(tmp_path / "out") == after


# A worker that signs its trial every second, so that its death is seen within the test.
WORKER = """
import sys
from gnnpred.training.tuning import objective, storage
storage.HEARTBEAT_S, storage.GRACE_S = 1, 2
if sys.argv[1] == "slow":
    import time
    error_pct = objective.Objective.error_pct
    def slow(self, *arguments, **options):
        if self.num_done >= 10:  # the first trial has 8 folds; then the second one never ends
            print("second trial", flush=True)
            time.sleep(600)
        self.num_done += 1
        return error_pct(self, *arguments, **options)
    objective.Objective.num_done = 0
    objective.Objective.error_pct = slow
from gnnpred.cli import run
sys.exit(run(sys.argv[2:]))
"""


def plain_storage(text: str) -> str | JournalStorage:
    """The storage as Optuna's own tools open it."""
    file = text.removeprefix("journal:")
    return text if file == text else JournalStorage(JournalFileBackend(file))


@pytest.mark.parametrize("kind", ["sqlite:///", "journal:"])
def test_a_killed_worker_loses_its_running_trial_alone_and_that_is_run_again(arguments, tmp_path, kind):
    arguments = [*arguments[:-1], f"{kind}{tmp_path / 'study'}"]
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), "slow", *map(str, arguments), "--trials", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout.readline() == b"second trial\n", worker.stderr.read()
        worker.send_signal(signal.SIGKILL)
    storage = arguments[arguments.index("--storage") + 1]
    kept, killed = optuna.load_study(study_name="smoke", storage=plain_storage(storage)).trials
    assert kept.state is optuna.trial.TrialState.COMPLETE
    assert killed.state is optuna.trial.TrialState.RUNNING
    time.sleep(3)
    command[2] = "plain"
    resumed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert resumed.returncode == 0, resumed.stderr
    trials = optuna.load_study(study_name="smoke", storage=plain_storage(storage)).trials
    assert trials[0].value == kept.value
    assert trials[1].state is optuna.trial.TrialState.FAIL
    (again,) = [trial for trial in trials if trial.user_attrs.get("retry_of") == 1]
    assert again.params == killed.params
    assert again.state in (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)


def test_a_study_of_another_search_is_refused(cli, arguments, tmp_path):
    assert cli(*arguments, "--trials", 1).code == 0
    space = tmp_path / "space.toml"
    text = find_recipe("smoke").with_name("smoke_search_space.toml").read_text()
    space.write_text(text.replace("high = 32", "high = 64"))
    outcome = cli(*arguments, "--trials", 2, "--space", space)
    assert outcome.code == 2
    assert outcome.is_one_error_line(), outcome
    assert "is of another search space" in outcome.err
    recipe = tmp_path / "smoke.toml"
    recipe.write_text(find_recipe("smoke").read_text().replace("epochs = 2", "epochs = 3"))
    changed = [recipe if argument == "smoke" else argument for argument in arguments]
    outcome = cli(*changed, "--trials", 2)
    assert outcome.code == 2
    assert outcome.is_one_error_line(), outcome
    assert "is of another recipe" in outcome.err
    assert len(trials_in(tmp_path / "out")) == 1


def test_a_study_that_tune_did_not_make_is_refused(cli, arguments):
    storage = arguments[arguments.index("--storage") + 1]
    study = optuna.create_study(study_name="smoke", storage=storage)
    study.add_trial(optuna.trial.create_trial(value=1.0))
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert outcome.is_one_error_line(), outcome
    assert "did not make" in outcome.err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("storage", "code", "text"),
    [
        ("sqlite:////no/such/folder/study.db", 1, "unable to open database file"),
        ("study.db", 2, "not a database URL or a journal"),
        ("journal:/no/such/folder/study.log", 1, "/no/such/folder/study.log cannot be used: No such file"),
        ("journal:", 2, "names no file"),
        (
            "mssql+pymssql://me:secret@host/name",
            2,
            "mssql+pymssql://me:***@host/name: it needs the Python package pymssql",
        ),
        ("nosuch://me:secret@host/name", 2, "no driver for the storage nosuch://me:***@host/name"),
    ],
)
def test_a_storage_that_cannot_be_used_is_one_line(cli, arguments, storage, code, text):
    outcome = cli(*arguments[:-1], storage)
    assert outcome.code == code, outcome
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err
    assert "secret" not in outcome.err


def test_a_database_server_that_is_not_there_is_one_line(cli, arguments):
    pytest.importorskip("psycopg")
    outcome = cli(*arguments[:-1], f"postgresql+psycopg://me:secret@127.0.0.1:{free_port()}/name")
    assert outcome.code == 1, outcome
    assert outcome.is_one_error_line(), outcome
    assert "cannot be used" in outcome.err
    assert "secret" not in outcome.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--space", "missing.toml"), "cannot read search space missing.toml"),
        (("--recipe", "missing"), "recipe 'missing' not found"),
        (("--trials", "0"), "--trials"),
        (("--out", __file__), "test_tune.py: File exists"),
        (("--work", f"{__file__}/work"), "test_tune.py/work: Not a directory"),
    ],
)
def test_wrong_options_are_one_line(cli, arguments, options, text):
    outcome = cli(*arguments, *options)
    assert outcome.code in (1, 2)
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            '"train.learning_rat" = { kind = "float", low = 1e-3, high = 1e-2 }',
            "unknown parameter",
        ),
        ('"train.learning_rate" = { kind = "float", low = 1e-2, high = 1e-3 }', "'train.learning_rate': empty range"),
    ],
)
def test_a_wrong_search_space_is_one_line(cli, arguments, tmp_path, line, text):
    space = tmp_path / "space.toml"
    shipped = find_recipe("smoke").with_name("smoke_search_space.toml").read_text()
    space.write_text(shipped.partition("[parameters]")[0] + f"[parameters]\n{line}\n")
    outcome = cli(*arguments, "--space", space)
    assert outcome.code == 1, outcome
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err
    assert "space.toml" in outcome.err
