"""The trials of a running study: a table that stays current on a terminal, a line per finished trial elsewhere."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gnnpred.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gnnpred.training.tuning.trials import TrialRow

_NUM_ROWS = 12
_ENDED = ("complete", "pruned", "fail")


@contextmanager
def trial_display(
    names: Sequence[str], *, stream: "Console | None" = None
) -> Iterator[tuple[Callable[[str, int, int], None], Callable[[Sequence["TrialRow"]], None]]]:
    """Functions ``advance(what, done, total)`` and ``show(trials)``, on standard error.

    ``names`` are the parameters in the order in which they matter.
    """
    from rich.console import Console

    console = stream or Console(stderr=True)
    if console.is_terminal:
        table = TrialTable(names)
        with progress_bar(above=table, console=console) as advance:
            yield advance, table.show
    else:
        yield _nothing, TrialLines(names, lambda line: console.print(line, soft_wrap=True, markup=False)).show


def _nothing(what: str, done: int, total: int) -> None:
    pass


class TrialTable:
    """What runs, the best trial and the latest others, by number; seconds of what runs go on between updates."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._trials: Sequence[TrialRow] = ()

    def show(self, trials: Sequence["TrialRow"]) -> None:
        self._trials = trials

    def __rich__(self) -> "Table | str":
        from rich.table import Table

        if not self._trials:
            return ""
        shown = chosen_rows(self._trials, _NUM_ROWS)
        table = Table(box=None)
        costs = [name for name in ("latency_ratio", "size_bytes") if any(getattr(t, name) is not None for t in shown)]
        headings = {"latency_ratio": "latency x", "size_bytes": "kB"}
        columns = ["trial", "state", "stage", "fold", "error %", "best %", *(headings[name] for name in costs), "s"]
        for column in columns:
            table.add_column(column, justify="left" if column == "state" else "right", no_wrap=True)
        table.add_column("parameters", no_wrap=True, overflow="ellipsis")
        for trial in shown:
            table.add_row(
                str(trial.number), trial.state, f"{trial.stage}/{trial.num_stages}", f"{trial.fold}/{trial.num_folds}",
                _error(trial.error_pct), _error(trial.best_error_pct), *(_cost(trial, name) for name in costs),
                f"{seconds_of(trial):.0f}", values_text(trial.params, self._names),
            )  # fmt: skip
        return table


class TrialLines:
    """A line when a trial ends; those of earlier runs are not told again."""

    def __init__(self, names: Sequence[str], print_line: Callable[[str], None]) -> None:
        self._names, self._print = names, print_line
        self._told: set[int] | None = None

    def show(self, trials: Sequence["TrialRow"]) -> None:
        ended = {trial.number for trial in trials if trial.state in _ENDED}
        if self._told is None:
            self._told = ended
        for trial in trials:
            if trial.number in ended - self._told:
                self._print(_line(trial, self._names))
        self._told |= ended


def chosen_rows(trials: Sequence["TrialRow"], limit: int) -> list["TrialRow"]:
    """Running trials, the best one and the latest others, ``limit`` in all, by number."""
    complete = [trial for trial in trials if trial.state == "complete"]
    best = min(complete, key=lambda trial: (trial.error_pct, trial.number), default=None)
    order = [trial for trial in trials if trial.state == "running"] + ([best] if best else [])
    order += [trial for trial in reversed(trials) if trial not in order]
    return sorted(order[:limit], key=lambda trial: trial.number)


def values_text(params: Mapping[str, Any], names: Sequence[str]) -> str:
    """``width 96, learning_rate 0.004``: the last parts of the names, in the order of ``names``."""
    return ", ".join(f"{name.split('.')[-1]} {_value(params[name])}" for name in names if name in params)


def seconds_of(trial: "TrialRow") -> float:
    """Of a running trial until now."""
    if trial.seconds is not None:
        return trial.seconds
    return (datetime.now() - trial.started).total_seconds() if trial.started else 0.0


def _line(trial: "TrialRow", names: Sequence[str]) -> str:
    at = f" at stage {trial.stage}/{trial.num_stages}, fold {trial.fold}/{trial.num_folds}"
    parts = [f"trial {trial.number} {trial.state}{'' if trial.state == 'complete' else at}"]
    if trial.error_pct is not None:
        parts.append(f"{trial.error_pct:.2f} %")
    if trial.best_error_pct is not None:
        parts.append(f"best {trial.best_error_pct:.2f} %")
    if trial.latency_ratio is not None:
        parts.append(f"latency x {_cost(trial, 'latency_ratio')}")
    if trial.size_bytes is not None:
        parts.append(f"{_cost(trial, 'size_bytes')} kB")
    parts.append(f"{seconds_of(trial):.0f} s")
    return f"{', '.join(parts)}: {values_text(trial.params, names)}"


def _error(error_pct: float | None) -> str:
    return "" if error_pct is None else f"{error_pct:.2f}"


def _cost(trial: "TrialRow", name: str) -> str:
    value = getattr(trial, name)
    if value is None:
        return ""
    return f"{value:.2f}" if name == "latency_ratio" else f"{value / 1e3:.0f}"


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
