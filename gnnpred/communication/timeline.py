"""The timeline of one training step on several GPUs, whatever the strategy.

:func:`step_timeline` puts predicted op times and collectives together. The parts live in modules of their own:
:mod:`~gnnpred.communication.layout` (who talks to whom), :mod:`~gnnpred.communication.ddp`,
:mod:`~gnnpred.communication.data_parallel`, :mod:`~gnnpred.communication.sharded` (FSDP, ZeRO),
:mod:`~gnnpred.communication.layer_collectives` (tensor and expert parallelism) and
:mod:`~gnnpred.communication.pipeline`. Identical ranks are never simulated one by one: the work grows with the ops and
the pipeline stages, not with the GPUs.

Constants of a step are fitted from measured runs (:mod:`gnnpred.communication_fit.steps`):

* ``contention``: ops take (1 + contention) times as long while a collective overlaps them;
* ``sync_base_ms + sync_ms_per_log2_gpu * log2(gpus)``: what a synchronous step loses beyond its
  collectives (stragglers, launches, buffer broadcasts). Measured, it is the same number of milliseconds in
  every precision, so it is added and never scaled with compute;
* slowdowns of a collective that overlaps kernels, by what carries it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot, log2

import numpy as np

from gnnpred.communication.collectives import estimate_collective, load_constants
from gnnpred.communication.data_parallel import (
    DataParallelConstants,
    data_parallel_communication_ms,
    data_parallel_constants,
    data_parallel_ms,
)
from gnnpred.communication.ddp import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    GradientBucket,
    Reduction,
    all_reductions,
    bucket_time_ms,
    fill_buckets,
    overlap,
    run_backward,
)
from gnnpred.communication.fabrics import ClusterFabric
from gnnpred.communication.layer_collectives import blocking_collectives, expert_collectives
from gnnpred.communication.layout import layout_of
from gnnpred.communication.pipeline import pipeline_step
from gnnpred.communication.sharded import FullyShardedPass, gather_weights, scatter_reductions
from gnnpred.communication.step_work import (
    Gradient,
    StepConstants,
    StepWork,
    local_part,
    make_work,
    step_constants,
)
from gnnpred.communication.streams import TwoStreams
from gnnpred.communication.trace import Trace
from gnnpred.costs import OpCost
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.graph import OpGraph, OpPhase
from gnnpred.job import SHARDED_STRATEGIES, STRATEGIES, JobSpec, Phase
from gnnpred.passes.layers import find_experts
from gnnpred.passes.tensor_parallel import LayerCollective

__all__ = [
    "BUCKET_BYTES", "FIRST_BUCKET_BYTES", "DataParallelConstants", "Gradient", "GradientBucket", "StepConstants",
    "StepTimeline", "bucket_time_ms", "data_parallel_communication_ms", "data_parallel_constants", "fill_buckets",
    "local_part", "overlap", "step_constants", "step_spread", "step_timeline",
]  # fmt: skip

_FULLY_SHARDED = ("fsdp", "zero3")
_SIMULATED_PASSES = 4  # of accumulated ones: those between the second and the last are alike


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One step of the busiest rank in ms. ``forward + backward + optimizer + exposed + bubble = step``.

    ``communication_ms`` counts overlapped time too. ``fabric`` says in words what the GPUs talk over.
    """

    step_ms: float
    forward_ms: float  # all micro-batches
    backward_ms: float  # without what communication adds
    optimizer_ms: float
    communication_ms: float  # busy time of all collectives, hidden or not
    exposed_ms: float  # what several GPUs add to the step
    num_buckets: int
    gradient_bytes: float  # per rank and step
    fabric: str
    warnings: tuple[str, ...]
    bubble_ms: float = 0.0  # pipelines: the busiest stage waits for others


