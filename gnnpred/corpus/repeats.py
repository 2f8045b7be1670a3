"""Repeats of one configuration: all are kept, the one of median time represents them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from gnnpred.corpus.store import LAYOUT_COLUMNS, MeasurementRow


def with_unique_ids(rows: list[MeasurementRow]) -> list[MeasurementRow]:
    """The rows with a number behind every id that came before."""
    seen: Counter[str] = Counter()
    unique = []
    for row in rows:
        seen[row.row_id] += 1
        unique.append(row if seen[row.row_id] == 1 else replace(row, row_id=f"{row.row_id}-{seen[row.row_id]}"))
    return unique


def repeat_key(row: MeasurementRow) -> tuple:
    """What repeats share: their source, and all that was run."""
    return (
        row.source_id.split("-")[0], row.graph_id, row.phase, row.framework, row.framework_version, row.cuda,
        row.device, row.precision, row.activation_rule, row.tf32_matmul, row.memory_format, row.compiler,
        row.batch_size, row.optimizer, row.grad_accum, row.host_copy, row.data_loader, row.input_gradient,
        row.os, row.gpus, row.nodes, row.interconnect, row.strategy, row.checkpointing,
        row.attention, *(getattr(row, name) for name in LAYOUT_COLUMNS),
    )  # fmt: skip


def mark_repeats(rows: list[MeasurementRow]) -> list[MeasurementRow]:
    """Point repeats of one configuration at the row with the median time, the only one used for training."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    for row_idx, row in enumerate(rows):
        if row.used_for_training:
            groups[repeat_key(row)].append(row_idx)
    marked = list(rows)
    for row_idxs in groups.values():
        ordered = sorted(row_idxs, key=lambda i: (rows[i].step_time_ms, rows[i].row_id))
        representative = ordered[(len(ordered) - 1) // 2]
        for row_idx in row_idxs:
            if row_idx != representative:
                marked[row_idx] = replace(
                    rows[row_idx], duplicate_of=rows[representative].row_id, used_for_training=False
                )
    return marked
