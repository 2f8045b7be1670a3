"""A collection in a corpus: rows, graphs, devices, splits; repeats and marks; nothing moved, nothing half-written."""

import csv
import gzip
import json
import shutil
import sqlite3
from dataclasses import replace

import pytest

from gnnpred.additions import corpus_state, merge
from gnnpred.additions.merge import add_collection
from gnnpred.corpus.collections import collected_rows
from gnnpred.corpus.operators import load_operator_rows
from gnnpred.corpus.splits import SPLITS, load_split
from gnnpred.corpus.store import MEASUREMENTS_FILE, load_graphs, load_multi_gpu_rows, load_rows, write_rows
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.job import Phase, Precision
from gnnpred.onnx_io import read_graph
from gnnpred.passes.canonical import canonicalise
from gnnpred.predictor import Predictor, prepare
from tests.helpers.roofline import RooflineCheckpoint
from tests.helpers.tiny_corpus import write_tiny_corpus
from tests.helpers.written_collections import CPU_NAME, MANIFEST, RECIPE, V100, mlp, steady_ms, write_collection

UNSTEADY = "unsteady: steps took 8 to 14 ms"
OPERATORS = "source,device,kind,phase,precision,shape,time_us\n"


def add(runs, datasets, **options):
    """With the roofline to compare with: whatever is wanted of outliers is collect's own warnings, or times far off."""
    options.setdefault("accept", ("prediction", "siblings"))
    return add_collection(runs, datasets, make_predictor=lambda: Predictor(RooflineCheckpoint()), **options)


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit_table(runs, change) -> None:
    """Every row of runs.csv through ``change``; the store behind it knows times alone."""
    with (runs / "runs.csv").open(newline="") as table:
        rows = [change(row) for row in csv.DictReader(table)]
    with (runs / "runs.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


class KilledError(BaseException):
    pass


def cut_off_after(num_moved: int, monkeypatch) -> None:
    """The next addition ends when ``num_moved`` files have taken their places."""
    whole = corpus_state.replace_files

    def cut_off(state, files):
        whole(state, files[:num_moved])
        raise KilledError

    monkeypatch.setattr(merge, "replace_files", cut_off)


@pytest.fixture(scope="module")
def cpu_runs(tmp_path_factory):
    return write_collection(tmp_path_factory.mktemp("cpu") / "runs")


@pytest.fixture(scope="module")
def gpu_runs(tmp_path_factory):
    return write_collection(tmp_path_factory.mktemp("gpu") / "runs", manifest=V100)


@pytest.fixture
def tiny(tmp_path):
    return write_tiny_corpus(tmp_path / "tiny")


def test_a_new_corpus_holds_what_was_measured(cpu_runs, tmp_path):
    report = add(cpu_runs, tmp_path / "new")
    assert (report.num_rows, report.num_new, report.num_used, report.is_changed) == (18, 18, 18, True)
    (note,) = report.notes
    assert f"has not seen {CPU_NAME}: as a whole, steps take" in note
    rows = load_rows(tmp_path / "new")
    (row,) = [r for r in rows if (r.model, r.batch_size, r.precision) == ("timm:vgg11", 8, Precision.MIXED)]
    assert row.step_time_ms == pytest.approx(4.8)
    assert (row.phase, row.optimizer, row.framework, row.framework_version) == (Phase.TRAIN, "sgd", "pytorch", "2.9.0")
    assert (row.device, row.spec.fp32_tflops, row.family, row.input) == (CPU_NAME, 0.5, "vgg", "64")
    assert row.source_id == f"collect-{report.collection}"
    assert row.source.startswith(f"collections/{report.collection}@")
    assert not any((row.host_copy, row.suspect, row.unstable, row.duplicate_of, row.excluded_reason))
    assert row.job().device == row.spec
    record = json.loads((tmp_path / "new" / "collections" / f"{report.collection}.json").read_text())
    assert record["manifests"] == [MANIFEST]
    assert record["recipe_text"] == RECIPE
    assert set(record["rows"]) == {r.row_id for r in rows}


def test_a_stored_graph_gives_the_step_that_predict_sees(cpu_runs, tmp_path):
    add(cpu_runs, tmp_path / "new")
    (row,) = [
        r
        for r in load_rows(tmp_path / "new")
        if (r.model, r.batch_size, str(r.precision)) == ("timm:vgg11", 8, "mixed")
    ]
    stored = prepare(canonicalise(load_graphs(tmp_path / "new")[row.graph_id]), row.job())
    seen = prepare(canonicalise(read_graph(mlp(128), batch_size=8)), row.job())
    assert stored.costs == seen.costs
    assert [op.kind for op in stored.graph.ops] == [op.kind for op in seen.graph.ops]


def test_the_same_folder_again_changes_nothing(cpu_runs, tmp_path):
    add(cpu_runs, tmp_path / "new")
    before = contents(tmp_path / "new")
    report = add(cpu_runs, tmp_path / "new")
    assert (report.num_new, report.is_changed, report.files) == (0, False, ())
    assert report.checkpoint == ""  # nothing had to be judged again
    assert contents(tmp_path / "new") == before


def test_a_dry_run_writes_nothing(cpu_runs, tmp_path):
    report = add(cpu_runs, tmp_path / "new", dry_run=True)
    assert (report.num_new, report.is_changed) == (18, True)
    assert "measurements.csv.gz" in report.files
    assert not (tmp_path / "new").exists()


def test_a_collection_that_has_grown_adds_its_new_rows_alone(tmp_path):
    recipe = '[[sweep]]\nmodels = ["mine:net"]\nbatch_sizes = [{}]\n'
    runs = write_collection(tmp_path / "runs", recipe=recipe.format("4"))
    first = add(runs, tmp_path / "new")
    # the same recipe measured on: as a store that was cut off after its first row
    shutil.rmtree(runs)
    whole = write_collection(tmp_path / "runs", recipe=recipe.format("4, 8"))
    with sqlite3.connect(whole / "collection.sqlite") as db:
        (wanted,) = db.execute("SELECT value FROM meta WHERE key = 'recipe_id'").fetchone()
    record = tmp_path / "new" / "collections" / f"{first.collection}.json"
    content = json.loads(record.read_text())
    content["recipe_id"], content["origin"] = wanted, "written by another origin"
    record.write_text(json.dumps(content))
    report = add(whole, tmp_path / "new")
    assert report.collection == first.collection  # found by its rows
    assert (report.num_rows, report.num_new) == (2, 1)
    assert len(load_rows(tmp_path / "new")) == 2


def test_a_copy_from_before_the_collection_grew_takes_nothing_away(tmp_path):
    recipe = '[[sweep]]\nmodels = ["mine:net"]\nbatch_sizes = [4, 8]\n'
    whole = write_collection(tmp_path / "whole", recipe=recipe, manifest=V100)
    kernel = f"s,{V100['gpu']},linear,fwd,fp32,1x64x64x64,"
    (whole / "operators.csv").write_text(f"{OPERATORS}{kernel}30.5\n")
    older = shutil.copytree(whole, tmp_path / "older")
    (older / "operators.csv").write_text(f"{OPERATORS}{kernel}40.5\n")
    with sqlite3.connect(older / "collection.sqlite") as db:
        db.execute("DELETE FROM rows WHERE rowid = (SELECT max(rowid) FROM rows)")
    lines = (older / "runs.csv").read_text().splitlines(keepends=True)
    (older / "runs.csv").write_text("".join(lines[:2]))
    add(whole, tmp_path / "new")
    before = contents(tmp_path / "new")
    report = add(older, tmp_path / "new")
    assert (report.num_rows, report.num_new, report.is_changed) == (1, 0, False)
    assert contents(tmp_path / "new") == before


def test_into_a_published_corpus_nothing_that_was_there_moves(tiny, gpu_runs):
    before = load_rows(tiny)
    splits = {name: load_split(tiny / "splits" / f"{name}.json").fold_by_group for name in SPLITS}
    report = add(gpu_runs, tiny)
    rows = load_rows(tiny)
    assert rows[: len(before)] == before
    assert len(rows) == len(before) + 18
    for name in SPLITS:
        after = load_split(tiny / "splits" / f"{name}.json").fold_by_group
        assert splits[name].items() <= after.items()
    assert set(report.new_families) == {"alexnet", "vgg", "mixer"}
    assert not (tiny / "devices").exists()


def test_a_network_that_the_corpus_has_keeps_its_architecture_family_and_fold(tmp_path, gpu_runs):
    datasets = tmp_path / "new"
    add(gpu_runs, datasets)
    rows = {row.model: row for row in load_rows(datasets)}
    folds = load_split(datasets / "splits" / "architecture.json").fold_by_group
    other = write_collection(
        tmp_path / "other", manifest=V100, models={"mine:renamed": mlp(64)},
        recipe='[[sweep]]\nmodels = ["mine:renamed"]\nbatch_sizes = [64]\n',
    )  # fmt: skip
    report = add(other, datasets)
    assert report.new_architectures == {}
    (row,) = [row for row in load_rows(datasets) if row.model == "mine:renamed"]
    assert (row.architecture, row.family) == (rows["torchvision:alexnet"].architecture, "alexnet")
    assert load_split(datasets / "splits" / "architecture.json").fold_by_group == folds


def test_repeats_in_another_collection_are_kept_and_the_median_is_used(tmp_path, gpu_runs):
    datasets = tmp_path / "new"
    add(gpu_runs, datasets)
    for name, factor in (("second", 1.2), ("third", 1.1)):
        again = write_collection(tmp_path / name, manifest=V100, time_ms=lambda each, f=factor: f * steady_ms(each))
        report = add(again, datasets)
    rows = [r for r in load_rows(datasets) if (r.model, r.batch_size, str(r.precision)) == ("timm:vgg11", 8, "fp32")]
    used = [row for row in rows if row.used_for_training]
    assert sorted(row.step_time_ms for row in rows) == pytest.approx([6.0, 6.6, 7.2])
    assert [row.step_time_ms for row in used] == pytest.approx([6.6])
    assert {row.duplicate_of for row in rows if row not in used} == {used[0].row_id}
    assert len(report.repeats) == 18
    assert all(len(repeat.times) == 3 for repeat in report.repeats)
    (shown,) = [r for r in report.repeats if r.configuration == "timm:vgg11 fp32 batch 8 64 train sgd"]
    assert sorted(time_ms for _, time_ms in shown.times) == pytest.approx([6.0, 6.6, 7.2])


def test_what_published_tables_have_too_is_shown_with_both_times_and_kept(tmp_path, tiny, gpu_runs):
    add(gpu_runs, tiny)
    rows = load_rows(tiny)
    own = next(row for row in rows if row.model == "timm:vgg11" and row.batch_size == 8)
    published = replace(own, row_id="p", source_id="lab-1", source="a/b@1234567:c", step_time_ms=9.5, duplicate_of="")
    write_rows(tiny / MEASUREMENTS_FILE, [*rows, published])
    report = add(gpu_runs, tiny)
    (found,) = report.elsewhere
    assert (found.step_time_ms, found.other_ms, found.sources) == (own.step_time_ms, 9.5, ("lab-1",))
    assert sum(row.used_for_training for row in load_rows(tiny) if row.row_id in ("p", own.row_id)) == 2


def test_marked_rows_are_not_learned_from_until_they_are_accepted_and_stay_accepted(tmp_path):
    runs = write_collection(tmp_path / "runs", warning=lambda each: UNSTEADY if each.batch_size == 16 else "")
    report = add(runs, tmp_path / "new")
    marked = [row for row in load_rows(tmp_path / "new") if row.unstable]
    shown = [row for row in report.marked if any(mark.kind == "unsteady" for mark in row.marks)]
    assert len(marked) == len(shown) == 6
    assert not any(row.is_accepted for row in shown)
    assert not any(row.used_for_training for row in marked)
    assert all("unsteady: unsteady: steps took" in row.note for row in marked)
    accepted = add(runs, tmp_path / "new", accept=("unsteady", "prediction", "siblings"))
    assert (accepted.num_new, accepted.num_used, accepted.is_changed) == (0, 18, True)
    rows = load_rows(tmp_path / "new")
    assert all(row.used_for_training and not row.unstable for row in rows)
    assert sum("accepted: unsteady" in row.note for row in rows) == 6
    assert not add(runs, tmp_path / "new").is_changed


def test_rows_far_from_their_prediction_are_suspect(tmp_path, gpu_runs):
    report = add(gpu_runs, tmp_path / "new", accept=())
    suspects = [row for row in load_rows(tmp_path / "new") if row.suspect]
    assert {mark.kind for row in report.marked for mark in row.marks} >= {"prediction"}
    assert {row.row_id for row in suspects} == {row.row_id for row in report.marked}
    assert all(row.suspect and not row.used_for_training for row in suspects)
    assert report.checkpoint == "roofline"


def test_rows_of_too_few_steps_are_kept_unused_and_told(tmp_path, gpu_runs):
    runs = shutil.copytree(gpu_runs, tmp_path / "copy")
    edit_table(runs, lambda row: row | ({"num_steps": "2"} if row["batch_per_gpu"] == "8" else {}))
    report = add(runs, tmp_path / "new")
    assert report.notes[0] == "6 rows of fewer than 3 timed steps are kept and not used"
    few = [row for row in load_rows(tmp_path / "new") if row.few_iterations]
    assert len(few) == 6
    assert not any(row.used_for_training for row in few)


def test_rows_without_a_graph_are_kept_with_the_reason(tmp_path):
    runs = write_collection(tmp_path / "runs")
    not_exported = {"onnx": "", "note": "median of 10 steps; not exported: it was too large"}
    edit_table(runs, lambda row: row | (not_exported if row["model"] == "mine:mixer_small" else {}))
    report = add(runs, tmp_path / "new")
    assert report.without_graph == {"its graph was not exported: it was too large": 6}
    kept = [row for row in load_rows(tmp_path / "new") if row.excluded_reason]
    assert len(kept) == 6
    assert not any(row.graph_id or row.architecture or row.used_for_training for row in kept)


def test_timed_kernels_join_the_others_once(tmp_path, tiny, gpu_runs):
    runs = shutil.copytree(gpu_runs, tmp_path / "copy")
    (runs / "operators.csv").write_text(
        OPERATORS
        + f"collect-x,{V100['gpu']},linear,fwd,fp32,1x64x64x64,30.5\n"
        + f"collect-x,{V100['gpu']},linear,bwd,fp32,1x64x64x64,61.25\n"
        + f"collect-x,{V100['gpu']},relu,fwd,fp32,64x64,2.5\n"
    )
    before = load_operator_rows(tiny / "operators.csv.gz")
    for _ in range(2):
        report = add(runs, tiny)
        kernels = load_operator_rows(tiny / "operators.csv.gz")
        assert kernels[: len(before)] == before
        assert [(k.source, k.phase, k.time_us) for k in kernels[len(before) :]] == [
            (f"collect-{report.collection}", "fwd", 30.5), (f"collect-{report.collection}", "bwd", 61.25)
        ]  # fmt: skip
    assert (report.num_operators, report.num_short_operators, report.is_changed) == (2, 1, False)


def test_a_device_may_have_any_name(tmp_path):
    name = 'Home "Brew", 9000 MHz #1 \x7f'
    runs = write_collection(tmp_path / "runs", manifest={**V100, "gpu": name})
    with (runs / "operators.csv").open("w", newline="") as table:
        writer = csv.writer(table)
        writer.writerow(OPERATORS.strip().split(","))
        writer.writerow(["s", name, "linear", "fwd", "fp32", "1x64x64x64", "30.5"])
    own = tmp_path / "own.json"
    fields = {"fp32_tflops": 20.0, "memory_gb": 16, "mem_bandwidth_gb_s": 900, "num_sms": 60, "boost_clock_mhz": 1800}
    own.write_text(json.dumps({"name": name, **fields}))
    add(runs, tmp_path / "new", device_file=own)
    (kernel,) = load_operator_rows(tmp_path / "new" / "operators.csv.gz")
    assert (kernel.device, kernel.spec.fp32_tflops) == (name, 20.0)
    assert {row.spec.name for row in load_rows(tmp_path / "new")} == {name}
    assert not add(runs, tmp_path / "new").is_changed


def test_a_damaged_file_of_kernels_is_one_line(tmp_path, tiny, gpu_runs):
    for content in (b"no gzip", gzip.compress(b"source,device\na,b\n"), gzip.compress(b"x" * 1000)[:-20]):
        (tiny / "operators.csv.gz").write_bytes(content)
        with pytest.raises(GnnpredError, match=r"operators\.csv\.gz"):
            add(gpu_runs, tiny)


@pytest.mark.parametrize("num_moved", range(9))
def test_kernels_come_once_though_an_addition_was_cut_off_and_made_again_under_another_name(
    tmp_path, gpu_runs, monkeypatch, num_moved
):
    runs = shutil.copytree(gpu_runs, tmp_path / "copy")
    (runs / "operators.csv").write_text(f"{OPERATORS}s,{V100['gpu']},linear,fwd,fp32,1x64x64x64,30.5\n")
    cut_off_after(num_moved, monkeypatch)
    with pytest.raises(KilledError):
        add(runs, tmp_path / "new", name="first")
    monkeypatch.undo()
    if (tmp_path / "new" / MEASUREMENTS_FILE).exists():
        with pytest.raises(UsageError, match="under the name first"):
            add(runs, tmp_path / "new", name="second")
        report = add(runs, tmp_path / "new")
    else:
        report = add(runs, tmp_path / "new", name="second")
    (kernel,) = load_operator_rows(tmp_path / "new" / "operators.csv.gz")
    assert kernel.source == f"collect-{report.collection}"
    assert {row.source_id for row in load_rows(tmp_path / "new")} == {kernel.source}


def test_runs_on_several_gpus_go_to_their_own_table(tmp_path, gpu_runs):
    runs = shutil.copytree(gpu_runs, tmp_path / "copy")
    several = {"gpus": "4", "nodes": "2", "interconnect": "nvlink2 + ib100", "strategy": "fsdp"}
    edit_table(runs, lambda row: row | (several if row["model"] == "timm:vgg11" else {"strategy": ""}))
    report = add(runs, tmp_path / "new")
    multi = load_multi_gpu_rows(tmp_path / "new")
    assert (report.num_multi_gpu, len(multi), len(load_rows(tmp_path / "new"))) == (6, 6, 12)
    job = multi[0].job()
    assert (job.gpus, job.nodes, job.strategy, job.interconnect) == (4, 2, "fsdp", "nvlink2")
    assert all(row.graph_id in load_graphs(tmp_path / "new") for row in multi)


# -- devices ---------------------------------------------------------------------------------------
def test_a_gpu_that_the_list_lacks_needs_a_device_file_and_keeps_it(tmp_path):
    runs = write_collection(tmp_path / "runs", manifest={**V100, "gpu": "Home Brew 9000"})
    with pytest.raises(GnnpredError, match=r"Home Brew 9000 is not in the list of GPUs.*--device-file"):
        add(runs, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "Home Brew 9000"\nfp32_tflops = 20.0\nmemory_gb = 16\nmem_bandwidth_gb_s = 900\nnum_sms = 60\n'
        "boost_clock_mhz = 1800\n"
    )
    add(runs, tmp_path / "new", device_file=own)
    assert {row.spec.fp32_tflops for row in load_rows(tmp_path / "new")} == {20.0}
    own.write_text(own.read_text().replace("20.0", "30.0"))
    report = add(runs, tmp_path / "new", device_file=own)
    assert report.notes == (f"{tmp_path / 'new'} describes Home Brew 9000 already, by other figures: those stay",)
    assert not report.is_changed
    own.write_text(own.read_text().replace("9000", "8000"))
    with pytest.raises(UsageError, match=r"describes Home Brew 8000.*measured on Home Brew 9000"):
        add(runs, tmp_path / "new", device_file=own)


def test_cpu_rows_stay_out_of_a_corpus_of_gpus_and_the_other_way_round(tmp_path, tiny, cpu_runs, gpu_runs):
    before = contents(tiny)
    with pytest.raises(UsageError, match=r"measured on a CPU and .* holds rows of GPUs.*--datasets NEW-FOLDER"):
        add(cpu_runs, tiny)
    assert contents(tiny) == before
    add(cpu_runs, tmp_path / "new")
    with pytest.raises(UsageError, match=r"measured on a GPU and .* holds rows of CPUs"):
        add(gpu_runs, tmp_path / "new")


def test_kernels_of_gpus_alone_keep_a_cpu_out_too(tmp_path, tiny, cpu_runs):
    (tmp_path / "kernels").mkdir()
    shutil.copy(tiny / "operators.csv.gz", tmp_path / "kernels")
    with pytest.raises(UsageError, match="holds rows of GPUs"):
        add(cpu_runs, tmp_path / "kernels")


def test_a_device_file_cannot_make_a_gpu_of_a_cpu_or_a_cpu_of_a_gpu(tmp_path, cpu_runs):
    fields = "fp32_tflops = 20.0\nmemory_gb = 16\nmem_bandwidth_gb_s = 900\nnum_sms = 60\nboost_clock_mhz = 1800\n"
    own = tmp_path / "own.toml"
    own.write_text(f'name = "{CPU_NAME}"\narchitecture = "Ampere"\n{fields}')
    with pytest.raises(GnnpredError, match=f"measured on a CPU, and {CPU_NAME} is not described as architecture"):
        add(cpu_runs, tmp_path / "new", device_file=own)
    runs = write_collection(tmp_path / "runs", manifest={**V100, "gpu": "Home Brew 9000"})
    own.write_text(f'name = "Home Brew 9000"\narchitecture = "CPU"\n{fields}')
    with pytest.raises(GnnpredError, match="measured on a GPU, and Home Brew 9000 is described as architecture"):
        add(runs, tmp_path / "new", device_file=own)
    assert not (tmp_path / "new").exists()


def test_a_device_file_of_a_listed_gpu_is_told_to_be_of_no_use(tmp_path, gpu_runs):
    own = tmp_path / "own.toml"
    own.write_text(
        f'name = "{V100["gpu"]}"\nfp32_tflops = 1.0\nmemory_gb = 16\nmem_bandwidth_gb_s = 900\nnum_sms = 60\n'
        "boost_clock_mhz = 1800\n"
    )
    report = add(gpu_runs, tmp_path / "new", device_file=own)
    assert report.notes[0] == f"{V100['gpu']} is in the list of GPUs: its figures there are used, not those of the file"


# -- names and failures ----------------------------------------------------------------------------
def test_names_are_kept_and_not_taken_twice(tmp_path, cpu_runs):
    assert add(cpu_runs, tmp_path / "new", name="first").collection == "first"
    assert add(cpu_runs, tmp_path / "new").collection == "first"
    with pytest.raises(UsageError, match=r"in .* already, under the name first: leave --name"):
        add(cpu_runs, tmp_path / "new", name="second")
    other = write_collection(tmp_path / "other", time_ms=lambda each: 3.0)
    with pytest.raises(UsageError, match="another collection of the name first"):
        add(other, tmp_path / "new", name="first")
    (tmp_path / "new" / "collections" / "first.json").unlink()  # as cut off before it was written
    with pytest.raises(UsageError, match="another collection of the name first"):
        add(other, tmp_path / "new", name="first")
    with pytest.raises(UsageError, match=r"--name '../x'"):
        add(other, tmp_path / "new", name="../x")
    with pytest.raises(UsageError, match="unknown kind 'unsteadi', did you mean 'unsteady'"):
        add(other, tmp_path / "new", accept=("unsteadi",))


def test_a_folder_of_other_things_is_no_corpus(tmp_path, cpu_runs):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match="holds other things and no corpus"):
        add(cpu_runs, tmp_path / "photos")
    with pytest.raises(UsageError, match="is a file"):
        add(cpu_runs, tmp_path / "photos" / "cat.jpg")


