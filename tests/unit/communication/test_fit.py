"""The collective fit: it recovers known constants, reads the tables as their pages say, and holds out whole sources."""

import csv
import gzip

import numpy as np
import pytest

from gnnpred.communication.collectives import LinkConstants, all_reduce_us
from gnnpred.communication.fabrics import resolve_fabric
from gnnpred.communication.fit import Row, error_pct, fit_links, predict_us, read_rows
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
        ("a/b", 16, 90.0),
        ("vtrain", 8, 93.0),
    ]
    assert rows[1].fabric.network_gb_s_per_domain == pytest.approx(200)
