"""From an ONNX file or an op graph to a predicted training step: the straight line, and a warm predictor."""

import gc
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gnnpred.costs import CostState, OpCost, op_costs
from gnnpred.errors import GnnpredError
from gnnpred.graph import OpGraph, OpPhase
from gnnpred.inference_correction import MeasuredInference, correct_by_inference, inference_job, step_interval_factors
from gnnpred.job import JobSpec, Phase, resolve_precision
from gnnpred.memory import estimate_memory_gib
from gnnpred.prediction import InferenceCorrection, Prediction
from gnnpred.software import has_foreach_optimizer

if TYPE_CHECKING:
    from gnnpred.checkpoint import Checkpoint, ComputeTimes
    from gnnpred.communication.trace import Trace
    from gnnpred.features import GraphStructure
    from gnnpred.passes.tensor_parallel import LayerCollective

_CACHED_GRAPHS = 16  # a 20,000-op graph takes about 50 MB with everything derived from it


def predict(
    model: str | Path | OpGraph,
    job: JobSpec,
    *,
    dims: Mapping[str, int] | None = None,
    checkpoint: str | Path | None = None,
    measured_inference: MeasuredInference | None = None,
    trace: "Trace | None" = None,
) -> Prediction:
    """Predict one training step of an ONNX file or op graph.

    ``dims`` binds symbolic dimensions other than the batch. ``measured_inference`` is a timed forward pass of
    the same model, GPU and software, which corrects the answer. ``trace`` collects the step's timeline.
    Raises GnnpredError (bad file) or UsageError (a job that cannot be). For many predictions hold a :class:`Predictor`.
    """
    return Predictor(checkpoint).predict(model, job, dims=dims, measured_inference=measured_inference, trace=trace)


class Predictor:
    """Keeps a checkpoint's session and the graphs of recent models warm.

    Not for use from several threads at once.
    """

    def __init__(self, checkpoint: "str | Path | Checkpoint | None" = None) -> None:
        if checkpoint is None or isinstance(checkpoint, str | Path):
            from gnnpred.checkpoint import load_checkpoint

            checkpoint = load_checkpoint(checkpoint)
        self.checkpoint = checkpoint
        self._canonical_cache: OrderedDict[tuple, OpGraph] = OrderedDict()
        self._prepared_cache: OrderedDict[tuple, tuple[OpGraph, PreparedGraph]] = OrderedDict()

    def predict(
        self,
        model: str | Path | OpGraph,
        job: JobSpec,
        *,
        dims: Mapping[str, int] | None = None,
        measured_inference: MeasuredInference | None = None,
        trace: "Trace | None" = None,
    ) -> Prediction:
        """One predicted step; see :func:`predict`."""
        forward_job = inference_job(job, measured_inference) if measured_inference else None
        job, job_notes = self._completed(job)
        with _without_garbage_collection():
            if isinstance(model, OpGraph):
                graph = model
            else:
                graph = self._read(Path(model), dims or {}, job.batch_size)
                if graph.batch_size is None:  # the reader's note says that no batch dimension was found
                    job = replace(job, batch_size=None)
            prepared = self._prepare(graph, job)
            structure = prepared.structure
        times = self.checkpoint.predict(prepared.graph, prepared.costs, job, structure=structure)
        job = replace(job, batch_size=prepared.graph.batch_size or job.batch_size or 1)
        applied = None
        if measured_inference and forward_job:
            forward = self.predict(model, forward_job, dims=dims)
            applied, correction_notes = correct_by_inference(measured_inference, forward, job)
            job_notes += correction_notes
            times = replace(
                times,
                op_ms=times.op_ms * applied.factor,
                compute_ms=times.compute_ms * applied.factor,
                interval_factors=step_interval_factors(times.interval_factors, applied),
            )
        return _assemble(
            prepared,
            job,
            times,
            model=str(model) if not isinstance(model, OpGraph) else model.name,
            checkpoint=self.checkpoint.card.name,
            notes=job_notes,
            applied=applied,
            trace=trace,
        )

    def _completed(self, job: JobSpec) -> tuple[JobSpec, list[str]]:
        """The job as the device runs it, and what that changes."""
        precision, note = resolve_precision(job.precision, job.device)
        version = job.framework_version
        if not version and job.framework == "pytorch":
            version = self.checkpoint.card.default_framework_version
        return replace(job, precision=precision, framework_version=version), [note] if note else []

    def _read(self, path: Path, dims: Mapping[str, int], batch_size: int | None) -> OpGraph:
        # one reading serves every batch that is asked for: the others are rebound from it
        key = (*_file_identity(path), tuple(sorted(dims.items())), batch_size is None)
        return _cached(self._canonical_cache, key, lambda: read_canonical(path, dims=dims, batch_size=batch_size))

    def _prepare(self, graph: OpGraph, job: JobSpec) -> "PreparedGraph":
        key = (
            id(graph), job.batch_size, job.precision, job.phase, job.optimizer, job.activation_rule, job.tf32_matmul,
            job.framework, job.framework_version, job.activation_checkpointing,
            # what a GPU's share of graph and memory depends on
            job.tensor_parallel, job.sequence_parallel, job.pipeline_parallel, job.interleave, job.expert_parallel,
            job.strategy, job.shard_size, job.num_microbatches,
        )  # fmt: skip
        # the graph is kept beside the result: its id stays taken as long as the entry lives
        return _cached(self._prepared_cache, key, lambda: (graph, prepare(graph, job)))[1]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Graphs are many small objects without cycles: scanning them again and again takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _cached(cache: OrderedDict, key: tuple, make: Any) -> Any:
    if key in cache:
        cache.move_to_end(key)
        return cache[key]
    cache[key] = value = make()
    if len(cache) > _CACHED_GRAPHS:
        cache.popitem(last=False)
    return value


