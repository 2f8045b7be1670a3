"""The interval of a prediction, and what is known of a GPU and its relatives."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gnnpred.checkpoint import load_checkpoint
from gnnpred.costs import op_costs
from gnnpred.errors import GnnpredError
from gnnpred.graph_summary import SUMMARY_FEATURE_NAMES
from gnnpred.hardware import find_device
from gnnpred.intervals import (
    INTERVAL_FEATURES,
    KNOWN_DEVICE,
    UNSEEN_DEVICE,
    IntervalModel,
    interval_features,
    interval_models,
)
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.known_devices import KnownDevices, Novelty, device_warnings
from gnnpred.passes.step import complete_step, lower_forward
from tests.helpers.graphs import tiny_cnn
from tests.helpers.physics_checkpoint import write_physics_checkpoint


def _summary(**values) -> np.ndarray:
    row = np.zeros((1, len(SUMMARY_FEATURE_NAMES)))
    for name, value in values.items():
        row[0, SUMMARY_FEATURE_NAMES.index(name)] = value
    return row


def _column(features: np.ndarray, name: str) -> float:
    return float(features[0, INTERVAL_FEATURES.index(name)])


def test_features_say_what_is_known_before_a_measurement():
    novelty = Novelty(distance=2.0, few_generation_rows=1.0, few_device_rows=0.5)
    found = interval_features(_summary(log_host_to_gpu=0.0, precision_mixed=1.0), np.array([-0.3]), [novelty])
    values = {name: _column(found, name) for name in INTERVAL_FEATURES}
    assert values == pytest.approx(
        {"disagreement": 0.3, "host_share": 0.5, "is_half": 1, "is_tf32": 0, "is_fp64": 0, "device_distance": 2,
         "few_generation_rows": 1, "few_device_rows": 0.5}
    )  # fmt: skip


def test_bounds_scale_with_the_features_and_are_capped():
    model = IntervalModel(np.log(0.2), {"disagreement": 1.0}, (-1.0, 2.0))
    features = np.zeros((3, len(INTERVAL_FEATURES)))
    features[:, 0] = [0.0, np.log(2), 50.0]
    assert model.bounds(features) == pytest.approx(np.array([[-0.2, 0.4], [-0.4, 0.8], [-3.0, 3.0]]))


def test_a_model_survives_json():
    model = IntervalModel(-1.5, {"is_half": 0.25}, (-1.2, 1.4))
    again = interval_models(json.loads(json.dumps({KNOWN_DEVICE: model.as_dict()})), where="here")
    assert again == {KNOWN_DEVICE: model}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "no 90 % interval"),
        ({KNOWN_DEVICE: {"intercept": 0}}, "not an interval"),
        ({KNOWN_DEVICE: {"intercept": 0, "coefficients": {}, "quantiles": [1, -1]}}, "lower quantile first"),
        ({KNOWN_DEVICE: {"intercept": float("nan"), "coefficients": {}, "quantiles": [-1, 1]}}, "finite"),
        ({KNOWN_DEVICE: {"intercept": 0, "coefficients": {"colour": 1}, "quantiles": [-1, 1]}}, "colour"),
    ],
)
def test_what_is_no_interval_is_refused_in_one_line(content, problem):
    with pytest.raises(GnnpredError, match=problem) as caught:
        interval_models(content, where="card of x")
    assert "\n" not in str(caught.value)


KNOWN = KnownDevices({"RTX3090": 3000, "V100-SXM2-16GB": 700, "A100-SXM4-40GB": 300, "TitanV": 5})


def test_a_gpu_of_training_is_no_news():
    novelty = KNOWN.novelty(find_device("RTX3090"))
    assert (novelty.distance, novelty.few_generation_rows, novelty.few_device_rows) == (0, 0, 0)
    assert device_warnings(KNOWN, find_device("RTX3090")) == {}


def test_a_gpu_with_few_rows_leans_on_its_relatives():
    novelty = KNOWN.novelty(find_device("TitanV"))
    assert novelty.nearest == "V100-SXM2-16GB"
    assert 0 < novelty.distance < 1.5
    assert 0.5 < novelty.few_device_rows < 1


def test_a_new_generation_and_a_far_specification_are_warned_of():
    found = device_warnings(KNOWN, find_device("RTX5090"))
    assert set(found) == {"unseen_generation", "far_specification"}
    assert "Blackwell" in found["unseen_generation"]
    assert KNOWN.novelty(find_device("RTX5090")).few_generation_rows == 1
    assert "unseen_vendor" in device_warnings(KNOWN, find_device("RX7900XTX"))
    assert all("\n" not in text for text in found.values())


def _predict(checkpoint, device: str):
    graph = complete_step(
        lower_forward(tiny_cnn(), batch_size=8, precision=Precision.FP32), phase=Phase.TRAIN, optimizer="sgd"
    )
    return checkpoint.predict(graph, op_costs(graph), JobSpec(device=find_device(device)))


def test_predict_takes_the_interval_of_the_regime_and_warns(tmp_path):
    folder = write_physics_checkpoint(tmp_path / "c", devices=["V100-SXM2-16GB", "A100-SXM4-40GB"])
    card = json.loads((folder / "card.json").read_text())
    card["intervals"][UNSEEN_DEVICE] = IntervalModel(0.0, {"few_generation_rows": 1.0}, (-0.1, 0.1)).as_dict()
    (folder / "card.json").write_text(json.dumps(card))
    checkpoint = load_checkpoint(folder)
    known, new = _predict(checkpoint, "V100-SXM2-16GB"), _predict(checkpoint, "K80")
    sibling = _predict(checkpoint, "RTX3090")  # Ampere, as the A100 is: 1,000 rows of it
    assert known.interval_factors == pytest.approx((np.exp(-0.22), np.exp(0.22)), rel=1e-4)
    assert new.interval_factors[1] == pytest.approx(np.exp(0.1 * np.e), rel=1e-4)
    assert 1.1 < sibling.interval_factors[1] < new.interval_factors[1]
    assert any("generation of K80" in text for text in new.warnings)
    assert not any("generation" in text for text in (*known.warnings, *sibling.warnings))


def test_launch_bound_steps_are_warned_of_beyond_what_the_card_says(tmp_path):
    checkpoint = load_checkpoint(write_physics_checkpoint(tmp_path / "c", devices=["V100-SXM2-16GB"]))
    assert not any("launch-bound" in text for text in _predict(checkpoint, "V100-SXM2-16GB").warnings)
    ranges = {**checkpoint.card.global_ranges, "log_host_to_gpu": (-9.0, -1.0)}
    checkpoint.card = replace(checkpoint.card, global_ranges=ranges)
    assert sum("launch-bound" in text for text in _predict(checkpoint, "V100-SXM2-16GB").warnings) == 1


def test_a_card_of_another_version_is_refused(tmp_path):
    folder = write_physics_checkpoint(tmp_path / "c", devices=["V100-SXM2-16GB"])
    card = json.loads((folder / "card.json").read_text())
    del card["intervals"]
    (folder / "card.json").write_text(json.dumps(card))
    with pytest.raises(GnnpredError, match="train it again"):
        load_checkpoint(folder)


@pytest.mark.parametrize("rows", [["V100"], {"V100-SXM2-16GB": -1}, {"V100-SXM2-16GB": "many"}])
def test_device_rows_that_are_no_counts_are_refused(tmp_path, rows):
    folder = write_physics_checkpoint(tmp_path / "c", devices=["V100-SXM2-16GB"])
    card = json.loads((folder / "card.json").read_text())
    card["device_rows"] = rows
    (folder / "card.json").write_text(json.dumps(card))
    with pytest.raises(GnnpredError, match="number of rows"):
        load_checkpoint(folder)
