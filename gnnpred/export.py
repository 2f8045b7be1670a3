"""Write a model by name as a small ONNX file that means what a training step runs.

Train mode, no weights in the file, and nothing fused or folded: exporters fold BatchNorm and drop
dropout by default, and a prediction from such a file is about another program.
"""

import contextlib
import inspect
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import replaced_when_done
from gnnpred.model_sources import BuiltModel, build_model

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

DEFAULT_OPSET = 20
EXPORTERS = ("dynamo", "torchscript")
# A prime that no layer has as a size: a dimension it divides is a batch dimension, so a file with
# this batch baked in can be re-bound to any other.
PRIME_BATCH = 1009
BUFFER_PREFIX = "buffer."  # the reader takes such tensors as constants
ABSENT_WEIGHTS_FILE = "weights_not_exported.bin"
_MAX_FOLDED_ELEMENTS = 8192  # shape arithmetic is tiny; anything larger is data and stays
_MAX_KEPT_INTEGERS = 1024  # integer constants up to this many elements keep their values (pads, axes)
_MAX_KEPT_FLOATS = 64  # and float constants (scales, epsilons)
_MAX_TORCHSCRIPT_BYTES = 2**31  # one protobuf message
_OLDEST_OPSET = {"dynamo": 18, "torchscript": 9}
_NEWEST_OPSET = {"dynamo": 25, "torchscript": 20}


@dataclass(frozen=True, kw_only=True)
class ExportSummary:
    """What was written. ``batch`` is a number, or "dynamic" where the file leaves it open."""

    path: Path
    source: str
    exporter: str
    opset: int
    batch: int | str
    num_nodes: int
    num_parameters: int
    input_shapes: Mapping[str, tuple[int | str, ...]]
    seconds: float
    notes: tuple[str, ...] = ()


def export_model(
    source: str,
    out: Path,
    *,
    batch: int | str = "dynamic",
    opset: int = DEFAULT_OPSET,
    image_size: int | tuple[int, int] | None = None,
    seq_len: int | None = None,
    num_classes: int | None = None,
    train: bool = True,
    exporter: str = "dynamo",
    model_options: Mapping[str, Any] | None = None,
) -> ExportSummary:
    """Export the model that ``source`` names to ``out`` and say what was written.

    ``batch`` is "dynamic" or a number; a model that cannot be traced with an open batch is written
    with the baked batch ``PRIME_BATCH`` and a note. Raises GnnpredError where the model or the
    export fails, UsageError for options that do not fit.
    """
    started = time.perf_counter()
    _check_options(batch, opset, exporter, out)
    if exporter == "torchscript":
        model, notes, written_batch, built = _export_torchscript(
            source, batch=batch, opset=opset, image_size=image_size, seq_len=seq_len, num_classes=num_classes,
            train=train, model_options=model_options,
        )  # fmt: skip
    else:
        model, notes, written_batch, built = _export_dynamo(
            source, batch=batch, opset=opset, image_size=image_size, seq_len=seq_len, num_classes=num_classes,
            train=train, model_options=model_options,
        )  # fmt: skip
    model.graph.name = source
    _write_atomically(model, out)
    return ExportSummary(
        path=out,
        source=source,
        exporter=exporter,
        opset=model.graph.opset_imports.get("", opset),
        batch=written_batch,
        num_nodes=sum(1 for _node in model.graph.all_nodes()),
        num_parameters=sum(parameter.numel() for parameter in built.module.parameters()),
        input_shapes={
            value.name or "": tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ())
            for value in model.graph.inputs
        },
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
    )


def _check_options(batch: int | str, opset: int, exporter: str, out: Path) -> None:
    if exporter not in EXPORTERS:
        raise UsageError(f"unknown exporter {exporter!r}: choose one of {', '.join(EXPORTERS)}")
    if isinstance(batch, str):
        if batch != "dynamic":
            raise UsageError(f"batch must be a number or 'dynamic', got {batch!r}")
    elif batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")
    oldest, newest = _OLDEST_OPSET[exporter], _NEWEST_OPSET[exporter]
    if not oldest <= opset <= newest:
        raise UsageError(f"the {exporter} exporter writes opset {oldest} to {newest}, got {opset}")
    if out.is_dir():
        raise UsageError(f"{out} is a folder: name the file to write, for example {out / 'model.onnx'}")
    if not out.parent.is_dir():
        raise UsageError(f"the folder {out.parent} does not exist: create it first")


# ---------------------------------------------------------------------------------------- dynamo


_ONLY_4D_ATTENTION = "only 4D query"  # the exporter's translation of scaled_dot_product_attention


