"""Sequences and optionals: they hold tensors and run no kernel themselves."""

from __future__ import annotations

import numpy as np

from gnnpred.graph import DType, Role
from gnnpred.onnx_io.builder import Builder, ShapeUnknown, normalise_axis
from gnnpred.onnx_io.handlers import Inputs, handles, optional, required
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.ops_movement import emit_concat
from gnnpred.onnx_io.ops_shape import emit_split
from gnnpred.onnx_io.values import Value


def _sequence(elements: list[Value], like: Value | None = None) -> Value:
    first = elements[0] if elements else like
    value = Value(first.shape if first else (), first.dtype if first else DType.FP32, Role.CONSTANT)
    value.elements = list(elements)
    return value


def _element_list(value: Value) -> list[Value]:
    if value.elements is None:
        raise ShapeUnknown("not a sequence")
    return value.elements


@handles("SequenceConstruct")
def sequence_construct(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [_sequence([value for value in inputs if value is not None])]


@handles("SequenceEmpty")
def sequence_empty(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [_sequence([])]


@handles("SequenceInsert")
def sequence_insert(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    elements = list(_element_list(required(inputs, 0)))
    position = builder.number(optional(inputs, 2))
    elements.insert(len(elements) if position is None else int(position), required(inputs, 1))
    return [_sequence(elements)]


@handles("SequenceErase")
def sequence_erase(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    elements = list(_element_list(required(inputs, 0)))
    position = builder.number(optional(inputs, 1))
    elements.pop(-1 if position is None else int(position))
    return [_sequence(elements)]


@handles("SequenceAt")
def sequence_at(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    position = builder.number(optional(inputs, 1))
    return [_element_list(required(inputs, 0))[0 if position is None else int(position)]]


@handles("SequenceLength")
def sequence_length(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [builder.constant(np.int64(len(_element_list(required(inputs, 0)))))]


@handles("SplitToSequence")
def split_to_sequence(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    axis = normalise_axis(node.get("axis", 0), x.rank)
    split_value = optional(inputs, 1)
    sizes = (1,) * min(x.shape[axis], 10_000) if split_value is None else builder.ints(split_value)
    if sizes is None:
        raise ShapeUnknown("the sizes of SplitToSequence are not constant")
    if split_value is not None and split_value.rank == 0:
        chunk = max(1, sizes[0])
        count = -(-x.shape[axis] // chunk)
        if count > 10_000:
            raise ShapeUnknown("too many parts")
        sizes = [min(chunk, x.shape[axis] - chunk * i) for i in range(count)]
    parts = emit_split(builder, x, axis, sizes)
    if split_value is None and not node.get("keepdims", 1):
        parts = [builder.view(part, (*part.shape[:axis], *part.shape[axis + 1 :])) for part in parts]
    return [_sequence(parts)]


@handles("ConcatFromSequence")
def concat_from_sequence(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    parts = _element_list(required(inputs, 0))
    axis = node.get("axis", 0)
    if node.get("new_axis", 0):
        axis = normalise_axis(axis, parts[0].rank + 1)
        parts = [builder.view(part, (*part.shape[:axis], 1, *part.shape[axis:])) for part in parts]
    return [emit_concat(builder, parts, axis)]


@handles("Optional", "OptionalGetElement")
def optional_element(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [required(inputs, 0)]


@handles("OptionalHasElement")
def optional_has_element(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [builder.constant(np.bool_(optional(inputs, 0) is not None))]
