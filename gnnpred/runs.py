"""A user's measured runs: a CSV row becomes a job, so that a prediction can stand beside the measurement.

Columns are those of the measurement schema (``source_id, model, phase, gpu, precision, batch_per_gpu,
step_time_ms ...``) plus ``onnx`` and how the GPUs share the work (``strategy, tp, pp, microbatches ...``).
Every reading of free text in ``note`` is listed here, in one place.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.hardware import DeviceSpec, find_device
from gnnpred.job import (
    ATTENTIONS,
    CHECKPOINTINGS,
    COMPILERS,
    OPTIMIZERS,
    STRATEGIES,
    ActivationRule,
    JobSpec,
    Phase,
    Precision,
    host_os_of,
)
from gnnpred.software import only_convolutions_use_tf32, tf32_was_default

REQUIRED_COLUMNS = ("onnx", "gpu", "precision", "batch_per_gpu", "step_time_ms")

# What an optimizer costs by its state tensors: one moment like momentum SGD, two like Adam.
_SIMILAR_OPTIMIZER = {
    "": "sgd", "momentum": "sgd", "adagrad": "sgd", "nesterov": "sgd", "rmsprop": "adam", "novograd": "adam",
    "adamax": "adam", "nadam": "adam", "radam": "adam", "fusedadam": "adam", "lars": "lamb", "nvlamb": "lamb",
}  # fmt: skip
# TensorRT fuses like a graph compiler; the corpus counts it as one too.
_COMPILERS = {"": "eager", "graph": "eager", "none": "eager", "compile": "torch_compile", "inductor": "torch_compile",
              "tensorrt": "xla"}  # fmt: skip

_HOST_COPY = re.compile(r"copied h2d|h2d copy|host[- ]to[- ]device|from host|cpu-resident|includes? h2d")
_DATA_LOADER = re.compile(r"real data|data=(?!syn)|\bdali\b|includes data loading|data[- ]loader[- ]bound")
_ALL_HALF = re.compile(
    r"apex[_ -]?o2|\bopt[_ -]?level[ =:_-]*o2|\bo2\b|use_fp16|pure_fp16|fp32 master weights|fp32 variables"
)
_FUSED_ATTENTION = re.compile(r"flash[- ]?attention|flash[- ]?attn|fused attention")
_CHECKPOINTING = re.compile(
    r"(?<!no )(?<!without )(?:activation|gradient) checkpointing(?! *[:=]? *(?:false|off|none|selective))"
)
_DATA_PARALLEL = re.compile(r"\bnn\.dataparallel\b|\bdataparallel\b")


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One readable row: the model, the job and what was measured."""

    onnx: str
    job: JobSpec
    measured_ms: float
    dims: Mapping[str, int]
    notes: tuple[str, ...]  # how unclear cells were read


def run_of_row(row: Mapping[str, str], *, devices: Sequence[DeviceSpec] = ()) -> MeasuredRun:
    """The run that a CSV row describes; raises GnnpredError that says which cell is wrong.

    ``devices`` are GPUs of the user's own (``--device-file``), found by their name before the listed ones.
    """
    note = row.get("note", "").lower()
    notes: list[str] = []
    phase = _phase_of(row.get("phase", ""))
    gpu = _filled(row, "gpu")
    device = next((own for own in devices if own.name.lower() == gpu.lower()), None) or find_device(gpu)
    framework = row.get("framework", "").strip().lower() or "pytorch"
    version = row.get("framework_version", "").strip().rstrip("?")
    precision, tf32_matmul = _precision_of(row, note, framework, version, notes)
    is_all_half = bool(_ALL_HALF.search(note))
    if is_all_half and precision is Precision.FP16:
        precision = Precision.MIXED  # fp32 master weights: not a purely half model
    nodes = _whole_number(row, "nodes", default=1)
    gpus = _evenly_spread(_whole_number(row, "gpus", default=1), nodes, notes)
    interconnect, inter_node = _fabric_of(row.get("interconnect", "")) if gpus > 1 else ("", "")
    job = JobSpec(
        device=device,
        precision=precision,
        batch_size=_batch_size_of(row, notes),
        phase=phase,
        optimizer=_optimizer_of(row.get("optimizer", ""), phase, notes),
        memory_format=_memory_format_of(row, framework, note),
        compiler=_compiler_of(row.get("compiled", "")),
        framework=framework,
        framework_version=version,
        host_os=host_os_of(row.get("os") or ""),
        activation_rule=ActivationRule.ALL_HALF if is_all_half else ActivationRule.AUTOCAST,
        tf32_matmul=tf32_matmul,
        attention=_attention_of(row.get("attention") or "", note),
        activation_checkpointing=_checkpointing_of(row.get("activation_checkpointing") or "", note),
        host_copy=_yes_or_no(row, "host_copy") or bool(_HOST_COPY.search(note)),
        data_loader=bool(_DATA_LOADER.search(note)),
        gpus=gpus,
        nodes=nodes,
        strategy=_strategy_of(row.get("strategy") or "", note if gpus > 1 else ""),
        **_layout_of(row),
        interconnect=interconnect,
        inter_node=inter_node,
    )
    return MeasuredRun(
        onnx=_filled(row, "onnx"),
        job=job,
        measured_ms=_measured_ms(row),
        dims=_dims_of(row),
        notes=tuple(notes),
    )


