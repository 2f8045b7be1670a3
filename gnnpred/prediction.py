"""What a prediction says: the step, its parts, and every op of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gnnpred.calibration import CalibrationRun, Correction
from gnnpred.costs import CostState, OpCost
from gnnpred.graph import Component, DType, Op, OpGraph, OpPhase
from gnnpred.job import JobSpec, Phase


@dataclass(frozen=True)
class OpPrediction:
    """One op of the step: what it is and how long it takes."""

    op_idx: int
    kind: str
    name: str
    phase: OpPhase
    component: Component
    dtype: DType | None  # compute type
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    flops: float
    bytes_moved: float
    cost_state: CostState
    repeats: int
    predicted_ms: float


@dataclass(frozen=True, kw_only=True)
class InferenceCorrection:
    """How a measured forward pass of the same model changed the prediction of its training step."""

    measured_ms: float
    predicted_ms: float  # the forward pass as it was predicted
    batch_size: int
    precision: str
    power: float  # of measured / predicted
    factor: float  # multiplies the compute time


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One training step of a job, in ms. ``breakdown_ms`` adds up to ``step_time_ms``."""

    step_time_ms: float
    interval_90_ms: tuple[float, float]
    compute_time_ms: float  # of the busiest GPU, without communication and waiting
    communication_ms: float  # busy time of all collectives, overlapped or not
    exposed_communication_ms: float  # what communication adds to the step
    # forward, backward, optimizer, communication (exposed); with a pipeline also pipeline_bubble
    breakdown_ms: Mapping[str, float]
    throughput_samples_per_s: float  # over all GPUs
    job: JobSpec  # as it was run: batch, precision and framework version filled in
    model: str
    fabric: str  # how the GPUs are connected; empty on one GPU
    coverage_flops: float  # share of the flops that rests on formulas
    coverage_bytes: float  # share of the bytes that rests on formulas
    unsupported_ops: Mapping[str, int]  # name -> how many
    num_parameters: int
    memory_estimate_gib: float
    warnings: tuple[str, ...]
    checkpoint: str
    graph: OpGraph = field(repr=False)  # canonical, lowered, with backward
    costs: tuple[OpCost, ...] = field(repr=False)
    # (num_ops,) float64: each op in one pass, on one GPU that holds all layers (its share under tensor parallelism);
    # sums to compute_time_ms where a step is one pass and nothing is sharded
    op_ms: np.ndarray = field(repr=False)
    traits: CalibrationRun | None = field(default=None, repr=False)  # what a calibration reads of this step
    calibration: Correction | None = None  # by the user's own runs; in all times already
    measured_inference: InferenceCorrection | None = None  # by a measured forward pass; in all times already

    @property
    def coverage(self) -> float:
        """Share of the work that rests on formulas: the smaller of the shares of flops and bytes."""
        return min(self.coverage_flops, self.coverage_bytes)

    @cached_property
    def ops(self) -> tuple[OpPrediction, ...]:
        """Every op of the step in the order of the graph."""
        return tuple(
            _op_prediction(self.graph, op_idx, op, self.costs[op_idx], float(self.op_ms[op_idx]))
            for op_idx, op in enumerate(self.graph.ops)
        )

    def slowest_ops(self, count: int = 10) -> tuple[OpPrediction, ...]:
        """The ops that take the most time, slowest first; free ops are left out."""
        order = np.argsort(-self.op_ms, kind="stable")[:count]
        return tuple(
            _op_prediction(self.graph, int(i), self.graph.ops[i], self.costs[i], float(self.op_ms[i]))
            for i in order
            if self.op_ms[i] > 0
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: everything but the per-op table."""
        job = self.job
        return {
            "step_time_ms": self.step_time_ms,
            "interval_90_ms": list(self.interval_90_ms),
            "compute_time_ms": self.compute_time_ms,
            "communication_ms": self.communication_ms,
            "exposed_communication_ms": self.exposed_communication_ms,
            "breakdown_ms": dict(self.breakdown_ms),
            "throughput_samples_per_s": self.throughput_samples_per_s,
            "model": self.model,
            "device": job.device.name,
            "gpus": job.gpus,
            "nodes": job.nodes,
            "fabric": self.fabric,
            "precision": str(job.precision),
            "batch_size": job.batch_size,
            "global_batch_size": (job.batch_size or 1) * job.data_parallel * job.num_microbatches,
            "strategy": job.strategy,
            "data_parallel": job.data_parallel,
            "tensor_parallel": job.tensor_parallel,
            "sequence_parallel": job.sequence_parallel,
            "pipeline_parallel": job.pipeline_parallel,
            "interleave": job.interleave,
            "expert_parallel": job.expert_parallel,
            "microbatches": job.num_microbatches,
            "shard_group": job.shard_size,
            "phase": str(job.phase),
            "optimizer": job.optimizer if job.phase is Phase.TRAIN else "none",
            "memory_format": job.memory_format,
            "compiler": job.compiler,
            "framework": job.framework,
            "framework_version": job.framework_version,
            "host_os": job.host_os,
            "attention": job.attention,
            "activation_checkpointing": job.activation_checkpointing,
            "coverage": self.coverage,
            "coverage_flops": self.coverage_flops,
            "coverage_bytes": self.coverage_bytes,
            "unsupported_ops": sorted(self.unsupported_ops),
            "unsupported_op_counts": dict(sorted(self.unsupported_ops.items())),
            "num_ops": len(self.graph.ops),
            "num_parameters": self.num_parameters,
            "memory_estimate_gib": self.memory_estimate_gib,
            "warnings": list(self.warnings),
            "checkpoint": self.checkpoint,
            "calibration": self._calibration_dict(),
            "measured_inference": asdict(self.measured_inference) if self.measured_inference else None,
        }

    def _calibration_dict(self) -> dict[str, Any] | None:
        if self.calibration is None:
            return None
        return {
            "factor": self.calibration.factor,
            "num_runs": self.calibration.num_runs,
            "num_models": self.calibration.num_groups,
        }


def _op_prediction(graph: OpGraph, op_idx: int, op: Op, cost: OpCost, predicted_ms: float) -> OpPrediction:
    return OpPrediction(
        op_idx=op_idx,
        kind=op.kind,
        name=op.name,
        phase=op.phase,
        component=op.component,
        dtype=op.compute_dtype,
        input_shapes=tuple(graph.tensors[i].shape for i in op.inputs),
        output_shapes=tuple(graph.tensors[i].shape for i in op.outputs),
        flops=cost.flops,
        bytes_moved=cost.bytes_moved,
        cost_state=cost.state,
        repeats=op.repeats,
        predicted_ms=predicted_ms,
    )
