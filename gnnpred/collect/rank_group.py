"""The workers that measure one configuration on this machine: one, or one per rank of a distributed step."""

import time
from typing import Any

from gnnpred.collect.engine import Reply, Task
from gnnpred.collect.workers import Worker, Workers

# When one rank fails its peers lose their connections and fail as well, often sooner than the system reports its end.
_GRACE_S = 2.0
# Which of several ranks' failures says most about the cause.
_TELLING = ("crash", "oom", "nan", "unsupported", "timeout", "error")


class RankGroup:
    """Workers of one task, preparing from the start; released together, ended together.

    Ranks find each other through a file that this machine's ranks share (``file://`` of torch.distributed), so that no
    port has to be free.
    """

    def __init__(self, workers: Workers, task: Task) -> None:
        self.task = task
        self._rendezvous = workers.new_path("rendezvous")
        self._members: list[Worker] = [workers.start(task.message()) for _ in range(task.num_gpus)]
        self._replies: dict[int, Reply] = {}
        self._failed_at: float | None = None

    @property
    def num_workers(self) -> int:
        return len(self._members)

    def release(self, *, gpus: list[str] | None) -> None:
        """Let all begin on these GPUs (names for CUDA_VISIBLE_DEVICES), one each; None on a CPU."""
        for i in range(len(self._members)):
            go: dict[str, Any] = {"gpus": ",".join(gpus)} if gpus else {}
            if len(self._members) > 1:
                go["ranks"] = {
                    "rank": i,
                    "local_rank": i,
                    "world_size": len(self._members),
                    "init_method": f"file://{self._rendezvous}",
                }
            self._members[i].release(limit_s=self.task.limit_s, go=go)

    def poll(self) -> Reply | None:
        """Rank 0's reply when all are done, the most telling one when some failed, None before."""
        for i in range(len(self._members)):
            if i not in self._replies and (reply := self._members[i].poll()) is not None:
                self._replies[i] = reply
                if reply["status"] != "ok" and self._failed_at is None:
                    self._failed_at = time.monotonic()
        is_complete = len(self._replies) == len(self._members)
        if not is_complete and (self._failed_at is None or time.monotonic() < self._failed_at + _GRACE_S):
            return None
        self.end()
        return combined(self._replies)

    def end(self) -> None:
        """End all of them."""
        for i in range(len(self._members)):
            if i not in self._replies:
                self._members[i].end()
        self._rendezvous.unlink(missing_ok=True)


def combined(replies: dict[int, Reply]) -> Reply:
    """One reply for ranks' replies (rank -> reply, those that arrived): rank 0's, or why not all are ok."""
    failed = {rank: reply for rank, reply in replies.items() if reply["status"] != "ok"}
    if not failed:
        return replies[0]
    rank = min(failed, key=lambda each: (_TELLING.index(failed[each]["status"]), each))
    reply = failed[rank]
    return reply if len(replies) == 1 and rank == 0 else {**reply, "reason": f"rank {rank}: {reply['reason']}"}
