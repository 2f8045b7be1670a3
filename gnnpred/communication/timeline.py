"""The timeline of one training step on several GPUs.

``ddp`` follows torch.nn.parallel.DistributedDataParallel: gradients become ready while the backward pass
runs, fill buckets in that order, and a full bucket is all-reduced on a stream of its own while the
backward goes on. What is left when the backward ends is exposed. ``dp`` follows torch.nn.DataParallel:
one process copies weights to every GPU, scatters inputs, and adds gradients up on GPU 0, overlapping nothing.

Three constants of a step are fitted from measured runs (:mod:`gnnpred.communication.fit_steps`):

* ``contention``: ops of the backward take (1 + contention) times as long while an all-reduce runs;
* ``sync_base_ms + sync_ms_per_log2_gpu * log2(gpus)``: what a synchronous step loses beyond its
  collectives (stragglers, launches, buffer broadcasts). Measured, it is the same number of milliseconds in
  every precision, so it is added and never scaled with compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np

from gnnpred.communication.collectives import all_reduce_ms, broadcast_ms, load_constants, reduce_ms
from gnnpred.communication.fabrics import ClusterFabric, resolve_fabric
from gnnpred.costs import CostState, OpCost
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.graph import OpGraph, OpPhase, Role
from gnnpred.job import STRATEGIES, ActivationRule, JobSpec, Phase, Precision

# torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes, kDefaultBucketBytesCap.
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
# torch/csrc/cuda/comm.h: DataParallel coalesces its broadcasts and reductions into buffers of 10 MB.
DATA_PARALLEL_BUFFER_BYTES = 10 * 2**20
GPUS_PER_SOCKET = 4  # usual layout of eight-GPU PCIe servers
_MASTER_WEIGHT_PRECISIONS = (Precision.MIXED, Precision.MIXED_BF16)


@dataclass(frozen=True, kw_only=True)
class StepConstants:
    """Fitted constants of a step; see the module docstring."""

    contention: float
    sync_base_ms: float
    sync_ms_per_log2_gpu: float
    nvlink_slowdown: float  # all-reduce inside a training step / alone, by what carries it
    pcie_slowdown: float
    pcie_crowd_slowdown: float  # more than four GPUs on PCIe: two sockets
    host_staged_slowdown: float  # PCIe without peer-to-peer
    host_staged_crowd_slowdown: float
    network_slowdown: float

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

    def sync_ms(self, gpus: int) -> float:
        """Synchronisation overhead of a step in ms."""
        return 0.0 if gpus == 1 else self.sync_base_ms + self.sync_ms_per_log2_gpu * log2(gpus)


@dataclass(frozen=True, kw_only=True)
class DataParallelConstants:
    """Fitted constants of nn.DataParallel: host work of the one process that drives all GPUs."""

    base_ms: float  # scatter, gather and thread start
    ms_per_kernel: float  # replicating the module tree, per forward kernel
    ms_per_replica_kernel: float  # per forward kernel and further replica: threads take turns at the GIL
    host_staged_copy_scale: float  # one-way copies through host memory against a ring all-gather there

    def host_ms(self, num_kernels: float, gpus: int) -> float:
        """Host overhead of a step in ms."""
        return self.base_ms + num_kernels * (self.ms_per_kernel + self.ms_per_replica_kernel * (gpus - 1))


@dataclass(frozen=True, kw_only=True)
class GradientBucket:
    """Gradients that are all-reduced together."""

    num_bytes: float
    last_op: int  # position in the backward ops after which the bucket is complete
    num_gradients: int


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One step in ms. ``forward + backward + optimizer + exposed = step``; ``communication_ms`` counts overlapped
    time too. ``fabric`` says in words what the GPUs talk over."""

    step_ms: float
    forward_ms: float
    backward_ms: float  # without what communication adds
    optimizer_ms: float
    communication_ms: float  # busy time of all collectives, hidden or not
    exposed_ms: float  # what several GPUs add to the step
    num_buckets: int
    gradient_bytes: float  # per rank and step
    fabric: str
    warnings: tuple[str, ...]


def step_constants() -> StepConstants:
    """The shipped constants of a DDP step."""
    return StepConstants(**load_constants()["steps"]["ddp"]["constants"])


def data_parallel_constants() -> DataParallelConstants:
    """The shipped constants of nn.DataParallel."""
    return DataParallelConstants(**load_constants()["steps"]["dp"]["constants"])


