"""Measurements that something speaks against. They stay in the corpus, marked, and networks do not learn from them
unless the user says so.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gnnpred.additions.rows import CollectedRow
from gnnpred.corpus.store import MeasurementRow
from gnnpred.errors import GnnpredError
from gnnpred.predictor import Predictor

# What can speak against a row, by the names that --accept-outliers takes.
UNSTEADY, THROTTLED, PREDICTION, SIBLINGS = KINDS = ("unsteady", "throttled", "prediction", "siblings")
# Beyond this multiple of the 90 % interval (in log): were errors normally distributed, one row in 1,000.
INTERVAL_MULTIPLE = 2.0
# Rows of one graph, GPU and precision are off by about one common factor; one that is off by twice as much is not.
SIBLING_FACTOR = 2.0
MIN_SIBLINGS = 3
# What collect warns of that says nothing about the step's time.
_HARMLESS_WARNINGS = ("operators not timed", "the search for the largest batch")
MIN_ROWS_OF_OFFSET = 3  # of a device that the checkpoint has not seen


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One thing that speaks against a row."""

    kind: str  # one of KINDS
    detail: str
    expected_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a look at new rows found."""

    marks: Mapping[str, list[Mark]]  # row_id -> what speaks against it; rows without a mark are left out
    num_not_predicted: int = 0
    # device that the checkpoint has not seen -> median of measured / predicted, which is taken off its rows first
    factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Judged:
    collected: CollectedRow
    predicted_ms: float
    log_bounds: tuple[float, float]  # 90 % interval of log(measured / predicted)
    is_known_device: bool

    @property
    def row(self) -> MeasurementRow:
        return self.collected.row

    @property
    def log_ratio(self) -> float:
        return math.log(self.row.step_time_ms / self.predicted_ms)


def marks_of(
    rows: Sequence[CollectedRow],
    predictor: Predictor,
    *,
    on_row: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """What collect's own warnings, predictions and the other rows say against each of ``rows``."""
    marks: dict[str, list[Mark]] = defaultdict(list)
    for each in rows:
        for warning in filter(None, each.warning.split("; ")):
            if not warning.startswith(_HARMLESS_WARNINGS):
                kind = THROTTLED if warning.startswith("throttled") else UNSTEADY
                marks[each.row.row_id].append(Mark(kind=kind, detail=warning))
    with_graph = [each for each in rows if each.onnx]
    judged = []
    for done, each in enumerate(with_graph):
        on_row(done, len(with_graph))
        try:
            prediction = predictor.predict(each.onnx, each.run.job, dims=each.run.dims)
        except GnnpredError:
            continue  # counted: what cannot be predicted cannot be compared
        if prediction.step_time_ms > 0 and prediction.interval_90_ms[0] > 0:
            low, high = (math.log(bound / prediction.step_time_ms) for bound in prediction.interval_90_ms)
            judged.append(
                _Judged(
                    collected=each,
                    predicted_ms=prediction.step_time_ms,
                    log_bounds=(low, high),
                    is_known_device=each.run.job.device.name in predictor.checkpoint.card.devices,
                )
            )
    on_row(len(with_graph), len(with_graph))
    offsets = _offsets_of(judged)
    for row_id, mark in (*_far_from_prediction(judged, offsets), *_far_from_siblings(judged)):
        marks[row_id].append(mark)
    return Comparison(
        marks=dict(marks),
        num_not_predicted=len(with_graph) - len(judged),
        factors={device: math.exp(offset) for device, offset in offsets.items()},
    )


def _offsets_of(judged: Sequence[_Judged]) -> dict[str, float]:
    """Median of log(measured / predicted) of each device that training has not seen: it is off as a whole."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for each in judged:
        if not each.is_known_device:
            ratios[each.row.device].append(each.log_ratio)
    return {device: statistics.median(values) for device, values in ratios.items() if len(values) >= MIN_ROWS_OF_OFFSET}


def _far_from_prediction(judged: Sequence[_Judged], offsets: Mapping[str, float]) -> list[tuple[str, Mark]]:
    """Far outside the 90 % interval once the offset of the device is taken off."""
    found = []
    for each in judged:
        offset = offsets.get(each.row.device, 0.0)
        low, high = each.log_bounds
        apart = each.log_ratio - offset
        if not INTERVAL_MULTIPLE * low <= apart <= INTERVAL_MULTIPLE * high:
            expected_ms = each.predicted_ms * math.exp(offset)
            beside = " once the whole collection's factor is taken off" if offset else ""
            found.append(
                (
                    each.row.row_id,
                    Mark(
                        kind=PREDICTION,
                        detail=f"{_factor(apart)} than predicted{beside}; the 90 % interval is {math.exp(low):.2f} to "
                        f"{math.exp(high):.2f} times the prediction",
                        expected_ms=expected_ms,
                    ),
                )
            )
    return found


def _far_from_siblings(judged: Sequence[_Judged]) -> list[tuple[str, Mark]]:
    """Off by another factor than the other rows of its graph, device, precision and number of GPUs."""
    groups: dict[tuple, list[_Judged]] = defaultdict(list)
    for each in judged:
        row = each.row
        groups[row.graph_id, row.device, row.precision, row.gpus, row.nodes].append(each)
    found = []
    for group in groups.values():
        if len(group) <= MIN_SIBLINGS:
            continue
        for i, each in enumerate(group):
            usual = statistics.median(other.log_ratio for j, other in enumerate(group) if j != i)
            apart = each.log_ratio - usual
            if abs(apart) > math.log(SIBLING_FACTOR):
                found.append(
                    (
                        each.row.row_id,
                        Mark(
                            kind=SIBLINGS,
                            detail=f"{_factor(apart)} than {len(group) - 1} rows of its model, device and precision "
                            "lead to expect",
                            expected_ms=each.predicted_ms * math.exp(usual),
                        ),
                    )
                )
    return found


def _factor(log_ratio: float) -> str:
    return f"{math.exp(abs(log_ratio)):.1f} times {'slower' if log_ratio > 0 else 'faster'}"
