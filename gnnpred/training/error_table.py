"""All figures of an evaluation as plain values: what ``errors.json`` holds and every report is made from."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gnnpred.corpus.store import MeasurementRow
from gnnpred.hardware import find_device
from gnnpred.metrics import ErrorSummary
from gnnpred.training.contrast import CONTRAST_TRACKS, contrast_table
from gnnpred.training.evaluate import (
    HALF_PRECISIONS,
    NOISE_FLOOR,
    TrackResult,
    ratio_errors,
    source_family,
    summaries_by,
    summary_of,
)
from gnnpred.training.experiments import Corpus, Fold, folds_of
from gnnpred.training.intervals import conformal_intervals, coverage_table, log_errors
from gnnpred.training.noise import noise_table, repeat_noise
from gnnpred.training.ranges import range_table
from gnnpred.training.worst_rows import worst_rows_table

GROUP_TRACKS = ("architecture", "family", "device")  # what a user's new model or GPU is like
MIN_GROUP_ROWS = 10
LANGUAGE_FAMILIES = ("bert", "gpt", "llama", "opt", "t5")
VOLTA_COMPUTE_CAPABILITY = 7.0


def results_table(
    results: dict[str, TrackResult], corpus: Corpus, *, name: str = "", all_rows: Sequence[MeasurementRow] = ()
) -> dict[str, Any]:
    """Every figure of the scored tracks. ``all_rows`` (repeats too) gives the measured noise floor."""
    noise = repeat_noise(all_rows, corpus.rows)
    table: dict[str, Any] = {
        "name": name,
        "corpus": _corpus_words(corpus),
        "tracks": {},
        "noise_floor": dict(NOISE_FLOOR),
        "measured_noise": noise_table(noise, corpus.rows),
    }
    for track, result in results.items():
        folds = list(folds_of(corpus, track))
        table["tracks"][track] = entry = _track_entry(result, corpus)
        if track not in GROUP_TRACKS:
            continue
        entry["precision_ratio"] = ratio_errors(result, corpus)
        if len(folds) > 1:
            entry["coverage"] = coverage_table(result, corpus, [fold.name for fold in folds])
            entry["interval_coverage"] = entry["coverage"]["all"]["share"]
        entry["by_fold"] = _errors_by_fold(result, corpus, folds)
        entry["range_warning"] = range_table(result, corpus, folds)
        entry |= worst_rows_table(result, corpus, folds, noise)
    if "family" in results and "architecture" in results:
        table["tracks"]["architecture"]["coverage_by_family_intervals"] = _coverage_by(
            conformal_intervals(results["family"], corpus), results["architecture"], corpus
        )
    if all(track in results for track in CONTRAST_TRACKS):
        table["contrast"] = contrast_table(results, corpus)
    return table


def _corpus_words(corpus: Corpus) -> dict[str, int]:
    training = [row for row in corpus.rows if row.phase != "inference"]
    return {
        "rows": len(training),
        "inference_rows": len(corpus.rows) - len(training),
        "operator_rows": len(corpus.operator_rows),
        "devices": len({find_device(row.device).name for row in training}),
        "architectures": len({row.architecture for row in training}),
        "families": len({row.family for row in training}),
        "sources": len({row.source_id.split("-")[0] for row in training}),
    }


def _track_entry(result: TrackResult, corpus: Corpus) -> dict[str, Any]:
    entry: dict[str, Any] = {"shipped": result.shipped, "overall": {}, "by_precision": {}}
    for predictor in result.predicted_ms:
        entry["overall"][predictor] = summary_of(result, corpus, predictor=predictor).as_dict()
        entry["by_precision"][predictor] = _as_dicts(
            summaries_by(result, corpus, corpus.precisions, predictor=predictor)
        )
    families = np.array([row.family for row in corpus.rows])
    combined = np.array([f"{d} {p}" for d, p in zip(corpus.devices, corpus.precisions, strict=True)])
    sources = source_family(corpus)
    for name, keys, min_rows in (
        ("by_source", sources, MIN_GROUP_ROWS),
        ("by_family", families, MIN_GROUP_ROWS),
        ("by_device", corpus.devices, MIN_GROUP_ROWS),
        ("by_device_and_precision", combined, 2 * MIN_GROUP_ROWS),
    ):
        entry[name] = _as_dicts(summaries_by(result, corpus, keys, min_rows=min_rows))
    if result.track in ("architecture", "family"):
        is_half = np.isin(corpus.precisions, HALF_PRECISIONS)
        is_a100_h100 = np.array([d.startswith(("A100", "H100")) for d in corpus.devices])
        is_language = np.isin(families, LANGUAGE_FAMILIES) & is_half & is_a100_h100
        is_derived = np.array([bool(row.derived_from) for row in corpus.rows])
        for name, mask in (
            (
                "timm_rtx3090_mixed",
                (sources == "timm") & (corpus.devices == "RTX3090") & (corpus.precisions == "mixed"),
            ),
            ("language_models_half_a100_h100", is_language),
            ("language_models_half_a100_h100_timed_alone", is_language & ~is_derived),
            ("language_models_half_a100_h100_derived", is_language & is_derived),
        ):
            if mask[result.row_idx].any():
                entry[name] = summary_of(result, corpus, mask).as_dict()
    if result.track == "device":
        by_device = {d: s.mape_pct for d, s in summaries_by(result, corpus, corpus.devices).items()}
        recent = [mape for device, mape in by_device.items() if _is_volta_or_newer(device)]
        entry["median_over_devices_of_mape_pct"] = float(np.median(list(by_device.values())))
        entry["num_devices"] = len(by_device)
        if recent:
            entry["median_over_recent_nvidia_of_mape_pct"] = float(np.median(recent))
            entry["num_recent_nvidia"] = len(recent)
    return entry


def _is_volta_or_newer(device: str) -> bool:
    return (find_device(device).compute_capability or 0) >= VOLTA_COMPUTE_CAPABILITY


def _errors_by_fold(result: TrackResult, corpus: Corpus, folds: Sequence[Fold]) -> dict[str, dict[str, Any]]:
    keys = np.full(len(corpus.rows), "", dtype=object)
    keys[result.row_idx] = np.array([fold.name for fold in folds], dtype=object)[result.fold]
    by_name = _as_dicts(summaries_by(result, corpus, keys.astype(str)))
    return {fold.name: by_name[fold.name] for fold in folds if fold.name in by_name}


def _coverage_by(
    intervals: dict[str, tuple[float, float]], result: TrackResult, corpus: Corpus
) -> dict[str, float | int]:
    """Coverage of given intervals (per precision, else of all) on another track's rows."""
    error = log_errors(result, corpus)
    bounds = np.array([intervals.get(str(p), intervals["all"]) for p in corpus.precisions[result.row_idx]])
    return {"n": len(error), "share": float(np.mean((error >= bounds[:, 0]) & (error <= bounds[:, 1])))}


def _as_dicts(summaries: dict[str, ErrorSummary]) -> dict[str, dict[str, Any]]:
    return {name: summary.as_dict() for name, summary in summaries.items()}
