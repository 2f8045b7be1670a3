"""Input dimensions: which symbol is the batch, and what every other symbol is bound to."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.graph import DType, Role
from gnnpred.onnx_io.builder import BatchBinding
from gnnpred.onnx_io.values import Value, dtype_of

MAX_DIM = 2**40
# tried in order: a prime that divides no size in the file marks the batch without confusion
PRIMES = (1009, 2003, 4001, 8009, 16001, 32003, 64007, 128021)
_BATCH_NAME = re.compile(r"^(n|b|bs|nb|batch|.*batch|batch_?size.*|.*_batch_?size|num_batch(es)?|batch_?dim\w*)$")
# symbols that stand first in an input and yet are a length or a count within one sample
_NOT_BATCH_NAME = re.compile(
    r"(seq|len|time|frame|token|node|edge|point|atom|vertex|vertices|height|width|past|step|channel|feature|word|box)"
)

Dim = int | str


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A graph input as the file declares it; symbols are names, unnamed open dimensions get one."""

    name: str
    dims: tuple[Dim, ...] | None  # None: the file does not say the rank
    dtype: DType
    is_tensor: bool = True


@dataclass(frozen=True, slots=True)
class BoundInputs:
    values: dict[str, Value]
    binding: BatchBinding
    batch_size: int | None  # what the graph is returned at; None: it has no batch
    symbols: Mapping[str, int]  # every symbol's size, the batch as the prime
    notes: tuple[str, ...]


def declared_inputs(graph: onnx.GraphProto, where: str) -> list[InputSpec]:
    """Graph inputs without initializers (files of IR version 3 list those as well)."""
    stored = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [_declared_input(value, where) for value in graph.input if value.name not in stored]


def _declared_input(value: onnx.ValueInfoProto, where: str) -> InputSpec:
    kind = value.type.WhichOneof("value")
    proto = value.type
    if kind == "optional_type":
        proto = proto.optional_type.elem_type
        kind = proto.WhichOneof("value")
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return InputSpec(value.name, None, DType.FP32, is_tensor=False)
    tensor = getattr(proto, kind)
    dtype = dtype_of(tensor.elem_type, f"{where}: input {value.name!r}")
    if not tensor.HasField("shape"):
        return InputSpec(value.name, None, dtype)
    dims: list[Dim] = []
    for axis, dim in enumerate(tensor.shape.dim):
        which = dim.WhichOneof("value")
        if which == "dim_param" and re.search(r"\w", dim.dim_param):  # some exporters write "?" for every open one
            dims.append(normalised(dim.dim_param))
        elif which == "dim_value" and (dim.dim_value > 0 or (dim.dim_value == 0 and axis > 0)):
            dims.append(dim.dim_value)  # a size of 0 past the first axis is a real empty tensor
        else:
            dims.append(f"{value.name}_dim{axis}")
    return InputSpec(value.name, tuple(dims), dtype)


def normalised(symbol: str) -> str:
    """A symbol without blanks: exporters write both 'batch _size' and 'batch_size'; 'batch-size' is no difference."""
    return re.sub(r"(?<=[A-Za-z])-(?=[A-Za-z])", "_", re.sub(r"\s+", "", symbol))


def bind_inputs(
    inputs: Sequence[InputSpec],
    *,
    batch_size: int | None,
    dims: Mapping[str, int] | None,
    sizes_in_file: set[int],
    where: str,
) -> BoundInputs:
    """Give every input dimension a size; the batch gets a prime that the file does not use."""
    given = _checked_dims(inputs, dims or {}, where)
    if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
        raise UsageError(f"batch size {batch_size} is not a positive number")
    notes: list[str] = []
    batch_symbols = _batch_symbols(inputs, given)
    for symbol in batch_symbols & given.keys():
        if batch_size is not None and batch_size != given[symbol]:
            raise UsageError(
                f"--batch-size {batch_size} and --dim {symbol}={given[symbol]} disagree: {symbol} is the batch"
            )
        batch_size = given[symbol]
    open_symbols = _open_symbols(inputs, batch_symbols, given)
    if open_symbols:
        shapes = {name: _shape_text(shape) for name, shape in open_symbols.values()}
        advice = " ".join(f"--dim {symbol}=VALUE" for symbol in open_symbols)
        raise GnnpredError(
            f"{where}: open dimension {', '.join(map(repr, open_symbols))} of input "
            f"{', '.join(f'{name!r} {text}' for name, text in shapes.items())}; give it with {advice}"
        )
    taken = sizes_in_file | set(given.values())
    taken |= {dim for spec in inputs for dim in spec.dims or () if isinstance(dim, int)}
    prime = next((p for p in PRIMES if not any(size and size % p == 0 for size in taken)), PRIMES[-1])
    symbols = {**given, **dict.fromkeys(batch_symbols, prime)}
    baked_size = None if batch_symbols else _baked_batch(inputs)
    if batch_symbols:
        binding = BatchBinding(prime)
        if len(batch_symbols) > 1:
            notes.append(f"the dimensions {', '.join(sorted(batch_symbols))} are all taken as the batch")
        if batch_size is None:
            batch_size = 1
            notes.append("the batch is symbolic and no batch size is given: predicted for a batch of 1 (--batch-size)")
    elif baked_size is not None:
        binding = BatchBinding(prime, baked_size)
        batch_size = baked_size if batch_size is None else batch_size
    else:
        binding = BatchBinding()
        if batch_size is not None:
            notes.append("no batch dimension was found in the inputs; the batch size is not used")
            batch_size = None
    values = {spec.name: _bound_input(spec, symbols, binding, where) for spec in inputs}
    return BoundInputs(values, binding, batch_size, symbols, tuple(notes))


