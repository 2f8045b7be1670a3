"""Options of `gnnpred evaluate` that need no trained network."""

from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

pytestmark = pytest.mark.train
DATASETS = Path(__file__).resolve().parents[2] / "datasets"


@pytest.mark.parametrize("options", [("--contrast",), ("--track", "family", "--track", "blind")])
def test_missing_networks_are_one_clear_line(gnnpred, tmp_path, options):
    outcome = gnnpred("evaluate", *options, "--folds", tmp_path, "--datasets", DATASETS, "--out", tmp_path / "out")
    assert outcome.code == 1
    assert outcome.is_one_error_line(), outcome
    assert "family-0-s0.safetensors" in outcome.err
    assert "--retrain --track family --track blind" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--contrast", "--track", "family"), "--contrast"),
        (("--contrast", "--report"), "--contrast"),
        (("--contrast", "--retrain"), "--contrast"),
        (("--docs", "x.md"), "--report"),
        (("--report", "--track", "device"), "family track"),
        (("--communication", "--retrain"), "--communication"),
        (("--communication", "--track", "family"), "--communication"),
    ],
)
def test_options_that_do_not_go_together_are_usage_errors(gnnpred, options, text):
    outcome = gnnpred("evaluate", *options)
    assert outcome.code == 2, outcome
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err


def test_communication_without_a_corpus_is_one_clear_line(gnnpred, tmp_path):
    outcome = gnnpred("evaluate", "--communication", "--datasets", tmp_path, "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "measurements.csv.gz: build them with" in outcome.err
    assert not (tmp_path / "out").exists()
