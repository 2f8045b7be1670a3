"""What op handlers write to: values, recorded ops, notes and the batch bookkeeping of one reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gnnpred.errors import GnnpredError
from gnnpred.graph import DType, Role
from gnnpred.onnx_io.values import Value, value_of_array

MAX_DIM = 2**70  # a whole tensor may have 2**50 elements; the prime that stands for the batch comes on top
MAX_FOLDED_TOTAL = 8_000_000  # elements of all evaluated constants together: bounds memory


class ShapeUnknown(ValueError):  # noqa: N818 - a state, not a failure
    """The output shape depends on something the file does not say."""


@dataclass(slots=True)
class RecordedOp:
    kind: str
    inputs: list[Value]
    outputs: list[Value]
    attributes: Mapping[str, Any]
    name: str
    repeats: int


@dataclass(frozen=True, slots=True)
class BatchBinding:
    """``prime`` stands for the batch while shapes are inferred; ``baked_size`` is the batch that the
    file's constants were exported with, None where the batch is symbolic (or there is none)."""

    prime: int | None = None
    baked_size: int | None = None

    def is_batch(self, dim: int) -> bool:
        return self.prime is not None and dim > 0 and dim % self.prime == 0

    def at(self, shape: Sequence[int], batch_size: int) -> tuple[int, ...]:
        """``shape`` with the batch set to ``batch_size``."""
        if self.prime is None:
            return tuple(shape)
        return tuple(dim // self.prime * batch_size if self.is_batch(dim) else dim for dim in shape)


class Builder:
    """Collects the ops of one graph; handlers read constants and emit ops through it."""

    def __init__(self, *, opset: int, binding: BatchBinding) -> None:
        self.opset = opset
        self.binding = binding
        self.ops: list[RecordedOp] = []
        self.repeats = 1
        self.op_name = ""
        self.notes: dict[str, None] = {}  # ordered set
        self.batch_guesses = 0
        self.folded_elements = 0

    # --- values -------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.notes.setdefault(text)

    def constant(self, array: Any, *, dtype: DType | None = None, exact: bool = True) -> Value:
        array = np.asarray(array)
        self.folded_elements += array.size
        return value_of_array(array, dtype=dtype, exact=exact)

    def ints(self, value: Value | None) -> tuple[int, ...] | None:
        """Content of a small integer constant, None where it is absent or not known."""
        if value is None or not value.is_constant:
            return None
        array = value.array
        if array is None:
            return None
        return tuple(int(number) for number in array.reshape(-1).tolist())

    def number(self, value: Value | None) -> float | int | bool | None:
        """The single number a constant holds, None where it holds another count or is not known."""
        if value is None or value.num_elements != 1:
            return None
        array = value.array
        return None if array is None else array.reshape(-1)[0].item()

    # --- ops ----------------------------------------------------------------------------------

    def emit(
        self,
        kind: str,
        inputs: Iterable[Value | None],
        shape: Sequence[int],
        dtype: DType | None = None,
        **attributes: Any,
    ) -> Value:
        """Record one op with one output; ops on constants alone are dropped, their result is a constant."""
        return self.emit_multi(kind, inputs, [shape], [dtype], **attributes)[0]

    def emit_multi(
        self,
        kind: str,
        inputs: Iterable[Value | None],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[DType | None],
        *,
        role: Role | None = None,
        **attributes: Any,
    ) -> list[Value]:
        present = [value for value in inputs if value is not None]
        role = role or role_from(present)
        exact = all(value.exact for value in present)
        outputs = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            self._check_shape(shape)
            output = Value(tuple(shape), dtype or present[0].dtype, role, exact=exact)
            self._inherit_batch_position(present, output)
            outputs.append(output)
        if role is not Role.CONSTANT:
            self.ops.append(RecordedOp(kind, present, outputs, attributes, self.op_name, self.repeats))
        return outputs

    def _check_shape(self, shape: Sequence[int]) -> None:
        for dim in shape:
            if type(dim) is not int or dim < 0:
                raise ShapeUnknown(f"{tuple(shape)} is no shape")
            if dim > MAX_DIM:
                raise GnnpredError(
                    f"node {self.op_name!r} makes a tensor of shape {tuple(shape)}, which is absurdly large; "
                    "check the batch size and the bound dimensions"
                )

    def _inherit_batch_position(self, inputs: Sequence[Value], output: Value) -> None:
        # only merged axes whose batch is not the outermost factor carry this, so the loop is short
        for value in inputs:
            if value.batch_inner is not None and value.rank == output.rank:
                axis = self.batch_axis(value.shape)
                if axis is not None and output.shape[axis] == value.shape[axis]:
                    output.batch_inner = value.batch_inner
                return

    def view(self, value: Value, shape: Sequence[int], kind: str = "view", **attributes: Any) -> Value:
        """A view op; nothing is recorded where it changes nothing."""
        shape = tuple(shape)
        if kind == "view" and shape == value.shape:
            return value
        return self.emit(kind, [value], shape, **attributes)

    def transpose(self, value: Value, perm: Sequence[int]) -> Value:
        perm = tuple(perm)
        if perm == tuple(range(value.rank)):
            return value
        output = self.emit("transpose", [value], [value.shape[axis] for axis in perm], perm=perm)
        output.batch_inner = value.batch_inner
        return output

    # --- shapes -------------------------------------------------------------------------------

    def batch_axis(self, shape: Sequence[int]) -> int | None:
        """First axis that holds the batch."""
        for axis, dim in enumerate(shape):
            if self.binding.is_batch(dim):
                return axis
        return None

    def broadcast(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        """Numpy broadcasting; a baked batch against the bound one takes the bound one."""
        rank = max((len(shape) for shape in shapes), default=0)
        result = [1] * rank
        for shape in shapes:
            offset = rank - len(shape)
            for axis, dim in enumerate(shape):
                known = result[offset + axis]
                if dim == known or dim == 1:
                    continue
                if known == 1:
                    result[offset + axis] = dim
                else:
                    result[offset + axis] = self.reconcile(known, dim)
        return tuple(result)

    def reconcile(self, first: int, second: int) -> int:
        """One dimension from two that should agree; only the batch may differ from its baked size."""
        if first == second:
            return first
        for new, old in ((first, second), (second, first)):
            baked = self.binding.baked_size
            follows = self.binding.is_batch(new) and not self.binding.is_batch(old)
            if follows and (baked is None or new // self.binding.prime * baked == old):
                self.batch_guesses += 1
                return new
        raise ShapeUnknown(f"dimensions {first} and {second} do not fit together")

    def carry_batch(self, value: Value, target: Sequence[int]) -> tuple[tuple[int, ...], int | None] | None:
        """A baked reshape target at the bound batch, by the memory stride that the batch factor occupies.

        Returns the new shape and the new ``batch_inner``; None where the rule finds no place.
        ``target`` holds resolved sizes at the baked batch.
        """
        prime, baked = self.binding.prime, self.binding.baked_size
        axis = self.batch_axis(value.shape)
        if prime is None or axis is None:
            return None
        if baked is None:  # symbolic input, but a constant that fits one batch only
            baked, remainder = divmod(prod(target), max(1, value.num_elements // prime))
            if remainder or baked < 1:
                return None
        old = self.binding.at(value.shape, baked)
        inner = value.batch_inner or value.shape[axis] // prime
        stride = prod(old[axis + 1 :]) * inner
        lows = [prod(target[out_axis + 1 :]) for out_axis in range(len(target))]
        place = _batch_place(target, lows, stride, baked, axis)
        if place is None:
            return None
        dim = target[place] // baked * prime
        new_shape = (*target[:place], dim, *target[place + 1 :])
        new_inner = stride // lows[place]
        return new_shape, (new_inner if new_inner * prime != dim else None)


def _batch_place(target: Sequence[int], lows: Sequence[int], stride: int, baked: int, axis: int) -> int | None:
    """Axis of ``target`` whose memory range holds the batch factor that starts at ``stride``."""
    fits = [
        out_axis
        for out_axis, (low, dim) in enumerate(zip(lows, target, strict=True))
        if low > 0
        and stride >= low
        and stride % low == 0
        and low * dim >= stride * baked
        and (low * dim) % (stride * baked) == 0
    ]
    if not fits:
        return None
    if baked > 1:
        return fits[0]
    # batch 1 takes no room in memory: prefer an axis of size 1, the old position, then the innermost place
    ones = [out_axis for out_axis in fits if target[out_axis] == 1]
    if ones:
        return axis if axis in ones else ones[0]
    return next((out_axis for out_axis in fits if lows[out_axis] == stride), fits[0])


def role_from(inputs: Sequence[Value]) -> Role:
    """Role of what is computed from ``inputs``."""
    role = Role.CONSTANT
    for value in inputs:
        if value.role is Role.ACTIVATION or value.role is Role.INPUT:
            return Role.ACTIVATION
        if value.role is not Role.CONSTANT:
            role = Role.PARAMETER_DERIVED
    return role


def normalise_axis(axis: int, rank: int) -> int:
    """``axis`` counted from the front."""
    if not -rank <= axis < max(rank, 1):
        raise ShapeUnknown(f"axis {axis} does not exist in rank {rank}")
    return axis + rank if axis < 0 else axis
