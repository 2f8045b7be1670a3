"""One training run of the GNN: rows in, weights out."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from gnnpred.training.data import FlatRows
from gnnpred.training.model import ModelSettings, StepTimeGNN

logger = logging.getLogger(__name__)

OPERATOR_HUBER_DELTA = 0.2  # kernels of many sources: noisier than steps


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How one network is trained; the recipe files hold these fields."""

    epochs: int = 20
    rows_per_epoch: int = 0  # drawn by weight, without repeats; 0 = all rows, the weight then scales the loss
    graphs_per_batch: int = 32
    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    huber_delta: float = 0.1
    gradient_clip: float = 1.0
    shrinkage: float = 0.15  # pull of per-op corrections towards the physics
    hide_specs: float = 0.3  # share of graphs whose device specification is hidden
    pair_weight: float = 0.0  # weight of the loss on ratios between rows that differ in precision alone
    op_weight: float = 0.5  # weight of the single-kernel loss against the step loss
    op_rows_per_batch: int = 256
    model: ModelSettings = field(default_factory=ModelSettings)


@dataclass(frozen=True)
class OperatorRows:
    """Timed single kernels. n rows, C components."""

    rows: FlatRows
    timed: np.ndarray  # (n, C) float32, 1 where the component is in the measured time
    target_ms: np.ndarray  # (n,)

    def loss(self, model: StepTimeGNN, chosen: np.ndarray, known: np.ndarray) -> torch.Tensor:
        """Huber loss of log kernel time over the chosen rows."""
        op_ms, _, _ = model(self.rows.batch(chosen, specs_known=known))  # one node per row
        predicted = (op_ms * torch.from_numpy(self.timed[chosen])).sum(1)
        target = torch.from_numpy(self.target_ms[chosen].astype(np.float32))
        error = torch.log(predicted + 1e-6) - torch.log(target)
        return _huber(error, OPERATOR_HUBER_DELTA, torch.ones_like(error))


def train_model(
    rows: FlatRows,
    target_ms: np.ndarray,
    row_idx: np.ndarray,
    row_weight: np.ndarray,
    settings: TrainSettings,
    *,
    seed: int,
    partner_idx: np.ndarray | None = None,
    operators: OperatorRows | None = None,
    operator_idx: np.ndarray | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> StepTimeGNN:
    """Fit log step time on the chosen rows.

    target_ms (num_rows,), row_idx (n,) int64, row_weight (num_rows,). ``partner_idx`` (num_rows,) int64 is the row
    that differs from a row in precision alone, -1 for none; a partner outside ``row_idx`` is never read.
    Deterministic for a seed on one machine and thread count.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = StepTimeGNN(settings.model)
    _standardise(model, rows, row_idx)
    rows_per_epoch = min(settings.rows_per_epoch or len(row_idx), len(row_idx))
    is_sampled = rows_per_epoch < len(row_idx)
    probability = row_weight[row_idx] / row_weight[row_idx].sum()
    steps_per_epoch = max(1, rows_per_epoch // settings.graphs_per_batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=steps_per_epoch * settings.epochs, pct_start=0.2
    )
    log_target = torch.from_numpy(np.log(target_ms).astype(np.float32))
    weight = torch.from_numpy((np.ones_like(row_weight) if is_sampled else row_weight).astype(np.float32))
    partner = (
        np.full(len(target_ms), -1) if partner_idx is None else np.where(np.isin(partner_idx, row_idx), partner_idx, -1)
    )
    for epoch in range(settings.epochs):
        started = time.perf_counter()
        order = (
            rng.choice(row_idx, rows_per_epoch, replace=False, p=probability)
            if is_sampled
            else rng.permutation(row_idx)
        )
        losses = []
        for step in range(steps_per_epoch):
            chosen = order[step * settings.graphs_per_batch : (step + 1) * settings.graphs_per_batch]
            paired = np.flatnonzero(partner[chosen] >= 0) if settings.pair_weight > 0 else np.zeros(0, np.int64)
            known = (rng.random(len(chosen)) >= settings.hide_specs).astype(np.float32)
            known = np.concatenate([known, known[paired]])  # both rows of a pair see the device alike
            chosen = np.concatenate([chosen, partner[chosen[paired]]])
            _, step_ms, deviation = model(rows.batch(chosen, specs_known=known))
            error = torch.log(step_ms) - log_target[chosen]
            loss = _huber(error, settings.huber_delta, weight[chosen]) + settings.shrinkage * deviation.mean()
            if len(paired):
                ratio_error = error[len(chosen) - len(paired) :] - error[paired]
                share = len(paired) / len(chosen)
                ratio_loss = _huber(ratio_error, settings.huber_delta, torch.ones_like(ratio_error))
                loss = loss + settings.pair_weight * share * ratio_loss
            if operators is not None and operator_idx is not None and len(operator_idx) and settings.op_weight > 0:
                picked = rng.choice(operator_idx, settings.op_rows_per_batch)
                op_known = (rng.random(len(picked)) >= settings.hide_specs).astype(np.float32)
                loss = loss + settings.op_weight * operators.loss(model, picked, op_known)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        mean_loss = float(np.mean(losses))
        logger.info("epoch %d loss %.4f (%.1f s)", epoch + 1, mean_loss, time.perf_counter() - started)
        if on_epoch:
            on_epoch(epoch, mean_loss)
    return model.eval()


def _huber(error: torch.Tensor, delta: float, weight: torch.Tensor) -> torch.Tensor:
    """Weighted Huber loss, scaled to be about |error| for large errors."""
    loss = nn.functional.huber_loss(error, torch.zeros_like(error), delta=delta, reduction="none") / delta
    return (loss * weight).sum() / weight.sum()


def _standardise(model: StepTimeGNN, rows: FlatRows, row_idx: np.ndarray) -> None:
    """Set the input means and deviations from the training rows alone."""
    sample = row_idx if len(row_idx) <= 2000 else row_idx[:: len(row_idx) // 2000]
    batch = rows.batch(sample, specs_known=np.ones(len(sample)))
    for name, values in (("node", batch.node_features), ("global", torch.from_numpy(rows.globals[row_idx]))):
        std = values.std(0)
        getattr(model, f"{name}_mean").copy_(values.mean(0))
        # a column that is constant in training says nothing: keep it near zero at prediction too
        getattr(model, f"{name}_std").copy_(torch.where(std < 1e-6, torch.ones_like(std), std))


@torch.no_grad()
def predict_rows(model: StepTimeGNN, rows: FlatRows, row_idx: np.ndarray, *, specs_known: np.ndarray) -> np.ndarray:
    """Step times in ms, (n,), for the chosen rows; specs_known (n,)."""
    model.eval()
    parts = []
    for start in range(0, len(row_idx), 64):
        chosen = row_idx[start : start + 64]
        parts.append(model(rows.batch(chosen, specs_known=specs_known[start : start + 64]))[1].numpy())
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
