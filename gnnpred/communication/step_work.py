"""What a step consists of, as the timelines of all strategies read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2

import numpy as np

from gnnpred.communication.collectives import collective_ms, load_constants
from gnnpred.communication.fabrics import ClusterFabric
from gnnpred.communication.layout import Layout
from gnnpred.communication.streams import TwoStreams
from gnnpred.communication.trace import Trace
from gnnpred.costs import OpCost
from gnnpred.graph import DType, OpGraph, OpPhase, Role
from gnnpred.job import SHARDED_STRATEGIES, ActivationRule, JobSpec, Precision
from gnnpred.passes.layers import LayerSpans, layer_spans, segments_of_ops

GPUS_PER_SOCKET = 4  # usual layout of eight-GPU PCIe servers
_MASTER_WEIGHT_PRECISIONS = (Precision.MIXED, Precision.MIXED_BF16)


@dataclass(frozen=True, kw_only=True)
class StepConstants:
    """Fitted constants of a step; see :mod:`gnnpred.communication.timeline`."""

    contention: float
    sync_base_ms: float
    sync_ms_per_log2_gpu: float
    nvlink_slowdown: float  # all-reduce inside a training step / alone, by what carries it
    pcie_slowdown: float
    pcie_crowd_slowdown: float  # more than four GPUs on PCIe: two sockets
    host_staged_slowdown: float  # PCIe without peer-to-peer
    host_staged_crowd_slowdown: float
    network_slowdown: float
    straggler_share_per_log2_gpu: float = 0.0  # of the compute: every step waits for the slowest rank

    @staticmethod
    def link_class(fabric: ClusterFabric) -> str:
        """Name of the slowdown that counts on the links inside a node."""
        if not fabric.intra.name.startswith("pcie"):
            return "nvlink_slowdown"
        crowd = "_crowd" if fabric.gpus_per_domain > GPUS_PER_SOCKET else ""
        return f"pcie{crowd}_slowdown" if fabric.intra.peer_to_peer else f"host_staged{crowd}_slowdown"

    def slowdown_of(self, link_class: str) -> float:
        """The factor of a class; a crowd is never quicker than a few."""
        return max(getattr(self, link_class), getattr(self, link_class.replace("_crowd", "")))

    def sync_ms(self, gpus: int, compute_ms: float = 0.0) -> float:
        """What a step loses in ms beyond its collectives; ``compute_ms`` is one rank's work of the whole step."""
        if gpus == 1:
            return 0.0
        doublings = log2(gpus)
        straggler_ms = self.straggler_share_per_log2_gpu * doublings * compute_ms
        return self.sync_base_ms + self.sync_ms_per_log2_gpu * doublings + straggler_ms


_GROUP_OF_FRAMEWORK = {"tensorflow": "horovod", "tensorflow2": "horovod", "jax": "horovod"}


def step_constants(strategy: str = "ddp", framework: str = "pytorch") -> StepConstants:
    """The shipped constants of a step: ZeRO has those of FSDP, a strategy without constants of its own those of DDP.

    Data-parallel constants are scaled by the factors that were fitted for the framework's software.
    """
    steps = load_constants()["steps"]
    name = "fsdp" if strategy in SHARDED_STRATEGIES else strategy
    if name != "dp" and "contention" in steps.get(name, {}).get("constants", {}) and name != "ddp":
        return StepConstants(**steps[name]["constants"])
    constants = StepConstants(**steps["ddp"]["constants"])
    group = _GROUP_OF_FRAMEWORK.get(framework, framework)
    return scaled_constants(constants, steps["ddp"].get("factors", {}).get(group, {}))


def scaled_constants(constants: StepConstants, factors: Mapping[str, float]) -> StepConstants:
    """``factors`` (contention, sync, link, network; 1 where absent) on the constants that they scale."""
    fields = {
        "contention": ("contention",),
        "sync": ("sync_base_ms", "sync_ms_per_log2_gpu"),
        "link": (
            "nvlink_slowdown", "pcie_slowdown", "pcie_crowd_slowdown", "host_staged_slowdown",
            "host_staged_crowd_slowdown",
        ),
        "network": ("network_slowdown",),
    }  # fmt: skip
    return replace(
        constants,
        **{field: getattr(constants, field) * factors.get(name, 1.0) for name, own in fields.items() for field in own},
    )


