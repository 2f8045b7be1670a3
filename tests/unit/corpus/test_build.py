"""Building the corpus from raw tables: interpretation, repeats, reasons, resuming, missing tables."""

import csv
import gzip
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
if find_spec("timm") is None or find_spec("torchvision") is None:
    pytest.skip("needs the models extra", allow_module_level=True)

from gnnpred.additions.merge import add_collection
from gnnpred.corpus import build as build_module
from gnnpred.corpus.build import RAW_FILES, build_dataset
from gnnpred.corpus.sources.record import interpret_common
from gnnpred.corpus.store import load_graphs, load_multi_gpu_rows, load_rows
from gnnpred.errors import GnnpredError
from gnnpred.job import ActivationRule, Phase, Precision
from gnnpred.predictor import Predictor
from gnnpred.software import tf32_was_default, version_numbers
from tests.helpers.collection_folders import V100, write_collection
from tests.helpers.roofline import RooflineCheckpoint

pytestmark = pytest.mark.models

COLUMNS = (
    "source_id", "source", "model", "model_library", "phase", "framework", "framework_version", "cuda", "gpu", "gpus",
    "nodes", "interconnect", "precision", "memory_format", "compiled", "batch_per_gpu", "input", "optimizer",
    "grad_accum", "step_time_ms", "throughput", "throughput_unit", "note",
)  # fmt: skip


def make_record(**changes: str) -> dict[str, str]:
    record = dict.fromkeys(COLUMNS, "") | {
        "source_id": "ryu-2080ti-2020", "source": "owner/name@0123456789ab:results.csv", "model": "squeezenet1_1",
        "phase": "forward_backward", "framework": "pytorch", "framework_version": "1.4", "gpu": "RTX2080Ti",
        "gpus": "1", "precision": "fp16", "memory_format": "nchw", "compiled": "eager", "batch_per_gpu": "12",
        "input": "3x224x224", "step_time_ms": "20", "note": "input copied H2D inside the timed region",
    }  # fmt: skip
    return record | changes


