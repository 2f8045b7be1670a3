"""From a user's measured runs to a calibrated checkpoint, and what calibrating would gain (by cross-validation)."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import gnnpred.checkpoint
from gnnpred.calibration import (
    CALIBRATION_FILE,
    Calibration,
    CalibrationRun,
    cross_validated,
    fold_numbers,
    model_groups,
)
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import replaced_when_done
from gnnpred.hardware import DeviceSpec
from gnnpred.metrics import ErrorSummary, summarise_errors
from gnnpred.predictor import Predictor
from gnnpred.score import ScoredRow, ScoreReport, score_runs

NUM_FOLDS = 10
# Above this share of communication a step says little about the GPU's compute.
_MAX_FIXED_SHARE = 0.3
_OUTLIER_WEIGHT = 0.3


@dataclass(frozen=True)
class UsedRow:
    """A scored row and the calibration run that it becomes."""

    row: ScoredRow
    run: CalibrationRun


@dataclass(frozen=True)
class CalibrationGain:
    """Errors before and after calibrating, every row corrected by runs of other models alone."""

    num_folds: int
    before: ErrorSummary
    after: ErrorSummary
    groups: tuple[tuple[dict[str, str], ErrorSummary, ErrorSummary], ...]  # key, before, after
    coverage_before: float  # share of measurements inside the 90 % interval
    coverage_after: float
    num_unchanged: int  # rows whose device has runs of one model alone: nothing to correct them with
    left_out: dict[str, int]  # reason -> rows that no calibration can use

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "num_folds": self.num_folds,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "groups": [{**key, "before": b.as_dict(), "after": a.as_dict()} for key, b, a in self.groups],
            "interval_90_coverage_before": self.coverage_before,
            "interval_90_coverage_after": self.coverage_after,
            "num_unchanged": self.num_unchanged,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class DeviceResult:
    """What calibrate says of one device."""

    device: str
    num_runs: int
    num_models: int
    was_trained_on: bool
    median_factor: float  # over its own runs
    outliers: tuple[UsedRow, ...]  # rows that disagree with all others and lost their weight


@dataclass(frozen=True)
class CalibrationReport:
    """What ``calibrate`` did."""

    folder: Path
    calibrated_from: str
    devices: tuple[DeviceResult, ...]
    kept_devices: tuple[str, ...]  # from an earlier calibration of the checkpoint
    num_rows: int
    left_out: dict[str, int]  # reason -> rows
    gain: CalibrationGain | None  # None where all runs are of one model

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "checkpoint": str(self.folder),
            "calibrated_from": self.calibrated_from,
            "devices": [
                {
                    "device": d.device,
                    "num_runs": d.num_runs,
                    "num_models": d.num_models,
                    "was_trained_on": d.was_trained_on,
                    "median_factor": d.median_factor,
                    "outlier_lines": [used.row.line for used in d.outliers],
                }
                for d in self.devices
            ],
            "kept_devices": list(self.kept_devices),
            "num_rows": self.num_rows,
            "left_out": self.left_out,
            "cross_validation": self.gain.as_dict() if self.gain else None,
        }


def usable_rows(rows: Sequence[ScoredRow]) -> tuple[list[UsedRow], dict[str, int]]:
    """Rows that calibration can use, grouped by model, and reason -> number of all others.

    Rows share a group where they share a file, a name in the column ``model``, or the exact number of parameters.
    """
    used: list[tuple[ScoredRow, float]] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        log_ratio, reason = _log_ratio(row)
        if reason:
            left_out[reason] += 1
        else:
            used.append((row, log_ratio))
    groups = model_groups([_model_keys(row) for row, _ in used])
    return [
        UsedRow(row, replace(row.traits, log_ratio=round(log_ratio, 6), group=group))
        for (row, log_ratio), group in zip(used, groups, strict=True)
    ], dict(left_out.most_common())


def _model_keys(row: ScoredRow) -> list[str]:
    keys = [f"onnx {row.run.onnx}"]
    if name := (row.row.get("model") or "").strip().lower():
        keys.append(f"model {name}")
    if row.num_parameters:
        keys.append(f"parameters {row.num_parameters}")
    return keys


def _log_ratio(row: ScoredRow) -> tuple[float, str]:
    """log(measured / predicted) of the row's compute time, or the reason why it has none."""
    if row.problem:
        return 0.0, row.problem
    if row.traits is None:
        return 0.0, "the checkpoint cannot be calibrated"
    measured_ms, fixed_ms = row.run.measured_ms, row.fixed_ms
    if fixed_ms > _MAX_FIXED_SHARE * min(measured_ms, row.predicted_ms):
        return 0.0, f"communication is more than {_MAX_FIXED_SHARE:.0%} of the step: calibrate with runs on one GPU"
    return float(np.log((measured_ms - fixed_ms) / (row.predicted_ms - fixed_ms))), ""


