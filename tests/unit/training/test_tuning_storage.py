"""Journal files: what names one, who may read it, what becomes of trials whose worker is gone."""

import time

import pytest

pytest.importorskip("optuna")
pytest.importorskip("torch_geometric")

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.training.tuning import storage as storages
from gnnpred.training.tuning.storage import (
    absolute_storage,
    fail_stale,
    is_one_machine,
    is_one_process,
    journal_path,
    open_storage,
    signed,
)

pytestmark = pytest.mark.train


@pytest.fixture
def study(tmp_path):
    return optuna.create_study(storage=open_storage(f"journal:{tmp_path / 'study.log'}"), study_name="s")


@pytest.mark.parametrize(
    ("storage", "name"),
    [
        ("journal:runs/a.db", "runs/a.db"),
        ("runs/a.log", "runs/a.log"),
        ("a.journal", "a.journal"),
        ("sqlite:///a.log", None),
        ("a.db", None),
    ],
)
def test_what_names_a_journal(storage, name):
    path = journal_path(storage)
    assert (path and path.as_posix()) == name


def test_a_journal_without_a_name_is_refused():
    with pytest.raises(UsageError, match="names no file"):
        journal_path("journal:")


def test_storages_of_one_process_and_of_one_machine():
    assert is_one_process("sqlite://")
    assert is_one_process("sqlite:///:memory:")
    assert not is_one_process("sqlite:///a.db")
    assert not is_one_process("a.log")
    assert is_one_machine("sqlite:///a.db")
    assert not is_one_machine("a.log")
    assert not is_one_machine("postgresql://me@host/name")


def test_workers_that_start_elsewhere_find_the_same_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_storage("a.log") == f"journal:{tmp_path / 'a.log'}"
    assert absolute_storage("sqlite:///b.db") == f"sqlite:///{tmp_path / 'b.db'}"
    assert absolute_storage("postgresql://me:secret@host/name") == "postgresql://me:secret@host/name"


def test_plain_optuna_reads_and_writes_the_journal(study, tmp_path):
    study.add_trial(optuna.trial.create_trial(value=1.5))
    plain = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    loaded = optuna.load_study(study_name="s", storage=plain)
    assert [trial.value for trial in loaded.trials] == [1.5]
    loaded.add_trial(optuna.trial.create_trial(value=0.5))
    assert study.best_value == 0.5


@pytest.mark.parametrize(
    "torn", [b"{", b'{"op_code":4,"worker_id":"ab', b'{"op_code":4,"worker_id":"ab","study_id":0}']
)
def test_a_line_that_a_killed_writer_did_not_finish_costs_no_other(study, tmp_path, torn):
    study.add_trial(optuna.trial.create_trial(value=1.5))
    with (tmp_path / "study.log").open("ab") as journal:
        journal.write(torn)
    again = optuna.load_study(study_name="s", storage=open_storage(f"journal:{tmp_path / 'study.log'}"))
    again.add_trial(optuna.trial.create_trial(value=2.5))
    plain = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    loaded = optuna.load_study(study_name="s", storage=plain)
    assert [trial.value for trial in loaded.trials] == [1.5, 2.5]
    assert [trial.value for trial in study.trials] == [1.5, 2.5]  # as does a worker that has read on from before


@pytest.mark.parametrize("content", [b"no journal", b"12:00 server started\n12:01 server"])
def test_a_file_that_only_looks_like_a_torn_journal_is_left_alone(tmp_path, content):
    path = tmp_path / "server.log"
    path.write_bytes(content)
    with pytest.raises(GnnpredError, match="is not a journal of Optuna"):
        optuna.create_study(storage=open_storage(str(path)), study_name="s")
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["server.log"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"12:00 server started\n12:01 server stopped\n", "is not a journal of Optuna"),
        (b'{"level": "info"}\n{"level": "warning"}\n', "is not a journal of Optuna"),
        (b"[1, 2]\n[3]\n", "is not a journal of Optuna"),
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path, content, text):
    path = tmp_path / "server.log"
    path.write_bytes(content)
    with pytest.raises(GnnpredError, match=text):
        open_storage(str(path))
    assert path.read_bytes() == content


def test_a_journal_that_cannot_be_reached(tmp_path):
    with pytest.raises(GnnpredError, match=r"missing/study\.log cannot be used: No such file"):
        open_storage(str(tmp_path / "missing" / "study.log"))
    with pytest.raises(GnnpredError, match="cannot be used: Is a directory"):
        open_storage(f"journal:{tmp_path}")


def begun(study: optuna.Study, **user_attrs) -> int:
    trial = study.ask()
    trial.suggest_float("x", 0.0, 1.0)
    for name, value in user_attrs.items():
        trial.set_user_attr(name, value)
    return trial.number


def test_a_trial_that_nobody_signs_any_more_is_queued_again(study):
    now = time.time()
    dead = begun(study, signed_at=now - storages.GRACE_S - 1)
    alive = begun(study, signed_at=now - storages.GRACE_S / 2)
    of_another_program = begun(study)
    fail_stale(study)
    assert study.trials[dead].state is TrialState.FAIL
    assert study.trials[alive].state is TrialState.RUNNING
    assert study.trials[of_another_program].state is TrialState.RUNNING
    (queued,) = [trial for trial in study.trials if trial.state is TrialState.WAITING]
    assert queued.user_attrs == {"retries": 1, "retry_of": dead}
    assert study.ask().suggest_float("x", 0.0, 1.0) == study.trials[dead].params["x"]
    fail_stale(study)  # once
    assert [trial.state for trial in study.trials].count(TrialState.WAITING) == 0


def test_a_running_trial_is_signed_until_it_ends(study, monkeypatch):
    monkeypatch.setattr(storages, "HEARTBEAT_S", 0.01)
    trial = study.ask()
    with signed(trial):
        seen = set()
        deadline = time.monotonic() + 30
        while len(seen) < 3 and time.monotonic() < deadline:
            seen.add(study.trials[0].user_attrs.get("signed_at"))
    assert len(seen - {None}) >= 2
    study.tell(trial, 1.0)  # the thread has ended: nothing writes to the finished trial
    assert study.trials[0].value == 1.0


def test_signing_a_trial_that_was_given_up_ends_quietly(study, monkeypatch):
    monkeypatch.setattr(storages, "HEARTBEAT_S", 0.01)
    trial = study.ask()
    with signed(trial):
        study.tell(trial.number, state=TrialState.FAIL)
        time.sleep(0.1)
    assert study.trials[0].state is TrialState.FAIL
