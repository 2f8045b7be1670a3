"""One walk over the nodes: shapes, constants, roles and ops in a single pass.

Local functions are walked in place (so they are inlined), If, Loop and Scan bodies as well.
Nothing here trusts the file: the number of nodes walked and the nesting depth are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

from gnnpred.errors import GnnpredError
from gnnpred.graph import DType, Role
from gnnpred.onnx_io import (  # noqa: F401 - importing them registers their handlers
    ops_contrib,
    ops_elementwise,
    ops_indexing,
    ops_matmul,
    ops_movement,
    ops_reduce,
    ops_sequence,
    ops_shape,
)  # fmt: skip
from gnnpred.onnx_io.builder import Builder, RecordedOp, ShapeUnknown
from gnnpred.onnx_io.dimensions import evaluate_dim, normalised
from gnnpred.onnx_io.folding import fold
from gnnpred.onnx_io.handlers import HANDLERS
from gnnpred.onnx_io.loading import MAX_DEPTH, MAX_NODES
from gnnpred.onnx_io.nodes import Node, Subgraph, topological_order
from gnnpred.onnx_io.parameters import body_weight_slots, role_of_stored, weight_slot_names
from gnnpred.onnx_io.values import DTYPE_BY_ELEMENT_TYPE, ELEMENT_TYPE_BY_DTYPE, Value, dtype_of

MAX_TRIP_COUNT = 1_000_000
MAX_DECLARED_DIM = 2**40
# what a malformed node can trip in a handler; everything else is a bug of ours and must surface
_BROKEN_NODE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
_NO_ONNX_INFERENCE = (onnx.defs.SchemaError, shape_inference.InferenceError, onnx.checker.ValidationError)


class ParsedGraph:
    """The main graph's nodes in topological order, with what reaches weight slots; walked once or twice."""

    def __init__(self, graph: onnx.GraphProto, where: str) -> None:
        self.proto = graph
        nodes = [Node(proto) for proto in graph.node]
        known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        known |= {sparse.values.name for sparse in graph.sparse_initializer}
        self.nodes = topological_order(nodes, known, where)
        self.weights, self.statistics = weight_slot_names(self.nodes)


@dataclass
class Function:
    """A local function, parsed and ordered once."""

    inputs: list[str]
    outputs: list[str]
    nodes: list[Node]
    defaults: dict[str, Any]


@dataclass
class Tally:
    """What the walk counts; an If keeps the counts of the branch it takes."""

    num_outputs: int = 0
    num_exact: int = 0
    first_guess: str = ""
    unsupported: dict[str, int] = field(default_factory=dict)  # op types without a rule
    misfits: dict[str, int] = field(default_factory=dict)  # op types with a rule that did not apply

    def add(self, other: Tally) -> None:
        self.num_outputs += other.num_outputs
        self.num_exact += other.num_exact
        self.first_guess = self.first_guess or other.first_guess
        for mine, theirs in ((self.unsupported, other.unsupported), (self.misfits, other.misfits)):
            for label, count in theirs.items():
                mine[label] = mine.get(label, 0) + count


@dataclass
class Scope:
    """Names visible at one nesting level."""

    values: dict[str, Value | None]
    parent: Scope | None = None
    call_attributes: Mapping[str, Any] = field(default_factory=dict)
    declared: Mapping[str, onnx.ValueInfoProto] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        raise KeyError(name)


