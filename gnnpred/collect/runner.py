"""Run a recipe: every configuration in a process of its own, every outcome a row, resumable after any end."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnpred.collect.engine import BudgetSpentError, Engine, Reply, Task
from gnnpred.collect.exports import Exports
from gnnpred.collect.local_engine import LocalEngine
from gnnpred.collect.lookahead import most_ahead
from gnnpred.collect.recipe import LARGEST, Configuration, Recipe
from gnnpred.collect.report import FolderReport
from gnnpred.collect.store import STORE_FILE, CollectionStore
from gnnpred.collect.table import DEVICE_FILE, write_device_file, write_tables
from gnnpred.collect.workers import POLL_S, WORKER_COMMAND, Workers, require_space
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.hardware.device import AMPERE_COMPUTE_CAPABILITY
from gnnpred.job import Precision

DEVICES = ("cpu", "cuda")
_MAX_LOST_IN_A_ROW = 3  # configurations that met a GPU that does not answer

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class CollectReport(FolderReport):
    """What a call did, and what its folder holds now."""

    num_measured_now: int  # rows that this call added
    warnings: tuple[str, ...]
    num_graphs_missing: int  # of measured rows, not yet exported
    is_cut_off: bool  # by the time budget
    device_file: Path | None  # of a CPU, which the list of GPUs does not hold

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **super().as_dict(),
            "device_file": str(self.device_file) if self.device_file else None,
            "num_measured_now": self.num_measured_now,
            "warnings": list(self.warnings),
            "num_graphs_missing": self.num_graphs_missing,
            "is_cut_off": self.is_cut_off,
        }


def collect(
    recipe: Recipe,
    out: Path,
    *,
    device: str | None = None,
    time_budget_s: float | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
    make_engine: Callable[[Workers], Engine] = LocalEngine,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> CollectReport:
    """Measure what ``out`` lacks of ``recipe``; write its tables, whatever ends the work.

    ``device`` is cpu or cuda; by default cuda where torch sees a GPU.

    ``make_engine`` makes what measures; it may use the workers of this machine. ``worker_command`` answers tasks as
    :mod:`gnnpred.collect.worker` does. Raises UsageError for a folder of another recipe or device and a missing device,
    GnnpredError for an unknown model, a full disk and a GPU that does not answer any more.
    """
    if device is not None and device not in DEVICES:
        raise UsageError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    with CollectionStore(out) as store, tempfile.TemporaryDirectory(prefix="gnnpred-collect-") as scratch:
        workers = Workers(worker_command, Path(scratch), forked=recipe.sources_to_import)
        engine = make_engine(workers)
        is_cut_off, exports = False, None
        try:
            models = list(dict.fromkeys(each.model for each in recipe.configurations))
            found = probed(engine, device, models, deadline)
            manifest = found["manifest"]
            require_supported(recipe, manifest)
            store.bind(recipe, f"{manifest['device']} ({manifest['gpu']})")
            exports = Exports(store, workers, recipe)
            if found["cpu_device"]:
                write_device_file(found["cpu_device"], out)
            collection = _Collection(recipe, store, engine, exports, manifest)
            try:
                collection.run(on_progress, deadline)
            except BudgetSpentError:
                is_cut_off = True
        finally:
            engine.end_all()
            workers.end_all()
            if exports is not None:  # the folder is this recipe's
                exports.end_all()
                write_tables(store, recipe)
        return _report(
            store, recipe, device=manifest["gpu"], num_measured_now=collection.num_added, is_cut_off=is_cut_off
        )


def export_graphs(
    recipe: Recipe,
    out: Path,
    *,
    time_budget_s: float | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> CollectReport:
    """Export the graphs that measured rows of ``out`` lack and write its tables; measures nothing.

    Any machine does, whatever device the rows are of. Raises UsageError for a folder without rows and of another
    recipe, GnnpredError for a full disk.
    """
    if not (out / STORE_FILE).is_file():
        raise UsageError(f"{out} holds no rows whose graphs could be exported")
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    with CollectionStore(out) as store, tempfile.TemporaryDirectory(prefix="gnnpred-collect-") as scratch:
        device = store.bound_device()
        if device is None:
            raise UsageError(f"{out} holds no rows whose graphs could be exported")
        store.bind(recipe, device)
        workers = Workers(worker_command, Path(scratch), forked=recipe.sources_to_import)
        exports = Exports(store, workers, recipe, num_at_once=max(1, most_ahead(0)))
        is_cut_off = False
        measured = {row.config_id for row in store.rows() if row.status == "ok"}
        try:
            for each in recipe.configurations:
                if each.config_id in measured:
                    exports.add(each)
            total = exports.num_open
            while exports.num_open and not is_cut_off:
                on_progress("graphs", total - exports.num_open, total)
                is_cut_off = deadline is not None and time.monotonic() >= deadline
                time.sleep(POLL_S)
                exports.advance()
            on_progress("graphs", total - exports.num_open, total)
        finally:
            workers.end_all()
            exports.end_all()
            write_tables(store, recipe)
        return _report(store, recipe, device=device, num_measured_now=0, is_cut_off=is_cut_off)


def _report(
    store: CollectionStore, recipe: Recipe, *, device: str, num_measured_now: int, is_cut_off: bool
) -> CollectReport:
    rows, graphs = store.rows(), store.graphs()
    measured = {row.config_id for row in rows if row.status == "ok"}
    graph_ids = {each.graph_id for each in recipe.configurations if each.config_id in measured}
    return CollectReport(
        **CollectReport.contents(recipe, store.folder, rows),
        device=device,
        num_measured_now=num_measured_now,
        warnings=tuple(
            f"{row.configuration['model']} {row.configuration['precision']} "
            f"batch {row.configuration['batch_size'] or LARGEST}: {row.result['warning']}"
            for row in rows
            if row.result.get("warning")
        ),
        num_graphs_missing=len(graph_ids - set(graphs)),
        is_cut_off=is_cut_off,
        device_file=store.folder / DEVICE_FILE if (store.folder / DEVICE_FILE).exists() else None,
    )


def probed(engine: Engine, device: str | None, models: Sequence[str], deadline: float | None) -> dict[str, Any]:
    """The engine's look at where it measures; raises UsageError and GnnpredError for what is missing there."""
    try:
        reply = engine.probe(device, models, deadline=deadline)
    except BudgetSpentError:
        raise UsageError("the time budget ended before the machine was looked at: give more time") from None
    if reply["status"] != "ok":
        kind = UsageError if reply.get("exit_code") == UsageError.exit_code else GnnpredError
        raise kind(reply["reason"])
    return reply["result"]


