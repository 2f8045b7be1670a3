"""torch.nn.DataParallel: one process drives all GPUs and overlaps nothing.

Every pass copies the weights to every GPU, scatters the inputs and adds the gradients up on GPU 0; the host
replicates the module tree and its threads take turns at the interpreter lock.
"""

from dataclasses import dataclass
from math import ceil

from gnnpred.communication.collectives import broadcast_ms, load_constants, reduce_ms
from gnnpred.communication.fabrics import ClusterFabric
from gnnpred.communication.step_work import StepWork
from gnnpred.costs import CostState
from gnnpred.graph import OpPhase

# torch/csrc/cuda/comm.h: DataParallel coalesces its broadcasts and reductions into buffers of 10 MB.
DATA_PARALLEL_BUFFER_BYTES = 10 * 2**20


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


def data_parallel_constants() -> DataParallelConstants:
    """The shipped constants of nn.DataParallel."""
    return DataParallelConstants(**load_constants()["steps"]["dp"]["constants"])


def data_parallel_ms(work: StepWork) -> tuple[float, float]:
    """``(communication, host)`` ms that one pass of nn.DataParallel adds."""
    constants = data_parallel_constants()
    fabric = work.layout.whole
    input_bytes = sum(work.graph.tensors[i].num_bytes for i in work.graph.inputs)
    communication_ms = data_parallel_communication_ms(work.gradient_bytes, input_bytes, fabric, constants)
    num_kernels = sum(
        cost.num_launches * op.repeats
        for cost, op in zip(work.costs, work.graph.ops, strict=True)
        if op.phase is OpPhase.FORWARD and cost.state is not CostState.FREE
    )
    return communication_ms, constants.host_ms(num_kernels, fabric.gpus)


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
