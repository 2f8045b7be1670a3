"""The worst predicted rows of a track, and what about each of them could explain it.

A reason is a property of the row and of what its fold trained on, computed for every row of the track, so that it can
be checked: it is given for a bad row only where rows that have it are more frequent among the worst 5 % than among all,
and by more than chance would bring about. (With invented errors of equal size everywhere, none is given.)
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnpred.corpus.store import MeasurementRow
from gnnpred.features import GLOBAL_FEATURE_NAMES, NODE_FEATURE_NAMES
from gnnpred.graph_summary import SUMMARY_FEATURE_NAMES
from gnnpred.job import host_os_of
from gnnpred.op_kinds import OP_KINDS
from gnnpred.training.evaluate import TrackResult, source_family
from gnnpred.training.experiments import Corpus, Fold
from gnnpred.training.noise import RepeatNoise
from gnnpred.training.ranges import out_of_range, roofline_by_class
from gnnpred.training.trees import roofline_of, summed_features

NUM_WORST_ROWS = 20
WORST_SHARE = 0.05
MIN_LIFT = 1.2  # how much more frequent among the worst rows a reason must be to be given
MAX_CHANCE = 1e-3  # probability of so many among the worst, were they drawn at random
MAX_REASONS = 3

RARE_OP_FAMILIES = 3  # an op that fewer training families spend time on is rare
RARE_OP_MIN_SHARE = 0.01  # of a row's roofline time, to count as spending time on it
RARE_OP_ROW_SHARE = 0.2
FEW_SIBLINGS = 20
FEW_DEVICE_ROWS = 30
FEW_SOURCE_ROWS = 30
FEW_SOFTWARE_ROWS = 10
FEW_COMBINATION_ROWS = 10
NOISY_PCT = 10.0
MIN_NOISY_REPEATS = 5
DISAGREEMENT = 1.25
SLOW_LAYOUT = 2.0
FAR_GRAPH_QUANTILE = 0.95


@dataclass(frozen=True)
class Reason:
    """A possible explanation, for every tested row. m = tested rows."""

    text: str
    applies: np.ndarray  # (m,) bool
    detail: np.ndarray  # (m,) str, the figure behind it; "" where there is none to give


def worst_rows_table(
    result: TrackResult, corpus: Corpus, folds: Sequence[Fold], noise: RepeatNoise
) -> dict[str, list[dict[str, Any]]]:
    """``worst_rows``: the 20 rows that are off by the largest factor; ``reasons``: each reason checked on all rows."""
    reasons = reasons_of(result, corpus, folds, noise)
    measured = corpus.target_ms[result.row_idx]
    factor = np.exp(np.abs(np.log(result.shipped_ms / measured)))
    order = np.argsort(-factor, kind="stable")
    is_worst = np.zeros(len(factor), bool)
    is_worst[order[: max(1, round(WORST_SHARE * len(factor)))]] = True
    lifts = {reason.text: _lift(reason.applies, is_worst) for reason in reasons}
    given = {
        reason.text
        for reason in reasons
        if lifts[reason.text] >= MIN_LIFT and chance_of(reason.applies, is_worst) <= MAX_CHANCE
    }
    error_pct = np.abs(result.shipped_ms / measured - 1) * 100
    worst = []
    for i in order[:NUM_WORST_ROWS]:
        row = corpus.rows[result.row_idx[i]]
        own = [r for r in reasons if r.applies[i] and r.text in given]
        own.sort(key=lambda reason: -lifts[reason.text])
        worst.append(
            {
                "model": row.model, "family": row.family, "device": str(corpus.devices[result.row_idx[i]]),
                "precision": str(row.precision), "batch_size": row.batch_size, "source": row.source_id,
                "software": " ".join((row.framework, row.framework_version)).strip(),
                "measured_ms": float(measured[i]), "predicted_ms": float(result.shipped_ms[i]),
                "factor": float(factor[i]),
                "reasons": [f"{r.text}{f' ({r.detail[i]})' if r.detail[i] else ''}" for r in own[:MAX_REASONS]],
            }
        )  # fmt: skip
    return {
        "worst_rows": worst,
        "reasons": [
            {
                "reason": reason.text,
                "is_given": reason.text in given,
                "n": int(reason.applies.sum()),
                "share_pct": float(reason.applies.mean() * 100),
                "share_of_worst_pct": float(reason.applies[is_worst].mean() * 100),
                "mape_with_pct": float(error_pct[reason.applies].mean()),
                "mape_without_pct": float(error_pct[~reason.applies].mean()) if (~reason.applies).any() else None,
            }
            for reason in sorted(reasons, key=lambda reason: -lifts[reason.text])
            if reason.applies.any()
        ],
    }


def _lift(applies: np.ndarray, is_worst: np.ndarray) -> float:
    return float(applies[is_worst].mean() / applies.mean()) if applies.any() else 0.0


def chance_of(applies: np.ndarray, is_worst: np.ndarray) -> float:
    """Probability that as many rows of a random choice have the reason as of the worst: the hypergeometric tail."""
    total, marked, drawn = len(applies), int(applies.sum()), int(is_worst.sum())
    log_all = _log_choose(total, drawn)
    return sum(
        math.exp(_log_choose(marked, k) + _log_choose(total - marked, drawn - k) - log_all)
        for k in range(int((applies & is_worst).sum()), min(marked, drawn) + 1)
        if drawn - k <= total - marked
    )


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def reasons_of(result: TrackResult, corpus: Corpus, folds: Sequence[Fold], noise: RepeatNoise) -> list[Reason]:
    """Every reason on every tested row, fold after fold as ``result`` has them."""
    shares, class_names = op_class_shares(corpus)
    per_fold = [_training_reasons(corpus, fold, shares, class_names) for fold in folds]
    merged = [
        Reason(
            parts[0].text,
            np.concatenate([part.applies for part in parts]),
            np.concatenate([part.detail for part in parts]),
        )
        for parts in zip(*per_fold, strict=True)
    ]
    return merged + _graph_distance(corpus, folds) + _own_reasons(corpus, result.row_idx, noise)


def _few(text: str, counts: np.ndarray, limit: int, unit: str = "training rows") -> Reason:
    return Reason(text, counts < limit, np.array([f"{count} {unit}" for count in counts]))


def _training_reasons(corpus: Corpus, fold: Fold, shares: np.ndarray, class_names: list[str]) -> list[Reason]:
    """What the fold's training rows lack of each of its test rows."""
    training = [corpus.rows[i] for i in fold.train_idx if not corpus.is_inference[i]]
    tested = [corpus.rows[i] for i in fold.test_idx]

    def counts(key) -> np.ndarray:
        seen = Counter(key(row) for row in training)
        return np.array([seen[key(row)] for row in tested], np.int64)

    def generation(row: MeasurementRow) -> str:
        return row.spec.architecture

    rare = shares[fold.test_idx] * _is_rare(corpus, fold, shares)
    rare_share, rare_name = rare.sum(1), np.array(class_names)[rare.argmax(1)]
    return [
        Reason(
            "much of the roofline time is in ops that fewer than three training families have",
            rare_share >= RARE_OP_ROW_SHARE,
            np.array([f"{share:.0%}, mostly {name}" for share, name in zip(rare_share, rare_name, strict=True)]),
        ),
        _few("few siblings: training has hardly a row of this family", counts(lambda r: r.family), FEW_SIBLINGS),
        _few(
            "training has hardly a row of this GPU",
            counts(lambda r: r.spec.name),
            FEW_DEVICE_ROWS,
        ),
        _few("training has no GPU of this generation", counts(generation), 1),
        _few(
            "training has hardly a row of this source",
            counts(lambda r: r.source_id.split("-")[0]),
            FEW_SOURCE_ROWS,
        ),
        _few(
            "training has hardly a row of this software",
            counts(lambda r: (r.framework, r.framework_version, r.compiler)),
            FEW_SOFTWARE_ROWS,
        ),
        _few(
            "training has hardly a row of this GPU, precision and memory format together",
            counts(lambda r: (r.spec.name, r.precision, r.memory_format)),
            FEW_COMBINATION_ROWS,
        ),
        Reason(
            "batch, size or ops outside the training rows (predict warns)",
            out_of_range(corpus, fold),
            np.full(len(tested), ""),
        ),
    ]  # fmt: skip


