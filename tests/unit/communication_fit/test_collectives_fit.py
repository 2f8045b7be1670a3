"""The collective fit: it recovers known constants, reads the tables as their pages say, and holds out whole sources."""

import csv
import gzip

import numpy as np
import pytest

from gnnpred.communication.collectives import CollectiveModel, LinkConstants, all_reduce_us
from gnnpred.communication.fabrics import resolve_fabric
from gnnpred.communication_fit import collectives as fit
from gnnpred.communication_fit.collectives import Row, error_pct, fit_links, predict_us, read_rows
from gnnpred.hardware import find_device

TRUE = LinkConstants(
    base_us=9.0, hop_us=2.0, bulk_latency_factor=3.0, low_latency_fraction=0.4, efficiency=0.7, endpoint_gb_s=800.0
)


def _rows(group_sizes):
    device = find_device("A100-SXM4-80GB")
    rows = []
    for gpus in group_sizes:
        fabric = resolve_fabric(device=device, gpus=gpus, nodes=1, interconnect="nvlink3")
        for size in np.logspace(3, 9, 7):
            time_us = all_reduce_us(float(size), fabric, TRUE, None)
            rows.append(Row("made up", device.name, "all_reduce", float(size), time_us, fabric))
    return rows


def test_the_fit_recovers_times_of_group_sizes_it_did_not_see():
    fitted = fit_links(_rows([2, 8]))
    unseen = _rows([4])
    assert error_pct(unseen, predict_us(unseen, fitted, None)).max() < 6


def _write(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def test_degraded_coarse_and_out_of_memory_rows_are_dropped(tmp_path):
    header = [
        "source",
        "gpu",
        "gpus",
        "nodes",
        "interconnect_intra",
        "interconnect_inter",
        "collective",
        "bytes",
        "time_us",
        "note",
    ]
    a100 = ["a/b@1:x", "A100-SXM4-80GB", 8, 1, "nvlink3/nvswitch", "", "all_reduce"]
    _write(
        tmp_path / "collectives.csv.gz",
        header,
        [
            [*a100, 1e6, 40, ""],
            [*a100, 2e6, 50, "degraded: slow path"],
            [*a100, 3e3, 20, "time coarse: bandwidth stored to 0.01 GB/s"],
            ["NVIDIA/nccl#1 (GitHub issue)", *a100[1:], 4e6, 60, ""],
            [*a100[:6], "alltoall", 5e6, 60, ""],
            [
                "a/b@1:x",
                "A100-SXM4-80GB",
                16,
                2,
                "nvlink3/nvswitch",
                "a network nobody knows",
                "all_reduce",
                1e6,
                90,
                "",
            ],
            ["a/b@1:x", "A100-SXM4-80GB", 16, 2, "nvlink3/nvswitch", "IB HDR 8x200Gb", "all_reduce", 1e6, 90, ""],
        ],
    )
    _write(
        tmp_path / "operators" / "collectives.csv.gz",
        ["source", "gpu", "op", "precision", "gpus", "nodes", "bytes", "time_us", "interconnect", "note"],
        [
            ["vtrain", "A100-SXM4-80GB", "all_reduce", "fp32", 8, 1, 1e6, 93, "nvlink", ""],
            ["sailor", "A100-SXM4-40GB", "all_reduce", "fp32", 4, 1, 1e9, 1e12, "nvlink", ""],
            ["sailor", "A100-SXM4-40GB", "all_gather", "fp32", 4, 1, 1e6, 90, "nvlink", ""],
            ["aiconfigurator", "A100-SXM4-80GB", "all_reduce", "fp16", 8, 1, 1e6, 40, "nvlink", ""],
        ],
    )
    rows = read_rows(tmp_path)
    assert [(row.source, row.fabric.gpus, row.time_us) for row in rows] == [
        ("a/b", 8, 40.0),
        ("a/b", 8, 60.0),
        ("a/b", 16, 90.0),
        ("vtrain", 8, 93.0),
    ]
    assert rows[1].collective == "all_to_all"
    assert rows[2].fabric.network_gb_s_per_domain == pytest.approx(200)


def _with_a_hump(fabric_name="nvlink3", group_sizes=(2, 4, 8)):
    """All-reduces that follow the formula, but for a hump: 100 kB to 10 MB take 1.6 times as long."""
    device = find_device("A100-SXM4-80GB")
    rows = []
    for gpus in group_sizes:
        fabric = resolve_fabric(device=device, gpus=gpus, nodes=1, interconnect=fabric_name)
        for size in np.logspace(3, 10, 22):
            factor = 1.6 if 1e5 < size < 1e7 else 1.0
            time_us = factor * all_reduce_us(float(size), fabric, TRUE, None)
            rows.append(Row("made up", device.name, "all_reduce", float(size), time_us, fabric))
    return rows


@pytest.fixture(scope="module")
def constants():
    return fit.fit_all(_with_a_hump())


def test_the_correction_learns_what_the_formula_cannot_say(constants):
    rows = _with_a_hump()
    corrected, plain = fit.predicted_us(rows, constants)
    assert error_pct(rows, plain).mean() > 4
    assert error_pct(rows, corrected).mean() < 0.75 * error_pct(rows, plain).mean()


def test_a_fabric_without_measurements_gets_physics_alone_and_says_so(constants):
    model = CollectiveModel(constants)
    device = find_device("A100-SXM4-80GB")
    other = resolve_fabric(device=device, gpus=8, nodes=1, interconnect="nvlink5")
    estimate = model.estimate("all_reduce", 1e8, other)
    assert estimate.time_ms == estimate.physics_ms
    assert not estimate.measured
    assert "extrapolated by physics" in estimate.basis
    known = resolve_fabric(device=device, gpus=8, nodes=1, interconnect="nvlink3")
    assert model.estimate("all_reduce", 1e8, known).measured
    far = model.estimate("all_reduce", 1e13, known)
    assert far.time_ms == pytest.approx(far.physics_ms)  # ten doublings beyond the largest size
    assert "outside the measured range" in far.basis
    assert not far.measured


def test_the_same_measurements_give_the_same_constants(constants):
    assert fit.fit_all(_with_a_hump()) == constants


@pytest.mark.parametrize(
    ("unit", "group_of"), [("fabric", lambda row: row.fabric.intra.name), ("ranks", lambda row: row.fabric.gpus)]
)
def test_what_is_scored_was_not_in_the_fit(unit, group_of, monkeypatch):
    rows = _with_a_hump() + _with_a_hump("nvlink4", (2, 8))
    seen = []

    def fit_nothing(train):
        seen.append({group_of(row) for row in train})
        return {}

    def predict(test, constants):
        assert not seen[-1] & {group_of(row) for row in test}
        return np.ones(len(test)), np.ones(len(test))

    monkeypatch.setattr(fit, "fit_all", fit_nothing)
    monkeypatch.setattr(fit, "predicted_us", predict)
    tested, corrected, _ = fit.held_out(rows, unit)
    assert len(tested) == len(corrected) == len(rows)
    assert len(seen) == {"fabric": 2, "ranks": 3}[unit]


def test_the_table_of_errors_counts_what_it_names():
    rows = _with_a_hump()
    measured = np.array([row.time_us for row in rows])
    lines = fit.score_table(rows, measured * 1.1, measured * 0.5)
    table = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert "| 66 | 10.0 | 10.0 | 10.0 | +10.0 | 10.0 | 50.0 | 50.0 |" in table["all"]
    assert "send-recv" not in table
