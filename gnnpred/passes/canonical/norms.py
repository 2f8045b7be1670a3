"""LayerNorm, RMSNorm, BatchNorm, GroupNorm and L2 normalisation from their pieces.

The anchor is the root of a variance plus epsilon. What is squared says which norm it is (centred: layer
norm; plain: RMS norm), the reduced axes say over what, and the products after it are its weight and bias.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from gnnpred.graph import Role
from gnnpred.passes.canonical.editor import GraphEditor
from gnnpred.passes.canonical.matching import pieces_are_real, split_scalar, unfused_attributes

_MAX_EPSILON = 0.1


@dataclass
class _Normalised:
    """``top`` holds x normalised over ``axes`` of x, before weight and bias."""

    kind: str  # layer_norm | rms_norm
    x: int
    axes: tuple[int, ...]
    top: int
    op_idxs: list[int] = field(default_factory=list)


def fuse_norms(editor: GraphEditor) -> None:
    """Recompose every norm; the affine part after an existing norm op becomes its weight and bias."""
    for op_idx in editor.positions("rsqrt", "sqrt", "pow_scalar"):
        found = _root_norm(editor, op_idx)
        if found is not None:
            _install(editor, found)
    for op_idx in editor.positions("reduce_l2"):
        _fuse_l2_norm(editor, op_idx)
    for op_idx in editor.positions("group_norm", "batch_norm", "layer_norm"):
        _fuse_group_norm(editor, op_idx)
    for op_idx in editor.positions("layer_norm", "rms_norm", "group_norm"):
        _take_affine(editor, op_idx)


# --- the normalised tensor --------------------------------------------------------------------


def _root_norm(editor: GraphEditor, root_idx: int) -> _Normalised | None:
    root = editor.ops[root_idx]
    if root is None or (root.kind == "pow_scalar" and root.attributes.get("exponent") not in (-0.5, 0.5)):
        return None
    add = editor.producer_op(root.inputs[0], "add", "clamp")
    if add is None:
        return None
    variance = add.inputs[0]
    if add.kind == "add":
        part = split_scalar(editor, add)
        if part is None or not 0 <= part[1] <= _MAX_EPSILON:
            return None
        variance = part[0]
    op_idxs = [root_idx, editor.producer[root.inputs[0]]]
    squared = _mean_of_square(editor, variance, op_idxs)
    if squared is None:
        return None
    centred, axes = squared
    x, kind = centred, "rms_norm"
    difference = editor.producer_op(centred, "sub")
    if editor.producer_op(variance, "reduce_var") is not None:
        kind = "layer_norm"
    elif difference is not None and _is_mean_of(editor, difference.inputs[1], difference.inputs[0], axes):
        x, kind = difference.inputs[0], "layer_norm"
        op_idxs += [editor.producer[centred], editor.producer[difference.inputs[1]]]
    inverse = root.kind == "rsqrt" or root.attributes.get("exponent") == -0.5
    top = _scaled_by_root(editor, root.outputs[0], inverse, x, centred, kind, axes, op_idxs)
    return None if top is None else _Normalised(kind, x, axes, top, op_idxs)


def _mean_of_square(editor: GraphEditor, variance: int, op_idxs: list[int]) -> tuple[int, tuple[int, ...]] | None:
    """(what is squared, reduced axes) where ``variance`` is a mean of squares, or torch.var."""
    mean = editor.producer_op(variance, "reduce_mean", "reduce_var")
    if mean is None:
        return None
    axes = tuple(mean.attributes.get("axes", ()))
    op_idxs.append(editor.producer[variance])
    if mean.kind == "reduce_var":
        return mean.inputs[0], axes
    square = editor.producer_op(mean.inputs[0], "pow_scalar", "mul")
    if square is None:
        return None
    if square.kind == "pow_scalar" and square.attributes.get("exponent") != 2:
        return None
    if square.kind == "mul" and len(set(square.inputs)) != 1:
        return None
    op_idxs.append(editor.producer[mean.inputs[0]])
    return square.inputs[0], axes


def _is_mean_of(editor: GraphEditor, tensor: int, x: int, axes: tuple[int, ...]) -> bool:
    mean = editor.producer_op(tensor, "reduce_mean")
    return mean is not None and mean.inputs[0] == x and tuple(mean.attributes.get("axes", ())) == axes


def _scaled_by_root(
    editor: GraphEditor, root: int, inverse: bool, x: int, centred: int, kind: str, axes: tuple[int, ...],
    op_idxs: list[int],
) -> int | None:  # fmt: skip
    """The tensor ``centred / root``; a second (x - mean) of the exporter counts as ``centred``."""
    reader_idx = editor.sole_reader(root)
    reader = editor.ops[reader_idx] if reader_idx is not None else None
    if reader is not None and not inverse and reader.kind == "reciprocal":
        op_idxs.append(reader_idx)  # type: ignore[arg-type]
        root, inverse = reader.outputs[0], True
        reader_idx = editor.sole_reader(root)
        reader = editor.ops[reader_idx] if reader_idx is not None else None
    if reader_idx is None or reader is None or len(reader.inputs) != 2:
        return None
    if reader.kind == "mul" and inverse:
        other = reader.inputs[1] if reader.inputs[0] == root else reader.inputs[0]
    elif reader.kind == "div" and not inverse and reader.inputs[1] == root:
        other = reader.inputs[0]
    else:
        return None
    if kind == "layer_norm" and other == x:
        return None
    if other != centred:
        again = editor.producer_op(other, "sub")
        if again is None or again.inputs[0] != centred or not _is_mean_of(editor, again.inputs[1], centred, axes):
            if kind != "layer_norm" or again is None or again.inputs[0] != x:
                return None
            if not _is_mean_of(editor, again.inputs[1], x, axes):
                return None
        op_idxs.append(editor.producer[other])
    op_idxs.append(reader_idx)
    return reader.outputs[0]


# --- weight and bias --------------------------------------------------------------------------


def _affine(editor: GraphEditor, top: int, size_by_axis: dict[int, int], op_idxs: list[int]) -> tuple[int, list[int]]:
    """(last tensor, [weight, bias]) after a product and a sum with learned vectors over the given axes."""
    learned: list[int] = []
    for kind in ("mul", "add"):
        reader_idx = editor.sole_reader(top)
        reader = editor.ops[reader_idx] if reader_idx is not None else None
        if reader_idx is None or reader is None or reader.kind != kind or len(reader.inputs) != 2:
            break
        other = reader.inputs[1] if reader.inputs[0] == top else reader.inputs[0]
        if not editor.is_learned(other) or not _varies_along(editor, other, top, size_by_axis):
            break
        learned.append(other)
        op_idxs.append(reader_idx)
        top = reader.outputs[0]
    return top, learned


def _varies_along(editor: GraphEditor, vector: int, x: int, size_by_axis: dict[int, int]) -> bool:
    shape, rank = editor.shape(vector), len(editor.shape(x))
    if len(shape) > rank:
        return False
    padded = (1,) * (rank - len(shape)) + shape
    return all(dim in (1, size_by_axis.get(axis, 1)) for axis, dim in enumerate(padded)) and prod(shape) > 1


def _install(editor: GraphEditor, found: _Normalised) -> None:
    shape = editor.shape(found.x)
    rank = len(shape)
    axes = tuple(sorted(found.axes))
    kind = found.kind
    per_channel = kind == "layer_norm" and rank > 1 and axes == tuple(a for a in range(rank) if a != 1)
    if per_channel and (rank > 2 or axes == (0,)):
        kind = "batch_norm"  # statistics over everything but the channels
        affine_axes = {1: shape[1]}
    elif kind == "layer_norm" and rank >= 4 and axes == tuple(range(2, rank)):
        kind = "group_norm"  # per sample and channel: instance norm
        affine_axes = {1: shape[1]}
    else:
        affine_axes = {axis: shape[axis] for axis in axes}
    top, learned = _affine(editor, found.top, affine_axes, found.op_idxs)
    final_idx = editor.producer[top]
    attributes: dict[str, Any] = {}
    if kind in ("layer_norm", "rms_norm"):
        attributes["normalized_size"] = prod(shape[axis] for axis in axes)
    if kind == "group_norm":
        attributes["groups"] = shape[1]
    if pieces_are_real(editor, kind) or (kind == "rms_norm" and learned and _weight_first(editor, found.op_idxs[-1])):
        attributes |= unfused_attributes(editor, dict.fromkeys(found.op_idxs), top)
    editor.replace_op(final_idx, kind, (found.x, *learned), attributes)


def _weight_first(editor: GraphEditor, op_idx: int) -> bool:
    """``weight * x``, as transformers' own RMSNorm modules write it; the fused function's pieces end in
    ``x * weight``. Below opset 23 nothing else tells them apart."""
    op = editor.ops[op_idx]
    return op is not None and op.kind == "mul" and editor.is_learned(op.inputs[0])


def _take_affine(editor: GraphEditor, op_idx: int) -> None:
    """A norm without weights followed by learned products: exporters split the affine part off."""
    op = editor.ops[op_idx]
    if op is None or len(op.inputs) != 1:
        return
    shape = editor.shape(op.outputs[0])
    if op.kind == "group_norm":
        axes = {1: shape[1]}
    else:
        size, axes = 1, {}
        for axis in range(len(shape) - 1, -1, -1):
            if size >= op.attributes.get("normalized_size", 1):
                break
            size *= shape[axis]
            axes[axis] = shape[axis]
    op_idxs: list[int] = []
    top, learned = _affine(editor, op.outputs[0], axes, op_idxs)
    if not learned or pieces_are_real(editor, op.kind):
        return
    editor.replace_op(editor.producer[top], op.kind, (op.inputs[0], *learned), op.attributes)


# --- group norm and L2 ------------------------------------------------------------------------


def _fuse_group_norm(editor: GraphEditor, op_idx: int) -> None:
    """View into groups, instance norm (or batch or layer norm of the groups), view back, weight and bias."""
    op = editor.ops[op_idx]
    if op is None:
        return
    unfold = editor.producer_op(op.inputs[0], "view")
    fold_idx = editor.sole_reader(op.outputs[0])
    fold = editor.ops[fold_idx] if fold_idx is not None else None
    if unfold is None or fold is None or fold.kind != "view":
        return
    x, result = unfold.inputs[0], fold.outputs[0]
    shape, inner = editor.shape(x), editor.shape(op.inputs[0])
    if op.kind == "batch_norm" and not editor.depends_on_data(x):
        return  # weight standardisation: a batch norm over the rows of a weight
    if editor.shape(result) != shape or len(shape) < 3 or len(inner) < 3 or prod(shape) == 0:
        return
    if any(editor.is_learned(tensor) and editor.tensors[tensor].num_elements > 1 and op.kind != "group_norm"
           for tensor in op.inputs[1:]):  # fmt: skip
        return
    groups = _num_groups(op.kind, op.attributes, shape, inner)
    if groups is None:
        return
    op_idxs = [op_idx]
    top, learned = _affine(editor, result, {1: shape[1]}, op_idxs)
    if op.kind == "layer_norm" and not learned:
        return
    editor.replace_op(editor.producer[top], "group_norm", (x, *learned), {"groups": groups})


def _num_groups(kind: str, attributes: Any, shape: tuple[int, ...], inner: tuple[int, ...]) -> int | None:
    if kind == "group_norm":
        groups = inner[1] if inner[0] == shape[0] and attributes.get("groups") == inner[1] else None
    elif kind == "batch_norm":  # (1, N * groups, ...)
        groups = inner[1] // shape[0] if inner[0] == 1 and shape[0] and inner[1] % shape[0] == 0 else None
    else:  # (N, groups, rest) normalised over the rest
        groups = inner[1] if inner[0] == shape[0] and prod(inner[2:]) == attributes.get("normalized_size") else None
    if groups is None or groups < 1 or shape[1] % groups or (groups == 1 and kind == "layer_norm"):
        return None
    return groups


def _fuse_l2_norm(editor: GraphEditor, op_idx: int) -> None:
    """x / max(norm(x), epsilon), as torch.nn.functional.normalize runs it; v * (g / norm(v)) is weight norm."""
    op = editor.ops[op_idx]
    if op is None:
        return
    x, top = op.inputs[0], op.outputs[0]
    for _ in range(4):
        reader_idx = editor.sole_reader(top)
        reader = editor.ops[reader_idx] if reader_idx is not None else None
        if reader_idx is None or reader is None:
            return
        if reader.kind == "div" and reader.inputs == (x, top):
            editor.replace_op(reader_idx, "l2_norm", (x,))
            _take_magnitude(editor, reader_idx)
            return
        if reader.kind == "div" and reader.inputs[1] == top and editor.role(reader.inputs[0]) is Role.PARAMETER:
            magnitude = reader.inputs[0]
            product_idx = editor.sole_reader(reader.outputs[0])
            product = editor.ops[product_idx] if product_idx is not None else None
            if product_idx is not None and product is not None and product.kind == "mul" and x in product.inputs:
                editor.replace_op(product_idx, "l2_norm", (x, magnitude))
            return
        if reader.kind not in ("clamp", "add", "maximum", "expand", "view"):
            return
        top = reader.outputs[0]


def _take_magnitude(editor: GraphEditor, norm_idx: int) -> None:
    """A normalised weight times its learned length: weight norm in one function."""
    norm = editor.ops[norm_idx]
    assert norm is not None
    if editor.role(norm.inputs[0]) is not Role.PARAMETER:
        return
    product_idx = editor.sole_reader(norm.outputs[0])
    product = editor.ops[product_idx] if product_idx is not None else None
    if product_idx is None or product is None or product.kind != "mul" or len(product.inputs) != 2:
        return
    magnitude = product.inputs[1] if product.inputs[0] == norm.outputs[0] else product.inputs[0]
    if editor.role(magnitude) is Role.PARAMETER and editor.shape(product.outputs[0]) == editor.shape(norm.inputs[0]):
        editor.replace_op(product_idx, "l2_norm", (norm.inputs[0], magnitude))
