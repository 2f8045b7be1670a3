"""How the trials of a running study are shown."""

import io
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from rich.console import Console

from gnnpred.cli.trial_table import TrialLines, TrialTable, chosen_rows, trial_display, values_text

NAMES = ("train.model.width", "tree_weight")


def row(number: int, state: str, error_pct: float | None, **values) -> SimpleNamespace:
    defaults = {
        "number": number, "state": state, "stage": 1, "fold": 2, "num_stages": 2, "num_folds": 4,
        "error_pct": error_pct, "best_error_pct": 20.0, "latency_ratio": None, "size_bytes": None,
        "started": datetime.now() - timedelta(seconds=90), "seconds": None if state == "running" else 41.0,
        "params": {"tree_weight": 0.25, "train.model.width": 96},
    }  # fmt: skip
    return SimpleNamespace(**(defaults | values))


def drawn(rows) -> str:
    table = TrialTable(NAMES)
    table.show(rows)
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return console.file.getvalue()


def test_a_row_says_what_a_trial_is_at():
    text = drawn([row(0, "complete", 20.0, stage=2, fold=4), row(1, "running", 31.234)])
    assert text.splitlines()[0].split() == [
        "trial", "state", "stage", "fold", "error", "%", "best", "%", "s", "parameters",
    ]  # fmt: skip
    assert text.splitlines()[1].split() == [
        "0", "complete", "2/2", "4/4", "20.00", "20.00", "41", "width", "96,", "tree_weight", "0.25",
    ]  # fmt: skip
    running = text.splitlines()[2].split()
    assert running[:6] == ["1", "running", "1/2", "2/4", "31.23", "20.00"]
    assert 90 <= int(running[6]) < 600  # goes on by itself


def test_costs_have_columns_where_they_are_objectives():
    text = drawn([row(0, "complete", 20.0, latency_ratio=1.25, size_bytes=480_200)])
    assert "latency x" in text
    assert text.splitlines()[1].split()[6:8] == ["1.25", "480"]


def test_the_best_and_the_running_trials_are_always_shown():
    rows = [row(0, "running", None), row(1, "complete", 5.0), *(row(n, "pruned", 40.0) for n in range(2, 30))]
    assert [trial.number for trial in chosen_rows(rows, 5)] == [0, 1, 27, 28, 29]


def test_a_line_per_trial_that_ends_after_the_start():
    lines = []
    told = TrialLines(NAMES, lines.append)
    told.show([row(0, "complete", 20.0), row(1, "running", 31.0)])
    told.show([row(0, "complete", 20.0), row(1, "running", 32.0)])
    told.show([row(0, "complete", 20.0), row(1, "pruned", 33.0), row(2, "complete", 19.5, best_error_pct=19.5)])
    assert lines == [
        "trial 1 pruned at stage 1/2, fold 2/4, 33.00 %, best 20.00 %, 41 s: width 96, tree_weight 0.25",
        "trial 2 complete, 19.50 %, best 19.50 %, 41 s: width 96, tree_weight 0.25",
    ]


def test_parameters_come_in_the_order_of_the_search_space():
    assert values_text({"a.learning_rate": 0.00123456, "a.on": True}, ["a.on", "b.missing", "a.learning_rate"]) == (
        "on True, learning_rate 0.00123"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_table_and_bars_and_a_file_gets_lines(is_terminal):
    console = Console(file=io.StringIO(), width=140, force_terminal=is_terminal)
    with trial_display(NAMES, stream=console) as (advance, show):
        show([row(0, "running", None)])
        advance("trials", 0, 3)
        show([row(0, "complete", 20.0)])
        advance("trials", 1, 3)
    text = console.file.getvalue()
    assert ("parameters" in text and "1/3" in text) is is_terminal
    assert text.startswith("trial 0 complete, 20.00 %") is not is_terminal
