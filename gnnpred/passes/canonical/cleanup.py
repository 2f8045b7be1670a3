"""Ops that nothing runs, one spelling per op, and slices that together are one split."""

import re
from dataclasses import replace

from gnnpred.graph import DType, Op, Role
from gnnpred.passes.canonical.editor import GraphEditor
from gnnpred.passes.canonical.matching import near, split_scalar

# how the dynamo and the TorchScript exporter name what they made up themselves
_EXPORTERS_CONSTANT = re.compile(r"(buffer\.)?val_\d+|.*/Constant(_\d+)?_output_0")
_HALF_TYPES = (DType.FP16, DType.BF16)


def drop_no_ops(editor: GraphEditor) -> None:
    """Remove identities, dropout that drops nothing, whole slices, casts between floats and random constants."""
    _store_floats_as_fp32(editor)
    _make_random_constant(editor)
    _find_addcmul(editor)
    for op_idx, op in enumerate(editor.ops):
        if op is None or not op.inputs or not op.outputs:
            continue
        source, result = op.inputs[0], op.outputs[0]
        same_shape = editor.shape(source) == editor.shape(result)
        same_type = editor.tensors[source].dtype is editor.tensors[result].dtype
        useless = (
            op.kind == "identity"
            or (op.kind == "dropout" and op.attributes.get("ratio") == 0)
            or (op.kind == "cast" and same_type)
            or (op.kind in ("view", "expand", "slice", "pad") and same_shape and same_type and len(op.inputs) == 1)
            or (op.kind == "concat" and len(op.inputs) == 1)
        )
        if useless:
            editor.bypass(op_idx, source)
        elif op.kind == "where" and (guarded := _guarded(editor, op)) is not None:
            editor.bypass(op_idx, guarded)
        elif op.kind == "gather" and _is_strided_view(editor, op):
            whole = editor.tensors[op.inputs[0]].num_elements == editor.tensors[op.outputs[0]].num_elements
            editor.replace_op(op_idx, "view" if whole else "slice", op.inputs[:1])
        elif op.kind == "scatter" and _overwrites_everything(editor, op):
            editor.bypass(op_idx, op.inputs[2])
        elif op.kind in ("mul", "div", "add", "sub") and (kept := _beside_neutral(editor, op)) is not None:
            editor.bypass(op_idx, kept)


def _beside_neutral(editor: GraphEditor, op: Op) -> int | None:
    """The operand that x * 1, x / 1, x + 0 or x - 0 leaves as it is; exporters drop some of these ops."""
    scalar = split_scalar(editor, op)
    if scalar is None or scalar[1] != (1.0 if op.kind in ("mul", "div") else 0.0):
        return None
    if op.kind in ("div", "sub") and op.inputs[0] != scalar[0]:
        return None
    same_shape = editor.shape(scalar[0]) == editor.shape(op.outputs[0])
    return scalar[0] if same_shape and editor.tensors[scalar[0]].dtype is editor.tensors[op.outputs[0]].dtype else None


def _find_addcmul(editor: GraphEditor) -> None:
    """c + a * b in one kernel.

    Exporters write addcmul's factor even where it is one, c + (1.0 * a) * b or c + (a * b) * 1.0. Without it,
    learned operands first are addcmul's order of arguments; a model's own affine reads x * a + c.
    """
    for op_idx in editor.positions("add"):
        add = editor.ops[op_idx]
        product = editor.producer_op(add.inputs[1], "mul") if add is not None and len(add.inputs) == 2 else None
        if add is None or product is None or len(product.inputs) != 2 or not editor.is_private(add.inputs[1]):
            continue
        first, second = product.inputs
        scaled = editor.producer_op(first, "mul")
        if scaled is not None and editor.is_private(first) and editor.number(scaled.inputs[0]) == 1.0:
            first = scaled.inputs[1]
        elif scaled is not None and editor.is_private(first) and editor.number(second) == 1.0:
            first, second = scaled.inputs
        elif not (editor.is_learned(add.inputs[0]) and editor.is_learned(first) and editor.depends_on_data(second)):
            continue
        editor.replace_op(op_idx, "addcmul", (add.inputs[0], first, second))


def _is_strided_view(editor: GraphEditor, op: Op) -> bool:
    """as_strided, which exporters write as picking every element of the flattened tensor by its position."""
    if len(op.inputs) != 2:
        return False
    source, indices = op.inputs
    return (
        editor.role(indices) is Role.CONSTANT
        and len(editor.shape(source)) == 1 < len(editor.shape(indices))
        and editor.depends_on_data(source)
        and editor.producer_op(source, "view") is not None
        and editor.tensors[op.outputs[0]].num_elements <= editor.tensors[source].num_elements
    )


