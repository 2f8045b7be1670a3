"""A corpus as it lies in its folder, and as it shall lie there: changed files are written together or not at all."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnpred.corpus.collections import COLLECTIONS_FOLDER
from gnnpred.corpus.devices import DEVICES_FOLDER, load_own_devices
from gnnpred.corpus.operators import OperatorRow, load_operator_rows
from gnnpred.corpus.splits import SPLITS, Split, load_split
from gnnpred.corpus.store import (
    GRAPHS_FILE,
    MEASUREMENTS_FILE,
    MULTI_GPU_FILE,
    GraphStore,
    MeasurementRow,
    load_graphs,
    load_multi_gpu_rows,
    load_rows,
)
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import replaced_when_done
from gnnpred.hardware import DeviceSpec

OPERATORS_FILE = "operators.csv.gz"
SPLITS_FOLDER = "splits"
README_FILE = "README.md"
_OWN_ENTRIES = (
    GRAPHS_FILE, MEASUREMENTS_FILE, MULTI_GPU_FILE, OPERATORS_FILE, SPLITS_FOLDER, DEVICES_FOLDER, COLLECTIONS_FOLDER,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CorpusState:
    """Everything of a corpus that an addition reads. A folder that is not there yet is an empty corpus."""

    folder: Path
    rows: tuple[MeasurementRow, ...]
    multi_gpu_rows: tuple[MeasurementRow, ...]
    graphs: GraphStore
    operators: tuple[OperatorRow, ...]
    own_devices: Mapping[str, DeviceSpec]
    splits: Mapping[str, Split]  # those that it has
    collections: Mapping[str, dict[str, Any]]  # name -> content of its file
    versions: Mapping[str, tuple[int, int]]  # file -> when it was changed, and its size

    @property
    def all_rows(self) -> tuple[MeasurementRow, ...]:
        return (*self.rows, *self.multi_gpu_rows)


def read_corpus(folder: Path) -> CorpusState:
    """Raises GnnpredError for a corpus that cannot be read, UsageError for a folder of something else."""
    versions = _versions(folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--datasets {folder} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / name).exists() for name in _OWN_ENTRIES):
        raise UsageError(f"--datasets {folder} holds other things and no corpus: name a corpus, or a new folder")
    has_rows, has_graphs = (folder / MEASUREMENTS_FILE).is_file(), (folder / GRAPHS_FILE).is_file()
    return CorpusState(
        folder=folder,
        rows=tuple(load_rows(folder)) if has_rows else (),
        multi_gpu_rows=tuple(load_multi_gpu_rows(folder)) if folder.is_dir() else (),
        graphs=load_graphs(folder) if has_rows or has_graphs else GraphStore({}),
        operators=tuple(load_operator_rows(folder / OPERATORS_FILE)) if (folder / OPERATORS_FILE).is_file() else (),
        own_devices=load_own_devices(folder),
        splits={
            name: load_split(path) for name in SPLITS if (path := folder / SPLITS_FOLDER / f"{name}.json").is_file()
        },
        collections={
            path.stem: _read_collection_file(path) for path in sorted((folder / COLLECTIONS_FOLDER).glob("*.json"))
        },
        versions=versions,
    )


def _read_collection_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GnnpredError(f"{path} is no collection file: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), dict) or "origin" not in content:
        raise GnnpredError(f"{path} is no collection file of this gnnpred")
    return content


def _versions(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for name in _OWN_ENTRIES:
        path = folder / name
        if path.is_file():
            stat = path.stat()
            found[name] = (stat.st_mtime_ns, stat.st_size)
    return found


Writer = Callable[[Path], None]


def replace_files(state: CorpusState, files: Iterable[tuple[Path, Writer]]) -> None:
    """Write every file beside its place, then move them there in order; an error before leaves the corpus as it was.

    ``files`` are ordered so that the corpus is whole after each of them. Raises GnnpredError for a full disk and the
    like, and for a corpus that someone else has changed since it was read.
    """
    files = list(files)
    try:
        for path, _ in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:  # leaves in reverse: the first file is moved first
            partials = [stack.enter_context(replaced_when_done(path)) for path, _ in reversed(files)]
            for (_, write), partial in zip(files, reversed(partials), strict=True):
                write(partial)
            if _versions(state.folder) != state.versions:
                raise GnnpredError(f"{state.folder} was changed by another process meanwhile: run the command again")
    except OSError as error:
        raise GnnpredError(f"cannot write to {state.folder}: {error.strerror or error}") from error
