"""A Ray cluster as a collection sees it: nodes that have one type of device, and lanes on them."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gnnpred.collect.ray_lane import Lane
from gnnpred.errors import GnnpredError, UsageError

_CONNECT_LIMIT_S = 5.0
_HEALTH_LIMIT_S = 30.0
_CLOSE_LIMIT_S = 5.0
_MAX_STARTS = 2  # of an instance of its own
# Replies are small and no data set is kept; Ray takes no less than 75 MB.
_OBJECT_STORE_BYTES = 80_000_000
_ACCELERATOR = "accelerator_type:"  # Ray's resource that names a node's GPUs
# What a lane asks of it: any share will do.
_ACCELERATOR_SHARE = 0.001


class RayCluster:
    """Connects to a cluster, or starts an instance of this machine alone that ends with this process.

    ``address``: ``HOST:PORT``, ``auto`` or ``local``. ``accelerator``: Ray's name of the GPUs to use where there are
    several types. ``num_cpus``: cores of an own instance, by default all. ``command``: see :class:`Lane`.
    """

    def __init__(
        self, *, address: str, accelerator: str | None, num_cpus: int | None, command: Sequence[str] | None
    ) -> None:
        self.address = address
        self.device = "cpu"
        self.sources: list[str] = []  # of what new lanes will measure
        self._accelerator = accelerator
        self._num_cpus = num_cpus
        self._command = command
        self._lanes: list[Any] = []
        self._is_connected = False

    def connect(self) -> None:
        """Raises UsageError for what is no address, GnnpredError where no cluster answers or none can be started."""
        connect_ray(self.address, num_cpus=self._num_cpus)
        self._is_connected = True

    def choose_device(self, device: str | None) -> None:
        """``device``, or GPUs where there are any, of one type; raises UsageError for several without a choice."""
        self.device = device or ("cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu")
        if self.device != "cuda":
            return
        counts: Counter[str] = Counter()
        for node in self.nodes():
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

    def nodes(self) -> list[dict[str, Any]]:
        """Those that are alive, as Ray describes them."""
        return [node for node in ray.nodes() if node["Alive"]]

    def node_sizes(self) -> list[int]:
        """GPUs (cores on CPUs) of every node that can be used."""
        resource = "GPU" if self.device == "cuda" else "CPU"
        return [
            int(node["Resources"].get(resource, 0))
            for node in self.nodes()
            if self._accelerator is None or _ACCELERATOR + self._accelerator in node["Resources"]
        ]

    def unit(self, count: int) -> str:
        """``1 GPU``, ``2 cores``."""
        return f"{count} {'GPU' if self.device == 'cuda' else 'core'}{'s' if count > 1 else ''}"

    def new_lane(self, num_gpus: int, strategy: Any = None) -> Any:
        """An actor that holds so many GPUs (cores); Ray places it, later where they are busy now."""
        needs: dict[str, Any] = {"num_cpus": num_gpus}
        if self.device == "cuda":
            needs = {"num_cpus": 0, "num_gpus": num_gpus, "resources": self._accelerator_need()}
        environment = {"PYTHONPATH": os.environ.get("PYTHONPATH")}
        if self.device == "cuda" or "OMP_NUM_THREADS" in os.environ:
            # Ray allows as many threads as it gave cores; beside a GPU that would slow what torch does without Ray
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS")
        if strategy is not None:
            needs["scheduling_strategy"] = strategy
        lane = ray.remote(Lane).options(max_restarts=0, max_task_retries=0, **needs)
        own_gpus = num_gpus if self.device == "cuda" else 0
        self._lanes.append(
            lane.remote(
                self._command, num_gpus=own_gpus, folder=os.getcwd(), environment=environment,
                sources=self.sources,
            )
        )  # fmt: skip
        return self._lanes[-1]

    def new_group(self, num_nodes: int, num_gpus: int, *, limit_s: float) -> PlacementGroup:
        """So many GPUs (cores) on each of so many nodes; raises GnnpredError where they are not free in ``limit_s``."""
        needs = {"GPU": num_gpus, **self._accelerator_need()} if self.device == "cuda" else {"CPU": num_gpus}
        group = placement_group([needs] * num_nodes, strategy="STRICT_SPREAD")
        if not group.wait(limit_s):
            remove_placement_group(group)
            raise GnnpredError(f"Ray had no {num_nodes} nodes with {self.unit(num_gpus)} free within {limit_s:g} s")
        return group

    def lanes_of(self, group: PlacementGroup, num_gpus: int) -> list[Any]:
        """One lane on each node of the group."""
        return [
            self.new_lane(
                num_gpus, PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=i)
            )
            for i in range(group.bundle_count)
        ]

    def end_group(self, group: PlacementGroup) -> None:
        """Give its nodes back."""
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(group)

    def end_lane(self, lane: Any, *, gently: bool = True) -> None:
        """Give back what it holds; ``gently`` lets it remove its files first."""
        with contextlib.suppress(ray.exceptions.RayError):
            if gently:
                ray.get(lane.close.remote(), timeout=_CLOSE_LIMIT_S)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(lane)  # its workers end when their input closes
        self._lanes.remove(lane)

    def end_all(self) -> None:
        """End every lane and leave the cluster."""
        if not self._is_connected:
            return
        self._is_connected = False
        for lane in list(self._lanes):
            self.end_lane(lane, gently=False)
        ray.shutdown()

    def _accelerator_need(self) -> dict[str, float]:
        return {} if self._accelerator is None else {_ACCELERATOR + self._accelerator: _ACCELERATOR_SHARE}


def connect_ray(address: str, *, num_cpus: int | None = None, runtime_env: dict[str, Any] | None = None) -> None:
    """``ray.init`` at ``HOST:PORT``, ``auto`` or ``local``: an instance of ``num_cpus`` cores, by default all.

    Raises UsageError for what is no address, GnnpredError where no cluster answers or none can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": runtime_env}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        if num_cpus is not None:
            options["num_cpus"] = num_cpus
    elif address != "auto":
        check_address(address)
    for tries_left in range(_MAX_STARTS - 1, -1, -1):
        try:
            ray.init(address=address, **options)
            return
        except Exception as error:  # Ray raises bare ones
            if address == "local" and tries_left:
                continue  # its processes wait 15 s for each other: too little on a busy machine at the first time
            raise GnnpredError(f"cannot use Ray at {address}: {line_of(error)}") from error


def check_address(address: str) -> None:
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


def line_of(error: BaseException) -> str:
    """The last line that says something: Ray puts remote tracebacks in front."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
