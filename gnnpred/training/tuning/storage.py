"""Where a study is kept, and what a storage says when it cannot be used.

A database carries Optuna's own heartbeats. Optuna has none for a journal file, so that running trials there are signed
with a user attribute, and :func:`fail_stale` looks for those that no longer are.
"""

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from gnnpred.errors import GnnpredError, UsageError

HEARTBEAT_S = 30  # a worker signs its running trial this often
GRACE_S = 120  # a trial unsigned for this long is given to another worker
MAX_RETRIES = 3  # of one trial whose worker died
CONNECT_TIMEOUT_S = 10
NUM_OPENINGS = 5  # of a database whose tables another worker is making
JOURNAL_PREFIX = "journal:"
_JOURNAL_SUFFIXES = (".log", ".journal")
_RECORD = b'{"op_code":'  # what every line of a journal begins with
_MAX_LINE_BYTES = 1 << 20
_SIGNED = "signed_at"  # s since 1970, of the worker's clock
_TIMEOUT_ARGUMENT = {
    "pysqlite": ("timeout", 60), "psycopg2": ("connect_timeout", CONNECT_TIMEOUT_S),
    "psycopg": ("connect_timeout", CONNECT_TIMEOUT_S), "pymysql": ("connect_timeout", CONNECT_TIMEOUT_S),
    "mysqldb": ("connect_timeout", CONNECT_TIMEOUT_S),
}  # fmt: skip


def journal_path(storage: str) -> Path | None:
    """The file of ``journal:FILE``, or of a path that ends in .log or .journal; None for a database URL."""
    if storage.startswith(JOURNAL_PREFIX):
        name = storage.removeprefix(JOURNAL_PREFIX)
        if not name:
            raise UsageError("--storage journal: names no file: write journal:FILE")
        return Path(name)
    is_journal = "://" not in storage and storage.endswith(_JOURNAL_SUFFIXES)
    return Path(storage) if is_journal else None


def absolute_storage(storage: str) -> str:
    """The same storage, whatever the folder that another process starts in."""
    journal = journal_path(storage)
    if journal:
        return f"{JOURNAL_PREFIX}{journal.resolve()}"
    url = sqlalchemy.make_url(storage)
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        url = url.set(database=str(Path(url.database).resolve()))
    return url.render_as_string(hide_password=False)


def is_one_machine(storage: str) -> bool:
    """Whether workers on other machines cannot use it: SQLite's locks do not hold on network file systems."""
    return not journal_path(storage) and sqlalchemy.make_url(storage).get_backend_name() == "sqlite"


def is_one_process(storage: str) -> bool:
    """Whether it lives and ends with this process."""
    if journal_path(storage):
        return False
    url = sqlalchemy.make_url(storage)
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def open_storage(storage: str) -> optuna.storages.BaseStorage:
    """A database with heartbeats, by which a trial whose worker died is found and run again, or a journal file."""
    journal = journal_path(storage)
    return _open_journal(journal) if journal else _open_database(storage)


def _open_database(url: str) -> optuna.storages.RDBStorage:
    timeout = _TIMEOUT_ARGUMENT.get(sqlalchemy.make_url(url).get_driver_name())
    for attempt in range(NUM_OPENINGS):
        try:
            return optuna.storages.RDBStorage(
                url,
                engine_kwargs={"connect_args": dict([timeout]) if timeout else {}, "pool_pre_ping": True},
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=retry,
            )
        except sqlalchemy.exc.DBAPIError as error:
            # another worker makes the tables of a new database at this moment
            is_race = any(words in str(error.orig).lower() for words in ("already exists", "duplicate", "unique"))
            if not is_race or attempt == NUM_OPENINGS - 1:
                raise
            time.sleep(1)
    raise AssertionError("unreachable")


