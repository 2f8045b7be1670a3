"""The whole way on this CPU, for real: measured, merged into a corpus, trained on, predicted with, scored."""

import json
from importlib.util import find_spec

import pytest

from gnnpred.cli import run
from gnnpred.corpus.store import load_rows

pytest.importorskip("torch_geometric")

pytestmark = [
    pytest.mark.train,
    pytest.mark.models,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs the models extra"),
]
RECIPE = """
[measure]
steps = 4
max_warmup_steps = 6
max_warmup_s = 0.5
max_timed_s = 0.5

[[sweep]]
models = ["hf:bert?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&intermediate_size=64&vocab_size=100"]
batch_sizes = [2, 4]
seq_lens = [16]
"""


def gnnpred(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def test_rows_of_this_cpu_become_a_checkpoint_that_predicts_and_scores_them(tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(RECIPE)
    runs, corpus, checkpoint = tmp_path / "runs", tmp_path / "corpus", tmp_path / "checkpoint"
    assert gnnpred("collect", "--recipe", tmp_path / "tiny.toml", "--device", "cpu", "--out", runs) == 0
    # on a machine with other work steps are unsteady: that is no reason here
    assert gnnpred("dataset", "add", runs, "--datasets", corpus, "--accept-outliers", "all") == 0
    (first, second) = load_rows(corpus)
    assert first.used_for_training
    assert second.used_for_training
    assert first.family == "bert"
    train = ("train", "--recipe", "smoke", "--datasets", corpus, "--work", tmp_path / "work", "--workers", 1)
    assert gnnpred(*train, "--out", checkpoint) == 0
    options = ("--device-file", runs / "device.toml", "--checkpoint", checkpoint)
    (model,) = (runs / "models").glob("*.onnx")
    capsys.readouterr()
    assert gnnpred("predict", model, *options, "--batch-size", 2) == 0
    shown = capsys.readouterr().out
    assert "checkpoint  smoke" in shown
    assert "the 90 % interval says nothing" in shown
    assert "in training" not in shown  # the CPU was
    assert gnnpred("score", runs / "runs.csv", *options, "--json") == 0
    scored = json.loads(capsys.readouterr().out)
    assert (scored["overall"]["n"], scored["num_unscored"]) == (2, 0)
    assert scored["interval_90_coverage"] == 1.0
    assert scored["checkpoint"] == "smoke"
