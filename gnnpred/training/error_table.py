"""All figures of an evaluation as plain values: what ``errors.json`` holds and every report is made from."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gnnpred.corpus.store import MeasurementRow
from gnnpred.hardware import DeviceSpec
from gnnpred.intervals import INTERVAL_FEATURES, IntervalModel
from gnnpred.metrics import ErrorSummary, summarise_errors
from gnnpred.training.calibration_scores import calibration_table, inference_table
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
from gnnpred.training.extra_rows import NEUSIGHT, ExtraRows, is_forward_pass
from gnnpred.training.intervals import (
    coverage_table,
    cross_conformal_bounds,
    features_of,
    fit_intervals,
    log_errors,
)
from gnnpred.training.noise import noise_table, repeat_noise
from gnnpred.training.ranges import range_table
from gnnpred.training.worst_rows import worst_rows_table

GROUP_TRACKS = ("architecture", "family", "device")  # what a user's new model or GPU is like
MIN_GROUP_ROWS = 10
LANGUAGE_FAMILIES = ("bert", "gpt", "llama", "opt", "t5")
VOLTA_COMPUTE_CAPABILITY = 7.0
# NeuSight's training points on A100-80GB, H100 and L4; 4 of them are Switch, whose expert sizes are not given.
NEUSIGHT_POINTS = 23


def results_table(
    results: dict[str, TrackResult],
    corpus: Corpus,
    *,
    name: str = "",
    all_rows: Sequence[MeasurementRow] = (),
    extra: ExtraRows | None = None,
) -> dict[str, Any]:
    """Every figure of the scored tracks. ``all_rows`` (repeats too) gives the measured noise floor; ``extra`` are the
    rows that ``extra_idx`` of the results means."""
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
        if track == NEUSIGHT and extra:
            entry["points"] = neusight_points(result, corpus, extra)
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
            fit_intervals(results["family"], corpus), results["architecture"], corpus
        )
    if "family" in results and extra and "coverage" in table["tracks"]["family"]:
        bounds = cross_conformal_bounds(results["family"], corpus)
        table["measured_inference"] = inference_table(results["family"], corpus, extra, bounds)
    if "device" in results and "family" in results:
        # measured runs make the GPU a known one: its interval starts from that of known GPUs
        model = fit_intervals(results["family"], corpus)
        bounds = model.bounds(_without_novelty(features_of(results["device"], corpus)))
        table["calibration"] = calibration_table(results["device"], corpus, bounds)
    if all(track in results for track in CONTRAST_TRACKS):
        table["contrast"] = contrast_table(results, corpus)
    return table


def _corpus_words(corpus: Corpus) -> dict[str, int]:
    training = [row for row in corpus.rows if row.phase != "inference"]
    return {
        "rows": len(training),
        "derived_rows": sum(bool(row.derived_from) for row in training),
        "inference_rows": len(corpus.rows) - len(training),
        "operator_rows": len(corpus.operator_rows),
        "devices": len({row.spec.name for row in training}),
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
        recent = [mape for device, mape in by_device.items() if _is_volta_or_newer(corpus.device_specs[device])]
        entry["median_over_devices_of_mape_pct"] = float(np.median(list(by_device.values())))
        entry["num_devices"] = len(by_device)
        if recent:
            entry["median_over_recent_nvidia_of_mape_pct"] = float(np.median(recent))
            entry["num_recent_nvidia"] = len(recent)
    return entry


def _is_volta_or_newer(device: DeviceSpec) -> bool:
    return (device.compute_capability or 0) >= VOLTA_COMPUTE_CAPABILITY


def _errors_by_fold(result: TrackResult, corpus: Corpus, folds: Sequence[Fold]) -> dict[str, dict[str, Any]]:
    keys = np.full(len(corpus.rows), "", dtype=object)
    keys[result.row_idx] = np.array([fold.name for fold in folds], dtype=object)[result.fold]
    by_name = _as_dicts(summaries_by(result, corpus, keys.astype(str)))
    return {fold.name: by_name[fold.name] for fold in folds if fold.name in by_name}


def neusight_points(result: TrackResult, corpus: Corpus, extra: ExtraRows) -> dict[str, Any]:
    """NeuSight's training points on their test GPUs: those of the corpus, and those whose forward pass holds memory
    allocation (all of the A100's), which are measured times all the same and were scored by NeuSight's authors."""
    points = [(corpus.rows[i], float(ms), False) for i, ms in zip(result.row_idx, result.shipped_ms, strict=True)]
    points += [(extra.rows[i], float(ms), True) for i, ms in zip(result.extra_idx, result.extra_ms, strict=True)
               if not is_forward_pass(extra.rows[i])]  # fmt: skip
    measured = np.array([row.step_time_ms for row, _, _ in points])
    predicted = np.array([ms for _, ms, _ in points])
    inflated = np.array([is_inflated for _, _, is_inflated in points])
    devices = np.array([row.device for row, _, _ in points])
    sides = {"all": inflated | True, "plain": ~inflated, **{str(d): devices == d for d in np.unique(devices)}}
    return {
        "asked": NEUSIGHT_POINTS,
        "summaries": {
            name: summarise_errors(predicted[side], measured[side]).as_dict()
            for name, side in sides.items()
            if side.any()
        },
        "points": [
            {
                "model": row.model, "batch_size": row.batch_size, "device": row.device, "input": row.input,
                "measured_ms": row.step_time_ms, "predicted_ms": ms, "is_inflated": is_inflated,
            }
            for row, ms, is_inflated in points
        ],
    }  # fmt: skip


def _without_novelty(features: np.ndarray) -> np.ndarray:
    chosen = [i for i, name in enumerate(INTERVAL_FEATURES) if name in ("device_distance", "few_generation_rows",
                                                                        "few_device_rows")]  # fmt: skip
    features = features.copy()
    features[:, chosen] = 0
    return features


def _coverage_by(model: IntervalModel, result: TrackResult, corpus: Corpus) -> dict[str, float | int]:
    """Coverage of given intervals on another track's rows."""
    error = log_errors(result, corpus)
    bounds = model.bounds(features_of(result, corpus))
    return {"n": len(error), "share": float(np.mean((error >= bounds[:, 0]) & (error <= bounds[:, 1])))}


def _as_dicts(summaries: dict[str, ErrorSummary]) -> dict[str, dict[str, Any]]:
    return {name: summary.as_dict() for name, summary in summaries.items()}
