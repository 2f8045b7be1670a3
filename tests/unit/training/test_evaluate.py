"""Summaries, baselines and intervals on numbers worked by hand."""

import numpy as np
import pytest

from gnnpred.errors import GnnpredError
from gnnpred.metrics import summarise_errors


def test_summary_of_four_rows_by_hand():
    summary = summarise_errors(np.array([110.0, 90.0, 100.0, 160.0]), np.full(4, 100.0))
    assert summary.n == 4
    assert summary.mape_pct == pytest.approx((10 + 10 + 0 + 60) / 4)
    assert summary.median_pct == pytest.approx(10)
    assert summary.bias_pct == pytest.approx((10 - 10 + 0 + 60) / 4)
    assert summary.p90_pct == pytest.approx(45)  # between 10 and 60, 70 % of the way


def test_no_rows_is_an_error():
    with pytest.raises(GnnpredError, match="no rows"):
        summarise_errors(np.zeros(0), np.zeros(0))


def test_roofline_constants_fall_back_from_device_to_precision_to_all():
    pytest.importorskip("torch_geometric")
    from gnnpred.training.baselines import fit_roofline_constants, predict_roofline

    roofline = np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    measured = np.array([2.0, 2.0, 4.0, 0.0, 0.0, 0.0])
    groups = [("A", "fp32"), ("A", "fp32"), ("B", "fp16"), ("A", "fp32"), ("C", "fp16"), ("C", "tf32")]
    constants = fit_roofline_constants(roofline, measured, groups, np.array([0, 1, 2]))
    predicted = predict_roofline(roofline, groups, constants, np.array([3, 4, 5]))
    assert predicted == pytest.approx([2 * 2, 2 * 4, 2 * 2])  # own device; its precision; the median of all


def test_encoded_rows_are_named_by_their_job_as_well_as_by_their_time(tmp_path):
    pytest.importorskip("torch_geometric")
    from gnnpred.training.experiments import _digest
    from tests.helpers.corpus import make_row

    for name in ("graphs.jsonl.xz", "operators.csv.gz"):
        (tmp_path / name).write_bytes(b"")
    plain = _digest(tmp_path, [make_row()])
    assert plain == _digest(tmp_path, [make_row()])
    assert plain != _digest(tmp_path, [make_row(attention="eager")])
    assert plain != _digest(tmp_path, [make_row(step_time_ms=13.0)])
