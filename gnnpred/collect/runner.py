"""Run a recipe: every configuration in a process of its own, every outcome a row, resumable after any end."""

import hashlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnnpred.collect.recipe import Configuration, Recipe
from gnnpred.collect.store import CollectionStore
from gnnpred.collect.table import DEVICE_FILE, FAILED_FILE, RUNS_FILE, write_device_file, write_tables
from gnnpred.collect.workers import WORKER_COMMAND, BudgetSpentError, Worker, Workers
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.hardware.device import AMPERE_COMPUTE_CAPABILITY
from gnnpred.job import Precision

DEVICES = ("cpu", "cuda")
MODELS_FOLDER = "models"
_PROBE_LIMIT_S = 300.0

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class CollectReport:
    """What a folder holds after a call."""

    folder: Path
    device: str
    num_configurations: int
    num_rows: int
    num_measured_now: int  # rows that this call added
    by_status: dict[str, int]
    warnings: tuple[str, ...]
    is_cut_off: bool  # by the time budget
    device_file: Path | None  # of a CPU, which the list of GPUs does not hold

    @property
    def runs_file(self) -> Path:
        return self.folder / RUNS_FILE

    @property
    def failed_file(self) -> Path:
        return self.folder / FAILED_FILE

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "runs": str(self.runs_file),
            "failed": str(self.failed_file),
            "device_file": str(self.device_file) if self.device_file else None,
            "device": self.device,
            "num_configurations": self.num_configurations,
            "num_rows": self.num_rows,
            "num_measured_now": self.num_measured_now,
            "by_status": self.by_status,
            "warnings": list(self.warnings),
            "is_cut_off": self.is_cut_off,
        }


def collect(
    recipe: Recipe,
    out: Path,
    *,
    device: str | None = None,
    time_budget_s: float | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
    worker_command: Sequence[str] = WORKER_COMMAND,
    overlapped: bool | None = None,
) -> CollectReport:
    """Measure what ``out`` lacks of ``recipe``; write its tables, whatever ends the work.

    ``device`` is cpu or cuda; by default cuda where torch sees a GPU.

    ``worker_command`` answers tasks as :mod:`gnnpred.collect.worker` does. ``overlapped``: workers get ready and models
    are exported while others measure, by default on a GPU. Raises UsageError for a folder of another recipe or device
    and a missing device, GnnpredError for an unknown model and a full disk.
    """
    if device is not None and device not in DEVICES:
        raise UsageError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    with CollectionStore(out) as store, tempfile.TemporaryDirectory(prefix="gnnpred-collect-") as scratch:
        workers = Workers(worker_command, Path(scratch), deadline)
        models = list(dict.fromkeys(each.model for each in recipe.configurations))
        try:
            probed = _probed(workers, device, models)
        except BudgetSpentError:
            raise UsageError("the time budget ended before the machine was looked at: give more time") from None
        manifest = probed["manifest"]
        store.bind(recipe, f"{manifest['device']} ({manifest['gpu']})")
        if probed["cpu_device"]:
            write_device_file(probed["cpu_device"], out)
        collection = _Collection(
            recipe,
            store,
            workers,
            manifest,
            overlapped=manifest["device"] == "cuda" if overlapped is None else overlapped,
        )
        is_cut_off = False
        try:
            collection.run(on_progress)
        except BudgetSpentError:
            is_cut_off = True
        finally:
            workers.end_all()
            write_tables(store, recipe)
        rows = store.rows()
    return CollectReport(
        folder=out,
        device=manifest["gpu"],
        num_configurations=len(recipe.configurations),
        num_rows=len(rows),
        num_measured_now=collection.num_added,
        by_status=dict(Counter(row.status for row in rows).most_common()),
        warnings=tuple(
            f"{row.configuration['model']} {row.configuration['precision']} batch {row.configuration['batch_size']}: "
            f"{row.result['warning']}"
            for row in rows
            if row.result.get("warning")
        ),
        is_cut_off=is_cut_off,
        device_file=out / DEVICE_FILE if probed["cpu_device"] else None,
    )


def _probed(workers: Workers, device: str | None, models: list[str]) -> dict[str, Any]:
    reply = workers.run({"task": "probe", "device": device, "models": models}, limit_s=_PROBE_LIMIT_S)
    if reply["status"] != "ok":
        kind = UsageError if reply.get("exit_code") == UsageError.exit_code else GnnpredError
        raise kind(reply["reason"])
    return reply["result"]