def _export_dynamo(
    source: str, *, batch: int | str, opset: int, **build_options: Any
) -> "tuple[ir.Model, list[str], int | str, BuiltModel]":
    notes: list[str] = []
    build_options |= {"batch_size": batch if isinstance(batch, int) else PRIME_BATCH, "for_export": True}
    built = build_model(source, **build_options)
    if isinstance(batch, int) or not _batch_shared(built):
        batch = _leading_dim(built)
    if batch == "dynamic":
        try:
            return _clean(_program(built, opset, dynamic=True), built.module), notes, "dynamic", built
        except Exception as error:  # torch.export fails with every kind of exception
            reason = _reason(error)
        if _ONLY_4D_ATTENTION in reason and not build_options.get("explicit_attention"):
            return _export_dynamo(source, batch=batch, opset=opset, explicit_attention=True, **build_options)
        notes.append(
            f"{source} cannot be traced with an open batch ({reason}); written with the batch "
            f"{PRIME_BATCH} baked in, which --batch-size replaces at prediction"
        )
        batch = PRIME_BATCH
        built = build_model(source, **build_options)
    try:
        return _clean(_program(built, opset, dynamic=False), built.module), notes, batch, built
    except Exception as error:
        reason = _reason(error)
        if _ONLY_4D_ATTENTION in reason and not build_options.get("explicit_attention"):
            return _export_dynamo(source, batch=batch, opset=opset, explicit_attention=True, **build_options)
        raise GnnpredError(f"{source} cannot be exported with the dynamo exporter: {reason}") from error


def _program(built: BuiltModel, opset: int, *, dynamic: bool) -> "ir.Model":
    import torch

    shapes = None
    if dynamic:
        batch_dim = torch.export.Dim("batch", min=1)
        per_input = tuple({0: batch_dim} if example.dim() else {} for example in built.example_inputs)
        shapes = (per_input,) if _takes_var_args(built.module) else per_input
    with _quiet_exporter():
        exported = torch.export.export(built.module, built.example_inputs, dynamic_shapes=shapes, strict=False)
        program = torch.onnx.export(
            exported, dynamo=True, opset_version=opset, optimize=False, verbose=False, input_names=_input_names(built)
        )
    assert program is not None
    if dynamic:
        _rename_open_dims(program.model)
    return program.model


def _mark_buffers(model: "ir.Model", module: "torch.nn.Module") -> None:
    """Name what no optimizer updates "buffer....": in a file, float buffers and weights look alike."""
    import onnx_ir.passes.common as common_passes

    common_passes.LiftConstantsToInitializersPass(size_limit=_MAX_KEPT_FLOATS + 1)(model)
    parameter_names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in [name for name in model.graph.initializers if name not in parameter_names]:
        value = model.graph.initializers[name]
        if value.dtype is not None and value.dtype.is_floating_point():
            value.name = f"{BUFFER_PREFIX}{name}"


def _rename_open_dims(model: "ir.Model") -> None:
    """Name the open batch "batch": the exporter numbers its symbols (s77)."""
    import onnx_ir as ir

    symbols = {
        dim.value for value in model.graph.inputs for dim in value.shape or () if isinstance(dim, ir.SymbolicDim)
    }
    if len(symbols) != 1:
        return
    symbol = re.compile(rf"\b{re.escape(str(symbols.pop()))}\b")
    values = [*model.graph.inputs, *(output for node in model.graph.all_nodes() for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    dim if isinstance(dim, int) else ir.SymbolicDim(symbol.sub("batch", str(dim.value)))
                    for dim in value.shape
                ]
            )


def _batch_shared(built: BuiltModel) -> bool:
    """Whether every input leads with the batch (a user's example may hold other tensors)."""
    return len({example.shape[0] if example.dim() else None for example in built.example_inputs}) == 1


def _leading_dim(built: BuiltModel) -> int:
    first = built.example_inputs[0]
    return first.shape[0] if first.dim() else 1


def _takes_var_args(module: "torch.nn.Module") -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _input_names(built: BuiltModel) -> list[str]:
    named = getattr(built.module, "input_names", None)
    if named:
        return list(named)
    return list(inspect.signature(built.module.forward).parameters)[: len(built.example_inputs)]


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporters print progress and warn about their own internals; a failure is raised anyway."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir", "torch.onnx")]
    levels = [each.level for each in loggers]
    with (
        warnings.catch_warnings(),
        open(os.devnull, "w") as sink,
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
    ):
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


