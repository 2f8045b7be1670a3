"""Adaptive average pooling: a plain pooling where windows divide the input, else one op of its own."""

from gnnpred.graph import Role
from gnnpred.passes.canonical.editor import GraphEditor

_MAX_WINDOW = 1024  # elements of one window that an exporter unrolls into additions


def unify_pools(editor: GraphEditor) -> None:
    """Recompose adaptive pooling that an exporter wrote as a gather of windows; spell divisible ones as avg_pool."""
    for op_idx in editor.positions("gather"):
        _find_gathered_windows(editor, op_idx)
    for op_idx in editor.positions("adaptive_avg_pool"):
        op = editor.ops[op_idx]
        assert op is not None
        spatial, pooled = editor.shape(op.inputs[0])[2:], editor.shape(op.outputs[0])[2:]
        if (
            pooled
            and len(spatial) == len(pooled)
            and all(o and i % o == 0 for i, o in zip(spatial, pooled, strict=True))
        ):
            window = tuple(i // o for i, o in zip(spatial, pooled, strict=True))
            editor.replace_op(op_idx, "avg_pool", op.inputs, {"kernel": window, "stride": window})


def _find_gathered_windows(editor: GraphEditor, gather_idx: int) -> None:
    """Spatial axes first, every window picked by (row, column) pairs, axes back, mean over the window."""
    gather = editor.ops[gather_idx]
    if gather is None or len(gather.inputs) != 2 or gather.attributes.get("axis") != 0:
        return
    indices = gather.inputs[1]
    if editor.role(indices) is not Role.CONSTANT or len(editor.shape(indices)) != 5 or editor.shape(indices)[-1] != 2:
        return
    to_front = editor.producer_op(gather.inputs[0], "transpose")
    if to_front is None or len(editor.shape(to_front.inputs[0])) != 4:
        return
    x = to_front.inputs[0]
    batch, channels = editor.shape(x)[:2]
    back_idx = editor.sole_reader(gather.outputs[0])
    back = editor.ops[back_idx] if back_idx is not None else None
    if back is None or back.kind != "transpose":
        return
    windows = back.outputs[0]
    rows, _kernel_rows, columns, _kernel_columns = editor.shape(windows)[2:]
    masked_idx = editor.sole_reader(windows)
    masked = editor.ops[masked_idx] if masked_idx is not None else None
    if masked is not None and masked.kind == "where":  # windows of unequal size
        windows = masked.outputs[0]
    final_idx = _mean_of(editor, windows)
    final = editor.ops[final_idx] if final_idx is not None else None
    if final_idx is None or final is None or editor.shape(final.outputs[0]) != (batch, channels, rows, columns):
        return
    editor.replace_op(final_idx, "adaptive_avg_pool", (x,), {"output_size": (rows, columns)})


def _mean_of(editor: GraphEditor, windows: int) -> int | None:
    """Position of the op that completes the mean: one reduction, or slices added up and divided."""
    reader_idx = editor.sole_reader(windows)
    reader = editor.ops[reader_idx] if reader_idx is not None else None
    if reader is not None and reader.kind == "reduce_mean":
        return reader_idx
    if not 1 < len(editor.readers[windows]) <= _MAX_WINDOW:
        return None
    slices = [editor.ops[op_idx] for op_idx in editor.readers[windows]]
    if any(part is None or part.kind not in ("slice", "split") for part in slices):
        return None
    first = slices[0]
    assert first is not None
    current = first.outputs[0]
    for _ in range(2 * _MAX_WINDOW):
        next_idx = editor.sole_reader(current)
        following = editor.ops[next_idx] if next_idx is not None else None
        if following is None or following.kind not in ("add", "div", "slice", "view"):
            return None
        if following.kind == "div":
            return next_idx
        current = following.outputs[0]
    return None
