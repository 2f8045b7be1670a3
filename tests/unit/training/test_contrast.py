"""What precision does to step time, and the errors of predictors that ignore it, on numbers worked by hand."""

import json

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

from gnnpred.errors import GnnpredError
from gnnpred.hardware import find_device
from gnnpred.training.contrast import contrast_table, device_class, precision_variation
from gnnpred.training.report import contrast_lines
from tests.helpers.measured_rows import corpus_of, measurement, track_result

pytestmark = pytest.mark.train


def _row(i: int, device: str, precision: str, ms: float, **changes):
    return measurement(row_id=f"r{i}", device=device, precision=precision, step_time_ms=ms, **changes)


ROWS = (
    _row(0, "RTX3090", "tf32", 40.0, family="a"),
    _row(1, "RTX3090", "mixed", 20.0, family="a"),
    _row(2, "RTX3090", "fp16", 10.0, family="a"),
    _row(3, "GTX1080Ti", "fp32", 30.0, family="b"),
    _row(4, "GTX1080Ti", "fp16", 36.0, family="b"),
    _row(5, "GTX1080Ti", "fp64", 300.0, family="b"),
    _row(6, "RTX3090", "mixed", 7.0, family="b", batch_size=16),  # no other precision: no configuration
    _row(7, "RTX3090", "mixed", 5.0, family="b", batch_size=32, phase="inference"),  # never tested
)


@pytest.fixture(scope="module")
def corpus():
    return corpus_of(ROWS, fold_by_family={"a": 0, "b": 1}, with_blind=True)


@pytest.fixture(scope="module")
def results(corpus):
    measured = corpus.target_ms
    blind = np.array([20.0, 20, 20, 33, 33, 33, 7, 5])
    return {
        "family": track_result(corpus, "family", {"ensemble": measured * 1.1, "gnn": measured * 1.2}),
        "blind": track_result(corpus, "blind", {"gnn": blind}),
        "blind_fp32": track_result(corpus, "blind_fp32", {"gnn": blind * 2}),
    }


def test_variation_is_slowest_over_fastest_of_rows_that_differ_in_precision_alone(corpus):
    variation = precision_variation(corpus, np.arange(7))
    plain = variation["without_fp64"]
    assert plain["all"] == {"n": 2, "median": pytest.approx((4 + 1.2) / 2), "p90": pytest.approx(3.72), "max": 4.0}
    assert plain["by_device_class"]["NVIDIA Ampere"]["max"] == 4.0
    assert plain["by_device_class"]["NVIDIA without tensor cores"]["max"] == pytest.approx(1.2)
    assert plain["largest"]["measured_ms"] == {"tf32": 40.0, "mixed": 20.0, "fp16": 10.0}
    assert plain["half_slower_share"] == pytest.approx(1 / 3)  # of tf32-mixed, tf32-fp16 and the 1080 Ti's pair
    assert variation["with_fp64"]["all"]["max"] == 10.0


def test_errors_by_precision_name_the_worst_row_with_its_sign(results, corpus):
    errors = contrast_table(results, corpus)["errors"]
    fp16 = errors["blind"]["fp16"]
    assert fp16["n"] == 2
    assert fp16["worst_pct"] == pytest.approx(100)  # 20 for 10
    assert fp16["worst_row"]["device"] == "RTX3090"
    assert fp16["mape_pct"] == pytest.approx((100 + (1 - 33 / 36) * 100) / 2)
    assert errors["blind_fp32"]["fp16"]["worst_pct"] == pytest.approx(300)
    assert errors["blind"]["fp64"]["worst_pct"] == pytest.approx(-89)
    assert errors["ensemble"]["all"]["mape_pct"] == pytest.approx(10)
    assert errors["gnn"]["half"]["n"] == 4  # three fp16 and mixed of the configurations, and the lone mixed row
    assert "bf16" not in errors["gnn"]


def test_the_best_blind_predictor_knows_the_mean_of_the_configuration(results, corpus):
    repeated = contrast_table(results, corpus)["repeated_configurations"]
    assert repeated["blind_oracle"]["all"]["n"] == 5  # fp64 and the row without a partner are out
    expected = [20 / 40, 1, 20 / 10, (30 * 36) ** 0.5 / 30, (30 * 36) ** 0.5 / 36]
    assert repeated["blind_oracle"]["all"]["mape_pct"] == pytest.approx(np.mean(np.abs(np.array(expected) - 1)) * 100)
    assert repeated["ensemble"]["all"]["mape_pct"] == pytest.approx(10)


def test_repeated_configurations_are_split_into_full_and_half(results, corpus):
    blind = contrast_table(results, corpus)["repeated_configurations"]["blind"]
    assert (blind["full"]["n"], blind["half"]["n"]) == (2, 3)
    assert blind["full"]["mape_pct"] == pytest.approx((50 + 10) / 2)  # 20 for 40, 33 for 30
    assert blind["half"]["mape_pct"] == pytest.approx((0 + 100 + (1 - 33 / 36) * 100) / 3)


def test_a_predictor_that_scales_every_row_alike_has_the_right_ratio(results, corpus):
    ratio = contrast_table(results, corpus)["ratio"]
    assert ratio["ensemble"]["mape_pct"] == pytest.approx(0, abs=1e-9)
    assert ratio["blind"]["n"] == 3
    assert ratio["blind"]["median_pct"] == pytest.approx(ratio["blind"]["ratio_one_median_pct"])


def test_rows_that_one_track_lacks_are_left_out_of_all(results, corpus):
    shorter = track_result(corpus, "blind", {"gnn": corpus.target_ms})
    keep = shorter.row_idx != 0
    cut = type(shorter)("blind", shorter.row_idx[keep], shorter.fold[keep], {"gnn": shorter.predicted_ms["gnn"][keep]})
    table = contrast_table({**results, "blind": cut}, corpus)
    assert table["rows"] == 6
    assert all(by_group["all"]["n"] == 6 for by_group in table["errors"].values())
    assert table["errors"]["blind"]["all"]["mape_pct"] == pytest.approx(0)


def test_without_the_blind_tracks_it_says_which_are_missing(results, corpus):
    with pytest.raises(GnnpredError, match="blind_fp32 missing"):
        contrast_table({"family": results["family"], "blind": results["blind"]}, corpus)


def test_the_lines_hold_every_predictor_and_the_table_is_json(results, corpus):
    table = json.loads(json.dumps(contrast_table(results, corpus)))
    text = "\n".join(contrast_lines(table))
    for words in ("GNN without precision, trained on fp32 and tf32", "NVIDIA Ampere", "+300", "always 1", "**fp64**"):
        assert words in text


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("V100", "NVIDIA Volta"), ("T4", "NVIDIA Turing"), ("RTX4090", "NVIDIA Ada"), ("B200", "NVIDIA Blackwell"),
        ("TitanXp", "NVIDIA without tensor cores"), ("RX7800XT", "AMD"),
    ],
)  # fmt: skip
def test_device_classes_follow_the_generation(device, expected):
    assert device_class(find_device(device)) == expected
