"""collect through its arguments on this CPU, its rows scored and calibrated, and what is wrong with its input."""

import csv
import os
import signal
import sys
import time
from importlib.util import find_spec

import pytest

from gnnpred.cli.collect import seconds_of
from gnnpred.collect.recipe import load_recipe
from gnnpred.errors import UsageError
from tests.helpers.physics_checkpoint import write_physics_checkpoint
from tests.unit.collect.test_shards import run_shard

TINY_BERT = "hf:bert?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&intermediate_size=64&vocab_size=100"
MEASURE = "[measure]\nsteps = 4\nmax_warmup_steps = 10\nmax_warmup_s = 0.5\nmax_timed_s = 0.5\n"
# found, not imported: workers import it
needs_models = pytest.mark.skipif(find_spec("timm") is None, reason="needs the models extra")


def recipe_file(tmp_path, text):
    path = tmp_path / "tiny.toml"
    path.write_text(MEASURE + text)
    return path


@needs_models
@pytest.mark.models
def test_collected_rows_are_scored_and_calibrated_as_they_are(cli, tmp_path):
    recipe = recipe_file(
        tmp_path,
        f'[[sweep]]\nmodels = ["{TINY_BERT}"]\nbatch_sizes = [2]\nseq_lens = [16]\nprecisions = ["fp32", "tf32"]\n'
        '[[sweep]]\nmodels = ["torchvision:squeezenet1_1"]\nbatch_sizes = [1]\nimage_sizes = [32]\n',
    )
    out = tmp_path / "out"
    outcome = cli("collect", "--recipe", recipe, "--out", out, "--device", "cpu", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["by_status"] == {"ok": 2, "unsupported": 1}
    with (out / "failed.csv").open(newline="") as file:
        assert [(row["precision"], row["status"]) for row in csv.DictReader(file)] == [("tf32", "unsupported")]

    checkpoint = write_physics_checkpoint(tmp_path / "physics", devices=["V100-SXM2-16GB"])
    options = ("--device-file", out / "device.toml", "--checkpoint", checkpoint, "--json")
    scored = cli("score", out / "runs.csv", *options)
    assert scored.code == 0, scored.err
    assert (scored.json["overall"]["n"], scored.json["num_unscored"]) == (2, 0)
    calibrated = cli("calibrate", out / "runs.csv", "--out", tmp_path / "calibrated", *options)
    assert calibrated.code == 0, calibrated.err
    assert calibrated.json["devices"][0]["num_runs"] == 2

    again = cli("collect", "--recipe", recipe, "--out", out, "--device", "cpu", "--json")
    assert again.json["num_measured_now"] == 0
    recipe.write_text(recipe.read_text().replace("steps = 4", "steps = 5", 1))
    refused = cli("collect", "--recipe", recipe, "--out", out, "--device", "cpu")
    assert (refused.code, refused.is_one_error_line()) == (2, True)
    assert "another recipe" in refused.err


def test_shards_are_taken_in_without_measuring(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "worker.log"))
    recipe = recipe_file(tmp_path, '[[sweep]]\nmodels = ["x:good", "x:oom"]\nbatch_sizes = [1, 2]\n')
    out = tmp_path / "out"
    for text in ("1/2", "2/2"):
        run_shard(text, out, load_recipe(recipe))
    outcome = cli("collect", "--recipe", recipe, "--out", out, "--merge-only", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["by_status"] == {"ok": 2, "oom": 2}
    again = cli("collect", "--recipe", recipe, "--out", out, "--merge-only")
    assert "4 of 4 configurations, 0 of them new, from 2 shards" in again.out


@needs_models
@pytest.mark.models
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("timm:resnet5O", "nearest names: resnet50"),
        ("torchvision:resnet-18", "nearest names: resnet18"),
        ("hf:bret", "transformers has no model 'bret'"),
        ("nowhere_to_be_found:model", "neither a known prefix nor a Python module"),
    ],
)
def test_an_unknown_model_ends_before_anything_is_measured(cli, tmp_path, model, words):
    recipe = recipe_file(tmp_path, f'[[sweep]]\nmodels = ["{model}"]\nbatch_sizes = [1]\n')
    outcome = cli("collect", "--recipe", recipe, "--out", tmp_path / "out", "--device", "cpu")
    assert outcome.code in (1, 2)
    assert outcome.is_one_error_line()
    assert words in outcome.err
    assert not (tmp_path / "out" / "runs.csv").exists()


