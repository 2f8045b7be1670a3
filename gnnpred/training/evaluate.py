"""Held-out errors of a recipe: every track, beside the baselines, by precision, GPU and source."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnpred.metrics import ErrorSummary, summarise_errors
from gnnpred.training.baselines import fit_roofline_constants, predict_roofline
from gnnpred.training.experiments import Corpus, Fold, RecipeSettings, folds_of, precision_pairs, predict_fold
from gnnpred.training.trees import fit_trees, roofline_of, summed_features

TRACKS = ("architecture", "family", "device", "random", "blind", "blind_fp32")
ENSEMBLE = "ensemble"  # GNN and trees together: what the checkpoint ships
PRECISION_GROUPS = ("fp32", "tf32", "fp16", "mixed", "fp64", "bf16", "mixed-bf16")
TARGET_PRECISIONS = ("fp32", "tf32", "fp16", "mixed")
INTERVAL_QUANTILES = (0.05, 0.95)
MIN_INTERVAL_ROWS = 100  # a regime with fewer rows borrows the interval of all

# Relative difference of repeats of one configuration, from the pages of the measured sources.
NOISE_FLOOR = (
    ("same node, same software", "0.1-0.5 %"),
    ("another PyTorch release (timm, 1.10 to 1.12)", "median 8.1 %, p90 26 %"),
    ("another container release", "median 8.3 %, p90 25 %"),
    ("another repository, same model, GPU, precision and batch", "median 9 %, p90 39 %"),
)


@dataclass(frozen=True)
class TrackResult:
    """Predictions of one track on its test rows. m = tested rows."""

    track: str
    row_idx: np.ndarray  # (m,) int64
    fold: np.ndarray  # (m,) fold number of each row
    predicted_ms: dict[str, np.ndarray]  # predictor name -> (m,)

    @property
    def shipped(self) -> str:
        """Name of the predictor that tables break down: the ensemble where the track has one."""
        return ENSEMBLE if ENSEMBLE in self.predicted_ms else "gnn"

    @property
    def shipped_ms(self) -> np.ndarray:
        return self.predicted_ms[self.shipped]


def run_track(
    corpus: Corpus,
    track: str,
    settings: RecipeSettings,
    folder: Path,
    *,
    folds: Sequence[Fold] | None = None,
    with_baselines: bool = True,
    on_fold: Callable[[Fold], None] = lambda fold: None,
) -> TrackResult:
    """Score the kept networks of a track, and fit the baselines on the same training rows."""
    folds = list(folds_of(corpus, track)) if folds is None else list(folds)
    seeds = settings.seeds_of(track)
    roofline = roofline_of(corpus.aware)
    groups = list(zip(corpus.devices.tolist(), corpus.precisions.tolist(), strict=True))
    features = summed_features(corpus.aware) if with_baselines else None
    log_ratio = np.log(corpus.target_ms / roofline)
    collected: dict[str, list[np.ndarray]] = defaultdict(list)
    for fold in folds:
        collected["gnn"].append(predict_fold(corpus, fold, settings, folder, seeds=seeds))
        if with_baselines:
            constants = fit_roofline_constants(roofline, corpus.target_ms, groups, fold.train_idx)
            collected["roofline"].append(predict_roofline(roofline, groups, constants, fold.test_idx))
            trees = fit_trees(features, log_ratio, fold.train_idx)
            collected["trees"].append(np.exp(trees.predict(features[fold.test_idx])) * roofline[fold.test_idx])
        on_fold(fold)
    predicted = {name: np.concatenate(parts) for name, parts in collected.items()}
    if with_baselines:
        predicted = {ENSEMBLE: blend(predicted["gnn"], predicted["trees"], settings.tree_weight), **predicted}
    return TrackResult(
        track=track,
        row_idx=np.concatenate([fold.test_idx for fold in folds]),
        fold=np.concatenate([np.full(len(fold.test_idx), i) for i, fold in enumerate(folds)]),
        predicted_ms=predicted,
    )


def blend(gnn_ms: np.ndarray, trees_ms: np.ndarray, tree_weight: float) -> np.ndarray:
    """Weighted geometric mean of the two members, which is what the checkpoint answers."""
    return np.exp((1 - tree_weight) * np.log(gnn_ms) + tree_weight * np.log(trees_ms))


def summaries_by(
    result: TrackResult, corpus: Corpus, keys: np.ndarray, *, predictor: str = "", min_rows: int = 1
) -> dict[str, ErrorSummary]:
    """Summary per value of ``keys`` (one per corpus row), largest groups first."""
    own = keys[result.row_idx]
    names, counts = np.unique(own, return_counts=True)
    measured = corpus.target_ms[result.row_idx]
    predicted = result.predicted_ms[predictor or result.shipped]
    return {
        str(name): summarise_errors(predicted[own == name], measured[own == name])
        for name, count in sorted(zip(names, counts, strict=True), key=lambda pair: -pair[1])
        if count >= min_rows
    }


def summary_of(
    result: TrackResult, corpus: Corpus, mask: np.ndarray | None = None, predictor: str = ""
) -> ErrorSummary:
    """Summary over the tested rows for which ``mask`` (one per corpus row) holds."""
    chosen = np.ones(len(result.row_idx), bool) if mask is None else mask[result.row_idx]
    predicted = result.predicted_ms[predictor or result.shipped]
    return summarise_errors(predicted[chosen], corpus.target_ms[result.row_idx][chosen])


def ratio_errors(result: TrackResult, corpus: Corpus, predictor: str = "") -> dict[str, float]:
    """Error of the full-to-half time ratio on pairs that were both tested: n, MAPE, median, and ratio 1's."""
    predicted = dict(
        zip(result.row_idx.tolist(), result.predicted_ms[predictor or result.shipped].tolist(), strict=True)
    )
    pairs = [(a, b) for a, b in precision_pairs(corpus.rows) if a in predicted and b in predicted]
    if not pairs:
        return {"n": 0}
    measured = np.array([corpus.target_ms[a] / corpus.target_ms[b] for a, b in pairs])
    ours = np.array([predicted[a] / predicted[b] for a, b in pairs])
    error = np.abs(ours / measured - 1) * 100
    constant = np.abs(1 / measured - 1) * 100
    return {
        "n": len(pairs), "mape_pct": float(error.mean()), "median_pct": float(np.median(error)),
        "ratio_one_median_pct": float(np.median(constant)), "ratio_one_mape_pct": float(constant.mean()),
    }  # fmt: skip


