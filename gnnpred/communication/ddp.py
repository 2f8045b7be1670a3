"""DistributedDataParallel: buckets of gradients that are all-reduced while the backward pass goes on.

Gradients become ready during the backward pass and fill buckets in that order; a full bucket is all-reduced on a
stream of its own. Under gradient accumulation all passes but the last run in ``no_sync``: they communicate nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gnnpred.communication.fabrics import ClusterFabric
from gnnpred.communication.step_work import Gradient, StepConstants, StepWork, in_step_ms
from gnnpred.communication.streams import TwoStreams

# torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes, kDefaultBucketBytesCap.
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, kw_only=True)
class GradientBucket:
    """Gradients that are reduced together."""

    num_bytes: float
    last_op: int  # position in the backward ops after which the bucket is complete
    num_gradients: int


@dataclass(frozen=True)
class Reduction:
    """One queued collective (or two, one after the other) of a bucket."""

    last_op: int  # position in the backward ops after which it may start
    duration_ms: float
    name: str
    num_bytes: float


def fill_buckets(
    gradients: Sequence[Gradient],
    *,
    first_bucket_bytes: float = FIRST_BUCKET_BYTES,
    bucket_bytes: float = BUCKET_BYTES,
) -> list[GradientBucket]:
    """Buckets in the order in which they are reduced (that of readiness, as DDP rebuilds them after its first step).

    A bucket closes with the gradient that reaches the limit (Reducer's ``compute_bucket_assignment_by_size``).
    """
    buckets: list[GradientBucket] = []
    num_bytes, count, last_op, limit = 0.0, 0, 0, first_bucket_bytes
    for gradient in gradients:
        num_bytes, count, last_op = num_bytes + gradient.num_bytes, count + 1, gradient.ready_after
        if num_bytes >= limit:
            buckets.append(GradientBucket(num_bytes=num_bytes, last_op=last_op, num_gradients=count))
            num_bytes, count, limit = 0.0, 0, bucket_bytes
    if count:
        buckets.append(GradientBucket(num_bytes=num_bytes, last_op=last_op, num_gradients=count))
    return buckets


def bucket_time_ms(num_bytes: float, fabric: ClusterFabric, constants: StepConstants) -> float:
    """All-reduce of one bucket while a step runs, in ms."""
    return in_step_ms("all_reduce", num_bytes, fabric, constants)


def overlap(
    backward_ms: np.ndarray,  # (num_backward_ops,)
    buckets: Sequence[GradientBucket],
    bucket_ms: Sequence[float],
    *,
    contention: float,
) -> float:
    """Milliseconds from the start of the backward pass until both it and the last all-reduce have ended.

    An all-reduce starts when its bucket is complete and the one before it has ended; while one runs, the backward
    ops run (1 + contention) times as long.
    """
    streams = TwoStreams(contention)
    next_bucket = 0
    for position, work_ms in enumerate(backward_ms.tolist()):
        streams.compute(work_ms)
        while next_bucket < len(buckets) and buckets[next_bucket].last_op <= position:
            streams.communicate(bucket_ms[next_bucket])
            next_bucket += 1
    for remaining_ms in bucket_ms[next_bucket:]:
        streams.communicate(remaining_ms)
    return max(streams.now_ms, streams.network_free_ms)


def all_reductions(work: StepWork, gradients: Sequence[Gradient] | None = None) -> list[Reduction]:
    """The all-reduces of a step's gradients in the order of their buckets.

    Experts' gradients are reduced over the copies of the experts alone, and each rank has its share of them.
    """
    gradients = work.gradients if gradients is None else gradients
    ep = work.job.expert_parallel
    groups = [([g for g in gradients if ep == 1 or not g.is_expert], work.layout.data, 1)]
    if ep > 1:
        groups.append(([g for g in gradients if g.is_expert], work.layout.expert_replicas, ep))
    reductions = [
        Reduction(
            bucket.last_op,
            bucket_time_ms(bucket.num_bytes / share, fabric, work.constants),
            "all-reduce of gradients",
            bucket.num_bytes / share,
        )
        for members, fabric, share in groups
        if fabric.gpus > 1
        for bucket in fill_buckets(members)
    ]
    return sorted(reductions, key=lambda reduction: reduction.last_op)


def run_backward(
    work: StepWork, streams: TwoStreams, backward_ops: Sequence[tuple[int, int]], reductions: Sequence[Reduction]
) -> None:
    """Backward ops as (position among all of them, op), and the reductions that become ready on the way."""
    next_reduction = 0
    for position, op_idx in backward_ops:
        work.run(streams, op_idx)
        while next_reduction < len(reductions) and reductions[next_reduction].last_op <= position:
            _start(streams, reductions[next_reduction])
            next_reduction += 1
    for reduction in reductions[next_reduction:]:
        _start(streams, reduction)


def _start(streams: TwoStreams, reduction: Reduction) -> None:
    streams.communicate(reduction.duration_ms, reduction.name, reduction.num_bytes)
