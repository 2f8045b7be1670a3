"""read_graph: an ONNX file as an OpGraph, without its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from gnnpred.errors import GnnpredError
from gnnpred.graph import Op, OpGraph, Role, TensorSpec
from gnnpred.onnx_io.builder import BatchBinding, Builder, RecordedOp
from gnnpred.onnx_io.dimensions import BoundInputs, bind_inputs, declared_inputs
from gnnpred.onnx_io.loading import NEWEST_OPSET, OLDEST_OPSET, default_opset, load_model
from gnnpred.onnx_io.values import Value
from gnnpred.onnx_io.walk import ParsedGraph, Walker
from gnnpred.passes.batch import rebind_batch

MAX_VALUE_ELEMENTS = 64  # of constants that patterns may look at


def read_graph(
    source: str | Path | onnx.ModelProto,
    *,
    batch_size: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> OpGraph:
    """Read an ONNX model (a path or a loaded ModelProto) as an OpGraph at ``batch_size``.

    Weights are never read: a file with external data needs only its structure. ``batch_size``
    replaces the batch dimension, symbolic or baked in (None: the baked one, or 1 for a symbolic
    one, with a note); ``dims`` binds every other symbolic dimension by name. What was assumed or
    guessed is in ``OpGraph.notes``; ``metadata`` holds ``shape_coverage`` (share of tensors whose
    shape follows from the file), ``opset``, ``producer`` and ``unsupported`` (op type -> count).

    Raises GnnpredError for a file that cannot be read as a model (not ONNX, truncated, cyclic,
    missing opset import, open dimension ...) and UsageError for a batch size or dimension that
    cannot be.
    """
    model, where = load_model(source)
    opset = default_opset(model, where)
    sizes_in_file = {dim for tensor in model.graph.initializer for dim in tensor.dims}
    bound = bind_inputs(
        declared_inputs(model.graph, where),
        batch_size=batch_size,
        dims=dims,
        sizes_in_file=sizes_in_file,
        where=where,
    )
    parsed = ParsedGraph(model.graph, where)
    if bound.binding.baked_size is not None:
        return _read_baked(model, parsed, bound, opset, where)
    builder, walker, outputs = _walk(model, parsed, bound.values, bound, bound.binding, opset, where)
    _note_oddities(builder, walker, opset)
    return _assemble(builder, walker, model, bound, outputs, where, _TensorTable(bound.binding, bound.batch_size))


def _walk(
    model: onnx.ModelProto,
    parsed: ParsedGraph,
    inputs: Mapping[str, Value],
    bound: BoundInputs,
    binding: BatchBinding,
    opset: int,
    where: str,
) -> tuple[Builder, Walker, list[Value]]:
    builder = Builder(opset=opset, binding=binding)
    for text in bound.notes:
        builder.note(text)
    functions = {(function.domain, function.name): function for function in model.functions}
    walker = Walker(builder, functions=functions, symbols=bound.symbols, opset_imports=model.opset_import, where=where)
    return builder, walker, walker.walk_graph(parsed, inputs)


def _read_baked(model: onnx.ModelProto, parsed: ParsedGraph, bound: BoundInputs, opset: int, where: str) -> OpGraph:
    """A graph whose batch is baked in: exact at that batch, and rebound by axes that a second walk finds.

    The first walk takes every shape as the file has it. The second carries a prime in place of the
    batch through reshapes; an axis counts as a batch axis where both agree.
    """
    baked = bound.binding.baked_size
    plain_inputs = {
        name: Value(bound.binding.at(value.shape, baked), value.dtype, value.role, name=name, exact=value.exact)
        for name, value in bound.values.items()
    }
    builder, walker, outputs = _walk(model, parsed, plain_inputs, bound, BatchBinding(), opset, where)
    carried_shapes: dict[str, tuple[int, ...]] = {name: value.shape for name, value in bound.values.items()}
    try:
        carrier, _, _ = _walk(model, parsed, bound.values, bound, bound.binding, opset, where)
        for op in carrier.ops:
            for value in op.outputs:
                carried_shapes[value.name] = value.shape
        num_guessed = carrier.batch_guesses
    except GnnpredError:  # the file's constants allow its own batch only
        num_guessed = 0
    table = _BakedTensorTable(bound.binding, carried_shapes)
    graph = _assemble(
        builder, walker, model, replace(bound, values=plain_inputs, batch_size=baked), outputs, where, table
    )
    _note_oddities(builder, walker, opset)
    num_doubtful = num_guessed + table.num_disagreeing
    if num_doubtful:
        builder.note(
            f"the batch of {baked} is baked into the file and the batch axis of {num_doubtful} tensors was guessed; "
            "an export with a symbolic batch dimension is more exact"
        )
    graph = graph.replace(notes=tuple(builder.notes))
    return rebind_batch(graph, bound.batch_size or baked)


def _note_oddities(builder: Builder, walker: Walker, opset: int) -> None:
    if opset < OLDEST_OPSET:
        builder.note(f"opset {opset} is older than {OLDEST_OPSET}, the oldest that is checked; shapes may be off")
    elif opset > NEWEST_OPSET:
        builder.note(f"opset {opset} is newer than {NEWEST_OPSET}, the newest that is known")
    if builder.batch_guesses:
        builder.note(
            f"the batch axis of {builder.batch_guesses} tensors was guessed; "
            "an export with a symbolic batch dimension is more exact"
        )
    tally = walker.tally
    if tally.num_exact < tally.num_outputs:
        first = f", the first at {tally.first_guess}" if tally.first_guess else ""
        builder.note(
            f"{tally.num_outputs - tally.num_exact} of {tally.num_outputs} tensor shapes rest on a guess{first}"
        )
    for label, count in tally.unsupported.items():
        builder.note(f"{label} ({count} times) is not known here; it is counted as one pass over its data")
    for label, count in tally.misfits.items():
        builder.note(f"{label} ({count} times) did not fit its inputs; it is counted as one pass over its data")


def _assemble(
    builder: Builder,
    walker: Walker,
    model: onnx.ModelProto,
    bound: BoundInputs,
    outputs: Sequence[Value],
    where: str,
    table: _TensorTable,
) -> OpGraph:
    ops = _live_ops(builder.ops, outputs)
    if not ops:
        raise GnnpredError(f"{where}: no output depends on an input or a parameter; there is nothing to time")
    for text in _inference_export_hints(ops):
        builder.note(text)
    input_idx = tuple(table.position(value) for value in bound.values.values())
    recorded = []
    for op in ops:
        positions = tuple(table.position(value) for value in op.inputs)
        made = tuple(table.position(value) for value in op.outputs)
        recorded.append(Op(op.kind, positions, made, op.attributes, op.name, repeats=op.repeats))
    output_idx = tuple(table.position(value) for value in outputs if value.elements is None)
    return OpGraph(
        tensors=tuple(table.specs),
        ops=tuple(recorded),
        inputs=input_idx,
        outputs=output_idx,
        batch_size=bound.batch_size,
        name=model.graph.name or where,
        notes=tuple(builder.notes),
        metadata={
            "format": "onnx",
            "opset": builder.opset,
            "producer": f"{model.producer_name} {model.producer_version}".strip(),
            "shape_coverage": walker.tally.num_exact / max(1, walker.tally.num_outputs),
            "unsupported": {**walker.tally.unsupported, **walker.tally.misfits},
        },
    )


def _live_ops(ops: Sequence[RecordedOp], outputs: Sequence[Value]) -> list[RecordedOp]:
    """Ops that an output needs; exporters leave dead ones behind."""
    needed = {id(value) for value in outputs}
    for value in outputs:
        needed.update(id(element) for element in value.elements or ())
    live = []
    for op in reversed(ops):
        if any(id(value) in needed for value in op.outputs):
            live.append(op)
            needed.update(id(value) for value in op.inputs)
    live.reverse()
    return live


class _TensorTable:
    """Values -> positions in ``OpGraph.tensors``, at the final batch size."""

    def __init__(self, binding: BatchBinding, batch_size: int | None) -> None:
        self.specs: list[TensorSpec] = []
        self._binding = binding
        self._batch_size = batch_size
        self._position_by_id: dict[int, int] = {}

    def position(self, value: Value) -> int:
        found = self._position_by_id.get(id(value))
        if found is None:
            found = self._position_by_id[id(value)] = len(self.specs)
            self.specs.append(self._spec(value))
        return found

    def _spec(self, value: Value) -> TensorSpec:
        shape, axes = value.shape, ()
        if value.role is not Role.PARAMETER:
            shape, axes = self._at_batch(value)
        return TensorSpec(shape, value.dtype, value.role, axes, self._content(value), value.name)

    def _at_batch(self, value: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape at the batch size, and the batch axes."""
        axes = _batch_axes(value.shape, self._binding)
        return (self._binding.at(value.shape, self._batch_size) if axes else value.shape), axes

    def _content(self, value: Value) -> float | int | bool | tuple[float | int | bool, ...] | None:
        if value.role not in (Role.CONSTANT, Role.PARAMETER) or value.num_elements > MAX_VALUE_ELEMENTS:
            return None
        array = value.array
        if array is None or array.dtype.kind not in "iufb":
            return None
        numbers = array.reshape(-1).tolist()
        prime = self._binding.prime
        if prime is not None and value.role is Role.CONSTANT and any(n and n % prime == 0 for n in numbers):
            return None  # follows the batch: no fixed value
        return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _batch_axes(shape: Sequence[int], binding: BatchBinding) -> tuple[int, ...]:
    return tuple(axis for axis, dim in enumerate(shape) if binding.is_batch(dim))


