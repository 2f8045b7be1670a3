"""Biases that an exporter adds in an op of their own: MatMul + Add is one linear, Conv + Add one conv."""

from gnnpred.passes.canonical.editor import GraphEditor


def fuse_biases(editor: GraphEditor) -> None:
    """Give linear and conv the learned vector that is added to their output right away."""
    for op_idx in editor.positions("linear", "conv", "conv_transpose"):
        op = editor.ops[op_idx]
        if op is None or len(op.inputs) != 2:
            continue
        product = op.outputs[0]
        add_idx = editor.sole_reader(product)
        add = editor.ops[add_idx] if add_idx is not None else None
        for _ in range(2):
            # a product of flattened rows gets its bias after the rows are unfolded again
            if add is None or add.kind != "view" or op.kind != "linear":
                break
            if editor.shape(add.outputs[0])[-1:] != editor.shape(product)[-1:]:
                break
            product = add.outputs[0]
            add_idx = editor.sole_reader(product)
            add = editor.ops[add_idx] if add_idx is not None else None
        if add_idx is None or add is None or add.kind != "add" or len(add.inputs) != 2:
            continue
        bias = add.inputs[1] if add.inputs[0] == product else add.inputs[0]
        if bias == product or not editor.is_learned(bias) or not editor.is_ready(bias, op_idx):
            continue
        axis = len(editor.shape(product)) - 1 if op.kind == "linear" else 1
        if editor.shape(add.outputs[0]) == editor.shape(product) and _is_channel_vector(editor, bias, product, axis):
            editor.set_inputs(op_idx, (*op.inputs, bias))
            editor.bypass(add_idx, product)


def _is_channel_vector(editor: GraphEditor, bias: int, product: int, axis: int) -> bool:
    """Whether ``bias`` varies along ``axis`` of ``product`` alone, and over all of it."""
    shape, wanted = editor.shape(bias), editor.shape(product)
    if axis >= len(wanted) or len(shape) > len(wanted):
        return False
    padded = (1,) * (len(wanted) - len(shape)) + shape
    return all(dim == (wanted[i] if i == axis else 1) for i, dim in enumerate(padded))