class _Collection:
    """One call's work on a folder.

    With ``overlapped`` (GPUs) the next worker imports its libraries and the last new model is exported while a
    configuration is measured, so that the GPU waits for neither; on a CPU that would disturb what is measured.
    """

    def __init__(
        self, recipe: Recipe, store: CollectionStore, workers: Workers, manifest: dict[str, Any], *, overlapped: bool
    ) -> None:
        self.num_added = 0
        self._recipe = recipe
        self._store = store
        self._workers = workers
        self._manifest = manifest
        self._overlapped = overlapped
        self._folder = store.folder / MODELS_FOLDER
        self._status_by_id = {row.config_id: row.status for row in store.rows()}
        self._graph_ids = set(store.graphs())
        self._next: tuple[str, Worker] | None = None  # config_id and the worker that prepares for it
        self._exporting: tuple[str, Worker] | None = None  # graph_id and the worker that exports it

    def run(self, on_progress: OnProgress) -> None:
        """Measure and export what the store lacks; raises BudgetSpentError when the time is over."""
        try:
            self._folder.mkdir(exist_ok=True)
            for partial in self._folder.glob(".*.partial.onnx"):  # of a call that was killed
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise GnnpredError(f"cannot write {self._folder}: {error.strerror or error}") from error
        total = len(self._recipe.configurations)
        on_progress("configurations", len(self._status_by_id), total)
        waiting = [each for each in self._recipe.configurations if self._must_run(each)]
        for each in self._recipe.configurations:
            if each.config_id not in self._status_by_id:
                following = None
                if self._must_run(each):
                    waiting.pop(0)
                    following = waiting[0] if waiting and self._overlapped else None
                self._measure(each, following)
            if self._status_by_id[each.config_id] == "ok" and each.graph_id not in self._graph_ids:
                self._start_export(each)
                if not self._overlapped:
                    self._finish_export()
            on_progress("configurations", len(self._status_by_id), total)
        self._finish_export()

    def _must_run(self, configuration: Configuration) -> bool:
        """Whether a worker has to measure it."""
        is_new = configuration.config_id not in self._status_by_id
        return is_new and not unsupported_reason(configuration.precision, self._manifest)

    def _measure(self, configuration: Configuration, following: Configuration | None) -> None:
        reason = unsupported_reason(configuration.precision, self._manifest)
        if reason:
            reply: dict[str, Any] = {"status": "unsupported", "reason": reason, "result": {}}
        else:
            if self._next is not None and self._next[0] == configuration.config_id:
                worker = self._next[1]
            else:
                worker = self._workers.start(self._task_of(configuration))
            worker.release(limit_s=self._recipe.measure.time_limit_s)
            self._next = None
            if following is not None:
                self._next = (following.config_id, self._workers.start(self._task_of(following)))
            reply = self._workers.wait(worker)
        result = {"manifest": self._manifest, **reply["result"]}
        self._store.add_row(configuration, status=reply["status"], reason=reply["reason"], result=result)
        self._status_by_id[configuration.config_id] = reply["status"]
        self.num_added += 1

    def _task_of(self, configuration: Configuration) -> dict[str, Any]:
        return {
            "task": "measure",
            "configuration": asdict(configuration),
            "settings": asdict(self._recipe.measure),
            "device": self._manifest["device"],
        }

    def _start_export(self, configuration: Configuration) -> None:
        self._finish_export()  # one at a time
        graph_id = configuration.graph_id
        worker = self._workers.start(
            {
                "task": "export",
                "model": configuration.model,
                "image_size": configuration.image_size,
                "seq_len": configuration.seq_len,
                "out": str(self._partial(graph_id)),
            }
        )
        worker.release(limit_s=self._recipe.measure.export_limit_s)
        self._graph_ids.add(graph_id)
        self._exporting = (graph_id, worker)

    def _finish_export(self) -> None:
        """Store the file of the export under way, named by its content, or why there is none."""
        if self._exporting is None:
            return
        graph_id, worker = self._exporting
        self._exporting = None
        partial = self._partial(graph_id)
        try:
            reply = self._workers.wait(worker)
            if reply["status"] != "ok":
                self._store.add_graph(graph_id, file="", reason=f"not exported: {reply['reason']}")
                return
            name = hashlib.sha256(partial.read_bytes()).hexdigest()[:16] + ".onnx"
            os.replace(partial, self._folder / name)
        except OSError as error:
            raise GnnpredError(f"cannot write {self._folder}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
        self._store.add_graph(graph_id, file=f"{MODELS_FOLDER}/{name}")

    def _partial(self, graph_id: str) -> Path:
        return self._folder / f".{graph_id}.partial.onnx"


def unsupported_reason(precision: Precision, manifest: dict[str, Any]) -> str:
    """Why the device of ``manifest`` cannot run in that precision; "" where it can."""
    if manifest["device"] == "cpu":
        return "tf32 is a format of GPUs: a CPU does not run it" if precision is Precision.TF32 else ""
    capability = manifest["compute_capability"]
    if precision in (Precision.BF16, Precision.MIXED_BF16, Precision.TF32) and capability < AMPERE_COMPUTE_CAPABILITY:
        return f"{manifest['gpu']} (compute capability {capability:g}) has no {precision} units; 8.0 and newer do"
    return ""
