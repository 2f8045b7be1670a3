"""calibrate, score --calibrate and predict --measured-inference-ms through their arguments, with a real folder."""

import csv
import json

import pytest

from gnnpred import JobSpec, MeasuredInference, Phase, Precision, Predictor, find_device
from gnnpred.checkpoint import load_checkpoint
from gnnpred.errors import GnnpredError, UsageError
from tests.helpers.graphs import tiny_cnn
from tests.helpers.onnx_files import model_of, save, value, weight
from tests.helpers.physics_checkpoint import write_physics_checkpoint

WIDTHS = (24, 32, 48, 64, 96, 128)
T4 = JobSpec(device=find_device("T4"), batch_size=32)


def mlp(width: int):
    from onnx import helper

    nodes = [
        helper.make_node("Gemm", ["x", "a"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "b"], ["y"], transB=1),
    ]
    weights = [weight("a", [width, 256]), weight("b", [10, width])]
    return model_of(nodes, [value("x", ["batch", 256])], [value("y", ["batch", 10])], weights)


@pytest.fixture
def base(tmp_path):
    """A checkpoint that has seen the V100 alone."""
    return write_physics_checkpoint(tmp_path / "base", devices=["V100-SXM2-16GB"])


@pytest.fixture
def runs(tmp_path, base):
    """A T4 that takes 1.5 times the predicted time: 6 models at 3 batches, fp32 and mixed."""
    predictor = Predictor(base)
    lines = ["onnx,model,gpu,precision,batch_per_gpu,step_time_ms,gpus"]
    for i, width in enumerate(WIDTHS):
        path = save(mlp(width), tmp_path, f"mlp{width}.onnx")
        for batch in (16, 64, 256):
            precision = ("fp32", "mixed")[i % 2]
            job = JobSpec(device=find_device("T4"), precision=Precision.parse(precision), batch_size=batch)
            measured = 1.5 * predictor.predict(path, job).step_time_ms
            lines.append(f"{path.name},mlp {width},T4,{precision},{batch},{measured:.9g},1")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def predicted(cli, path, checkpoint, *options) -> dict:
    outcome = cli("predict", path, "--batch-size", 32, "--checkpoint", checkpoint, "--json", *options)
    assert outcome.code == 0, outcome.err
    return outcome.json


def test_a_calibrated_folder_predicts_the_users_machine_and_leaves_other_gpus_alone(cli, base, runs, tmp_path):
    out = tmp_path / "mine"
    outcome = cli("calibrate", runs, "--out", out, "--checkpoint", base)
    assert outcome.code == 0, outcome.err
    for text in ("T4: 18 runs of 6 models", "training has not seen this GPU", "before", "after", str(out)):
        assert text in outcome.out, text
    probe = save(mlp(80), tmp_path, "probe.onnx")
    before, after = (predicted(cli, probe, name, "--device", "T4") for name in (base, out))
    assert after["step_time_ms"] == pytest.approx(1.5 * before["step_time_ms"], rel=0.1)
    assert after["calibration"]["num_runs"] == 18
    assert after["calibration"]["num_models"] == 6
    assert after["step_time_ms"] == pytest.approx(before["step_time_ms"] * after["calibration"]["factor"])
    assert before["calibration"] is None
    assert (after["checkpoint"], before["checkpoint"]) == ("mine", "physics")

    def relative_width(answer: dict) -> float:
        low, high = answer["interval_90_ms"]
        return (high - low) / answer["step_time_ms"]

    assert relative_width(after) < 0.7 * relative_width(before)
    assert any("rests on its specification alone" in w for w in before["warnings"])
    assert any("and on the 18 runs of the calibration" in w for w in after["warnings"])
    assert not any("alone" in w for w in after["warnings"])
    for device in ("V100", "A100-SXM4-80GB"):
        plain, calibrated = (predicted(cli, probe, name, "--device", device) for name in (base, out))
        changed = {key for key in plain if plain[key] != calibrated[key]}
        assert changed == {"checkpoint"}


