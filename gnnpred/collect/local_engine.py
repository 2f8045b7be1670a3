"""The engine of one machine: its GPUs (or its CPU) as lanes, each measuring one configuration at a time."""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gnnpred.collect.engine import PROBE_LIMIT_S, BudgetSpentError, Reply, Task, probe_message
from gnnpred.collect.gpu_monitor import keep_gpus_open
from gnnpred.collect.lookahead import Lookahead, most_ahead
from gnnpred.collect.rank_group import RankGroup
from gnnpred.collect.workers import POLL_S, Workers

if TYPE_CHECKING:
    from gnnpred.collect.nodes import OtherNodes


@dataclass
class _Running:
    group: RankGroup
    lanes: list[int]
    started: float = field(default_factory=time.monotonic)


class LocalEngine:
    """Measures on this machine, with worker processes.

    Every GPU is a lane of its own; the CPU is one lane, since two measurements at once would disturb each other. Tasks
    that need most lanes come first, so that one of many GPUs never waits behind a stream of smaller ones; otherwise the
    order of tasks is kept. ``overlaps`` (GPUs, by default): next workers prepare while others measure, so that no lane
    waits for their imports.

    ``others``: more nodes, for tasks that need several; those come first of all.

    ``num_lanes`` and ``max_ahead``, the most workers that prepare at once, are found out where they are not given.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        overlaps: bool | None = None,
        num_lanes: int | None = None,
        max_ahead: int | None = None,
        others: "OtherNodes | None" = None,
    ) -> None:
        self.overlaps = bool(overlaps)
        self._overlaps = overlaps
        self._workers = workers
        self._num_lanes = num_lanes
        self._max_ahead = max_ahead
        self.others = others
        self.gpus: list[str] = []  # as CUDA_VISIBLE_DEVICES names them, one per lane; none on a CPU

    def probe(self, device: str | None, models: Sequence[str], *, deadline: float | None) -> Reply:
        reply = self._workers.run(probe_message(device, models), limit_s=PROBE_LIMIT_S, deadline=deadline)
        if reply["status"] == "ok":
            manifest = reply["result"]["manifest"]
            manifest["num_nodes"] = self.others.num_nodes if self.others else 1
            if manifest["device"] == "cuda":
                self.gpus = visible_gpus(manifest["num_gpus"], os.environ.get("CUDA_VISIBLE_DEVICES"))
                keep_gpus_open()
            self.overlaps = bool(self.gpus) if self._overlaps is None else self._overlaps
        return reply

    def measure(self, tasks: Sequence[Task], *, deadline: float | None) -> Iterator[tuple[Task, Reply]]:
        num_lanes = self._num_lanes or len(self.gpus) or 1
        waiting = deque(sorted(tasks, key=lambda task: (-task.configuration.nodes, -task.num_gpus)))
        lookahead = Lookahead(num_lanes, self._max_ahead or most_ahead(num_lanes))
        ready: deque[RankGroup] = deque()
        running: list[_Running] = []
        free = list(range(num_lanes))

        def prepare() -> None:
            task = waiting.popleft()
            ready.append(RankGroup(self._workers, task, world_size=task.configuration.gpus))

        def fill() -> None:
            while ready or waiting:
                task = ready[0].task if ready else waiting[0]
                num_needed = min(task.num_gpus, num_lanes)
                if num_needed > len(free):
                    break
                if not ready:
                    prepare()
                lanes = [free.pop(0) for _ in range(num_needed)]
                group = ready.popleft()
                gpus = [self.gpus[lane] for lane in lanes] if self.gpus else None
                is_spread = self.others is not None and group.task.configuration.nodes > 1
                group.release(gpus=gpus, remote=self.others.start(group.task) if is_spread else None)
                running.append(_Running(group, lanes))
            while self.overlaps and waiting and sum(group.num_workers for group in ready) < lookahead.num_workers:
                prepare()

        while waiting or ready or running:
            if deadline is not None and time.monotonic() >= deadline:
                raise BudgetSpentError
            fill()
            done: list[tuple[Task, Reply]] = []
            for each in list(running):
                if (reply := each.group.poll()) is not None:
                    running.remove(each)
                    free.extend(each.lanes)
                    done.append((each.group.task, reply))
                    lookahead.add(prepare_s=reply.get("prepare_s"), busy_s=time.monotonic() - each.started)
            free.sort()
            if self.overlaps and done:
                fill()
            yield from done
            if not done:
                time.sleep(POLL_S)

    def end_all(self) -> None:
        self._workers.end_all()
        if self.others is not None:
            self.others.end_all()


def visible_gpus(num_gpus: int, environment: str | None) -> list[str]:
    """Names of the GPUs that torch counted, for the CUDA_VISIBLE_DEVICES of workers; ``environment`` is our own one."""
    names = [name.strip() for name in (environment or "").split(",") if name.strip()]
    return (names or [str(i) for i in range(num_gpus)])[:num_gpus]
