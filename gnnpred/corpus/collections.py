"""What a corpus keeps of collections that ``gnnpred dataset add`` merged into it: one file each, and their rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnpred.corpus.store import MEASUREMENTS_FILE, MeasurementRow, load_graphs, load_multi_gpu_rows, load_rows

COLLECTIONS_FOLDER = "collections"  # ID.json: recipe, manifests, counts, what was marked
SOURCE_PREFIX = "collect-"  # of source_id, before the collection's name


def is_collected(row: MeasurementRow) -> bool:
    """Whether the row was measured by ``gnnpred collect``, not read from a published table."""
    return row.source_id.startswith(SOURCE_PREFIX)


@dataclass(frozen=True, kw_only=True)
class CollectedRows:
    """The part of a corpus that comes from collections: its rows, and their graphs as they are stored."""

    rows: tuple[MeasurementRow, ...] = ()
    multi_gpu_rows: tuple[MeasurementRow, ...] = ()
    graphs: tuple[dict[str, Any], ...] = ()


def collected_rows(folder: Path) -> CollectedRows:
    """Of a dataset folder; nothing where there is none yet. Raises GnnpredError for one that cannot be read."""
    if not (folder / MEASUREMENTS_FILE).is_file():
        return CollectedRows()
    rows = tuple(row for row in load_rows(folder) if is_collected(row))
    multi_gpu_rows = tuple(row for row in load_multi_gpu_rows(folder) if is_collected(row))
    graph_ids = sorted({row.graph_id for row in (*rows, *multi_gpu_rows) if row.graph_id})
    graphs = load_graphs(folder) if graph_ids else None
    return CollectedRows(
        rows=rows,
        multi_gpu_rows=multi_gpu_rows,
        graphs=tuple(graphs.encoded(graph_id) for graph_id in graph_ids) if graphs else (),
    )