def _overwrites_everything(editor: GraphEditor, op: Op) -> bool:
    """x[...] = y over the whole of x, as an in-place op on a view comes out of an exporter."""
    if len(op.inputs) != 3 or editor.role(op.inputs[1]) is not Role.CONSTANT:
        return False
    data, _indices, updates = op.inputs
    return editor.shape(data) == editor.shape(updates) and editor.tensors[data].num_elements > 1


def _guarded(editor: GraphEditor, op: Op) -> int | None:
    """What an exporter's guard protects: softmax of rows that are masked whole, softplus of large numbers."""
    if len(op.inputs) != 3:
        return None
    condition = editor.producer_op(op.inputs[0], "isnan", "greater")
    if condition is None:
        return None
    x = condition.inputs[0]
    if condition.kind == "isnan":
        return x if x in op.inputs[1:] else None
    softplus = editor.producer_op(op.inputs[2], "softplus")
    return op.inputs[2] if softplus is not None and softplus.inputs[0] == x == op.inputs[1] else None


def _store_floats_as_fp32(editor: GraphEditor) -> None:
    """Half-precision storage in a file says how it was converted, not how the job runs: precision is the job's."""
    if not any(spec.dtype in _HALF_TYPES for spec in editor.tensors):
        return
    for tensor, spec in enumerate(editor.tensors):
        if spec.dtype in _HALF_TYPES:
            editor.tensors[tensor] = replace(spec, dtype=DType.FP32)
    editor.notes.append(
        "the file stores half-precision tensors; they are read as the model, and the job's precision decides the types"
    )


def _make_random_constant(editor: GraphEditor) -> None:
    """Random draws (drop path, noise) get no gradient; drop what computes with nothing else."""
    for op_idx in editor.positions("random"):
        op = editor.ops[op_idx]
        if op is None:
            continue
        waiting = [op_idx]
        while waiting:
            current = editor.ops[waiting.pop()]
            if current is None or any(editor.role(tensor) is not Role.CONSTANT for tensor in current.inputs):
                continue
            for tensor in current.outputs:
                if not editor.is_graph_output(tensor):
                    editor.tensors[tensor] = replace(editor.tensors[tensor], role=Role.CONSTANT)
                    waiting.extend(editor.readers[tensor])
    for op_idx, op in enumerate(editor.ops):
        if op is not None and all(editor.role(tensor) is Role.CONSTANT for tensor in op.outputs):
            editor.forget(op_idx)


def unify_spellings(editor: GraphEditor) -> None:
    """One kind and one set of attributes for what exporters and frameworks spell in several ways."""
    for op_idx, op in enumerate(editor.ops):
        if op is None:
            continue
        match op.kind:
            case "square":
                editor.replace_op(op_idx, "pow_scalar", op.inputs, {"exponent": 2})
            case "pow":
                exponent = editor.number(op.inputs[1]) if len(op.inputs) == 2 else None
                if exponent is not None:
                    editor.replace_op(op_idx, "pow_scalar", op.inputs[:1], {"exponent": exponent})
            case "hardtanh" | "clamp":
                _unify_clamp(editor, op_idx)
            case "maximum" | "minimum":
                _unify_extremum(editor, op_idx)
            case "reciprocal" | "div":
                _unify_reciprocal(editor, op_idx)
            case "transpose" if "perm" not in op.attributes and "axes" in op.attributes:
                editor.replace_op(op_idx, "transpose", op.inputs, {"perm": tuple(op.attributes["axes"])})
            case "conv" | "conv_transpose" if len(op.inputs) > 2 and _is_made_up(editor, op.inputs[2]):
                editor.set_inputs(op_idx, op.inputs[:2])
            case "batch_norm" | "group_norm" | "layer_norm" | "rms_norm" if len(op.inputs) > 1:
                learned = [tensor for tensor in op.inputs[1:] if not _is_made_up(editor, tensor)]
                if len(learned) < len(op.inputs) - 1:
                    editor.set_inputs(op_idx, (op.inputs[0], *learned))
            case "stack":  # exporters add the axis to each part, then concatenate; one kernel either way
                editor.replace_op(op_idx, "concat", op.inputs, op.attributes)
            case "linear":
                _read_weight_itself(editor, op_idx)
    for op_idx in editor.positions("reduce_l2", "sqrt"):
        _unify_l2(editor, op_idx)
    for op_idx in editor.positions("concat"):
        _find_roll(editor, op_idx)
    for op_idx in editor.positions("view"):
        _find_im2col(editor, op_idx)


