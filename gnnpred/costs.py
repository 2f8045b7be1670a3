"""What one op costs: flops and bytes, by a formula, free, or unsupported (counted, never silently 0)."""

from dataclasses import dataclass
from enum import StrEnum

from gnnpred.graph import OpGraph


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


def op_costs(graph: OpGraph) -> tuple[OpCost, ...]:
    """Costs in the order of ``graph.ops``."""
    raise NotImplementedError
