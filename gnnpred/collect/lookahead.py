"""How many workers prepare ahead of the lanes, from what preparing and measuring took so far."""

import math
import os
import statistics
from collections import deque

from gnnpred.collect.memory_limit import available_memory_bytes

_WINDOW = 20  # configurations whose times count: models of a sweep differ
# A measuring process drives its GPU from one thread and runs autograd in a second one.
_CORES_PER_LANE = 2
# What a worker takes on the host beside what it shares with others, a mid-sized model and its libraries.
_WORKER_BYTES = 2 << 30


class Lookahead:
    """The number of workers to keep in preparation or ready, at most ``limit``.

    ``num_lanes`` lanes that are busy for b seconds each take ``num_lanes / b`` workers a second; as each needs p
    seconds to prepare, ``num_lanes * p / b`` are in preparation at any time (Little's law), and one per lane is ready.
    """

    def __init__(self, num_lanes: int, limit: int) -> None:
        self._num_lanes = num_lanes
        self._limit = limit
        self._prepare_s: deque[float] = deque(maxlen=_WINDOW)
        self._busy_s: deque[float] = deque(maxlen=_WINDOW)

    def add(self, *, prepare_s: float | None, busy_s: float) -> None:
        """What one more configuration took; ``prepare_s`` is None where its worker did not live to tell."""
        if prepare_s is not None:
            self._prepare_s.append(prepare_s)
            self._busy_s.append(busy_s)

    @property
    def num_workers(self) -> int:
        ratio = 1.0  # until something is known
        if self._busy_s:
            ratio = statistics.median(self._prepare_s) / max(statistics.median(self._busy_s), 1e-3)
        return min(self._limit, self._num_lanes + math.ceil(self._num_lanes * ratio))


def most_ahead(num_lanes: int) -> int:
    """What this machine's cores and free memory allow beside ``num_lanes`` that measure, at least one per lane."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    by_memory = _available_bytes() // _WORKER_BYTES
    return max(num_lanes, min(num_cores - _CORES_PER_LANE * num_lanes, by_memory))


def _available_bytes() -> int:
    try:
        return available_memory_bytes()
    except (OSError, KeyError):
        return 8 << 30