def test_inspect_and_score_use_the_calibrated_folder(cli, base, runs, tmp_path):
    out = tmp_path / "mine"
    report = cli("calibrate", runs, "--out", out, "--checkpoint", base, "--json").json
    assert report["calibrated_from"] == "physics"
    assert report["devices"][0]["median_factor"] == pytest.approx(1.5, rel=0.1)
    assert report["cross_validation"]["after"]["mape_pct"] < report["cross_validation"]["before"]["mape_pct"]
    before, after = (cli("score", runs, "--checkpoint", name, "--json").json["overall"] for name in (base, out))
    assert before["mape_pct"] == pytest.approx(100 / 3, rel=1e-3)
    assert after["mape_pct"] < 5
    path = tmp_path / "mlp64.onnx"
    job = ("--device", "T4", "--batch-size", 32, "--json")
    ops = cli("inspect", path, "--checkpoint", out, *job).json["ops"]
    step_ms = cli("predict", path, "--checkpoint", out, *job).json["step_time_ms"]
    assert sum(op["predicted_ms"] for op in ops) == pytest.approx(step_ms)


def test_score_calibrate_shows_before_and_after_by_cross_validation(cli, base, runs):
    outcome = cli("score", runs, "--checkpoint", base, "--calibrate")
    assert outcome.code == 0, outcome.err
    assert "6-fold cross-validation by model" in outcome.out
    assert "before" in outcome.out
    assert "after" in outcome.out
    content = cli("score", runs, "--checkpoint", base, "--calibrate", "--json").json
    gain = content["calibration"]
    assert set(gain["before"]) == {"n", "mape_pct", "median_pct", "p90_pct", "bias_pct"}
    assert gain["before"] == content["overall"]
    assert gain["after"]["n"] == 18
    assert gain["after"]["mape_pct"] < 0.3 * gain["before"]["mape_pct"]
    assert {(g["gpu"], g["precision"]) for g in gain["groups"]} == {("T4", "fp32"), ("T4", "mixed")}
    assert 0 <= gain["interval_90_coverage_before"] <= gain["interval_90_coverage_after"] <= 1
    assert "calibration" not in cli("score", runs, "--checkpoint", base, "--json").json


def test_no_batch_of_a_model_helps_another_batch_of_it(cli, base, runs):
    """One model is ten times slower than the rest, at all its batches: after calibration it must still be wrong."""
    rows = list(csv.DictReader(runs.open()))
    for row in rows:
        if row["onnx"] == "mlp64.onnx":
            row["step_time_ms"] = str(10 * float(row["step_time_ms"]))
    with runs.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    gain = cli("score", runs, "--checkpoint", base, "--calibrate", "--json").json["calibration"]
    assert gain["after"]["p90_pct"] > 80


def test_an_outlier_is_named_with_its_line(cli, base, runs, tmp_path):
    lines = runs.read_text().splitlines()
    cells = lines[5].split(",")
    cells[5] = str(1000 * float(cells[5]))
    runs.write_text("\n".join([*lines[:5], ",".join(cells), *lines[6:]]) + "\n")
    out = tmp_path / "mine"
    outcome = cli("calibrate", runs, "--out", out, "--checkpoint", base)
    assert "! line 6 (mlp32.onnx)" in outcome.out
    probe = save(mlp(80), tmp_path, "probe.onnx")
    factor = predicted(cli, probe, out, "--device", "T4")["calibration"]["factor"]
    assert factor == pytest.approx(1.5, rel=0.12)


