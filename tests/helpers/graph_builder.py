"""Builds small operator graphs by hand, one line per op."""

from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec


class GraphBuilder:
    """Tensors and ops in the order of the calls; every call gives the position of the tensor it makes."""

    def __init__(self) -> None:
        self.tensors: list[TensorSpec] = []
        self.ops: list[Op] = []

    def tensor(self, shape, role, dtype=DType.FP32, value=None):
        self.tensors.append(TensorSpec(tuple(shape), dtype, role, value=value))
        return len(self.tensors) - 1

    def input(self, *shape, dtype=DType.FP32):
        return self.tensor(shape, Role.INPUT, dtype)

    def parameter(self, *shape, dtype=DType.FP32):
        return self.tensor(shape, Role.PARAMETER, dtype)

    def constant(self, *shape, value=None, dtype=DType.FP32):
        return self.tensor(shape, Role.CONSTANT, dtype, value)

    def op(self, kind, inputs, shape, *more_shapes, dtype=DType.FP32, repeats=1, **attributes):
        """Adds an op with an output per shape; the position of the first."""
        roles = {self.tensors[i].role for i in inputs}
        role = Role.ACTIVATION
        if roles and roles <= {Role.PARAMETER, Role.PARAMETER_DERIVED, Role.CONSTANT}:
            role = Role.CONSTANT if roles == {Role.CONSTANT} else Role.PARAMETER_DERIVED
        outputs = tuple(self.tensor(s, role, dtype) for s in (shape, *more_shapes))
        self.ops.append(Op(kind, tuple(inputs), outputs, attributes, repeats=repeats))
        return outputs[0]

    def build(self, *outputs) -> OpGraph:
        inputs = tuple(i for i, t in enumerate(self.tensors) if t.role is Role.INPUT)
        return OpGraph(tuple(self.tensors), tuple(self.ops), inputs, tuple(outputs), 1)
