"""The engine of a Ray cluster: Ray finds the GPUs, this process hands out configurations and takes the replies.

Every lane is an actor that holds what one configuration needs and measures one after the other, so that the next
worker can import its libraries while the last one measures. Without an address a Ray instance of this machine alone is
started, and ended with this process.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from gnnpred.collect.engine import PROBE_LIMIT_S, BudgetSpentError, Reply, Task, probe_message
from gnnpred.collect.ray_lane import Lane
from gnnpred.errors import GnnpredError, UsageError

_CONNECT_LIMIT_S = 5.0
_HEALTH_LIMIT_S = 30.0
_POLL_S = 0.1
_CLOSE_LIMIT_S = 5.0
_MAX_STARTS = 2  # of an instance of its own
_MAX_TRIES = 3  # of a configuration whose node or lane is lost
# So long may a cluster have nothing that fits (nodes restart, an autoscaler adds some), then the call ends.
_NOTHING_FITS_LIMIT_S = 300.0
# Replies are small and no data set is kept; Ray takes no less than 75 MB.
_OBJECT_STORE_BYTES = 80_000_000


class RayEngine:
    """Measures on the nodes of a Ray cluster that have one type of device.

    ``address``: of a cluster (``HOST:PORT`` or ``auto``), ``local`` for an instance of its own; by default what the
    variable RAY_ADDRESS says, else ``local``. ``accelerator``: Ray's name of the GPUs to use where there are several.
    ``num_cpus``: cores of an own instance, by default all. ``command``: see :class:`~gnnpred.collect.ray_lane.Lane`.
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
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._accelerator = accelerator
        self._num_cpus = num_cpus
        self._command = None if command is None else tuple(command)
        self._device = "cpu"
        self._bound = ""  # device and its name
        self._lanes: list[Any] = []
        self._is_connected = False

    def probe(self, device: str | None, models: Sequence[str], *, deadline: float | None) -> Reply:
        self._connect()
        self._device = device or ("cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu")
        self.overlaps = self._device == "cuda"
        if self._device == "cuda":
            self._choose_accelerator()
        lane = self._new_lane(1)
        answer = lane.probe.remote(probe_message(self._device, models))
        ends = time.monotonic() + PROBE_LIMIT_S
        while not ray.wait([answer], timeout=_POLL_S)[0]:
            if deadline is not None and time.monotonic() >= deadline:
                raise BudgetSpentError
            if time.monotonic() >= ends:
                unit = "GPU" if self._device == "cuda" else "core"
                raise GnnpredError(f"Ray had no free {unit} within {PROBE_LIMIT_S:g} s: see ray status")
        try:
            reply = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise GnnpredError(
                "Ray cannot run gnnpred on a node (its extras models and ray must be installed there, in the same "
                f"version): {_line_of(error)}"
            ) from error
        self._end_lane(lane)
        if reply["status"] == "ok":
            manifest = reply["result"]["manifest"]
            self._bound = _bound_name(manifest)
            sizes = self._node_sizes()
            manifest["num_gpus"], manifest["num_nodes"] = max(sizes, default=1), 1
        return reply

    def measure(self, tasks: Sequence[Task], *, deadline: float | None) -> Iterator[tuple[Task, Reply]]:
        by_size: dict[int, list[Task]] = {}
        for task in tasks:
            by_size.setdefault(task.num_gpus, []).append(task)
        for num_gpus, alike in by_size.items():
            yield from self._measure_alike(num_gpus, alike, deadline)

    def end_all(self) -> None:
        if not self._is_connected:
            return
        self._is_connected = False
        with contextlib.suppress(ray.exceptions.RayError):
            for lane in self._lanes:
                ray.kill(lane)  # its workers end when their input closes
        self._lanes.clear()
        ray.shutdown()

    # ------------------------------------------------------------------------------------ measuring

    def _measure_alike(
        self, num_gpus: int, tasks: Sequence[Task], deadline: float | None
    ) -> Iterator[tuple[Task, Reply]]:
        """Tasks that need the same number of GPUs on one node, over as many lanes as there can be."""
        queue = _Queue(tasks)
        num_lanes = max(1, sum(size // num_gpus for size in self._node_sizes()))
        idle = [self._new_lane(num_gpus) for _ in range(min(num_lanes, len(tasks)))]
        running: dict[ray.ObjectRef, tuple[Any, Task]] = {}
        fitted = time.monotonic()

        def fill() -> None:
            while idle and queue.waiting:
                lane = idle.pop()
                task = queue.next_of(lane)
                following = queue.reserve(lane) if self.overlaps else None
                running[lane.run.remote(task, following)] = (lane, task)

        while queue.waiting or running:
            if deadline is not None and time.monotonic() >= deadline:
                raise BudgetSpentError
            fill()
            done = ray.wait(list(running), timeout=_POLL_S)[0]
            if done or any(size >= num_gpus for size in self._node_sizes()):
                fitted = time.monotonic()
            elif time.monotonic() - fitted >= _NOTHING_FITS_LIMIT_S:
                raise GnnpredError(
                    f"no node of the Ray cluster has had {self._unit(num_gpus)} for {_NOTHING_FITS_LIMIT_S:g} s: all "
                    "rows are kept, the same command continues"
                )
            replies = []
            for answer in done:
                lane, task = running.pop(answer)
                reply, is_lost = self._reply_of(answer, queue, task)
                idle.append(self._replaced(lane, num_gpus) if is_lost else lane)
                if reply is not None:
                    replies.append((task, reply))
            if self.overlaps:
                fill()
            yield from replies
        for lane in idle:
            self._end_lane(lane)

    def _reply_of(self, answer: ray.ObjectRef, queue: "_Queue", task: Task) -> tuple[Reply | None, bool]:
        """The reply, None where the task is tried again, and whether the lane is lost."""
        try:
            reply = ray.get(answer)
        except ray.exceptions.OutOfMemoryError as error:
            return {"status": "oom", "reason": f"Ray ended it: {_line_of(error)}", "result": {}}, True
        except ray.exceptions.RayTaskError as error:  # raised in the lane itself: nothing would run there
            raise GnnpredError(f"a lane on Ray failed: {_line_of(error)}") from error
        except ray.exceptions.RayError as error:
            if queue.retry(task):
                return None, True
            lost = f"its Ray node or process was lost {_MAX_TRIES} times: {_line_of(error)}"
            return {"status": "crash", "reason": lost, "result": {}}, True
        manifest = reply["result"].get("manifest")
        if manifest is not None and _bound_name(manifest) != self._bound:
            raise GnnpredError(
                f"a node of the Ray cluster has {_bound_name(manifest)}, the first one {self._bound}, which do not "
                "make one collection: use a cluster of nodes of one kind; all rows are kept"
            )
        return reply, False

    # ------------------------------------------------------------------------------------ the cluster

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address == "local":
            options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
            if self._num_cpus is not None:
                options["num_cpus"] = self._num_cpus
        elif self._address != "auto":
            _check_address(self._address)
        for tries_left in range(_MAX_STARTS - 1, -1, -1):
            try:
                ray.init(address=self._address, **options)
                break
            except Exception as error:  # Ray raises bare ones
                if self._address == "local" and tries_left:  # its processes wait 15 s for each other: too little on a
                    continue  # machine that is busy or reads Ray from the disk for the first time
                raise GnnpredError(f"cannot use Ray at {self._address}: {_line_of(error)}") from error
        self._is_connected = True

    def _choose_accelerator(self) -> None:
        """One type of GPU; raises UsageError where there are several and none was chosen."""
        counts: Counter[str] = Counter()
        for node in self._nodes():
            for name in node["Resources"]:
                if name.startswith(_ACCELERATOR):
                    counts[name.removeprefix(_ACCELERATOR)] += int(node["Resources"].get("GPU", 0))
        if self._accelerator is None:
            if len(counts) > 1:
                listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
                raise UsageError(
                    f"the Ray cluster has GPUs of several types, {listed}, which do not make one collection: choose "
                    f"one with --ray-accelerator {counts.most_common(1)[0][0]}"
                )
            self._accelerator = next(iter(counts), None)
        elif self._accelerator not in counts:
            listed = f"has {', '.join(counts)}" if counts else "names no type of GPU"
            raise UsageError(f"--ray-accelerator {self._accelerator!r}: the Ray cluster {listed}")

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in ray.nodes() if node["Alive"]]

    def _node_sizes(self) -> list[int]:
        """GPUs (cores on CPUs) of every node that can be used."""
        resource = "GPU" if self._device == "cuda" else "CPU"
        return [
            int(node["Resources"].get(resource, 0))
            for node in self._nodes()
            if self._accelerator is None or _ACCELERATOR + self._accelerator in node["Resources"]
        ]

    def _unit(self, count: int) -> str:
        return f"{count} {'GPU' if self._device == 'cuda' else 'core'}{'s' if count > 1 else ''}"

    def _new_lane(self, num_gpus: int) -> Any:
        needs: dict[str, Any] = {"num_cpus": num_gpus}
        environment = {name: os.environ.get(name) for name in ("PYTHONPATH",)}
        if self._device == "cuda":
            needs = {"num_cpus": 0, "num_gpus": num_gpus}
            if self._accelerator is not None:
                needs["resources"] = {_ACCELERATOR + self._accelerator: 0.001}
        if self._device == "cuda" or "OMP_NUM_THREADS" in os.environ:
            # Ray allows as many threads as it gave cores; beside a GPU that would slow what torch does without Ray
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS")
        lane = ray.remote(Lane).options(max_restarts=0, max_task_retries=0, **needs)
        own_gpus = num_gpus if self._device == "cuda" else 0
        self._lanes.append(lane.remote(self._command, num_gpus=own_gpus, folder=os.getcwd(), environment=environment))
        return self._lanes[-1]

    def _replaced(self, lane: Any, num_gpus: int) -> Any:
        self._lanes.remove(lane)
        return self._new_lane(num_gpus)

    def _end_lane(self, lane: Any) -> None:
        """Give back what it holds."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(lane.close.remote(), timeout=_CLOSE_LIMIT_S)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(lane)
        self._lanes.remove(lane)


_ACCELERATOR = "accelerator_type:"


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
        if not self._free:
            return None
        self._reserved[lane] = self._free.popleft()
        return self._reserved[lane]

    def retry(self, task: Task) -> bool:
        """Whether a task whose lane was lost waits again."""
        self._num_tries[task.configuration.config_id] += 1
        if self._num_tries[task.configuration.config_id] >= _MAX_TRIES:
            return False
        self._free.appendleft(task)
        return True


def _bound_name(manifest: dict[str, Any]) -> str:
    return f"{manifest['device']} ({manifest['gpu']})"


def _check_address(address: str) -> None:
    """Raises UsageError for what is no address, GnnpredError where no cluster answers: Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal()) or "//" in address:
        raise UsageError(f"--ray-address {address!r}: write HOST:PORT of the cluster's head, auto or local")
    silent = f"no Ray cluster answers at {address}: start one with ray start --head, or leave --ray-address out"
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise GnnpredError(f"{silent} ({error})") from error
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address],
            capture_output=True, timeout=_HEALTH_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise GnnpredError(f"{silent} (something else listens there)") from error
    if done.returncode and b"AuthenticationError" in done.stderr:
        raise GnnpredError(f"the Ray cluster at {address} asks for its token: set RAY_AUTH_MODE=token (Ray's manual)")
    if done.returncode:
        raise GnnpredError(f"{silent} (its health check failed)")


def _line_of(error: BaseException) -> str:
    """The last line that says something: Ray puts remote tracebacks in front."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
