"""How far repeats of one configuration differ: what no predictor can know."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnpred.corpus.store import MeasurementRow


@dataclass(frozen=True)
class RepeatNoise:
    """Spread (slowest / fastest - 1, in per cent) of measurements that should agree."""

    spread_pct_by_row: dict[str, float]  # row_id of the row in use -> spread of its source's own repeats
    other_source_ratio: dict[str, float]  # row_id -> this time / median of the same configuration elsewhere

    def spreads_by_source(self, rows: Sequence[MeasurementRow]) -> dict[str, list[float]]:
        """First part of the source id -> spreads of its repeated configurations."""
        spreads: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            if row.row_id in self.spread_pct_by_row:
                spreads[row.source_id.split("-")[0]].append(self.spread_pct_by_row[row.row_id])
        return dict(spreads)


def repeat_noise(all_rows: Sequence[MeasurementRow], used: Sequence[MeasurementRow]) -> RepeatNoise:
    """Repeats within a source (``duplicate_of``), and the rows in use that another source measured as well."""
    times: dict[str, list[float]] = defaultdict(list)
    for row in all_rows:
        if row.duplicate_of and row.duplicate_of != row.row_id and row.phase != "inference":
            times[row.duplicate_of].append(row.step_time_ms)
    by_row = {
        row.row_id: (max(repeats) / min(repeats) - 1) * 100
        for row in used
        if row.row_id in times and (repeats := [row.step_time_ms, *times[row.row_id]])
    }
    same: dict[tuple, list[MeasurementRow]] = defaultdict(list)
    for row in used:
        if row.phase != "inference":
            same[row.architecture, row.device, row.precision, row.batch_size, row.input, row.phase].append(row)
    ratios = {}
    for group in same.values():
        for row in group:
            own = row.source_id.split("-")[0]
            elsewhere = [other.step_time_ms for other in group if other.source_id.split("-")[0] != own]
            if elsewhere:
                ratios[row.row_id] = row.step_time_ms / float(np.median(elsewhere))
    return RepeatNoise(by_row, ratios)


def noise_table(noise: RepeatNoise, used: Sequence[MeasurementRow]) -> dict[str, Any]:
    """Measured floor: spread of repeats by source, and disagreement between sources."""
    table: dict[str, Any] = {
        "repeats_by_source": {
            source: {
                "n": len(spreads), "median_pct": float(np.median(spreads)), "p90_pct": float(np.percentile(spreads, 90))
            }
            for source, spreads in sorted(noise.spreads_by_source(used).items(), key=lambda item: -len(item[1]))
        }
    }  # fmt: skip
    if noise.other_source_ratio:
        apart = np.array([max(ratio, 1 / ratio) - 1 for ratio in noise.other_source_ratio.values()]) * 100
        table["other_source"] = {
            "n": len(apart), "median_pct": float(np.median(apart)), "p90_pct": float(np.percentile(apart, 90))
        }  # fmt: skip
    return table
