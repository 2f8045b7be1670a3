"""The engine of a Ray cluster: Ray finds the GPUs, this process hands out configurations and takes the replies.

Every lane is an actor that holds what one configuration needs on a node and measures one after the other, so that the
next worker can import its libraries while the last one measures.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from gnnpred.collect.engine import PROBE_LIMIT_S, BudgetSpentError, Reply, Task, probe_message
from gnnpred.collect.rank_group import GRACE_S, most_telling
from gnnpred.collect.ray_cluster import RayCluster, line_of
from gnnpred.collect.recipe import sources_to_import
from gnnpred.errors import GnnpredError

_POLL_S = 0.1
_MAX_TRIES = 3  # of a configuration whose node or lane is lost
# So long may a cluster have nothing that fits (nodes restart, an autoscaler adds some), then the call ends.
_NOTHING_FITS_LIMIT_S = 300.0


class RayEngine:
    """Measures on the nodes of a Ray cluster that have one type of device.

    ``address``: of a cluster (``HOST:PORT`` or ``auto``), ``local`` for an instance of its own; by default what the
    variable RAY_ADDRESS says, else ``local``. Further arguments are those of
    :class:`~gnnpred.collect.ray_cluster.RayCluster`.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        accelerator: str | None = None,
        num_cpus: int | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.overlaps = False
        self._cluster = RayCluster(
            address=address or os.environ.get("RAY_ADDRESS") or "local", accelerator=accelerator, num_cpus=num_cpus,
            command=command,
        )  # fmt: skip
        self._bound = ""  # device and its name

    def probe(self, device: str | None, models: Sequence[str], *, deadline: float | None) -> Reply:
        cluster = self._cluster
        cluster.connect()
        cluster.choose_device(device)
        self.overlaps = cluster.device == "cuda"
        lane = cluster.new_lane(1)
        answer = lane.probe.remote(probe_message(cluster.device, models))
        ends = time.monotonic() + PROBE_LIMIT_S
        while not ray.wait([answer], timeout=_POLL_S)[0]:
            _check_deadline(deadline)
            if time.monotonic() >= ends:
                raise GnnpredError(f"Ray had not {cluster.unit(1)} free within {PROBE_LIMIT_S:g} s: see ray status")
        try:
            reply = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise GnnpredError(
                "Ray cannot run gnnpred on a node (its extras models and ray must be installed there, in the same "
                f"version): {line_of(error)}"
            ) from error
        cluster.end_lane(lane)
        if reply["status"] == "ok":
            manifest = reply["result"]["manifest"]
            self._bound = _bound_name(manifest)
            sizes = [size for size in cluster.node_sizes() if size]
            manifest["num_gpus"], manifest["num_nodes"] = max(sizes, default=1), max(len(sizes), 1)
        return reply

    def measure(self, tasks: Sequence[Task], *, deadline: float | None) -> Iterator[tuple[Task, Reply]]:
        self._cluster.sources = sources_to_import(task.configuration.model for task in tasks)
        by_layout: dict[tuple[int, int], list[Task]] = {}
        for task in sorted(tasks, key=lambda task: (-task.configuration.nodes, -task.num_gpus)):
            by_layout.setdefault((task.configuration.nodes, task.num_gpus), []).append(task)
        for (num_nodes, num_gpus), alike in by_layout.items():
            if num_nodes > 1:
                yield from self._measure_spread(num_nodes, num_gpus, alike, deadline)
            else:
                yield from self._measure_alike(num_gpus, alike, deadline)

    def end_all(self) -> None:
        self._cluster.end_all()

    def _measure_alike(
        self, num_gpus: int, tasks: Sequence[Task], deadline: float | None
    ) -> Iterator[tuple[Task, Reply]]:
        """Tasks that need the same number of GPUs on one node, over as many lanes as there can be."""
        cluster, queue = self._cluster, _Queue(tasks)
        num_lanes = max(1, sum(size // num_gpus for size in cluster.node_sizes()))
        idle = [cluster.new_lane(num_gpus) for _ in range(min(num_lanes, len(tasks)))]
        running: dict[ray.ObjectRef, tuple[Any, Task]] = {}
        fitted = time.monotonic()

        def fill() -> None:
            while idle and queue.waiting:
                lane = idle.pop()
                task = queue.next_of(lane)
                following = queue.reserve(lane) if self.overlaps else None
                running[lane.run.remote(task, following)] = (lane, task)

        while queue.waiting or running:
            _check_deadline(deadline)
            fill()
            done = ray.wait(list(running), timeout=_POLL_S)[0]
            if done or any(size >= num_gpus for size in cluster.node_sizes()):
                fitted = time.monotonic()
            elif time.monotonic() - fitted >= _NOTHING_FITS_LIMIT_S:
                raise GnnpredError(
                    f"no node of the Ray cluster has had {cluster.unit(num_gpus)} for {_NOTHING_FITS_LIMIT_S:g} s: all "
                    "rows are kept, the same command continues"
                )
            replies = []
            for answer in done:
                lane, task = running.pop(answer)
                reply = self._reply_of(answer)
                if reply is None:
                    queue.forget(lane)
                    cluster.end_lane(lane, gently=False)
                    lane = cluster.new_lane(num_gpus)
                    reply = queue.lost(task)
                idle.append(lane)
                if reply is not None:
                    replies.append((task, reply))
            if self.overlaps:
                fill()
            yield from replies
        for lane in idle:
            cluster.end_lane(lane)

    def _measure_spread(
        self, num_nodes: int, num_gpus: int, tasks: Sequence[Task], deadline: float | None
    ) -> Iterator[tuple[Task, Reply]]:
        """Tasks that need several nodes, one after the other; what fails takes its lanes with it."""
        queue = _Queue(tasks)
        group = self._cluster.new_group(num_nodes, num_gpus, limit_s=_NOTHING_FITS_LIMIT_S)
        try:
            lanes: list[Any] = []
            while queue.waiting:
                lanes = lanes or self._cluster.lanes_of(group, num_gpus)
                task = queue.next_of(None)
                reply = self._spread_reply(lanes, task, deadline)
                if reply is None or reply["status"] != "ok":
                    for lane in lanes:
                        self._cluster.end_lane(lane, gently=False)
                    lanes = []
                if (reply := reply or queue.lost(task)) is not None:
                    yield task, reply
            for lane in lanes:
                self._cluster.end_lane(lane)
        finally:
            self._cluster.end_group(group)

    def _spread_reply(self, lanes: Sequence[Any], task: Task, deadline: float | None) -> Reply | None:
        """Rank 0's reply, the most telling one where some fail, None where a lane is lost."""
        try:
            init_method = f"tcp://{ray.get(lanes[0].free_address.remote())}"
        except ray.exceptions.RayError:
            return None
        ranks = {"world_size": task.configuration.gpus, "init_method": init_method}
        answers = [lanes[i].run.remote(task, None, first_rank=i * task.num_gpus, **ranks) for i in range(len(lanes))]
        replies: list[Reply] = []
        waiting, failed_at = answers, None
        while waiting and (failed_at is None or time.monotonic() < failed_at + GRACE_S):
            _check_deadline(deadline)
            done, waiting = ray.wait(waiting, timeout=_POLL_S)
            for answer in done:
                if (reply := self._reply_of(answer)) is None:
                    return None
                replies.append(reply)
                if reply["status"] != "ok" and failed_at is None:
                    failed_at = time.monotonic()
        return most_telling(replies) or self._reply_of(answers[0])

    def _reply_of(self, answer: ray.ObjectRef) -> Reply | None:
        """The reply, None where the lane is lost.

        Raises GnnpredError for a node of another device, and where nothing can run.
        """
        try:
            reply = ray.get(answer)
        except ray.exceptions.RayTaskError as error:  # raised in the lane itself: nothing would run there
            raise GnnpredError(f"a lane on Ray failed: {line_of(error)}") from error
        except ray.exceptions.RayError:  # the actor, its node, or the memory that they had
            return None
        manifest = reply["result"].get("manifest")
        if manifest is not None and _bound_name(manifest) != self._bound:
            raise GnnpredError(
                f"a node of the Ray cluster has {_bound_name(manifest)}, the first one {self._bound}, which do not "
                "make one collection: use a cluster of nodes of one kind; all rows are kept"
            )
        return reply


class _Queue:
    """Tasks that wait, some of them promised to a lane whose next worker prepares for them."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._free = deque(tasks)
        self._reserved: dict[Any, Task] = {}
        self._num_tries: Counter[str] = Counter()

    @property
    def waiting(self) -> bool:
        return bool(self._free or self._reserved)

    def next_of(self, lane: Any) -> Task:
        """What the lane prepared for, else what is free, else what another lane prepared for and has not begun."""
        if lane in self._reserved:
            return self._reserved.pop(lane)
        if self._free:
            return self._free.popleft()
        return self._reserved.pop(next(iter(self._reserved)))

    def reserve(self, lane: Any) -> Task | None:
        """Promise a free task to the lane."""
        if not self._free:
            return None
        self._reserved[lane] = self._free.popleft()
        return self._reserved[lane]

    def forget(self, lane: Any) -> None:
        """The lane is gone: what it prepared for is free."""
        if lane in self._reserved:
            self._free.appendleft(self._reserved.pop(lane))

    def lost(self, task: Task) -> Reply | None:
        """Put a task whose lane was lost back, or after some tries the reply that says so."""
        self._num_tries[task.configuration.config_id] += 1
        if self._num_tries[task.configuration.config_id] < _MAX_TRIES:
            self._free.appendleft(task)
            return None
        reason = f"its Ray node or process was lost {_MAX_TRIES} times (the node may have run out of memory)"
        return {"status": "crash", "reason": reason, "result": {}}


def _check_deadline(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise BudgetSpentError


def _bound_name(manifest: dict[str, Any]) -> str:
    return f"{manifest['device']} ({manifest['gpu']})"
