"""Score the predictor on measured runs: errors by GPU and precision, and a prediction beside every row."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnpred.calibration import CalibrationRun
from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done
from gnnpred.hardware import DeviceSpec
from gnnpred.metrics import ErrorSummary, summarise_errors
from gnnpred.predictor import Predictor
from gnnpred.runs import REQUIRED_COLUMNS, MeasuredRun, run_of_row

# Columns that a prediction adds to a row, in order.
ADDED_COLUMNS = ("predicted_ms", "predicted_low_ms", "predicted_high_ms", "error_pct", "status")

csv.field_size_limit(1 << 20)


@dataclass(frozen=True, kw_only=True)
class ScoredRow:
    """One row with its prediction, or the reason why there is none."""

    line: int  # in the file; the header is line 1
    row: Mapping[str, str]  # as read
    run: MeasuredRun | None
    predicted_ms: float | None
    interval_ms: tuple[float, float] | None
    problem: str  # "" where predicted
    fixed_ms: float = 0.0  # part of predicted_ms that is communication: no property of the GPU's compute
    num_parameters: int = 0
    traits: CalibrationRun | None = None

    @property
    def error_pct(self) -> float | None:
        if self.predicted_ms is None or self.run is None:
            return None
        return (self.predicted_ms / self.run.measured_ms - 1) * 100


@dataclass(frozen=True, kw_only=True)
class ScoreReport:
    """All rows and their error summaries; rows without a prediction are counted, not dropped."""

    columns: tuple[str, ...]  # of the file, in its order
    rows: tuple[ScoredRow, ...]
    overall: ErrorSummary | None
    groups: tuple[tuple[dict[str, str], ErrorSummary], ...]  # ({"gpu": ..., "precision": ...}, summary)
    interval_coverage: float | None  # share of measurements inside the 90 % interval
    checkpoint: str

    @property
    def problems(self) -> dict[str, int]:
        """Reason -> number of rows, the most frequent first."""
        return dict(Counter(row.problem for row in self.rows if row.problem).most_common())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "overall": self.overall.as_dict() if self.overall else {"n": 0},
            "groups": [{**key, **summary.as_dict()} for key, summary in self.groups],
            "interval_90_coverage": self.interval_coverage,
            "num_rows": len(self.rows),
            "num_unscored": sum(1 for row in self.rows if row.problem),
            "unscored": [{"line": row.line, "reason": row.problem} for row in self.rows if row.problem],
            "reading_notes": _reading_notes(self.rows),
            "checkpoint": self.checkpoint,
        }


def score_runs(
    path: str | Path, *, predictor: Predictor | None = None, devices: Sequence[DeviceSpec] = ()
) -> ScoreReport:
    """Predict every row of a runs CSV and compare. Raises GnnpredError for a file that is not one.

    ``onnx`` paths are relative to the CSV; ``devices`` are GPUs that the list lacks. A row that cannot be read or
    predicted keeps its reason.
    """
    path = Path(path)
    columns, rows = read_runs(path)
    predictor = predictor or Predictor()
    # by model, so that one graph at a time is held however the file is sorted
    order = sorted(
        range(len(rows)), key=lambda i: (rows[i][1].get("onnx") or "", rows[i][1].get("batch_per_gpu") or "")
    )
    scored: list[ScoredRow | None] = [None] * len(rows)
    for i in order:
        line, row = rows[i]
        scored[i] = _score_row(line, row, path.parent, predictor, devices)
    done = tuple(row for row in scored if row is not None)
    predicted = [row for row in done if not row.problem]
    inside = [row.interval_ms[0] <= row.run.measured_ms <= row.interval_ms[1] for row in predicted]
    return ScoreReport(
        columns=columns,
        rows=done,
        overall=_summary(predicted) if predicted else None,
        groups=tuple(_groups(predicted)),
        interval_coverage=float(np.mean(inside)) if inside else None,
        checkpoint=predictor.checkpoint.card.name,
    )


def read_runs(path: Path) -> tuple[tuple[str, ...], list[tuple[int, dict[str, str]]]]:
    """Column names and (line, row) of a runs CSV; raises GnnpredError for a file that is not one."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey="")
            columns = tuple(reader.fieldnames or ())
            if missing := [name for name in REQUIRED_COLUMNS if name not in columns]:
                raise GnnpredError(f"{path}: missing column{'s' * (len(missing) > 1)} {', '.join(missing)}")
            rows = [(reader.line_num, {k: v or "" for k, v in row.items() if k}) for row in reader]
    except OSError as error:
        raise GnnpredError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise GnnpredError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if not rows:
        raise GnnpredError(f"{path} holds no rows below its header")
    return columns, rows


def _score_row(
    line: int, row: dict[str, str], folder: Path, predictor: Predictor, devices: Sequence[DeviceSpec]
) -> ScoredRow:
    try:
        run = run_of_row(row, devices=devices)
        prediction = predictor.predict(folder / run.onnx, run.job, dims=run.dims)
    except GnnpredError as error:
        return ScoredRow(line=line, row=row, run=None, predicted_ms=None, interval_ms=None, problem=str(error))
    return ScoredRow(
        line=line,
        row=row,
        run=run,
        predicted_ms=prediction.step_time_ms,
        interval_ms=prediction.interval_90_ms,
        problem="",
        fixed_ms=prediction.breakdown_ms["communication"],
        num_parameters=prediction.num_parameters,
        traits=prediction.traits,
    )


def _summary(rows: Sequence[ScoredRow]) -> ErrorSummary:
    return summarise_errors(
        np.array([row.predicted_ms for row in rows]),
        np.array([row.run.measured_ms for row in rows]),
    )


def _groups(rows: Sequence[ScoredRow]) -> Iterator[tuple[dict[str, str], ErrorSummary]]:
    members: dict[tuple[str, str], list[ScoredRow]] = {}
    for row in rows:
        job = row.run.job
        members.setdefault((job.device.name, str(job.precision)), []).append(row)
    for (gpu, precision), group in sorted(members.items()):
        yield {"gpu": gpu, "precision": precision}, _summary(group)


def _reading_notes(rows: Sequence[ScoredRow]) -> dict[str, int]:
    return dict(Counter(note for row in rows if row.run for note in row.run.notes).most_common())


def write_predictions(report: ScoreReport, path: str | Path) -> None:
    """The input with predicted_ms, its interval, the error and a status beside every row; order kept."""
    columns = [*report.columns, *(name for name in ADDED_COLUMNS if name not in report.columns)]
    try:
        with replaced_when_done(Path(path)) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**row.row, **_added(row)} for row in report.rows)
    except OSError as error:
        raise GnnpredError(f"cannot write {path}: {error.strerror or error}") from error


def _added(row: ScoredRow) -> dict[str, str]:
    if row.predicted_ms is None or row.interval_ms is None:
        return {**dict.fromkeys(ADDED_COLUMNS, ""), "status": row.problem}
    return {
        "predicted_ms": f"{row.predicted_ms:.6g}",
        "predicted_low_ms": f"{row.interval_ms[0]:.6g}",
        "predicted_high_ms": f"{row.interval_ms[1]:.6g}",
        "error_pct": f"{row.error_pct:.3f}",
        "status": "ok",
    }