def write_tables(folder: Path, records: list[dict[str, str]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name in RAW_FILES:
        with gzip.open(folder / name, "wt", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(records if name == RAW_FILES[0] else [])
    (folder / "timm_model_check.csv").write_text("model,create_model_name,status\nresnet18,resnet18,ok\nold,old,gone\n")
    return folder


def build(tmp_path: Path, records: list[dict[str, str]]):
    shared = write_tables(tmp_path / "shared", records)
    report = build_dataset(shared, tmp_path / "out", jobs=1, work=tmp_path / "work", show_progress=False)
    return report, load_rows(tmp_path / "out")


def test_repeats_are_marked_and_the_median_represents_them(tmp_path):
    records = [make_record(step_time_ms=time) for time in ("20", "26", "22")]
    _, rows = build(tmp_path, records)
    used = [row for row in rows if row.used_for_training]
    assert [row.step_time_ms for row in used] == [22.0]
    assert {row.duplicate_of for row in rows if not row.used_for_training} == {used[0].row_id}


def test_a_row_says_what_was_timed(tmp_path):
    report, rows = build(tmp_path, [make_record()])
    row = rows[0]
    assert (row.phase, row.precision, row.device) == (Phase.FORWARD_BACKWARD, Precision.FP16, "RTX2080Ti")
    assert row.host_copy
    assert row.optimizer == "none"
    assert row.family == "squeezenet"
    assert report.num_training_rows == 1
    assert load_graphs(tmp_path / "out")[row.graph_id].num_parameters == 1_235_496


def test_rows_that_cannot_be_used_say_why(tmp_path):
    records = [
        make_record(gpu="Apple M1"),
        make_record(source_id="timm-train-x", model="old", phase="train", precision="amp_fp16"),
        make_record(step_time_ms=""),
        make_record(model="squeezenet9_9"),
        make_record(note="SUSPECT: slower than fp32"),
    ]
    _, rows = build(tmp_path, records)
    assert len(rows) == 5
    assert "device table" in rows[0].excluded_reason
    assert "timm builds no model" in rows[1].excluded_reason
    assert "missing" in rows[2].excluded_reason
    assert "cannot be rebuilt" in rows[3].excluded_reason
    assert rows[4].suspect
    assert rows[4].graph_id
    assert not any(row.used_for_training for row in rows)


def test_rows_of_several_gpus_have_a_file_of_their_own(tmp_path):
    records = [make_record(), make_record(gpus="2", interconnect="pcie")]
    report, rows = build(tmp_path, records)
    assert [row.gpus for row in rows] == [1]
    (several,) = load_multi_gpu_rows(tmp_path / "out")
    assert (several.gpus, several.nodes, several.strategy, several.interconnect) == (2, 1, "dp", "pcie")
    assert several.graph_id == rows[0].graph_id
    assert several.job().gpus == 2
    assert report.num_multi_gpu_rows == 1
    assert report.num_training_rows == 1


def test_many_accumulated_micro_batches_become_one_without_optimizer(tmp_path):
    accumulating = make_record(
        source_id="dle-pytorch-bert", model="resnet50_v1.5", phase="train", grad_accum="16", step_time_ms="320",
        optimizer="sgd", note="",
    )  # fmt: skip
    few = accumulating | {"grad_accum": "4"}
    _, rows = build(tmp_path, [accumulating, few])
    assert (rows[0].phase, rows[0].optimizer, rows[0].step_time_ms) == (Phase.FORWARD_BACKWARD, "none", 20.0)
    assert rows[0].used_for_training
    assert (rows[0].grad_accum, rows[1].grad_accum) == (1, 4)
    assert rows[1].phase is Phase.TRAIN
    assert not rows[1].used_for_training


def test_a_source_that_nothing_reads_is_named(tmp_path):
    with pytest.raises(GnnpredError, match="unheard-of"):
        build(tmp_path, [make_record(source_id="unheard-of")])


def test_a_second_build_traces_nothing_again(tmp_path, monkeypatch):
    records = [make_record()]
    build(tmp_path, records)
    first = (tmp_path / "out" / "measurements.csv.gz").read_bytes()
    monkeypatch.setattr(build_module, "trace_key", lambda key: pytest.fail(f"traced {key} again"))
    build(tmp_path, records)
    assert (tmp_path / "out" / "measurements.csv.gz").read_bytes() == first


def test_rows_and_graphs_that_were_added_stay(tmp_path):
    runs = write_collection(tmp_path / "runs", manifest=V100)
    build(tmp_path, [make_record()])
    options = {"accept": ("all",), "make_predictor": lambda: Predictor(RooflineCheckpoint())}
    add_collection(runs, tmp_path / "out", **options)
    before = load_rows(tmp_path / "out")
    assert len(before) == 19
    _, rows = build(tmp_path, [make_record()])
    assert rows == before
    graphs = load_graphs(tmp_path / "out")
    assert all(row.graph_id in graphs for row in rows)
    assert not add_collection(runs, tmp_path / "out", **options).is_changed


def test_missing_tables_are_named(tmp_path):
    with pytest.raises(GnnpredError, match=r"measurements_vision\.csv\.gz.*--shared"):
        build_dataset(tmp_path / "nowhere", tmp_path / "out")


@pytest.mark.parametrize(
    ("note", "raw", "precision", "rule"),
    [
        ("", "amp_fp16", Precision.MIXED, ActivationRule.AUTOCAST),
        ("from_tqdm;apex_O2", "amp_fp16", Precision.MIXED, ActivationRule.ALL_HALF),
        ("use_fp16: fp16 compute, fp32 variables", "amp_fp16", Precision.MIXED, ActivationRule.ALL_HALF),
        ("half model, fp32 master weights", "fp16", Precision.MIXED, ActivationRule.ALL_HALF),
        ("", "fp16", Precision.FP16, ActivationRule.AUTOCAST),
    ],
)
def test_half_precision_is_told_apart(note, raw, precision, rule):
    common = interpret_common(make_record(note=note, precision=raw))
    assert (common.precision, common.activation_rule) == (precision, rule)


@pytest.mark.parametrize(
    ("version", "note", "matmul"),
    [("1.10", "", True), ("2.7.1", "", False), ("1.13.0a0+d0d6b1f", "tf32_by_NGC_default", True), ("2.3.0", "", False)],
)
def test_pytorch_since_1_12_uses_tf32_in_convolutions_only(version, note, matmul):
    assert interpret_common(make_record(framework_version=version, note=note, precision="tf32")).tf32_matmul is matmul


def test_tensorflow_before_2_4_had_no_tf32_except_nvidias_own():
    assert [tf32_was_default("tensorflow", v) for v in ("1.15.4", "2.3.0", "2.4.1")] == [True, False, True]
    assert version_numbers("1.8.0a0(NGC20.11?)") == (1, 8, 0)
