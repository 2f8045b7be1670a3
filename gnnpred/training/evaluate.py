"""Held-out predictions of a recipe, beside the baselines, and their errors by group."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gnnpred.checkpoint import blend
from gnnpred.corpus.splits import load_split
from gnnpred.errors import GnnpredError
from gnnpred.metrics import ErrorSummary, summarise_errors
from gnnpred.training.baselines import fit_roofline_constants, predict_roofline
from gnnpred.training.experiments import Corpus, Fold, RecipeSettings, folds_of, precision_pairs
from gnnpred.training.extra_rows import NEUSIGHT, ExtraRows
from gnnpred.training.networks import predict_fold
from gnnpred.training.trees import fit_trees, roofline_of, summed_features

TRACKS = ("architecture", "family", "device", "neusight", "random", "blind", "blind_fp32")
GROUPING_OF_TRACK = {"blind": "family", "blind_fp32": "family"}
ENSEMBLE = "ensemble"  # networks and trees together: what the checkpoint ships
PRECISION_GROUPS = ("fp32", "tf32", "fp16", "mixed", "fp64", "bf16", "mixed-bf16")
TARGET_PRECISIONS = ("fp32", "tf32", "fp16", "mixed")
HALF_PRECISIONS = ("fp16", "mixed", "bf16", "mixed-bf16")

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
    extra_idx: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (x,) positions in ExtraRows
    extra_ms: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (x,) by the predictor that ships

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
    extra: ExtraRows | None = None,
    on_fold: Callable[[Fold], None] = lambda fold: None,
) -> TrackResult:
    """Score the kept networks of a track, and fit the baselines on the same training rows.

    Rows of ``extra`` that belong to a held-out group are predicted by its fold as well; this needs the baselines.
    """
    folds = list(folds_of(corpus, track)) if folds is None else list(folds)
    single = settings.members_of(track)[:1]
    roofline = roofline_of(corpus.aware)
    groups = list(zip(corpus.devices.tolist(), corpus.precisions.tolist(), strict=True))
    features = summed_features(corpus.aware) if with_baselines else None
    log_ratio = np.log(corpus.target_ms / roofline)
    collected: dict[str, list[np.ndarray]] = defaultdict(list)
    extra_idx, extra_ms = [], []
    for fold in folds:
        collected["gnn"].append(predict_fold(corpus, fold, settings, folder))
        if track == "family" and settings.members_of(track) != single:
            # a fair partner of the precision-blind networks, which are one per fold
            collected["gnn_one"].append(predict_fold(corpus, fold, settings, folder, members=single))
        if with_baselines:
            constants = fit_roofline_constants(roofline, corpus.target_ms, groups, fold.train_idx)
            collected["roofline"].append(predict_roofline(roofline, groups, constants, fold.test_idx))
            trees = fit_trees(features, log_ratio, fold.train_idx)
            collected["trees"].append(np.exp(trees.predict(features[fold.test_idx])) * roofline[fold.test_idx])
            own = extra.held_out_by(corpus, fold) if extra else []
            if len(own):
                chosen = (extra.flat, own, extra.devices[own])
                gnn_ms = predict_fold(corpus, fold, settings, folder, others=chosen)
                trees_ms = np.exp(trees.predict(extra.summary[own])) * extra.roofline_ms[own]
                extra_idx.append(own)
                extra_ms.append(blend(gnn_ms, trees_ms, settings.tree_weight))
        on_fold(fold)
    predicted = {name: np.concatenate(parts) for name, parts in collected.items()}
    if with_baselines:
        predicted = {ENSEMBLE: blend(predicted["gnn"], predicted["trees"], settings.tree_weight), **predicted}
    return TrackResult(
        track=track,
        row_idx=np.concatenate([fold.test_idx for fold in folds]),
        fold=np.concatenate([np.full(len(fold.test_idx), i) for i, fold in enumerate(folds)]),
        predicted_ms=predicted,
        **({"extra_idx": np.concatenate(extra_idx), "extra_ms": np.concatenate(extra_ms)} if extra_idx else {}),
    )


def require_networks(datasets: Path, tracks: Sequence[str], settings: RecipeSettings, folder: Path) -> None:
    """Raise GnnpredError where networks of a track are missing, before minutes are spent on encoding rows.

    The folds of ``device`` and ``neusight`` are known from the rows alone; scoring names what is missing there.
    """
    missing, lacking = [], []
    for track in tracks:
        if track in ("device", NEUSIGHT):
            continue
        split = load_split(datasets / "splits" / f"{GROUPING_OF_TRACK.get(track, track)}.json")
        none = np.zeros(0, np.int64)
        names = [
            Fold(track, str(number), none, none).file_name(member)
            for number in range(split.num_folds)
            for member in settings.members_of(track)
        ]
        absent = [name for name in names if not (folder / name).is_file()]
        missing += absent
        lacking += [track] if absent else []
    if missing:
        options = " ".join(f"--track {track}" for track in lacking)
        raise GnnpredError(
            f"{len(missing)} fold networks are missing in {folder} ({missing[0]} first): train them with "
            f"`gnnpred evaluate --retrain {options}`"
        )


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


def source_family(corpus: Corpus) -> np.ndarray:
    """(n,) first part of each row's source id."""
    return np.array([row.source_id.split("-")[0] for row in corpus.rows])


def format_rows(rows: Iterable[tuple[str, dict[str, Any]]], *, first: str) -> str:
    """A Markdown table of summaries."""
    lines = [f"| {first} | n | MAPE | median | p90 | bias |", "|---|---:|---:|---:|---:|---:|"]
    for name, s in rows:
        lines.append(
            f"| {name} | {s['n']:,} | {s['mape_pct']:.1f} | {s['median_pct']:.1f} | {s['p90_pct']:.1f} "
            f"| {s['bias_pct']:+.1f} |"
        )
    return "\n".join(lines)
