"""What an addition found and did: for people and for JSON."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gnnpred.additions.outliers import Mark
from gnnpred.corpus.collections import is_collected
from gnnpred.corpus.repeats import repeat_key
from gnnpred.corpus.store import MeasurementRow


@dataclass(frozen=True, kw_only=True)
class MarkedRow:
    """A row that something speaks against."""

    row_id: str
    configuration: str
    step_time_ms: float
    marks: tuple[Mark, ...]
    is_accepted: bool  # learned from all the same


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Rows of one configuration and device; the one of median time represents them."""

    configuration: str
    is_used: bool  # False: something speaks against every one of them
    times: tuple[tuple[str, float], ...]  # (collection, ms), the one in use, if any, first


@dataclass(frozen=True, kw_only=True)
class MeasuredElsewhere:
    """A row that published tables have too, in other software perhaps: both are kept."""

    configuration: str
    step_time_ms: float
    other_ms: float  # median
    num_others: int
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AddReport:
    """What a corpus holds of a collection after a call. Counts are of configurations that were measured."""

    collection: str
    datasets: Path
    recipe: str
    device: str
    is_dry_run: bool
    is_changed: bool  # whether anything was, or would be, written
    num_rows: int
    num_new: int
    num_used: int  # that networks learn from
    num_multi_gpu: int
    failed: dict[str, int]  # by status: kept in the collection's file alone
    without_graph: dict[str, int]  # by reason
    num_not_predicted: int
    checkpoint: str  # what rows were compared with; "" where none was new
    marked: tuple[MarkedRow, ...]
    repeats: tuple[Repeat, ...]
    elsewhere: tuple[MeasuredElsewhere, ...]
    num_graphs: int
    num_new_graphs: int
    new_architectures: dict[str, int]  # model -> its fold
    new_families: dict[str, int]
    num_operators: int
    num_short_operators: int
    notes: tuple[str, ...]
    files: tuple[str, ...]  # that were, or would be, written

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "datasets": str(self.datasets)}


def configuration_text(row: MeasurementRow) -> str:
    """One line that says what was run."""
    parts = [row.model, row.precision, f"batch {row.batch_size}", row.input, row.phase]
    parts += [row.optimizer] if row.optimizer != "none" else []
    parts += [row.memory_format] if row.memory_format != "nchw" else []
    parts += [row.compiler] if row.compiler != "eager" else []
    parts += [f"{row.gpus} GPUs on {row.nodes} nodes, {row.strategy}"] if row.gpus > 1 else []
    return " ".join(filter(None, map(str, parts)))


def repeats_of(own_ids: frozenset[str], rows: Iterable[MeasurementRow]) -> tuple[Repeat, ...]:
    """Every configuration of ``own_ids`` that the collections among ``rows`` hold more than once."""
    groups: dict[tuple, list[MeasurementRow]] = defaultdict(list)
    for row in rows:
        if row.graph_id and is_collected(row):
            groups[repeat_key(row)].append(row)
    found = []
    for group in groups.values():
        if len(group) > 1 and any(row.row_id in own_ids for row in group):
            ordered = sorted(group, key=lambda row: (not row.used_for_training, row.step_time_ms))
            found.append(
                Repeat(
                    configuration=configuration_text(group[0]),
                    is_used=ordered[0].used_for_training,
                    times=tuple((row.source_id, row.step_time_ms) for row in ordered),
                )
            )
    return tuple(found)


def measured_elsewhere(own: Sequence[MeasurementRow], rows: Iterable[MeasurementRow]) -> tuple[MeasuredElsewhere, ...]:
    """Rows of ``own`` whose network, device, precision, batch, input and phase a published table has too."""

    def key(row: MeasurementRow) -> tuple:
        return (
            row.architecture, row.device, row.precision, row.batch_size, row.input, row.phase, row.gpus, row.nodes,
            row.strategy, row.compiler, row.checkpointing,
        )  # fmt: skip

    published: dict[tuple, list[MeasurementRow]] = defaultdict(list)
    for row in rows:
        if row.graph_id and not is_collected(row) and not row.derived_from:
            published[key(row)].append(row)
    found = []
    for row in own:
        others = published.get(key(row), []) if row.graph_id else []
        if others:
            found.append(
                MeasuredElsewhere(
                    configuration=configuration_text(row),
                    step_time_ms=row.step_time_ms,
                    other_ms=median(other.step_time_ms for other in others),
                    num_others=len(others),
                    sources=tuple(name for name, _ in Counter(other.source_id for other in others).most_common(3)),
                )
            )
    return tuple(found)