def _is_made_up(editor: GraphEditor, vector: int) -> bool:
    """Whether a norm's or convolution's vector is the exporter's: zeros or ones where the model has none."""
    spec = editor.tensors[vector]
    if spec.role is Role.CONSTANT:
        return True
    if spec.role is not Role.PARAMETER or _EXPORTERS_CONSTANT.fullmatch(spec.name) is None:
        return False
    values = set(spec.value if isinstance(spec.value, tuple) else (spec.value,))
    if len(values) > 1 or not values <= {None, 0, 1}:
        return False
    editor.tensors[vector] = replace(spec, role=Role.CONSTANT)  # no optimizer updates it
    return True


def _unify_clamp(editor: GraphEditor, op_idx: int) -> None:
    op = editor.ops[op_idx]
    assert op is not None
    low, high = op.attributes.get("min"), op.attributes.get("max")
    if low == 0 and high == 6:
        editor.replace_op(op_idx, "relu6", op.inputs[:1])
    elif op.kind == "hardtanh":
        editor.replace_op(op_idx, "clamp", op.inputs, op.attributes)


def _unify_extremum(editor: GraphEditor, op_idx: int) -> None:
    """max(x, number) is a clamp (and relu where the number is 0 stays a clamp: one pass either way)."""
    op = editor.ops[op_idx]
    assert op is not None
    scalar = split_scalar(editor, op)
    if scalar is None:
        return
    source, limits = scalar[0], {"min" if op.kind == "maximum" else "max": scalar[1]}
    inner = editor.producer_op(source, "clamp")
    if inner is not None and editor.is_private(source) and not inner.attributes.keys() & limits.keys():
        source, limits = inner.inputs[0], {**inner.attributes, **limits}
    editor.replace_op(op_idx, "clamp", (source,), limits)
    _unify_clamp(editor, op_idx)


def _unify_reciprocal(editor: GraphEditor, op_idx: int) -> None:
    op = editor.ops[op_idx]
    assert op is not None
    source = op.inputs[0]
    if op.kind == "div":
        if not near(editor.number(op.inputs[0]), 1.0):
            return
        source = op.inputs[1]
    root = editor.producer_op(source, "sqrt")
    if root is not None and editor.is_private(source):
        editor.replace_op(op_idx, "rsqrt", root.inputs)
    elif op.kind == "div":
        editor.replace_op(op_idx, "reciprocal", (source,))


def _unify_l2(editor: GraphEditor, op_idx: int) -> None:
    """sqrt(sum(x * x)) is one norm reduction."""
    op = editor.ops[op_idx]
    if op is None or op.kind != "sqrt":
        return
    total = editor.producer_op(op.inputs[0], "reduce_sum")
    if total is None or not editor.is_private(op.inputs[0]):
        return
    square = editor.producer_op(total.inputs[0], "pow_scalar", "mul")
    if square is None or not editor.is_private(total.inputs[0]):
        return
    if square.kind == "pow_scalar" and square.attributes.get("exponent") != 2:
        return
    if square.kind == "mul" and len(set(square.inputs)) != 1:
        return
    editor.replace_op(op_idx, "reduce_l2", square.inputs[:1], total.attributes)


def _read_weight_itself(editor: GraphEditor, op_idx: int) -> None:
    """A linear reads its parameter, not a transposed view of it."""
    op = editor.ops[op_idx]
    assert op is not None
    weight = op.inputs[1]
    source = weight
    while (view := editor.producer_op(source, "transpose", "view", "identity")) is not None and len(view.inputs) == 1:
        source = view.inputs[0]
    if source != weight and editor.role(source) is Role.PARAMETER:
        editor.set_inputs(op_idx, (op.inputs[0], source, *op.inputs[2:]))


