"""Trials as a table shows them, from what the storage holds: those of other workers too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from gnnpred.training.tuning.costs import LATENCY_RATIO, SIZE_BYTES
from gnnpred.training.tuning.pruning import step_errors


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One trial that has begun."""

    number: int
    state: str  # running | complete | pruned | fail
    stage: int  # from 1 on, of the running or last fold
    fold: int  # from 1 on, of the stage
    num_stages: int
    num_folds: int
    error_pct: float | None  # mean over the folds of the present stage; None before the first
    best_error_pct: float | None  # of the trials that were complete when this one ended
    latency_ratio: float | None  # None where it is no objective
    size_bytes: int | None  # None where it is no objective
    started: datetime | None  # local time
    seconds: float | None  # None while it runs
    params: dict[str, Any]


OnTrials = Callable[[Sequence[TrialRow]], None]


def trial_rows(study: optuna.Study, *, num_stages: int, num_folds: int) -> list[TrialRow]:
    """Every trial of a study that is not waiting, by number."""
    rows = []
    trials = study.get_trials(deepcopy=False)
    complete = [(trial.datetime_complete, error_of(trial)) for trial in trials if trial.state is TrialState.COMPLETE]
    for trial in trials:
        if trial.state is TrialState.WAITING:
            continue
        until = trial.datetime_complete
        earlier = [error_pct for ended, error_pct in complete if until is None or ended <= until]
        errors = step_errors(trial)
        step = len(errors) if trial.state is TrialState.RUNNING else max(len(errors) - 1, 0)
        step = min(step, num_stages * num_folds - 1)
        rows.append(
            TrialRow(
                number=trial.number,
                state=trial.state.name.lower(),
                stage=step // num_folds + 1,
                fold=step % num_folds + 1,
                num_stages=num_stages,
                num_folds=num_folds,
                error_pct=errors[max(errors)] if errors else None,
                best_error_pct=min(earlier, default=None),
                latency_ratio=trial.user_attrs.get(LATENCY_RATIO),
                size_bytes=trial.user_attrs.get(SIZE_BYTES),
                started=trial.datetime_start,
                seconds=trial.duration.total_seconds() if trial.duration else None,
                params=trial.params,
            )
        )
    return rows


def error_of(trial: FrozenTrial) -> float:
    """Error in per cent of a complete trial, whatever other objectives its study has."""
    return trial.values[0]
