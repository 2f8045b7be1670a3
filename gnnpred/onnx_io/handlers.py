"""The table of op handlers and what several of them share.

A handler infers the output shapes of one node and records the ops that a framework runs for it:
``handler(builder, node, inputs) -> outputs``. ``inputs`` holds None for absent optional inputs.
A handler raises ShapeUnknown (or trips over a malformed node); the walk then falls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gnnpred.onnx_io.builder import Builder, ShapeUnknown
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.values import Value

Inputs = Sequence[Value | None]
Handler = Callable[[Builder, Node, Inputs], list[Value]]

MICROSOFT = "com.microsoft"
HANDLERS: dict[tuple[str, str], Handler] = {}


def handles(*op_types: str, domain: str = "") -> Callable[[Handler], Handler]:
    """Register a handler for operators of one domain."""

    def register(handler: Handler) -> Handler:
        for op_type in op_types:
            HANDLERS[domain, op_type] = handler
        return handler

    return register


def optional(inputs: Inputs, position: int) -> Value | None:
    """Input at ``position``, None where it is absent."""
    return inputs[position] if position < len(inputs) else None


def required(inputs: Inputs, position: int) -> Value:
    value = optional(inputs, position)
    if value is None:
        raise ShapeUnknown(f"input {position} is missing")
    return value


def axes_of(builder: Builder, node: Node, inputs: Inputs, position: int = 1) -> tuple[int, ...] | None:
    """Axes from an attribute (older opsets) or a constant input; None where the node names none."""
    value = optional(inputs, position)
    if value is not None:
        axes = builder.ints(value)
        if axes is None:
            raise ShapeUnknown("axes are not constant")
        return axes
    axes = node.get("axes")
    return None if axes is None else tuple(axes)
