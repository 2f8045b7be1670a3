"""Tables from the store: what was measured about the machine stands in the row, operators in a table of their own."""

import csv
import hashlib

import pytest

from gnnpred.collect.recipe import Configuration, Recipe
from gnnpred.collect.store import CollectionStore
from gnnpred.collect.table import write_tables
from gnnpred.job import Precision
from gnnpred.runs import run_of_row

MANIFEST = {
    "device": "cuda", "torch": "2.9.0", "os": "Linux 6", "cpu": "Stand-in", "cuda": "12.8", "cudnn": "91002",
    "driver": "570.86", "gpu": "H200-SXM-141GB", "nccl": "2.27.3", "num_cpus": 16, "host_memory_gib": 128.0,
    "mig": False,
}  # fmt: skip
RESULT = {
    "batch_size": 96, "step_time_ms": 12.0, "step_p10_ms": 11.9, "step_p90_ms": 12.1, "wall_clock_ms": 12.0,
    "num_steps": 10, "warning": "", "peak_memory_mib": 1.0, "input": "3x8x8", "cudnn_benchmark": True, "drift_pct": 0.5,
    "sm_clock_mhz": 1980, "power_w": 512.34567, "energy_per_step_j": 6.1, "throttle_reasons": ["sw_power_cap"],
    "build_s": 0.5, "warmup_s": 0.25, "prepare_s": 4.0, "manifest": MANIFEST,
}  # fmt: skip
LARGEST = Configuration(model="timm:a", batch_size=None, precision=Precision.MIXED, host_copy="pinned")
SMALL = Configuration(model="timm:a", batch_size=4)


@pytest.fixture
def tables(tmp_path):
    def write(*rows):
        recipe = Recipe(name="mine", configurations=(LARGEST, SMALL))
        with CollectionStore(tmp_path) as store:
            for configuration, status, result in rows:
                store.add_row(configuration, status=status, reason="", result=result)
            (tmp_path / "models").mkdir()
            (tmp_path / "models" / "a.onnx").write_bytes(b"graph")
            store.add_graph(SMALL.graph_id, file="models/a.onnx")
            write_tables(store, recipe)

        def read(name):
            with (tmp_path / name).open(newline="") as file:
                return list(csv.DictReader(file))

        return read

    return write


def test_the_row_has_the_batch_that_was_found_and_what_the_machine_told(tables):
    (row,) = tables((LARGEST, "ok", RESULT))("runs.csv")
    assert (row["batch_per_gpu"], row["batch_is_largest"], row["throughput"]) == ("96", "1", "8000")
    assert row["onnx_sha256"] == hashlib.sha256(b"graph").hexdigest()
    assert (row["sm_clock_mhz"], row["power_w"], row["memory_clock_mhz"]) == ("1980", "512.346", "")
    assert (row["nccl"], row["num_cpus"], row["mig"], row["throttle_reasons"]) == (
        "2.27.3", "16", "False", "sw_power_cap",
    )  # fmt: skip
    assert (row["prepare_s"], row["build_s"], row["warmup_s"], row["profile_s"]) == ("4", "0.5", "0.25", "")
    job = run_of_row(row).job
    assert (job.batch_size, job.host_copy) == (96, True)
    assert "from pinned memory" in row["note"]


def test_a_row_without_a_host_copy_says_so_to_those_who_read_it(tables):
    (row,) = tables((SMALL, "ok", RESULT))("runs.csv")
    assert (row["batch_per_gpu"], row["batch_is_largest"], row["host_copy"]) == ("4", "", "")
    assert not run_of_row(row).job.host_copy


def test_what_failed_at_the_largest_batch_is_called_so(tables):
    read = tables((LARGEST, "oom", {}), (SMALL, "crash", {}))
    assert [row["batch_size"] for row in read("failed.csv")] == ["largest", "4"]
    assert read("operators.csv") == []


def test_operators_are_the_median_over_the_configurations_that_ran_them(tables):
    from gnnpred.corpus.operators import OperatorRow, operator_graph

    shared = ["linear", "bwd", "fp16", [1, 8, 16, 32]]
    read = tables(
        (LARGEST, "ok", {**RESULT, "operators": [[*shared, 2, 10.0], ["relu", "fwd", "fp16", [8, 16], 1, 3.0]]}),
        (SMALL, "ok", {**RESULT, "operators": [[*shared, 1, 20.0]]}),
    )
    rows = read("operators.csv")
    assert [(row["kind"], row["phase"], row["precision"], row["shape"], row["time_us"]) for row in rows] == [
        ("linear", "bwd", "fp16", "1x8x16x32", "15"),
        ("relu", "fwd", "fp16", "8x16", "3"),
    ]
    assert {row["device"] for row in rows} == {"H200-SXM-141GB"}
    assert rows[0]["source"].startswith("collect-")
    for row in rows:
        shape = tuple(map(int, row["shape"].split("x")))
        operator_graph(OperatorRow(**{**row, "shape": shape, "time_us": float(row["time_us"])}))
