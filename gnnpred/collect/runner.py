"""Run a recipe: every configuration in a process of its own, every outcome a row, resumable after any end."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
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
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.hardware.device import AMPERE_COMPUTE_CAPABILITY
from gnnpred.job import Precision

DEVICES = ("cpu", "cuda")
MODELS_FOLDER = "models"
WORKER_COMMAND = (sys.executable, "-m", "gnnpred.collect.worker")
_PROBE_LIMIT_S = 300.0
_WAIT_STEP_S = 0.5

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


class _BudgetSpentError(Exception):
    """The time budget ended while a worker ran; what it did is not recorded."""


def collect(
    recipe: Recipe,
    out: Path,
    *,
    device: str | None = None,
    time_budget_s: float | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> CollectReport:
    """Measure what ``out`` lacks of ``recipe``; write its tables, whatever ends the work.

    ``device`` is cpu or cuda; by default cuda where torch sees a GPU.
    ``worker_command`` answers tasks as :mod:`gnnpred.collect.worker` does. Raises UsageError for a folder of another
    recipe or device and a missing device, GnnpredError for an unknown model and a full disk.
    """
    if device is not None and device not in DEVICES:
        raise UsageError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    with CollectionStore(out) as store, tempfile.TemporaryDirectory(prefix="gnnpred-collect-") as scratch:
        workers = _Workers(worker_command, Path(scratch), deadline)
        models = list(dict.fromkeys(each.model for each in recipe.configurations))
        try:
            probed = _probed(workers, device, models)
        except _BudgetSpentError:
            raise UsageError("the time budget ended before the machine was looked at: give more time") from None
        manifest = probed["manifest"]
        store.bind(recipe, f"{manifest['device']} ({manifest['gpu']})")
        if probed["cpu_device"]:
            write_device_file(probed["cpu_device"], out)
        try:
            num_added, is_cut_off = _measure_all(recipe, store, workers, manifest, on_progress)
        finally:
            write_tables(store, recipe)
        rows = store.rows()
    return CollectReport(
        folder=out,
        device=manifest["gpu"],
        num_configurations=len(recipe.configurations),
        num_rows=len(rows),
        num_measured_now=num_added,
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


def _probed(workers: "_Workers", device: str | None, models: list[str]) -> dict[str, Any]:
    reply = workers.run({"task": "probe", "device": device, "models": models}, limit_s=_PROBE_LIMIT_S)
    if reply["status"] != "ok":
        kind = UsageError if reply.get("exit_code") == UsageError.exit_code else GnnpredError
        raise kind(reply["reason"])
    return reply["result"]


def _measure_all(
    recipe: Recipe, store: CollectionStore, workers: "_Workers", manifest: dict[str, Any], on_progress: OnProgress
) -> tuple[int, bool]:
    """Rows that were added, and whether the time budget cut the work off."""
    models_folder = store.folder / MODELS_FOLDER
    models_folder.mkdir(exist_ok=True)
    for partial in models_folder.glob(".*.partial.onnx"):  # of a call that was killed
        partial.unlink(missing_ok=True)
    done = {row.config_id: row.status for row in store.rows()}
    graphs = set(store.graphs())
    num_before, total = len(done), len(recipe.configurations)
    on_progress("configurations", len(done), total)
    try:
        for each in recipe.configurations:
            if each.config_id not in done:
                status, reason, result = _outcome(each, recipe, workers, manifest)
                store.add_row(each, status=status, reason=reason, result=result)
                done[each.config_id] = status
            if done[each.config_id] == "ok" and each.graph_id not in graphs:
                file, reason = _exported(each, recipe, workers, models_folder)
                store.add_graph(each.graph_id, file=file, reason=reason)
                graphs.add(each.graph_id)
            on_progress("configurations", len(done), total)
    except _BudgetSpentError:
        return len(done) - num_before, True
    return len(done) - num_before, False


def _outcome(
    configuration: Configuration, recipe: Recipe, workers: "_Workers", manifest: dict[str, Any]
) -> tuple[str, str, dict[str, Any]]:
    if reason := unsupported_reason(configuration.precision, manifest):
        return "unsupported", reason, {"manifest": manifest}
    reply = workers.run(
        {
            "task": "measure",
            "configuration": asdict(configuration),
            "settings": asdict(recipe.measure),
            "device": manifest["device"],
        },
        limit_s=recipe.measure.time_limit_s,
    )
    return reply["status"], reply["reason"], {"manifest": manifest, **reply["result"]}


def unsupported_reason(precision: Precision, manifest: dict[str, Any]) -> str:
    """Why the device of ``manifest`` cannot run in that precision; "" where it can."""
    if manifest["device"] == "cpu":
        return "tf32 is a format of GPUs: a CPU does not run it" if precision is Precision.TF32 else ""
    capability = manifest["compute_capability"]
    if precision in (Precision.BF16, Precision.MIXED_BF16, Precision.TF32) and capability < AMPERE_COMPUTE_CAPABILITY:
        return f"{manifest['gpu']} (compute capability {capability:g}) has no {precision} units; 8.0 and newer do"
    return ""


def _exported(configuration: Configuration, recipe: Recipe, workers: "_Workers", folder: Path) -> tuple[str, str]:
    """The model's ONNX file (relative to the run's folder, named by its content), or why there is none."""
    partial = folder / f".{configuration.graph_id}.partial.onnx"
    try:
        reply = workers.run(
            {
                "task": "export",
                "model": configuration.model,
                "image_size": configuration.image_size,
                "seq_len": configuration.seq_len,
                "out": str(partial),
            },
            limit_s=recipe.measure.export_limit_s,
        )
        if reply["status"] != "ok":
            return "", f"not exported: {reply['reason']}"
        name = hashlib.sha256(partial.read_bytes()).hexdigest()[:16] + ".onnx"
        os.replace(partial, folder / name)
    except OSError as error:
        raise GnnpredError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return f"{MODELS_FOLDER}/{name}", ""


class _Workers:
    """Starts one worker process after the other, each with a time limit, none beyond the deadline."""

    def __init__(self, command: Sequence[str], scratch: Path, deadline: float | None) -> None:
        self._command = tuple(command)
        self._scratch = scratch
        self._deadline = deadline

    def run(self, task: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        """The worker's reply, or a status and reason in its place; raises _BudgetSpentError at the deadline."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise _BudgetSpentError
        answer, log = self._scratch / "reply.json", self._scratch / "worker.log"
        answer.unlink(missing_ok=True)
        ends = time.monotonic() + limit_s
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*self._command, str(answer)], stdin=subprocess.PIPE, stdout=sink, stderr=sink,
                env=_worker_environment(),
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the worker in its own way
            )  # fmt: skip
            try:
                with contextlib.suppress(BrokenPipeError):  # it crashed at once: its exit code tells
                    process.stdin.write(json.dumps(task).encode() + b"\n")
                    process.stdin.flush()
                while True:
                    try:
                        code = process.wait(timeout=_WAIT_STEP_S)
                        break
                    except subprocess.TimeoutExpired:
                        now = time.monotonic()
                    if self._deadline is not None and now >= self._deadline:
                        raise _BudgetSpentError
                    if now >= ends:
                        return {"status": "timeout", "reason": f"not done after {limit_s:g} s", "result": {}}
            finally:
                _end(process)
        try:
            return json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {"status": "crash", "reason": _crash_reason(code, log), "result": {}}


def _worker_environment() -> dict[str, str]:
    """This process's environment; the package is found where it was imported from, and ``module:function`` here."""
    root = str(Path(__file__).parent.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the worker and what it started (compilers)."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()


def _crash_reason(code: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    if code >= 0:
        return f"the worker ended with exit code {code}{last}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}{last}"