def local_part(fabric: ClusterFabric) -> ClusterFabric | None:
    """The group of GPUs that one node (or rack) joins; None if each is alone."""
    if fabric.inter is None:
        return fabric
    if fabric.gpus_per_domain == 1:
        return None
    return fabric.subgroup(fabric.gpus_per_domain, 1)


def in_step_ms(kind: str, num_bytes: float, fabric: ClusterFabric, constants: StepConstants) -> float:
    """A collective that overlaps kernels of a step, in ms: slower than on an idle machine (NCCL tests).

    Across nodes the part inside the nodes still has to run there at the pace of their links.
    """
    local = local_part(fabric)
    local_ms = 0.0
    if local is not None:
        local_ms = collective_ms(kind, num_bytes, local) * constants.slowdown_of(constants.link_class(fabric))
    if fabric.inter is None:
        return local_ms
    return max(local_ms, collective_ms(kind, num_bytes, fabric) * constants.network_slowdown)


@dataclass(frozen=True, slots=True)
class Gradient:
    """The final gradient of one parameter (or a piece of it)."""

    num_bytes: float
    ready_after: int  # position among the backward ops
    num_elements: int = 0
    segment: int = 0  # of the layers: gnnpred.passes.layers
    is_expert: bool = False


@dataclass(frozen=True)
class Blocking:
    """A collective that the op after it waits for."""

    kind: str
    num_bytes: float
    duration_ms: float


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One rank's ops and their times, where its layers begin, and whom it talks to."""

    graph: OpGraph
    costs: Sequence[OpCost]
    op_ms: np.ndarray  # (num_ops,)
    job: JobSpec
    layout: Layout
    constants: StepConstants
    gradients: tuple[Gradient, ...]  # in the order in which they become ready
    parameter_width: float  # bytes per element that a sharded strategy gathers
    blocking: Mapping[int, tuple[Blocking, ...]] = field(default_factory=dict)  # by the op that they follow
    trace: Trace | None = None
    spans: LayerSpans
    segments: Sequence[int]  # (num_ops,)

    def ops_of(self, phase: OpPhase) -> list[int]:
        """Positions of the ops of a phase, in order."""
        return [op_idx for op_idx, op in enumerate(self.graph.ops) if op.phase is phase]

    def phase_ms(self, phase: OpPhase) -> float:
        return float(self.op_ms[self.ops_of(phase)].sum())

    def sync_ms(self) -> float:
        """What the step loses beyond its collectives."""
        job = self.job
        passes_ms = self.phase_ms(OpPhase.FORWARD) + self.phase_ms(OpPhase.BACKWARD)
        compute_ms = passes_ms * job.num_microbatches / job.pipeline_parallel + self.phase_ms(OpPhase.OPTIMIZER)
        return self.constants.sync_ms(job.gpus, compute_ms)

    @property
    def gradient_bytes(self) -> float:
        return sum(gradient.num_bytes for gradient in self.gradients)

    def run(self, streams: TwoStreams, op_idx: int) -> None:
        """One op and the collectives that have to end before the next."""
        op = self.graph.ops[op_idx]
        if streams.trace is None:
            streams.compute(float(self.op_ms[op_idx]))
        else:
            streams.compute(float(self.op_ms[op_idx]), op_label(self.graph, op_idx), str(op.phase))
        for item in self.blocking.get(op_idx, ()):
            streams.block(item.duration_ms, item.kind.replace("_", "-"), item.num_bytes)


def op_label(graph: OpGraph, op_idx: int) -> str:
    """Name of an op in a trace: its kind, its part of the step, and what the file calls it."""
    op = graph.ops[op_idx]
    part = "" if op.component in ("forward", "optimizer") else f" {op.component}".replace("_", " ")
    return f"{op.kind}{part}{' ' + op.name if op.name else ''}"


