"""The track of NeuSight's GPUs, rows beside the corpus, fitted intervals, and what a user's measurements gain."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

from gnnpred.intervals import INTERVAL_FEATURES
from gnnpred.job import Phase
from gnnpred.training.calibration_scores import calibration_table, inference_table
from gnnpred.training.error_table import neusight_points
from gnnpred.training.experiments import NEUSIGHT_DEVICES, Member, RecipeSettings, folds_of
from gnnpred.training.extra_rows import ExtraRows, choose_extra_rows, software_key
from gnnpred.training.goals import goals
from gnnpred.training.intervals import cross_conformal_bounds, features_of, fit_intervals
from gnnpred.training.networks import blend_networks
from gnnpred.training.ranges import range_table, training_ranges, warning_flags
from tests.helpers.measured_rows import corpus_of, measurement, track_result

pytestmark = pytest.mark.train
FOLDS = {"a": 0, "b": 1}


def _neusight_rows():
    point = {"source_id": "neusight-label-1", "phase": Phase.FORWARD_BACKWARD, "family": "a"}
    return [
        measurement(row_id="h", device="H100-SXM5-80GB", **point),
        measurement(row_id="l", device="L4", **point),
        measurement(row_id="v", device="V100-PCIe-32GB", **point),  # one of their training GPUs
        measurement(row_id="h_other", device="H100-SXM5-80GB", family="b"),
        measurement(row_id="twin", device="A100-SXM4-80GB", family="b"),
        measurement(row_id="r", device="RTX3090", family="b"),
    ]


def test_the_neusight_fold_sees_nothing_of_the_gpus_and_tests_their_points_alone():
    corpus = corpus_of(_neusight_rows(), fold_by_family=FOLDS)
    (fold,) = folds_of(corpus, "neusight")
    assert [corpus.rows[i].row_id for i in fold.test_idx] == ["h", "l"]
    assert [corpus.rows[i].row_id for i in fold.train_idx] == ["v", "r"]
    assert set(fold.hidden_devices) == set(NEUSIGHT_DEVICES)
    assert fold.file_name(Member(0)) == "neusight-all-s0.safetensors"
    assert fold.file_name(Member(1, is_per_op=True)) == "neusight-all-p1.safetensors"
    assert not list(folds_of(corpus_of(_neusight_rows()[5:], fold_by_family=FOLDS), "neusight"))


def test_a_fold_of_one_gpu_hides_that_gpu():
    rows = [measurement(row_id=f"r{i}", device=("RTX3090", "T4")[i % 2]) for i in range(140)]
    hidden = {fold.name: fold.hidden_devices for fold in folds_of(corpus_of(rows, fold_by_family={"net": 0}), "device")}
    assert hidden == {"RTX3090": ("RTX3090",), "T4": ("T4",)}


def test_points_left_out_of_training_are_chosen_and_scored_apart():
    corpus = corpus_of(_neusight_rows(), fold_by_family=FOLDS)
    inflated = measurement(
        row_id="i", source_id="neusight-label-2", phase=Phase.FORWARD_BACKWARD, device="A100-PCIe-80GB",
        used_for_training=False, step_time_ms=20.0,
    )  # fmt: skip
    elsewhere = dataclasses.replace(inflated, row_id="e", device="P100-PCIe-16GB")
    switch = dataclasses.replace(inflated, row_id="s", graph_id="")
    chosen = choose_extra_rows(corpus, [*corpus.rows, inflated, elsewhere, switch])
    assert [row.row_id for row in chosen] == ["i", "e"]
    extra = ExtraRows(chosen, None)
    (fold,) = folds_of(corpus, "neusight")
    assert extra.held_out_by(corpus, fold).tolist() == [0]
    result = track_result(corpus, "neusight", {"ensemble": corpus.target_ms * 1.1})
    result = dataclasses.replace(result, extra_idx=np.array([0]), extra_ms=np.array([15.0]))
    points = neusight_points(result, corpus, extra)
    summaries = points["summaries"]
    assert summaries["plain"]["n"] == 2
    assert summaries["plain"]["mape_pct"] == pytest.approx(10)
    assert summaries["all"]["n"] == 3
    assert summaries["all"]["mape_pct"] == pytest.approx((10 + 10 + 25) / 3)
    assert summaries["A100-PCIe-80GB"]["bias_pct"] == pytest.approx(-25)
    goal = next(g for g in goals({"tracks": {"neusight": {"points": points}}}) if "NeuSight" in g.what)
    assert goal.is_met is False
    assert "15.0 on the 3 of 23" in goal.reached


def _timm(row_id: str, **changes):
    return measurement(row_id=row_id, source_id="timm-1", **changes)


def test_the_nearest_forward_pass_of_the_same_software_corrects_its_training_step():
    corpus = corpus_of([_timm("a", family="a"), _timm("b", family="b", graph_id="other")], fold_by_family=FOLDS)
    passes = [
        _timm("far", phase=Phase.INFERENCE, batch_size=64, family="a", step_time_ms=8.0),
        _timm("near", phase=Phase.INFERENCE, batch_size=16, family="a", step_time_ms=8.0),
        _timm("other version", phase=Phase.INFERENCE, framework_version="1.10", family="a"),
        _timm("other precision", phase=Phase.INFERENCE, precision="fp16", family="a"),
    ]
    extra = ExtraRows(choose_extra_rows(corpus, [*corpus.rows, *passes]), None)
    assert [row.row_id for row in extra.rows] == ["near"]
    assert software_key(extra.rows[0]) == software_key(corpus.rows[0])
    first, second = folds_of(corpus, "family")
    assert extra.held_out_by(corpus, first).tolist() == [0]
    assert not len(extra.held_out_by(corpus, second))
    # step and forward pass are both predicted to take half of what they do: a square root's worth is corrected
    result = track_result(corpus, "family", {"ensemble": corpus.target_ms / 2})
    result = dataclasses.replace(result, extra_idx=np.array([0]), extra_ms=np.array([4.0]))
    found = inference_table(result, corpus, extra, np.tile([-1.0, 1.0], (2, 1)))
    assert found["all"]["before"]["mape_pct"] == pytest.approx(50)
    assert found["all"]["after"]["mape_pct"] == pytest.approx((1 - 0.5**0.5) * 100)
    assert found["all"]["coverage"] == 1.0  # log(2) / 2 lies inside 0.8


def test_a_machine_that_is_off_by_a_constant_is_put_right_by_its_runs():
    rows = [
        measurement(
            row_id=f"r{i}", architecture=f"net{i % 12}", device=("RTX3090", "T4")[i // 12 % 2], source_id="lab-1"
        )
        for i in range(240)
    ]
    corpus = corpus_of(rows, fold_by_family={"net": 0})
    result = track_result(corpus, "device", {"ensemble": corpus.target_ms * 2.0})
    table = calibration_table(result, corpus, np.tile([-0.2, 0.2], (len(result.row_idx), 1)))
    found = table["by_num_runs"]["20"]["all"]
    assert found["num_machines"] == 2
    assert found["mean_before_pct"] == pytest.approx(100)
    assert found["mean_after_pct"] < 10
    assert found["num_halved"] == 2
    goal = next(g for g in goals({"tracks": {}, "calibration": table}) if "calibration" in g.what)
    assert goal.is_met is True


def test_what_cannot_be_measured_is_said():
    found = {goal.what: goal for goal in goals({"tracks": {}})}
    assert found["vTrain's 1,440 single-node rows"].reached == "not measured: the data hold none"
    assert all(goal.is_met is None for goal in found.values())


GPUS = ("RTX3090", "RTX3080", "A100-SXM4-40GB", "T4", "RTX2080Ti", "K80")


@pytest.fixture(scope="module")
def gpu_errors():
    """Six GPUs, the K80 alone of its generation and off by a factor of 3; the others by some per cent."""
    rows = [measurement(row_id=f"r{i}", device=GPUS[i % 6], step_time_ms=10.0 + i % 5) for i in range(480)]
    corpus = corpus_of(rows, fold_by_family={"net": 0})
    noise = np.exp(np.random.default_rng(0).normal(0, 0.05, len(rows)))
    off = np.where(corpus.devices == "K80", 3.0, 1.0)
    return corpus, track_result(corpus, "device", {"ensemble": corpus.target_ms * noise * off})


def test_known_gpus_are_counted_without_the_held_out_one(gpu_errors):
    corpus, result = gpu_errors
    features = features_of(result, corpus)
    alone = features[:, INTERVAL_FEATURES.index("few_generation_rows")]
    own = features[:, INTERVAL_FEATURES.index("few_device_rows")]
    tested = corpus.devices[result.row_idx]
    assert (own == 1).all()
    assert (alone[tested == "K80"] == 1).all()
    assert (alone[tested != "K80"] < 0.5).all()


def test_the_interval_of_a_strange_gpu_is_wider_and_that_of_others_stays_narrow(gpu_errors):
    corpus, result = gpu_errors
    model = fit_intervals(result, corpus)
    assert model.coefficients["few_generation_rows"] > 0
    bounds = model.bounds(features_of(result, corpus))
    tested = corpus.devices[result.row_idx]
    width = {gpu: float(np.diff(bounds[tested == gpu]).mean()) for gpu in GPUS}
    assert width["K80"] > 3 * width["RTX3080"]
    assert -bounds[:, 0] == pytest.approx(bounds[:, 1])  # which way a new GPU errs, nobody knows


def test_a_gpus_own_errors_have_no_part_in_its_own_bounds(gpu_errors):
    corpus, result = gpu_errors
    tested = corpus.devices[result.row_idx]
    worse = np.where(tested == "K80", 10.0, 1.0)
    changed = dataclasses.replace(result, predicted_ms={"ensemble": result.shipped_ms * worse})
    before, after = cross_conformal_bounds(result, corpus), cross_conformal_bounds(changed, corpus)
    assert after[tested == "K80"] == pytest.approx(before[tested == "K80"])
    assert (np.abs(after - before)[tested != "K80"] > 1e-6).any()


def test_warnings_are_scored_reason_by_reason(gpu_errors):
    corpus, result = gpu_errors
    folds = list(folds_of(corpus, "device"))
    found = range_table(result, corpus, folds)
    assert found["by_reason"]["unseen_generation"]["n"] == 80
    assert found["by_reason"]["unseen_generation"]["mape_pct"] > 150
    assert found["not_warned"]["mape_pct"] < 10
    assert found["warned"]["n"] + found["not_warned"]["n"] == 480
    flags = warning_flags(corpus, folds[0])
    assert {len(mask) for mask in flags.values()} == {len(folds[0].test_idx)}


def test_the_launch_bound_limit_is_never_below_balance(gpu_errors):
    corpus, _ = gpu_errors
    limit = training_ranges(corpus, np.arange(len(corpus.rows)))["log_host_to_gpu"][1]
    assert limit >= 0


def test_networks_without_messages_join_every_ensemble_but_the_blind_ones():
    settings = RecipeSettings(seeds=3, fold_seeds=1, device_seeds=2, per_op_seeds=2, per_op_weight=0.6)
    per_op = (Member(0, is_per_op=True), Member(1, is_per_op=True))
    assert settings.members_of("family") == (Member(0), *per_op)
    assert settings.members_of("device") == (Member(0), Member(1), *per_op)
    assert settings.members_of("blind") == (Member(0), Member(1))
    members = settings.members_of("final")
    assert settings.shares_of(members) == pytest.approx([0.4 / 3] * 3 + [0.3] * 2)
    assert settings.shares_of(members[:3]) == pytest.approx([1 / 3] * 3)
    assert settings.shares_of(members[3:]) == pytest.approx([0.5] * 2)
    assert settings.train_of(members[0]) == settings.train
    assert settings.train_of(members[-1]).model.num_layers == 0
    answers = [np.array([1.0, 2.0]), np.array([4.0, 8.0])]
    assert blend_networks(answers, np.array([0.5, 0.5])) == pytest.approx([2.0, 4.0])