class _Collection:
    """One call's work on a folder: hands tasks to the engine, commits replies, has new models exported."""

    def __init__(
        self, recipe: Recipe, store: CollectionStore, engine: Engine, exports: Exports, manifest: dict[str, Any]
    ) -> None:
        self.num_added = 0
        self._recipe = recipe
        self._store = store
        self._engine = engine
        self._exports = exports
        self._manifest = manifest
        self._status_by_id = {row.config_id: row.status for row in store.rows()}

    def run(self, on_progress: OnProgress, deadline: float | None) -> None:
        """Measure and export what the store lacks; raises BudgetSpentError when the time is over."""
        total = len(self._recipe.configurations)

        def advance() -> None:
            on_progress("configurations", len(self._status_by_id), total)

        advance()
        tasks = []
        for each in self._recipe.configurations:
            status = self._status_by_id.get(each.config_id)
            if status == "ok":
                self._export(each, deadline)  # of a call that was cut off
            elif status is None:
                if reason := unsupported_reason(each, self._manifest):
                    self._add(each, {"status": "unsupported", "reason": reason, "result": {}})
                else:
                    tasks.append(
                        Task(configuration=each, settings=self._recipe.measure, device=self._manifest["device"])
                    )
        advance()
        num_lost = 0
        for task, reply in self._engine.measure(tasks, deadline=deadline):
            if reply.get("lost_device"):  # no row: the next call measures it
                num_lost += 1
                if num_lost >= _MAX_LOST_IN_A_ROW:
                    raise GnnpredError(
                        f"a GPU cannot be used any more ({reply['reason']}): all rows are kept, the same command "
                        "continues when it works again, or without it (CUDA_VISIBLE_DEVICES)"
                    )
                continue
            num_lost = 0
            require_space(reply)
            self._add(task.configuration, reply)
            if reply["status"] == "ok":
                self._export(task.configuration, deadline)
            self._exports.advance()
            advance()
        self._exports.finish(deadline)

    def _add(self, configuration: Configuration, reply: Reply) -> None:
        result = {"manifest": self._manifest, "prepare_s": reply.get("prepare_s"), **reply["result"]}
        self._store.add_row(configuration, status=reply["status"], reason=reply["reason"], result=result)
        self._status_by_id[configuration.config_id] = reply["status"]
        self.num_added += 1

    def _export(self, configuration: Configuration, deadline: float | None) -> None:
        self._exports.add(configuration)
        if not self._engine.overlaps:
            self._exports.finish(deadline)


def require_supported(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Raises UsageError for a whole recipe of which the machine of ``manifest`` can run nothing."""
    reasons = Counter(unsupported_reason(each, manifest) for each in recipe.configurations)
    if not reasons[""] and not recipe.whole_id:  # a part may happen to hold nothing else
        raise UsageError(
            f"this machine runs none of the recipe's {len(recipe.configurations)} configurations: "
            + "; ".join(reason for reason, _ in reasons.most_common(3))
        )


def unsupported_reason(configuration: Configuration, manifest: dict[str, Any]) -> str:
    """Why the machine of ``manifest`` cannot run ``configuration``; "" where it can."""
    precision = configuration.precision
    is_cpu = manifest["device"] == "cpu"
    num_gpus, num_nodes = manifest.get("num_gpus", 1), manifest.get("num_nodes", 1)
    if configuration.nodes > num_nodes:
        return f"needs {configuration.nodes} nodes, there are {num_nodes}"
    if configuration.gpus_per_node > num_gpus:
        unit = "processes" if is_cpu else "GPUs"
        where = " on every node" if configuration.nodes > 1 else ""
        there = f"this CPU takes {num_gpus}" if is_cpu else f"there are {num_gpus}"
        return f"needs {configuration.gpus_per_node} {unit}{where}, {there}"
    if is_cpu:
        return "tf32 is a format of GPUs: a CPU does not run it" if precision is Precision.TF32 else ""
    capability = manifest["compute_capability"]
    if precision in (Precision.BF16, Precision.MIXED_BF16, Precision.TF32) and capability < AMPERE_COMPUTE_CAPABILITY:
        return f"{manifest['gpu']} (compute capability {capability:g}) has no {precision} units; 8.0 and newer do"
    return ""
