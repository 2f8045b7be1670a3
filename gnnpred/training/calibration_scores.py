"""What a user's own measurements gain on held-out rows: 20 calibration runs, and one timed forward pass.

Both work on predictions that exist already, so that scoring takes seconds. docs/calibration.md says how the
constants were chosen; the groups for which :func:`is_reported` holds had no part in that choice.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnpred.calibration import Calibration, CalibrationPrior, CalibrationRun
from gnnpred.corpus.store import MeasurementRow
from gnnpred.inference_correction import CORRECTION_POWER, INTERVAL_SHRINK
from gnnpred.metrics import summarise_errors
from gnnpred.training.evaluate import TrackResult, source_family
from gnnpred.training.experiments import Corpus
from gnnpred.training.extra_rows import ExtraRows, is_forward_pass, nearest_pass, software_key
from gnnpred.training.trees import summed_features

RUN_COUNTS = (5, 20)
GOAL_RUNS = 20
MIN_ROWS, MIN_ARCHITECTURES = 40, 6  # of a machine
NUM_DRAWS, MAX_TEST_ROWS = 5, 40


@dataclass(frozen=True)
class Draw:
    """Some runs of one machine to calibrate with, and rows of other architectures to test on."""

    group: str
    num_runs: int
    calibration_idx: np.ndarray
    test_idx: np.ndarray


def draws_of(
    groups: np.ndarray,
    architectures: np.ndarray,
    usable: np.ndarray,
    *,
    seed: int = 0,
    run_counts: Sequence[int] = RUN_COUNTS,
    num_draws: int = NUM_DRAWS,
    max_test_rows: int = MAX_TEST_ROWS,
) -> Iterator[Draw]:
    """A group is a GPU in one source: what comes nearest to a user's machine. All arrays (n,)."""
    rng = np.random.default_rng(seed)
    for group in np.unique(groups[usable]):
        idx = np.flatnonzero(usable & (groups == group))
        names = np.unique(architectures[idx])
        if len(idx) < MIN_ROWS or len(names) < MIN_ARCHITECTURES:
            continue
        for _ in range(num_draws):
            pool = rng.permutation(names)[: len(names) // 2]
            is_pool = np.isin(architectures[idx], pool)
            calibration, test = rng.permutation(idx[is_pool]), rng.permutation(idx[~is_pool])[:max_test_rows]
            for count in run_counts:
                if count <= len(calibration):
                    yield Draw(group, count, calibration[:count], test)


def is_reported(group: str) -> bool:
    """Half of the groups chose the constants of calibration, the other half reports."""
    return zlib.crc32(group.encode()) % 2 == 1


def machines_of(corpus: Corpus) -> np.ndarray:
    """(n,) GPU and source of every row."""
    return np.array([f"{d}|{s}" for d, s in zip(corpus.devices, source_family(corpus), strict=True)])


def calibration_table(
    result: TrackResult, corpus: Corpus, interval_log: np.ndarray, *, prior: CalibrationPrior | None = None
) -> dict[str, Any]:
    """Errors of the track before and after calibrating to runs of the same machine; {} without a machine to test.

    ``interval_log`` (m, 2) are the checkpoint's bounds of log(measured / predicted) of each tested row.
    """
    predicted = np.full(len(corpus.rows), np.nan)
    predicted[result.row_idx] = result.shipped_ms
    bounds = np.zeros((len(corpus.rows), 2))
    bounds[result.row_idx] = interval_log
    error = np.log(corpus.target_ms / predicted)
    usable = ~np.isnan(predicted) & ~corpus.is_inference
    architectures = np.array([row.architecture for row in corpus.rows])
    summary = summed_features(corpus.aware)
    runs = {
        i: CalibrationRun.of_summary(
            summary[i], device="it", is_known_device=result.track != "device", log_ratio=float(error[i]),
            group=str(architectures[i]), interval_log=(bounds[i, 0], bounds[i, 1]),
        )
        for i in np.flatnonzero(usable)
    }  # fmt: skip
    collected: dict[int, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for draw in draws_of(machines_of(corpus), architectures, usable):
        fitted = Calibration(tuple(runs[i] for i in draw.calibration_idx), prior or CalibrationPrior())
        corrections = [fitted.correct(runs[i]) for i in draw.test_idx]
        before = error[draw.test_idx]
        after = before - np.log([c.factor for c in corrections])
        low, high = np.array([c.interval_log for c in corrections]).T
        collected[draw.num_runs][draw.group].append(np.stack([before, after, (low <= after) & (after <= high)]))
    if not collected:
        return {}
    table: dict[str, Any] = {"num_draws": NUM_DRAWS, "by_num_runs": {}, "by_machine": {}}
    for count, by_group in sorted(collected.items()):
        joined = {group: np.concatenate(parts, axis=1) for group, parts in by_group.items()}
        halves = {"reported": {g: v for g, v in joined.items() if is_reported(g)}, "all": joined}
        table["by_num_runs"][str(count)] = {name: _over_machines(own) for name, own in halves.items() if own}
        for group, values in joined.items():
            entry = table["by_machine"].setdefault(group.replace("|", ", "), {"before_mape_pct": _mape(values[0])})
            entry[f"after_{count}_mape_pct"] = _mape(values[1])
    return table


def _over_machines(by_group: dict[str, np.ndarray]) -> dict[str, Any]:
    before = np.array([_mape(values[0]) for values in by_group.values()])
    after = np.array([_mape(values[1]) for values in by_group.values()])
    return {
        "num_machines": len(by_group),
        "mean_before_pct": float(before.mean()),
        "mean_after_pct": float(after.mean()),
        "median_before_pct": float(np.median(before)),
        "median_after_pct": float(np.median(after)),
        "num_halved": int((after <= before / 2).sum()),
        "num_worse": int((after > before + 1).sum()),
        "coverage": float(np.mean([values[2].mean() for values in by_group.values()])),
    }


def _mape(log_error: np.ndarray) -> float:
    """MAPE in per cent from log(measured / predicted)."""
    return float(np.abs(np.expm1(-log_error)).mean() * 100)


def inference_table(result: TrackResult, corpus: Corpus, extra: ExtraRows, interval_log: np.ndarray) -> dict[str, Any]:
    """Errors of training steps without and with the correction by one forward pass of the same graph, GPU, precision
    and software, both predicted by the fold that holds them out; {} where there are no such pairs.

    ``interval_log`` (m, 2) are the checkpoint's bounds of each tested row before the correction.
    """
    passes: dict[tuple, list[MeasurementRow]] = defaultdict(list)
    predicted_pass: dict[str, float] = {}
    for i, ms in zip(result.extra_idx, result.extra_ms, strict=True):
        row = extra.rows[i]
        if is_forward_pass(row):
            passes[software_key(row)].append(row)
            predicted_pass[row.row_id] = float(ms)
    chosen, factors = [], []
    for position, i in enumerate(result.row_idx):
        row = corpus.rows[i]
        partner = nearest_pass(row, passes.get(software_key(row), ()))
        if partner and not is_forward_pass(row):
            chosen.append(position)
            factors.append((partner.step_time_ms / predicted_pass[partner.row_id]) ** CORRECTION_POWER)
    if not chosen:
        return {}
    measured = corpus.target_ms[result.row_idx][chosen]
    before = result.shipped_ms[chosen]
    after = before * np.array(factors)
    low, high = INTERVAL_SHRINK * interval_log[chosen].T
    log_error = np.log(measured / after)
    inside = (log_error >= low) & (log_error <= high)
    reported = np.array([is_reported(corpus.rows[i].family) for i in result.row_idx[chosen]])
    table: dict[str, Any] = {"num_families": len({corpus.rows[i].family for i in result.row_idx[chosen]})}
    for name, mask in (("all", np.ones(len(chosen), bool)), ("reported", reported)):
        if mask.any():
            table[name] = {
                "before": summarise_errors(before[mask], measured[mask]).as_dict(),
                "after": summarise_errors(after[mask], measured[mask]).as_dict(),
                "coverage": float(inside[mask].mean()),
            }
    return table
