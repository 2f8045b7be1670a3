"""ONNX nodes as light Python objects, and their topological order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

from gnnpred.errors import GnnpredError

_A = onnx.AttributeProto


class AttributeReference:
    """Attribute of a node in a local function that takes its value from the call."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Subgraph:
    """Body of an If, Loop or Scan (parsed once)."""

    __slots__ = ("_free_names", "initializers", "inputs", "nodes", "outputs", "value_info", "weight_slots")

    def __init__(self, proto: onnx.GraphProto) -> None:
        self.nodes = [Node(node) for node in proto.node]
        self.inputs = [value.name for value in proto.input]
        self.outputs = [value.name for value in proto.output]
        self.initializers = list(proto.initializer)
        self.value_info = list(proto.value_info) + list(proto.output)
        self.weight_slots: tuple[set[str], set[str]] | None = None  # found once by parameters.weight_slot_names
        self._free_names: set[str] | None = None

    def free_names(self) -> set[str]:
        """Names that the body takes from the graphs around it."""
        if self._free_names is None:
            self._free_names = self._find_free_names()
        return self._free_names

    def _find_free_names(self) -> set[str]:
        made = set(self.inputs) | {tensor.name for tensor in self.initializers}
        free: set[str] = set()
        for node in self.nodes:
            free.update(name for name in node.reads() if name and name not in made)
            made.update(node.outputs)
        free.update(name for name in self.outputs if name not in made)
        return free - {name for node in self.nodes for name in node.outputs}


class Node:
    __slots__ = ("attributes", "domain", "has_references", "inputs", "name", "op_type", "outputs", "proto")

    def __init__(self, proto: onnx.NodeProto) -> None:
        self.proto = proto
        self.op_type = proto.op_type
        self.domain = "" if proto.domain == "ai.onnx" else proto.domain
        self.inputs = list(proto.input)
        self.outputs = list(proto.output)
        self.name = proto.name
        self.attributes: dict[str, Any] = {}
        self.has_references = False
        for attribute in proto.attribute:
            value = _attribute_value(attribute)
            if value is not None:
                self.attributes[attribute.name] = value
                if type(value) is AttributeReference:
                    self.has_references = True

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def text(self, name: str, default: str = "") -> str:
        """A string attribute."""
        value = self.attributes.get(name)
        return default if value is None else value.decode("utf-8", "replace")

    def subgraphs(self) -> list[Subgraph]:
        return [value for value in self.attributes.values() if type(value) is Subgraph]

    def reads(self) -> Iterable[str]:
        """Names this node needs: its inputs and what its bodies take from outside."""
        bodies = self.subgraphs()
        if not bodies:
            return self.inputs
        names = list(self.inputs)
        for body in bodies:
            names.extend(body.free_names())
        return names

    def bound_to(self, call_attributes: Mapping[str, Any]) -> Node:
        """The node of a function body with the call's attributes filled in."""
        if not self.has_references:
            return self
        bound = Node.__new__(Node)
        bound.proto, bound.op_type, bound.domain = self.proto, self.op_type, self.domain
        bound.inputs, bound.outputs, bound.name, bound.has_references = self.inputs, self.outputs, self.name, False
        bound.attributes = {}
        for name, value in self.attributes.items():
            if type(value) is AttributeReference:
                if value.name not in call_attributes:
                    continue
                value = call_attributes[value.name]
            bound.attributes[name] = value
        return bound

    @property
    def label(self) -> str:
        """How messages name the node; node names may be empty or repeated, outputs are not."""
        kind = f"{self.domain}::{self.op_type}" if self.domain else self.op_type
        first_output = next((name for name in self.outputs if name), "")
        return f"{kind} {self.name or first_output!r}" if not self.name else f"{kind} {self.name!r}"


def _attribute_value(attribute: onnx.AttributeProto) -> Any:
    if attribute.ref_attr_name:
        return AttributeReference(attribute.ref_attr_name)
    kind = attribute.type
    if kind == _A.INT:
        return attribute.i
    if kind == _A.INTS:
        return tuple(attribute.ints)
    if kind == _A.FLOAT:
        return attribute.f
    if kind == _A.FLOATS:
        return tuple(attribute.floats)
    if kind == _A.STRING:
        return attribute.s
    if kind == _A.STRINGS:
        return tuple(attribute.strings)
    if kind == _A.TENSOR:
        return attribute.t
    if kind == _A.SPARSE_TENSOR:
        return attribute.sparse_tensor
    if kind == _A.GRAPH:
        return Subgraph(attribute.g)
    return None


def topological_order(nodes: Sequence[Node], known: set[str], where: str) -> list[Node]:
    """``nodes`` so that each follows what it reads; names the culprit of a cycle or a missing tensor."""
    producer: dict[str, int] = {}
    for node_idx, node in enumerate(nodes):
        for name in node.outputs:
            if name:
                if name in producer:
                    raise GnnpredError(f"{where}: two nodes make the tensor {name!r}; the file is not a valid graph")
                producer[name] = node_idx
    reads = [[name for name in node.reads() if name] for node in nodes]
    made = set(known)
    in_order = True
    for node, names in zip(nodes, reads, strict=True):
        for name in names:
            if name not in made:
                if name not in producer:
                    raise GnnpredError(f"{where}: node {node.label} reads {name!r}, which nothing in the file makes")
                in_order = False
        made.update(node.outputs)
    if in_order:
        return list(nodes)
    waiting = [len({producer[name] for name in names if name in producer}) for names in reads]
    readers: list[list[int]] = [[] for _ in nodes]
    for node_idx, names in enumerate(reads):
        for producer_idx in {producer[name] for name in names if name in producer}:
            readers[producer_idx].append(node_idx)
    ready = [node_idx for node_idx in range(len(nodes) - 1, -1, -1) if waiting[node_idx] == 0]
    ordered = []
    while ready:
        node_idx = ready.pop()
        ordered.append(nodes[node_idx])
        for reader_idx in readers[node_idx]:
            waiting[reader_idx] -= 1
            if waiting[reader_idx] == 0:
                ready.append(reader_idx)
    if len(ordered) < len(nodes):
        stuck = next(node for node, count in zip(nodes, waiting, strict=True) if count)
        raise GnnpredError(f"{where}: the graph is cyclic at node {stuck.label}")
    return ordered
