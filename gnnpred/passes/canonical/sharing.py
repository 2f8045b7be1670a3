"""Vectors that exporters merge because they hold the same numbers.

In a model that was just initialised every norm's weight is ones and every bias zeros, and exporters store equal
initializers once. Taken literally, all norms would share one weight and add up its gradients.
"""

from gnnpred.graph import Role
from gnnpred.passes.canonical.editor import GraphEditor

_PRODUCTS = ("linear", "conv", "conv_transpose")


def separate_shared_vectors(editor: GraphEditor) -> None:
    """Give every op its own parameter vector, unless the model shares whole layers (then matrices are shared too)."""
    if _shares_layers(editor):
        return
    for tensor in range(len(editor.tensors)):
        spec = editor.tensors[tensor]
        is_vector = spec.num_elements > 1 and spec.num_elements == max(spec.shape)
        if spec.role is not Role.PARAMETER or not is_vector:
            continue
        for op_idx in list(editor.readers[tensor])[1:]:
            op = editor.ops[op_idx]
            assert op is not None
            own = editor.add_tensor(spec)
            editor.set_inputs(op_idx, tuple(own if operand == tensor else operand for operand in op.inputs))


def _shares_layers(editor: GraphEditor) -> bool:
    for op_idx in editor.positions(*_PRODUCTS):
        op = editor.ops[op_idx]
        assert op is not None
        weight = op.inputs[1]
        others = (editor.ops[reader] for reader in editor.readers[weight] if reader != op_idx)
        if editor.role(weight) is Role.PARAMETER and any(o is not None and o.kind in _PRODUCTS for o in others):
            return True
    return False
