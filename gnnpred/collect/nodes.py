"""Several nodes: one ``collect`` on each, the first of which leads.

``torchrun --nnodes=N --nproc-per-node=1 --no-python gnnpred collect ...`` (or anything else that sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT) starts the same command on every node. Node 0 keeps the rows and gives out the work; the
others start their ranks of what needs several nodes, and end when it ends. They meet in a key-value store of
torch.distributed, through which the ranks find each other as well.

Keys: ``job/N`` what to run, or ``end``, written by node 0; ``reply/N/NODE`` what became of it there; ``over/N`` that no
one waits any more; ``ended/NODE`` that a node has read ``end``.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnpred.collect.collective_launch import CollectiveLaunch
from gnnpred.collect.engine import Engine, Reply, Task
from gnnpred.collect.local_engine import LocalEngine, visible_gpus
from gnnpred.collect.rank_group import RankGroup
from gnnpred.collect.recipe import Recipe
from gnnpred.collect.workers import POLL_S, WORKER_COMMAND, Workers
from gnnpred.errors import GnnpredError, UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

_END = "end"
_FAREWELL_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Which of several nodes this one is, and where they meet."""

    node: int
    num_nodes: int
    address: str  # of the store: host:port

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "NodePlace | None":
        """None where this is the only node; raises UsageError for several processes on a node."""
        try:
            if "MASTER_ADDR" not in environment or int(environment.get("WORLD_SIZE", "1")) < 2:
                return None
            if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
                raise UsageError("collect starts the processes of a node itself: give torchrun --nproc-per-node=1")
            return cls(
                node=int(environment["RANK"]),
                num_nodes=int(environment["WORLD_SIZE"]),
                address=f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
            )
        except (KeyError, ValueError) as error:
            raise UsageError(f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must all be set: {error}") from error

    def meet(self) -> "dist.Store":
        """The store that all nodes share; waits for the others. Raises GnnpredError."""
        import torch.distributed as dist

        try:
            store, _, _ = next(dist.rendezvous("env://"))  # knows where torchrun itself keeps the store
            return store
        except (RuntimeError, ValueError) as error:
            raise GnnpredError(f"the nodes did not meet at {self.address}: {str(error).splitlines()[0]}") from error


class OtherNodes:
    """The nodes that follow, as node 0 sees them."""

    def __init__(self, store: "dist.Store", place: NodePlace) -> None:
        self.num_nodes = place.num_nodes
        self._store = store
        self._address = place.address
        self._num_jobs = 0

    def start(self, task: Task | CollectiveLaunch) -> "RemoteRanks":
        """Have the ranks of ``task`` on the first nodes after this one started."""
        job = self._num_jobs
        self._num_jobs += 1
        init_method = f"store://{self._address}/job/{job}/"
        self._store.set(f"job/{job}", json.dumps({**task.message(), "init_method": init_method}))
        return RemoteRanks(self._store, job, task.configuration.nodes - 1, init_method)

    def end_all(self) -> None:
        """Let them end, and wait a little until they know: without torchrun the store ends with this process."""
        self._store.set(f"job/{self._num_jobs}", _END)
        waiting = [f"ended/{node}" for node in range(1, self.num_nodes)]
        ends = time.monotonic() + _FAREWELL_LIMIT_S
        while waiting and time.monotonic() < ends:
            waiting = [key for key in waiting if not self._store.check([key])]
            time.sleep(POLL_S)


class RemoteRanks:
    """One task's ranks on other nodes."""

    def __init__(self, store: "dist.Store", job: int, num_nodes: int, init_method: str) -> None:
        self.init_method = init_method
        self._store = store
        self._job = job
        self.num_nodes = num_nodes

    def poll(self) -> dict[int, Reply]:
        """The replies that have arrived, by node."""
        keys = {node: f"reply/{self._job}/{node}" for node in range(1, self.num_nodes + 1)}
        return {node: json.loads(self._store.get(key)) for node, key in keys.items() if self._store.check([key])}

    def end(self) -> None:
        """No one waits for them any more."""
        self._store.set(f"over/{self._job}", "")


def join_nodes(environment: Mapping[str, str], recipe: Recipe) -> Callable[[Workers], Engine] | None:
    """What makes this process's engine; None where it followed another node and that has ended.

    Raises UsageError and GnnpredError as :class:`NodePlace` and :func:`follow` do.
    """
    place = NodePlace.of_environment(environment)
    if place is None:
        return LocalEngine
    store = place.meet()
    if place.node == 0:
        return partial(LocalEngine, others=OtherNodes(store, place))
    with tempfile.TemporaryDirectory(prefix="gnnpred-collect-") as scratch:
        follow(place, store, Workers(WORKER_COMMAND, Path(scratch), forked=recipe.sources_to_import))
    return None


def follow(place: NodePlace, store: "dist.Store", workers: Workers) -> None:
    """Run this node's ranks of every job until node 0 ends; raises GnnpredError where it is gone."""
    job = 0
    try:
        while (text := _awaited(store, f"job/{job}")) != _END:
            _run_job(place, store, workers, job, json.loads(text))
            job += 1
        with contextlib.suppress(RuntimeError):  # the first node waits no longer
            store.set(f"ended/{place.node}", "")
    except RuntimeError as error:  # of the store: what a rank does wrong is its reply
        raise GnnpredError(f"node {place.node}: lost the first node at {place.address}") from error
    finally:
        workers.end_all()


def _run_job(place: NodePlace, store: "dist.Store", workers: Workers, job: int, message: dict[str, Any]) -> None:
    task = CollectiveLaunch.of_message(message) if message["task"] == "collectives" else Task.of_message(message)
    if place.node >= task.configuration.nodes:
        return
    group = RankGroup(workers, task, first_rank=place.node * task.num_gpus, world_size=task.configuration.gpus)
    gpus = visible_gpus(task.num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES")) if task.device == "cuda" else None
    group.release(gpus=gpus, init_method=message["init_method"])
    try:
        while (reply := group.poll()) is None:
            if store.check([f"over/{job}"]):
                return
            time.sleep(POLL_S)
    finally:
        group.end()
    store.set(f"reply/{job}/{place.node}", json.dumps(reply))


def _awaited(store: "dist.Store", key: str) -> str:
    while not store.check([key]):
        time.sleep(POLL_S)
    return store.get(key).decode()
