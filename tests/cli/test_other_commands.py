"""score, devices, export and the commands that need extras, through their arguments."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.onnx_files import save, small_cnn

ROOT = Path(__file__).resolve().parents[2]


def needs(package: str) -> None:
    """Skip where a package is not installed; importing it here would come before gnnpred's preparations."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def runs(tmp_path):
    save(small_cnn(), tmp_path, "cnn.onnx")
    path = tmp_path / "runs.csv"
    path.write_text(
        "source_id,onnx,phase,gpu,gpus,precision,batch_per_gpu,step_time_ms,compiled,mine\n"
        "a,cnn.onnx,train,V100,1,fp32,64,0.5,eager,1\n"
        "b,cnn.onnx,train,V100,8,amp_fp16,64,0.5,,2\n"
        "c,cnn.onnx,infer,T4,,fp16,64,0.1,torch_compile,3\n"
        "d,absent.onnx,train,T4,1,fp32,64,0.5,,4\n"
    )
    return path


def test_score_prints_figures_by_gpu_and_precision_and_what_was_not_scored(gnnpred, runs):
    outcome = gnnpred("score", runs)
    assert outcome.code == 0, outcome.err
    for text in (
        "V100-SXM2-16GB",
        "mixed",
        "MAPE",
        "median",
        "p90",
        "bias",
        "all",
        "1 of 4 rows not scored",
        "absent.onnx",
    ):
        assert text in outcome.out, text


def test_score_json_holds_overall_and_groups(gnnpred, runs):
    content = gnnpred("score", runs, "--json").json
    assert content["overall"]["n"] == 3
    assert set(content["overall"]) == {"n", "mape_pct", "median_pct", "p90_pct", "bias_pct"}
    assert {(group["gpu"], group["precision"]) for group in content["groups"]} == {
        ("V100-SXM2-16GB", "fp32"),
        ("V100-SXM2-16GB", "mixed"),
        ("T4", "fp16"),
    }
    assert content["unscored"][0]["line"] == 5


def test_score_out_writes_what_predict_says_for_the_same_job(gnnpred, runs, tmp_path):
    out = tmp_path / "predictions.csv"
    assert gnnpred("score", runs, "--out", out).code == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["mine"] for row in rows] == ["1", "2", "3", "4"]
    job = ("--batch-size", 64, "--device", "V100", "--precision", "amp", "--gpus", 8)
    alone = gnnpred("predict", tmp_path / "cnn.onnx", *job, "--json").json
    assert float(rows[1]["predicted_ms"]) == pytest.approx(alone["step_time_ms"], rel=1e-5)
    assert rows[3]["predicted_ms"] == ""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("gpu,precision\nV100,fp32\n", "missing columns onnx, batch_per_gpu, step_time_ms"),
        ("onnx,gpu,precision,batch_per_gpu,step_time_ms\n", "no rows"),
        ("onnx,gpu,precision,batch_per_gpu,step_time_ms\nx.onnx,V100,fp32,8,1\n", "none of the 1 rows"),
    ],
)
def test_a_bad_runs_file_is_one_line(gnnpred, tmp_path, content, text):
    path = tmp_path / "runs.csv"
    path.write_text(content)
    outcome = gnnpred("score", path, "--json")
    assert outcome.code == 1
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err


def test_score_of_an_absent_file_and_an_unwritable_out_are_one_line(gnnpred, runs, tmp_path):
    assert gnnpred("score", tmp_path / "absent.csv").is_one_error_line()
    outcome = gnnpred("score", runs, "--out", tmp_path / "no" / "such" / "folder.csv", "--json")
    assert outcome.code == 1
    assert outcome.is_one_error_line()


def test_devices_lists_and_filters(gnnpred):
    everything, some = gnnpred("devices"), gnnpred("devices", "h100")
    assert everything.code == some.code == 0
    assert "A100-SXM4-80GB" in everything.out
    assert "A100-SXM4-80GB" in some.out  # the default is named
    assert "V100-SXM2-16GB" not in some.out
    listed = gnnpred("devices", "--json").json
    assert len(listed) >= 84
    assert {"name", "fp32_tflops", "memory_gb", "aliases"} <= set(listed[0])
    assert gnnpred("devices", "abacus").code == 2


def test_a_device_as_listed_can_be_given_as_a_device_file(gnnpred, tmp_path):
    import json

    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(gnnpred("devices", "--json", "RTX3090Ti").json[0]))
    cnn = save(small_cnn(), tmp_path)
    by_file = gnnpred("predict", cnn, "--batch-size", 8, "--device-file", path, "--json").json
    assert (
        by_file["step_time_ms"]
        == gnnpred("predict", cnn, "--batch-size", 8, "--device", "RTX3090Ti", "--json").json["step_time_ms"]
    )


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["export", "timm:resnet18", "--out", "x.onnx"], "models"),
        (["train"], "train"),
        (["evaluate"], "train"),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(tmp_path, arguments, extra):
    code = f"import sys; sys.modules['torch'] = None; from gnnpred.cli import run; sys.exit(run({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert f"gnnpred[{extra}]" in done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--batch", "some"), "dynamic"),
        (("--image-size", "large"), "--image-size"),
        (("--image-size", "0"), "--image-size"),
        (("--option", "layers"), "NAME=VALUE"),
        (("--opset", "3"), "opset"),
        (("--exporter", "paper"), "exporter"),
    ],
)
def test_bad_export_options_are_one_line(gnnpred, tmp_path, options, text):
    needs("onnx_ir")
    outcome = gnnpred("export", "timm:resnet18", "--out", tmp_path / "x.onnx", *options)
    assert outcome.code == 2, outcome
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err


@pytest.mark.models
def test_export_predict_and_inspect_work_hand_in_hand(gnnpred, tmp_path):
    needs("timm")
    path = tmp_path / "resnet18.onnx"
    exported = gnnpred("export", "timm:resnet18", "--out", path, "--image-size", "64")
    assert exported.code == 0, exported.err
    assert "11,689,512 parameters" in exported.out
    result = gnnpred("predict", path, "--batch-size", 32, "--precision", "amp", "--json").json
    assert result["num_parameters"] == 11_689_512
    assert result["coverage"] == 1
    assert result["unsupported_ops"] == []
    kinds = {op["kind"] for op in gnnpred("inspect", path, "--batch-size", 32, "--format", "json").json["ops"]}
    assert {"conv", "batch_norm", "relu", "max_pool", "linear", "optimizer_step"} <= kinds


@pytest.mark.models
def test_an_unknown_model_gets_the_nearest_names(gnnpred, tmp_path):
    needs("timm")
    outcome = gnnpred("export", "timm:resnet_18", "--out", tmp_path / "x.onnx")
    assert outcome.code == 1
    assert outcome.is_one_error_line(), outcome
    assert "resnet18" in outcome.err


def test_help_and_version(gnnpred):
    for command in ("predict", "score", "calibrate", "inspect", "devices", "export", "dataset", "train", "evaluate"):
        outcome = gnnpred(command, "--help")
        assert outcome.code == 0
        assert "Usage: gnnpred" in outcome.out
    assert gnnpred("--version").out.startswith("gnnpred ")
    assert "predict" in gnnpred().out