class _BakedTensorTable(_TensorTable):
    """Exact shapes at the baked batch; batch axes from shapes that carry the prime (by tensor name)."""

    def __init__(self, binding: BatchBinding, carried_shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(binding, binding.baked_size)
        self.num_disagreeing = 0
        self._carried_shapes = carried_shapes

    def _at_batch(self, value: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
        carried = self._carried_shapes.get(value.name)
        if carried is None or value.role is Role.CONSTANT:
            return value.shape, ()
        if self._binding.at(carried, self._binding.baked_size) != value.shape:
            self.num_disagreeing += 1
            return value.shape, ()
        return value.shape, _batch_axes(carried, self._binding)


_CONV_NET_MIN_CONVS = 10


def _inference_export_hints(ops: Sequence[RecordedOp]) -> list[str]:
    """Hints (no proof) that the export left out what a training step runs."""
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.kind] = counts.get(op.kind, 0) + 1
    hints = []
    convs = [op for op in ops if op.kind == "conv"]
    with_bias = sum(len(op.inputs) > 2 for op in convs)
    norms = sum(counts.get(kind, 0) for kind in ("batch_norm", "group_norm", "layer_norm", "reduce_mean"))
    is_language_model = counts.get("embedding", 0) and counts.get("linear", 0) > 3 and counts.get("layer_norm", 0) > 3
    if (
        is_language_model
        and counts.get("gelu", 0) + counts.get("erf", 0) + counts.get("tanh", 0)
        and not counts.get("dropout", 0)
    ):
        hints.append(
            "may be an inference export: a language model without Dropout; a training step usually runs it as well"
        )
    if len(convs) >= _CONV_NET_MIN_CONVS and with_bias == len(convs) and norms <= 1:
        hints.append(
            "may be an inference export: every convolution has a bias and there is no BatchNorm (folded?); "
            "a training step does more"
        )
    return hints
