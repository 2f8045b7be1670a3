"""Where a model's repeated layers begin and end, how many attention heads it has, which weights are experts'.

What parallel strategies cut a model by: FSDP gathers layer by layer, a pipeline hands whole layers to its stages,
tensor parallelism splits attention by heads.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gnnpred.graph import Component, Op, OpGraph, OpPhase, Role
from gnnpred.op_kinds import Category, category_of
from gnnpred.passes.checkpointing import checkpointed_region

_WEIGHTS = (Role.PARAMETER, Role.PARAMETER_DERIVED)
_EXPERT_NAME = re.compile(r"(?:^|[./_])experts?[./_](\d+)(?:[./_]|$)|(?:^|[./_])experts(?:[./_]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class LayerSpans:
    """Positions of forward ops: what comes first, the repeated layers, what comes last.

    Segment 0 is what stands before the layers, 1 to ``num_layers`` are the layers, ``num_layers + 1`` what follows.
    """

    starts: tuple[int, ...]  # (num_layers,) first op of each layer
    stop: int  # first op behind the last layer
    num_forward_ops: int
    are_alike: bool = True  # False: no layer repeats (convolutional networks), every product counts as one

    @property
    def num_layers(self) -> int:
        return len(self.starts)

    @property
    def num_segments(self) -> int:
        return self.num_layers + 2

    def segment_of(self, forward_op_idx: int) -> int:
        """Segment of a forward op by its position."""
        if forward_op_idx >= self.stop:
            return self.num_layers + 1
        return bisect_right(self.starts, forward_op_idx)


def layer_spans(graph: OpGraph) -> LayerSpans:
    """The repeated layers of a graph, with or without its backward pass.

    The rarest of the repeated weight shapes marks each layer once. Where these marks stand at uneven distances or
    cover a part of the model only (convolutional networks), every product with a weight counts as a layer instead.
    """
    num_forward = sum(op.phase is OpPhase.FORWARD for op in graph.ops)
    region, num_layers = checkpointed_region(graph.ops, graph.tensors)
    if not region:
        return LayerSpans((0,), num_forward, num_forward, are_alike=False)
    positions: dict[tuple, list[int]] = defaultdict(list)
    for op_idx in region:
        op = graph.ops[op_idx]
        if op.component is Component.FORWARD and len(op.inputs) > 1 and category_of(op.kind) in _PRODUCTS:
            weight = graph.tensors[op.inputs[1]]
            if weight.role in _WEIGHTS:
                positions[op.kind, weight.shape].append(op_idx)
    alike = [found for found in positions.values() if len(found) == num_layers]
    marks = min(alike, key=lambda found: found[0], default=[])
    lengths = [b - a for a, b in pairwise(marks)]
    if not lengths or max(lengths) > _MOST_UNEQUAL * min(lengths) or len(region) > (num_layers + 1) * max(lengths):
        products = tuple(sorted(op_idx for found in positions.values() for op_idx in found))
        return LayerSpans(products or (region.start,), region.stop, num_forward, are_alike=False)
    # The first product of a layer may stand before its mark: every layer begins as far before it as the first one.
    lead = marks[0] - region.start
    starts = [region.start]
    for mark in marks[1:]:
        starts.append(max(mark - lead, starts[-1] + 1))
    return LayerSpans(tuple(starts), max(region.stop, starts[-1] + 1), num_forward)


_MOST_UNEQUAL = 3  # longest layer / shortest, in ops
_PRODUCTS = (Category.CONV, Category.MATMUL, Category.RECURRENT)


def segments_of_ops(graph: OpGraph, spans: LayerSpans) -> list[int]:
    """Segment of every op: backward ops belong to that of their forward op; the optimizer's count as -1."""
    segments = []
    for op in graph.ops:
        if op.phase is OpPhase.OPTIMIZER:
            segments.append(-1)
        elif op.phase is OpPhase.FORWARD:
            segments.append(spans.segment_of(len(segments)))
        else:
            segments.append(_segment_of_backward(graph, op, segments, spans))
    return segments


def _segment_of_backward(graph: OpGraph, op: Op, segments: Sequence[int], spans: LayerSpans) -> int:
    forward_idx = op.forward_op_idx
    if forward_idx is None:  # the gradient of the loss
        return spans.num_segments - 1
    return segments[forward_idx] if forward_idx < len(segments) else spans.segment_of(forward_idx)


def attention_heads(graph: OpGraph) -> int | None:
    """The most heads that an attention of the graph has; None without attention."""
    heads = [0]
    for op in graph.ops:
        if op.phase is not OpPhase.FORWARD:
            break
        if op.kind == "sdpa":
            shape = graph.tensors[op.inputs[0]].shape
            heads.append(shape[-3] if len(shape) > 3 else _without_batch(shape[0], graph))
        elif op.kind == "matmul" and not any(graph.tensors[i].role in _WEIGHTS for i in op.inputs):
            shape = graph.tensors[op.outputs[0]].shape
            if len(shape) == 4 and 1 not in graph.tensors[op.outputs[0]].batch_axes:
                heads.append(shape[1])
            elif len(shape) == 3:
                heads.append(_without_batch(shape[0], graph))
    return max(heads) or None


def _without_batch(size: int, graph: OpGraph) -> int:
    batch = graph.batch_size or 1
    return size // batch if size % batch == 0 else size


@dataclass(frozen=True)
class Experts:
    """The experts of a graph's mixture-of-experts layers."""

    parameters: frozenset[int]  # tensors that hold experts' weights
    products: tuple[tuple[int, ...], ...]  # forward products by layer
    num_experts: int  # of one layer


def find_experts(graph: OpGraph) -> Experts | None:
    """Experts by their parameters' names (``experts.3.w1``), or as stacked weights (experts, k, n) beside a top-k.

    None where the graph shows none.
    """
    has_top_k = any(op.kind == "topk" for op in graph.ops)
    roots = parameter_roots(graph)
    spans = layer_spans(graph)
    parameters: set[int] = set()
    numbers: dict[int, set[int]] = defaultdict(set)
    by_layer: dict[int, list[int]] = defaultdict(list)
    for op_idx, op in enumerate(graph.ops):
        if op.phase is not OpPhase.FORWARD or category_of(op.kind) is not Category.MATMUL or len(op.inputs) < 2:
            continue
        weights = [i for i in op.inputs[:2] if graph.tensors[i].role in _WEIGHTS]
        for weight in weights:
            root = roots.get(weight, weight)
            shape = graph.tensors[root].shape
            named = next((m for text in (graph.tensors[root].name, op.name) if (m := _EXPERT_NAME.search(text))), None)
            stacked = len(shape) == 3 and shape[0] > 1
            if named is None and not (stacked and has_top_k):
                continue
            segment = spans.segment_of(op_idx)
            parameters.add(root)
            by_layer[segment].append(op_idx)
            numbers[segment].update([int(named[1])] if named and named[1] else range(shape[0]) if stacked else [])
    if not parameters:
        return None
    return Experts(frozenset(parameters), tuple(map(tuple, by_layer.values())), max(map(len, numbers.values())))


def parameter_roots(graph: OpGraph) -> dict[int, int]:
    """Tensor computed from one parameter alone (cast, transposed) -> that parameter; parameters map to themselves."""
    roots = {i: i for i, tensor in enumerate(graph.tensors) if tensor.role is Role.PARAMETER}
    for op in graph.ops:
        if op.phase is not OpPhase.FORWARD:
            break
        if len(op.inputs) == 1 and op.inputs[0] in roots:
            for o in op.outputs:
                roots[o] = roots[op.inputs[0]]
    return roots
