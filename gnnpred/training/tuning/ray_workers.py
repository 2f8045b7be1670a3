"""Workers of a study on a Ray cluster: actors of one core each."""

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

import ray

from gnnpred.collect.ray_cluster import connect_ray, line_of
from gnnpred.training.tuning.study import Search
from gnnpred.training.tuning.workers import Event, TrialWorker, portable_error, worker_name


class RayPool:
    """Actors on the cluster at ``address``; ``local`` is a Ray of ``num_workers`` cores for as long as the pool lives.

    Raises UsageError for what is no address, GnnpredError where no cluster answers or none can be started.
    """

    def __init__(self, search: Search, digests: dict[str, str], num_workers: int, address: str) -> None:
        self._numbers = itertools.count()
        self._actors: dict[str, Any] = {}
        self._pending: dict[Any, str] = {}  # reference to what an actor does -> worker
        environment = {"OMP_NUM_THREADS": "1"}
        if address == "local":
            root = str(Path(__file__).parents[3])
            environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        connect_ray(address, num_cpus=num_workers, runtime_env={"env_vars": environment})
        self._job = ray.get_runtime_context().get_job_id()
        self._make = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._arguments = (search, digests)

    def start(self) -> str:
        worker = worker_name(f"ray-{self._job}", next(self._numbers))
        actor = self._actors[worker] = self._make.remote(*self._arguments, worker)
        self._pending[actor.prepare.remote()] = worker
        return worker

    def run_trial(self, worker: str) -> None:
        self._pending[self._actors[worker].run_trial.remote()] = worker

    def wait(self, timeout_s: float) -> list[Event]:
        if not self._pending:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        events = []
        for reference in done:
            worker = self._pending.pop(reference)
            try:
                error = ray.get(reference)
            except ray.exceptions.RayError as death:  # what it raises itself it returns
                del self._actors[worker]
                reason = f"the last one: {line_of(death)}"
                events.append(Event(worker, has_died=True, reason=reason))
                continue
            if error is not None:
                raise error
            events.append(Event(worker))
        return events

    def close(self) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        ray.shutdown()


class _Actor:
    """What Ray makes in a process of its own. Errors are returned: Ray would wrap those that are raised."""

    def __init__(self, search: Search, digests: dict[str, str], name: str) -> None:
        self._arguments = (search, digests, name)

    def prepare(self) -> Exception | None:
        try:
            self._worker = TrialWorker(*self._arguments)
        except Exception as error:
            return portable_error(error)
        return None

    def run_trial(self) -> Exception | None:
        try:
            self._worker.run_trial()
        except Exception as error:
            return portable_error(error)
        return None