@needs_models
@pytest.mark.models
def test_cuda_without_a_gpu_is_one_line(cli, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    outcome = cli("collect", "--recipe", "smoke", "--out", tmp_path / "out", "--device", "cuda")
    assert (outcome.code, outcome.is_one_error_line()) == (2, True)
    assert "torch sees no CUDA GPU" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--recipe", "smok"), "not found"),
        (("--recipe", "smoke", "--time-budget", "12"), "--time-budget '12'"),
        (("--recipe", "smoke", "--device", "tpu"), "unknown device 'tpu'"),
        (("--recipe", "smoke", "--engine", "dask"), "unknown engine 'dask'"),
        (("--recipe", "smoke", "--ray-address", "head:6379"), "go with --engine ray"),
        (("--recipe", "collectives", "--engine", "ray"), "not with --engine ray"),
        (("--recipe", "smoke", "--shard", "0/3"), "parts count from 1"),
        (("--recipe", "smoke", "--shard", "third"), "write I/N"),
        (("--recipe", "smoke", "--shard", "100/100"), "none for this part"),
        (("--recipe", "smoke", "--shard", "1/3", "--merge-only"), "give one of them"),
        (("--recipe", "smoke", "--merge-only"), "nothing to merge"),
        (("--recipe", "smoke", "--export-only"), "holds no rows"),
        (("--recipe", "smoke", "--export-only", "--merge-only"), "one after the other"),
        (("--recipe", "collectives", "--export-only"), "have no graphs"),
    ],
)
def test_wrong_options_are_one_line(cli, tmp_path, arguments, words):
    outcome = cli("collect", "--out", tmp_path / "out", *arguments)
    assert (outcome.code, outcome.is_one_error_line()) == (2, True)
    assert words in outcome.err
    assert not (tmp_path / "out").exists()


def test_ray_that_is_not_installed_is_one_line(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "gnnpred.collect.ray_engine", raising=False)
    outcome = cli("collect", "--recipe", "smoke", "--out", tmp_path / "out", "--engine", "ray")
    assert (outcome.code, outcome.is_one_error_line()) == (2, True)
    assert "pip install 'gnnpred[ray]'" in outcome.err


def test_an_interrupted_collection_says_how_it_goes_on(cli, tmp_path, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("gnnpred.collect.runner.collect", interrupted)
    outcome = cli("collect", "--recipe", "smoke", "--out", tmp_path / "out")
    assert outcome.code == 130
    assert "the same command continues" in outcome.err


def test_a_terminated_collection_ends_as_an_interrupted_one(cli, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*_args, **_options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("gnnpred.collect.runner.collect", terminated)
    outcome = cli("collect", "--recipe", "smoke", "--out", tmp_path / "out")
    assert outcome.code == 130
    assert "the same command continues" in outcome.err
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_out_that_is_a_file_is_one_line(cli, tmp_path):
    (tmp_path / "out").write_text("")
    outcome = cli("collect", "--recipe", "smoke", "--out", tmp_path / "out")
    assert (outcome.code, outcome.is_one_error_line()) == (1, True)
    assert "cannot write to" in outcome.err


def test_the_time_left_is_shown_however_long_a_configuration_takes(monkeypatch):
    import rich.progress

    from gnnpred.cli.progress import progress_bar

    now_s, bars = [0.0], []

    class Bar(rich.progress.Progress):
        def __init__(self, *columns, **options):
            super().__init__(*columns, get_time=lambda: now_s[0], **options)
            bars.append(self)

    monkeypatch.setattr(rich.progress, "Progress", Bar)
    with progress_bar() as advance:
        for done in range(4):
            advance("configurations", done, 10)
            now_s[0] += 100
        assert bars[0].tasks[0].time_remaining == pytest.approx(700, rel=0.3)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("12m", 720), ("1h30m", 5400), ("1.5h", 5400)])
def test_time_budgets_are_read_with_their_unit(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "12", "0m", "m", "-5m", "5 apples"])
def test_other_time_budgets_are_refused(text):
    with pytest.raises(UsageError, match="write a time above 0"):
        seconds_of(text)