def parameter_width(graph: OpGraph, job: JobSpec) -> float:
    """Bytes per weight that sharded strategies gather: the half type under mixed precision, else the weights' own.

    Under mixed precision FSDP's MixedPrecision and DeepSpeed keep half-type weights for compute and fp32 masters
    in the sharded optimizer state.
    """
    if job.precision in _MASTER_WEIGHT_PRECISIONS:
        return DType.FP16.bytes_per_element
    return max((t.dtype.bytes_per_element for t in graph.tensors if t.role is Role.PARAMETER), default=4.0)


def ready_gradients(
    graph: OpGraph, job: JobSpec, segments: Sequence[int], experts: frozenset[int] = frozenset()
) -> list[Gradient]:
    """Final gradients in the order in which they become ready; ``experts``: parameters that hold experts' weights.

    Bytes follow the gradient's type: fp32 under autocast (the weights are fp32), the half type in pure half. With
    ``all_half`` (Apex O2) PyTorch's model weights are half and DDP reduces half gradients, while TensorFlow and Paddle
    keep fp32 variables and reduce fp32. MXNet's mixed precision casts the model to half: its gradients are half.
    Sharded strategies reduce half gradients under mixed precision.
    """
    halve = job.precision in _MASTER_WEIGHT_PRECISIONS and (
        job.strategy in SHARDED_STRATEGIES
        or (job.activation_rule is ActivationRule.ALL_HALF and job.framework == "pytorch")
        or job.framework == "mxnet"
    )
    producer_by_tensor: dict[int, tuple[int, int]] = {}
    position = 0
    for op_idx, op in enumerate(graph.ops):
        if op.phase is OpPhase.BACKWARD:
            for tensor_idx in op.outputs:
                producer_by_tensor[tensor_idx] = (position, segments[op_idx])
            position += 1
    gradient_tensors: list[int] = []
    for op in graph.ops:  # every step ends by dropping its gradients: that op names them all
        if op.phase is OpPhase.OPTIMIZER and op.kind == "zero_grad":
            gradient_tensors = list(dict.fromkeys(op.inputs))
    of_expert = _expert_gradients(graph, gradient_tensors, experts)
    gradients = []
    for tensor_idx in gradient_tensors:
        tensor = graph.tensors[tensor_idx]
        if tensor.role is not Role.GRADIENT:
            continue
        half = 2 if halve and tensor.dtype.is_float else tensor.dtype.bytes_per_element
        num_bytes = tensor.num_elements * min(half, tensor.dtype.bytes_per_element)
        ready_after, segment = producer_by_tensor.get(tensor_idx, (position - 1, 0))
        gradients.append(Gradient(num_bytes, ready_after, tensor.num_elements, segment, tensor_idx in of_expert))
    return sorted(gradients, key=lambda gradient: gradient.ready_after)


def _expert_gradients(graph: OpGraph, gradients: Sequence[int], experts: frozenset[int]) -> set[int]:
    """Gradients of experts' weights: gradients are listed in the order of their parameters, some of which have none."""
    found: set[int] = set()
    if not experts:
        return found
    remaining = iter(gradients)
    gradient = next(remaining, None)
    for tensor_idx, tensor in enumerate(graph.tensors):
        if gradient is None:
            break
        if tensor.role is Role.PARAMETER and tensor.shape == graph.tensors[gradient].shape:
            if tensor_idx in experts:
                found.add(gradient)
            gradient = next(remaining, None)
    return found


def make_work(
    graph: OpGraph,
    costs: Sequence[OpCost],
    op_ms: np.ndarray,
    job: JobSpec,
    layout: Layout,
    *,
    experts: frozenset[int] = frozenset(),
    trace: Trace | None = None,
) -> StepWork:
    """The step without collectives of its layers."""
    spans = layer_spans(graph)
    segments = segments_of_ops(graph, spans)
    return StepWork(
        graph=graph,
        costs=costs,
        op_ms=op_ms,
        job=job,
        layout=layout,
        constants=step_constants(job.strategy, job.framework),
        gradients=tuple(ready_gradients(graph, job, segments, experts)),
        parameter_width=parameter_width(graph, job),
        trace=trace,
        spans=spans,
        segments=segments,
    )
