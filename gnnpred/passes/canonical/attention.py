"""Softmax attention -> one ``sdpa`` op, however scale, mask, dropout and head sharing were written.

A file cannot say whether the products and the softmax ran as one fused kernel: since PyTorch 2 models call
the fused function and exporters take it apart. So both front ends end in ``sdpa``, and the job's framework
version decides what it costs.
"""

from dataclasses import dataclass, field
from typing import Any

from gnnpred.graph import Op, Role
from gnnpred.passes.canonical.editor import GraphEditor
from gnnpred.passes.canonical.matching import split_scalar

_MAX_CHAIN = 10


@dataclass
class _Attention:
    q: int
    k_transposed: int
    v: int
    masks: list[int] = field(default_factory=list)
    dropout: float = 0.0
    final_idx: int = -1


def fuse_attention(editor: GraphEditor) -> None:
    """Replace each product-softmax-product by one op, and tidy the operands of every attention op."""
    for op_idx in editor.positions("softmax"):
        found = _find(editor, op_idx)
        if found is not None:
            _install(editor, found)
    for op_idx in editor.positions("sdpa"):
        _tidy(editor, op_idx)


def _find(editor: GraphEditor, softmax_idx: int) -> _Attention | None:
    softmax = editor.ops[softmax_idx]
    if softmax is None:
        return None
    scores_shape = editor.shape(softmax.inputs[0])
    if len(scores_shape) < 3 or softmax.attributes.get("axis", -1) not in (-1, len(scores_shape) - 1):
        return None
    above = _weighted_sum(editor, softmax.outputs[0])
    if above is None:
        return None
    final_idx, v, dropout = above
    below = _scores(editor, softmax.inputs[0])
    if below is None:
        return None
    product, masks = below
    q, k_transposed = product.inputs
    return _Attention(q, k_transposed, v, masks, dropout, final_idx)


def _weighted_sum(editor: GraphEditor, weights: int) -> tuple[int, int, float] | None:
    """(position of weights @ v, v, dropout between) above the softmax."""
    dropout = 0.0
    for _ in range(4):
        reader_idx = editor.sole_reader(weights)
        reader = editor.ops[reader_idx] if reader_idx is not None else None
        if reader_idx is None or reader is None:
            return None
        if reader.kind == "matmul":
            if reader.inputs[0] != weights or reader.inputs[1] == weights:
                return None
            return reader_idx, reader.inputs[1], dropout
        if reader.kind == "dropout":
            dropout = float(reader.attributes.get("ratio", 0.0) or 0.0)
        elif reader.kind not in ("cast", "copy", "identity", "view") or not _keeps_rows(editor, reader):
            return None
        weights = reader.outputs[0]
    return None


def _keeps_rows(editor: GraphEditor, op: Op) -> bool:
    """Whether a view only regroups the leading axes: attention in (B * heads, q, k) and (B, heads, q, k)."""
    return editor.shape(op.inputs[0])[-2:] == editor.shape(op.outputs[0])[-2:]


def _scores(editor: GraphEditor, scores: int) -> tuple[Op, list[int]] | None:
    """(q @ k^T, masks) below the softmax; the scale is part of the attention op."""
    masks: list[int] = []
    for _ in range(_MAX_CHAIN):
        if not editor.is_private(scores):
            return None
        op = editor.producer_op(scores)
        if op is None:
            return None
        if op.kind == "matmul":
            # a product with a vector (additive attention of recurrent networks) is no sdpa
            is_batched = all(len(editor.shape(tensor)) >= 2 for tensor in op.inputs)
            return (op, masks) if is_batched else None
        following = _below(editor, op, masks)
        if following is None:
            return None
        scores = following
    return None


