"""Rows of a collection in SQLite: one transaction per configuration, so that a kill at any moment loses none."""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnnpred.collect.recipe import Configuration, Recipe
from gnnpred.errors import GnnpredError, UsageError

STORE_FILE = "collection.sqlite"
_LOCK_FILE = ".collection.lock"
_FORMAT = "1"

STATUSES = ("ok", "oom", "crash", "timeout", "nan", "error", "unsupported")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rows (
    config_id TEXT PRIMARY KEY,
    configuration TEXT NOT NULL,
    status TEXT NOT NULL,
    reason TEXT NOT NULL,
    result TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS graphs (graph_id TEXT PRIMARY KEY, file TEXT NOT NULL, reason TEXT NOT NULL);
"""


class InUseError(GnnpredError):
    """Another process works in the folder."""


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """What became of one configuration. ``result`` holds the measured figures and the manifest."""

    config_id: str
    configuration: dict[str, Any]
    status: str  # one of STATUSES
    reason: str  # "" where ok
    result: dict[str, Any]


class CollectionStore:
    """The rows of one recipe on one device in one folder. Held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / STORE_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = sqlite3.connect(folder / _LOCK_FILE, timeout=0, isolation_level=None)
            self._lock.execute("BEGIN EXCLUSIVE")  # freed by the system when this process ends, however it ends
        except (sqlite3.Error, OSError) as error:
            if "locked" in str(error):
                raise InUseError(
                    f"another collect is working in {folder}: wait for it or choose another --out"
                ) from error
            raise GnnpredError(f"cannot write to {folder}: {error}") from error
        with self._errors():
            self._db = sqlite3.connect(self._path, isolation_level=None)
            # no memory shared between processes, which file systems of clusters lack: the lock above keeps others out
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")  # a committed row survives a power failure too
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def __enter__(self) -> "CollectionStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def bind(self, recipe: Recipe, device: str) -> None:
        """Take the folder for this recipe and device; raises UsageError where it belongs to another."""
        wanted = {
            "format": _FORMAT, "recipe_id": recipe.recipe_id, "recipe": recipe.name, "recipe_text": recipe.text,
            "device": device,
        }  # fmt: skip
        with self._transaction():
            found = dict(self._db.execute("SELECT key, value FROM meta"))
            if not found:
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", wanted.items())
                return
        if found.get("format") != _FORMAT:
            raise UsageError(f"{self.folder} was written by another version of collect: choose another --out")
        if found["recipe_id"] != recipe.recipe_id:
            raise UsageError(
                f"{self.folder} holds rows of another recipe ({found['recipe']!r}, {found['recipe_id']}), or this one "
                "was changed since: choose another --out"
            )
        if found["device"] != device:
            raise UsageError(
                f"{self.folder} holds rows of {found['device']}, this machine has {device}: choose another --out"
            )

    def bound_device(self) -> str | None:
        """The device whose rows the folder holds; None before :meth:`bind`."""
        with self._errors():
            found = self._db.execute("SELECT value FROM meta WHERE key = 'device'").fetchone()
        return found[0] if found else None

    def add_row(
        self, configuration: Configuration, *, status: str, reason: str = "", result: dict[str, Any] | None = None
    ) -> None:
        """Commit the row of a configuration that has none yet."""
        assert status in STATUSES
        texts = (json.dumps(asdict(configuration)), status, reason, json.dumps(result or {}))
        with self._transaction():
            self._db.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?)", (configuration.config_id, *texts))

    def add_graph(self, graph_id: str, *, file: str, reason: str = "") -> None:
        """Commit where a model's ONNX file lies (relative to the folder), or why there is none."""
        with self._transaction():
            self._db.execute("INSERT INTO graphs VALUES (?, ?, ?)", (graph_id, file, reason))

    def take_in(self, rows: Iterable[StoredRow], graphs: Mapping[str, tuple[str, str]]) -> int:
        """Commit rows and graphs of other stores at once; those that are there stay. Returns how many rows are new.

        A file takes the place of a reason why there was none.
        """
        with self._transaction():
            before = self._db.total_changes
            self._db.executemany(
                "INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?)",
                [
                    (row.config_id, json.dumps(row.configuration), row.status, row.reason, json.dumps(row.result))
                    for row in rows
                ],
            )
            num_added = self._db.total_changes - before
            self._db.executemany(
                "INSERT INTO graphs VALUES (?, ?, ?) ON CONFLICT (graph_id) DO UPDATE "
                "SET file = excluded.file, reason = excluded.reason WHERE graphs.file = '' AND excluded.file != ''",
                [(graph_id, file, reason) for graph_id, (file, reason) in graphs.items()],
            )
        return num_added

    def rows(self) -> list[StoredRow]:
        """All rows, in the order in which they were committed."""
        with self._errors():
            return _rows_of(self._db)

    def graphs(self) -> dict[str, tuple[str, str]]:
        """graph_id -> (file, reason why there is none)."""
        with self._errors():
            return {key: (file, reason) for key, file, reason in self._db.execute("SELECT * FROM graphs")}

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if "full" in str(error):
                raise GnnpredError(
                    f"cannot write {self._path}: the disk is full; all earlier rows are kept: free space and run the "
                    "same command again"
                ) from error
            raise GnnpredError(f"cannot use {self._path}: {error}") from error


def _rows_of(db: sqlite3.Connection) -> list[StoredRow]:
    return [
        StoredRow(config_id=key, configuration=json.loads(configuration), status=status, reason=reason,
                  result=json.loads(result))
        for key, configuration, status, reason, result in db.execute("SELECT * FROM rows ORDER BY rowid")
    ]  # fmt: skip


def read_store(folder: Path) -> tuple[dict[str, str], list[StoredRow]]:
    """What a collection's folder says of itself (recipe, recipe_id, device ...) and its rows; nothing is changed.

    Raises GnnpredError for a folder without a store, for a damaged one and for one of another version.
    """
    path = folder / STORE_FILE
    if not path.is_file():
        raise GnnpredError(
            f"{folder} is no collection: it has no {STORE_FILE}; name a folder of `gnnpred collect --out`"
        )
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if state != "ok":
                raise GnnpredError(f"{path} is damaged: {state.splitlines()[-1]}")
            meta = dict(db.execute("SELECT key, value FROM meta"))
            if meta.get("format") != _FORMAT:
                raise GnnpredError(
                    f"{path} is of format {meta.get('format')}, this gnnpred reads format {_FORMAT}: use the gnnpred "
                    "that collected it"
                )
            return meta, _rows_of(db)
    except (sqlite3.Error, ValueError) as error:
        if "locked" in str(error):
            raise InUseError(f"a collect is working in {folder}: wait for it") from error
        raise GnnpredError(f"{path} is damaged or no collection: {error}") from error