def calibration_gain(rows: Sequence[ScoredRow]) -> CalibrationGain:
    """Errors of scored rows before and after calibrating, by k folds grouped by model.

    Raises GnnpredError where no row is usable or all are of one model.
    """
    used, left_out = usable_rows(rows)
    _require_rows(used, left_out, len(rows))
    gain = _gain(used, left_out)
    if gain is None:
        raise GnnpredError(
            f"all {len(used)} usable rows are of one model: cross-validation leaves out whole models and needs two"
        )
    return gain


def _require_rows(used: Sequence[UsedRow], left_out: dict[str, int], num_rows: int) -> None:
    if not used:
        reason = next(iter(left_out), "there are none")
        raise GnnpredError(f"none of the {num_rows} rows can be used for calibration; the first reason: {reason}")


def _gain(used: Sequence[UsedRow], left_out: dict[str, int]) -> CalibrationGain | None:
    runs = [item.run for item in used]
    if len({run.group for run in runs}) < 2:
        return None
    corrections = cross_validated(runs, num_folds=NUM_FOLDS)
    measured = np.array([item.row.run.measured_ms for item in used])
    before = np.array([item.row.predicted_ms for item in used])
    fixed = np.array([item.row.fixed_ms for item in used])
    factor = np.array([c.factor if c else 1.0 for c in corrections])
    after = fixed + (before - fixed) * factor
    inside_before = [item.row.interval_ms[0] <= item.row.run.measured_ms <= item.row.interval_ms[1] for item in used]
    inside_after = [
        after[i] * np.exp(c.interval_log[0]) <= measured[i] <= after[i] * np.exp(c.interval_log[1])
        if c
        else inside_before[i]
        for i, c in enumerate(corrections)
    ]
    keys = [(item.row.run.job.device.name, str(item.row.run.job.precision)) for item in used]
    groups = []
    for gpu, precision in sorted(set(keys)):
        own = np.array([key == (gpu, precision) for key in keys])
        groups.append(
            (
                {"gpu": gpu, "precision": precision},
                summarise_errors(before[own], measured[own]),
                summarise_errors(after[own], measured[own]),
            )
        )
    return CalibrationGain(
        num_folds=int(fold_numbers([run.group for run in runs], NUM_FOLDS).max()) + 1,
        before=summarise_errors(before, measured),
        after=summarise_errors(after, measured),
        groups=tuple(groups),
        coverage_before=float(np.mean(inside_before)),
        coverage_after=float(np.mean(inside_after)),
        num_unchanged=sum(1 for c in corrections if c is None),
        left_out=left_out,
    )


def score_with_gain(
    path: str | Path, *, predictor: Predictor, devices: Sequence[DeviceSpec] = ()
) -> tuple[ScoreReport, CalibrationGain]:
    """:func:`score_runs`, and what calibrating to the same rows would gain.

    Raises UsageError for a checkpoint that is calibrated: its answers hold the rows that would be left out.
    """
    if predictor.checkpoint.calibration is not None:
        raise UsageError(
            f"checkpoint {predictor.checkpoint.card.name!r} is calibrated already: --calibrate asks what calibrating "
            f"would gain, give --checkpoint {predictor.checkpoint.card.raw.get('calibrated_from', 'base')}"
        )
    report = score_runs(path, predictor=predictor, devices=devices)
    return report, calibration_gain(report.rows)


