"""Errors on single timed kernels of GPUs that were wholly held out: operator level, where most of bf16 is."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnpred.checkpoint import blend
from gnnpred.features import SPEC_FEATURE_NAMES
from gnnpred.metrics import summarise_errors
from gnnpred.training.experiments import Corpus, Fold, RecipeSettings
from gnnpred.training.loop import OperatorRows
from gnnpred.training.model import StepTimeGNN
from gnnpred.training.networks import blend_networks, load_networks

MIN_GROUP_ROWS = 20
MIN_FIT_ROWS = 20  # of a group that gets an efficiency and a latency of its own
TREE_WEIGHT = 0.5  # share of the kernels' own trees in their geometric mean with the networks
_BATCH = 512


@torch.no_grad()
def predict_kernels(model: StepTimeGNN, operators: OperatorRows, idx: np.ndarray) -> np.ndarray:
    """(n,) ms of the timed components of the chosen kernels, on a GPU that the network has not seen."""
    parts = []
    for start in range(0, len(idx), _BATCH):
        chosen = idx[start : start + _BATCH]
        op_ms, _, _ = model.eval()(operators.rows.batch(chosen, specs_known=np.zeros(len(chosen), np.float32)))
        parts.append((op_ms * torch.from_numpy(operators.timed[chosen])).sum(1).numpy())
    return np.concatenate(parts).astype(float) if parts else np.zeros(0)


def timed_physics_ms(operators: OperatorRows) -> np.ndarray:
    """(n,) roofline time of the timed components of every kernel."""
    return (operators.rows.physics_ms * operators.timed).sum(1).astype(float)


def kernel_features(operators: OperatorRows) -> np.ndarray:
    """(n, K) float32 for the kernels' trees: node features, job, timed components, kind; no device specification.

    Predicting hides the specification of an unseen GPU from the networks too. MAPE without against with it on held-out
    GPUs: A100-SXM4-80GB 17 / 18, T4 18 / 19, V100-SXM2-16GB 27 / 32, but RTX3090 29 / 15.
    """
    rows = operators.rows
    first = len(SPEC_FEATURE_NAMES)  # the specification comes first among the globals
    log_physics = np.log(timed_physics_ms(operators) + 1e-9)[:, None]
    parts = [rows.node_features, rows.globals[:, first:], operators.timed, log_physics, rows.kind_idx[:, None]]
    return np.concatenate(parts, axis=1).astype(np.float32)


def fit_kernel_trees(operators: OperatorRows, training: np.ndarray, *, seed: int = 0):
    """Gradient-boosted trees on log(measured / roofline) of single kernels; a scikit-learn regressor."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    trees = HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=250, learning_rate=0.08, max_leaf_nodes=31, min_samples_leaf=10,
        l2_regularization=1.0, max_features=0.5, random_state=seed,
    )  # fmt: skip
    target = np.log(operators.target_ms[training] / timed_physics_ms(operators)[training])
    return trees.fit(kernel_features(operators)[training], target)


def predict_kernel_trees(trees, operators: OperatorRows, idx: np.ndarray) -> np.ndarray:
    """(n,) ms of the chosen kernels by :func:`fit_kernel_trees`."""
    return np.exp(trees.predict(kernel_features(operators)[idx])) * timed_physics_ms(operators)[idx]


