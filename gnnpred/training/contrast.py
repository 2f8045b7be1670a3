"""What precision alone does to step time, and what it costs a predictor not to know it."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from gnnpred.errors import GnnpredError
from gnnpred.hardware import DeviceSpec
from gnnpred.metrics import summarise_errors
from gnnpred.training.evaluate import (
    HALF_PRECISIONS,
    PRECISION_GROUPS,
    TrackResult,
    ratio_errors,
    require_networks,
    run_track,
)
from gnnpred.training.experiments import (
    Corpus,
    Progress,
    RecipeSettings,
    configuration_of,
    load_encoded_corpus,
)

CONTRAST_TRACKS = ("family", "blind", "blind_fp32")
# predictor of the table -> (track, name there). All saw the same training families, the last one fp32/tf32 rows alone.
PREDICTORS = {
    "ensemble": ("family", "ensemble"),
    "gnn": ("family", "gnn"),
    "gnn_one": ("family", "gnn_one"),
    "blind": ("blind", "gnn"),
    "blind_fp32": ("blind_fp32", "gnn"),
}
# Ignores precision and knows everything else: the measured geometric mean of every configuration.
BLIND_ORACLE = "blind_oracle"


def contrast_of_recipe(
    settings: RecipeSettings,
    *,
    datasets: Path,
    folds: Path,
    work: Path,
    num_workers: int = 2,
    on_progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Score the kept networks of the three tracks and compare them; nothing is trained and nothing written."""
    require_networks(datasets, CONTRAST_TRACKS, settings, folds)
    corpus = load_encoded_corpus(datasets, settings, work, num_workers, on_progress, with_blind=True)
    results = {}
    for position, track in enumerate(CONTRAST_TRACKS):
        on_progress("scoring", position, len(CONTRAST_TRACKS))
        results[track] = run_track(corpus, track, settings, folds, with_baselines=not track.startswith("blind"))
    on_progress("scoring", len(CONTRAST_TRACKS), len(CONTRAST_TRACKS))
    return contrast_table(results, corpus)


def contrast_table(results: dict[str, TrackResult], corpus: Corpus) -> dict[str, Any]:
    """Variation by precision and the predictors' errors, on the rows that all three tracks tested."""
    missing = [track for track in CONTRAST_TRACKS if track not in results]
    if missing:
        raise GnnpredError(f"the contrast needs the tracks {', '.join(CONTRAST_TRACKS)}: {', '.join(missing)} missing")
    row_idx = results["family"].row_idx
    for track in CONTRAST_TRACKS:
        row_idx = row_idx[np.isin(row_idx, results[track].row_idx)]
    row_idx = np.sort(row_idx)
    predicted = {
        name: _aligned(results[track], own_name, row_idx)
        for name, (track, own_name) in PREDICTORS.items()
        if own_name in results[track].predicted_ms
    }
    return {
        "rows": len(row_idx),
        "held_out": "unseen family",
        "variation": precision_variation(corpus, row_idx),
        "errors": _errors_by_precision(corpus, row_idx, predicted),
        "repeated_configurations": _errors_of_configurations(corpus, row_idx, predicted),
        "ratio": {
            name: ratio_errors(results[track], corpus, own_name)
            for name, (track, own_name) in PREDICTORS.items()
            if name in predicted
        },
    }


def _aligned(result: TrackResult, predictor: str, row_idx: np.ndarray) -> np.ndarray:
    order = np.argsort(result.row_idx)
    return result.predicted_ms[predictor][order[np.searchsorted(result.row_idx[order], row_idx)]]


def _configurations(corpus: Corpus, row_idx: np.ndarray, *, with_fp64: bool) -> list[dict[str, int]]:
    """Per configuration that was measured in two precisions or more: precision -> position of its first row."""
    groups: dict[tuple, dict[str, int]] = defaultdict(dict)
    for i in row_idx.tolist():
        row = corpus.rows[i]
        if with_fp64 or row.precision != "fp64":
            groups[configuration_of(row)].setdefault(str(row.precision), i)
    return [found for found in groups.values() if len(found) > 1]


def device_class(device: DeviceSpec) -> str:
    """Generation of a GPU, as far as it decides what precision does."""
    if not device.is_nvidia:
        return "AMD"
    if not device.has_tensor_cores:
        return "NVIDIA without tensor cores"
    return f"NVIDIA {device.architecture.split()[0]}"