def _file_identity(path: Path) -> tuple:
    try:
        stat = path.stat()
    except OSError:
        return (str(path),)  # reading says what is wrong
    return (str(path.resolve()), stat.st_mtime_ns, stat.st_size)


def read_canonical(path: str | Path, *, dims: Mapping[str, int] | None = None, batch_size: int | None) -> OpGraph:
    """The canonical graph of an ONNX file, at the file's batch or, where that is open, at ``batch_size``."""
    from gnnpred.onnx_io import read_graph
    from gnnpred.passes.canonical import canonicalise

    return canonicalise(read_graph(path, dims=dims or {}, batch_size=batch_size))


@dataclass(frozen=True)
class PreparedGraph:
    """What the checkpoint reads: the step's graph and its costs, with the notes that came up."""

    graph: OpGraph  # one GPU's share under tensor parallelism
    costs: tuple[OpCost, ...]
    memory_gib: float
    notes: tuple[str, ...]
    num_parameters: int  # of the whole model
    collectives: tuple["LayerCollective", ...] = ()  # that tensor parallelism adds inside the layers
    repeated_ops: frozenset[int] = frozenset()  # ops that tensor parallelism leaves whole

    @cached_property
    def structure(self) -> "GraphStructure":
        """What the network reads of it, whatever the device."""
        from gnnpred.features import graph_structure

        return graph_structure(self.graph, self.costs)


def prepare(graph: OpGraph, job: JobSpec) -> PreparedGraph:
    """Canonical graph and job -> the ops of one step at the job's batch and precision, and their costs."""
    from gnnpred.passes.step import complete_step, lower_forward
    from gnnpred.passes.tensor_parallel import split_products

    if not graph.ops:
        raise GnnpredError(f"{graph.name or 'the graph'} has no ops: there is nothing to predict")
    lowered = lower_forward(
        graph,
        batch_size=job.batch_size,
        precision=job.precision,
        activation_rule=job.activation_rule,
        tf32_matmul=job.tf32_matmul,
    )
    num_parameters = lowered.num_parameters
    share = split_products(lowered, job.tensor_parallel)
    lowered = share.graph
    foreach = has_foreach_optimizer(job.framework, job.framework_version, job.optimizer)
    step = complete_step(
        lowered,
        phase=job.phase,
        optimizer=job.optimizer,
        foreach=foreach,
        checkpointing=job.activation_checkpointing == "full",
    )
    return PreparedGraph(
        graph=step,
        costs=tuple(op_costs(step)),
        memory_gib=estimate_memory_gib(lowered, job, whole_ops=share.repeated_ops),
        notes=step.notes,
        num_parameters=num_parameters,
        collectives=share.collectives,
        repeated_ops=share.repeated_ops,
    )