def calibrate(
    runs: str | Path,
    out: str | Path,
    *,
    checkpoint: str | Path | None = None,
    devices: Sequence[DeviceSpec] = (),
    overwrite: bool = False,
) -> CalibrationReport:
    """Adapt a checkpoint to the measured runs of a CSV and write it as a folder of its own.

    ``devices`` are GPUs of the user's own that the CSV names and the list lacks.
    Devices of an earlier calibration of the same checkpoint stay as they are unless the runs name them again.
    Raises UsageError where ``out`` exists with something else in it.
    """
    source = gnnpred.checkpoint.find_checkpoint(checkpoint)
    out = Path(out)
    _check_out(out, source, overwrite=overwrite)
    loaded = gnnpred.checkpoint.load_checkpoint(source)
    report = score_runs(runs, predictor=Predictor(loaded.without_calibration()), devices=devices)
    used, left_out = usable_rows(report.rows)
    _require_rows(used, left_out, len(report.rows))
    earlier = loaded.calibration or Calibration(())
    # the prior of today's code, not of the file: all devices are fitted again
    calibration = Calibration(earlier.runs).updated([item.run for item in used])
    _write_calibrated(out, source, loaded, calibration)
    return CalibrationReport(
        folder=out,
        calibrated_from=_origin(loaded),
        devices=tuple(_device_results(calibration, used)),
        kept_devices=tuple(sorted(set(calibration.by_device) - {item.run.device for item in used})),
        num_rows=len(report.rows),
        left_out=left_out,
        gain=_gain(used, left_out),
    )


def _origin(loaded: gnnpred.checkpoint.Checkpoint) -> str:
    return str(loaded.card.raw.get("calibrated_from", loaded.card.name))


def _device_results(calibration: Calibration, used: Sequence[UsedRow]) -> list[DeviceResult]:
    results = []
    for device in sorted({item.run.device for item in used}):
        fitted = calibration.by_device[device]
        own = [item for item in used if item.run.device == device]
        results.append(
            DeviceResult(
                device=device,
                num_runs=len(own),
                num_models=len({item.run.group for item in own}),
                was_trained_on=own[0].run.is_known_device,
                median_factor=float(np.median([fitted.correct(item.run).factor for item in own])),
                outliers=tuple(item for item, w in zip(own, fitted.weights, strict=True) if w < _OUTLIER_WEIGHT),
            )
        )
    return results


def _check_out(out: Path, source: Path, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    if out.is_dir() and out.resolve() == source.resolve():
        raise UsageError(f"--out {out} is the checkpoint that is calibrated: name another folder")
    if out.is_dir() and any(out.iterdir()):
        if not (out / CALIBRATION_FILE).is_file():
            raise UsageError(f"--out {out} is not empty and no calibrated checkpoint: name another folder")
        if not overwrite:
            raise UsageError(f"--out {out} holds a calibrated checkpoint: --overwrite replaces it")


def _write_calibrated(out: Path, source: Path, loaded: gnnpred.checkpoint.Checkpoint, calibration: Calibration) -> None:
    """The networks as they are, the calibration, and a card that vouches for it; the card comes last."""
    content = calibration.to_json()
    card = {
        **loaded.card.raw,
        "name": out.resolve().name,
        "calibrated_from": _origin(loaded),
        "calibration_sha256": hashlib.sha256(content).hexdigest(),
    }
    names = ["model.onnx", *(["trees.onnx"] if loaded.card.trees_sha256 else []), "golden.json"]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            _replace(out / name, (source / name).read_bytes())
        if not loaded.card.trees_sha256:
            (out / "trees.onnx").unlink(missing_ok=True)
        _replace(out / CALIBRATION_FILE, content)
        _replace(out / "card.json", (json.dumps(card, indent=1) + "\n").encode())
    except OSError as error:
        raise GnnpredError(f"cannot write {error.filename or out}: {error.strerror or error}") from error


def _replace(path: Path, content: bytes) -> None:
    with replaced_when_done(path) as partial:
        partial.write_bytes(content)