def precision_variation(corpus: Corpus, row_idx: np.ndarray) -> dict[str, Any]:
    """Slowest over fastest measured time of every configuration: median, p90, maximum, by class of GPU."""
    table: dict[str, Any] = {}
    for name, with_fp64 in (("without_fp64", False), ("with_fp64", True)):
        configurations = _configurations(corpus, row_idx, with_fp64=with_fp64)
        if not configurations:
            continue
        times = [corpus.target_ms[list(found.values())] for found in configurations]
        ratio = np.array([values.max() / values.min() for values in times])
        classes = np.array([device_class(corpus.rows[next(iter(found.values()))].spec) for found in configurations])
        largest = configurations[int(ratio.argmax())]
        table[name] = {
            "all": _spread(ratio),
            "by_device_class": {c: _spread(ratio[classes == c]) for c in sorted(set(classes.tolist()))},
            "largest": {
                **_row_words(corpus, next(iter(largest.values()))),
                "measured_ms": {precision: float(corpus.target_ms[i]) for precision, i in largest.items()},
            },
        }
        if not with_fp64:
            table[name]["half_slower_share"] = _half_slower_share(corpus, configurations)
    return table


def _half_slower_share(corpus: Corpus, configurations: list[dict[str, int]]) -> float | None:
    """Share of full-to-half pairs in which the half precision took longer."""
    slower = [
        corpus.target_ms[found[half]] > corpus.target_ms[full]
        for found in configurations
        if (full := found.get("fp32", found.get("tf32"))) is not None
        for half in HALF_PRECISIONS
        if half in found
    ]
    return float(np.mean(slower)) if slower else None


def _spread(ratio: np.ndarray) -> dict[str, Any]:
    return {
        "n": len(ratio), "median": float(np.median(ratio)), "p90": float(np.percentile(ratio, 90)),
        "max": float(ratio.max()),
    }  # fmt: skip


def _row_words(corpus: Corpus, i: int) -> dict[str, Any]:
    row = corpus.rows[i]
    return {
        "model": row.model, "device": str(corpus.devices[i]), "precision": str(row.precision),
        "batch_size": row.batch_size, "source": row.source_id,
    }  # fmt: skip


def _errors_by_precision(
    corpus: Corpus, row_idx: np.ndarray, predicted: dict[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Predictor -> group of rows -> error summary with the worst row; ``half`` is all half precisions together."""
    precision = corpus.precisions[row_idx]
    groups = {"all": np.ones(len(row_idx), bool), "half": np.isin(precision, HALF_PRECISIONS)}
    groups |= {name: precision == name for name in PRECISION_GROUPS}
    measured = corpus.target_ms[row_idx]
    return {
        predictor: {
            name: _summary_with_worst(corpus, row_idx[mask], values[mask], measured[mask])
            for name, mask in groups.items()
            if mask.any()
        }
        for predictor, values in predicted.items()
    }


def _summary_with_worst(
    corpus: Corpus, row_idx: np.ndarray, predicted_ms: np.ndarray, measured_ms: np.ndarray
) -> dict[str, Any]:
    error_pct = (predicted_ms / measured_ms - 1) * 100
    worst = int(np.abs(error_pct).argmax())
    return {
        **summarise_errors(predicted_ms, measured_ms).as_dict(),
        "worst_pct": float(error_pct[worst]),
        "worst_row": _row_words(corpus, int(row_idx[worst])),
    }


def _errors_of_configurations(
    corpus: Corpus, row_idx: np.ndarray, predicted: dict[str, np.ndarray]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Predictor -> group -> errors on configurations measured in two precisions or more, fp64 aside.

    There nothing but precision tells the rows of a configuration apart; elsewhere a blind predictor can guess it from
    the setup (a source that ran one GPU and software in mixed precision alone). The oracle knows all but the precision.
    """
    configurations = [list(found.values()) for found in _configurations(corpus, row_idx, with_fp64=False)]
    if not configurations:
        return {}
    chosen = np.concatenate(configurations)
    oracle = np.concatenate([np.full(len(c), np.exp(np.log(corpus.target_ms[c]).mean())) for c in configurations])
    position = np.searchsorted(row_idx, chosen)
    by_predictor = {BLIND_ORACLE: oracle, **{name: values[position] for name, values in predicted.items()}}
    is_half = np.isin(corpus.precisions[chosen], HALF_PRECISIONS)
    groups = {"all": np.ones(len(chosen), bool), "full": ~is_half, "half": is_half}
    return {
        name: {
            group: _summary_with_worst(corpus, chosen[mask], values[mask], corpus.target_ms[chosen[mask]])
            for group, mask in groups.items()
            if mask.any()
        }
        for name, values in by_predictor.items()
    }