def _below(editor: GraphEditor, op: Op, masks: list[int]) -> int | None:
    """The operand of a scale, mask or regrouping that carries the scores."""
    if op.kind in ("cast", "copy", "identity", "view"):
        return op.inputs[0] if _keeps_rows(editor, op) else None
    if op.kind in ("mul", "div"):
        scalar = split_scalar(editor, op)
        if scalar is not None:
            return scalar[0]
        # a learned scale per head (cosine attention); read with the scores
        other = _other_operand(editor, op)
        return other[0] if other is not None and not editor.depends_on_data(other[1]) else None
    if op.kind in ("add", "sub", "maximum"):
        scalar = split_scalar(editor, op)
        if scalar is not None:
            return scalar[0]
        operands = _other_operand(editor, op)
        if operands is None:
            return None
        masks.append(operands[1])
        return operands[0]
    if op.kind == "where":
        candidates = [tensor for tensor in op.inputs if _leads_to_product(editor, tensor)]
        if len(candidates) != 1 or editor.shape(candidates[0]) != editor.shape(op.outputs[0]):
            return None
        others = [tensor for tensor in op.inputs if tensor != candidates[0] and editor.tensors[tensor].num_elements > 1]
        masks.extend(others[:1])
        return candidates[0]
    if op.kind == "clamp":
        return op.inputs[0]
    return None


def _other_operand(editor: GraphEditor, op: Op) -> tuple[int, int] | None:
    """(scores, the other operand) of a binary op, where only one side comes from a product."""
    if len(op.inputs) != 2:
        return None
    first, second = op.inputs
    if _leads_to_product(editor, first):
        if _leads_to_product(editor, second) and editor.shape(second) == editor.shape(op.outputs[0]):
            # scores plus a data-dependent bias of the same size (relative positions): the bias is the mask
            return first, second
        return first, second
    return (second, first) if _leads_to_product(editor, second) else None


def _leads_to_product(editor: GraphEditor, tensor: int) -> bool:
    for _ in range(_MAX_CHAIN):
        op = editor.producer_op(tensor)
        if op is None or not editor.depends_on_data(tensor):
            return False
        if op.kind == "matmul":
            return True
        if op.kind not in ("mul", "div", "add", "sub", "where", "view", "cast", "copy", "identity", "clamp", "maximum"):
            return False
        data = [t for t in op.inputs if editor.depends_on_data(t) and editor.number(t) is None]
        if not data:
            return False
        full = [t for t in data if editor.tensors[t].num_elements == editor.tensors[tensor].num_elements]
        tensor = (full or data)[0]
    return False


# --- rewriting --------------------------------------------------------------------------------


def _install(editor: GraphEditor, found: _Attention) -> None:
    final = editor.ops[found.final_idx]
    assert final is not None
    q = found.q
    k = _untransposed(editor, found.k_transposed, found.final_idx)
    attributes: dict[str, Any] = {"causal": False}
    if found.dropout:
        attributes["dropout"] = found.dropout
    inputs = [q, k, found.v]
    masks = [tensor for tensor in found.masks if editor.tensors[tensor].num_elements > 1]
    for mask in masks:
        if _is_causal_mask(editor, mask, q, k):
            attributes["causal"] = True
        elif len(inputs) == 3 or editor.tensors[mask].num_elements > editor.tensors[inputs[3]].num_elements:
            inputs[3:] = [mask]
    if len(editor.shape(found.v)) != len(editor.shape(q)):
        return
    editor.replace_op(found.final_idx, "sdpa", inputs, attributes)


def _is_causal_mask(editor: GraphEditor, mask: int, q: int, k: int) -> bool:
    """A constant square mask, the same for every sample and head, is the triangle of a decoder."""
    spec = editor.tensors[mask]
    if spec.role is not Role.CONSTANT or len(spec.shape) < 2:
        return False
    seq_q, seq_k = editor.shape(q)[-2], editor.shape(k)[-2]
    # a constant may have been expanded over the batch
    rest = [dim for axis, dim in enumerate(spec.shape[:-2]) if axis not in spec.batch_axes]
    return spec.shape[-2:] == (seq_q, seq_k) and seq_q == seq_k and all(dim == 1 for dim in rest)


