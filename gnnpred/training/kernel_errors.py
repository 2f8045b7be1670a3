"""Errors on single timed kernels of GPUs that were wholly held out: operator level, where most of bf16 is."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnpred.metrics import summarise_errors
from gnnpred.training.experiments import Corpus, Fold, RecipeSettings, load_weights
from gnnpred.training.loop import OperatorRows
from gnnpred.training.model import StepTimeGNN

MIN_GROUP_ROWS = 20
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


def physics_constant_baseline(corpus: Corpus, idx: np.ndarray, training: np.ndarray) -> np.ndarray:
    """(n,) ms: roofline time of the timed components times the median ratio per op kind of the other GPUs' kernels."""
    physics = (corpus.operators.rows.physics_ms * corpus.operators.timed).sum(1).astype(float)
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

    ``predict`` gives the times of a fold's kernels; by default its first kept network does.
    """
    idx_parts, predicted_parts, baseline_parts = [], [], []
    for fold in folds:
        is_own = corpus.operator_devices == fold.held_out_device
        idx = np.flatnonzero(is_own)
        if not len(idx):
            continue
        if predict is None:
            model = load_weights(folder / fold.file_name(0), settings.train)
            predicted_parts.append(predict_kernels(model, corpus.operators, idx))
        else:
            predicted_parts.append(predict(fold, idx))
        baseline_parts.append(physics_constant_baseline(corpus, idx, np.flatnonzero(~is_own)))
        idx_parts.append(idx)
    if not idx_parts:
        return {}
    idx = np.concatenate(idx_parts)
    predicted, baseline = np.concatenate(predicted_parts), np.concatenate(baseline_parts)
    measured = corpus.operators.target_ms[idx]
    rows = [corpus.operator_rows[i] for i in idx]
    keys = {
        "by_kind": np.array([row.kind for row in rows]),
        "by_precision": np.array([row.precision for row in rows]),
        "by_device": corpus.operator_devices[idx],
    }

    def summaries(key: np.ndarray) -> dict[str, dict[str, Any]]:
        names, counts = np.unique(key, return_counts=True)
        return {
            str(name): {
                **summarise_errors(predicted[key == name], measured[key == name]).as_dict(),
                "baseline_mape_pct": summarise_errors(baseline[key == name], measured[key == name]).mape_pct,
            }
            for name, count in sorted(zip(names, counts, strict=True), key=lambda pair: -pair[1])
            if count >= MIN_GROUP_ROWS
        }

    return {
        "all": summarise_errors(predicted, measured).as_dict(),
        "baseline": summarise_errors(baseline, measured).as_dict(),
        **{name: summaries(key) for name, key in keys.items()},
    }
