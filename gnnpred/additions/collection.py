"""A folder that ``gnnpred collect`` wrote, read and checked before anything is made of it."""

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnpred.collect.store import STORE_FILE, StoredRow, read_store
from gnnpred.collect.table import COLLECTIVES_FILE, DEVICE_FILE, OPERATORS_FILE, RUNS_FILE
from gnnpred.corpus.operators import COLUMNS as OPERATOR_COLUMNS
from gnnpred.corpus.operators import OperatorRow, operator_graph
from gnnpred.errors import GnnpredError
from gnnpred.files import json_digest
from gnnpred.hardware import DeviceSpec, load_device_file
from gnnpred.job import Precision
from gnnpred.op_kinds import OP_KINDS
from gnnpred.score import read_runs

# Columns of runs.csv that score does without and that rows of the corpus need
_NEEDED_COLUMNS = (
    "source",
    "model",
    "phase",
    "framework",
    "framework_version",
    "cuda",
    "input",
    "os",
    "num_steps",
    "warning",
)
_TIME_TOLERANCE = 1e-4  # runs.csv rounds times to six digits
_MANIFEST_IS_CPU = "cpu"
_MODEL_FILE = re.compile(r"models/[0-9a-f]{16,64}\.onnx")  # as collect names them: by their content


@dataclass(frozen=True, kw_only=True)
class MeasuredLine:
    """One row of ``runs.csv`` with what the store knows of it."""

    line: int  # in the file; the header is line 1
    cells: dict[str, str]
    config_id: str
    manifest: dict[str, Any]

    @property
    def row_id(self) -> str:
        """The same for the same measurement, whatever the folder is called and however much it grows."""
        keys = ("gpu", "step_time_ms", "step_p10_ms", "step_p90_ms", "wall_clock_ms")
        return json_digest([self.config_id, self.manifest, *(self.cells.get(key, "") for key in keys)], 12)


@dataclass(frozen=True, kw_only=True)
class Collection:
    """A checked collection. ``operators`` name devices as the collection does."""

    folder: Path
    recipe: str
    recipe_id: str
    recipe_text: str  # "" from versions that did not keep it
    device: str
    is_cpu: bool
    measured: tuple[MeasuredLine, ...]
    failed: dict[str, int]  # status -> configurations without a time
    manifests: tuple[dict[str, Any], ...]  # distinct ones
    own_device: DeviceSpec | None  # device.toml
    operators: tuple[OperatorRow, ...]

    @property
    def origin(self) -> str:
        """The same however much the collection grows: recipe, device and the row that was committed first."""
        return json_digest([self.recipe_id, self.device, self.measured[0].row_id])

    @property
    def manifest_digest(self) -> str:
        return json_digest(list(self.manifests), 12)


def read_collection(folder: Path) -> Collection:
    """Read ``folder``; raises GnnpredError that names the file and what to do where it cannot be merged.

    ``runs.csv`` must hold every measured row of the store with its time, and every ONNX file that it names must be
    there, with the content that its name is the hash of.
    """
    if not folder.is_dir():
        raise GnnpredError(f"{folder} is no folder: name one of `gnnpred collect --out`")
    meta, stored = read_store(folder)
    for key in ("recipe", "recipe_id"):
        if key not in meta:
            raise GnnpredError(f"{folder / STORE_FILE} is damaged: it does not say its {key}")
    if (folder / COLLECTIVES_FILE).is_file() and not (folder / RUNS_FILE).is_file():
        raise GnnpredError(
            f"{folder} holds timed collectives, of which a corpus has none: fit them with "
            "`python -m gnnpred.communication_fit.collectives --collected`"
        )
    by_id = {row.config_id: row for row in stored if row.status == "ok"}
    if not by_id:
        raise GnnpredError(f"{folder} holds no measured row: there is nothing to add")
    manifests = _manifests_of(folder / STORE_FILE, stored)
    measured = _measured_lines(folder, by_id)
    order = {config_id: i for i, config_id in enumerate(by_id)}
    _check_models(folder, measured)
    return Collection(
        folder=folder,
        recipe=meta["recipe"],
        recipe_id=meta["recipe_id"],
        recipe_text=meta.get("recipe_text", ""),
        device=measured[0].cells["gpu"],
        is_cpu=manifests[0]["device"] == _MANIFEST_IS_CPU,
        # as committed: the first stays the first when the collection grows
        measured=tuple(sorted(measured, key=lambda line: order[line.config_id])),
        failed=dict(Counter(row.status for row in stored if row.status != "ok").most_common()),
        manifests=tuple({json_digest(manifest): manifest for manifest in manifests}.values()),
        own_device=load_device_file(folder / DEVICE_FILE) if (folder / DEVICE_FILE).is_file() else None,
        operators=_operators(folder / OPERATORS_FILE, {manifest["gpu"] for manifest in manifests}),
    )


