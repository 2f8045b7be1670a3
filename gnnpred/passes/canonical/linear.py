"""Biases that an exporter adds in an op of their own: MatMul + Add is one linear, Conv + Add one conv."""

from gnnpred.passes.canonical.editor import GraphEditor


def fuse_biases(editor: GraphEditor) -> None:
    """Give linear and conv the learned vector that is added to their output right away."""
    for op_idx in editor.positions("linear", "conv", "conv_transpose"):
        op = editor.ops[op_idx]
        if op is None or len(op.inputs) != 2:
            continue
        result = op.outputs[0]
        add_idx = editor.sole_reader(result)
        add = editor.ops[add_idx] if add_idx is not None else None
        views = 0
        while add is not None and add.kind == "view" and op.kind == "linear" and views < 2:
            # a product of flattened rows gets its bias after the rows are unfolded again
            if editor.shape(add.outputs[0])[-1:] != editor.shape(result)[-1:]:
                break
            add_idx = editor.sole_reader(add.outputs[0])
            add = editor.ops[add_idx] if add_idx is not None else None
            views += 1
        if add_idx is None or add is None or add.kind != "add" or len(add.inputs) != 2:
            continue
        product = next((tensor for tensor in add.inputs if editor.depends_on_data(tensor)), None)
        bias = next((tensor for tensor in add.inputs if tensor != product), None)
        if product is None or bias is None or not editor.is_learned(bias) or not editor.is_ready(bias, op_idx):
            continue
        rank = len(editor.shape(product))
        if not _is_channel_vector(editor, bias, product, rank - 1 if op.kind == "linear" else 1):
            continue
        if editor.shape(add.outputs[0]) != editor.shape(product):
            continue
        editor.set_inputs(op_idx, (*op.inputs, bias))
        editor.bypass(add_idx, product)


def _is_channel_vector(editor: GraphEditor, bias: int, product: int, axis: int) -> bool:
    """Whether ``bias`` varies along the channel axis of ``product`` alone."""
    shape, wanted = editor.shape(bias), editor.shape(product)
    if axis >= len(wanted) or len(shape) > len(wanted):
        return False
    padded = (1,) * (len(wanted) - len(shape)) + shape
    return all(dim == (wanted[i] if i == axis else 1) for i, dim in enumerate(padded))
