"""predict and inspect through their arguments."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.onnx_files import model_of, save, small_cnn, value, weight

ROOT = Path(__file__).resolve().parents[2]

PROMISED_KEYS = {
    "step_time_ms", "interval_90_ms", "compute_time_ms", "exposed_communication_ms", "breakdown_ms",
    "throughput_samples_per_s", "device", "gpus", "nodes", "precision", "batch_size", "strategy", "phase", "coverage",
    "unsupported_ops", "warnings", "checkpoint",
}  # fmt: skip


def test_json_is_exactly_one_object_with_every_promised_key(gnnpred, cnn):
    outcome = gnnpred("predict", cnn, "--batch-size", 16, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    result = outcome.json
    assert set(result) >= PROMISED_KEYS
    assert set(result["breakdown_ms"]) == {"forward", "backward", "optimizer", "communication"}
    assert sum(result["breakdown_ms"].values()) == pytest.approx(result["step_time_ms"])
    low, high = result["interval_90_ms"]
    assert low < result["step_time_ms"] < high
    assert (result["batch_size"], result["gpus"], result["nodes"], result["strategy"]) == (16, 1, 1, "ddp")
    assert result["throughput_samples_per_s"] == pytest.approx(16e3 / result["step_time_ms"])


def test_the_panel_names_step_interval_parts_device_batch_and_the_slowest_ops(gnnpred, cnn):
    outcome = gnnpred("predict", cnn, "--batch-size", 16)
    assert outcome.code == 0
    for text in ("one step", "90 % between", "forward", "backward", "optimizer", "samples/s", "slowest ops", "conv"):
        assert text in outcome.out, text
    assert "A100-SXM4-80GB (default" in outcome.out
    assert "16 per GPU" in outcome.out


def test_the_default_batch_is_never_silent(gnnpred, cnn):
    outcome = gnnpred("predict", cnn)
    assert "choose with --batch-size" in outcome.out
    assert any("batch" in warning for warning in gnnpred("predict", cnn, "--json").json["warnings"])


def test_a_baked_batch_is_kept_and_replaced(gnnpred, tmp_path):
    path = save(small_cnn(batch=4), tmp_path)
    kept, replaced = (
        gnnpred("predict", path, "--json").json,
        gnnpred("predict", path, "--batch-size", 32, "--json").json,
    )
    assert (kept["batch_size"], replaced["batch_size"]) == (4, 32)
    assert replaced["step_time_ms"] > kept["step_time_ms"]


@pytest.mark.parametrize(
    "precision", ["fp64", "fp32", "tf32", "fp16", "bf16", "mixed", "mixed-bf16", "amp", "amp_bf16"]
)
def test_every_precision_is_predicted(gnnpred, cnn, precision):
    outcome = gnnpred("predict", cnn, "--batch-size", 8, "--precision", precision, "--json")
    assert outcome.code == 0, outcome.err
    expected = {"amp": "mixed", "amp_bf16": "mixed-bf16"}.get(precision, precision)
    assert outcome.json["precision"] == expected


@pytest.mark.parametrize(
    ("phase", "silent_parts"),
    [("train", set()), ("forward_backward", {"optimizer"}), ("inference", {"backward", "optimizer"})],
)
def test_phases_leave_out_what_they_do_not_run(gnnpred, cnn, phase, silent_parts):
    parts = gnnpred("predict", cnn, "--batch-size", 8, "--phase", phase, "--json").json["breakdown_ms"]
    assert {name for name, value in parts.items() if value == 0} == silent_parts | {"communication"}


def test_options_reach_the_job(gnnpred, cnn):
    result = gnnpred(
        "predict", cnn, "--batch-size", 8, "--device", "rtx 3090", "--optimizer", "adamw", "--memory-format", "nhwc",
        "--compile", "--framework-version", "2.1", "--host-os", "wsl", "--json",
    ).json  # fmt: skip
    assert (result["device"], result["optimizer"], result["memory_format"]) == ("RTX3090", "adamw", "nhwc")
    assert (result["compiler"], result["framework_version"], result["host_os"]) == ("torch_compile", "2.1", "wsl")


def test_several_gpus_report_communication_and_the_fabric(gnnpred, cnn):
    one = gnnpred("predict", cnn, "--batch-size", 8, "--json").json
    many = gnnpred(
        "predict", cnn, "--batch-size", 8, "--gpus", 16, "--nodes", 2, "--inter-node", "ib200", "--json"
    ).json
    assert many["compute_time_ms"] == pytest.approx(one["compute_time_ms"])
    assert many["exposed_communication_ms"] > 0
    assert many["step_time_ms"] == pytest.approx(many["compute_time_ms"] + many["exposed_communication_ms"])
    assert "ib200" in many["fabric"]


def test_a_slower_interconnect_takes_longer(gnnpred, cnn):
    fast = gnnpred("predict", cnn, "--batch-size", 8, "--gpus", 8, "--interconnect", "nvlink", "--json").json
    slow = gnnpred("predict", cnn, "--batch-size", 8, "--gpus", 8, "--interconnect", "pcie", "--json").json
    assert slow["step_time_ms"] >= fast["step_time_ms"]


def test_dim_binds_a_symbolic_dimension(gnnpred, tmp_path):
    from onnx import helper

    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = model_of(
        nodes, [value("x", ["batch", "length", 64])], [value("y", ["batch", "length", 64])], [weight("w", [64, 64])]
    )
    path = save(model, tmp_path)
    short = gnnpred("predict", path, "--batch-size", 64, "--dim", "length=128", "--json")
    long = gnnpred("predict", path, "--batch-size", 64, "--dim", "length=4096", "--json")
    assert (short.code, long.code) == (0, 0), short.err + long.err
    assert long.json["step_time_ms"] > 5 * short.json["step_time_ms"]


def test_a_device_file_is_used(gnnpred, cnn, tmp_path):
    path = tmp_path / "gpu.toml"
    path.write_text(
        'name = "Mine"\nfp32_tflops = 1\nmemory_gb = 8\nmem_bandwidth_gb_s = 10\nnum_sms = 4\nboost_clock_mhz = 1000\n'
    )
    mine = gnnpred("predict", cnn, "--batch-size", 8, "--device-file", path, "--json").json
    assert mine["device"] == "Mine"
    assert mine["step_time_ms"] > gnnpred("predict", cnn, "--batch-size", 8, "--json").json["step_time_ms"]


def test_tf32_on_a_volta_says_what_it_runs_as(gnnpred, cnn):
    result = gnnpred("predict", cnn, "--batch-size", 8, "--device", "V100", "--precision", "tf32", "--json").json
    assert result["precision"] == "fp32"
    assert any("tf32 runs as fp32" in warning for warning in result["warnings"])


def test_an_unknown_op_is_predicted_with_less_coverage_and_a_warning(gnnpred, tmp_path):
    from onnx import helper

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Frobnicate", ["h"], ["y"], domain="com.example"),
    ]
    model = model_of(nodes, [value("x", ["batch", 64])], [value("y", ["batch", 64])], [weight("w", [64, 64])])
    model.opset_import.add(domain="com.example", version=1)
    outcome = gnnpred("predict", save(model, tmp_path), "--batch-size", 8, "--json")
    assert outcome.code == 0, outcome.err
    assert any("Frobnicate" in name for name in outcome.json["unsupported_ops"])
    assert outcome.json["coverage"] < 1
    assert any("Frobnicate" in warning for warning in outcome.json["warnings"])


def test_names_from_a_file_cannot_drive_the_terminal(gnnpred, tmp_path):
    model = small_cnn()
    model.graph.node[0].name = "\x1b[2J[red]evil[/red]"
    outcome = gnnpred("predict", save(model, tmp_path), "--batch-size", 8)
    assert outcome.code == 0
    assert "\x1b" not in outcome.out
    assert "[red]evil" in outcome.out


def test_inspect_lists_every_op_as_table_json_and_csv(gnnpred, cnn):
    table = gnnpred("inspect", cnn, "--batch-size", 8)
    assert table.code == 0, table.err
    assert "conv" in table.out
    as_json = gnnpred("inspect", cnn, "--batch-size", 8, "--format", "json").json
    rows = list(csv.DictReader(io.StringIO(gnnpred("inspect", cnn, "--batch-size", 8, "--format", "csv").out)))
    assert len(rows) == len(as_json["ops"]) == as_json["num_ops"]
    conv = next(op for op in as_json["ops"] if op["kind"] == "conv" and op["phase"] == "forward")
    assert conv["flops"] == 2 * 8 * 16 * 32 * 32 * 3 * 9
    assert conv["output_shapes"] == [[8, 16, 32, 32]]
    assert sum(op["predicted_ms"] for op in as_json["ops"]) == pytest.approx(as_json["compute_time_ms"])


def test_inspect_top_shows_the_slowest_first(gnnpred, cnn):
    ops = gnnpred("inspect", cnn, "--batch-size", 8, "--top", 3, "--format", "json").json["ops"]
    times = [op["predicted_ms"] for op in ops]
    assert len(ops) == 3
    assert times == sorted(times, reverse=True)


def test_the_shipped_example_runs_as_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "cli.py", "predict", "examples/resnet50.onnx", "--precision", "fp16", "--gpus", "8",
         "--batch-size", "64"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "8 x A100-SXM4-80GB" in done.stdout
    assert "Traceback" not in done.stderr
