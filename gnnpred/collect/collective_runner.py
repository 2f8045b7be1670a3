"""Run a recipe of collectives: one launch of ranks per number of GPUs, every call a row of its own.

A call that hangs or crashes takes its launch with it: it becomes a row with the reason, and a new launch goes on behind
it. Under torchrun, which started a process like this one for every rank, each starts its own rank's worker and rank 0
keeps the rows; a failure then ends the process, for torchrun to start all of them again.
"""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnnpred.collect.collective_recipe import CollectiveCall
from gnnpred.collect.engine import PROBE_LIMIT_S, BudgetSpentError, Reply, probe_message
from gnnpred.collect.local_engine import visible_gpus
from gnnpred.collect.rank_group import RankGroup
from gnnpred.collect.recipe import MeasureSettings, Recipe
from gnnpred.collect.runner import CollectReport, OnProgress
from gnnpred.collect.store import CollectionStore
from gnnpred.collect.table import COLLECTIVES_FILE, write_tables
from gnnpred.collect.workers import POLL_S, WORKER_COMMAND, Worker, Workers
from gnnpred.errors import GnnpredError, UsageError

_START_LIMIT_S = 180.0  # imports, and the process group


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """Calls for one set of ranks; to :class:`RankGroup` what a task of a recipe of steps is."""

    calls: tuple[CollectiveCall, ...]
    settings: MeasureSettings
    device: str
    lines: Path

    @property
    def num_gpus(self) -> int:
        return self.calls[0].gpus_per_node

    @property
    def limit_s(self) -> float:
        """Of the whole; each call's own limit is kept by who reads the lines."""
        return _START_LIMIT_S + len(self.calls) * self.settings.time_limit_s

    def message(self) -> dict[str, Any]:
        return {
            "task": "collectives",
            "calls": [asdict(call) for call in self.calls],
            "settings": asdict(self.settings),
            "device": self.device,
            "lines": str(self.lines),
        }


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where torchrun put this process."""

    rank: int
    local_rank: int
    world_size: int
    nodes: int

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "Place | None":
        """None where no torchrun started this process; raises UsageError where its variables are incomplete."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        try:
            world_size, local_size = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
            return cls(
                rank=int(environment["RANK"]), local_rank=int(environment["LOCAL_RANK"]), world_size=world_size,
                nodes=world_size // local_size,
            )  # fmt: skip
        except (KeyError, ValueError) as error:
            raise UsageError(f"torchrun's variables are not complete: {error}") from error


class _TorchrunRank:
    """This process's rank of a launch that torchrun spread over processes, with the interface of a RankGroup."""

    def __init__(self, workers: Workers, launch: _Launch, place: Place) -> None:
        self._limit_s = launch.limit_s
        self._place = place
        self._worker: Worker = workers.start(launch.message())

    def release(self, *, gpus: list[str] | None) -> None:
        place = self._place
        ranks = {
            "rank": place.rank,
            "local_rank": place.local_rank,
            "world_size": place.world_size,
            "init_method": "env://",  # the worker inherits torchrun's variables
        }
        go: dict[str, Any] = {"gpus": ",".join(gpus)} if gpus else {}
        self._worker.release(limit_s=self._limit_s, go={**go, "ranks": ranks})

    def poll(self) -> Reply | None:
        return self._worker.poll()

    def end(self) -> None:
        self._worker.end()


def collect_collectives(
    recipe: Recipe,
    out: Path,
    *,
    device: str | None = None,
    time_budget_s: float | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
    worker_command: Sequence[str] = WORKER_COMMAND,
    place: Place | None = None,
) -> CollectReport | None:
    """Time what ``out`` lacks of ``recipe`` and of what this machine's GPUs (or ``place``) can do.

    Collectives for other numbers of GPUs and nodes stay without a row, for a run that has them. None on all ranks of
    ``place`` but the first. Raises as :func:`gnnpred.collect.runner.collect`, GnnpredError where ranks cannot start.
    """
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    with tempfile.TemporaryDirectory(prefix="gnnpred-collect-") as scratch:
        workers = Workers(worker_command, Path(scratch))
        try:
            if place is not None and place.rank:
                _follow(workers, recipe, device, place)
                return None
            with CollectionStore(out) as store:
                manifest = _probed(workers, device, deadline)
                store.bind(recipe, f"{manifest['device']} ({manifest['gpu']})")
                collection = _Collection(recipe, store, workers, manifest, place)
                is_cut_off = False
                try:
                    collection.run(on_progress, deadline)
                except BudgetSpentError:
                    is_cut_off = True
                finally:
                    write_tables(store, recipe)
                rows = store.rows()
        finally:
            workers.end_all()
    return CollectReport(
        folder=out,
        device=manifest["gpu"],
        num_configurations=len(recipe.configurations),
        num_rows=len(rows),
        num_measured_now=collection.num_added,
        by_status=dict(Counter(row.status for row in rows).most_common()),
        warnings=tuple(collection.left_out)
        + tuple(
            f"{row.configuration['operation']} of {row.configuration['num_bytes']:,} bytes, "
            f"{row.configuration['gpus']} ranks: {row.result['warning']}"
            for row in rows
            if row.result.get("warning")
        ),
        is_cut_off=is_cut_off,
        device_file=None,
        runs_name=COLLECTIVES_FILE,
    )


