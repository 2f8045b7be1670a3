"""Handing out trials to workers, on workers that run in this process."""

from datetime import datetime, timedelta

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("optuna")

import optuna
from optuna.trial import TrialState

from gnnpred.errors import GnnpredError
from gnnpred.training.tuning.trials import trial_rows
from gnnpred.training.tuning.workers import MAX_DEATHS, Event, portable_error, run_on_workers

pytestmark = pytest.mark.train


class Pool:
    """Workers that begin a trial when told, and end it, or die, at the next wait."""

    def __init__(self, study: optuna.Study, *, dying: int = 0) -> None:
        self.study, self.dying = study, dying
        self.events: list[Event] = []
        self.busy: list[tuple[str, optuna.Trial]] = []
        self.num_started = self.most_at_once = 0
        self.is_closed = False

    def start(self) -> str:
        name = f"worker {self.num_started}"
        self.num_started += 1
        self.events.append(Event(name))
        return name

    def run_trial(self, worker: str) -> None:
        trial = self.study.ask()
        trial.set_user_attr("worker", worker)
        trial.suggest_float("x", 0.0, 1.0)
        self.busy.append((worker, trial))
        self.most_at_once = max(self.most_at_once, len(self.busy))

    def wait(self, timeout_s: float) -> list[Event]:
        if self.events:
            events, self.events = self.events, []
            return events
        worker, trial = self.busy.pop(0)
        if self.dying:
            self.dying -= 1
            return [Event(worker, has_died=True, reason="exit code -9")]
        self.study.tell(trial, 1.0)
        return [Event(worker)]

    def close(self) -> None:
        self.is_closed = True


def run(study: optuna.Study, pool: Pool, *, workers: int = 2, trials: int, on_change=lambda: None) -> None:
    run_on_workers(study, pool, workers, trials, lambda what, done, total: None, on_change)
    assert pool.is_closed


@pytest.mark.parametrize("trials", [1, 2, 5])
def test_as_many_trials_as_asked_for_are_begun(trials):
    study = optuna.create_study()
    pool = Pool(study)
    run(study, pool, trials=trials)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * trials
    assert pool.most_at_once == min(2, trials)
    assert pool.num_started == min(2, trials)


def test_trials_of_other_commands_count():
    study = optuna.create_study()
    study.add_trial(optuna.trial.create_trial(value=2.0))
    run(study, Pool(study), trials=3)
    assert len(study.trials) == 3


def test_the_trial_of_a_worker_that_died_runs_again_on_another():
    study = optuna.create_study()
    pool = Pool(study, dying=1)
    run(study, pool, trials=3)
    assert pool.num_started == 3
    (lost,) = [trial for trial in study.trials if trial.state is TrialState.FAIL]
    (again,) = [trial for trial in study.trials if trial.user_attrs.get("retry_of") == lost.number]
    assert again.state is TrialState.COMPLETE
    assert again.params == lost.params
    assert [trial.state for trial in study.trials].count(TrialState.COMPLETE) == 3


def test_workers_that_die_one_after_another_end_the_command():
    study = optuna.create_study()
    pool = Pool(study, dying=100)
    with pytest.raises(GnnpredError, match="workers end before they finish a trial: exit code -9"):
        run(study, pool, workers=1, trials=3)
    assert pool.is_closed
    assert pool.num_started == MAX_DEATHS
    assert TrialState.RUNNING not in [trial.state for trial in study.trials]


def test_an_interrupt_ends_the_workers_and_queues_what_they_ran():
    study = optuna.create_study()
    pool = Pool(study)

    def interrupt():
        if any(trial.state is TrialState.COMPLETE for trial in study.trials):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(study, pool, trials=10, on_change=interrupt)
    assert pool.is_closed
    states = [trial.state for trial in study.trials]
    assert states.count(TrialState.COMPLETE) == 1
    assert states.count(TrialState.FAIL) == 1
    assert states.count(TrialState.WAITING) == 1
    assert TrialState.RUNNING not in states


def test_an_error_of_a_worker_names_itself_and_brings_its_traceback():
    expected = GnnpredError("the disk is full")
    assert portable_error(expected) is expected
    try:
        _ = {}["missing"]
    except KeyError as error:
        portable = portable_error(error)
    assert str(portable) == "KeyError in a worker: 'missing'"
    assert "Traceback" in portable.__notes__[0]


def test_rows_say_how_far_trials_are_and_what_was_best_when_they_ended():
    now = datetime(2026, 1, 1)
    study = optuna.create_study()

    def add(state, minutes, value=None, errors=()):
        trial = optuna.trial.create_trial(
            state=state, value=value, intermediate_values=dict(enumerate(errors)), params={}, distributions={}
        )
        trial.datetime_start = now
        trial.datetime_complete = now + timedelta(minutes=minutes) if state.is_finished() else None
        study.add_trial(trial)

    add(TrialState.COMPLETE, 9, 20.0, [30.0, 31.0, 22.0, 20.0])
    add(TrialState.COMPLETE, 5, 25.0, [30.0, 31.0, 22.0, 25.0])
    add(TrialState.PRUNED, 7, errors=[40.0, 41.0])
    add(TrialState.RUNNING, 0, errors=[35.0])
    add(TrialState.WAITING, 0)
    rows = trial_rows(study, num_stages=2, num_folds=2)
    assert [(r.number, r.state, r.stage, r.fold, r.error_pct, r.best_error_pct, r.seconds) for r in rows] == [
        (0, "complete", 2, 2, 20.0, 20.0, 540.0),
        (1, "complete", 2, 2, 25.0, 25.0, 300.0),
        (2, "pruned", 1, 2, 41.0, 25.0, 420.0),
        (3, "running", 1, 2, 35.0, 20.0, None),
    ]