def _evenly_spread(gpus: int, nodes: int, notes: list[str]) -> int:
    """A job has as many GPUs on every node; a measured run need not: the slowest, fullest node sets the pace."""
    if gpus < nodes:
        raise GnnpredError(f"{gpus} gpus cannot be spread over {nodes} nodes")
    if gpus % nodes:
        notes.append("GPUs spread unevenly over nodes: predicted with every node as full as the fullest")
    return -(-gpus // nodes) * nodes


def _filled(row: Mapping[str, str], column: str) -> str:
    value = (row.get(column) or "").strip()
    if not value:
        raise GnnpredError(f"{column} is empty")
    return value


def _whole_number(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise GnnpredError(f"{column} {text!r} is not a number") from None
    if not (value >= 1 and value == int(min(value, 2**53))):
        raise GnnpredError(f"{column} must be a whole number from 1 up, got {text!r}")
    return int(value)


def _batch_size_of(row: Mapping[str, str], notes: list[str]) -> int:
    """A global batch that does not divide leaves a fraction per GPU: rounded, and said."""
    text = _filled(row, "batch_per_gpu")
    try:
        value = float(text)
    except ValueError:
        raise GnnpredError(f"batch_per_gpu {text!r} is not a number") from None
    if not 1 <= value < 2**53:
        raise GnnpredError(f"batch_per_gpu must be at least 1, got {text!r}")
    if value != round(value):
        notes.append("fractional batch per GPU rounded")
    return round(value)


def _measured_ms(row: Mapping[str, str]) -> float:
    text = _filled(row, "step_time_ms")
    try:
        value = float(text)
    except ValueError:
        raise GnnpredError(f"step_time_ms {text!r} is not a number") from None
    if not 0 < value < 1e12:
        raise GnnpredError(f"step_time_ms must be above 0, got {text!r}")
    return value


def _phase_of(text: str) -> Phase:
    name = text.strip().lower().replace("-", "_") or "train"
    try:
        return Phase({"infer": "inference", "training": "train", "fwd_bwd": "forward_backward"}.get(name, name))
    except ValueError:
        raise GnnpredError(f"phase {text!r} is not one of train, forward_backward, infer") from None


def _precision_of(
    row: Mapping[str, str], note: str, framework: str, version: str, notes: list[str]
) -> tuple[Precision, bool]:
    text = _filled(row, "precision").lower()
    if text in ("fp8", "nvfp4", "mxfp8", "int8"):
        raise GnnpredError(f"precision {text!r} is not modelled")
    if text == "fp32?":  # unknown whether TF32 was allowed: what the framework does by default
        precision = Precision.TF32 if tf32_was_default(framework, version) else Precision.FP32
        notes.append(f"precision fp32? read as {precision}, the framework's default")
    else:
        precision = Precision.parse(text)
    tf32_matmul = precision is not Precision.TF32 or not only_convolutions_use_tf32(framework, version, note)
    return precision, tf32_matmul


def _memory_format_of(row: Mapping[str, str], framework: str, note: str) -> str:
    text = (row.get("memory_format") or "").strip().lower()
    if framework == "tensorflow" and "keras" in note:
        return "nchw"  # Keras lays images out as NHWC, TensorFlow transposes around its cuDNN kernels
    return text or ("nhwc" if framework == "tensorflow" else "nchw")


def _optimizer_of(text: str, phase: Phase, notes: list[str]) -> str:
    if phase is not Phase.TRAIN:
        return "none"
    name = re.sub(r"[^a-z]", "", text.lower())
    if name in OPTIMIZERS:
        return name
    if name not in _SIMILAR_OPTIMIZER:
        notes.append(f"optimizer {text!r} is unknown: counted as sgd")
    elif name:
        notes.append(f"optimizer {text} counted as {_SIMILAR_OPTIMIZER[name]}, which keeps as much state")
    return _SIMILAR_OPTIMIZER.get(name, "sgd")


def _compiler_of(text: str) -> str:
    name = text.strip().lower()
    name = _COMPILERS.get(name, name)
    if name not in COMPILERS:
        raise GnnpredError(f"compiled {text!r} is not modelled (known: {', '.join(COMPILERS)})")
    return name


def _strategy_of(text: str, note: str) -> str:
    name = text.strip().lower() or ("dp" if _DATA_PARALLEL.search(note) else STRATEGIES[0])
    if name not in STRATEGIES:
        raise GnnpredError(f"strategy {text!r} is not modelled (known: {', '.join(STRATEGIES)})")
    return name


# Our own additions to the schema, under the names of the command line too.
_LAYOUT_COLUMNS = {
    "tensor_parallel": "tp", "pipeline_parallel": "pp", "expert_parallel": "ep", "interleave": "", "microbatches": "",
    "shard_group": "", "grad_accum": "",
}  # fmt: skip


def _layout_of(row: Mapping[str, str]) -> dict[str, Any]:
    """The cells that say how the GPUs share the work; empty ones keep the job's default."""
    found: dict[str, Any] = {}
    for name, short in _LAYOUT_COLUMNS.items():
        for column in filter(None, (name, short)):
            if (row.get(column) or "").strip():
                found[name] = _whole_number(row, column)
    if (answer := _yes_or_no(row, "sequence_parallel")) is not None:
        found["sequence_parallel"] = answer
    return found


def _yes_or_no(row: Mapping[str, str], column: str) -> bool | None:
    """None where the cell is empty."""
    text = (row.get(column) or "").strip().lower()
    if text and text not in _YES_NO:
        raise GnnpredError(f"{column} {text!r} is not one of {', '.join(_YES_NO)}")
    return _YES_NO.get(text)


_YES_NO = {"yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}


def _attention_of(text: str, note: str) -> str:
    name = text.strip().lower()
    if not name:
        return "fused" if _FUSED_ATTENTION.search(note) else "eager" if "eager attention" in note else "auto"
    if name not in ATTENTIONS:
        raise GnnpredError(f"attention {text!r} is not modelled (known: {', '.join(ATTENTIONS)})")
    return name


def _checkpointing_of(text: str, note: str) -> str:
    name = text.strip().lower() or ("full" if _CHECKPOINTING.search(note) else "none")
    if name not in CHECKPOINTINGS:
        raise GnnpredError(f"activation_checkpointing {text!r} is not modelled (known: {', '.join(CHECKPOINTINGS)})")
    return name


def _fabric_of(text: str) -> tuple[str, str]:
    from gnnpred.communication.fabrics import names_from_text

    return names_from_text(text) if text.strip() else ("", "")


def _dims_of(row: Mapping[str, str]) -> dict[str, int]:
    """``dims`` = ``sequence=128;frames=300``: symbolic dimensions of the file, our own addition to the schema."""
    dims: dict[str, int] = {}
    for text in filter(None, (part.strip() for part in (row.get("dims") or "").split(";"))):
        name, equals, value = text.rpartition("=")
        if not equals or not value.strip().isdigit() or not int(value):
            raise UsageError(f"dims {text!r}: write NAME=VALUE;NAME=VALUE with whole numbers")
        dims[name.strip()] = int(value)
    return dims