def op_classes(corpus: Corpus) -> tuple[np.ndarray, list[str]]:
    """(num_nodes,) int64 class of each node and the classes' names: op kind; convolutions by grouping, layout, type."""
    rows = corpus.aware
    feature = {name: i for i, name in enumerate(NODE_FEATURE_NAMES)}
    kinds = [*OP_KINDS, "unknown op"]
    class_idx = rows.kind_idx.astype(np.int64).copy()
    names = list(kinds)
    for conv_class in ("dense", "grouped", "depthwise"):
        is_nhwc = rows.node_features[:, feature[f"nhwc_{conv_class}_conv"]] > 0
        is_half = rows.node_features[:, feature[f"half_{conv_class}_conv"]] > 0
        for layout, half, mask in (
            ("NHWC", "half", is_nhwc & is_half), ("NHWC", "full", is_nhwc & ~is_half), ("", "half", ~is_nhwc & is_half),
        ):  # fmt: skip
            class_idx[mask] = len(names)
            names.append(" ".join(word for word in (conv_class, layout, half, "convolution") if word))
    return class_idx, names


def _is_rare(corpus: Corpus, fold: Fold, shares: np.ndarray) -> np.ndarray:
    """(num_classes,) bool: op classes that too few training families spend time on."""
    training = fold.train_idx[~corpus.is_inference[fold.train_idx]]
    families = np.array([corpus.rows[i].family for i in training])
    num_families = np.zeros(shares.shape[1], np.int64)
    for family in np.unique(families):
        num_families += (shares[training[families == family]] >= RARE_OP_MIN_SHARE).any(0)
    return num_families < RARE_OP_FAMILIES


