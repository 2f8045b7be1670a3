"""Composites that a model writes out itself: one op in the graph, several kernels at run time.

Canonicalisation recomposes, say, an RMSNorm written as pow, mean, add, rsqrt, mul, mul; where the model's own
code runs those pieces, the op keeps how often they pass over the data (``fused`` False, ``reads``, ``writes``,
``num_launches``).
"""

from gnnpred.costs.base import RawCost, Sizes
from gnnpred.costs.products import forward_of
from gnnpred.graph import Component, Op

# Counted over the pieces of RMSNorm (forward 6 kernels, 4 reads, 3 writes; backward 15, 12, 7) and of the tanh GELU
# (8, 11, 8; backward 18, 26, 17) with the formulas of tools/autograd/derivatives.yaml.
_BACKWARD_READS, _BACKWARD_WRITES, _BACKWARD_LAUNCHES = 2.6, 2.2, 2.4


def is_unfused(op: Op, s: Sizes) -> bool:
    """Whether the op (or the forward op it belongs to) runs as separate kernels."""
    if op.component is Component.CAST or op.component is Component.ACCUMULATE:
        return False  # they only belong to it
    return forward_of(op, s).attributes.get("fused") is False


def unfused_passes(op: Op, s: Sizes) -> tuple[float, float, int]:
    """(bytes read, bytes written, launches) of the pieces; the backward in proportion to the forward."""
    forward = forward_of(op, s)
    size, attributes = s.bytes[forward.outputs[0]], forward.attributes
    read, written = attributes["reads"] * size, attributes["writes"] * size
    launches = attributes["num_launches"]
    if op.component is Component.FORWARD:
        return read, written, launches
    return read * _BACKWARD_READS, written * _BACKWARD_WRITES, round(launches * _BACKWARD_LAUNCHES)


def with_pieces(op: Op, s: Sizes, cost: RawCost) -> RawCost:
    """``cost`` of the fused kernel, with the traffic of the pieces where the op is not fused."""
    return (cost[0], *unfused_passes(op, s)) if is_unfused(op, s) else cost
