"""The process behind calibrate: shrinkage, robustness, intervals, groups; and its file."""

import dataclasses
import json

import numpy as np
import pytest

from gnnpred.calibration import (
    CALIBRATION_FEATURES,
    MAX_RUNS_PER_DEVICE,
    Calibration,
    CalibrationPrior,
    CalibrationRun,
    DeviceCalibration,
    cross_validated,
    fold_numbers,
    model_groups,
)
from gnnpred.errors import GnnpredError

NO_FEATURES = (0.0,) * len(CALIBRATION_FEATURES)


def a_run(log_ratio=0.0, group="net", *, share=0.0, known=False, half=False, device="T4", **changes) -> CalibrationRun:
    """``share`` is the share of convolutions: far apart, runs have nothing in common but the machine."""
    features = list(NO_FEATURES)
    features[CALIBRATION_FEATURES.index("share_conv")] = share
    run = CalibrationRun(
        device=device, is_known_device=known, is_half=half, is_inference=False, features=tuple(features),
        log_ratio=log_ratio, group=group, interval_log=(-0.2, 0.3),
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def unlike(log_ratios, **fields) -> list[CalibrationRun]:
    """Runs of different models that do not look alike."""
    return [a_run(value, f"net{i}", share=5.0 * (i + 1), **fields) for i, value in enumerate(log_ratios)]


def test_one_run_by_hand():
    prior = CalibrationPrior()
    correction = Calibration((a_run(0.6),)).correct(a_run())
    bias = prior.unseen_bias**2 * (1 + prior.precision_class**2 + prior.phase**2)
    expected = 0.6 * (bias + prior.similar**2) / (bias + prior.similar**2 + prior.unseen_noise**2)
    assert np.log(correction.factor) == pytest.approx(expected)
    assert (correction.num_runs, correction.num_groups) == (1, 1)


def test_a_model_that_looks_different_shares_the_bias_alone():
    prior = CalibrationPrior()
    correction = Calibration((a_run(0.6),)).correct(a_run(share=9.0))
    bias = prior.unseen_bias**2 * (1 + prior.precision_class**2 + prior.phase**2)
    assert np.log(correction.factor) == pytest.approx(0.6 * bias / (bias + prior.similar**2 + prior.unseen_noise**2))


def test_many_agreeing_runs_are_believed_on_any_gpu_and_few_hardly_on_a_known_one():
    for known in (True, False):
        fitted = DeviceCalibration(unlike([0.5] * 30, known=known), CalibrationPrior())
        assert np.log(fitted.correct(a_run(share=-9.0)).factor) == pytest.approx(0.5, abs=0.06)
    few = DeviceCalibration(unlike([0.1, -0.1, 0.2, 0.1, 0.0], known=True), CalibrationPrior())
    assert abs(np.log(few.correct(a_run(share=-9.0)).factor)) < 0.01
    few = DeviceCalibration(unlike([0.5, 0.4, 0.6, 0.5, 0.5]), CalibrationPrior())
    assert np.log(few.correct(a_run(share=-9.0)).factor) > 0.35


def test_an_outlier_does_not_move_the_answer_far_and_is_told_apart():
    clean = DeviceCalibration(unlike([0.3] * 8), CalibrationPrior())
    wrong_unit = DeviceCalibration(unlike([*[0.3] * 8, np.log(1000)]), CalibrationPrior())
    probe = a_run(share=-9.0)
    assert np.log(wrong_unit.correct(probe).factor) == pytest.approx(np.log(clean.correct(probe).factor), abs=0.04)
    assert wrong_unit.weights[-1] < 0.02
    assert wrong_unit.weights[:-1].min() > 0.9


def test_half_and_full_precision_differ_where_the_runs_do():
    runs = [*unlike([0.1] * 10), *(dataclasses.replace(r, is_half=True) for r in unlike([0.5] * 10))]
    fitted = DeviceCalibration(runs, CalibrationPrior())
    full, half = (np.log(fitted.correct(a_run(share=-9.0, half=half)).factor) for half in (False, True))
    assert half > full + 0.1


def test_devices_without_runs_are_left_alone():
    calibration = Calibration((a_run(0.5, device="T4"),))
    assert calibration.correct(a_run(device="V100")) is None
    assert calibration.correct(a_run(device="T4")) is not None


def test_left_out_residuals_equal_fitting_without_the_group():
    rng = np.random.default_rng(0)
    runs = [a_run(rng.normal(), f"net{i // 3}", share=float(rng.normal())) for i in range(12)]
    # without reweighting both sides see the same noise
    prior = CalibrationPrior(degrees_of_freedom=1e5)
    fitted = DeviceCalibration(runs, prior)
    for i, run in enumerate(runs):
        others = DeviceCalibration([r for r in runs if r.group != run.group], prior)
        assert fitted.left_out_residuals[i] == pytest.approx(
            run.log_ratio - np.log(others.correct(run).factor), abs=1e-3
        )


def test_the_interval_follows_the_residuals_and_is_wide_where_little_is_known():
    probe = a_run(share=-9.0)
    one = Calibration((a_run(0.5),)).correct(probe).interval_log
    assert one[0] < -0.45
    assert one[1] > 0.45  # wider than the checkpoint's -0.2 to 0.3: one run leaves the bias open
    rng = np.random.default_rng(0)
    widths = []
    for spread in (0.02, 0.4):
        runs = unlike(0.5 + spread * rng.normal(size=40))
        low, high = Calibration(tuple(runs)).correct(probe).interval_log
        assert low < 0 < high
        widths.append(high - low)
    assert widths[0] < 0.35
    assert widths[1] > 2 * widths[0]


def test_updating_replaces_the_runs_of_the_named_devices_alone():
    old = Calibration((a_run(0.1, device="T4"), a_run(0.2, device="V100")))
    new = old.updated([a_run(0.9, device="T4")])
    assert {(run.device, run.log_ratio) for run in new.runs} == {("V100", 0.2), ("T4", 0.9)}


def test_the_file_brings_back_the_same_corrections():
    calibration = Calibration(tuple(unlike([0.3, 0.2, 0.5, 0.4])))
    again = Calibration.from_json(json.loads(calibration.to_json()), where="x")
    assert again == calibration
    assert again.correct(a_run()) == calibration.correct(a_run())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.update(format=2), "another version"),
        (lambda c: c.update(features=["x"]), "another version"),
        (lambda c: c.pop("runs"), "not a calibration"),
        (lambda c: c["prior"].update(known_noise=0), "not a calibration"),
        (lambda c: c["prior"].pop("similar"), "not a calibration"),
        (lambda c: c["runs"][0].update(log_ratio=float("nan")), "not a calibration"),
        (lambda c: c["runs"][0].update(log_ratio=1e9), "out of range"),
        (lambda c: c["runs"][0].update(features=[1.0]), "not a calibration"),
        (lambda c: c["runs"][0].update(interval_log=[1.0]), "not a calibration"),
        (lambda c: c.update(runs=[3]), "not a calibration"),
    ],
)
def test_a_file_that_is_no_calibration_is_one_line_that_names_it(change, text):
    content = json.loads(Calibration((a_run(0.1),)).to_json())
    change(content)
    with pytest.raises(GnnpredError, match=r"here/calibration\.json") as caught:
        Calibration.from_json(content, where="here/calibration.json")
    assert text in str(caught.value)