def _find_im2col(editor: GraphEditor, view_idx: int) -> None:
    """unfold of an image: the exporter picks rows, then columns, of every window and merges the axes."""
    view = editor.ops[view_idx]
    if view is None or len(editor.shape(view.outputs[0])) != 3 or len(editor.shape(view.inputs[0])) != 6:
        return
    transpose = editor.producer_op(view.inputs[0], "transpose")
    columns = editor.producer_op(transpose.inputs[0], "gather") if transpose is not None else None
    rows = editor.producer_op(columns.inputs[0], "gather") if columns is not None else None
    if rows is None or columns is None:
        return
    for gather, axis in ((rows, 2), (columns, 4)):
        windows = len(editor.shape(gather.inputs[1])) == 2 and editor.role(gather.inputs[1]) is Role.CONSTANT
        if gather.attributes.get("axis") != axis or not windows or not editor.is_private(gather.outputs[0]):
            return
    source = rows.inputs[0]
    padding = editor.producer_op(source, "pad")
    if padding is not None and editor.is_private(source):
        source = padding.inputs[0]
    editor.replace_op(view_idx, "im2col", (source,))


def _sliced_axis(editor: GraphEditor, op_idx: int, *, any_step: bool = False) -> int | None:
    """The one axis that a slice cuts, without steps unless ``any_step``; None for anything else."""
    op = editor.ops[op_idx]
    if op is None or op.kind != "slice":
        return None
    axes = op.attributes.get("axes", (op.attributes["axis"],) if "axis" in op.attributes else ())
    if len(axes) != 1 or (not any_step and any(step != 1 for step in op.attributes.get("steps", ()))):
        return None
    return axes[0]


def _slice_size(editor: GraphEditor, op_idx: int, axis: int) -> int:
    op = editor.ops[op_idx]
    assert op is not None
    whole, part = editor.shape(op.inputs[0]), editor.shape(op.outputs[0])
    return part[axis] if len(part) == len(whole) else 1


def _find_roll(editor: GraphEditor, op_idx: int) -> None:
    """Two parts of a tensor in swapped order are a roll; rolls of one tensor along several axes are one kernel."""
    op = editor.ops[op_idx]
    if op is None or len(op.inputs) != 2:
        return
    axis = op.attributes.get("axis")
    parts = [editor.producer[tensor] for tensor in op.inputs]
    if any(part < 0 or _sliced_axis(editor, part) != axis for part in parts):
        return
    assert axis is not None
    ops = [editor.ops[part] for part in parts]
    source = ops[0].inputs[0] if ops[0] is not None else -1
    if ops[0] is None or ops[1] is None or ops[1].inputs[0] != source or parts[0] == parts[1]:
        return
    if editor.shape(source) != editor.shape(op.outputs[0]):
        return
    starts = [part.attributes.get("starts", (None,))[0] for part in ops if part is not None]
    if None not in starts and starts[0] <= starts[1]:
        return
    inner = editor.producer_op(source, "roll")
    axes = (axis,)
    private = set(editor.readers[source]) == set(parts)
    if inner is not None and private and not editor.is_graph_output(source):
        axes = (*inner.attributes.get("axes", ()), axis)
        source = inner.inputs[0]
    editor.replace_op(op_idx, "roll", (source,), {"axes": axes})


def merge_slices(editor: GraphEditor) -> None:
    """Slices that together make up a tensor are one split: chunk, unbind and indexing all mean the same views."""
    for tensor in range(len(editor.tensors)):
        if len(editor.readers[tensor]) < 2 or not editor.depends_on_data(tensor):
            continue
        _merge_equal_splits(editor, tensor)
        by_axis: dict[int, list[int]] = {}
        for op_idx in editor.readers[tensor]:
            axis = _sliced_axis(editor, op_idx, any_step=True)
            if axis is not None:
                by_axis.setdefault(axis, []).append(op_idx)
        for axis, op_idxs in by_axis.items():
            sizes = [_slice_size(editor, op_idx, axis) for op_idx in op_idxs]
            if len(op_idxs) > 1 and sum(sizes) == editor.shape(tensor)[axis]:
                editor.merge_ops(op_idxs, "split", (tensor,), {"axis": axis})


def _merge_equal_splits(editor: GraphEditor, tensor: int) -> None:
    """Exporters repeat a split for each part that is used."""
    first_by_parts: dict[object, int] = {}
    for op_idx in list(editor.readers[tensor]):
        op = editor.ops[op_idx]
        if op is None or op.kind != "split":
            continue
        parts = (op.attributes.get("axis"), tuple(editor.shape(part) for part in op.outputs))
        first_idx = first_by_parts.setdefault(parts, op_idx)
        first = editor.ops[first_idx]
        if first is None or first_idx == op_idx:
            continue
        for mine, theirs in zip(op.outputs, first.outputs, strict=True):
            editor.redirect(mine, theirs)
        editor.forget(op_idx)