def test_a_disk_that_is_full_while_writing_leaves_the_corpus_as_it_was(tmp_path, tiny, gpu_runs, monkeypatch):
    before = contents(tiny)

    def full(path, rows, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge, "write_rows", full)
    with pytest.raises(GnnpredError, match=r"cannot write to .*: No space left on device"):
        add(gpu_runs, tiny)
    assert contents(tiny) == before


@pytest.mark.parametrize("num_moved", range(9))
def test_an_end_between_any_two_files_leaves_a_whole_corpus_and_adding_again_ends_it(
    tmp_path, cpu_runs, monkeypatch, num_moved
):
    """Killed after some files took their places: what lies there reads, and the next call does the rest."""
    done = add(cpu_runs, tmp_path / "whole").files
    expected = contents(tmp_path / "whole")
    assert len(done) > num_moved
    cut_off_after(num_moved, monkeypatch)
    with pytest.raises(KilledError):
        add(cpu_runs, tmp_path / "new")
    monkeypatch.undo()
    if (tmp_path / "new" / "measurements.csv.gz").exists():
        rows, graphs = load_rows(tmp_path / "new"), load_graphs(tmp_path / "new")
        assert all(row.graph_id in graphs and row.spec.name == CPU_NAME for row in rows)
    add(cpu_runs, tmp_path / "new")
    assert contents(tmp_path / "new") == expected


def test_a_corpus_that_another_process_changes_meanwhile_is_not_overwritten(tmp_path, tiny, gpu_runs):
    class Meddling(RooflineCheckpoint):
        def predict(self, *args, **options):
            with (tiny / "measurements.csv.gz").open("ab") as file:
                file.write(b"\0")
            return super().predict(*args, **options)

    with pytest.raises(GnnpredError, match="was changed by another process meanwhile"):
        add_collection(gpu_runs, tiny, make_predictor=lambda: Predictor(Meddling()))


def test_a_build_takes_rows_and_graphs_of_collections_over(tmp_path, gpu_runs):
    add(gpu_runs, tmp_path / "new")
    kept = collected_rows(tmp_path / "new")
    assert len(kept.rows) == 18
    assert {graph["id"] for graph in kept.graphs} == {row.graph_id for row in kept.rows}
    assert collected_rows(tmp_path / "absent").rows == ()
