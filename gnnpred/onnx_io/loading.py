"""An ONNX file -> ModelProto, checked as far as reading needs; weights stay where they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from gnnpred.errors import GnnpredError

MAX_FILE_BYTES = 2**31 - 1  # protobuf's own limit for one message
MAX_NODES = 1_000_000
MAX_DEPTH = 64  # of nested bodies and function calls
OLDEST_OPSET = 9
NEWEST_OPSET = 24  # operators newer than this go through onnx's own inference


def load_model(source: str | Path | onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """The model and how messages call it. External data is never opened."""
    if isinstance(source, onnx.ModelProto):
        model, where = source, source.graph.name or "model"
    else:
        path = Path(source)
        model, where = _parse(path), path.name
    _check_model(model, where)
    return model, where


def _parse(path: Path) -> onnx.ModelProto:
    try:
        if path.is_dir():
            raise GnnpredError(f"{path} is a directory; give the .onnx file in it")
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise GnnpredError(
                f"{path} has {num_bytes / 2**30:.1f} GiB, more than an ONNX file may have; "
                "save the model with external data (weights are not needed)"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise GnnpredError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise GnnpredError(f"{path} cannot be read: {error}") from error
    if not data:
        raise GnnpredError(f"{path} is not an ONNX file: it is empty")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        # field 1 (ir_version) comes first in every file that a known tool writes
        what = "is truncated or damaged" if _starts_like_onnx(data) else "is not an ONNX file"
        raise GnnpredError(f"{path} {what}: it does not parse as an ONNX model") from error
    if not model.HasField("graph"):
        what = "is truncated or damaged: it holds no graph" if _starts_like_onnx(data) else "is not an ONNX file"
        raise GnnpredError(f"{path} {what}")
    return model


def _starts_like_onnx(data: bytes) -> bool:
    return len(data) > 2 and data[0] == 0x08 and 1 <= data[1] <= 64 and data[2] in (0x12, 0x3A, 0x42)


def _check_model(model: onnx.ModelProto, where: str) -> None:
    graph = model.graph
    if not graph.node:
        raise GnnpredError(f"{where}: the graph is empty (no nodes)")
    if len(graph.node) > MAX_NODES:
        raise GnnpredError(f"{where}: {len(graph.node)} nodes are more than the {MAX_NODES} that are read")
    if not graph.output:
        raise GnnpredError(f"{where}: the graph has no outputs")
    if not _is_text(_names(model)):
        raise GnnpredError(f"{where} is damaged: it holds a name that is no text")
    if model.functions:
        _check_functions(model, where)
    for tensor in _tensors(graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            _check_external_location(tensor, where)


def _check_functions(model: onnx.ModelProto, where: str) -> None:
    """Refuse local functions that call themselves or that explode when they are inlined."""
    functions = {(function.domain, function.name): function for function in model.functions}
    size_by_key: dict[tuple[str, str], int] = {}

    def inlined_size(nodes: Iterable[onnx.NodeProto], callers: tuple[tuple[str, str], ...]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            total += 1
            if key in functions:
                if key in callers:
                    raise GnnpredError(f"{where}: the local function {node.op_type!r} calls itself")
                if len(callers) >= MAX_DEPTH:
                    raise GnnpredError(f"{where}: local functions are nested deeper than {MAX_DEPTH} levels")
                if key not in size_by_key:
                    size_by_key[key] = inlined_size(functions[key].node, (*callers, key))
                total += size_by_key[key]
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    total += inlined_size(attribute.g.node, callers)
        return total

    num_nodes = inlined_size(model.graph.node, ())
    if num_nodes > MAX_NODES:
        raise GnnpredError(f"{where}: {num_nodes} nodes once local functions are inlined; at most {MAX_NODES} are read")


def _is_text(names: Iterable[str | bytes]) -> bool:
    # protobuf hands out bytes where a string field is not UTF-8
    return all(type(name) is str for name in names)


def _names(model: onnx.ModelProto) -> Iterator[str | bytes]:
    yield model.producer_name
    yield model.producer_version
    for entry in model.opset_import:
        yield entry.domain
    yield from _graph_names(model.graph)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
        yield from (attribute.name for attribute in function.attribute_proto)
        yield from _node_names(function.node)


def _graph_names(graph: onnx.GraphProto) -> Iterator[str | bytes]:
    yield graph.name
    for tensor in graph.initializer:
        yield tensor.name
    for sparse in graph.sparse_initializer:
        yield sparse.values.name
    for info in (*graph.input, *graph.output, *graph.value_info):
        yield info.name
        for dim in info.type.tensor_type.shape.dim:
            yield dim.dim_param
    yield from _node_names(graph.node)


def _node_names(nodes: Iterable[onnx.NodeProto]) -> Iterator[str | bytes]:
    for node in nodes:
        yield from (node.op_type, node.name, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield attribute.name
            yield attribute.ref_attr_name
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graph_names(attribute.g)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == onnx.AttributeProto.GRAPH:
                yield from _tensors(attribute.g)


def _check_external_location(tensor: onnx.TensorProto, where: str) -> None:
    for entry in tensor.external_data:
        if not _is_text((entry.key, entry.value)):
            raise GnnpredError(f"{where} is damaged: the place of external data is no text")
        if entry.key != "location":
            continue
        parts = re.split(r"[\\/]", entry.value)
        if ".." in parts or parts[0] == "" or re.match(r"^[A-Za-z]:", entry.value):
            raise GnnpredError(
                f"{where}: external data of {tensor.name!r} points outside the model's folder ({entry.value!r}); "
                "refusing the file"
            )


def default_opset(model: onnx.ModelProto, where: str) -> int:
    """Version of the default operator set; a file without it cannot be interpreted."""
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not versions:
        default_used = any(node.domain in ("", "ai.onnx") for node in model.graph.node)
        if default_used:
            raise GnnpredError(
                f"{where}: missing opset import for the standard operators; export the model again or add "
                "opset_import (the file does not say which version it is written for)"
            )
        return NEWEST_OPSET
    return max(versions)
