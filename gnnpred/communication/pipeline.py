"""Pipeline parallelism: stages of whole layers, 1F1B and its interleaved form.

The repeated layers are cut into contiguous chunks whose longest takes as little time as possible; what stands before
and behind them belongs to the first and the last chunk. With ``interleave`` v every stage has v chunks, stage s those
at s, s + pp ... (Narayanan et al., arXiv 2104.04473, section 2.2). Every stage follows Megatron-LM's order of passes;
a pass starts when the one before it on the same stage has ended and its input has arrived. Of equal stages this takes

    (m + (pp - 1) / v) * (forward + backward)

for m micro-batches: the bubble is (pp - 1) / (v m). Sending a boundary's activation, and its gradient back, holds up
the sender (Megatron-LM's blocking sends). Gradients are reduced behind the last micro-batch's backward pass, stage by
stage, while earlier stages still run theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gnnpred.communication.collectives import collective_ms
from gnnpred.communication.ddp import Reduction, all_reductions, run_backward
from gnnpred.communication.sharded import gather_weights, scatter_reductions
from gnnpred.communication.step_work import StepWork, op_label
from gnnpred.communication.streams import TwoStreams
from gnnpred.communication.trace import Trace
from gnnpred.errors import UsageError
from gnnpred.graph import OpGraph, OpPhase, Role

_SIMULATED_ROUNDS = 4  # of pp micro-batches; from then on every further micro-batch adds the same time


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Layers that run one after the other on one stage, in ms per micro-batch."""

    segments: range
    forward_ms: float  # kernels alone
    backward_ms: float
    forward_wait_ms: float  # collectives inside the layers
    backward_wait_ms: float
    send_ms: float  # activation to the next chunk
    send_back_ms: float  # gradient to the one before
    send_bytes: float

    @property
    def forward_pass_ms(self) -> float:
        return self.forward_ms + self.forward_wait_ms + self.send_ms

    @property
    def backward_pass_ms(self) -> float:
        return self.backward_ms + self.backward_wait_ms + self.send_back_ms


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """A step by the stage that is busiest; the parts add up to ``step_ms``."""

    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    bubble_ms: float
    exposed_ms: float
    communication_ms: float
    num_buckets: int


@dataclass(frozen=True)
class Task:
    """One pass of one chunk over one micro-batch."""

    chunk: int
    microbatch: int
    is_forward: bool
    start_ms: float
    end_ms: float


def balanced_cuts(times_ms: Sequence[float], num_chunks: int) -> list[int]:
    """Ends of ``num_chunks`` contiguous, non-empty chunks whose longest is as short as possible."""
    n = len(times_ms)
    total = np.concatenate([[0.0], np.cumsum(times_ms)])
    longest = np.where(np.arange(n + 1) > 0, total, np.inf)  # with one chunk, over the first i layers
    previous = [np.zeros(n + 1, int)]
    for k in range(2, num_chunks + 1):
        following, cut = np.full(n + 1, np.inf), np.zeros(n + 1, int)
        for i in range(k, n + 1):
            cost = np.maximum(longest[k - 1 : i], total[i] - total[k - 1 : i])
            best = int(np.argmin(cost))
            following[i], cut[i] = cost[best], best + k - 1
        longest = following
        previous.append(cut)
    ends, i = [], n
    for cut in reversed(previous):
        ends.append(i)
        i = int(cut[i])
    return ends[::-1]


