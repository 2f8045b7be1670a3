"""What runs on the nodes of a Ray cluster for :mod:`gnnpred.collect.ray_engine`; the driver's Ray is theirs."""

import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnnpred.collect.engine import PROBE_LIMIT_S, Reply, Task
from gnnpred.collect.gpu_monitor import keep_gpus_open
from gnnpred.collect.local_engine import visible_gpus
from gnnpred.collect.rank_group import RankGroup
from gnnpred.collect.workers import POLL_S, WORKER_COMMAND, Workers


class Lane:
    """The GPUs (or cores) that one Ray actor holds: measures one configuration at a time, in processes of its own.

    ``command`` starts a worker; None is this node's interpreter. ``folder``: the driver's working folder, from which a
    user's modules are found where the nodes share it. ``environment``: variables as the driver has them (None: unset),
    where Ray would set them in its own way. ``sources``: what workers need to import.
    """

    def __init__(
        self,
        command: Sequence[str] | None,
        *,
        num_gpus: int,
        folder: str,
        environment: Mapping[str, str | None],
        sources: Sequence[str],
    ) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        # Ray names the GPUs that it gave to this process
        self._gpus = visible_gpus(num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES")) if num_gpus else None
        if num_gpus:
            keep_gpus_open()
        self._scratch = tempfile.TemporaryDirectory(prefix="gnnpred-lane-")
        self._workers = Workers(command or WORKER_COMMAND, Path(self._scratch.name), forked=sources)
        self._ready: RankGroup | None = None

    def probe(self, message: dict[str, Any]) -> Reply:
        """The reply to a probe here."""
        return self._workers.run(message, limit_s=PROBE_LIMIT_S)

    def free_address(self) -> str:
        """``host:port`` on this node where ranks can meet."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def run(
        self,
        task: Task,
        following: Task | None,
        *,
        first_rank: int = 0,
        world_size: int | None = None,
        init_method: str | None = None,
    ) -> Reply:
        """The reply to ``task``; the workers of ``following`` get ready in the meantime.

        Further arguments where lanes of other nodes take part: see :class:`RankGroup`.
        """
        group, self._ready = self._ready, None
        if group is None or group.task != task:
            if group is not None:
                group.end()
            group = RankGroup(self._workers, task, first_rank=first_rank, world_size=world_size)
        group.release(gpus=self._gpus, init_method=init_method)
        if following is not None:
            self._ready = RankGroup(self._workers, following)
        while (reply := group.poll()) is None:
            time.sleep(POLL_S)
        return reply

    def close(self) -> None:
        """End what runs and leave nothing behind."""
        self._workers.end_all()
        self._scratch.cleanup()
