"""Shards: parts that are measured apart and taken into one store make what one run makes."""

import os
import signal
import time

import pytest

from gnnpred.collect.shards import Shard, merge_shards, shard_folders
from gnnpred.collect.store import CollectionStore, InUseError, read_store
from gnnpred.errors import UsageError
from tests.unit.collect.test_runner import content, log, recipe_of, run, table  # noqa: F401  (log is a fixture)

RECIPE = recipe_of("good", "crash", "other", "oom", batches=(1, 2))


def run_shard(text, out, recipe=RECIPE, **options):
    shard = Shard.parse(text)
    return run(shard.part_of(recipe), shard.folder(out), **options)


def merged(out, recipe=RECIPE):
    return merge_shards(recipe, out, may_be_at_work=True)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_parts_are_disjoint_even_and_make_the_whole(count):
    parts = [Shard(index=i, count=count).part_of(RECIPE) for i in range(1, count + 1)]
    ids = [each.config_id for part in parts for each in part.configurations]
    assert sorted(ids) == sorted(each.config_id for each in RECIPE.configurations)
    sizes = [len(part.configurations) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert {part.recipe_id for part in parts} == {RECIPE.recipe_id}


def test_three_shards_make_the_rows_of_one_run(tmp_path):
    run(RECIPE, tmp_path / "whole")
    out = tmp_path / "out"
    for text in ("2/3", "3/3", "1/3"):
        run_shard(text, out)
    report = merged(out)
    assert (report.num_shards, report.num_added, report.num_rows, report.at_work) == (3, 8, 8, ())
    assert content(out) == content(tmp_path / "whole")
    assert all((out / row["onnx"]).is_file() for row in table(report.runs_file))
    assert len(list((out / "models").iterdir())) == 2, "two graphs, whichever shards exported them"


def test_merging_again_changes_nothing(tmp_path):
    out = tmp_path / "out"
    for text in ("1/2", "2/2"):
        run_shard(text, out)
    merged(out)
    before = content(out), sorted(path.name for path in out.rglob("*.onnx"))
    report = merged(out)
    assert (report.num_added, report.num_rows) == (0, 8)
    assert (content(out), sorted(path.name for path in out.rglob("*.onnx"))) == before


def test_a_call_without_a_shard_measures_only_what_the_shards_lack(tmp_path, log):  # noqa: F811
    out = tmp_path / "out"
    run_shard("1/3", out)
    merged(out)
    begun = log.read_text().count("\n")
    report = run(RECIPE, out)
    assert (report.num_measured_now, report.num_rows) == (5, 8)
    assert log.read_text().count("\n") == begun + 5


def test_shards_of_another_number_of_parts_overlap_without_doubling_a_row(tmp_path):
    out = tmp_path / "out"
    for text in ("1/2", "1/3", "2/3", "3/3"):
        run_shard(text, out)
    assert [folder.name for folder in shard_folders(out)] == ["1-of-2", "1-of-3", "2-of-3", "3-of-3"]
    report = merged(out)
    assert (report.num_shards, report.num_rows) == (4, 8)


def test_a_measured_row_of_one_shard_goes_before_a_failed_one_of_another(tmp_path):
    out = tmp_path / "out"
    run_shard("1/1", out)
    part = Shard.parse("1/2")
    good = RECIPE.configurations[0]
    with CollectionStore(part.folder(out)) as store:
        store.bind(RECIPE, "cpu (V100)")
        store.add_row(good, status="timeout", reason="a busy node")
    merged(out)
    with CollectionStore(out) as store:
        assert [row.status for row in store.rows() if row.config_id == good.config_id] == ["ok"]


def test_a_part_may_hold_nothing_that_the_machine_runs(tmp_path):
    recipe = recipe_of("good", precisions=("fp32", "tf32"))
    for text in ("1/2", "2/2"):
        run_shard(text, tmp_path, recipe)
    assert merged(tmp_path, recipe).by_status == {"ok": 1, "unsupported": 1}  # the stand-in says it is a CPU


SHARD_PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.collect.test_shards import run_shard
run_shard("2/3", Path(sys.argv[2]))
"""


def test_a_killed_shard_resumes_and_loses_nothing(tmp_path, log, monkeypatch):  # noqa: F811
    import subprocess
    import sys

    from tests.unit.collect.test_runner import ROOT

    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", SHARD_PROGRAM, str(ROOT), str(out)],
        env={**os.environ, "STAND_IN_DELAY_S": "0.2"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and log.read_text().count("\n") < 2:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    partly = merged(out)
    assert 0 < partly.num_rows < 3
    report = run_shard("2/3", out)
    assert (report.num_rows, report.num_measured_now) == (3, 3 - partly.num_rows)
    assert merged(out).num_rows == 3


def test_a_shard_at_work_is_left_out_or_waited_for(tmp_path):
    out = tmp_path / "out"
    for text in ("1/2", "2/2"):
        run_shard(text, out)
    with CollectionStore(Shard.parse("2/2").folder(out)):
        report = merged(out)
        assert (report.num_rows, report.at_work) == (4, ("2-of-2",))
        with pytest.raises(InUseError, match=r"shard 2-of-2 .* is still being collected"):
            merge_shards(RECIPE, out, may_be_at_work=False)
    assert merged(out).num_rows == 8


def test_a_store_at_work_is_not_called_damaged(tmp_path):
    run_shard("1/2", tmp_path)
    with CollectionStore(Shard.parse("1/2").folder(tmp_path)), pytest.raises(InUseError, match="a collect is working"):
        read_store(Shard.parse("1/2").folder(tmp_path))
    assert len(read_store(Shard.parse("1/2").folder(tmp_path))[1]) == 4


def test_shards_of_several_devices_are_not_mixed(tmp_path, monkeypatch):
    out = tmp_path / "out"
    run_shard("1/2", out)
    monkeypatch.setenv("STAND_IN_GPU", "T4")
    run_shard("2/2", out)
    with pytest.raises(UsageError, match=r"cpu \(V100\) in 1-of-2; cpu \(T4\) in 2-of-2"):
        merged(out)
    assert {row["gpu"] for row in table(Shard.parse("2/2").folder(out) / "runs.csv")} == {"T4"}


def test_shards_of_another_recipe_are_refused(tmp_path):
    out = tmp_path / "out"
    run_shard("1/2", out)
    with pytest.raises(UsageError, match="rows of another recipe"):
        merged(out, recipe_of("good"))


def test_a_shard_that_was_killed_before_it_measured_is_no_obstacle(tmp_path):
    out = tmp_path / "out"
    run_shard("1/2", out)
    CollectionStore(Shard.parse("2/2").folder(out)).close()
    assert merged(out).num_rows == 4


@pytest.mark.parametrize("text", ["", "3", "a/b", "1/2/3", "-1/4", "1.5/2", "٣/٤"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(UsageError, match="write I/N, as in 3/8"):
        Shard.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [("0/4", "parts count from 1.*--array=1-4"), ("5/4", "from 1/4 to 4/4"), ("1/0", "number of parts"),
     ("1/100000", "number of parts")],
)  # fmt: skip
def test_a_part_outside_of_the_whole_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        Shard.parse(text)


def test_more_parts_than_configurations_leave_nothing_to_do():
    with pytest.raises(UsageError, match="8 configurations, none for this part"):
        Shard.parse("9/9").part_of(RECIPE)
