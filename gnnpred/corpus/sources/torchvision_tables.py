"""torchvision models timed by the ryu family of benchmarks: forward, loss and backward, no optimizer step.

Whole models in one type (``.half()``, ``.double()``), batch 12 or near it. From 2020 on the batch is
copied from pageable memory inside the timed region while eight loader workers compete for the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.corpus.sources.record import Interpretation, image_size_of, interpret_common

PREFIXES = ("ryu-",)


def interpret(record: Mapping[str, str], shared: Path) -> Interpretation | str:
    """One ryu row."""
    common = interpret_common(record)
    if isinstance(common, str):
        return common
    unused = ""
    if record["gpu"] == "RX5700" and record["precision"] == "fp16":
        unused = "fp16 is broken on this card (four times slower than fp32)"
    return common.replace(
        key=ModelKey(f"torchvision:{record['model']}", image_size=image_size_of(record["input"]) or (224, 224)),
        host_copy="copied H2D" in record["note"],
        optimizer="none",
        strategy="dp",
        unused_reason=unused,
    )