def test_too_many_runs_are_refused():
    with pytest.raises(GnnpredError, match="train on them instead"):
        _ = Calibration((a_run(0.1),) * (MAX_RUNS_PER_DEVICE + 1)).by_device


def test_rows_that_share_any_key_share_a_group():
    groups = model_groups([["a", "m1"], ["b", "m2"], ["c", "m1"], ["b"], ["d"]])
    assert groups[0] == groups[2]
    assert groups[1] == groups[3]
    assert len(set(groups)) == 3


def test_folds_keep_groups_whole_and_are_of_even_size():
    groups = ["a"] * 4 + ["b"] * 3 + ["c"] * 3 + ["d"] * 2
    fold = fold_numbers(groups, 3)
    assert len({(g, f) for g, f in zip(groups, fold, strict=True)}) == 4
    assert sorted(np.bincount(fold)) == [3, 4, 5]
    assert set(fold_numbers(["a", "a"], 10)) == {0}


def test_cross_validation_never_lets_a_model_correct_itself():
    # one model is far off; all others are right: its own runs must not help it
    runs = [*unlike([0.0] * 12), *(a_run(2.0, "odd", share=99.0) for _ in range(4))]
    corrections = cross_validated(runs)
    assert np.log(corrections[-1].factor) == pytest.approx(0, abs=0.05)
    assert cross_validated([a_run(0.5, "only"), a_run(0.5, "only")]) == [None, None]