def efficiency_and_latency(physics: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """(a, b) >= 0 of ``measured = a * physics + b`` with the least mean relative error: reweighted least squares."""
    matrix = np.stack([physics / measured, 1 / measured], 1)
    weight = np.ones(len(measured))
    a, b = 1.0, 0.0
    for _ in range(15):
        root = np.sqrt(weight)
        a, b = np.linalg.lstsq(matrix * root[:, None], root, rcond=None)[0]
        if b < 0 or a < 0:
            a, b = max(float(np.average(measured / physics, weights=weight)), 0.0), 0.0
        weight = 1 / np.maximum(np.abs(matrix @ np.array([a, b]) - 1), 0.02)
    return float(a), float(b)


def two_parameter_baseline(corpus: Corpus, idx: np.ndarray, training: np.ndarray) -> np.ndarray:
    """(n,) ms: a constant efficiency and a latency per op kind, direction, precision and source of the other GPUs.

    Groups that the other GPUs lack take those of the next coarser key: without the source, then without precision and
    direction, then of all kernels.
    """
    physics, measured = timed_physics_ms(corpus.operators), corpus.operators.target_ms
    rows = corpus.operator_rows
    levels = [
        [(r.kind, r.phase, r.precision, r.source.split("-")[0]) for r in rows],
        [(r.kind, r.phase, r.precision) for r in rows],
        [(r.kind,) for r in rows],
        [() for _ in rows],
    ]
    predicted = np.full(len(idx), np.nan)
    for level, keys in enumerate(levels):
        members: dict[tuple, list[int]] = {}
        for i in training:
            members.setdefault(keys[i], []).append(i)
        waiting = np.flatnonzero(np.isnan(predicted))
        for key in {keys[idx[p]] for p in waiting}:
            known = np.array(members.get(key, []), np.int64)
            if len(known) < MIN_FIT_ROWS and level < len(levels) - 1:
                continue
            a, b = efficiency_and_latency(physics[known], measured[known])
            own = [p for p in waiting if keys[idx[p]] == key]
            predicted[own] = a * physics[idx[own]] + b
    return predicted


def physics_constant_baseline(corpus: Corpus, idx: np.ndarray, training: np.ndarray) -> np.ndarray:
    """(n,) ms: roofline time of the timed components times the median ratio per op kind of the other GPUs' kernels."""
    physics = timed_physics_ms(corpus.operators)
    ratio = corpus.operators.target_ms / physics
    kinds = np.array([row.kind for row in corpus.operator_rows])
    overall = float(np.median(ratio[training]))
    predicted = np.empty(len(idx))
    for kind in np.unique(kinds[idx]):
        known = ratio[training[kinds[training] == kind]]
        own = kinds[idx] == kind
        predicted[own] = physics[idx[own]] * (np.median(known) if len(known) else overall)
    return predicted


def kernel_table(
    corpus: Corpus,
    folds: Sequence[Fold],
    settings: RecipeSettings,
    folder: Path,
    *,
    predict: Callable[[Fold, np.ndarray], np.ndarray] | None = None,
) -> dict[str, Any]:
    """Errors over all kernels of the held-out GPUs, by op kind, precision and GPU; {} where those GPUs have none.

    ``predict`` gives the times of a fold's kernels; by default the geometric mean of all its kept networks, which is
    what per-op times of a prediction come from. Beside it: the physics with a constant, the two-parameter fit, boosted
    trees on the kernels of the other GPUs, and the mean of networks and trees; the trees are not part of a checkpoint.
    """
    collected: dict[str, list[np.ndarray]] = {}
    idx_parts = []
    for fold in folds:
        is_own = np.isin(corpus.operator_devices, fold.hidden_devices)
        idx, training = np.flatnonzero(is_own), np.flatnonzero(~is_own)
        if not len(idx):
            continue
        if predict is None:
            models = load_networks(folder, fold, settings)
            shares = settings.shares_of(settings.members_of(fold.track))
            ours = blend_networks([predict_kernels(model, corpus.operators, idx) for model in models], shares)
        else:
            ours = predict(fold, idx)
        trees = predict_kernel_trees(fit_kernel_trees(corpus.operators, training), corpus.operators, idx)
        found = {
            "networks": ours,
            "baseline": physics_constant_baseline(corpus, idx, training),
            "two_parameter": two_parameter_baseline(corpus, idx, training),
            "trees": trees,
            "with_trees": blend(ours, trees, TREE_WEIGHT),
        }
        for name, values in found.items():
            collected.setdefault(name, []).append(values)
        idx_parts.append(idx)
    if not idx_parts:
        return {}
    idx = np.concatenate(idx_parts)
    predicted = {name: np.concatenate(parts) for name, parts in collected.items()}
    measured = corpus.operators.target_ms[idx]
    rows = [corpus.operator_rows[i] for i in idx]
    keys = {
        "by_kind": np.array([row.kind for row in rows]),
        "by_precision": np.array([row.precision for row in rows]),
        "by_device": corpus.operator_devices[idx],
    }
    others = [name for name in predicted if name != "networks"]

    def summary(chosen: np.ndarray) -> dict[str, Any]:
        return {
            **summarise_errors(predicted["networks"][chosen], measured[chosen]).as_dict(),
            **{
                f"{name}_mape_pct": summarise_errors(predicted[name][chosen], measured[chosen]).mape_pct
                for name in others
            },
        }

    def summaries(key: np.ndarray) -> dict[str, dict[str, Any]]:
        names, counts = np.unique(key, return_counts=True)
        return {
            str(name): summary(key == name)
            for name, count in sorted(zip(names, counts, strict=True), key=lambda pair: -pair[1])
            if count >= MIN_GROUP_ROWS
        }

    return {
        "all": summary(np.ones(len(idx), bool)),
        **{name: summarise_errors(predicted[name], measured).as_dict() for name in others},
        **{name: summaries(key) for name, key in keys.items()},
    }