def test_a_second_calibration_keeps_devices_that_it_does_not_name(cli, base, runs, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli("calibrate", runs, "--out", first, "--checkpoint", base).code == 0
    other = tmp_path / "other.csv"
    other.write_text(
        "onnx,gpu,precision,batch_per_gpu,step_time_ms\n"
        "mlp64.onnx,L4,fp32,64,3\nmlp96.onnx,L4,fp32,64,3\nmissing.onnx,L4,fp32,64,3\n"
    )
    report = cli("calibrate", other, "--out", second, "--checkpoint", first, "--json").json
    assert report["kept_devices"] == ["T4"]
    assert report["calibrated_from"] == "physics"
    assert report["num_rows"] == 3
    assert list(report["left_out"].values()) == [1]
    assert set(load_checkpoint(second).calibration.by_device) == {"T4", "L4"}
    job = ("--device", "T4")
    probe = tmp_path / "mlp64.onnx"
    answers = [predicted(cli, probe, name, *job)["step_time_ms"] for name in (first, second)]
    assert answers[0] == answers[1]


def test_a_gpu_of_the_users_own_is_calibrated_through_its_device_file(cli, base, runs, tmp_path):
    device = {**cli("devices", "--json", "T4").json[0], "name": "MyCard", "aliases": []}
    file = tmp_path / "card.json"
    file.write_text(json.dumps(device))
    runs.write_text(runs.read_text().replace(",T4,", ",mycard,"))
    out = tmp_path / "mine"
    assert "MyCard" not in cli("calibrate", runs, "--out", out, "--checkpoint", base).out
    outcome = cli("calibrate", runs, "--out", out, "--checkpoint", base, "--device-file", file)
    assert outcome.code == 0, outcome.err
    assert "MyCard: 18 runs of 6 models" in outcome.out
    answer = predicted(cli, tmp_path / "mlp64.onnx", out, "--device-file", file)
    assert answer["calibration"]["num_runs"] == 18
    scored = cli("score", runs, "--checkpoint", out, "--device-file", file, "--json").json
    assert scored["overall"]["mape_pct"] < 5


def test_communication_is_no_part_of_the_correction(cli, base, runs, tmp_path):
    """Eight GPUs whose step is mostly all-reduce say nothing about one GPU's compute."""
    text = runs.read_text().replace(",1\n", ",8\n")
    runs.write_text(text)
    outcome = cli("calibrate", runs, "--out", tmp_path / "mine", "--checkpoint", base)
    assert outcome.code == 1
    assert outcome.is_one_error_line(), outcome
    assert "communication is more than 30%" in outcome.err


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data.replace(b'"known_noise"', b'"known_nose"'), "calibration.json does not match the hash"),
        (None, "no readable calibration.json"),
    ],
)
def test_a_damaged_calibration_is_refused_in_one_line(cli, base, runs, tmp_path, damage, text):
    out = tmp_path / "mine"
    cli("calibrate", runs, "--out", out, "--checkpoint", base)
    path = out / "calibration.json"
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    outcome = cli("predict", tmp_path / "mlp64.onnx", "--checkpoint", out)
    assert outcome.code == 1
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err


def test_out_is_never_written_over_something_else(cli, base, runs, tmp_path):
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "thesis.tex").write_text("x")
    for out, text in ((occupied, "not empty"), (base, "is the checkpoint"), (runs, "is a file")):
        outcome = cli("calibrate", runs, "--out", out, "--checkpoint", base)
        assert outcome.code == 2, out
        assert outcome.is_one_error_line(), outcome
        assert text in outcome.err
    out = tmp_path / "mine"
    assert cli("calibrate", runs, "--out", out, "--checkpoint", base).code == 0
    assert "--overwrite" in cli("calibrate", runs, "--out", out, "--checkpoint", base).err
    assert cli("calibrate", runs, "--out", out, "--checkpoint", base, "--overwrite").code == 0


def test_bad_input_to_calibrate_is_one_line(cli, base, runs, tmp_path):
    out = tmp_path / "mine"
    assert cli("calibrate", tmp_path / "absent.csv", "--out", out, "--checkpoint", base).is_one_error_line()
    nothing = tmp_path / "nothing.csv"
    nothing.write_text("onnx,gpu,precision,batch_per_gpu,step_time_ms\nmissing.onnx,T4,fp32,8,1\n")
    outcome = cli("calibrate", nothing, "--out", out, "--checkpoint", base)
    assert outcome.code == 1
    assert "none of the 1 rows can be used" in outcome.err
    assert not out.exists()
    one_model = tmp_path / "one.csv"
    one_model.write_text("onnx,gpu,precision,batch_per_gpu,step_time_ms\nmlp64.onnx,T4,fp32,8,1\n")
    outcome = cli("score", one_model, "--checkpoint", base, "--calibrate")
    assert outcome.code == 1
    assert "of one model" in outcome.err
    assert cli("calibrate", one_model, "--out", out, "--checkpoint", base).code == 0
    outcome = cli("score", runs, "--checkpoint", out, "--calibrate")
    assert outcome.code == 2
    assert "is calibrated already" in outcome.err


# -- a measured forward pass -------------------------------------------------------------------------


def forward_ms(base, path, **changes) -> float:
    import dataclasses

    job = dataclasses.replace(T4, phase=Phase.INFERENCE, optimizer="none", **changes)
    return Predictor(base).predict(path, job).step_time_ms


