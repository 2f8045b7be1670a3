"""`gnnpred dataset add` through its arguments: what it shows, and what is wrong with its input."""

import shutil

import pytest

from tests.helpers.collection_folders import CPU_NAME, V100, write_collection
from tests.helpers.tiny_corpus import write_tiny_corpus

UNSTEADY = "unsteady: steps took 8 to 14 ms"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_collection(
        tmp_path_factory.mktemp("runs") / "runs",
        warning=lambda each: UNSTEADY if (each.model, each.batch_size) == ("timm:vgg11", 4) else "",
        failed=lambda each: "oom" if each.batch_size == 16 else "",
    )


def test_it_shows_counts_marked_rows_and_files_and_then_that_nothing_is_new(gnnpred, runs, tmp_path):
    add = ("dataset", "add", runs, "--datasets", tmp_path / "mine", "--name", "first")
    tried = gnnpred(*add, "--dry-run")
    assert tried.code == 0, tried.err
    assert "dry run: would write" in tried.out
    assert not (tmp_path / "mine").exists()
    outcome = gnnpred(*add)
    assert outcome.code == 0, outcome.err
    for words in (
        f"first: 12 rows of {CPU_NAME}", "6 oom", "12 new", "compared with checkpoint roofline", "unsteady",
        "not used", "--accept-outliers KIND", "new families", "vgg (fold", "written to", "measurements.csv.gz",
    ):  # fmt: skip
        assert words in outcome.out, words
    again = gnnpred(*add)
    assert again.code == 0
    assert f"nothing changes: {tmp_path / 'mine'} has all of it" in again.out
    accepted = gnnpred(*add, "--accept-outliers", "all", "--json")
    assert accepted.json["num_used"] == accepted.json["num_rows"] == 12
    assert {mark["kind"] for row in accepted.json["marked"] for mark in row["marks"]} >= {"unsteady"}


def test_repeats_are_shown_with_both_times(gnnpred, runs, tmp_path):
    recipe = '[[sweep]]\nmodels = ["mine:net"]\nbatch_sizes = [4]\n'
    for name, ms in (("one", 5.0), ("two", 5.5)):
        folder = write_collection(tmp_path / name, recipe=recipe, manifest=V100, time_ms=lambda each, ms=ms: ms)
        options = ("--name", name, "--accept-outliers", "all")
        outcome = gnnpred("dataset", "add", folder, "--datasets", tmp_path / "mine", *options)
        assert outcome.code == 0, outcome.err
    assert "1 configurations measured more than once" in outcome.out
    assert "5 ms (collect-one)" in outcome.out
    assert "5.5 ms (collect-two)" in outcome.out


def damaged(runs, tmp_path):
    folder = shutil.copytree(runs, tmp_path / "damaged")
    next((folder / "models").glob("*.onnx")).unlink()
    return folder


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--name", "No Such Name!"), 2, "--name 'No Such Name!'"),
        (("--accept-outliers", "unstedy"), 2, "did you mean 'unsteady'"),
        (("--device-file", "absent.toml"), 1, "cannot read device file absent.toml"),
        (("--datasets", "GPUS"), 2, "holds rows of GPUs"),
    ],
)
def test_wrong_options_are_one_line(gnnpred, runs, tmp_path, options, code, words):
    options = [write_tiny_corpus(tmp_path / "gpus") if each == "GPUS" else each for each in options]
    outcome = gnnpred("dataset", "add", runs, "--datasets", tmp_path / "mine", *options)
    assert (outcome.code, outcome.is_one_error_line()) == (code, True), outcome
    assert words in outcome.err
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("folder_of", "words"),
    [
        (lambda runs, tmp_path: tmp_path / "absent", "is no folder"),
        (lambda runs, tmp_path: tmp_path, "has no collection.sqlite"),
        (damaged, "is missing: copy the folder models/"),
    ],
)
def test_what_is_no_collection_is_one_line(gnnpred, runs, tmp_path, folder_of, words):
    outcome = gnnpred("dataset", "add", folder_of(runs, tmp_path), "--datasets", tmp_path / "mine")
    assert (outcome.code, outcome.is_one_error_line()) == (1, True), outcome
    assert words in outcome.err
    assert not (tmp_path / "mine").exists()


def test_a_damaged_collection_file_and_a_damaged_corpus_are_one_line(gnnpred, runs, tmp_path):
    add = ("dataset", "add", runs, "--datasets", tmp_path / "mine", "--name", "first")
    assert gnnpred(*add).code == 0
    file = tmp_path / "mine" / "collections" / "first.json"
    whole = file.read_text()
    file.write_text(whole[:50])
    outcome = gnnpred(*add)
    assert (outcome.code, outcome.is_one_error_line()) == (1, True)
    assert "first.json is no collection file" in outcome.err
    file.write_text(whole)
    (tmp_path / "mine" / "measurements.csv.gz").write_bytes(b"\x1f\x8b no rows")
    outcome = gnnpred(*add)
    assert (outcome.code, outcome.is_one_error_line()) == (1, True)
    assert "is not a measurements file" in outcome.err
