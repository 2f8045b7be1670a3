"""Where a study is kept, and what a storage says when it cannot be used."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial

from gnnpred.errors import GnnpredError, UsageError

HEARTBEAT_S = 30  # a worker signs its running trial this often
GRACE_S = 120  # a trial unsigned for this long is given to another worker
MAX_RETRIES = 3  # of one trial whose worker died
CONNECT_TIMEOUT_S = 10
NUM_OPENINGS = 5  # of a database whose tables another worker is making
_TIMEOUT_ARGUMENT = {
    "pysqlite": ("timeout", 60), "psycopg2": ("connect_timeout", CONNECT_TIMEOUT_S),
    "psycopg": ("connect_timeout", CONNECT_TIMEOUT_S), "pymysql": ("connect_timeout", CONNECT_TIMEOUT_S),
    "mysqldb": ("connect_timeout", CONNECT_TIMEOUT_S),
}  # fmt: skip


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """A database with heartbeats: a trial whose worker died is found and run again."""
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
def storage_errors(url: str) -> Iterator[None]:
    """Whatever a database says, as one line without its password."""
    try:
        yield
    except (sqlalchemy.exc.NoSuchModuleError, ImportError) as error:
        if isinstance(error, ImportError) and "DB access module" not in str(error):
            raise
        wanted = "a database that SQLAlchemy knows"
        if isinstance(error, ImportError):
            wanted = f"the Python package {sqlalchemy.make_url(url).get_driver_name()}"
        raise UsageError(f"no driver for the storage {shown_storage(url)}: it needs {wanted}") from error
    except sqlalchemy.exc.ArgumentError as error:
        raise UsageError(
            "--storage is not a database URL: write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
        ) from error
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).strip().splitlines()[0]
        raise GnnpredError(f"the storage {shown_storage(url)} cannot be used: {reason}") from error


def shown_storage(url: str) -> str:
    return sqlalchemy.make_url(url).render_as_string(hide_password=True)