def _untransposed(editor: GraphEditor, k_transposed: int, anchor_idx: int) -> int:
    """k as (..., sequence, head_dim), from the (..., head_dim, sequence) that the product reads."""
    shape = editor.shape(k_transposed)
    wanted = (*shape[:-2], shape[-1], shape[-2])
    candidate, swapped = _strip_scale(editor, k_transposed), False
    regrouped: int | None = None
    for _ in range(4):  # exporters write the swap of any rank as view, transpose, view
        view = editor.producer_op(candidate, "transpose", "view")
        if view is None:
            break
        candidate = _strip_scale(editor, view.inputs[0])
        swapped = swapped or (view.kind == "transpose" and _swaps_last_two(view))
        if editor.shape(candidate) == wanted and (view.kind == "view" or _swaps_last_two(view)):
            return candidate
        if swapped and view.kind == "view" and editor.shape(candidate)[-2:] == wanted[-2:]:
            regrouped = candidate
    spec = editor.tensors[k_transposed]
    rank = len(shape)
    swap = {rank - 1: rank - 2, rank - 2: rank - 1}
    k = editor.like(k_transposed, shape=wanted, batch_axes=sorted(swap.get(a, a) for a in spec.batch_axes))
    if regrouped is not None and editor.tensors[regrouped].num_elements == editor.tensors[k].num_elements:
        editor.insert_before(anchor_idx, "view", (regrouped,), (k,))
        return k
    perm = (*range(rank - 2), rank - 1, rank - 2)
    editor.insert_before(anchor_idx, "transpose", (_strip_scale(editor, k_transposed),), (k,), {"perm": perm})
    return k


def _swaps_last_two(op: Op) -> bool:
    perm = tuple(op.attributes.get("perm", ()))
    rank = len(perm)
    return perm == (*range(rank - 2), rank - 1, rank - 2)


def _strip_scale(editor: GraphEditor, tensor: int) -> int:
    """Below a product with a scalar: the scale is part of the attention op."""
    op = editor.producer_op(tensor, "mul", "div")
    if op is None or not editor.is_private(tensor):
        return tensor
    scalar = split_scalar(editor, op)
    if scalar is None or (op.kind == "div" and scalar[0] != op.inputs[0]):
        return tensor
    return scalar[0] if editor.shape(scalar[0]) == editor.shape(tensor) else tensor


def _shared_heads(editor: GraphEditor, tensor: int) -> int:
    """Keys or values before they were repeated for each query head of a group."""
    shape, current, expanded = editor.shape(tensor), tensor, False
    for _ in range(4):
        op = editor.producer_op(current, "view", "copy", "expand", "tile")
        if op is None:
            break
        current = op.inputs[0]
        expanded = expanded or op.kind in ("expand", "tile")
        inner = editor.shape(current)
        if not expanded or op.kind != "view" or len(inner) != 4 or len(shape) != 4 or not inner[1]:
            continue
        if inner[0] == shape[0] and inner[2:] == shape[2:] and shape[1] % inner[1] == 0:
            return current
    return tensor


def _tidy(editor: GraphEditor, op_idx: int) -> None:
    """Scales of q and k out, repeated heads out, a causal mask as a flag, no mask that is a plain constant."""
    op = editor.ops[op_idx]
    if op is None or len(op.inputs) < 3:
        return
    q, k, v, *masks = op.inputs
    q, k = _strip_scale(editor, q), _strip_scale(editor, k)
    k, v = _shared_heads(editor, k), _shared_heads(editor, v)
    attributes = dict(op.attributes)
    attributes.setdefault("causal", False)
    if masks and _is_causal_mask(editor, masks[0], q, k):
        attributes["causal"] = True
        masks = []
    if attributes["causal"] and masks and editor.role(masks[0]) is Role.CONSTANT:
        masks = []
    if (q, k, v, *masks) != op.inputs or attributes != dict(op.attributes):
        editor.replace_op(op_idx, "sdpa", (q, k, v, *masks), attributes)