def step_timeline(graph: OpGraph, costs: Sequence[OpCost], op_ms: np.ndarray, job: JobSpec) -> StepTimeline:
    """Timeline of one step of a lowered graph with backward and optimizer ops.

    ``op_ms`` is (num_ops,) float, the time of each op on one GPU in ms, repeats included; ``costs`` likewise has one
    entry per op. Raises UsageError for an unknown strategy or fabric, GnnpredError if the lengths differ.
    """
    if job.strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {job.strategy!r}: choose one of {', '.join(STRATEGIES)}")
    op_ms = np.asarray(op_ms, float)
    if not len(op_ms) == len(graph.ops) == len(costs):
        raise GnnpredError(f"{len(op_ms)} times and {len(costs)} costs for {len(graph.ops)} ops")
    phase_ms = {
        phase: float(op_ms[[op.phase is phase for op in graph.ops]].sum()) if len(op_ms) else 0.0 for phase in OpPhase
    }
    fabric = resolve_fabric(
        device=job.device, gpus=job.gpus, nodes=job.nodes, interconnect=job.interconnect, inter_node=job.inter_node
    )
    if job.gpus == 1 or job.phase is Phase.INFERENCE:
        return _assemble(phase_ms, 0.0, 0.0, [], fabric, () if job.gpus == 1 else fabric.warnings)
    gradients = _ready_gradients(graph, job)
    if job.strategy == "dp":
        if job.nodes > 1:
            raise UsageError(
                "--strategy dp (nn.DataParallel) runs in one process on one node: use ddp for several nodes"
            )
        communication_ms, exposed_ms = _data_parallel_ms(graph, costs, gradients, fabric)
        return _assemble(phase_ms, communication_ms, exposed_ms, gradients, fabric, fabric.warnings)
    backward_ops = [op_idx for op_idx, op in enumerate(graph.ops) if op.phase is OpPhase.BACKWARD]
    buckets = fill_buckets(gradients)
    constants = step_constants()
    bucket_ms = [bucket_time_ms(bucket.num_bytes, fabric, constants) for bucket in buckets]
    finish_ms = overlap(op_ms[backward_ops], buckets, bucket_ms, contention=constants.contention)
    exposed_ms = finish_ms - phase_ms[OpPhase.BACKWARD] + constants.sync_ms(job.gpus)
    return _assemble(phase_ms, sum(bucket_ms), exposed_ms, gradients, fabric, fabric.warnings, num_buckets=len(buckets))


def _assemble(
    phase_ms: dict[OpPhase, float],
    communication_ms: float,
    exposed_ms: float,
    gradients: list["Gradient"],
    fabric: ClusterFabric,
    warnings: tuple[str, ...],
    *,
    num_buckets: int = 0,
) -> StepTimeline:
    return StepTimeline(
        step_ms=sum(phase_ms.values()) + exposed_ms,
        forward_ms=phase_ms[OpPhase.FORWARD],
        backward_ms=phase_ms[OpPhase.BACKWARD],
        optimizer_ms=phase_ms[OpPhase.OPTIMIZER],
        communication_ms=communication_ms,
        exposed_ms=exposed_ms,
        num_buckets=num_buckets,
        gradient_bytes=sum(gradient.num_bytes for gradient in gradients),
        fabric=fabric.description,
        warnings=warnings,
    )


@dataclass(frozen=True, slots=True)
class Gradient:
    """The final gradient of one parameter (or a piece of it)."""

    num_bytes: float
    ready_after: int  # position among the backward ops


def _ready_gradients(graph: OpGraph, job: JobSpec) -> list[Gradient]:
    """Final gradients in the order in which they become ready.

    Bytes follow the gradient's type: fp32 under autocast (the weights are fp32), the half type in pure half. With
    ``all_half`` (Apex O2) PyTorch's model weights are half and DDP reduces half gradients, while TensorFlow, MXNet and
    Paddle keep fp32 variables and reduce fp32.
    """
    halve = (
        job.activation_rule is ActivationRule.ALL_HALF
        and job.precision in _MASTER_WEIGHT_PRECISIONS
        and job.framework == "pytorch"
    )
    position_by_op = {}
    producer_by_tensor: dict[int, int] = {}
    for op_idx, op in enumerate(graph.ops):
        if op.phase is OpPhase.BACKWARD:
            position_by_op[op_idx] = len(position_by_op)
            for tensor_idx in op.outputs:
                producer_by_tensor[tensor_idx] = position_by_op[op_idx]
    gradient_tensors: list[int] = []
    for op in graph.ops:  # every step ends by dropping its gradients: that op names them all
        if op.phase is OpPhase.OPTIMIZER and op.kind == "zero_grad":
            gradient_tensors = list(dict.fromkeys(op.inputs))
    gradients = []
    for tensor_idx in gradient_tensors:
        tensor = graph.tensors[tensor_idx]
        if tensor.role is not Role.GRADIENT:
            continue
        half = 2 if halve and tensor.dtype.is_float else tensor.dtype.bytes_per_element
        num_bytes = tensor.num_elements * min(half, tensor.dtype.bytes_per_element)
        gradients.append(Gradient(num_bytes, producer_by_tensor.get(tensor_idx, len(position_by_op) - 1)))
    return sorted(gradients, key=lambda gradient: gradient.ready_after)


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
    """All-reduce of one bucket while a step runs, in ms: slower than on an idle machine (NCCL tests).

    Across nodes the part inside the nodes still has to run there at the pace of their links.
    """
    local = local_part(fabric)
    local_ms = 0.0
    if local is not None:
        local_ms = all_reduce_ms(num_bytes, local) * constants.slowdown_of(constants.link_class(fabric))
    if fabric.inter is None:
        return local_ms
    return max(local_ms, all_reduce_ms(num_bytes, fabric) * constants.network_slowdown)


