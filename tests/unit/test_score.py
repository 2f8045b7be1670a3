"""Scoring: figures by hand, rows kept, reasons counted."""

import csv
from types import SimpleNamespace

import pytest

from gnnpred.errors import GnnpredError
from gnnpred.score import score_runs, write_predictions

HEADER = "source_id,onnx,gpu,precision,batch_per_gpu,step_time_ms,grad_accum,my column\n"


class TenMilliseconds:
    """Predicts 10 ms (8 for the passes, 1.5 optimizer, 0.5 communication) for every model but one."""

    checkpoint = SimpleNamespace(card=SimpleNamespace(name="constant"))

    def __init__(self):
        self.asked = []
        self.jobs = []

    def predict(self, model, job, *, dims=None):
        self.asked.append(str(model))
        self.jobs.append(job)
        if model.name == "broken.onnx":
            raise GnnpredError("broken.onnx is not an ONNX file")
        parts = {"forward": 3.0, "backward": 5.0, "optimizer": 1.5, "communication": 0.5}
        return SimpleNamespace(
            step_time_ms=10.0, interval_90_ms=(8.0, 13.0), breakdown_ms=parts, num_parameters=1, traits=None
        )


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(
        HEADER + "a,net.onnx,V100,fp32,8,8,,x\n"  # +25 %
        "b,net.onnx,V100,fp32,8,20,,\n"  # -50 %
        "c,broken.onnx,V100,fp32,8,10,,\n"
        "d,net.onnx,T4,amp_fp16,8,10,,\n"  # 0 %
        "e,net.onnx,V99999,fp32,8,10,,y\n",
        encoding="utf-8",
    )
    return path


def test_figures_by_hand(runs):
    report = score_runs(runs, predictor=TenMilliseconds())
    assert report.overall.as_dict() == pytest.approx(
        {"n": 3, "mape_pct": 25.0, "median_pct": 25.0, "p90_pct": 45.0, "bias_pct": -25 / 3}
    )
    groups = {(key["gpu"], key["precision"]): summary for key, summary in report.groups}
    assert set(groups) == {("V100-SXM2-16GB", "fp32"), ("T4", "mixed")}
    assert groups["V100-SXM2-16GB", "fp32"].n == 2
    assert groups["V100-SXM2-16GB", "fp32"].bias_pct == pytest.approx(-12.5)
    assert report.interval_coverage == pytest.approx(2 / 3)  # 8 and 10 lie in 8..13, 20 does not


def test_paths_are_relative_to_the_csv(runs):
    predictor = TenMilliseconds()
    score_runs(runs, predictor=predictor)
    assert set(predictor.asked) == {str(runs.parent / "net.onnx"), str(runs.parent / "broken.onnx")}


def test_rows_that_cannot_be_scored_are_counted_with_their_reason(runs):
    content = score_runs(runs, predictor=TenMilliseconds()).as_dict()
    assert (content["num_rows"], content["num_unscored"], content["overall"]["n"]) == (5, 2, 3)
    assert [row["line"] for row in content["unscored"]] == [4, 6]
    assert "not an ONNX file" in content["unscored"][0]["reason"]
    assert "unknown device" in content["unscored"][1]["reason"]


def test_predictions_stand_beside_every_row_and_unknown_columns_are_kept(runs, tmp_path):
    out = tmp_path / "predictions.csv"
    write_predictions(score_runs(runs, predictor=TenMilliseconds()), out)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["source_id"] for row in rows] == list("abcde")
    assert [row["predicted_ms"] for row in rows] == ["10", "10", "", "10", ""]
    assert rows[0]["my column"] == "x"
    assert float(rows[0]["error_pct"]) == 25
    assert rows[0]["status"] == "ok"
    assert "not an ONNX file" in rows[2]["status"]


def test_accumulated_passes_and_the_layout_reach_the_predictor(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(
        HEADER.strip() + ",gpus,tp,pipeline_parallel,strategy\n"
        "a,net.onnx,V100,fp32,8,34,4,,,,,\n"
        "b,net.onnx,V100,fp32,8,34,8,,8,2,4,zero1\n"
        "c,net.onnx,V100,fp32,8,34,8,,8,3,,\n"
    )
    predictor = TenMilliseconds()
    report = score_runs(path, predictor=predictor)
    assert [job.num_microbatches for job in predictor.jobs] == [4, 8]
    assert (predictor.jobs[1].tensor_parallel, predictor.jobs[1].pipeline_parallel) == (2, 4)
    assert predictor.jobs[1].strategy == "zero1"
    (problem,) = report.problems
    assert "--tp 3" in problem


def test_missing_columns_are_named(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("gpu,precision,model\nV100,fp32,x\n")
    with pytest.raises(GnnpredError, match="missing columns onnx, batch_per_gpu, step_time_ms"):
        score_runs(path, predictor=TenMilliseconds())


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "missing columns"), (HEADER.encode(), "holds no rows"), (b"\xff\xfe\x00bad", "not a CSV file")],
)
def test_a_file_without_rows_is_one_line(tmp_path, content, message):
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(GnnpredError, match=message):
        score_runs(path, predictor=TenMilliseconds())


def test_a_byte_order_mark_and_ragged_rows_do_not_matter(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + HEADER.encode() + b"a,net.onnx,V100,fp32,8,8\r\nb,net.onnx,T4,fp32,8,8,,x,extra\r\n"
    )
    assert score_runs(path, predictor=TenMilliseconds()).overall.n == 2
