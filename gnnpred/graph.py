"""The operator graph that every stage of gnnpred reads and writes.

An :class:`OpGraph` says what a framework runs: its ops are framework kernels (``conv``,
``linear``, ``layer_norm``, ``sdpa`` ...; the vocabulary is :mod:`gnnpred.op_kinds`), in
topological order, over tensors that carry shape, storage dtype and role, never values.

Batch: shapes are integers at ``OpGraph.batch_size``; ``TensorSpec.batch_axes`` names the axes
that grow in proportion to it, so another batch is a substitution (``passes.batch``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import Any

from gnnpred.errors import GnnpredError

AUTOCAST_KEY = "autocast"  # OpGraph.metadata: the half type, where autocast lowered the graph
MAX_ELEMENTS = 2**50  # 1 PiB of bytes; anything above is a broken or hostile file


class DType(StrEnum):
    """Storage or compute type of a tensor or op. TF32 is a compute type only (fp32 storage)."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    INT4 = "int4"
    BOOL = "bool"
    STRING = "string"
    COMPLEX64 = "complex64"

    @property
    def bytes_per_element(self) -> float:
        """Bytes that one element takes in memory."""
        return _BYTES_PER_ELEMENT[self]

    @property
    def is_float(self) -> bool:
        return self in _FLOATS


_BYTES_PER_ELEMENT = {
    DType.FP64: 8, DType.FP32: 4, DType.TF32: 4, DType.FP16: 2, DType.BF16: 2, DType.FP8: 1,
    DType.INT64: 8, DType.INT32: 4, DType.INT16: 2, DType.INT8: 1, DType.UINT8: 1, DType.INT4: 0.5,
    DType.BOOL: 1, DType.STRING: 8, DType.COMPLEX64: 8,
}  # fmt: skip
_FLOATS = {DType.FP64, DType.FP32, DType.TF32, DType.FP16, DType.BF16, DType.FP8}


class Role(StrEnum):
    """Where a tensor comes from."""

    INPUT = "input"  # fed at every step
    PARAMETER = "parameter"  # trainable weight
    CONSTANT = "constant"  # buffer or constant: no gradient
    ACTIVATION = "activation"  # computed; depends on an input
    PARAMETER_DERIVED = "parameter_derived"  # computed from parameters (and constants) alone
    GRADIENT = "gradient"  # made by the backward pass


class OpPhase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Component(StrEnum):
    """Which part of a training step one op stands for; features group by it."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input_gradient"  # also the whole backward of ops without a weight product
    WEIGHT_GRADIENT = "weight_gradient"
    CAST = "cast"  # dtype conversion that autocast adds, either direction
    ACCUMULATE = "accumulate"  # sum of gradients where a tensor has several readers
    OPTIMIZER = "optimizer"  # parameter update, gradient zeroing, unscale


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data.

    ``value`` holds the content of small constants only (a Python number, or a flat tuple of at
    most 64 numbers): patterns need to see scales, exponents and epsilons.
    """

    shape: tuple[int, ...]
    dtype: DType
    role: Role
    batch_axes: tuple[int, ...] = ()
    value: float | int | bool | tuple[float | int | bool, ...] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        size = 1
        for dim in self.shape:
            if dim < 0:
                raise GnnpredError(f"tensor {self.name!r} has a negative dimension: {self.shape}")
            size *= dim
        if size > MAX_ELEMENTS:
            raise GnnpredError(
                f"tensor {self.name!r} of shape {self.shape} has more than 2**50 elements; "
                "check the batch size and the bound dimensions"
            )

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> float:
        return self.num_elements * self.dtype.bytes_per_element


@dataclass(frozen=True, slots=True)
class Op:
    """One framework kernel (or one fixed group of them).

    ``inputs`` and ``outputs`` are positions in ``OpGraph.tensors``; an absent optional input is
    left out. ``attributes`` never hold batch-dependent numbers. Backward and cast ops point to the
    forward op they belong to with ``forward_op_idx``.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    phase: OpPhase = OpPhase.FORWARD
    component: Component = Component.FORWARD
    compute_dtype: DType | None = None  # set by lower_precision; None before it
    forward_op_idx: int | None = None
    repeats: int = 1  # the op runs this many times per step (loop bodies)


@dataclass(frozen=True)
class OpGraph:
    """Ops in topological order over ``tensors``; checked at construction.

    ``notes`` are warnings for the user that reading or a pass produced (one sentence each).
    """

    tensors: tuple[TensorSpec, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    batch_size: int | None
    name: str = ""
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_tensors = len(self.tensors)
        ready = bytearray(num_tensors)
        for tensor_idx, tensor in enumerate(self.tensors):
            if tensor.role in (Role.INPUT, Role.PARAMETER, Role.CONSTANT):
                ready[tensor_idx] = 1
        for op_idx, op in enumerate(self.ops):
            for tensor_idx in op.inputs:
                if not 0 <= tensor_idx < num_tensors:
                    raise GnnpredError(f"op {op_idx} ({op.kind}) reads tensor {tensor_idx}, which does not exist")
                if not ready[tensor_idx]:
                    raise GnnpredError(
                        f"op {op_idx} ({op.kind} {op.name!r}) reads {self.tensors[tensor_idx].name!r} "
                        "before any op makes it: the graph is cyclic or out of order"
                    )
            for tensor_idx in op.outputs:
                ready[tensor_idx] = 1

    def replace(self, **changes: Any) -> "OpGraph":
        """A copy with some fields changed (checked again)."""
        return replace(self, **changes)

    def producer_by_tensor(self) -> dict[int, int]:
        """Tensor position -> position of the op that makes it."""
        return {tensor_idx: op_idx for op_idx, op in enumerate(self.ops) for tensor_idx in op.outputs}

    def consumers_by_tensor(self) -> dict[int, list[int]]:
        """Tensor position -> positions of the ops that read it, in order."""
        consumers: dict[int, list[int]] = {}
        for op_idx, op in enumerate(self.ops):
            for tensor_idx in op.inputs:
                consumers.setdefault(tensor_idx, []).append(op_idx)
        return consumers

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements."""
        return sum(t.num_elements for t in self.tensors if t.role is Role.PARAMETER)
