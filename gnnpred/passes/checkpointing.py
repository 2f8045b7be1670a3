"""Activation checkpointing: which forward ops run a second time during the backward pass.

``full`` checkpointing wraps every repeated layer (a transformer block, a residual block): its input is kept, everything
inside is computed again when its backward comes. What stands before the first and behind the last repeated layer
(embedding, stem, classifier, loss) is not wrapped.
"""

from collections import Counter
from collections.abc import Sequence

from gnnpred.graph import Component, Op, OpPhase, Role, TensorSpec

_WEIGHTED_KINDS = frozenset({"conv", "conv_transpose", "linear", "matmul", "lstm", "gru", "rnn"})


def checkpointed_region(ops: Sequence[Op], tensors: Sequence[TensorSpec]) -> tuple[range, int]:
    """Positions of the forward ops inside repeated layers, and the number of layers.

    Products whose weight has a shape that occurs more than once mark the layers: the region spans the first to the
    last of them, and there are as many layers as the rarest of those shapes has weights. A model without repeated
    weights is one layer, all of it.
    """
    shapes: dict[int, tuple] = {}
    forward = [i for i, op in enumerate(ops) if op.phase is OpPhase.FORWARD]
    for i in forward:
        op = ops[i]
        if op.kind in _WEIGHTED_KINDS and op.component is Component.FORWARD and len(op.inputs) > 1:
            weight = tensors[op.inputs[1]]
            if weight.role in (Role.PARAMETER, Role.PARAMETER_DERIVED):
                shapes[i] = (op.kind, weight.shape)
    counts = Counter(shapes.values())
    repeated = [i for i, shape in shapes.items() if counts[shape] > 1]
    if not repeated:
        return range(forward[0], forward[-1] + 1) if forward else range(0), 1
    first = repeated[0]
    while first > 0 and ops[first - 1].component is Component.CAST:  # the casts that feed it
        first -= 1
    return range(first, repeated[-1] + 1), min(count for count in counts.values() if count > 1)
