"""The learned part of a data-parallel step: overlap, contention, overhead and stragglers, per software family.

One set of constants is fitted for all software, and per software family a factor on each of four of them, pulled
towards 1. What several GPUs add to a step is a sum (exposed collectives, contention, synchronisation in ms) plus a
small share of the step per doubling of the ranks: the slowest rank of many.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnnpred.communication.collectives import all_reduce_ms
from gnnpred.communication.timeline import StepConstants, fill_buckets, local_part
from gnnpred.communication_fit.gradient_profile import NUM_SEGMENTS
from gnnpred.communication_fit.pairs import Pair

GROUPS = ("torch-ddp", "horovod", "tf-replicated", "mxnet", "oneflow", "paddle", "mindspore")
FACTORS = ("contention", "sync", "link", "network")
LINK_CLASSES = (
    "nvlink_slowdown",
    "pcie_slowdown",
    "pcie_crowd_slowdown",
    "host_staged_slowdown",
    "host_staged_crowd_slowdown",
)
_BLOCK = 2  # segments of a profile that the fit walks at once
_STEPS = NUM_SEGMENTS // _BLOCK

START = {
    "contention": 0.3,
    "sync_base_ms": 1.5,
    "sync_ms_per_log2_gpu": 1.0,
    "straggler_share_per_log2_gpu": 0.004,
    "nvlink_slowdown": 2.5,
    "pcie_slowdown": 2.5,
    "pcie_crowd_slowdown": 2.5,
    "host_staged_slowdown": 2.5,
    "host_staged_crowd_slowdown": 4.0,
    "network_slowdown": 1.3,
}
_SEARCH_STEPS = (0.5, 0.25, 0.12, 0.06)  # in the logarithm of a constant
_SMALLEST_GAIN = 1e-5
_AT_LEAST_ONE = frozenset((*LINK_CLASSES, "network_slowdown"))
_PULL = 1e-3  # of the constants to their start: matters where no row speaks
SIA_WEIGHT = 0.3  # a simulator's grids of two models on five GPUs
# Of the factors to 1; the network is the same whatever drives it.
_GROUP_PULL = {"contention": 1e-2, "sync": 1e-2, "link": 1e-2, "network": 5e-2}


@dataclass(frozen=True)
class PairArrays:
    """Pairs as arrays, so that one loss costs milliseconds. n pairs."""

    single_ms: np.ndarray  # (n,)
    multi_ms: np.ndarray  # (n,)
    backward_ms: np.ndarray  # (n,) of the micro-step that communicates
    local_ms: np.ndarray  # (n, _STEPS): idle-machine all-reduce time that becomes ready with a part of the backward
    network_ms: np.ndarray  # (n, _STEPS): the same over all nodes
    log2_gpus: np.ndarray  # (n,)
    link_class: np.ndarray  # (n,) position in LINK_CLASSES
    group: np.ndarray  # (n,) position in GROUPS

    def select(self, chosen: np.ndarray) -> "PairArrays":
        return PairArrays(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class LearnedConstants:
    """``constants`` hold for all software; ``factors[group][name]`` scale them per software family."""

    constants: dict[str, float]
    factors: dict[str, dict[str, float]]


def pair_arrays(pairs: Sequence[Pair]) -> PairArrays:
    """Everything about the pairs that does not depend on the constants."""
    local_ms, network_ms = np.zeros((2, len(pairs), _STEPS))
    known: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
    for position, pair in enumerate(pairs):
        key = (pair.row.graph_id, pair.gradient_width, pair.fabric.description, pair.fabric.gpus, pair.fabric.nodes)
        if key not in known:
            known[key] = _ready_times(pair)
        local_ms[position], network_ms[position] = known[key]
    return PairArrays(
        single_ms=np.array([pair.single_ms for pair in pairs]),
        multi_ms=np.array([pair.multi_ms for pair in pairs]),
        # Under accumulation only the last micro-step communicates.
        backward_ms=np.array([p.profile.backward_share * p.single_ms / p.row.grad_accum for p in pairs]),
        local_ms=local_ms,
        network_ms=network_ms,
        log2_gpus=np.log2([pair.fabric.gpus for pair in pairs]),
        link_class=np.array([LINK_CLASSES.index(StepConstants.link_class(pair.fabric)) for pair in pairs]),
        group=np.array([GROUPS.index(pair.group) for pair in pairs]),
    )


def _ready_times(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    local_ms, network_ms = np.zeros((2, _STEPS))
    local = local_part(pair.fabric)
    for bucket in fill_buckets(pair.profile.gradients(pair.gradient_width)):
        position = min(bucket.last_op // _BLOCK, _STEPS - 1)
        if local is not None:
            local_ms[position] += all_reduce_ms(bucket.num_bytes, local)
        if pair.fabric.inter is not None:
            network_ms[position] += all_reduce_ms(bucket.num_bytes, pair.fabric)
    return local_ms, network_ms


def predict_ms(arrays: PairArrays, learned: LearnedConstants) -> np.ndarray:
    """Step times of the multi-GPU runs from the single-GPU runs, (n,) ms.

    The same walk as :func:`gnnpred.communication.timeline.overlap`, over all pairs at once.
    """
    c = learned.constants
    factor = {
        name: np.array([learned.factors.get(group, {}).get(name, 1.0) for group in GROUPS])[arrays.group]
        for name in FACTORS
    }
    slowdown = np.array([_slowdown(c, name) for name in LINK_CLASSES])
    local_ms = arrays.local_ms * (slowdown[arrays.link_class] * factor["link"])[:, None]
    load_ms = np.maximum(local_ms, arrays.network_ms * (c["network_slowdown"] * factor["network"])[:, None])
    work_ms = arrays.backward_ms / _STEPS
    stretch = 1 + c["contention"] * factor["contention"]
    now_ms, free_ms = np.zeros((2, len(work_ms)))
    for step in range(_STEPS):
        busy_ms = np.maximum(free_ms - now_ms, 0)
        # Stretched work fits into the busy time, or fills it and the rest runs at full speed.
        now_ms = now_ms + np.minimum(work_ms * stretch, work_ms + busy_ms * (1 - 1 / stretch))
        load = load_ms[:, step]
        free_ms = np.where(load > 0, np.maximum(free_ms, now_ms) + load, free_ms)
    exposed_ms = np.maximum(now_ms, free_ms) - arrays.backward_ms
    sync_ms = (c["sync_base_ms"] + c["sync_ms_per_log2_gpu"] * arrays.log2_gpus) * factor["sync"]
    straggler_ms = c["straggler_share_per_log2_gpu"] * arrays.log2_gpus * arrays.single_ms
    return arrays.single_ms + exposed_ms + sync_ms + straggler_ms


def _slowdown(constants: dict[str, float], name: str) -> float:
    """A crowd is never quicker than a few."""
    return max(constants[name], constants[name.replace("_crowd", "")])


def fit_constants(arrays: PairArrays, weights: np.ndarray, *, max_sweeps: int = 6) -> LearnedConstants:
    """Constants that minimise the weighted mean absolute error of the log step time."""
    groups = [GROUPS[g] for g in np.unique(arrays.group).tolist() if GROUPS[g] != "torch-ddp"]
    start = np.array([np.log(value) for value in START.values()] + [0.0] * (len(groups) * len(FACTORS)))
    weights = weights / weights.sum()
    group_pull = np.tile([_GROUP_PULL[name] for name in FACTORS], len(groups))

    def learned_of(log_values: np.ndarray) -> LearnedConstants:
        values = np.exp(log_values).tolist()
        constants = {
            name: max(1.0, value) if name in _AT_LEAST_ONE else value
            for name, value in zip(START, values, strict=False)
        }
        rest = iter(values[len(START) :])
        return LearnedConstants(constants, {group: {name: next(rest) for name in FACTORS} for group in groups})

    def errors_of(log_values: np.ndarray, part: PairArrays) -> np.ndarray:
        return np.abs(np.log(predict_ms(part, learned_of(log_values)) / part.multi_ms))

    def pull_of(log_values: np.ndarray) -> float:
        moved = np.abs(log_values - start)
        pull = _PULL * moved[: len(START)].mean()
        return float(pull + (moved[len(START) :] * group_pull).mean()) if groups else float(pull)

    # One axis after the other, with steps that halve; each is tried on the pairs that it concerns alone.
    affected = [_affected(arrays, name) for name in START]
    affected += [np.flatnonzero(arrays.group == GROUPS.index(group)) for group in groups for _ in FACTORS]
    parts = [arrays.select(own) for own in affected]
    best, errors = start.copy(), errors_of(start, arrays)
    best_loss = float((weights * errors).sum()) + pull_of(best)
    for step in _SEARCH_STEPS:
        for _ in range(max_sweeps):
            before = best_loss
            for axis, (own, part) in enumerate(zip(affected, parts, strict=True)):
                for sign in (1.0, -1.0):
                    trial, trial_errors = best.copy(), errors.copy()
                    trial[axis] += sign * step
                    trial_errors[own] = errors_of(trial, part)
                    trial_loss = float((weights * trial_errors).sum()) + pull_of(trial)
                    if trial_loss < best_loss - 1e-9:
                        best, errors, best_loss = trial, trial_errors, trial_loss
                        break
            if best_loss > before - _SMALLEST_GAIN:
                break
    return learned_of(best)


def _affected(arrays: PairArrays, constant: str) -> np.ndarray:
    """Positions of the pairs whose prediction hangs on a constant."""
    if constant in LINK_CLASSES:
        classes = [
            i for i, name in enumerate(LINK_CLASSES) if name.replace("_crowd", "") == constant or name == constant
        ]
        return np.flatnonzero(np.isin(arrays.link_class, classes))
    if constant == "network_slowdown":
        return np.flatnonzero(arrays.network_ms.any(axis=1))
    return np.arange(len(arrays.single_ms))


def pair_weights(pairs: Sequence[Pair]) -> np.ndarray:
    """(n,): equal weight per (site, model, GPU, one or several nodes), then per configuration inside it."""
    keys = [(p.site, p.row.model, p.row.device, p.fabric.nodes > 1) for p in pairs]
    counts = Counter(keys)
    weights = np.array([1 / counts[key] for key in keys])
    weights[[pair.site == "sia" for pair in pairs]] *= SIA_WEIGHT
    return weights / weights.sum()


def held_out_constants(pairs: Sequence[Pair], **options: int) -> dict[str, LearnedConstants]:
    """For every model family the constants that were fitted without it."""
    arrays, weights = pair_arrays(pairs), pair_weights(pairs)
    families = np.array([pair.family for pair in pairs])
    return {
        name: fit_constants(arrays.select(families != name), weights[families != name], **options)
        for name in np.unique(families).tolist()
    }


def predict_held_out(
    pairs: Sequence[Pair], learned: Mapping[str, LearnedConstants], single_ms: np.ndarray | None = None
) -> np.ndarray:
    """(n,) predictions of every pair by constants that have not seen its family.

    ``single_ms`` (n,) replaces the measured steps on one GPU, by predicted ones for instance.
    """
    arrays = pair_arrays(pairs)
    if single_ms is not None:
        scale = single_ms / arrays.single_ms
        arrays = replace(arrays, single_ms=single_ms, backward_ms=arrays.backward_ms * scale)
    families = np.array([pair.family for pair in pairs])
    predicted = np.zeros(len(pairs))
    for name in np.unique(families).tolist():
        test = families == name
        predicted[test] = predict_ms(arrays.select(test), learned[name])
    return predicted