def _assemble(
    prepared: PreparedGraph,
    job: JobSpec,
    times: "ComputeTimes",
    *,
    model: str,
    checkpoint: str,
    notes: list[str],
    applied: InferenceCorrection | None,
    trace: "Trace | None",
) -> Prediction:
    graph, costs = prepared.graph, prepared.costs
    compute_ms = float(times.compute_ms)
    op_ms = np.asarray(times.op_ms, float)
    communication_ms, fabric, timeline_warnings = 0.0, "", ()
    low, high = times.interval_factors
    breakdown_ms = _phases_ms(graph, op_ms, compute_ms)
    if trace is not None or not job.is_plain or (job.gpus > 1 and job.phase is not Phase.INFERENCE):
        from gnnpred.communication import step_spread, step_timeline

        timeline = step_timeline(
            graph, costs, op_ms, job,
            collectives=prepared.collectives, repeated_ops=prepared.repeated_ops, trace=trace,
        )  # fmt: skip
        breakdown_ms = {
            "forward": timeline.forward_ms, "backward": timeline.backward_ms, "optimizer": timeline.optimizer_ms,
            "communication": timeline.exposed_ms,
        }  # fmt: skip
        if job.pipeline_parallel > 1:
            breakdown_ms["pipeline_bubble"] = timeline.bubble_ms
        compute_ms = timeline.forward_ms + timeline.backward_ms + timeline.optimizer_ms
        communication_ms = float(timeline.communication_ms)
        if job.gpus > 1:
            fabric, timeline_warnings = str(timeline.fabric), tuple(timeline.warnings)
            low, high = widened_interval((low, high), step_spread(job))
    step_ms = sum(breakdown_ms.values())
    global_batch = job.batch_size * job.data_parallel * job.num_microbatches
    coverage_flops, coverage_bytes, unsupported = _coverage(graph, costs)
    return Prediction(
        step_time_ms=step_ms,
        interval_90_ms=(step_ms * low, step_ms * high),
        compute_time_ms=compute_ms,
        communication_ms=communication_ms,
        exposed_communication_ms=breakdown_ms["communication"],
        breakdown_ms=breakdown_ms,
        throughput_samples_per_s=global_batch / step_ms * 1e3 if step_ms > 0 else 0.0,
        job=job,
        model=model,
        fabric=fabric,
        coverage_flops=coverage_flops,
        coverage_bytes=coverage_bytes,
        unsupported_ops=unsupported,
        num_parameters=prepared.num_parameters,
        memory_estimate_gib=prepared.memory_gib,
        warnings=_unique(
            *notes,
            *prepared.notes,
            *_own_warnings(prepared, job, coverage_flops, coverage_bytes, unsupported),
            *times.warnings,
            *timeline_warnings,
        ),
        checkpoint=checkpoint,
        graph=graph,
        costs=costs,
        op_ms=op_ms,
        traits=times.traits,
        calibration=times.correction,
        measured_inference=applied,
    )


def _phases_ms(graph: OpGraph, op_ms: np.ndarray, compute_ms: float) -> dict[str, float]:
    """One GPU's step by phase; launch gaps belong to no op: spread over the phases, so that the parts add up."""
    breakdown_ms = {phase.value: float(op_ms[[op.phase is phase for op in graph.ops]].sum()) for phase in OpPhase}
    total_ms = sum(breakdown_ms.values())
    if total_ms > 0:
        breakdown_ms = {name: value * compute_ms / total_ms for name, value in breakdown_ms.items()}
    return {**breakdown_ms, "communication": 0.0}


def widened_interval(factors: tuple[float, float], spread_log: tuple[float, float]) -> tuple[float, float]:
    """The interval's factors with an independent error of its own 90 % bounds: each side adds in quadrature, in log."""
    low, high = (float(np.hypot(np.log(factor), spread)) for factor, spread in zip(factors, spread_log, strict=True))
    return float(np.exp(-low)), float(np.exp(high))


def _coverage(graph: OpGraph, costs: tuple[OpCost, ...]) -> tuple[float, float, dict[str, int]]:
    """Share of flops and of bytes that rests on formulas, and the unsupported forward ops by name."""
    flops = known_flops = bytes_moved = known_bytes = 0.0
    unsupported: dict[str, int] = {}
    for op, cost in zip(graph.ops, costs, strict=True):
        flops += cost.flops
        bytes_moved += cost.bytes_moved
        if cost.state is CostState.UNSUPPORTED:
            if op.phase is OpPhase.FORWARD:
                name = str(op.attributes.get("op_type", op.kind))
                unsupported[name] = unsupported.get(name, 0) + 1
        else:
            known_flops += cost.flops
            known_bytes += cost.bytes_moved
    return known_flops / flops if flops else 1.0, known_bytes / bytes_moved if bytes_moved else 1.0, unsupported


def _own_warnings(
    prepared: PreparedGraph, job: JobSpec, coverage_flops: float, coverage_bytes: float, unsupported: dict[str, int]
) -> list[str]:
    warnings = []
    if unsupported:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(unsupported.items())[:8])
        warnings.append(
            f"no cost formula for {names}: counted as one pass over inputs and outputs "
            f"({1 - coverage_flops:.0%} of the flops, {1 - coverage_bytes:.0%} of the bytes)"
        )
    if prepared.memory_gib > job.device.memory_gb:
        warnings.append(
            f"would not fit: about {prepared.memory_gib:.0f} GiB are needed (a crude estimate: weights, gradients, "
            f"optimizer state, kept activations), {job.device.name} has {job.device.memory_gb:g} GB"
        )
    return warnings


def _unique(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
