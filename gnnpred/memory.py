"""Crude estimate of the GPU memory that a step needs: for a warning, not for planning."""

from dataclasses import dataclass

from gnnpred.graph import OpGraph, OpPhase, Role
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.op_kinds import Category, category_of
from gnnpred.passes.checkpointing import checkpointed_region
from gnnpred.passes.layers import LayerSpans, find_experts, layer_spans, parameter_roots
from gnnpred.units import GIB

# Bytes of optimizer state per parameter, in units of the parameter's own type: momentum, two moments.
_STATES_PER_PARAMETER = {"sgd": 1, "adam": 2, "adamw": 2, "lamb": 2, "none": 0}
_HALF_OF_MASTERS = 0.5  # gathered weights are half under mixed precision, over fp32 shards


@dataclass(frozen=True)
class _Held:
    """Bytes of the busiest pipeline stage; without a pipeline those of the whole model."""

    parameters: float
    activations: float  # of one micro-batch
    largest_layer: float  # parameters
    largest_op: float  # inputs and outputs


def estimate_memory_gib(lowered: OpGraph, job: JobSpec, *, whole_ops: frozenset[int] = frozenset()) -> float:
    """GiB per GPU for weights, gradients, optimizer state and activations of a lowered forward graph.

    Training keeps every forward result that is not a view for the backward pass; inference keeps the
    largest pair of an op's inputs and outputs. Under activation checkpointing a repeated layer keeps its input, and
    one layer at a time has its activations. Allocator slack, workspaces and the CUDA context (about 1 GiB) are left
    out; in-place activations would need less.

    Under tensor parallelism ``lowered`` is one GPU's share, and sequence parallelism divides what ``whole_ops`` keep.
    A pipeline stage has its layers and as many micro-batches as 1F1B has in flight on the first one. Sharded
    strategies hold 1 / shard of the optimizer state, from ZeRO-2 on of the gradients, fully sharded ones also of the
    weights, beside two gathered layers and the gradient of one.
    """
    held = _held(lowered, job, whole_ops)
    if job.phase is Phase.INFERENCE:
        return (held.parameters + held.largest_op) / GIB
    states = _STATES_PER_PARAMETER[job.optimizer] if job.phase is Phase.TRAIN else 0
    shard = job.shard_size
    weights = gradients = held.parameters
    gathered = 0.0
    if job.strategy in ("fsdp", "zero3") and shard > 1:
        weights /= shard
        width = _HALF_OF_MASTERS if job.precision in (Precision.MIXED, Precision.MIXED_BF16) else 1.0
        gathered = 3 * width * held.largest_layer
    if job.strategy in ("fsdp", "zero3", "zero2"):
        gradients /= shard
    state_bytes = states * held.parameters / shard
    return (weights + gradients + state_bytes + gathered + held.activations * _microbatches_in_flight(job)) / GIB


def _microbatches_in_flight(job: JobSpec) -> float:
    """Activations of how many micro-batches the first stage holds (arXiv 2205.05198, section 4.2.3)."""
    pp, v = job.pipeline_parallel, job.interleave
    in_flight = min(pp, job.num_microbatches)
    return in_flight * (1 + (pp - 1) / (pp * v)) if v > 1 else in_flight


def _held(lowered: OpGraph, job: JobSpec, whole_ops: frozenset[int]) -> _Held:
    tensor_bytes = [tensor.num_bytes for tensor in lowered.tensors]
    is_checkpointed = job.activation_checkpointing == "full"
    layers, num_layers = checkpointed_region(lowered.ops, lowered.tensors) if is_checkpointed else (range(0), 1)
    spans = layer_spans(lowered)
    kept = [0.0] * spans.num_segments
    largest_op = 0.0
    for op_idx, op in enumerate(lowered.ops):
        if category_of(op.kind) is Category.VIEW:
            continue
        result_bytes = operand_bytes = 0.0
        for i in op.outputs:
            result_bytes += tensor_bytes[i]
        for i in op.inputs:
            operand_bytes += tensor_bytes[i]
        largest_op = max(largest_op, result_bytes + operand_bytes)
        if job.sequence_parallel and op_idx in whole_ops:
            result_bytes /= job.tensor_parallel
        kept[spans.segment_of(op_idx)] += result_bytes * op.repeats / (num_layers if op_idx in layers else 1)
    layer_inputs = tensor_bytes[lowered.ops[layers[0]].inputs[0]] * num_layers if layers else 0.0
    parameters = _parameters_by_segment(lowered, job, tensor_bytes, spans)
    inner = range(1, spans.num_segments - 1)
    return _Held(
        parameters=_of_stage(parameters, job.pipeline_parallel),
        activations=_of_stage(kept, job.pipeline_parallel) + layer_inputs / job.pipeline_parallel,
        largest_layer=max((parameters[s] for s in inner), default=0.0),
        largest_op=largest_op,
    )


def _of_stage(by_segment: list[float], stages: int) -> float:
    """An even share of the layers, beside the larger of what stands before and behind them; all of it on one stage."""
    before, *layers, behind = by_segment
    return sum(by_segment) if stages == 1 else sum(layers) / stages + max(before, behind)


def _parameters_by_segment(lowered: OpGraph, job: JobSpec, tensor_bytes: list[float], spans: LayerSpans) -> list[float]:
    """Bytes of weights by the segment that reads them first; each GPU has its share of the experts."""
    experts = find_experts(lowered) if job.expert_parallel > 1 else None
    of_expert = experts.parameters if experts else frozenset()
    roots = parameter_roots(lowered)
    segments: dict[int, int] = {}
    for op_idx, op in enumerate(lowered.ops):
        if op.phase is not OpPhase.FORWARD:
            break
        for i in op.inputs:
            if i in roots:
                segments.setdefault(roots[i], spans.segment_of(op_idx))
    found = [0.0] * spans.num_segments
    for i, tensor in enumerate(lowered.tensors):
        if tensor.role is Role.PARAMETER:
            found[segments.get(i, 0)] += tensor_bytes[i] / (job.expert_parallel if i in of_expert else 1)
    return found
