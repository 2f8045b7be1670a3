"""`gnnpred train` where a corpus cannot be learned from, or its errors have not been measured."""

import pytest

pytest.importorskip("torch_geometric")

from dataclasses import replace

from gnnpred.corpus.store import MEASUREMENTS_FILE, load_rows, write_rows
from tests.helpers.tiny_corpus import write_tiny_corpus

pytestmark = pytest.mark.train


def train(cli, tmp_path, datasets):
    return cli(
        "train", "--recipe", "smoke", "--datasets", datasets, "--out", tmp_path / "checkpoint", "--work",
        tmp_path / "work",
    )  # fmt: skip


def test_a_corpus_of_marked_rows_alone_is_one_line(cli, tmp_path):
    datasets = write_tiny_corpus(tmp_path / "datasets")
    marked = [replace(row, used_for_training=False, suspect=True) for row in load_rows(datasets)]
    write_rows(datasets / MEASUREMENTS_FILE, marked)
    outcome = train(cli, tmp_path, datasets)
    assert (outcome.code, outcome.is_one_error_line()) == (1, True)
    assert f"{datasets} has no row of a training step that may be learned from" in outcome.err
    assert not (tmp_path / "checkpoint").exists()


def test_with_rows_enough_to_measure_errors_evaluation_comes_first(cli, tmp_path):
    datasets = write_tiny_corpus(tmp_path / "datasets")
    rows = load_rows(datasets)
    write_rows(datasets / MEASUREMENTS_FILE, [*rows, *(replace(row, row_id=f"{row.row_id}-2") for row in rows)])
    outcome = train(cli, tmp_path, datasets)
    assert (outcome.code, outcome.is_one_error_line()) == (1, True)
    command = f"gnnpred evaluate --recipe smoke --retrain --datasets {datasets} --out {tmp_path / 'checkpoint'}"
    assert command in outcome.err
