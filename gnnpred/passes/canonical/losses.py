"""Cross-entropy from log-softmax and a negative log-likelihood, or from its gather and mean."""

from gnnpred.passes.canonical.editor import GraphEditor


def fuse_losses(editor: GraphEditor) -> None:
    """log_softmax pieces, then cross-entropy over log-softmax."""
    for op_idx in editor.positions("log"):
        op = editor.ops[op_idx]
        softmax = editor.producer_op(op.inputs[0], "softmax") if op is not None else None
        if op is not None and softmax is not None and editor.is_private(op.inputs[0]):
            editor.replace_op(op_idx, "log_softmax", softmax.inputs, softmax.attributes)
    for op_idx in editor.positions("cross_entropy"):
        op = editor.ops[op_idx]
        if op is None:
            continue
        log_softmax = editor.producer_op(op.inputs[0], "log_softmax")
        if log_softmax is not None and editor.is_private(op.inputs[0]):
            editor.replace_op(op_idx, "cross_entropy", (log_softmax.inputs[0], *op.inputs[1:]))
    for op_idx in editor.positions("log_softmax"):
        _fuse_gathered(editor, op_idx)


def _fuse_gathered(editor: GraphEditor, op_idx: int) -> None:
    """-mean(gather(log_softmax(x), target)): what exporters make of the loss below opset 12."""
    op = editor.ops[op_idx]
    if op is None:
        return
    gather_idx = editor.sole_reader(op.outputs[0])
    gather = editor.ops[gather_idx] if gather_idx is not None else None
    if gather is None or gather.kind not in ("gather_elements", "gather") or len(gather.inputs) != 2:
        return
    target, result = gather.inputs[1], gather.outputs[0]
    if gather.inputs[0] != op.outputs[0] or not editor.depends_on_data(target):
        return
    if editor.tensors[result].num_elements > editor.tensors[op.outputs[0]].num_elements:
        return
    final_idx, negated = None, False
    for _ in range(6):
        reader_idx = editor.sole_reader(result)
        reader = editor.ops[reader_idx] if reader_idx is not None else None
        if reader_idx is None or reader is None:
            break
        if reader.kind == "neg":
            negated = True
        elif reader.kind in ("reduce_mean", "reduce_sum"):
            final_idx = reader_idx
        elif reader.kind not in ("view", "slice", "where"):
            break
        result = reader.outputs[0]
        if final_idx is not None and negated:
            editor.replace_op(reader_idx, "cross_entropy", (op.inputs[0], target))
            return
