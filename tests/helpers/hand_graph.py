"""Graphs written op by op in tests, as an exporter would leave them."""

from collections.abc import Sequence
from typing import Any

from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec
from gnnpred.passes.canonical import canonicalise

_BOOL_KINDS = ("isnan", "less", "greater", "equal", "logical_not")


class HandGraph:
    """Adds tensors and ops; shapes follow by broadcasting unless given. Numbers become scalar constants."""

    def __init__(self, **metadata: Any) -> None:
        self.tensors: list[TensorSpec] = []
        self.ops: list[Op] = []
        self.inputs: list[int] = []
        self.metadata = metadata

    def _tensor(self, spec: TensorSpec) -> int:
        self.tensors.append(spec)
        return len(self.tensors) - 1

    def input(self, *shape: int, dtype: DType = DType.FP32, batch_axes: Sequence[int] = (0,)) -> int:
        idx = self._tensor(TensorSpec(shape, dtype, Role.INPUT, tuple(batch_axes)))
        self.inputs.append(idx)
        return idx

    def weight(self, *shape: int, dtype: DType = DType.FP32) -> int:
        return self._tensor(TensorSpec(shape, dtype, Role.PARAMETER))

    def constant(self, *shape: int, value: Any = None, dtype: DType = DType.FP32, name: str = "") -> int:
        return self._tensor(TensorSpec(shape, dtype, Role.CONSTANT, value=value, name=name))

    def op(self, kind: str, *inputs: int | float, shape: Sequence[int] | None = None, dtype: DType | None = None,
           batch_axes: Sequence[int] | None = None, **attributes: Any) -> int:  # fmt: skip
        positions = tuple(self._operand(value) for value in inputs)
        specs = [self.tensors[position] for position in positions]
        if shape is None:
            shape = self._broadcast([spec.shape for spec in specs])
        data = [spec for spec in specs if spec.role in (Role.INPUT, Role.ACTIVATION)]
        learned = any(spec.role in (Role.PARAMETER, Role.PARAMETER_DERIVED) for spec in specs)
        role = Role.ACTIVATION if data else Role.PARAMETER_DERIVED if learned else Role.CONSTANT
        if batch_axes is None:
            batch_axes = (0,) if data and data[0].batch_axes and shape else ()
        dtype = dtype or (DType.BOOL if kind in _BOOL_KINDS else (data or specs)[0].dtype)
        output = self._tensor(TensorSpec(tuple(shape), dtype, role, tuple(batch_axes)))
        self.ops.append(Op(kind, positions, (output,), attributes))
        return output

    def multi_op(self, kind: str, source: int, shapes: Sequence[Sequence[int]], **attributes: Any) -> list[int]:
        spec = self.tensors[source]
        outputs = [self._tensor(TensorSpec(tuple(s), spec.dtype, Role.ACTIVATION, (0,))) for s in shapes]
        self.ops.append(Op(kind, (source,), tuple(outputs), attributes))
        return outputs

    def mean(self, x: int, *axes: int, kind: str = "reduce_mean") -> int:
        rank = len(self.tensors[x].shape)
        axes = tuple(sorted(axis % rank for axis in axes))
        shape = [1 if axis in axes else dim for axis, dim in enumerate(self.tensors[x].shape)]
        return self.op(kind, x, shape=shape, axes=axes, keepdims=True)

    def view(self, x: int, *shape: int, batch_axes: Sequence[int] | None = None) -> int:
        return self.op("view", x, shape=shape, batch_axes=batch_axes)

    def transpose(self, x: int, *perm: int) -> int:
        spec = self.tensors[x]
        return self.op(
            "transpose", x, shape=[spec.shape[axis] for axis in perm], perm=perm,
            batch_axes=[position for position, axis in enumerate(perm) if axis in spec.batch_axes],
        )  # fmt: skip

    def graph(self, *outputs: int) -> OpGraph:
        return OpGraph(
            tuple(self.tensors), tuple(self.ops), tuple(self.inputs), outputs, batch_size=2, metadata=self.metadata
        )

    def canonical(self, *outputs: int) -> OpGraph:
        return canonicalise(self.graph(*outputs))

    def kinds(self, *outputs: int) -> list[str]:
        """Kinds of the canonical ops."""
        return [op.kind for op in self.canonical(*outputs).ops]

    def _operand(self, value: int | float) -> int:
        # tensor positions are ints, literals in tests are floats
        return value if isinstance(value, int) else self.constant(value=float(value))

    @staticmethod
    def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        rank = max((len(shape) for shape in shapes), default=0)
        padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
        return tuple(max(dims) for dims in zip(*padded, strict=True))
