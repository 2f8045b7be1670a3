"""The workers that measure one configuration: one, or one per rank of a distributed step."""

import re
import time
from collections.abc import Iterable
from typing import Any, Protocol

from gnnpred.collect.collective_launch import CollectiveLaunch
from gnnpred.collect.engine import Reply, Task
from gnnpred.collect.workers import Worker, Workers

# When one rank fails its peers lose their connections and fail as well, often sooner than the system reports its end.
GRACE_S = 2.0
# After the time limit, which every node keeps for its own ranks, its reply is under way for no longer than this.
REMOTE_GRACE_S = 30.0
# Which of several ranks' failures says most about the cause.
_TELLING = ("crash", "oom", "nan", "unsupported", "timeout", "error")
# What gloo and NCCL say of a peer that is gone: a consequence.
_LOST_PEER = re.compile(r"(closed|reset) by peer|ncclRemoteError|communicator was aborted")


class RemoteRanks(Protocol):
    """The same task's ranks on other nodes."""

    num_nodes: int  # those that are asked
    init_method: str

    def poll(self) -> dict[int, Reply]:
        """The replies that have arrived, by node."""
        ...

    def end(self) -> None:
        """No one waits for them any more."""
        ...


class RankGroup:
    """Workers of one task on this machine, preparing from the start; released together, ended together.

    Ranks that are all here find each other through a file (``file://`` of torch.distributed): no port has to be free.
    ``first_rank`` of this machine's and ``world_size`` of all ranks, where others run elsewhere.
    """

    def __init__(
        self, workers: Workers, task: Task | CollectiveLaunch, *, first_rank: int = 0, world_size: int | None = None
    ) -> None:
        self.task = task
        self._first_rank = first_rank
        self._world_size = world_size or task.num_gpus
        self._rendezvous = workers.new_path("rendezvous")
        self._members: list[Worker] = [workers.start(task.message()) for _ in range(task.num_gpus)]
        self._replies: dict[int, Reply] = {}  # by the position of the member
        self._remote: RemoteRanks | None = None
        self._remote_replies: dict[int, Reply] = {}
        self._failed_at: float | None = None
        self._remote_ends = 0.0

    @property
    def num_workers(self) -> int:
        return len(self._members)

    def release(
        self, *, gpus: list[str] | None, init_method: str | None = None, remote: RemoteRanks | None = None
    ) -> None:
        """Let all begin on these GPUs (names for CUDA_VISIBLE_DEVICES), one each; None on a CPU.

        ``init_method`` where ranks of other machines take part; ``remote``, which has one, where they report to here.
        """
        self._remote = remote
        self._remote_ends = time.monotonic() + self.task.limit_s + REMOTE_GRACE_S
        init_method = remote.init_method if remote else init_method or f"file://{self._rendezvous}"
        for i in range(len(self._members)):
            go: dict[str, Any] = {"gpus": ",".join(gpus)} if gpus else {}
            if self._world_size > 1:
                go["ranks"] = {
                    "rank": self._first_rank + i,
                    "local_rank": i,
                    "world_size": self._world_size,
                    "init_method": init_method,
                }
            self._members[i].release(limit_s=self.task.limit_s, go=go)

    def poll(self) -> Reply | None:
        """Rank 0's reply when all are done, the most telling one when some failed, None before."""
        for i in range(len(self._members)):
            if i not in self._replies and (reply := self._members[i].poll()) is not None:
                self._replies[i] = self._named(reply, self._first_rank + i)
        if self._remote is not None:
            self._remote_replies |= self._remote.poll()
        replies = [*self._replies.values(), *self._remote_replies.values()]
        if self._remote is not None and time.monotonic() > self._remote_ends:
            silent = set(range(1, self._remote.num_nodes + 1)) - set(self._remote_replies)
            replies += [{"status": "crash", "reason": f"node {node} does not answer", "result": {}} for node in silent]
        if self._failed_at is None and any(reply["status"] != "ok" for reply in replies):
            self._failed_at = time.monotonic()
        num_awaited = len(self._members) + (self._remote.num_nodes if self._remote else 0)
        is_complete = len(replies) == num_awaited
        if not is_complete and (self._failed_at is None or time.monotonic() < self._failed_at + GRACE_S):
            return None
        self.end()
        return most_telling(replies) or self._replies[0]

    def _named(self, reply: Reply, rank: int) -> Reply:
        """The reply with the rank in its reason."""
        is_plain = reply["status"] == "ok" or self._world_size == 1
        return reply if is_plain else {**reply, "reason": f"rank {rank}: {reply['reason']}"}

    def end(self) -> None:
        """End all of them."""
        for i in range(len(self._members)):
            if i not in self._replies:
                self._members[i].end()
        if self._remote is not None:
            self._remote.end()
        self._rendezvous.unlink(missing_ok=True)


def most_telling(replies: Iterable[Reply]) -> Reply | None:
    """Of the replies that are not ok, the one that says most about the cause; None where all are ok."""
    failed = [reply for reply in replies if reply["status"] != "ok"]
    return min(
        failed,
        key=lambda reply: (bool(_LOST_PEER.search(reply["reason"])), _TELLING.index(reply["status"])),
        default=None,
    )