def cut_into_chunks(work: StepWork) -> list[Chunk]:
    """The chunks of all stages in the order of the model; raises UsageError where there are fewer layers."""
    job, spans = work.job, work.spans
    num_chunks = job.pipeline_parallel * job.interleave
    if num_chunks > spans.num_layers:
        chunks = f"--pp {job.pipeline_parallel}" + (f" x --interleave {job.interleave}" if job.interleave > 1 else "")
        raise UsageError(
            f"{chunks} is more than the {spans.num_layers} layers that {work.graph.name or 'the model'} repeats"
        )
    kernels = np.zeros((2, spans.num_segments))
    waits = np.zeros((2, spans.num_segments))
    for op_idx, op in enumerate(work.graph.ops):
        if op.phase is OpPhase.OPTIMIZER:
            continue
        row, segment = int(op.phase is OpPhase.BACKWARD), work.segments[op_idx]
        kernels[row, segment] += work.op_ms[op_idx]
        waits[row, segment] += sum(item.duration_ms for item in work.blocking.get(op_idx, ()))
    per_layer = (kernels + waits).sum(axis=0)
    layers = per_layer[1:-1].copy()
    layers[0] += per_layer[0]
    layers[-1] += per_layer[-1]
    ends = balanced_cuts(layers, num_chunks)
    crossing = _crossing_bytes(work.graph, spans.num_forward_ops)
    chunks = []
    for number, (begin, end) in enumerate(pairwise([0, *ends])):
        first = 0 if number == 0 else begin + 1
        last = spans.num_segments if end == spans.num_layers else end + 1
        own = slice(first, last)
        sent = 0.0 if end == spans.num_layers else _boundary_bytes(work, crossing, end)
        received = 0.0 if number == 0 else chunks[-1].send_bytes
        chunks.append(
            Chunk(
                segments=range(first, last),
                forward_ms=float(kernels[0, own].sum()),
                backward_ms=float(kernels[1, own].sum()),
                forward_wait_ms=float(waits[0, own].sum()),
                backward_wait_ms=float(waits[1, own].sum()),
                send_ms=_send_ms(work, sent),
                send_back_ms=_send_ms(work, received),
                send_bytes=sent,
            )
        )
    return chunks


def _send_ms(work: StepWork, num_bytes: float) -> float:
    return collective_ms("send_recv", num_bytes, work.layout.stage) if num_bytes else 0.0


def _boundary_bytes(work: StepWork, crossing: Sequence[float], layer: int) -> float:
    """What the stage behind layer number ``layer`` (from 1) needs: least in the ops between two layers' products."""
    starts = work.spans.starts
    num_bytes = min(crossing[starts[layer - 1] + 1 : starts[layer] + 1])
    return num_bytes / work.job.tensor_parallel if work.job.sequence_parallel else num_bytes


def _crossing_bytes(graph: OpGraph, num_forward: int) -> list[float]:
    """Bytes of activations that ops from a position on read of ops before it, by position; a view counts once."""
    base: dict[int, int] = {}
    made: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for op_idx in range(num_forward):
        op = graph.ops[op_idx]
        for i in op.inputs:
            if graph.tensors[i].role is Role.ACTIVATION:
                last_read[base.get(i, i)] = op_idx
        if op.kind in ("view", "transpose", "identity", "expand", "slice") and op.inputs:
            for o in op.outputs:
                base[o] = base.get(op.inputs[0], op.inputs[0])
        for o in op.outputs:
            made.setdefault(o, op_idx)
    change = [0.0] * (num_forward + 2)
    for tensor_idx, read in last_read.items():
        if tensor_idx in made:
            change[made[tensor_idx] + 1] += graph.tensors[tensor_idx].num_bytes
            change[read + 1] -= graph.tensors[tensor_idx].num_bytes
    return np.cumsum(change).tolist()


def passes_of_stage(stage: int, pp: int, microbatches: int, chunks_per_stage: int) -> list[tuple[int, int, bool]]:
    """Megatron-LM's order of (chunk, micro-batch, is forward) on one stage."""
    total = microbatches * chunks_per_stage
    warm_up = pp - stage - 1
    if chunks_per_stage > 1:
        warm_up = 2 * warm_up + (chunks_per_stage - 1) * pp
    warm_up = min(warm_up, total)

    def numbered(k: int, *, is_forward: bool) -> tuple[int, int, bool]:
        if chunks_per_stage == 1:
            return stage, k, is_forward
        group, within = divmod(k, pp * chunks_per_stage)
        local = within // pp
        if not is_forward:
            local = chunks_per_stage - 1 - local
        return local * pp + stage, group * pp + within % pp, is_forward

    order = [numbered(k, is_forward=True) for k in range(warm_up)]
    for k in range(warm_up, total):
        order += [numbered(k, is_forward=True), numbered(k - warm_up, is_forward=False)]
    return order + [numbered(k, is_forward=False) for k in range(total - warm_up, total)]