def _reason(error: BaseException) -> str:
    """The innermost cause in one short line; exporters wrap it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# ---------------------------------------------------------------------------------------- torchscript


def _export_torchscript(
    source: str, *, batch: int | str, opset: int, train: bool, **build_options: Any
) -> "tuple[ir.Model, list[str], int | str, BuiltModel]":
    import io

    import onnx
    import onnx_ir as ir
    import torch

    dynamic = batch == "dynamic"
    trace_batch = batch if isinstance(batch, int) else 2
    abstract = build_model(source, batch_size=trace_batch, for_export=True, train=train, **build_options)
    num_bytes = sum(weight.nbytes for weight in abstract.module.state_dict().values())
    if num_bytes >= _MAX_TORCHSCRIPT_BYTES:
        raise GnnpredError(
            f"{source} has {num_bytes / 2**30:.1f} GiB of weights; the torchscript exporter needs them in one "
            "2 GiB message: use the dynamo exporter"
        )
    built = build_model(source, batch_size=trace_batch, for_export=True, train=train, device="cpu", **build_options)
    names = _input_names(built)
    buffer = io.BytesIO()
    torch._C._jit_set_onnx_log_enabled(False)  # it prints the whole graph to stdout when it fails
    try:
        with _quiet_exporter():
            torch.onnx.export(
                built.module, built.example_inputs, buffer, dynamo=False, opset_version=opset,
                training=torch.onnx.TrainingMode.TRAINING if train else torch.onnx.TrainingMode.EVAL,
                do_constant_folding=False, input_names=names,
                dynamic_axes={name: {0: "batch"} for name in names} if dynamic else None,
            )  # fmt: skip
    except Exception as error:
        raise GnnpredError(f"{source} cannot be exported with the torchscript exporter: {_reason(error)}") from error
    model = ir.from_proto(onnx.load_model_from_string(buffer.getvalue()))
    _mark_buffers(model, built.module)
    _drop_weights_and_metadata(model)
    return model, [], batch, built


# ---------------------------------------------------------------------------------------- cleaning


def _clean(model: "ir.Model", module: "torch.nn.Module") -> "ir.Model":
    """Inline functions, fold shape arithmetic (never weights), drop dead nodes, values and metadata."""
    import onnx_ir.passes.common as common_passes
    from onnxscript.optimizer import _constant_folding as constant_folding

    weights = {id(value) for value in model.graph.initializers.values()}

    def should_fold(node: "ir.Node") -> bool | None:
        if any(value is not None and id(value) in weights for value in node.inputs):
            return False
        return None

    with _quiet_exporter():
        common_passes.InlinePass()(model)
        constant_folding.FoldConstantsPass(
            shape_inference=False,
            input_size_limit=_MAX_FOLDED_ELEMENTS,
            output_size_limit=_MAX_FOLDED_ELEMENTS,
            should_fold=should_fold,
        )(model)
        _drop_zero_biases(model, weights)
        common_passes.IdentityEliminationPass()(model)
        common_passes.RemoveUnusedNodesPass()(model)
        common_passes.RemoveUnusedFunctionsPass()(model)
        _mark_buffers(model, module)
    _drop_weights_and_metadata(model)
    return model


def _drop_zero_biases(model: "ir.Model", weights: set[int]) -> None:
    """The exporter gives every convolution a bias; where the model has none it is a constant zero."""
    for node in model.graph.all_nodes():
        if node.op_type not in ("Conv", "ConvTranspose") or len(node.inputs) < 3:
            continue
        bias = node.inputs[2]
        value = bias.const_value if bias is not None and id(bias) not in weights else None
        if value is not None and _has_data(value) and not value.numpy().any():
            node.resize_inputs(2)


def _drop_weights_and_metadata(model: "ir.Model") -> None:
    """Replace weights by references to a file that is not there; drop stack traces with local paths."""
    import onnx_ir as ir

    offset = 0
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        shape = ir.Shape([int(dim) for dim in (tensor.shape if tensor is not None else value.shape or ())])
        dtype = tensor.dtype if tensor is not None else value.dtype
        assert dtype is not None
        size = prod(int(dim) for dim in shape)
        longest_kept = _MAX_KEPT_FLOATS if dtype.is_floating_point() else _MAX_KEPT_INTEGERS
        if tensor is not None and size <= longest_kept and _has_data(tensor):
            continue
        num_bytes = -(-size * int(dtype.bitwidth) // 8)
        value.const_value = ir.ExternalTensor(ABSENT_WEIGHTS_FILE, offset, num_bytes, dtype, shape=shape, name=name)
        value.shape, value.dtype = shape, dtype
        offset += num_bytes
    model.metadata_props.clear()
    model.doc_string = None
    for graph in (model.graph, *model.graph.subgraphs()):
        graph.metadata_props.clear()
        graph.doc_string = None
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for output in node.outputs:
                output.metadata_props.clear()


def _has_data(tensor: Any) -> bool:
    raw = getattr(tensor, "raw", None)
    return getattr(getattr(raw, "device", None), "type", "cpu") != "meta" and not type(raw).__name__.startswith("Fake")


def _write_atomically(model: "ir.Model", out: Path) -> None:
    import onnx_ir as ir

    proto = ir.to_proto(model)
    try:
        with replaced_when_done(out) as partial:
            partial.write_bytes(proto.SerializeToString())
    except OSError as error:
        raise GnnpredError(f"cannot write {out}: {error.strerror or error}") from error
