"""Tensor parallelism as Megatron-LM does it: one GPU's share of every product, as a graph of its own.

``split_products`` works on the lowered forward graph, before the backward pass is added, so that gradients, costs and
features of the share follow from its shapes. The weight of a product is split by columns (output features) where its
input is whole, and by rows where its input already is split; between the two the activation stays split (attention
heads, hidden features of the MLP), behind the second the partial sums of all GPUs are added: one all-reduce forward,
and one backward for the gradient of the input of the first (Shoeybi et al., arXiv 1909.08053, figure 3). The
vocabulary of the word embedding and of the output layer is split too (section 3). Norms, dropout and residual sums
in between are computed by every GPU.

Only chains that close this way are split: a product whose split result would have to be gathered again (a norm over
the features, a residual sum) stays whole on every GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from gnnpred.errors import UsageError
from gnnpred.graph import Component, Op, OpGraph, OpPhase, Role, TensorSpec
from gnnpred.op_kinds import Category, category_of
from gnnpred.passes.layers import LayerSpans, attention_heads, layer_spans

MIN_VOCABULARY = 4096  # smaller tables (positions, segments) stay whole, as in Megatron-LM
_MAX_ROUNDS = 12
_MUCH = 0.1  # share of the weights
_WEIGHTS = (Role.PARAMETER, Role.PARAMETER_DERIVED)
_FIXED = (*_WEIGHTS, Role.CONSTANT)


@dataclass(frozen=True)
class LayerCollective:
    """A collective inside the forward or backward pass of a layer, which the next op has to wait for."""

    kind: str  # all_reduce
    num_bytes: float  # of the whole activation
    phase: OpPhase
    op_idx: int  # forward: it follows this op; backward: it follows the last backward op of this forward op


@dataclass(frozen=True)
class SplitGraph:
    """One GPU's share of a forward graph."""

    graph: OpGraph
    collectives: tuple[LayerCollective, ...]
    repeated_ops: frozenset[int]  # forward ops inside the layers that every GPU computes in full


class _NotSplittableError(Exception):
    """A split tensor meets an op that needs it whole; ``blame`` are the products that split it."""

    def __init__(self, blame: frozenset[int]) -> None:
        self.blame = blame


