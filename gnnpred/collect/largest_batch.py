"""The largest batch that fits: doubled until it does not, then bisected."""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Bisection ends within this share of the batch; larger batches are whole multiples of 8, as people choose them.
_WITHIN = 0.1
_MULTIPLE = 8
_MULTIPLES_FROM = 64


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """``batch_size`` is 0 where not even one sample fits."""

    batch_size: int
    num_tries: int
    ended_early: str = ""  # why the search ended before it met a batch that does not fit


def next_smaller(batch_size: int) -> int:
    """The batch about 10 % below, as the search would take it; 0 below 1."""
    smaller = min(batch_size - 1, int(batch_size * (1 - _WITHIN)))
    return smaller // _MULTIPLE * _MULTIPLE if smaller >= _MULTIPLES_FROM else smaller


def find_largest_batch(
    fits: Callable[[int], bool], *, limit: int, max_s: float, clock: Callable[[], float] = time.monotonic
) -> LargestBatch:
    """The largest batch for which ``fits`` is true, to about 10 % (8 samples from 64 up), at most ``limit``.

    ``fits`` is called with powers of 2, then between the last two. The search ends where the next try would
    presumably go beyond ``max_s`` seconds, a try of twice the batch taking twice as long; the first one, which also
    imports code and starts libraries, does not count.
    """
    num_tries, best, too_large = 0, 0, 0
    started, last_s = 0.0, 0.0

    def try_batch(batch_size: int) -> bool:
        nonlocal num_tries, last_s, started
        num_tries += 1
        before = clock()
        found = fits(batch_size)
        if num_tries == 1:
            started = clock()
        else:
            last_s = clock() - before
        return found

    def is_late(batch_size: int) -> bool:
        return bool(best) and clock() - started + last_s * batch_size / best > max_s

    batch_size = 1
    while True:
        if is_late(batch_size):
            return LargestBatch(batch_size=best, num_tries=num_tries, ended_early=f"after {max_s:g} s")
        if not try_batch(batch_size):
            too_large = batch_size
            break
        best = batch_size
        if best >= limit:
            return LargestBatch(batch_size=best, num_tries=num_tries, ended_early=f"at the limit of {limit}")
        batch_size = min(2 * best, limit)
    while True:
        step = _MULTIPLE if best >= _MULTIPLES_FROM else 1
        middle = (best + too_large) // 2 // step * step
        if too_large - best <= max(step, _WITHIN * best) or middle <= best:
            return LargestBatch(batch_size=best, num_tries=num_tries)
        if is_late(middle):
            return LargestBatch(batch_size=best, num_tries=num_tries, ended_early=f"after {max_s:g} s")
        if try_batch(middle):
            best = middle
        else:
            too_large = middle