def test_a_measured_forward_pass_scales_the_step_and_all_its_parts(cli, base, tmp_path):
    path = save(mlp(64), tmp_path)
    job = ("--device", "T4")
    plain = predicted(cli, path, base, *job)
    slow = predicted(cli, path, base, *job, "--measured-inference-ms", 2 * forward_ms(base, path))
    applied = slow["measured_inference"]
    assert plain["measured_inference"] is None
    assert applied["predicted_ms"] == pytest.approx(forward_ms(base, path))
    assert applied["factor"] == pytest.approx(2**0.5)
    assert slow["step_time_ms"] == pytest.approx(plain["step_time_ms"] * applied["factor"])
    for part, value_ms in plain["breakdown_ms"].items():
        assert slow["breakdown_ms"][part] == pytest.approx(value_ms * applied["factor"])
    same = predicted(cli, path, base, *job, "--measured-inference-ms", forward_ms(base, path))
    assert same["step_time_ms"] == pytest.approx(plain["step_time_ms"])
    assert same["interval_90_ms"][1] < plain["interval_90_ms"][1]


def test_batch_and_precision_of_the_measurement_are_its_own(cli, base, tmp_path):
    path = save(mlp(64), tmp_path)
    measured = forward_ms(base, path, batch_size=512, precision=Precision.MIXED)
    options = ("--measured-inference-ms", measured, "--measured-batch", 512, "--measured-precision", "amp")
    answer = predicted(cli, path, base, "--device", "T4", *options)
    assert answer["measured_inference"]["factor"] == pytest.approx(1)
    assert (answer["measured_inference"]["batch_size"], answer["measured_inference"]["precision"]) == (512, "mixed")
    assert (answer["batch_size"], answer["precision"]) == (32, "fp32")
    assert any("it corrects little" in warning for warning in answer["warnings"])
    slow = ("--measured-inference-ms", 2 * measured, *options[2:])
    assert predicted(cli, path, base, "--device", "T4", *slow)["measured_inference"]["factor"] < 1.2


def test_communication_is_not_scaled_by_the_forward_pass(base):
    import dataclasses

    job = dataclasses.replace(T4, gpus=2)
    measured = MeasuredInference(ms=1000.0)
    plain = Predictor(base).predict(tiny_cnn(), job)
    corrected = Predictor(base).predict(tiny_cnn(), job, measured_inference=measured)
    assert corrected.communication_ms == pytest.approx(plain.communication_ms)
    assert corrected.compute_time_ms > 1.5 * plain.compute_time_ms
    assert corrected.op_ms.sum() == pytest.approx(corrected.compute_time_ms)
    assert any("check that it is one forward pass" in w for w in corrected.warnings)
    assert json.dumps(corrected.as_dict())


def test_the_panel_says_what_was_applied(cli, base, tmp_path):
    path = save(mlp(64), tmp_path)
    outcome = cli("predict", path, "--batch-size", 32, "--checkpoint", base, "--measured-inference-ms", 0.5)
    assert outcome.code == 0, outcome.err
    assert "forward pass measured 0.5 ms, predicted" in outcome.out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--measured-inference-ms", "0"), "above 0 ms"),
        (("--measured-inference-ms", "-3"), "above 0 ms"),
        (("--measured-inference-ms", "nan"), "above 0 ms"),
        (("--measured-inference-ms", "inf"), "above 0 ms"),
        (("--measured-inference-ms", "fast"), "number"),
        (("--measured-inference-ms", "3", "--measured-batch", "0"), "at least 1"),
        (("--measured-inference-ms", "3", "--measured-precision", "fp7"), "unknown precision"),
        (("--measured-batch", "8"), "--measured-inference-ms"),
        (("--measured-precision", "fp16"), "--measured-inference-ms"),
        (("--measured-inference-ms", "3", "--phase", "inference"), "must not be inference"),
    ],
)
def test_a_bad_measurement_is_one_line_and_exit_code_2(cli, base, tmp_path, options, text):
    path = save(mlp(64), tmp_path)
    outcome = cli("predict", path, "--checkpoint", base, "--batch-size", 8, *options)
    assert outcome.code == 2
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err


def test_the_python_api_raises_what_the_command_prints(base):
    with pytest.raises(UsageError, match="above 0"):
        MeasuredInference(ms=float("nan"))
    with pytest.raises(GnnpredError, match="at least 1"):
        MeasuredInference(ms=1.0, batch_size=0)
