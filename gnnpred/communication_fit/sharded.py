"""Fit of fully sharded steps (FSDP) from runs of the same work on few and on many GPUs.

Under full sharding there is no run on one GPU to start from. A run on more GPUs is predicted from the one on the
fewest: what the constants say that its collectives add is taken off, the compute that is left is scaled by the
micro-batch, and the collectives of the larger run are added. A model size is held out at a time.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gnnpred.communication.collectives import collective_ms
from gnnpred.communication.step_work import local_part
from gnnpred.communication_fit.collectives import pattern_search
from gnnpred.communication_fit.gradient_profile import GradientProfile
from gnnpred.communication_fit.pairs import fabric_of
from gnnpred.corpus.store import MeasurementRow
from gnnpred.job import Precision

FIELDS = ("contention", "nvlink_slowdown", "network_slowdown", "sync_base_ms", "sync_ms_per_log2_gpu")
_START = np.log([0.05, 1.2, 1.2, 2.0, 2.0])
_HIGHEST = {"contention": 0.4, "nvlink_slowdown": 2.0, "network_slowdown": 2.0}
_PULL = 3e-3
_HALF_BYTES = 2
_ADAM_PASSES = 7  # reads weight, gradient and two moments, writes all but the gradient
_BISECTIONS = 25


@dataclass(frozen=True)
class ShardedRuns:
    """Runs as arrays, (n,) each; times on an idle machine are those of one layer's weights."""

    step_ms: np.ndarray
    batch: np.ndarray  # micro-batch
    passes: np.ndarray
    forward_share: np.ndarray  # of a pass, the second forward of checkpointing counted as backward
    layers: np.ndarray
    gather_ms: np.ndarray  # (n, 2): inside a node, over the network
    scatter_ms: np.ndarray  # (n, 2)
    update_ms: np.ndarray
    log2_gpus: np.ndarray

    def select(self, chosen: np.ndarray) -> "ShardedRuns":
        return ShardedRuns(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class ShardedPairs:
    """Each run beside the one of the same configuration on the fewest GPUs."""

    few: ShardedRuns
    many: ShardedRuns
    few_rows: tuple[MeasurementRow, ...]
    many_rows: tuple[MeasurementRow, ...]

    @property
    def num_pairs(self) -> int:
        return len(self.many_rows)

    def groups(self) -> np.ndarray:
        """(n,) model size of each pair."""
        return np.array([row.model for row in self.many_rows])

    def weights(self) -> np.ndarray:
        """(n,): equal weight per model and GPU."""
        keys = [(row.model, row.device) for row in self.many_rows]
        counts = Counter(keys)
        return np.array([1 / counts[key] for key in keys])


def sharded_rows(multi: Sequence[MeasurementRow]) -> list[MeasurementRow]:
    """PyTorch FSDP runs that no note calls into question."""
    return [
        row
        for row in multi
        if row.strategy == "fsdp" and row.framework == "pytorch" and row.graph_id and not row.has_layout
        and row.step_time_ms > 0 and not row.suspect and "above the peak" not in row.note
    ]  # fmt: skip


def match_sharded(rows: Sequence[MeasurementRow], profiles: Mapping[str, GradientProfile]) -> ShardedPairs:
    """Pairs of (run on the fewest GPUs with the nearest micro-batch, run on more)."""
    groups: dict[tuple, list[MeasurementRow]] = defaultdict(list)
    for row in rows:
        groups[
            (row.source_id, row.graph_id, row.device, row.precision, row.checkpointing, row.framework_version)
        ].append(row)
    few, many = [], []
    for group in groups.values():
        fewest = min(row.gpus for row in group)
        for row in sorted(group, key=lambda r: (r.gpus, r.row_id)):
            if row.gpus == fewest:
                continue
            candidates = [r for r in group if r.gpus == fewest]
            few.append(min(candidates, key=lambda r, b=row.batch_size: (abs(np.log(r.batch_size / b)), r.row_id)))
            many.append(row)
    return ShardedPairs(run_arrays(few, profiles), run_arrays(many, profiles), tuple(few), tuple(many))


def run_arrays(rows: Sequence[MeasurementRow], profiles: Mapping[str, GradientProfile]) -> ShardedRuns:
    """Everything about the runs that does not depend on the constants."""
    own = [profiles[row.graph_id] for row in rows]
    times = np.array([_layer_times(row, profile) for row, profile in zip(rows, own, strict=True)]).reshape(-1, 4)
    forward = np.array([1 - profile.backward_share for profile in own])
    again = np.array([row.checkpointing == "full" for row in rows])
    return ShardedRuns(
        step_ms=np.array([row.step_time_ms for row in rows]),
        batch=np.array([float(row.batch_size) for row in rows]),
        passes=np.array([float(row.grad_accum) for row in rows]),
        forward_share=forward / (1 + again * forward),
        layers=np.array([float(profile.num_layers) for profile in own]),
        gather_ms=times[:, :2],
        scatter_ms=times[:, 2:],
        update_ms=np.array([_update_ms(row, profile) for row, profile in zip(rows, own, strict=True)]),
        log2_gpus=np.log2([row.gpus for row in rows]),
    )


def _layer_times(row: MeasurementRow, profile: GradientProfile) -> list[float]:
    fabric = fabric_of(row)
    local = local_part(fabric)
    num_bytes = _HALF_BYTES * profile.num_parameters / profile.num_layers
    return [
        collective_ms(kind, num_bytes, part) if part is not None else 0.0
        for kind in ("all_gather", "reduce_scatter")
        for part in (local, fabric if fabric.inter is not None else None)
    ]


def _update_ms(row: MeasurementRow, profile: GradientProfile) -> float:
    width = _HALF_BYTES if row.precision is Precision.BF16 else 4
    bytes_moved = _ADAM_PASSES * width * profile.num_parameters / row.gpus
    return bytes_moved / (row.spec.mem_bandwidth_gb_s * 1e6)  # 1 GB/s = 1e6 bytes/ms


def step_ms(runs: ShardedRuns, compute_ms: np.ndarray, constants: Mapping[str, float]) -> np.ndarray:
    """(n,) step times for the compute of one pass.

    Alike layers of :class:`gnnpred.communication.sharded.FullyShardedPass`: each is gathered one layer ahead, its
    gradients leave behind it; a layer takes the longer of its kernels and the collectives beside them.
    """
    gather, scatter = (
        np.maximum(times[:, 0] * constants["nvlink_slowdown"], times[:, 1] * constants["network_slowdown"])
        for times in (runs.gather_ms, runs.scatter_ms)
    )
    forward_ms = compute_ms * runs.forward_share
    passes = ((forward_ms, gather), (compute_ms - forward_ms, gather + scatter))
    one_pass = gather + gather + scatter  # the first of either pass and the last
    for kernels, busy in passes:
        one_pass = one_pass + runs.layers * np.maximum(kernels / runs.layers, busy)
        one_pass = one_pass + constants["contention"] * np.minimum(kernels, runs.layers * busy)
    sync_ms = constants["sync_base_ms"] + constants["sync_ms_per_log2_gpu"] * runs.log2_gpus
    return runs.passes * one_pass + runs.update_ms + sync_ms


def compute_of(runs: ShardedRuns, constants: Mapping[str, float]) -> np.ndarray:
    """(n,) ms of one pass that explain the measured steps."""
    low, high = np.zeros(len(runs.step_ms)), runs.step_ms / runs.passes
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = step_ms(runs, middle, constants) < runs.step_ms
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def predict_sharded(pairs: ShardedPairs, constants: Mapping[str, float]) -> np.ndarray:
    """(n,) step times of the larger runs."""
    compute_ms = compute_of(pairs.few, constants) * pairs.many.batch / pairs.few.batch
    return step_ms(pairs.many, compute_ms, constants)


def without_overhead(pairs: ShardedPairs) -> np.ndarray:
    """(n,) the baseline: time per sample stays as it is on the fewest GPUs."""
    few, many = pairs.few, pairs.many
    return few.step_ms / (few.passes * few.batch) * many.passes * many.batch


def _constants_of(log_values: np.ndarray) -> dict[str, float]:
    values = dict(zip(FIELDS, np.exp(log_values).tolist(), strict=True))
    return {
        name: min(max(1.0, value) if name.endswith("slowdown") else value, _HIGHEST.get(name, np.inf))
        for name, value in values.items()
    }


def fit_sharded(pairs: ShardedPairs, chosen: np.ndarray) -> dict[str, float]:
    """Constants with the least weighted mean absolute log error over the chosen pairs."""
    part = ShardedPairs(pairs.few.select(chosen), pairs.many.select(chosen), (), ())
    weights = pairs.weights()[chosen]
    weights = weights / weights.sum()

    def loss(log_values: np.ndarray) -> float:
        errors = np.abs(np.log(predict_sharded(part, _constants_of(log_values)) / part.many.step_ms))
        return float((weights * errors).sum() + _PULL * np.abs(log_values - _START).mean())

    best, _ = pattern_search(loss, _START, step=0.6, smallest_step=0.1, max_rounds=12)
    return _constants_of(best)


def held_out_by_size(pairs: ShardedPairs) -> np.ndarray:
    """(n,) predictions of every larger run by constants fitted without its model size."""
    groups = pairs.groups()
    predicted = np.zeros(pairs.num_pairs)
    for name in np.unique(groups).tolist():
        test = groups == name
        predicted[test] = predict_sharded(pairs, fit_sharded(pairs, ~test))[test]
    return predicted