def _checked_dims(inputs: Sequence[InputSpec], dims: Mapping[str, int], where: str) -> dict[str, int]:
    names = {name for spec in inputs for dim in spec.dims or () if isinstance(dim, str) for name in _names(dim)}
    given = {}
    for name, size in dims.items():
        symbol = normalised(name)
        if symbol not in names:
            there = ", ".join(sorted(names)) or "none"
            raise GnnpredError(f"{where}: no dimension is called {name!r}; the open dimensions are: {there}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size > MAX_DIM:
            raise UsageError(f"dimension {name}={size} is not a positive number below 2**40")
        given[symbol] = size
    return given


def _batch_symbols(inputs: Sequence[InputSpec], given: Mapping[str, int]) -> set[str]:
    symbols = [dim for spec in inputs for dim in spec.dims or () if isinstance(dim, str)]
    named = {symbol for symbol in symbols if symbol.isidentifier() and _BATCH_NAME.match(symbol.lower())}
    if named:
        return named
    leading = [
        (spec, spec.dims[0])
        for spec in inputs
        if spec.dims and isinstance(spec.dims[0], str) and len(_names(spec.dims[0])) <= 1
    ]
    leading = [
        (spec, symbol)
        for spec, symbol in leading
        if symbol not in given and (symbol == f"{spec.name}_dim0" or not _NOT_BATCH_NAME.search(symbol.lower()))
    ]
    unnamed = {symbol for spec, symbol in leading if symbol == f"{spec.name}_dim0"}
    counts: dict[str, int] = {}
    for _, symbol in leading:
        if symbol not in unnamed:
            counts[symbol] = counts.get(symbol, 0) + 1
    if counts:
        return {max(counts, key=lambda symbol: counts[symbol])} | unnamed
    return unnamed


def _open_symbols(
    inputs: Sequence[InputSpec], batch_symbols: set[str], given: Mapping[str, int]
) -> dict[str, tuple[str, tuple[Dim, ...]]]:
    found: dict[str, tuple[str, tuple[Dim, ...]]] = {}
    for spec in inputs:
        for dim in spec.dims or ():
            if isinstance(dim, str) and dim not in given and dim not in batch_symbols:
                for symbol in _names(dim):
                    if symbol not in given and symbol not in batch_symbols:
                        found.setdefault(symbol, (spec.name, spec.dims))
    return found


def _shape_text(shape: Sequence[Dim]) -> str:
    return "(" + ", ".join(str(dim) for dim in shape) + ")"


def _baked_batch(inputs: Sequence[InputSpec]) -> int | None:
    """Leading size of the first input that is more than a scalar; None where that is no number."""
    for spec in inputs:
        if spec.dims:
            return spec.dims[0] if isinstance(spec.dims[0], int) and spec.dims[0] > 0 else None
    return None


def _bound_input(spec: InputSpec, symbols: Mapping[str, int], binding: BatchBinding, where: str) -> Value:
    if not spec.is_tensor:
        return Value((), spec.dtype, Role.INPUT, name=spec.name, exact=False)
    if spec.dims is None:
        raise GnnpredError(f"{where}: input {spec.name!r} has no shape; export the model with input shapes")
    shape = []
    for axis, dim in enumerate(spec.dims):
        if isinstance(dim, str):
            shape.append(symbols[dim] if dim in symbols else evaluate_dim(dim, symbols))
        elif axis == 0 and binding.baked_size is not None and dim == binding.baked_size:
            shape.append(binding.prime)
        else:
            shape.append(dim)
    if any(dim is None or dim < 0 or dim > MAX_DIM for dim in shape):
        raise GnnpredError(
            f"{where}: input {spec.name!r} {_shape_text(spec.dims)} has an impossible size {tuple(shape)}"
        )
    return Value(tuple(shape), spec.dtype, Role.INPUT, name=spec.name)


# --- expressions such as "past_length + sequence_length" --------------------------------------

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _names(dim: str) -> list[str]:
    """Symbols in a dimension; one that is no arithmetic expression is a symbol as a whole."""
    tree = _parsed(dim)
    if tree is None:
        return [dim]
    return sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})


def _parsed(dim: str) -> ast.expr | None:
    if len(dim) > 200 or not re.search(r"[-+*/%]", dim):
        return None
    try:
        tree = ast.parse(dim, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    allowed = (ast.BinOp, ast.Name, ast.Constant, ast.operator, ast.Load)
    return tree if all(isinstance(node, allowed) for node in ast.walk(tree)) else None


def evaluate_dim(dim: str, symbols: Mapping[str, int]) -> int | None:
    """Size of a symbol or expression, None where a symbol in it is not bound."""
    if dim in symbols:
        return symbols[dim]
    tree = _parsed(dim)
    try:
        return None if tree is None else _evaluate(tree, symbols)
    except (KeyError, TypeError, ZeroDivisionError, RecursionError):
        return None


def _evaluate(node: ast.expr, symbols: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, int):
            raise TypeError("only whole numbers")
        return node.value
    if isinstance(node, ast.Name):
        return symbols[node.id]
    return _OPERATORS[type(node.op)](_evaluate(node.left, symbols), _evaluate(node.right, symbols))
