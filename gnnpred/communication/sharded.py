"""FSDP and ZeRO: weights, gradients and optimizer state spread over the data-parallel ranks.

* ``fsdp`` = ``zero3``: every layer's weights are gathered before its forward pass and again before its backward pass,
  one layer ahead of the compute (PyTorch FSDP's backward prefetch, DeepSpeed's prefetch); its gradients are
  reduce-scattered behind its backward pass. What stands outside the repeated layers is one unit that stays gathered
  from the first forward op to the last backward op (FSDP's root module). Models without alike layers are one unit.
* ``zero2``: gradients are reduce-scattered in buckets in every pass; each rank updates its shard, the new weights are
  gathered behind the optimizer. ``zero1``: the same, but gradients are reduced in the last pass of a step only.

With ``--shard-group`` below the data-parallel size (hybrid sharding) shards are added up over the groups as well: an
all-reduce of each rank's shard behind every reduce-scatter.
"""

from collections.abc import Sequence
from itertools import pairwise

from gnnpred.communication.collectives import collective_ms
from gnnpred.communication.ddp import Reduction, fill_buckets
from gnnpred.communication.step_work import Gradient, StepWork, in_step_ms
from gnnpred.communication.streams import TwoStreams
from gnnpred.graph import OpPhase

# DeepSpeed's defaults reduce_bucket_size and allgather_bucket_size (deepspeed/runtime/zero/config.py), in elements.
ZERO_BUCKET_ELEMENTS = 5e8


def scatter_ms(work: StepWork, num_bytes: float) -> float:
    """Reduce-scatter of gradients over a shard group, and under hybrid sharding the all-reduce between groups."""
    layout, shard = work.layout, work.job.shard_size
    total = in_step_ms("reduce_scatter", num_bytes, layout.shard, work.constants)
    if layout.replicas.gpus > 1:
        total += in_step_ms("all_reduce", num_bytes / shard, layout.replicas, work.constants)
    return total


def scatter_reductions(work: StepWork, gradients: Sequence[Gradient] | None = None) -> list[Reduction]:
    """The bucketed reduce-scatters of ZeRO-1 and 2."""
    gradients = work.gradients if gradients is None else gradients
    if work.layout.data.gpus == 1 or not gradients:
        return []
    width = sum(g.num_bytes for g in gradients) / max(1, sum(g.num_elements for g in gradients))
    limit = ZERO_BUCKET_ELEMENTS * width
    return [
        Reduction(b.last_op, scatter_ms(work, b.num_bytes), "reduce-scatter of gradients", b.num_bytes)
        for b in fill_buckets(gradients, first_bucket_bytes=limit, bucket_bytes=limit)
    ]


def gather_weights(work: StepWork, streams: TwoStreams, num_elements: float) -> None:
    """ZeRO-1 and 2 behind the optimizer: nothing runs until all new weights have arrived, at the time on idle links."""
    if work.layout.shard.gpus == 1 or not num_elements:
        return
    num_buckets = max(1, -(-num_elements // ZERO_BUCKET_ELEMENTS))
    num_bytes = num_elements * work.parameter_width / num_buckets
    duration_ms = num_buckets * collective_ms("all_gather", num_bytes, work.layout.shard)
    streams.wait_until(streams.communicate(duration_ms, "all-gather of new weights", num_bytes * num_buckets))


class FullyShardedPass:
    """The forward and backward pass of fully sharded layers."""

    def __init__(self, work: StepWork) -> None:
        self.work = work
        last = work.spans.num_segments - 1
        is_root = [True, *[not work.spans.are_alike] * work.spans.num_layers, True]
        self._is_root = is_root
        self._elements = [0.0] * (last + 1)  # of each segment; the root unit's are counted in segment 0
        self._gradient_bytes = [0.0] * (last + 1)
        for gradient in work.gradients:
            unit = 0 if is_root[gradient.segment] else gradient.segment
            self._elements[unit] += gradient.num_elements
            self._gradient_bytes[unit] += gradient.num_bytes
        self._forward = _by_segment(work, OpPhase.FORWARD)
        self._backward = _by_segment(work, OpPhase.BACKWARD)

    def _gather(self, streams: TwoStreams, unit: int) -> float:
        num_bytes = self._elements[unit] * self.work.parameter_width
        if not num_bytes:
            return streams.now_ms
        duration_ms = in_step_ms("all_gather", num_bytes, self.work.layout.shard, self.work.constants)
        return streams.communicate(duration_ms, f"all-gather of {_unit_name(unit)}", num_bytes)

    def _scatter(self, streams: TwoStreams, unit: int) -> None:
        num_bytes = self._gradient_bytes[unit]
        if num_bytes:
            streams.communicate(scatter_ms(self.work, num_bytes), f"reduce-scatter of {_unit_name(unit)}", num_bytes)

    def run(self, streams: TwoStreams) -> None:
        """One pass: layers in order, then in reverse, each unit gathered while the one before it computes."""
        layers = [s for s in range(len(self._elements)) if not self._is_root[s]]
        self._run(streams, layers, self._forward, range(len(self._elements)), scatter=False, root=True)
        self._run(streams, layers[::-1], self._backward, range(len(self._elements) - 1, -1, -1), scatter=True)
        self._scatter(streams, 0)
        streams.wait_until(streams.network_free_ms)

    def _run(
        self,
        streams: TwoStreams,
        layers: Sequence[int],
        ops: Sequence[Sequence[int]],
        order: Sequence[int],
        *,
        scatter: bool,
        root: bool = False,
    ) -> None:
        ready = {0: self._gather(streams, 0)} if root else {}
        following = dict(pairwise(layers))
        if layers:
            ready[layers[0]] = self._gather(streams, layers[0])
        if root:
            streams.wait_until(ready[0], "waits for weights")
        for segment in order:
            if segment in ready and segment:
                streams.wait_until(ready[segment], "waits for weights")
            if (ahead := following.get(segment)) is not None:
                ready[ahead] = self._gather(streams, ahead)
            for op_idx in ops[segment]:
                self.work.run(streams, op_idx)
            if scatter and not self._is_root[segment]:
                self._scatter(streams, segment)


def _unit_name(unit: int) -> str:
    return f"layer {unit}" if unit else "the outer weights"


def _by_segment(work: StepWork, phase: OpPhase) -> list[list[int]]:
    ops: list[list[int]] = [[] for _ in range(work.spans.num_segments)]
    for op_idx in work.ops_of(phase):
        ops[work.segments[op_idx]].append(op_idx)
    return ops
