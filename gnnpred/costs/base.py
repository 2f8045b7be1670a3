"""What a cost is, and the sizes that cost rules read."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from gnnpred.graph import DType, Op, OpGraph, OpPhase


class CostState(StrEnum):
    FORMULA = "formula"  # a formula of ours, tested by hand
    FREE = "free"  # a view or nothing at run time
    UNSUPPORTED = "unsupported"  # guessed as one pass over inputs and outputs


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one op at the graph's batch: 2 flops per multiply-add; bytes as DRAM traffic of the eager kernel."""

    flops: float
    bytes_read: float
    bytes_written: float
    state: CostState
    num_launches: int = 1  # kernels that the host launches

    @property
    def bytes_moved(self) -> float:
        return self.bytes_read + self.bytes_written


FREE_COST = OpCost(0.0, 0.0, 0.0, CostState.FREE, 0)

# (flops, bytes read, bytes written, launches) of one run of an op
RawCost = tuple[float, float, float, int]


class Sizes:
    """Per-tensor sizes of one graph, computed once: elements, bytes, and bytes really stored (expanded views)."""

    def __init__(self, graph: OpGraph) -> None:
        self.tensors = graph.tensors
        self.ops = graph.ops
        self.elements = [prod(t.shape) for t in graph.tensors]
        width = {dtype: dtype.bytes_per_element for dtype in DType}
        self.width = [width[t.dtype] for t in graph.tensors]
        self.bytes = [n * w for n, w in zip(self.elements, self.width, strict=True)]
        self.is_training = False
        # What reading the tensor moves: an expanded view is as small as its base.
        self.stored = list(self.bytes)
        for op in graph.ops:
            if op.phase is OpPhase.FORWARD:
                if op.kind in ("expand", "view", "transpose", "identity") and op.inputs and op.outputs:
                    base, result = op.inputs[0], op.outputs[0]
                    self.stored[result] = min(self.stored[result], self.stored[base])
            else:
                self.is_training = True
                break

    def read(self, indices: tuple[int, ...]) -> float:
        stored = self.stored
        return sum([stored[i] for i in indices])

    def written(self, indices: tuple[int, ...]) -> float:
        return sum([self.bytes[i] for i in indices])


CostRule = Callable[[Op, Sizes], RawCost]
