"""Run a recipe of collectives: one launch of ranks per number of GPUs, every call a row of its own.

A call that hangs or crashes takes its launch with it: it becomes a row with the reason, and a new launch goes on behind
it.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gnnpred.collect.collective_launch import START_LIMIT_S, CollectiveLaunch
from gnnpred.collect.collective_recipe import CollectiveCall
from gnnpred.collect.engine import BudgetSpentError, Reply
from gnnpred.collect.local_engine import LocalEngine
from gnnpred.collect.rank_group import RankGroup
from gnnpred.collect.recipe import Recipe
from gnnpred.collect.runner import CollectReport, OnProgress, probed
from gnnpred.collect.store import CollectionStore
from gnnpred.collect.table import write_tables
from gnnpred.collect.workers import POLL_S, WORKER_COMMAND, Workers
from gnnpred.errors import GnnpredError


def collect_collectives(
    recipe: Recipe,
    out: Path,
    *,
    device: str | None = None,
    time_budget_s: float | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
    make_engine: Callable[[Workers], LocalEngine] = LocalEngine,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> CollectReport:
    """Time what ``out`` lacks of ``recipe``, as far as this machine and the engine's other nodes have the GPUs.

    Collectives for more GPUs and nodes stay without a row, for a run that has them. Arguments and errors are those of
    :func:`gnnpred.collect.runner.collect`; GnnpredError also where ranks cannot start.
    """
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    with CollectionStore(out) as store, tempfile.TemporaryDirectory(prefix="gnnpred-collect-") as scratch:
        workers = Workers(worker_command, Path(scratch), forked=[])
        engine = make_engine(workers)
        is_cut_off = False
        try:
            manifest = probed(engine, device, [], deadline)["manifest"]
            store.bind(recipe, f"{manifest['device']} ({manifest['gpu']})")
            collection = _Collection(recipe, store, workers, engine, manifest)
            try:
                collection.run(on_progress, deadline)
            except BudgetSpentError:
                is_cut_off = True
            finally:
                write_tables(store, recipe)
            rows = store.rows()
        finally:
            engine.end_all()
    return CollectReport(
        **CollectReport.contents(recipe, out, rows),
        device=manifest["gpu"],
        num_measured_now=collection.num_added,
        warnings=tuple(collection.left_out)
        + tuple(
            f"{row.configuration['operation']} of {row.configuration['num_bytes']:,} bytes, "
            f"{row.configuration['gpus']} ranks: {row.result['warning']}"
            for row in rows
            if row.result.get("warning")
        ),
        num_graphs_missing=0,
        is_cut_off=is_cut_off,
        device_file=None,
    )


class _Collection:
    """One call's work on a folder."""

    def __init__(
        self, recipe: Recipe, store: CollectionStore, workers: Workers, engine: LocalEngine, manifest: dict[str, Any]
    ) -> None:
        self.num_added = 0
        self.left_out: list[str] = []
        self._recipe = recipe
        self._store = store
        self._workers = workers
        self._engine = engine
        self._manifest = manifest
        self._done = {row.config_id for row in store.rows()}

    def run(self, on_progress: OnProgress, deadline: float | None) -> None:
        """Launch after launch; raises BudgetSpentError when the time is over."""
        total = len(self._recipe.configurations)
        on_progress("collectives", len(self._done), total)
        by_layout: dict[tuple[int, int], list[CollectiveCall]] = {}
        for call in self._recipe.configurations:
            if call.config_id not in self._done:
                by_layout.setdefault((call.gpus, call.nodes), []).append(call)
        for (gpus, nodes), calls in by_layout.items():
            if reason := self._lacking(gpus, nodes):
                self.left_out.append(f"{len(calls)} collectives among {gpus} ranks on {nodes} nodes are left: {reason}")
                continue
            while calls:
                for call, reply in self._launched(tuple(calls), deadline):
                    calls.remove(call)
                    self._add(call, reply)
                    on_progress("collectives", len(self._done), total)

    def _lacking(self, gpus: int, nodes: int) -> str:
        """Why these ranks are not to be had here, "" where they are."""
        num_gpus, num_nodes = self._manifest["num_gpus"], self._manifest["num_nodes"]
        if nodes > num_nodes:
            return f"the nodes here are {num_nodes}"
        return f"a node here takes {num_gpus}" if gpus // nodes > num_gpus else ""

    def _launched(
        self, calls: tuple[CollectiveCall, ...], deadline: float | None
    ) -> Iterator[tuple[CollectiveCall, Reply]]:
        """Every call with its reply, up to one that ended the launch."""
        launch = CollectiveLaunch(
            calls=calls, settings=self._recipe.measure, device=self._manifest["device"],
            lines=str(self._workers.new_path("lines")),
        )  # fmt: skip
        group = RankGroup(self._workers, launch, world_size=launch.configuration.gpus)
        lines = _Lines(Path(launch.lines))
        manifest: dict[str, Any] | None = None
        waiting, last = list(calls), time.monotonic()
        try:
            remote = self._engine.others.start(launch) if launch.configuration.nodes > 1 else None
            group.release(gpus=self._engine.gpus[: launch.num_gpus] or None, remote=remote)
            while waiting:
                if deadline is not None and time.monotonic() >= deadline:
                    raise BudgetSpentError
                ended = group.poll()  # before the lines, so that all of them are there
                for content in lines.new():
                    last = time.monotonic()
                    if manifest is None:
                        manifest = content["manifest"]
                    else:
                        result = {**content["result"], "manifest": manifest}
                        yield waiting.pop(0), {**content, "result": result}
                limit_s = START_LIMIT_S if manifest is None else self._recipe.measure.time_limit_s
                if ended is None and time.monotonic() - last > limit_s:
                    ended = {"status": "timeout", "reason": f"not done after {limit_s:g} s", "result": {}}
                if waiting and ended is not None:
                    if manifest is None:
                        raise GnnpredError(f"{launch.configuration.gpus} ranks cannot start: {ended['reason']}")
                    yield waiting[0], {**ended, "result": {"manifest": manifest}}
                    return
                time.sleep(POLL_S)
        finally:
            group.end()

    def _add(self, call: CollectiveCall, reply: Reply) -> None:
        self._store.add_row(call, status=reply["status"], reason=reply["reason"], result=reply["result"])
        self._done.add(call.config_id)
        self.num_added += 1


class _Lines:
    """What was appended to a file, line by line as they are complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