class _JournalLock(JournalFileOpenLock):
    """A lock file, which works on every platform (Optuna's default, a symbolic link, needs a privilege on Windows).

    Who holds it finds the journal ending in a whole line. Optuna reads over a last line that a writer did not finish,
    but the next record would be glued to it, and no later one could be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        is_held = super().acquire()
        try:
            _drop_torn_line(self._path)
        except BaseException:
            self.release()
            raise
        return is_held


def _drop_torn_line(path: Path) -> None:
    """Raises ValueError where the end of the file is no part of a journal."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        start = max(0, size - _MAX_LINE_BYTES)
        file.seek(start)
        tail = file.read()
        whole = tail.rfind(b"\n") + 1
        torn = tail[whole:]
        if not torn:
            return
        if not torn.startswith(_RECORD[: len(torn)]):
            raise ValueError("its last line is none of Optuna's")
        file.truncate(start + whole)


class _JournalFile(JournalFileBackend):
    """Optuna's journal file, whose errors are one line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _journal_errors(path):
            super().__init__(str(path), lock_obj=_JournalLock(path))

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        with _journal_errors(self._path):
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with _journal_errors(self._path):
            super().append_logs(logs)


@contextmanager
def _journal_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GnnpredError(f"the storage {path} cannot be used: {error.strerror or error}") from error
    except ValueError as error:
        raise GnnpredError(f"the storage {path} is not a journal of Optuna, or it is damaged") from error


def _open_journal(path: Path) -> optuna.storages.JournalStorage:
    try:
        return optuna.storages.JournalStorage(_JournalFile(path))
    except (KeyError, TypeError, AttributeError, AssertionError) as error:  # lines of JSON that are something else
        raise GnnpredError(f"the storage {path} is not a journal of Optuna, or it is damaged") from error


@contextmanager
def signed(trial: Trial) -> Iterator[None]:
    """Sign a running trial of a journal every ``HEARTBEAT_S``."""
    ended = threading.Event()

    def sign() -> None:
        # a trial that another worker has given up needs no signature, and a full disk stops the trial itself
        with suppress(UpdateFinishedTrialError, GnnpredError):
            while not ended.is_set():
                trial.set_user_attr(_SIGNED, time.time())
                ended.wait(HEARTBEAT_S)

    thread = threading.Thread(target=sign, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def fail_stale(study: optuna.Study) -> None:
    """Mark trials of a journal that nobody has signed for ``GRACE_S`` as failed and queue them again."""
    now = time.time()
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if now - trial.user_attrs.get(_SIGNED, now) > GRACE_S:
            fail_and_retry(study, trial.number)


def fail_and_retry(study: optuna.Study, number: int) -> None:
    """Mark a running trial as failed and queue its parameters again, unless it has finished meanwhile."""
    with suppress(ValueError, UpdateFinishedTrialError):  # finished, or another worker did the same: it queues them
        study.tell(number, state=TrialState.FAIL)
        retry(study, study.get_trials(deepcopy=False)[number])


def retry(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the parameters of a trial that did not finish, unless it was tried too often."""
    retries = trial.user_attrs.get("retries", 0)
    params = trial.params or trial.system_attrs.get("fixed_params", {})
    if params and retries < MAX_RETRIES:
        kept = {key: trial.user_attrs[key] for key in ("is_default",) if key in trial.user_attrs}
        study.enqueue_trial(params, user_attrs={**kept, "retries": retries + 1, "retry_of": trial.number})


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Progress and errors are ours to print."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


@contextmanager
def storage_errors(storage: str) -> Iterator[None]:
    """Whatever a database says, as one line without its password."""
    try:
        yield
    except (sqlalchemy.exc.NoSuchModuleError, ImportError) as error:
        if isinstance(error, ImportError) and "DB access module" not in str(error):
            raise
        wanted = "a database that SQLAlchemy knows"
        if isinstance(error, ImportError):
            wanted = f"the Python package {sqlalchemy.make_url(storage).get_driver_name()}"
        raise UsageError(f"no driver for the storage {shown_storage(storage)}: it needs {wanted}") from error
    except sqlalchemy.exc.ArgumentError as error:
        raise UsageError(
            "--storage is not a database URL or a journal: write sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME "
            "or journal:FILE"
        ) from error
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).strip().splitlines()[0]
        raise GnnpredError(f"the storage {shown_storage(storage)} cannot be used: {reason}") from error


def shown_storage(storage: str) -> str:
    """The storage without its password."""
    journal = journal_path(storage)
    if journal:
        return f"{JOURNAL_PREFIX}{journal}"
    return sqlalchemy.make_url(storage).render_as_string(hide_password=True)
