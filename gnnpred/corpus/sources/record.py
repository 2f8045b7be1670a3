"""The raw tables' common columns, and what a source module makes of one record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.job import ActivationRule, Phase, Precision
from gnnpred.software import only_convolutions_use_tf32, tf32_was_default

_PHASES = {"train": Phase.TRAIN, "forward_backward": Phase.FORWARD_BACKWARD, "infer": Phase.INFERENCE}
_PRECISIONS = {
    "fp64": Precision.FP64, "fp32": Precision.FP32, "tf32": Precision.TF32, "fp16": Precision.FP16,
    "bf16": Precision.BF16, "amp_fp16": Precision.MIXED, "amp_bf16": Precision.MIXED_BF16,
}  # fmt: skip
_COMPILERS = {"": "eager", "graph": "eager"}


@dataclass(frozen=True, kw_only=True)
class Interpretation:
    """A record in our vocabulary, with the model to rebuild (``None`` where ``excluded_reason`` says why)."""

    key: ModelKey | None
    family: str
    phase: Phase
    precision: Precision
    activation_rule: ActivationRule
    tf32_matmul: bool
    memory_format: str
    compiler: str
    batch_size: int
    optimizer: str
    step_time_ms: float
    host_copy: bool = False
    data_loader: bool = False
    input_gradient: bool = False
    os: str = ""
    strategy: str = "ddp"  # how several GPUs share the work: ddp | dp | fsdp
    checkpointing: str = ""  # "" none | full
    attention: str = ""  # "" as the framework's version decides | fused | eager
    architecture_key: ModelKey | None = None  # whose architecture the row counts as, where not its own model's
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    interleave: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    grad_accum: int | None = None  # where the row stands for something else than the record's whole step
    excluded_reason: str = ""
    unused_reason: str = ""  # kept with its graph, but not for training
    notes: tuple[str, ...] = field(default=())

    def replace(self, **changes: Any) -> Interpretation:
        return replace(self, **changes)


def interpret_common(record: Mapping[str, str]) -> Interpretation | str:
    """What the shared columns say, without a model yet; a string says why the record is unusable."""
    note = record["note"]
    precision_text = record["precision"]
    notes: list[str] = []
    if precision_text == "fp32?":
        tf32 = tf32_was_default(record["framework"], record["framework_version"])
        precision = Precision.TF32 if tf32 else Precision.FP32
        notes.append("tf32_assumed" if tf32 else "fp32_assumed")
    elif precision_text in _PRECISIONS:
        precision = _PRECISIONS[precision_text]
    else:
        return f"precision {precision_text} is outside this corpus"
    try:
        batch_size = float(record["batch_per_gpu"])
        step_time_ms = float(record["step_time_ms"])
    except ValueError:
        return "batch size or step time is missing"
    if batch_size != int(batch_size) or batch_size < 1 or not 0 < step_time_ms < 1e7:
        return "batch size or step time is not usable"
    phase = _PHASES[record["phase"]]
    optimizer = record["optimizer"] or ("sgd" if phase is Phase.TRAIN else "none")
    all_half = any(mark in note for mark in ("apex_O2", "use_fp16", "pure_fp16", "fp32 master weights"))
    if all_half and precision is Precision.FP16:
        precision = Precision.MIXED  # fp32 master weights: not a purely half model
    if "gpu_variant_assumed" in note:
        notes.append("gpu_variant_assumed")
    return Interpretation(
        key=None,
        family="",
        phase=phase,
        precision=precision,
        activation_rule=ActivationRule.ALL_HALF if all_half else ActivationRule.AUTOCAST,
        tf32_matmul=not (
            precision is Precision.TF32
            and only_convolutions_use_tf32(record["framework"], record["framework_version"], note)
        ),
        memory_format=record["memory_format"] or ("nhwc" if record["framework"] == "tensorflow" else "nchw"),
        compiler=_COMPILERS.get(record["compiled"], record["compiled"]),
        batch_size=int(batch_size),
        optimizer=optimizer,
        step_time_ms=step_time_ms,
        os=_os_of(note),
        attention="fused" if "flash attention" in note else "eager" if "eager attention" in note else "",
        notes=tuple(notes),
    )


def _os_of(note: str) -> str:
    match = re.search(r"(?:^|;)os=([^;]*)", note)
    if match:
        return match.group(1)
    return "windows" if re.search(r"\bwin(dows)?\s?1?[01]\b", note, re.IGNORECASE) else ""


def image_size_of(text: str) -> tuple[int, int] | None:
    """(height, width) of ``3x224x224``; None for anything else."""
    match = re.fullmatch(r"\d+x(\d+)x(\d+)", text.strip())
    return (int(match.group(1)), int(match.group(2))) if match else None


def seq_len_of(text: str) -> int | None:
    """Tokens of ``seq=384``."""
    match = re.search(r"seq=(\d+)", text)
    return int(match.group(1)) if match else None
