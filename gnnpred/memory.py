"""Crude estimate of the GPU memory that a step needs: for a warning, not for planning."""

from gnnpred.graph import OpGraph, Role
from gnnpred.job import JobSpec, Phase
from gnnpred.op_kinds import Category, category_of
from gnnpred.passes.checkpointing import checkpointed_region
from gnnpred.units import GIB

# Bytes of optimizer state per parameter, in units of the parameter's own type: momentum, two moments.
_STATES_PER_PARAMETER = {"sgd": 1, "adam": 2, "adamw": 2, "lamb": 2, "none": 0}


def estimate_memory_gib(lowered: OpGraph, job: JobSpec) -> float:
    """GiB for weights, gradients, optimizer state and activations of a lowered forward graph.

    Training keeps every forward result that is not a view for the backward pass; inference keeps the
    largest pair of an op's inputs and outputs. Under activation checkpointing a repeated layer keeps its input, and
    one layer at a time has its activations. Allocator slack, workspaces and the CUDA context (about 1 GiB) are left
    out; in-place activations would need less.
    """
    tensor_bytes = [tensor.num_bytes for tensor in lowered.tensors]
    parameter_bytes = sum(tensor_bytes[i] for i, t in enumerate(lowered.tensors) if t.role is Role.PARAMETER)
    kept_bytes = largest_op_bytes = 0.0
    is_checkpointed = job.activation_checkpointing == "full"
    layers, num_layers = checkpointed_region(lowered.ops, lowered.tensors) if is_checkpointed else (range(0), 1)
    for op_idx, op in enumerate(lowered.ops):
        if category_of(op.kind) is Category.VIEW:
            continue
        result_bytes = operand_bytes = 0.0
        for i in op.outputs:
            result_bytes += tensor_bytes[i]
        for i in op.inputs:
            operand_bytes += tensor_bytes[i]
        largest_op_bytes = max(largest_op_bytes, result_bytes + operand_bytes)
        kept_bytes += result_bytes * op.repeats / (num_layers if op_idx in layers else 1)
    if layers:
        layer_input = lowered.ops[layers[0]].inputs[0]
        kept_bytes += tensor_bytes[layer_input] * num_layers
    if job.phase is Phase.INFERENCE:
        return (parameter_bytes + largest_op_bytes) / GIB
    states = _STATES_PER_PARAMETER[job.optimizer] if job.phase is Phase.TRAIN else 0
    return (parameter_bytes * (2 + states) + kept_bytes) / GIB