def simulate(
    forward_ms: Sequence[float], backward_ms: Sequence[float], *, pp: int, microbatches: int
) -> list[list[Task]]:
    """The passes of every stage in time; ``*_ms`` are (num_chunks,), chunk c runs on stage c modulo pp."""
    num_chunks = len(forward_ms)
    orders = [passes_of_stage(stage, pp, microbatches, num_chunks // pp) for stage in range(pp)]
    next_task, free_ms = [0] * pp, [0.0] * pp
    ended: dict[tuple[int, int, bool], float] = {}
    stages: list[list[Task]] = [[] for _ in range(pp)]
    advanced = True
    while advanced:
        advanced = False
        for stage in range(pp):
            order = orders[stage]
            while next_task[stage] < len(order):
                chunk, microbatch, is_forward = order[next_task[stage]]
                if is_forward:
                    needs = (chunk - 1, microbatch, True) if chunk else None
                elif chunk == num_chunks - 1:
                    needs = (chunk, microbatch, True)
                else:
                    needs = (chunk + 1, microbatch, False)
                if needs is not None and needs not in ended:
                    break
                start = max(free_ms[stage], 0.0 if needs is None else ended[needs])
                end = start + (forward_ms if is_forward else backward_ms)[chunk]
                ended[chunk, microbatch, is_forward] = free_ms[stage] = end
                stages[stage].append(Task(chunk, microbatch, is_forward, start, end))
                next_task[stage] += 1
                advanced = True
    return stages


def pipeline_step(work: StepWork) -> PipelineParts:
    """One step of all stages."""
    job, trace = work.job, work.trace
    pp, m = job.pipeline_parallel, job.num_microbatches
    chunks = cut_into_chunks(work)
    forward = [chunk.forward_pass_ms for chunk in chunks]
    backward = [chunk.backward_pass_ms for chunk in chunks]
    simulated = m if trace is not None else min(m, _SIMULATED_ROUNDS * pp + m % pp)
    stages = simulate(forward, backward, pp=pp, microbatches=simulated)
    ends = [tasks[-1].end_ms for tasks in stages]
    if simulated < m:
        fewer = simulate(forward, backward, pp=pp, microbatches=simulated - pp)
        per_round = [end - tasks[-1].end_ms for end, tasks in zip(ends, fewer, strict=True)]
        ends = [end + more * (m - simulated) / pp for end, more in zip(ends, per_round, strict=True)]
    busy = [m * sum(forward[c] + backward[c] for c in range(stage, len(chunks), pp)) for stage in range(pp)]
    slowest = int(np.argmax(busy))
    finished, optimizers, tails, num_buckets = [], [], [], 0
    for stage in range(pp):
        own = {segment for c in range(stage, len(chunks), pp) for segment in chunks[c].segments}
        tail_ms, communication_ms, count = _gradient_tail(work, own, stage, ends[stage])
        optimizer_ms = _optimizer_ms(work, own)
        after = TwoStreams(0.0)
        if job.strategy == "zero1":
            gather_weights(work, after, sum(g.num_elements for g in work.gradients if g.segment in own))
        finished.append(ends[stage] + tail_ms + optimizer_ms + after.now_ms)
        optimizers.append(optimizer_ms)
        tails.append((tail_ms + after.now_ms, communication_ms + after.communication_ms))
        num_buckets = max(num_buckets, count)
    sync_ms = work.sync_ms()
    step_ms = max(finished) + sync_ms
    own_chunks = [chunks[c] for c in range(slowest, len(chunks), pp)]
    waits_ms = m * sum(c.forward_wait_ms + c.backward_wait_ms + c.send_ms + c.send_back_ms for c in own_chunks)
    forward_ms = m * sum(c.forward_ms for c in own_chunks)
    backward_ms = m * sum(c.backward_ms for c in own_chunks)
    critical = int(np.argmax(finished))
    exposed_ms = waits_ms + tails[critical][0] + sync_ms
    if trace is not None:
        _draw(work, trace, chunks, stages, optimizers, finished, step_ms)
    return PipelineParts(
        step_ms=step_ms,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        optimizer_ms=optimizers[critical],
        bubble_ms=max(0.0, step_ms - forward_ms - backward_ms - optimizers[critical] - exposed_ms),
        exposed_ms=min(exposed_ms, step_ms - forward_ms - backward_ms - optimizers[critical]),
        communication_ms=waits_ms + tails[critical][1],
        num_buckets=num_buckets,
    )


def _gradient_tail(work: StepWork, own: set[int], stage: int, end_ms: float) -> tuple[float, float, int]:
    """``(exposed ms, busy ms, reductions)`` of a stage's gradients, behind its last backward pass."""
    gradients = [g for g in work.gradients if g.segment in own]
    reductions: list[Reduction] = (
        scatter_reductions(work, gradients) if work.job.strategy == "zero1" else all_reductions(work, gradients)
    )
    if not reductions:
        return 0.0, 0.0, 0
    trace = Trace() if work.trace is not None else None
    streams = TwoStreams(work.constants.contention, trace)
    backward_ops = [
        (position, op_idx)
        for position, op_idx in enumerate(work.ops_of(OpPhase.BACKWARD))
        if work.segments[op_idx] in own
    ]
    # The layers' own collectives are part of the pass already.
    alone_ms = float(sum(work.op_ms[op_idx] for _, op_idx in backward_ops)) + sum(
        item.duration_ms for _, op_idx in backward_ops for item in work.blocking.get(op_idx, ())
    )
    run_backward(work, streams, backward_ops, reductions)
    tail_ms = max(streams.now_ms, streams.network_free_ms) - alone_ms
    if trace is not None:
        for event in trace.events:
            if event.stream == "communication":
                work.trace.add(
                    event.name, "communication", end_ms - alone_ms + event.start_ms, event.duration_ms,
                    category="collective", stage=stage, **event.arguments,
                )  # fmt: skip
    return tail_ms, sum(r.duration_ms for r in reductions), len(reductions)


def _optimizer_ms(work: StepWork, own: set[int]) -> float:
    """A stage updates its own weights: their share of the whole update (``work.op_ms`` holds a rank's share)."""
    total = sum(g.num_elements for g in work.gradients)
    share = sum(g.num_elements for g in work.gradients if g.segment in own) / total if total else 0.0
    return work.phase_ms(OpPhase.OPTIMIZER) * share


def _draw(
    work: StepWork,
    trace: Trace,
    chunks: Sequence[Chunk],
    stages: Sequence[Sequence[Task]],
    optimizers: Sequence[float],
    finished: Sequence[float],
    step_ms: float,
) -> None:
    """The passes of every stage; the first micro-batch of each chunk op by op."""
    for stage, tasks in enumerate(stages):
        now = 0.0
        for task in tasks:
            if task.start_ms > now:
                trace.add("bubble", "compute", now, task.start_ms - now, category="wait", stage=stage)
            _draw_task(work, trace, chunks, task, stage)
            now = task.end_ms
        update_ms = optimizers[stage]
        after = finished[stage] - now - update_ms
        if after > 0:
            trace.add("waits for gradients and weights", "compute", now, after, category="wait", stage=stage)
        trace.add("optimizer", "compute", now + after, update_ms, category="optimizer", stage=stage)
        now = finished[stage]
        if step_ms > now:
            trace.add("synchronisation", "compute", now, step_ms - now, category="wait", stage=stage)


def _draw_task(work: StepWork, trace: Trace, chunks: Sequence[Chunk], task: Task, stage: int) -> None:
    phase = OpPhase.FORWARD if task.is_forward else OpPhase.BACKWARD
    chunk = chunks[task.chunk]
    arguments = {"micro_batch": task.microbatch, "layers": f"{chunk.segments.start}-{chunk.segments.stop - 1}"}
    send_ms = chunk.send_ms if task.is_forward else chunk.send_back_ms
    if task.microbatch:
        trace.add(
            f"{phase} of micro-batch {task.microbatch}", "compute", task.start_ms,
            task.end_ms - task.start_ms - send_ms, category=str(phase), stage=stage, **arguments,
        )  # fmt: skip
    else:
        streams = TwoStreams(0.0)
        streams.now_ms = task.start_ms
        for op_idx in work.ops_of(phase):
            if work.segments[op_idx] not in chunk.segments:
                continue
            start = streams.now_ms
            streams.compute(float(work.op_ms[op_idx]))
            if streams.now_ms > start:
                name = op_label(work.graph, op_idx)
                trace.add(
                    name, "compute", start, streams.now_ms - start, category=str(phase), stage=stage, micro_batch=0
                )
            for item in work.blocking.get(op_idx, ()):
                name = item.kind.replace("_", "-")
                start, duration = streams.now_ms, item.duration_ms
                trace.add(name, "blocking", start, duration, category="collective", stage=stage, bytes=item.num_bytes)
                trace.add(f"waits for {name}", "compute", start, duration, category="wait", stage=stage)
                streams.now_ms += duration
    if send_ms > 0:
        start = task.end_ms - send_ms
        sent = chunk.send_bytes if task.is_forward else chunks[task.chunk - 1].send_bytes
        trace.add("send to next stage", "blocking", start, send_ms, category="collective", stage=stage, bytes=sent)
        trace.add("waits for send", "compute", start, send_ms, category="wait", stage=stage)