def step_timeline(
    graph: OpGraph,
    costs: Sequence[OpCost],
    op_ms: np.ndarray,
    job: JobSpec,
    *,
    collectives: Sequence[LayerCollective] = (),
    repeated_ops: frozenset[int] = frozenset(),
    trace: Trace | None = None,
) -> StepTimeline:
    """Timeline of one step of a lowered graph with backward and optimizer ops.

    ``op_ms`` is (num_ops,) float, the time of each op on one GPU in ms, repeats included; ``costs`` likewise has one
    entry per op. Under tensor parallelism graph and times are those of one GPU's share, with the ``collectives`` and
    ``repeated_ops`` of :func:`gnnpred.passes.tensor_parallel.split_products`. ``trace`` collects what is simulated.

    Raises UsageError for an unknown strategy or fabric and for a layout that the graph or the nodes exclude,
    GnnpredError if the lengths differ.
    """
    if job.strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {job.strategy!r}: choose one of {', '.join(STRATEGIES)}")
    op_ms = np.asarray(op_ms, float)
    if not len(op_ms) == len(graph.ops) == len(costs):
        raise GnnpredError(f"{len(op_ms)} times and {len(costs)} costs for {len(graph.ops)} ops")
    layout = layout_of(job)
    experts = find_experts(graph) if job.expert_parallel > 1 else None
    collectives = list(collectives)
    if job.expert_parallel > 1:
        if experts is None:
            raise UsageError(
                f"--ep {job.expert_parallel}: {graph.name or 'the model'} shows no experts (weights named experts, or "
                "stacked ones beside a top-k)"
            )
        if job.expert_parallel > experts.num_experts:
            raise UsageError(f"--ep {job.expert_parallel} is more than the {experts.num_experts} experts of a layer")
        collectives += expert_collectives(graph, experts)
    work = make_work(
        graph, costs, op_ms, job, layout, experts=experts.parameters if experts else frozenset(), trace=trace
    )
    work = replace(
        work,
        op_ms=_times_of_rank(work, repeated_ops),
        blocking=blocking_collectives(graph, collectives, layout, sequence_parallel=job.sequence_parallel),
    )
    layout = replace(layout, warnings=(*layout.warnings, *_extrapolated(work)))
    work = replace(work, layout=layout)
    if job.phase is Phase.INFERENCE:
        return _inference(work)
    if job.pipeline_parallel > 1:
        parts = pipeline_step(work)
        return StepTimeline(
            **vars(parts), gradient_bytes=work.gradient_bytes, fabric=layout.description, warnings=layout.warnings
        )
    return _step_of_one_stage(work)


def _extrapolated(work: StepWork) -> list[str]:
    """Collectives of the step that no measurement of their fabric covers, by one typical size each."""
    job, layout = work.job, work.layout
    used: dict[str, tuple[float, ClusterFabric]] = {}
    total = work.gradient_bytes
    if job.phase is not Phase.INFERENCE and total:
        if job.shard_size > 1:
            per_layer = total / max(1, work.spans.num_layers)
            used["all_gather"] = used["reduce_scatter"] = (per_layer, layout.shard)
        elif job.strategy == "ddp":
            used["all_reduce"] = (min(BUCKET_BYTES, total), layout.data)
    for items in work.blocking.values():
        for item in items:
            fabric = layout.expert if item.kind == "all_to_all" else layout.tensor
            used[f"{item.kind} in layers"] = (item.num_bytes, fabric)
    found = []
    for name, (num_bytes, fabric) in used.items():
        if fabric.gpus > 1:
            estimate = estimate_collective(name.split()[0], num_bytes, fabric)
            if not estimate.measured:
                found.append(f"{name.replace('_', '-')} over {fabric.gpus} GPUs: {estimate.basis}")
    return found


def _times_of_rank(work: StepWork, repeated_ops: frozenset[int]) -> np.ndarray:
    """Op times with what sharding takes off: (num_ops,)."""
    job = work.job
    op_ms = work.op_ms.copy()
    if job.sequence_parallel:
        # Norms, dropout and residual sums work on 1 / tp of the tokens.
        for op_idx, op in enumerate(work.graph.ops):
            forward_idx = op_idx if op.phase is OpPhase.FORWARD else op.forward_op_idx
            if op.phase is not OpPhase.OPTIMIZER and forward_idx in repeated_ops:
                op_ms[op_idx] /= job.tensor_parallel
    total = sum(g.num_elements for g in work.gradients)
    if total:
        experts = sum(g.num_elements for g in work.gradients if g.is_expert)
        own = (total - experts * (1 - 1 / job.expert_parallel)) / total
        op_ms[work.ops_of(OpPhase.OPTIMIZER)] *= own / job.shard_size
    return op_ms


def _inference(work: StepWork) -> StepTimeline:
    """A forward pass: only tensor parallelism communicates in it. Raises UsageError for a pipeline."""
    if work.job.pipeline_parallel > 1:
        raise UsageError("--pp is modelled for training; for --phase inference use --tp")
    streams = TwoStreams(work.constants.contention, work.trace)
    for op_idx in work.ops_of(OpPhase.FORWARD):
        work.run(streams, op_idx)
    return _assemble(work, streams, num_buckets=0, passes=1)


def _step_of_one_stage(work: StepWork) -> StepTimeline:
    """All passes of a rank that holds the whole depth of the model, then the update."""
    job = work.job
    streams = TwoStreams(work.constants.contention, work.trace)
    one_pass, num_buckets = _pass_of(work)
    passes = job.num_microbatches
    skipped = passes - _SIMULATED_PASSES + 1 if passes > _SIMULATED_PASSES else 0
    for number in range(passes - skipped):
        before, busy = streams.now_ms, streams.communication_ms
        is_last = number == passes - skipped - 1
        one_pass(streams, is_last)
        if number == 1 and skipped:
            streams.repeat(streams.now_ms - before, skipped, streams.communication_ms - busy)
    streams.wait_until(streams.network_free_ms, "waits for gradients")
    streams.idle(work.sync_ms() if job.strategy != "dp" else 0.0, "synchronisation")
    for op_idx in work.ops_of(OpPhase.OPTIMIZER):
        work.run(streams, op_idx)
    if job.strategy in ("zero1", "zero2"):
        gather_weights(work, streams, _elements_of_rank(work))
    return _assemble(work, streams, num_buckets=num_buckets, passes=passes)