def local_part(fabric: ClusterFabric) -> ClusterFabric | None:
    """The group of GPUs that one node (or rack) joins; None if each is alone."""
    if fabric.inter is None:
        return fabric
    if fabric.gpus_per_domain == 1:
        return None
    return replace(fabric, inter=None, ports_per_node=0, gpus=fabric.gpus_per_domain, nodes=1)


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
    now_ms, network_free_ms = 0.0, 0.0
    next_bucket = 0
    stretch = 1.0 + contention
    for position, work_ms in enumerate(backward_ms.tolist()):
        busy_ms = network_free_ms - now_ms
        if busy_ms <= 0:
            now_ms += work_ms
        elif work_ms * stretch <= busy_ms:
            now_ms += work_ms * stretch
        else:
            now_ms = network_free_ms + work_ms - busy_ms / stretch
        while next_bucket < len(buckets) and buckets[next_bucket].last_op <= position:
            network_free_ms = max(network_free_ms, now_ms) + bucket_ms[next_bucket]
            next_bucket += 1
    for remaining_ms in bucket_ms[next_bucket:]:
        network_free_ms = max(network_free_ms, now_ms) + remaining_ms
    return max(now_ms, network_free_ms)


def _data_parallel_ms(
    graph: OpGraph, costs: Sequence[OpCost], gradients: list[Gradient], fabric: ClusterFabric
) -> tuple[float, float]:
    """``(communication, exposed)`` ms of nn.DataParallel: nothing overlaps."""
    constants = data_parallel_constants()
    gradient_bytes = sum(gradient.num_bytes for gradient in gradients)
    input_bytes = sum(graph.tensors[i].num_bytes for i in graph.inputs)
    communication_ms = data_parallel_communication_ms(gradient_bytes, input_bytes, fabric, constants)
    num_kernels = sum(
        cost.num_launches * op.repeats
        for cost, op in zip(costs, graph.ops, strict=True)
        if op.phase is OpPhase.FORWARD and cost.state is not CostState.FREE
    )
    return communication_ms, communication_ms + constants.host_ms(num_kernels, fabric.gpus)


def data_parallel_communication_ms(
    gradient_bytes: float, input_bytes: float, fabric: ClusterFabric, constants: DataParallelConstants
) -> float:
    """Weights out to all replicas and gradients back, in coalesced buffers; inputs of the other replicas out, in ms."""
    num_buffers = max(1, ceil(gradient_bytes / DATA_PARALLEL_BUFFER_BYTES))
    buffer_bytes = gradient_bytes / num_buffers
    weights_ms = num_buffers * broadcast_ms(buffer_bytes, fabric)
    gradients_ms = num_buffers * reduce_ms(buffer_bytes, fabric)
    # The scatter leaves GPU 0 over one link: the parts of the other replicas one after the other.
    inputs_ms = broadcast_ms(input_bytes * (fabric.gpus - 1), fabric)
    scale = 1.0 if fabric.intra.peer_to_peer else constants.host_staged_copy_scale
    return (weights_ms + gradients_ms + inputs_ms) * scale


def step_spread(job: JobSpec) -> tuple[float, float]:
    """90 % bounds of log(measured / predicted) of a step on several GPUs whose compute is known exactly.

    Measured on held-out models (``spread_90_log`` in constants.json): those of the largest measured GPU count that is
    not above the job's. (0, 0) on one GPU. Strategies without measured runs count as DDP.
    """
    if job.gpus < 2:
        return 0.0, 0.0
    steps = load_constants()["steps"]
    by_gpus = steps[job.strategy if job.strategy in steps else "ddp"]["spread_90_log"]
    low, high = by_gpus[str(max((int(count) for count in by_gpus if int(count) <= job.gpus), default=2))]
    return min(float(low), 0.0), max(float(high), 0.0)
