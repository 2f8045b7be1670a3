"""A collection's folder is read whole, or refused with one line that names the file."""

import csv
import json
import shutil
import sqlite3

import pytest

from gnnpred.additions.collection import read_collection
from gnnpred.errors import GnnpredError
from tests.helpers.written_collections import CPU_NAME, write_collection

OPERATORS = "source,device,kind,phase,precision,shape,time_us\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_collection(
        tmp_path_factory.mktemp("whole") / "runs", failed=lambda each: "oom" if each.batch_size == 16 else ""
    )


@pytest.fixture
def runs(whole, tmp_path):
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "runs")


def edit_table(runs, change) -> None:
    with (runs / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0])
    rows = change(rows)
    with (runs / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def test_it_holds_rows_failures_manifest_recipe_and_device(whole):
    collection = read_collection(whole)
    assert len(collection.measured) == 12
    assert collection.failed == {"oom": 6}
    assert (collection.device, collection.is_cpu) == (CPU_NAME, True)
    assert collection.own_device.name == CPU_NAME
    assert len(collection.manifests) == 1
    assert "torchvision:alexnet" in collection.recipe_text
    assert len({line.row_id for line in collection.measured}) == 12


def test_a_copy_under_another_name_is_the_same_collection(whole, runs):
    assert read_collection(runs).origin == read_collection(whole).origin


def test_another_measurement_of_the_same_recipe_is_another_collection(whole, tmp_path):
    again = write_collection(tmp_path / "again", time_ms=lambda each: 3.0)
    assert read_collection(again).recipe_id == read_collection(whole).recipe_id
    assert read_collection(again).origin != read_collection(whole).origin


def no_store(runs):
    (runs / "collection.sqlite").unlink()


def garbage_store(runs):
    for path in runs.glob("collection.sqlite*"):
        path.unlink()
    (runs / "collection.sqlite").write_bytes(b"no database at all" * 1000)


def torn_store(runs):
    with sqlite3.connect(runs / "collection.sqlite") as db:
        db.execute("PRAGMA journal_mode=DELETE")
    path = runs / "collection.sqlite"
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


def other_format(runs):
    with sqlite3.connect(runs / "collection.sqlite") as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'format'")


def no_table(runs):
    (runs / "runs.csv").unlink()


def old_table(runs):
    edit_table(runs, lambda rows: rows[:-1])


def other_time(runs):
    edit_table(runs, lambda rows: [rows[0] | {"step_time_ms": "1.5"}, *rows[1:]])


def doubled_row(runs):
    edit_table(runs, lambda rows: [*rows, rows[0]])


def foreign_row(runs):
    edit_table(runs, lambda rows: [rows[0] | {"source": "gnnpred collect:x:0123456789abcdef"}, *rows[1:]])


def other_device(runs):
    edit_table(runs, lambda rows: [rows[0] | {"gpu": "V100-SXM2-16GB"}, *rows[1:]])


def model_named(name):
    def damage(runs):
        edit_table(runs, lambda rows: [rows[0] | {"onnx": name}, *rows[1:]])

    return damage


def edit_results(runs, change) -> None:
    """The results of the store through ``change``, the first one's number with it."""
    with sqlite3.connect(runs / "collection.sqlite") as db:
        for i, (key, text) in enumerate(db.execute("SELECT config_id, result FROM rows ORDER BY rowid").fetchall()):
            changed = json.dumps(change(i, json.loads(text)))
            db.execute("UPDATE rows SET result = ? WHERE config_id = ?", (changed, key))


def no_manifest(runs):
    edit_results(runs, lambda i, result: {key: value for key, value in result.items() if key != "manifest"})


def no_results(runs):
    edit_results(runs, lambda i, result: [1, 2])


def cpu_and_gpu(runs):
    edit_results(
        runs, lambda i, result: result | {"manifest": result["manifest"] | {"device": "cuda"}} if i == 1 else result
    )


def no_recipe_id(runs):
    with sqlite3.connect(runs / "collection.sqlite") as db:
        db.execute("DELETE FROM meta WHERE key = 'recipe_id'")


def missing_model(runs):
    next((runs / "models").glob("*.onnx")).unlink()


def damaged_model(runs):
    path = next((runs / "models").glob("*.onnx"))
    path.write_bytes(path.read_bytes()[:-5])


def missing_operator_column(runs):
    (runs / "operators.csv").write_text("source,device,kind\na,b,c\n")


def wrong_operator_shape(runs):
    (runs / "operators.csv").write_text(OPERATORS + f"s,{CPU_NAME},linear,fwd,fp32,1x2,30.5\n")


def operator_of(device, kind, shape):
    def damage(runs):
        (runs / "operators.csv").write_text(OPERATORS + f"s,{device},{kind},fwd,fp32,{shape},30.5\n")

    return damage


def wrong_operator_time(runs):
    (runs / "operators.csv").write_text(OPERATORS + f"s,{CPU_NAME},linear,fwd,fp32,1x64x64x64,nan\n")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_store, "has no collection.sqlite"),
        (garbage_store, "is damaged or no collection"),
        (torn_store, "damaged"),
        (other_format, "is of format 99, this gnnpred reads format 1"),
        (no_table, "cannot read"),
        (old_table, "lacks 1 of the 12 rows"),
        (other_time, "line 2: this row is not in collection.sqlite, or it says something else there"),
        (doubled_row, "line 14: this row"),
        (foreign_row, "line 2: this row"),
        (other_device, "line 2: this row is not in collection.sqlite, or it says something else there"),
        *(
            (model_named(name), "is none of the collection's own files")
            for name in ("../secret.onnx", "/etc/passwd", "models/../runs.csv", "models\\..\\a.onnx", "m\0.onnx", "a")
        ),
        (no_manifest, "does not say on which device it was measured"),
        (no_results, "does not say on which device it was measured"),
        (cpu_and_gpu, "holds rows of a CPU and of GPUs"),
        (no_recipe_id, "does not say its recipe_id"),
        (missing_model, "is missing: copy the folder models/"),
        (damaged_model, "its content does not match its name"),
        (missing_operator_column, "operators.csv lacks the column phase"),
        (wrong_operator_shape, "operators.csv, line 2: no timed kernel"),
        (operator_of(CPU_NAME, "conv", "1x3x8x8x4x3x3x0x0x1x1x1"), "operators.csv, line 2: no timed kernel"),
        (operator_of(CPU_NAME, "linear", "1x-64x64x64"), "operators.csv, line 2: no timed kernel"),
        (operator_of(CPU_NAME, "sorcery", "64x64"), "operators.csv, line 2: no timed kernel: unknown kind 'sorcery'"),
        (operator_of("H100", "linear", "1x64x64x64"), "no row of the collection was measured on 'H100'"),
        (wrong_operator_time, "operators.csv, line 2: no timed kernel"),
    ],
)
def test_what_cannot_be_merged_is_one_line_that_names_it(runs, damage, words):
    damage(runs)
    with pytest.raises(GnnpredError) as caught:
        read_collection(runs)
    assert words in str(caught.value)
    assert str(runs) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_none_and_one_without_a_measured_row(tmp_path):
    with pytest.raises(GnnpredError, match="is no folder"):
        read_collection(tmp_path / "absent")
    all_failed = write_collection(tmp_path / "failed", failed=lambda each: "crash")
    with pytest.raises(GnnpredError, match="holds no measured row"):
        read_collection(all_failed)