def _pass_of(work: StepWork) -> tuple[Callable[[TwoStreams, bool], None], int]:
    """Runs one forward and backward pass (the last of a step or not), and how many reductions the last has."""
    strategy = work.job.strategy
    if work.layout.data.gpus > 1 and strategy in _FULLY_SHARDED:
        sharded = FullyShardedPass(work)
        return (lambda streams, _: sharded.run(streams)), work.spans.num_layers + 1
    forward = work.ops_of(OpPhase.FORWARD)
    backward = list(enumerate(work.ops_of(OpPhase.BACKWARD)))
    reductions: list[Reduction] = []
    added_ms = (0.0, 0.0)
    if strategy == "dp":
        added_ms = data_parallel_ms(work) if work.job.gpus > 1 else (0.0, 0.0)
    elif work.layout.data.gpus > 1:
        is_sharded = strategy in ("zero1", "zero2")
        reductions = scatter_reductions(work) if is_sharded else all_reductions(work)

    def run(streams: TwoStreams, is_last: bool) -> None:
        streams.block(added_ms[0], "copies of weights, inputs and gradients", work.gradient_bytes)
        streams.idle(added_ms[1], "host replicates the model")
        for op_idx in forward:
            work.run(streams, op_idx)
        run_backward(work, streams, backward, reductions if is_last or strategy == "zero2" else ())

    return run, len(reductions)


def _elements_of_rank(work: StepWork) -> float:
    """Weights that a rank holds while it computes: its own experts only."""
    ep = work.job.expert_parallel
    return sum(g.num_elements / (ep if g.is_expert else 1) for g in work.gradients)


def _assemble(work: StepWork, streams: TwoStreams, *, num_buckets: int, passes: int) -> StepTimeline:
    forward_ms = work.phase_ms(OpPhase.FORWARD) * passes
    backward_ms = work.phase_ms(OpPhase.BACKWARD) * passes
    optimizer_ms = work.phase_ms(OpPhase.OPTIMIZER)
    exposed_ms = max(0.0, streams.now_ms - forward_ms - backward_ms - optimizer_ms)
    if not streams.communication_ms and work.job.gpus == 1:
        exposed_ms = 0.0  # what rounding leaves
    return StepTimeline(
        step_ms=forward_ms + backward_ms + optimizer_ms + exposed_ms,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        optimizer_ms=optimizer_ms,
        communication_ms=streams.communication_ms,
        exposed_ms=exposed_ms,
        num_buckets=num_buckets,
        gradient_bytes=work.gradient_bytes if work.job.gpus > 1 else 0.0,
        fabric=work.layout.description,
        warnings=work.layout.warnings if work.job.gpus > 1 else (),
    )


# Half widths of log(measured / predicted) that a part without a fit of its own adds, in quadrature: assumptions.
_UNMEASURED_SPREAD = {"sharded": 0.15, "tensor": 0.12, "pipeline": 0.12, "expert": 0.25}
_MEASURED_GPUS = 16
_SPREAD_PER_DOUBLING = 0.03  # beyond the largest measured GPU count


def step_spread(job: JobSpec) -> tuple[float, float]:
    """90 % bounds of log(measured / predicted) of a step on several GPUs whose compute is known exactly.

    Measured on held-out models (``spread_90_log`` in constants.json): those of the largest measured GPU count that is
    not above the job's. (0, 0) on one GPU. Strategies without measured runs count as DDP, wider by an assumed share
    (``_UNMEASURED_SPREAD``), and so do GPU counts beyond the measured ones.
    """
    if job.gpus < 2:
        return 0.0, 0.0
    steps = load_constants()["steps"]
    # ZeRO-3 is FSDP; the other stages take its figures as the nearest ones
    name = "fsdp" if job.strategy in SHARDED_STRATEGIES and "spread_90_log" in steps.get("fsdp", {}) else job.strategy
    is_measured = job.strategy == name or job.strategy == "zero3"
    if "spread_90_log" not in steps.get(name, {}):
        name, is_measured = "ddp", False
    by_gpus = steps[name]["spread_90_log"]
    counts = sorted(map(int, by_gpus))
    low, high = by_gpus[str(max((count for count in counts if count <= job.gpus), default=counts[0]))]
    largest = max(_MEASURED_GPUS, counts[-1])
    added = [_SPREAD_PER_DOUBLING * log2(job.gpus / largest) if job.gpus > largest else 0.0]
    for part, is_used in (
        ("sharded", job.shard_size > 1 and not is_measured),
        ("tensor", job.tensor_parallel > 1),
        ("pipeline", job.pipeline_parallel > 1),
        ("expert", job.expert_parallel > 1),
    ):
        if is_used:
            added.append(_UNMEASURED_SPREAD[part])
    wider = hypot(*added)
    return min(-hypot(low, wider) if low < 0 else -wider, 0.0), max(hypot(max(high, 0.0), wider), 0.0)