def conformal_intervals(result: TrackResult, corpus: Corpus) -> dict[str, tuple[float, float]]:
    """5 % and 95 % quantile of log(measured / predicted), over all rows and per precision."""
    error = np.log(corpus.target_ms[result.row_idx] / result.shipped_ms)
    intervals = {"all": _quantiles(error)}
    for precision in PRECISION_GROUPS:
        own = error[corpus.precisions[result.row_idx] == precision]
        if len(own) >= MIN_INTERVAL_ROWS:
            intervals[precision] = _quantiles(own)
    return intervals


def _quantiles(error: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(error, INTERVAL_QUANTILES)
    return float(low), float(high)


def interval_coverage(result: TrackResult, corpus: Corpus) -> float:
    """Share of rows inside the 90 % interval calibrated on the other folds (cross-conformal), by precision."""
    error = np.log(corpus.target_ms[result.row_idx] / result.shipped_ms)
    precision = corpus.precisions[result.row_idx]
    inside = np.zeros(len(error), bool)
    for fold in np.unique(result.fold):
        own, other = result.fold == fold, result.fold != fold
        for name in np.unique(precision[own]):
            calibration = error[other & (precision == name)]
            if len(calibration) < MIN_INTERVAL_ROWS:
                calibration = error[other]
            low, high = _quantiles(calibration)
            rows = own & (precision == name)
            inside[rows] = (error[rows] >= low) & (error[rows] <= high)
    return float(inside.mean())


def source_family(corpus: Corpus) -> np.ndarray:
    """(n,) first part of each row's source id."""
    return np.array([row.source_id.split("-")[0] for row in corpus.rows])


def results_table(results: dict[str, TrackResult], corpus: Corpus) -> dict[str, Any]:
    """All figures as plain values; what ``errors.json`` holds."""
    table: dict[str, Any] = {"tracks": {}, "noise_floor": dict(NOISE_FLOOR)}
    for track, result in results.items():
        entry: dict[str, Any] = {"overall": {}, "by_precision": {}}
        for predictor in result.predicted_ms:
            entry["overall"][predictor] = summary_of(result, corpus, predictor=predictor).as_dict()
            entry["by_precision"][predictor] = _as_dicts(
                summaries_by(result, corpus, corpus.precisions, predictor=predictor)
            )
        entry["by_source"] = _as_dicts(summaries_by(result, corpus, source_family(corpus), min_rows=10))
        entry["by_device"] = _as_dicts(summaries_by(result, corpus, corpus.devices, min_rows=10))
        combined = np.array([f"{d} {p}" for d, p in zip(corpus.devices, corpus.precisions, strict=True)])
        entry["by_device_and_precision"] = _as_dicts(summaries_by(result, corpus, combined, min_rows=20))
        if track in ("architecture", "family", "device"):
            entry["precision_ratio"] = ratio_errors(result, corpus)
            entry["interval_coverage"] = interval_coverage(result, corpus)
        if track in ("architecture", "family"):
            mask = (source_family(corpus) == "timm") & (corpus.devices == "RTX3090") & (corpus.precisions == "mixed")
            entry["timm_rtx3090_mixed"] = summary_of(result, corpus, mask).as_dict()
        if track == "device":
            mapes = [s.mape_pct for s in summaries_by(result, corpus, corpus.devices).values()]
            entry["median_over_devices_of_mape_pct"] = float(np.median(mapes))
            entry["num_devices"] = len(mapes)
        table["tracks"][track] = entry
    if "blind" in results and "family" in results:
        half = np.isin(corpus.precisions, ("fp16", "mixed"))
        table["precision_blind"] = {
            "rows": "half-precision rows (fp16, mixed), unseen family",
            "aware": summary_of(results["family"], corpus, half, "gnn").as_dict(),
            "blind": summary_of(results["blind"], corpus, half).as_dict(),
        }
        if "blind_fp32" in results:
            table["precision_blind"]["fp32_trained"] = summary_of(results["blind_fp32"], corpus, half).as_dict()
    return table


def _as_dicts(summaries: dict[str, ErrorSummary]) -> dict[str, dict[str, Any]]:
    return {name: summary.as_dict() for name, summary in summaries.items()}


def format_rows(rows: Iterable[tuple[str, dict[str, Any]]], *, first: str) -> str:
    """A Markdown table of summaries."""
    lines = [f"| {first} | n | MAPE | median | p90 | bias |", "|---|---:|---:|---:|---:|---:|"]
    for name, s in rows:
        lines.append(
            f"| {name} | {s['n']:,} | {s['mape_pct']:.1f} | {s['median_pct']:.1f} | {s['p90_pct']:.1f} "
            f"| {s['bias_pct']:+.1f} |"
        )
    return "\n".join(lines)
