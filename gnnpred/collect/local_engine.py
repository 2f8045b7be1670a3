"""The engine of one machine: its GPUs (or its CPU) as lanes, each measuring one configuration at a time."""

import time
from collections import deque
from collections.abc import Iterator, Sequence

from gnnpred.collect.engine import PROBE_LIMIT_S, BudgetSpentError, Reply, Task, probe_message
from gnnpred.collect.workers import POLL_S, Worker, Workers

_NUM_READY = 1  # workers that prepare ahead


class LocalEngine:
    """Measures on this machine, with worker processes.

    With ``overlaps`` (GPUs, by default) next workers prepare while others measure, so that a lane does not wait for
    their imports; on a CPU that would disturb what is measured.
    """

    def __init__(self, workers: Workers, *, overlaps: bool | None = None, num_lanes: int | None = None) -> None:
        self.overlaps = bool(overlaps)
        self._overlaps = overlaps
        self._workers = workers
        self._num_lanes = num_lanes or 1

    def probe(self, device: str | None, models: Sequence[str], *, deadline: float | None) -> Reply:
        reply = self._workers.run(probe_message(device, models), limit_s=PROBE_LIMIT_S, deadline=deadline)
        if reply["status"] == "ok" and self._overlaps is None:
            self.overlaps = reply["result"]["manifest"]["device"] == "cuda"
        return reply

    def measure(self, tasks: Sequence[Task], *, deadline: float | None) -> Iterator[tuple[Task, Reply]]:
        waiting = deque(tasks)
        ready: deque[tuple[Task, Worker]] = deque()
        running: list[tuple[Task, Worker]] = []

        def fill() -> None:
            while len(running) < self._num_lanes and (ready or waiting):
                task, worker = ready.popleft() if ready else _started(waiting)
                worker.release(limit_s=task.limit_s)
                running.append((task, worker))
            while self.overlaps and waiting and len(ready) < _NUM_READY:
                ready.append(_started(waiting))

        def _started(waiting: deque[Task]) -> tuple[Task, Worker]:
            task = waiting.popleft()
            return task, self._workers.start(task.message())

        while waiting or ready or running:
            if deadline is not None and time.monotonic() >= deadline:
                raise BudgetSpentError
            fill()
            done = [(each, reply) for each in running if (reply := each[1].poll()) is not None]
            running = [each for each in running if all(each is not other for other, _ in done)]
            if self.overlaps and done:
                fill()
            for (task, _), reply in done:
                yield task, reply
            if not done:
                time.sleep(POLL_S)

    def end_all(self) -> None:
        self._workers.end_all()