class Walker:
    """Walks one model; ``builder`` holds what it finds."""

    def __init__(
        self,
        builder: Builder,
        *,
        functions: Mapping[tuple[str, str], onnx.FunctionProto],
        symbols: Mapping[str, int],
        opset_imports: Sequence[onnx.OperatorSetIdProto],
        where: str,
    ) -> None:
        self.builder = builder
        self.where = where
        self._symbols = symbols
        self._function_protos = functions
        self._functions: dict[tuple[str, str], Function] = {}
        self._opset_imports = list(opset_imports)
        self._prefix = ""  # makes names of tensors inside functions unique
        self._num_walked = 0
        self._has_stored_weights = False
        self._depth = 0
        self.tally = Tally()

    # --- nodes --------------------------------------------------------------------------------

    def walk_graph(self, parsed: ParsedGraph, inputs: Mapping[str, Value]) -> list[Value]:
        """Walk the main graph; returns its outputs."""
        graph = parsed.proto
        scope = Scope(dict(inputs))
        scope.declared = {info.name: info for info in (*graph.value_info, *graph.output)}
        scope.weights, scope.statistics = parsed.weights, parsed.statistics
        for tensor in graph.initializer:
            scope.values[tensor.name] = self._stored_value(scope, tensor)
            self._has_stored_weights |= tensor.name in scope.weights
        for sparse in graph.sparse_initializer:
            dtype = dtype_of(sparse.values.data_type, f"{self.where}: initializer {sparse.values.name!r}")
            value = Value(tuple(sparse.dims), dtype, Role.PARAMETER, name=sparse.values.name)
            scope.values[value.name] = value
        self._walk_nodes(parsed.nodes, scope)
        outputs = []
        for output in graph.output:
            value = scope.values.get(output.name)
            if value is None:
                raise GnnpredError(f"{self.where}: the output {output.name!r} is made by no node")
            outputs.append(value)
        return outputs

    def _stored_value(self, scope: Scope, tensor: onnx.TensorProto) -> Value:
        name = tensor.name
        dtype = dtype_of(tensor.data_type, f"{self.where}: initializer {name!r}")
        dims = tuple(tensor.dims)
        if any(dim < 0 for dim in dims):
            raise GnnpredError(f"{self.where}: initializer {name!r} has a negative dimension: {dims}")
        external = tensor.data_location == onnx.TensorProto.EXTERNAL or bool(tensor.external_data)
        value = Value(dims, dtype, Role.CONSTANT, name=name, proto=None if external else tensor)
        value.role = role_of_stored(
            value, in_weight_slot=name in scope.weights, is_statistic=name in scope.statistics, from_node=False
        )
        return value

    def _walk_nodes(self, nodes: Sequence[Node], scope: Scope) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GnnpredError(f"{self.where}: bodies or local functions are nested deeper than {MAX_DEPTH} levels")
        self._num_walked += len(nodes)
        if self._num_walked > MAX_NODES:
            raise GnnpredError(f"{self.where}: more than {MAX_NODES} nodes once local functions are inlined")
        for node in nodes:
            if node.has_references:
                node = node.bound_to(scope.call_attributes)
            inputs = [self._input(scope, node, name) for name in node.inputs]
            outputs = self._walk_node(node, inputs, scope)
            for position, name in enumerate(node.outputs):
                if not name:
                    continue
                value = outputs[position] if position < len(outputs) else self._guessed(node, name, inputs, scope)
                if not value.name:
                    value.name = self._prefix + name
                scope.values[name] = value
        self._depth -= 1

    def _input(self, scope: Scope, node: Node, name: str) -> Value | None:
        if not name:
            return None
        try:
            return scope.find(name)
        except KeyError:
            raise GnnpredError(
                f"{self.where}: node {node.label} reads {name!r}, which nothing in the file makes"
            ) from None

    def _walk_node(self, node: Node, inputs: list[Value | None], scope: Scope) -> list[Value]:
        builder = self.builder
        key = (node.domain, node.op_type)
        if key in self._function_protos:
            return self._call_function(key, node, inputs)
        builder.op_name = node.name
        if node.domain == "" and node.op_type in _CONTROL_FLOW:
            return _CONTROL_FLOW[node.op_type](self, node, inputs, scope)
        if inputs and all(value is None or value.role is Role.CONSTANT for value in inputs):
            # a weight may be a ConstantOfShape (weights taken out of the file): it stays a weight
            folded = (
                None
                if node.op_type == "ConstantOfShape" and node.outputs[0] in scope.weights
                else fold(builder, node, inputs)
            )
            if folded is not None:
                self._count(folded)
                return folded
        handler = HANDLERS.get(key)
        if handler is not None:
            num_ops = len(builder.ops)
            try:
                outputs = handler(builder, node, inputs)
            except _BROKEN_NODE as error:
                del builder.ops[num_ops:]
                reason = str(error) if isinstance(error, ShapeUnknown) else "its inputs or attributes do not fit"
                return self._fallback(node, inputs, scope, reason)
            if node.op_type in ("Constant", "ConstantOfShape"):
                self._classify_constant(node, inputs, outputs[0], scope)
            if len(builder.ops) - num_ops > 1:
                self._name_intermediates(builder.ops[num_ops:], node, outputs)
            self._count(outputs)
            return outputs
        return self._fallback(node, inputs, scope)

    def _name_intermediates(self, ops: Sequence[RecordedOp], node: Node, outputs: Sequence[Value]) -> None:
        named = {id(value) for value in outputs}
        for op_idx, op in enumerate(ops):
            for position, value in enumerate(op.outputs):
                if id(value) not in named and not value.name:
                    value.name = f"{self._prefix}{node.outputs[0]}:{op_idx}.{position}"

    def _classify_constant(self, node: Node, inputs: list[Value | None], value: Value, scope: Scope) -> None:
        name = node.outputs[0]
        value.name = name
        value.role = role_of_stored(
            value, in_weight_slot=name in scope.weights, is_statistic=name in scope.statistics, from_node=True
        )
        # zeros, masks and tables, however large; where weights are initializers, Constant nodes hold none
        if name not in scope.weights and (node.op_type == "ConstantOfShape" or self._has_stored_weights):
            value.role = Role.CONSTANT

    def _count(self, outputs: Sequence[Value]) -> None:
        self.tally.num_outputs += len(outputs)
        self.tally.num_exact += sum(value.exact for value in outputs)

    # --- local functions ----------------------------------------------------------------------

    def _call_function(self, key: tuple[str, str], node: Node, inputs: Sequence[Value | None]) -> list[Value]:
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._parsed_function(key)
        values: dict[str, Value | None] = dict(zip(function.inputs, inputs, strict=False))
        for name in function.inputs[len(inputs) :]:
            values[name] = None
        scope = Scope(values, call_attributes={**function.defaults, **node.attributes})
        scope.weights, scope.statistics = weight_slot_names(function.nodes)
        outer_prefix = self._prefix
        self._prefix = f"{outer_prefix}{next((name for name in node.outputs if name), node.name)}/"
        self._walk_nodes(function.nodes, scope)
        self._prefix = outer_prefix
        try:
            return [scope.find(name) for name in function.outputs]
        except KeyError as missing:
            raise GnnpredError(f"{self.where}: local function {key[1]!r} never makes its output {missing}") from None

    def _parsed_function(self, key: tuple[str, str]) -> Function:
        proto = self._function_protos[key]
        nodes = [Node(node) for node in proto.node]
        nodes = topological_order(nodes, set(proto.input), f"{self.where}, function {proto.name!r}")
        defaults = Node(onnx.NodeProto(attribute=proto.attribute_proto)).attributes
        return Function(list(proto.input), list(proto.output), nodes, defaults)

    # --- bodies -------------------------------------------------------------------------------

    def walk_body(self, body: Subgraph, inputs: Sequence[Value | None], scope: Scope) -> list[Value]:
        """Walk a body with its formal inputs bound; returns its outputs."""
        inner = Scope(dict(zip(body.inputs, inputs, strict=False)), scope, scope.call_attributes)
        inner.declared = {info.name: info for info in body.value_info}
        inner.weights, inner.statistics = body_weight_slots(body)
        for tensor in body.initializers:
            inner.values[tensor.name] = self._stored_value(inner, tensor)
        self._walk_nodes(self._ordered(body, inner), inner)
        try:
            return [inner.find(name) for name in body.outputs]
        except KeyError as missing:
            raise GnnpredError(f"{self.where}: a body never makes its output {missing}") from None

    def _ordered(self, body: Subgraph, inner: Scope) -> list[Node]:
        known = set(inner.values)
        produced = {name for node in body.nodes for name in node.outputs}
        for node in body.nodes:
            for name in node.reads():
                if name and name not in known and name not in produced:
                    try:
                        inner.find(name)
                    except KeyError:
                        continue  # topological_order names it
                    known.add(name)
        return topological_order(body.nodes, known, self.where)

    def _walk_if(self, node: Node, inputs: list[Value | None], scope: Scope) -> list[Value]:
        builder = self.builder
        branches = [body for body in (node.get("then_branch"), node.get("else_branch")) if type(body) is Subgraph]
        if len(branches) != 2:
            return self._fallback(node, inputs, scope)
        condition = builder.number(inputs[0]) if inputs else None
        if condition is not None and inputs[0].exact:
            return self.walk_body(branches[0 if condition else 1], [], scope)
        walked: list[tuple[list[RecordedOp], list[Value], Tally]] = []
        outer_ops, outer_tally = builder.ops, self.tally
        for body in branches:
            builder.ops, self.tally = [], Tally()
            outputs = self.walk_body(body, [], scope)
            walked.append((builder.ops, outputs, self.tally))
        builder.ops, self.tally = outer_ops, outer_tally
        ops, outputs, tally = max(walked, key=lambda branch: _rough_cost(branch[0]))
        builder.ops.extend(ops)
        self.tally.add(tally)
        builder.note(f"{node.label}: the condition depends on the data; the costlier branch is counted")
        return [self._as_data(value) for value in outputs]

    def _as_data(self, value: Value) -> Value:
        # what a data-dependent branch returns is no constant even where the branch holds one
        if value.role is not Role.CONSTANT or value.elements is not None:
            return value
        return Value(value.shape, value.dtype, Role.CONSTANT, name=value.name, exact=value.exact)

    def _walk_loop(self, node: Node, inputs: list[Value | None], scope: Scope) -> list[Value]:
        builder, body = self.builder, node.get("body")
        if type(body) is not Subgraph or len(inputs) < 2:
            return self._fallback(node, inputs, scope)
        trips = builder.number(inputs[0])
        trips = self._trip_count(node, None if trips is None or trips > MAX_TRIP_COUNT else max(0, int(trips)))
        iteration = Value((), DType.INT64, Role.CONSTANT)
        keep_going = Value((), DType.BOOL, Role.CONSTANT)
        state = [self._changing(value) for value in inputs[2:]]
        outputs = self._repeated_body(body, [iteration, keep_going, *state], scope, trips)[1:]
        return self._loop_outputs(outputs, len(state), 1 if trips is None else trips)

    def _walk_scan(self, node: Node, inputs: list[Value | None], scope: Scope) -> list[Value]:
        body, num_scanned = node.get("body"), node.get("num_scan_inputs", 0)
        if type(body) is not Subgraph or not 0 < num_scanned <= len(inputs) or self.builder.opset < 9:
            return self._fallback(node, inputs, scope)
        axes = node.get("scan_input_axes") or (0,) * num_scanned
        state = [self._changing(value) for value in inputs[:-num_scanned]]
        slices, trips = [], 1
        for value, axis in zip(inputs[-num_scanned:], axes, strict=True):
            if value is None or not -value.rank <= axis < value.rank:
                return self._fallback(node, inputs, scope)
            axis %= value.rank
            trips = value.shape[axis]
            shape = (*value.shape[:axis], *value.shape[axis + 1 :])
            slices.append(self.builder.emit("slice", [value], shape, axes=(axis,), steps=(1,), drop_axes=True))
        trips = self._trip_count(node, trips if trips <= MAX_TRIP_COUNT else None)
        outputs = self._repeated_body(body, [*state, *slices], scope, trips)
        return self._loop_outputs(outputs, len(state), 1 if trips is None else trips)

    def _trip_count(self, node: Node, trips: int | None) -> int | None:
        if trips is None:
            self.builder.note(f"{node.label}: the number of iterations is not in the file; its body is counted once")
        elif trips > 1:
            self.builder.note(f"{node.label}: its body is counted {trips} times (no early exit)")
        return trips

    def _changing(self, value: Value | None) -> Value | None:
        """A loop-carried value: its first content does not hold for later iterations."""
        if value is None or value.role is not Role.CONSTANT or value.elements is not None:
            return value
        return Value(value.shape, value.dtype, Role.CONSTANT, name=value.name, exact=value.exact)

    def _repeated_body(
        self, body: Subgraph, inputs: list[Value | None], scope: Scope, trips: int | None
    ) -> list[Value]:
        builder = self.builder
        outer, num_ops = builder.repeats, len(builder.ops)
        builder.repeats = min(outer * max(1, trips or 1), MAX_TRIP_COUNT)
        outputs = self.walk_body(body, inputs, scope)
        builder.repeats = outer
        if trips == 0:  # never entered: the state passes through
            del builder.ops[num_ops:]
            num_passed = len(outputs)
            passed = [value for value in inputs[1:] if value is not None][:num_passed]
            return [*passed, *(self._empty(value) for value in outputs[len(passed) :])]
        return outputs

    def _empty(self, value: Value) -> Value:
        return Value(value.shape, value.dtype, Role.CONSTANT, exact=value.exact)

    def _loop_outputs(self, outputs: list[Value], num_state: int, trips: int) -> list[Value]:
        stacked = [
            self.builder.emit("stack", [value], (trips, *value.shape), value.dtype) for value in outputs[num_state:]
        ]
        return [*outputs[:num_state], *stacked]

    # --- nodes without a rule -----------------------------------------------------------------

    def _fallback(self, node: Node, inputs: list[Value | None], scope: Scope, reason: str = "") -> list[Value]:
        """Shapes from onnx's own inference, then the file's value_info, then the first input."""
        builder = self.builder
        present = [value for value in inputs if value is not None]
        inferred = self._infer_with_onnx(node, present)
        shapes, dtypes, exact = [], [], True
        for name in node.outputs:
            spec = inferred.get(name) or self._declared(name, scope)
            if spec is None:
                exact = False
                like = next((value for value in present if value.depends_on_data), present[0] if present else None)
                spec = (like.shape, like.dtype) if like is not None else ((), DType.FP32)
                if not self.tally.first_guess:
                    self.tally.first_guess = f"{node.label} ({reason})" if reason else node.label
            shapes.append(spec[0])
            dtypes.append(spec[1])
        known_op = (node.domain, node.op_type) in HANDLERS
        attributes = {"op_type": node.op_type, "domain": node.domain}
        label = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        role = None if present or known_op else Role.ACTIVATION
        outputs = builder.emit_multi("unsupported", present, shapes, dtypes, role=role, **attributes)
        for output in outputs:
            output.exact = output.exact and exact
        if outputs and outputs[0].role is not Role.CONSTANT:
            counts = self.tally.misfits if known_op else self.tally.unsupported
            counts[label] = counts.get(label, 0) + 1
        self._count(outputs)
        return outputs

    def _guessed(self, node: Node, name: str, inputs: Sequence[Value | None], scope: Scope) -> Value:
        # an output that the handler does not model (rare statistics outputs)
        spec = self._declared(name, scope)
        present = [value for value in inputs if value is not None]
        shape, dtype = spec or ((present[0].shape, present[0].dtype) if present else ((), DType.FP32))
        outputs = self.builder.emit_multi(
            "unsupported", present, [shape], [dtype], op_type=node.op_type, domain=node.domain
        )
        outputs[0].exact = spec is not None
        self._count(outputs)
        return outputs[0]

    def _infer_with_onnx(self, node: Node, present: Sequence[Value]) -> dict[str, tuple[tuple[int, ...], DType]]:
        if any(value.elements is not None for value in present) or node.subgraphs():
            return {}
        try:
            version = next(
                (
                    entry.version
                    for entry in self._opset_imports
                    if entry.domain in (node.domain, node.domain or "ai.onnx")
                ),
                self.builder.opset,
            )
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
            by_name = dict(zip((name for name in node.inputs if name), present, strict=True))
            types = {
                name: onnx.helper.make_tensor_type_proto(ELEMENT_TYPE_BY_DTYPE[value.dtype], value.shape)
                for name, value in by_name.items()
            }
            data = {
                name: numpy_helper.from_array(np.ascontiguousarray(value.array))
                for name, value in by_name.items()
                if value.is_constant and value.array is not None
            }
            imports = [onnx.helper.make_opsetid(node.domain, version)]
            found = shape_inference.infer_node_outputs(schema, node.proto, types, data, opset_imports=imports)
        except (*_NO_ONNX_INFERENCE, RuntimeError, KeyError, ValueError, TypeError):
            return {}
        specs = {}
        for name, proto in found.items():
            spec = self._spec_of(proto)
            if spec is not None:
                specs[name] = spec
        return specs

    def _declared(self, name: str, scope: Scope) -> tuple[tuple[int, ...], DType] | None:
        info = scope.declared.get(name)
        return None if info is None else self._spec_of(info.type)

    def _spec_of(self, proto: onnx.TypeProto) -> tuple[tuple[int, ...], DType] | None:
        if proto.WhichOneof("value") != "tensor_type" or not proto.tensor_type.HasField("shape"):
            return None
        dtype = DTYPE_BY_ELEMENT_TYPE.get(proto.tensor_type.elem_type)
        shape = []
        for axis, dim in enumerate(proto.tensor_type.shape.dim):
            which = dim.WhichOneof("value")
            size = dim.dim_value if which == "dim_value" else None
            if which == "dim_param":
                size = evaluate_dim(normalised(dim.dim_param), self._symbols)
            if size is None or not 0 <= size <= MAX_DECLARED_DIM:
                return None
            binding = self.builder.binding
            if axis == 0 and binding.baked_size and size == binding.baked_size:
                self.builder.batch_guesses += 1
                size = binding.prime
            shape.append(size)
        return None if dtype is None else (tuple(shape), dtype)


def _rough_cost(ops: Sequence[RecordedOp]) -> float:
    """Enough to order two branches: elements written, times the depth of products."""
    total = 0.0
    for op in ops:
        elements = float(sum(min(value.num_elements, 2**60) for value in op.outputs))
        if (
            op.kind in ("conv", "linear", "matmul", "sdpa", "conv_transpose", "lstm", "gru", "rnn")
            and len(op.inputs) > 1
        ):
            elements *= 1 + op.inputs[1].num_elements / max(1, op.outputs[0].shape[-1] if op.outputs[0].shape else 1)
        total += elements * op.repeats
    return total


_CONTROL_FLOW = {"If": Walker._walk_if, "Loop": Walker._walk_loop, "Scan": Walker._walk_scan}