def op_class_shares(corpus: Corpus) -> tuple[np.ndarray, list[str]]:
    """(num_rows, num_classes) float64 share of each row's roofline time."""
    class_idx, names = op_classes(corpus)
    time = roofline_by_class(corpus.aware, class_idx, len(names))
    return time / time.sum(1, keepdims=True), names


def _graph_distance(corpus: Corpus, folds: Sequence[Fold]) -> list[Reason]:
    """Distance of each tested graph to the nearest training graph, by shares of time and mean op sizes."""
    columns = [i for i, name in enumerate(SUMMARY_FEATURE_NAMES) if name.startswith(("share_", "mean_"))]
    features = summed_features(corpus.aware)[:, columns].astype(np.float64)
    deviation = features.std(0)
    features = (features - features.mean(0)) / np.where(deviation > 1e-6, deviation, 1.0)
    nearest = np.concatenate([_nearest(features[fold.test_idx], features[fold.train_idx]) for fold in folds])
    limit = float(np.quantile(nearest, FAR_GRAPH_QUANTILE))
    text = f"the graph is among the {1 - FAR_GRAPH_QUANTILE:.0%} farthest from any training graph"
    return [Reason(text, nearest > limit, np.full(len(nearest), ""))]


def _nearest(tested: np.ndarray, training: np.ndarray) -> np.ndarray:
    """(a,) Euclidean distance of each row of ``tested`` (a, K) to the nearest of ``training`` (b, K)."""
    square = (training**2).sum(1)
    parts = [
        (square - 2 * chunk @ training.T).min(1) + (chunk**2).sum(1)
        for chunk in np.array_split(tested, max(1, len(tested) // 256))
    ]
    return np.sqrt(np.maximum(np.concatenate(parts), 0))


def _own_reasons(corpus: Corpus, row_idx: np.ndarray, noise: RepeatNoise) -> list[Reason]:
    """What is special about a row whatever was trained on."""
    rows = [corpus.rows[i] for i in row_idx]
    no_detail = np.full(len(rows), "")
    host_to_gpu = corpus.aware.globals[row_idx, GLOBAL_FEATURE_NAMES.index("log_host_to_gpu")]
    below = corpus.target_ms[row_idx] / roofline_of(corpus.aware)[row_idx]
    spread = np.array([noise.spread_pct_by_row.get(row.row_id, 0.0) for row in rows])
    by_source = {
        source: float(np.median(spreads))
        for source, spreads in noise.spreads_by_source(corpus.rows).items()
        if len(spreads) >= MIN_NOISY_REPEATS
    }
    source_spread = np.array([by_source.get(source, 0.0) for source in source_family(corpus)[row_idx]])
    ratio = np.array([noise.other_source_ratio.get(row.row_id, 1.0) for row in rows])
    layout = _layout_ratios(corpus)[row_idx]
    return [
        Reason(
            "launch-bound: the host's launches take longer than the roofline of the kernels",
            host_to_gpu > 0,
            np.array([f"{np.exp(value):.1f} times" for value in host_to_gpu]),
        ),
        Reason(
            "measured below the roofline of the graph: the run did less work than the graph says",
            below < 1,
            np.array([f"{value:.2f} of it" for value in below]),
        ),
        Reason(
            "repeats of this very configuration differ",
            spread >= NOISY_PCT,
            np.array([f"by {value:.0f} %" for value in spread]),
        ),
        Reason(
            "noisy source: its repeats differ",
            source_spread >= NOISY_PCT,
            np.array([f"by a median of {value:.0f} %" for value in source_spread]),
        ),
        Reason(
            "another source measured the same configuration otherwise",
            np.maximum(ratio, 1 / ratio) >= DISAGREEMENT,
            np.array([f"this one takes {value:.2f} times as long" for value in ratio]),
        ),
        Reason(
            "the same network is much faster in the other memory format: the step rests on slow kernels of this one",
            layout >= SLOW_LAYOUT,
            np.array([f"{value:.1f} times" for value in layout]),
        ),
        Reason(
            "data loading or a host copy is part of the step",
            np.array([row.data_loader or row.host_copy for row in rows]),
            no_detail,
        ),
        Reason("Windows or WSL", np.array([host_os_of(row.os) != "linux" for row in rows]), no_detail),
    ]  # fmt: skip


def _layout_ratios(corpus: Corpus) -> np.ndarray:
    """(num_rows,) time per sample over that of the same network in the other memory format; 1 where it was not timed.

    Same model, GPU, precision, input and software; the batch may differ.
    """
    per_sample: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    keys = []
    for row in corpus.rows:
        key = (
            row.model, row.device, row.precision, row.input, row.framework, row.framework_version, row.compiler,
            row.phase, row.source_id.split("-")[0],
        )  # fmt: skip
        keys.append(key)
        per_sample[key][row.memory_format].append(row.step_time_ms / row.batch_size)
    ratios = np.ones(len(corpus.rows))
    for i, (row, key) in enumerate(zip(corpus.rows, keys, strict=True)):
        others = [times for layout, times in per_sample[key].items() if layout != row.memory_format]
        if others:
            ratios[i] = row.step_time_ms / row.batch_size / float(np.median(np.concatenate(others)))
    return ratios