def _probed(workers: Workers, device: str | None, deadline: float | None) -> dict[str, Any]:
    reply = workers.run(probe_message(device, []), limit_s=PROBE_LIMIT_S, deadline=deadline)
    if reply["status"] != "ok":
        raise (UsageError if reply.get("exit_code") == UsageError.exit_code else GnnpredError)(reply["reason"])
    return reply["result"]["manifest"]


def _follow(workers: Workers, recipe: Recipe, device: str | None, place: Place) -> None:
    """Another rank than 0: do what rank 0 says until it is done."""
    manifest = _probed(workers, device, None)
    launch = _Launch(
        calls=tuple(recipe.configurations), settings=recipe.measure, device=manifest["device"], lines=Path(os.devnull)
    )
    rank = _TorchrunRank(workers, launch, place)
    rank.release(gpus=_gpus_of(manifest))
    while (reply := rank.poll()) is None:
        time.sleep(POLL_S)
    if reply["status"] != "ok":
        raise GnnpredError(f"rank {place.rank}: {reply['reason']}")


def _gpus_of(manifest: dict[str, Any]) -> list[str] | None:
    if manifest["device"] == "cpu":
        return None
    return visible_gpus(manifest["num_gpus"], os.environ.get("CUDA_VISIBLE_DEVICES"))


class _Collection:
    """One call's work on a folder."""

    def __init__(
        self, recipe: Recipe, store: CollectionStore, workers: Workers, manifest: dict[str, Any], place: Place | None
    ) -> None:
        self.num_added = 0
        self.left_out: list[str] = []
        self._recipe = recipe
        self._store = store
        self._workers = workers
        self._manifest = manifest
        self._place = place
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
            if reason := self._cannot(gpus, nodes):
                self.left_out.append(f"{len(calls)} calls among {gpus} ranks on {nodes} nodes are left: {reason}")
                continue
            while calls:
                for call, reply in self._launched(tuple(calls), deadline):
                    calls.remove(call)
                    self._add(call, reply)
                    on_progress("collectives", len(self._done), total)
                    if reply["status"] in ("timeout", "crash") and self._place is not None:
                        raise GnnpredError(
                            f"{call.operation} of {call.num_bytes:,} bytes: {reply['reason']}; its row is kept, the "
                            "same command continues (torchrun --max-restarts does so itself)"
                        )

    def _cannot(self, gpus: int, nodes: int) -> str:
        """Why these ranks are not to be had here, "" where they are."""
        if self._place is not None:
            here = (self._place.world_size, self._place.nodes)
            return "" if (gpus, nodes) == here else f"torchrun started {here[0]} ranks on {here[1]} nodes"
        if nodes > 1:
            return "several nodes need torchrun"
        num_gpus = self._manifest["num_gpus"]
        return f"there are {num_gpus} here" if gpus > num_gpus else ""

    def _launched(
        self, calls: tuple[CollectiveCall, ...], deadline: float | None
    ) -> Iterator[tuple[CollectiveCall, Reply]]:
        """Every call with its reply, up to one that ended the launch."""
        launch = _Launch(
            calls=calls, settings=self._recipe.measure, device=self._manifest["device"],
            lines=self._workers.new_path("lines"),
        )  # fmt: skip
        if self._place is None:
            group: RankGroup | _TorchrunRank = RankGroup(self._workers, launch)
        else:
            group = _TorchrunRank(self._workers, launch, self._place)
        gpus = _gpus_of(self._manifest)
        group.release(gpus=gpus[: launch.num_gpus] if gpus and self._place is None else gpus)
        lines = _Lines(launch.lines)
        manifest: dict[str, Any] | None = None
        waiting, last = list(calls), time.monotonic()
        try:
            while waiting:
                if deadline is not None and time.monotonic() >= deadline:
                    raise BudgetSpentError
                ended = group.poll()
                for content in lines.new():
                    last = time.monotonic()
                    if manifest is None:
                        manifest = content["manifest"]
                        continue
                    yield waiting.pop(0), {**content, "result": {**content["result"], "manifest": manifest}}
                if not waiting:
                    break
                limit_s = _START_LIMIT_S if manifest is None else self._recipe.measure.time_limit_s
                if ended is None and time.monotonic() - last > limit_s:
                    ended = {"status": "timeout", "reason": f"not done after {limit_s:g} s", "result": {}}
                if ended is not None:
                    if manifest is None:
                        raise GnnpredError(f"{launch.num_gpus} ranks cannot start: {ended['reason']}")
                    yield waiting[0], {**ended, "result": {"manifest": manifest}}
                    return
                time.sleep(POLL_S)
            while group.poll() is None and self._place is not None:  # peers leave together
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
