"""When a network's gradients become ready: parameters against progress of the backward pass, from its graph alone.

The share of the backward pass that every op takes is its roofline time on one reference GPU (fp32). Shares move little
with GPU, precision and batch, so that one profile per graph serves all runs of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gnnpred.communication.step_work import Gradient, ready_gradients
from gnnpred.costs import CostState, op_costs
from gnnpred.graph import OpGraph, OpPhase
from gnnpred.hardware import find_device
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.passes.canonical import canonicalise
from gnnpred.passes.checkpointing import checkpointed_region
from gnnpred.passes.step import complete_step, lower_forward

NUM_SEGMENTS = 50  # of the backward pass
_REFERENCE = "V100-SXM2-16GB"
_REFERENCE_BATCH = 16
_LAUNCH_MS = 0.01  # no kernel is shorter


@dataclass(frozen=True, kw_only=True)
class GradientProfile:
    """What several GPUs exchange of a network, and when."""

    elements: tuple[float, ...]  # (NUM_SEGMENTS,) parameters whose gradient is complete with a segment
    num_tensors: int
    num_layers: int  # repeated layers: what sharding gathers at once is one of them
    backward_share: float  # of forward and backward
    num_kernels: int  # of forward and backward
    work_gflop: float  # forward and backward, one sample

    @property
    def num_parameters(self) -> float:
        return float(sum(self.elements))

    def gradients(self, bytes_per_element: float) -> tuple[Gradient, ...]:
        """Pieces of gradient in the order in which they become ready; ``ready_after`` is the segment."""
        return tuple(
            Gradient(size * bytes_per_element, segment) for segment, size in enumerate(self.elements) if size > 0
        )


def gradient_profile(graph: OpGraph) -> GradientProfile:
    """Profile of a graph as the corpus stores it (before ``canonicalise``)."""
    device = find_device(_REFERENCE)
    lowered = lower_forward(canonicalise(graph), batch_size=_REFERENCE_BATCH, precision=Precision.FP32)
    step = complete_step(lowered, phase=Phase.TRAIN, optimizer="sgd")
    costs = op_costs(step)
    peak, bandwidth = device.fp32_tflops * 1e9, device.mem_bandwidth_gb_s * 1e6  # per ms
    op_ms = np.array(
        [
            0.0
            if cost.state is CostState.FREE
            else op.repeats * max(cost.flops / peak, cost.bytes_moved / bandwidth, _LAUNCH_MS)
            for op, cost in zip(step.ops, costs, strict=True)
        ]
    )
    is_backward = np.array([op.phase is OpPhase.BACKWARD for op in step.ops])
    is_compute = np.array([op.phase is not OpPhase.OPTIMIZER for op in step.ops])
    backward_ms = op_ms[is_backward]
    end = np.cumsum(backward_ms) / max(backward_ms.sum(), 1e-9)
    elements = np.zeros(NUM_SEGMENTS)
    gradients = ready_gradients(step, JobSpec(device=device), [0] * len(step.ops))
    for gradient in gradients:
        segment = min(NUM_SEGMENTS - 1, int(end[gradient.ready_after] * NUM_SEGMENTS - 1e-9))
        elements[segment] += gradient.num_bytes / 4
    _, num_layers = checkpointed_region(step.ops, step.tensors)
    return GradientProfile(
        elements=tuple(float(round(size)) for size in elements),
        num_tensors=len(gradients),
        num_layers=num_layers,
        backward_share=float(round(backward_ms.sum() / op_ms[is_compute].sum(), 4)),
        num_kernels=int((op_ms[is_compute] > 0).sum()),
        work_gflop=float(
            round(
                sum(c.flops * op.repeats for op, c, use in zip(step.ops, costs, is_compute, strict=True) if use)
                / _REFERENCE_BATCH
                / 1e9,
                3,
            )
        ),
    )


def profiles_of(graph_ids: Sequence[str], graphs: Mapping[str, OpGraph]) -> dict[str, GradientProfile]:
    """Profiles by graph id."""
    return {graph_id: gradient_profile(graphs[graph_id]) for graph_id in dict.fromkeys(graph_ids)}
