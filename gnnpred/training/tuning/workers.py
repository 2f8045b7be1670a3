"""Several workers of one command on one study: each runs a trial at a time in a process of its own.

What workers find goes to the storage alone. The command hands out trials until there are enough, and sees to those
whose worker died.
"""

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
from optuna.trial import TrialState

from gnnpred.errors import GnnpredError
from gnnpred.training.experiments import Progress, load_encoded_corpus
from gnnpred.training.tuning.interrupts import interrupts_ignored
from gnnpred.training.tuning.objective import Objective
from gnnpred.training.tuning.storage import fail_and_retry, quiet_optuna, storage_errors
from gnnpred.training.tuning.study import WORKER, Search, join_study, num_finished, run_one_trial

POLL_S = 1.0
MAX_DEATHS = 3  # of workers one after another, with no trial finished in between
END_S = 20.0  # for a worker that is told to end to queue its trial again
_RUN = "run"


class TrialWorker:
    """Holds the corpus and runs trials, in whatever process it was made."""

    def __init__(self, search: Search, digests: dict[str, str], name: str) -> None:
        self._search, self._name = search, name
        with quiet_optuna(), storage_errors(search.storage):
            corpus = load_encoded_corpus(search.datasets, search.recipe, search.work, 1, _silent, with_blind=False)
            self._objective = Objective(corpus, search.recipe, search.space, _silent, search.objectives)
            self._study = join_study(search, digests)

    def run_trial(self) -> None:
        with quiet_optuna(), storage_errors(self._search.storage):
            run_one_trial(self._study, self._objective, self._search, worker=self._name)


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Event:
    """Something that a worker told, or that its silence did."""

    worker: str
    has_died: bool = False  # otherwise it waits for a trial
    reason: str = ""  # of its death


class WorkerPool(Protocol):
    """Processes that run trials, here or on other machines."""

    def start(self) -> str:
        """Begin to make another worker; returns its name."""
        ...

    def run_trial(self, worker: str) -> None:
        """Let a worker that waits run a trial."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """What happens next, nothing after ``timeout_s``; raises the error that a worker ended with."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


def run_on_workers(
    study: optuna.Study,
    pool: WorkerPool,
    num_workers: int,
    trials: int,
    on_progress: Progress,
    on_change: Callable[[], None],
) -> None:
    """Have up to ``num_workers`` workers run trials until the study has ``trials`` finished ones, others' included.

    No more are begun than that; those begun are waited for. A worker that dies is replaced and its trial queued again.
    Raises GnnpredError where they die one after another. ``on_change`` is called every ``POLL_S`` or sooner.
    """
    running: set[str] = set()
    waiting: list[str] = []
    deaths = 0
    try:
        for _ in range(min(num_workers, max(1, trials - num_finished(study)))):
            pool.start()
        while True:
            finished = num_finished(study)
            on_progress("trials", min(finished, trials), trials)
            on_change()
            while waiting and finished + len(running) < trials:
                worker = waiting.pop()
                running.add(worker)
                pool.run_trial(worker)
            if finished >= trials and not running:
                return
            for event in pool.wait(POLL_S):
                if event.has_died:
                    deaths += 1
                    _requeue(study, event.worker)
                    if deaths >= MAX_DEATHS:
                        raise GnnpredError(f"workers end before they finish a trial: {event.reason}")
                    pool.start()
                else:
                    deaths = 0 if event.worker in running else deaths
                    waiting.append(event.worker)
                running.discard(event.worker)
    finally:
        pool.close()
        for worker in running:
            _requeue(study, worker)


def _requeue(study: optuna.Study, worker: str) -> None:
    """What a worker that has ended left running is queued again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.user_attrs.get(WORKER) == worker:
            fail_and_retry(study, trial.number)


# -- processes on this machine -----------------------------------------------------------------------
class LocalPool:
    """Spawned processes, each told through a pipe when to run a trial."""

    def __init__(self, search: Search, digests: dict[str, str]) -> None:
        self._search, self._digests = search, digests
        self._context = multiprocessing.get_context("spawn")
        self._numbers = itertools.count()
        self._processes: dict[str, Any] = {}
        self._connections: dict[str, multiprocessing.connection.Connection] = {}

    def start(self) -> str:
        worker = worker_name(os.getpid(), next(self._numbers))
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(self._search, self._digests, worker, theirs), name=worker, daemon=True
        )
        with interrupts_ignored():  # Ctrl-C reaches this process alone, which ends the workers in its own way
            process.start()
        theirs.close()  # the end of the process is the end of the pipe then
        self._processes[worker], self._connections[worker] = process, ours
        return worker

    def run_trial(self, worker: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: wait() says so
            self._connections[worker].send(_RUN)

    def wait(self, timeout_s: float) -> list[Event]:
        names = {connection: worker for worker, connection in self._connections.items()}
        events = []
        for connection in multiprocessing.connection.wait(list(names), timeout_s):
            worker = names[connection]
            try:
                error = connection.recv()
            except (EOFError, ConnectionResetError):
                events.append(Event(worker, has_died=True, reason=self._end_of(worker)))
                continue
            if error is not None:
                raise error
            events.append(Event(worker))
        return events

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(END_S)
            process.kill()
            process.join()

    def _end_of(self, worker: str) -> str:
        process = self._processes.pop(worker)
        self._connections.pop(worker).close()
        process.join(END_S)
        hint = " (the system may have run out of memory)" if process.exitcode == -9 else ""
        return f"the last one ended with exit code {process.exitcode}{hint}"


def worker_name(command: int | str, number: int) -> str:
    """Unlike that of any other worker of the study."""
    return f"{socket.gethostname()}:{command}:{number}"


def _serve(
    search: Search, digests: dict[str, str], name: str, connection: multiprocessing.connection.Connection
) -> None:
    """The life of a worker process; what it sends is None when it waits for a trial, or the error that it ends with."""
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.simplefilter("ignore")  # would be printed across the display
    try:
        worker = TrialWorker(search, digests, name)
        connection.send(None)
        while connection.recv() == _RUN:
            worker.run_trial()
            connection.send(None)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the command has ended, or ends this worker
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            connection.send(portable_error(error))


def _interrupt(signum: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def portable_error(error: Exception) -> Exception:
    """An error as another process can raise it, with the traceback of this one as a note."""
    if isinstance(error, GnnpredError):
        return error
    portable = RuntimeError(f"{type(error).__name__} in a worker: {error}")
    portable.add_note(traceback.format_exc())
    return portable