@dataclass
class _Share:
    """Shapes of one GPU's share, and along which axis each tensor is split."""

    graph: OpGraph
    ways: int
    heads: int
    whole: frozenset[int]  # products that stay whole
    shapes: list[tuple[int, ...]]
    producer: dict[int, int]
    axis: dict[int, int] = field(default_factory=dict)
    origin: dict[int, frozenset[int]] = field(default_factory=dict)
    columns: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    sums: list[tuple[int, float]] = field(default_factory=list)  # (op, bytes) of partial sums that are added up

    def local(self, size: int) -> int:
        return -(-size // self.ways)

    def set_axis(self, tensor_idx: int, axis: int, origin: frozenset[int]) -> None:
        shape = list(self.graph.tensors[tensor_idx].shape)
        shape[axis] = self.local(shape[axis])
        self.shapes[tensor_idx] = tuple(shape)
        self.axis[tensor_idx] = axis
        self.origin[tensor_idx] = origin

    def refuse(self, tensor_indices: Sequence[int]) -> None:
        raise _NotSplittableError(frozenset().union(*(self.origin.get(i, frozenset()) for i in tensor_indices)))

    def split_weight(self, tensor_idx: int, axis: int) -> None:
        """Split a weight, and what it was cast or transposed from."""
        while True:
            tensor = self.graph.tensors[tensor_idx]
            shape = list(tensor.shape)
            shape[axis] = self.local(shape[axis])
            self.shapes[tensor_idx] = tuple(shape)
            made_by = self.producer.get(tensor_idx)
            if tensor.role is not Role.PARAMETER_DERIVED or made_by is None:
                return
            op = self.graph.ops[made_by]
            if op.kind == "transpose" and (axes := _permutation(op)):
                axis = axes[axis]
            elif op.inputs and self.graph.tensors[op.inputs[0]].shape != tensor.shape:
                return
            if not op.inputs:
                return
            tensor_idx = op.inputs[0]


def split_products(graph: OpGraph, ways: int, *, option: str = "--tp") -> SplitGraph:
    """One GPU's share of a lowered forward graph whose products are split ``ways`` ways.

    Raises UsageError where the attention heads do not divide, or no product can be split.
    """
    if ways == 1:
        return SplitGraph(graph, (), frozenset())
    heads = attention_heads(graph)
    if heads is not None and ways > heads:
        raise UsageError(f"{option} {ways} is more than the {heads} attention heads of {graph.name or 'the model'}")
    if heads is not None and heads % ways:
        raise UsageError(f"{option} {ways} does not divide the {heads} attention heads of {graph.name or 'the model'}")
    whole: frozenset[int] = frozenset()
    for _ in range(_MAX_ROUNDS):
        share = _Share(graph, ways, heads or 0, whole, [t.shape for t in graph.tensors], graph.producer_by_tensor())
        blame = _walk(share)
        if blame:
            whole |= blame
            continue
        if share.rows:
            return _split_graph(share)
        break
    raise UsageError(
        f"{option} {ways}: {graph.name or 'the model'} has no pair of products that it could split "
        "(attention or an MLP between whole activations); use data parallelism"
    )


def _walk(share: _Share) -> frozenset[int]:
    """Split what can be split; the products whose results some op turned out to need whole."""
    graph, blame = share.graph, frozenset()
    for op_idx, op in enumerate(graph.ops):
        if all(graph.tensors[i].role in _FIXED for i in op.inputs) and not any(i in share.axis for i in op.inputs):
            continue
        split = [i for i in op.inputs if i in share.axis]
        if op.kind == "linear" or (op.kind == "matmul" and _is_weight(graph, op.inputs[1])):
            _product(share, op_idx, op)
        elif split:
            try:
                _RULES.get(op.kind, _by_category(op.kind))(share, op_idx, op, split)
            except _NotSplittableError as conflict:
                blame |= conflict.blame
                for o in op.outputs:
                    share.axis.pop(o, None)
    return blame


def _is_weight(graph: OpGraph, tensor_idx: int) -> bool:
    return graph.tensors[tensor_idx].role in _WEIGHTS


def _weight_axes(share: _Share, op: Op) -> tuple[int, int]:
    """(axis of the output features, axis of the input features) of a product's weight."""
    shape = share.graph.tensors[op.inputs[1]].shape
    features = share.graph.tensors[op.outputs[0]].shape[-1]
    if op.kind == "matmul":
        return len(shape) - 1, len(shape) - 2
    if len(shape) != 2:
        return 0, len(shape) - 1
    return (0, 1) if shape[0] == features else (1, 0)


def _product(share: _Share, op_idx: int, op: Op) -> None:
    tensors = share.graph.tensors
    x, weight, out = op.inputs[0], op.inputs[1], op.outputs[0]
    out_axis, in_axis = _weight_axes(share, op)
    last = len(tensors[x].shape) - 1
    split_axis = share.axis.get(x)
    if split_axis is None:
        features = tensors[out].shape[-1]
        # a vocabulary is padded to a multiple; other widths have to divide
        if op_idx in share.whole or (features % share.ways and features < MIN_VOCABULARY):
            return
        share.columns.append(op_idx)
        share.split_weight(weight, out_axis)
        for bias in op.inputs[2:]:
            share.split_weight(bias, len(tensors[bias].shape) - 1)
        share.set_axis(out, len(tensors[out].shape) - 1, frozenset([op_idx]))
    elif split_axis == last:
        share.rows.append(op_idx)
        share.split_weight(weight, in_axis)
        share.sums.append((op_idx, tensors[out].num_bytes))
    else:
        share.set_axis(out, split_axis, share.origin[x])


def _reshape(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    x, out = op.inputs[0], op.outputs[0]
    axis = _reshaped_axis(share, x, out)
    if axis is None:
        share.refuse(split)
    share.set_axis(out, axis, share.origin[x])


def _reshaped_axis(share: _Share, x: int, out: int) -> int | None:
    """Where the split axis of ``x`` goes in a reshape: into the group of axes with the same elements."""
    old, new = share.graph.tensors[x].shape, share.graph.tensors[out].shape
    axis = share.axis[x]
    i = j = 0
    while i < len(old):
        begin_i, begin_j = i, j
        size_old, size_new = old[i], new[j] if j < len(new) else 1
        i, j = i + 1, j + 1
        while size_old != size_new:
            if size_old < size_new:
                if i >= len(old):
                    return None
                size_old, i = size_old * old[i], i + 1
            else:
                if j >= len(new):
                    return None
                size_new, j = size_new * new[j], j + 1
        if begin_i <= axis < i:
            if begin_j >= len(new):
                return None
            return _chosen_axis(share, out, range(begin_j, min(j, len(new))), old[axis])
    return None


def _chosen_axis(share: _Share, out: int, candidates: range, old_size: int) -> int | None:
    """Among the axes that the split one became: the heads, else the first that divides and is not the batch's.

    The last of several is the size of a head, which is never split where another one divides.
    """
    tensor = share.graph.tensors[out]
    if len(candidates) == 1:
        return candidates[0]
    divides = [a for a in candidates if tensor.shape[a] % share.ways == 0]
    own = [a for a in divides if a not in tensor.batch_axes] or divides
    if len(own) > 1 and own[-1] == candidates[-1]:
        own = own[:-1]
    for wanted in (share.heads, old_size):
        for a in own:
            if tensor.shape[a] == wanted:
                return a
    return own[0] if own else None


def _permutation(op: Op) -> tuple[int, ...]:
    """Axes of a transpose, as the front ends name them (ONNX: perm); () where none are given."""
    return tuple(op.attributes.get("axes") or op.attributes.get("perm") or ())


def _transpose(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    axes = _permutation(op)
    if not axes:
        share.refuse(split)
    share.set_axis(op.outputs[0], axes.index(share.axis[op.inputs[0]]), share.origin[op.inputs[0]])


def _slices(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    """split and slice; an unbind or a select drops the axis that it works on."""
    x = op.inputs[0]
    old = share.graph.tensors[x].shape
    works_on = op.attributes.get("axis")
    for out in op.outputs:
        axis = share.axis[x]
        new = share.graph.tensors[out].shape
        if len(new) == len(old) - 1 and works_on is not None and works_on % len(old) != axis:
            axis -= works_on % len(old) < axis
        elif len(new) != len(old) or (new[axis] != old[axis] and new[axis] % share.ways):
            share.refuse(split)
        share.set_axis(out, axis, share.origin[x])


def _elementwise(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    """Every operand that spans the split axis has to be split alike; whole ones that broadcast over it are fine."""
    tensors = share.graph.tensors
    out_rank = len(tensors[op.outputs[0]].shape)
    places = {share.axis[i] + out_rank - len(tensors[i].shape) for i in split}
    if len(places) != 1:
        share.refuse(split)
    place = places.pop()
    full = tensors[split[0]].shape[share.axis[split[0]]]
    origin = frozenset().union(*(share.origin[i] for i in split))
    for i in op.inputs:
        if i in share.axis:
            continue
        own = place - (out_rank - len(tensors[i].shape))
        if own < 0 or tensors[i].shape[own] != full or full == 1:
            continue
        if tensors[i].role not in _FIXED:
            share.refuse(split)
        share.split_weight(i, own)
    for out in op.outputs:
        if len(tensors[out].shape) != out_rank or tensors[out].shape[place] % share.ways:
            share.refuse(split)
        share.set_axis(out, place, origin)


def _keeps_unless(attribute: str):
    """A rule for ops that work along one axis: along any other they treat a split tensor like a smaller one."""

    def rule(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
        x = op.inputs[0]
        rank = len(share.graph.tensors[x].shape)
        works_on = op.attributes.get(attribute, -1)
        axes = {a % rank for a in (works_on if isinstance(works_on, tuple | list) else (works_on,))}
        if split != [x] or share.axis[x] in axes:
            share.refuse(split)
        share.set_axis(op.outputs[0], share.axis[x], share.origin[x])

    return rule


def _norm(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    x = op.inputs[0]
    shape = share.graph.tensors[x].shape
    normalized = op.attributes.get("normalized_size", 0)
    first = len(shape)
    while first > 0 and prod(shape[first:]) < normalized:
        first -= 1
    if split != [x] or not normalized or share.axis[x] >= first:
        share.refuse(split)
    share.set_axis(op.outputs[0], share.axis[x], share.origin[x])


def _reduction(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    x, out = op.inputs[0], op.outputs[0]
    old, new = share.graph.tensors[x].shape, share.graph.tensors[out].shape
    axes = op.attributes.get("axes")
    if axes is None:
        share.refuse(split)
    reduced = {a % len(old) for a in axes}
    axis = share.axis[x]
    if axis in reduced:
        share.refuse(split)
    if len(new) != len(old):
        axis -= sum(a < axis for a in reduced)
    share.set_axis(out, axis, share.origin[x])


def _matmul(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    """Products of two activations: attention over the heads' axis."""
    tensors = share.graph.tensors
    out_rank = len(tensors[op.outputs[0]].shape)
    places = set()
    for i in split:
        rank = len(tensors[i].shape)
        if share.axis[i] >= rank - 2:  # rows, columns or the inner dimension
            share.refuse(split)
        places.add(share.axis[i] + out_rank - rank)
    if len(places) != 1:
        share.refuse(split)
    _check_others(share, op, split, places.copy().pop(), out_rank)
    share.set_axis(op.outputs[0], places.pop(), frozenset().union(*(share.origin[i] for i in split)))


def _check_others(share: _Share, op: Op, split: list[int], place: int, out_rank: int) -> None:
    tensors = share.graph.tensors
    for i in op.inputs:
        own = place - (out_rank - len(tensors[i].shape))
        if i in share.axis or own < 0 or tensors[i].shape[own] == 1:
            continue
        if tensors[i].role not in _FIXED:
            share.refuse(split)
        share.split_weight(i, own)


def _attention(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    q = op.inputs[0]
    rank = len(share.graph.tensors[q].shape)
    if q not in share.axis or share.axis[q] >= rank - 2:
        share.refuse(split)
    axis = share.axis[q]
    tensors = share.graph.tensors
    for i in op.inputs[1:3]:
        if share.axis.get(i, axis) != axis:
            share.refuse([i])
        if i not in share.axis and tensors[i].shape[axis] == tensors[q].shape[axis]:
            # Fewer key heads than GPUs, repeated for the queries: every GPU makes all of them and reads its own.
            share.set_axis(i, axis, frozenset())
    for i in op.inputs[3:]:
        mask = share.graph.tensors[i]
        own = axis - (rank - len(mask.shape))
        if i in share.axis or own < 0 or mask.shape[own] in (1, share.graph.batch_size):
            continue
        if mask.role not in _FIXED:
            share.refuse(split)
        share.split_weight(i, own)
    share.set_axis(op.outputs[0], axis, share.origin[q])


def _join(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    """concat, stack."""
    tensors = share.graph.tensors
    rank = len(tensors[op.inputs[0]].shape)
    if len(split) != len(op.inputs) or len({share.axis[i] for i in split}) != 1:
        share.refuse(split)
    axis = share.axis[split[0]]
    if op.kind == "stack":
        at = op.attributes.get("axis", 0) % (rank + 1)
        axis += at <= axis
    share.set_axis(op.outputs[0], axis, frozenset().union(*(share.origin[i] for i in split)))


def _loss(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    """A loss over a split vocabulary exchanges a maximum and two sums per token: its result is whole."""


def _unknown(share: _Share, op_idx: int, op: Op, split: list[int]) -> None:
    share.refuse(split)


_RULES = {
    "view": _reshape,
    "identity": _elementwise,
    "transpose": _transpose,
    "split": _slices,
    "slice": _slices,
    "expand": _elementwise,
    "matmul": _matmul,
    "sdpa": _attention,
    "softmax": _keeps_unless("axis"),
    "log_softmax": _keeps_unless("axis"),
    "concat": _join,
    "stack": _join,
    "cast": _elementwise,
    "copy": _elementwise,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "l2_norm": _keeps_unless("axis"),
    "cross_entropy": _loss,
}


def _by_category(kind: str):
    match category_of(kind):
        case Category.UNARY | Category.BINARY:
            return _elementwise
        case Category.REDUCTION:
            return _reduction
    return _unknown


def _split_graph(share: _Share) -> SplitGraph:
    graph = share.graph
    collectives = [
        LayerCollective("all_reduce", num_bytes, OpPhase.FORWARD, op_idx) for op_idx, num_bytes in share.sums
    ]
    collectives += _split_embeddings(share)
    # One all-reduce backward for each whole activation that split products read, casts and views of it included.
    roots: dict[int, int] = {}
    for op in graph.ops:
        if op.inputs and (op.component is Component.CAST or op.kind in ("view", "copy", "cast", "identity")):
            for o in op.outputs:
                roots[o] = roots.get(op.inputs[0], op.inputs[0])
    read: dict[int, int] = {}
    for op_idx in share.columns:
        x = graph.ops[op_idx].inputs[0]
        if graph.tensors[x].role is Role.ACTIVATION:
            read.setdefault(roots.get(x, x), op_idx)
    collectives += [
        LayerCollective("all_reduce", graph.tensors[graph.ops[op_idx].inputs[0]].num_bytes, OpPhase.BACKWARD, op_idx)
        for op_idx in read.values()
    ]
    spans = layer_spans(graph)
    is_split = [shape != tensor.shape for tensor, shape in zip(graph.tensors, share.shapes, strict=True)]
    repeated = frozenset(
        op_idx
        for op_idx in range(spans.starts[0], spans.stop)
        if not any(is_split[t] for t in (*graph.ops[op_idx].inputs, *graph.ops[op_idx].outputs))
    )
    tensors = tuple(
        _with_shape(tensor, shape) if shape != tensor.shape else tensor
        for tensor, shape in zip(graph.tensors, share.shapes, strict=True)
    )
    return SplitGraph(
        graph.replace(tensors=tensors, notes=(*graph.notes, *_notes(share, spans))), tuple(collectives), repeated
    )


def _notes(share: _Share, spans: LayerSpans) -> list[str]:
    """What stays whole on every GPU of the weights in layers, where it is much."""
    graph, total, whole = share.graph, 0, 0
    for op_idx in range(spans.starts[0], spans.stop):
        op = graph.ops[op_idx]
        if category_of(op.kind) in (Category.CONV, Category.MATMUL) and _is_weight(graph, op.inputs[1]):
            weight = graph.tensors[op.inputs[1]]
            total += weight.num_elements
            whole += weight.num_elements if share.shapes[op.inputs[1]] == weight.shape else 0
    if whole < _MUCH * total:
        return []
    return [
        f"tensor parallelism leaves {whole / total:.0%} of the layers' weights whole on every GPU: their products do "
        "not come in pairs between whole activations"
    ]


def _with_shape(tensor: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    # a value belongs to the whole tensor
    return replace(tensor, shape=shape, value=None)


def _split_embeddings(share: _Share) -> list[LayerCollective]:
    """Word embeddings are split by vocabulary: every GPU looks up its part, an all-reduce adds them."""
    graph, found = share.graph, []
    for op_idx, op in enumerate(graph.ops):
        if op.kind != "embedding" or not _is_weight(graph, op.inputs[0]):
            continue
        weight = op.inputs[0]
        if len(graph.tensors[weight].shape) != 2 or graph.tensors[weight].shape[0] < MIN_VOCABULARY:
            continue
        if share.shapes[weight] == graph.tensors[weight].shape:
            share.split_weight(weight, 0)
        found.append(LayerCollective("all_reduce", graph.tensors[op.outputs[0]].num_bytes, OpPhase.FORWARD, op_idx))
    return found