def _manifests_of(path: Path, stored: Iterable[StoredRow]) -> list[dict[str, Any]]:
    """The manifest of every row that has one, as every measured row must; all of a CPU, or none."""
    manifests = []
    for row in stored:
        manifest = row.result.get("manifest") if isinstance(row.result, dict) else None
        if isinstance(manifest, dict) and all(isinstance(manifest.get(key), str) for key in ("device", "gpu")):
            manifests.append(manifest)
        elif manifest or row.status == "ok":
            raise GnnpredError(f"{path} is damaged: row {row.config_id} does not say on which device it was measured")
    if len({manifest["device"] == _MANIFEST_IS_CPU for manifest in manifests}) > 1:
        raise GnnpredError(f"{path} holds rows of a CPU and of GPUs: collect each into a folder of its own")
    return manifests


def _measured_lines(folder: Path, by_id: dict[str, StoredRow]) -> list[MeasuredLine]:
    path = folder / RUNS_FILE
    columns, rows = read_runs(path)
    if missing := [name for name in _NEEDED_COLUMNS if name not in columns]:
        raise GnnpredError(f"{path} lacks the column {missing[0]}: use the table that `gnnpred collect` wrote")
    lines: dict[str, MeasuredLine] = {}
    for line, cells in rows:
        config_id = cells["source"].rpartition(":")[2]
        stored = by_id.get(config_id)
        if stored is None or config_id in lines or not _agrees(cells, stored):
            raise GnnpredError(
                f"{path}, line {line}: this row is not in {STORE_FILE}, or it says something else there: run the same "
                "`gnnpred collect` again, which writes the table anew"
            )
        lines[config_id] = MeasuredLine(line=line, cells=cells, config_id=config_id, manifest=stored.result["manifest"])
    if lacking := len(by_id) - len(lines):
        raise GnnpredError(
            f"{path} lacks {lacking} of the {len(by_id)} rows in {STORE_FILE}: run the same `gnnpred collect` again, "
            "which writes the table anew"
        )
    return list(lines.values())


def _agrees(cells: dict[str, str], stored: StoredRow) -> bool:
    if cells["gpu"] != stored.result["manifest"]["gpu"]:
        return False
    try:
        return abs(float(cells["step_time_ms"]) / stored.result["step_time_ms"] - 1) < _TIME_TOLERANCE
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        return False


def _check_models(folder: Path, measured: list[MeasuredLine]) -> None:
    line_of = {line.cells["onnx"]: line for line in reversed(measured) if line.cells["onnx"].strip()}
    for name, line in line_of.items():
        where = f"{folder / RUNS_FILE}, line {line.line}"
        if not _MODEL_FILE.fullmatch(name):
            raise GnnpredError(f"{where}: {name!r} is none of the collection's own files (models/HASH.onnx)")
        path = folder / name
        try:
            if not path.is_file():
                raise GnnpredError(f"{where}: {path} is missing: copy the folder models/ along with the collection")
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise GnnpredError(f"{where}: {path} cannot be read: {error.strerror}") from error
        if not digest.startswith(path.stem):
            raise GnnpredError(f"{where}: {path} is damaged: its content does not match its name, which is its hash")


def _operators(path: Path, devices: set[str]) -> tuple[OperatorRow, ...]:
    if not path.is_file():
        return ()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in OPERATOR_COLUMNS if name not in (reader.fieldnames or ())]:
                raise GnnpredError(f"{path} lacks the column {missing[0]}")
            return tuple(_operator_of(cells, devices, f"{path}, line {reader.line_num}") for cells in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise GnnpredError(f"{path} cannot be read: {error}") from error


def _operator_of(cells: dict[str, str], devices: set[str], where: str) -> OperatorRow:
    if cells["kind"] not in OP_KINDS:
        raise GnnpredError(f"{where}: no timed kernel: unknown kind {cells['kind']!r}")
    try:
        row = OperatorRow(
            cells["source"], cells["device"], cells["kind"], cells["phase"], str(Precision(cells["precision"])),
            tuple(int(v) for v in cells["shape"].split("x")), float(cells["time_us"]),
        )  # fmt: skip
        operator_graph(row)  # the shape has as many numbers as the kind needs
    except (GnnpredError, ValueError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise GnnpredError(f"{where}: no timed kernel: {error}") from error
    if row.device not in devices:
        raise GnnpredError(f"{where}: no row of the collection was measured on {row.device!r}")
    if min(row.shape) < 0:
        raise GnnpredError(f"{where}: no timed kernel: shape {cells['shape']}")
    if row.phase not in ("fwd", "bwd", "bwd_data", "bwd_weight") or not 0 < row.time_us < 1e9:
        raise GnnpredError(f"{where}: no timed kernel: phase {row.phase!r}, {row.time_us} us")
    return row
