"""Timed kernels: overheads, which rows are kept, and their graphs."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from gnnpred.corpus.operators import (
    OVERHEAD_US,
    OperatorRow,
    load_operator_rows,
    overhead_us,
    sample_operator_rows,
    write_operator_rows,
)
from gnnpred.features import KERNEL_FLOOR_US

_HEADERS = {
    "gemm": "source,gpu,op,precision,phase,b,m,n,k,trans,bias,optimizer,activation,time_us,kernel,split",
    "gemm_aiconfigurator": "source,gpu,op,precision,phase,b,m,n,k,time_us,kernel",
    "conv2d": "source,gpu,op,precision,phase,n,c,h,w,k,r,s,stride_h,stride_w,pad_h,pad_w,groups,bias,layout,optimizer,"
    "activation,time_us",
    "elementwise": "source,gpu,op,precision,phase,rows,cols,time_us,split",
    "norm_softmax": "source,gpu,op,precision,phase,rows,cols,time_us,split",
    "attention": "source,gpu,op,precision,phase,batch,heads,kv_heads,seq_q,seq_kv,head_dim,time_us,kernel",
}


def _tables(folder, **rows):
    (folder / "operators").mkdir()
    for name, header in _HEADERS.items():
        with gzip.open(folder / "operators" / f"{name}.csv.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join([header, *rows.get(name, [])]) + "\n")
    return folder


def test_overhead_is_what_the_smallest_kernels_of_the_group_take():
    times = [31.5] * 30 + [500.0] * 30
    rooflines = [0.1] * 30 + [450.0] * 30
    assert overhead_us("neusight", "fwd", times, rooflines) == pytest.approx(31.5 - KERNEL_FLOOR_US)


def test_a_group_without_small_kernels_takes_the_constant_of_its_source():
    assert overhead_us("neusight", "fwd", [500.0] * 60, [450.0] * 60) == OVERHEAD_US["neusight", "fwd"]
    # kernels timed by a profiler hold no dispatch, however small they are
    assert overhead_us("vidur", "fwd", [3.0] * 60, [0.1] * 60) == 0


def test_sampled_times_are_net_and_small_multiples_of_the_overhead_are_left_out(tmp_path):
    small = ["neusight-train,V100-PCIe-32GB,add,fp32,fwd,64,64,31.5,train"] * 30
    near = ["neusight-train,V100-PCIe-32GB,add,fp32,fwd,4096,1024,90,train"]
    large = ["neusight-train,V100-PCIe-32GB,add,fp32,fwd,65536,4096,4030,train"]
    (row,) = sample_operator_rows(_tables(tmp_path, elementwise=small + near + large))
    assert row.shape == (65536, 4096)
    assert row.time_us == pytest.approx(4000)


def test_chains_of_eager_kernels_are_no_kernel_and_fused_softmax_is_one(tmp_path):
    a100 = "A100-SXM4-80GB"
    rows = [
        f"ett,{a100},rmsnorm,fp16,fwd,4096,4096,900,ett",
        f"ett,{a100},softmax,fp16,fwd,4096,4096,901,ett",
        f"ett,{a100},fused_causal_softmax,fp16,fwd,4096,4096,105,ett",
        f"sailor,{a100},scaled_masked_softmax,fp32,fwd,65536,2048,3000,sailor",
        f"vidur,{a100},rmsnorm,fp16,fwd,4096,4096,60,vidur",
    ]
    found = sample_operator_rows(_tables(tmp_path, norm_softmax=rows))
    assert {(r.source, r.kind, r.time_us) for r in found} == {("ett", "softmax", 100.0), ("vidur", "rms_norm", 60.0)}


def test_wall_times_of_tensorflow_serve_only_gpus_without_kernel_times(tmp_path):
    shape = "16,64,56,56,64,3,3,1,1,1,1,1,0,nchw,,"
    rows = [f"justus2018,{gpu},conv2d,fp32,fwd,{shape},5150" for gpu in ("M60", "GTX1080Ti")]
    found = sample_operator_rows(_tables(tmp_path, conv2d=rows))
    assert [(r.device, r.time_us) for r in found] == [("M60", 5000.0)]


def test_rows_come_back_as_written(tmp_path):
    rows = [OperatorRow("lab", "T4", "sdpa", "bwd", "fp16", (1, 2, 2, 128, 64, 1), 12.5)]
    write_operator_rows(rows, tmp_path / "rows.csv.gz")
    assert load_operator_rows(tmp_path / "rows.csv.gz") == rows


def test_the_shipped_sample_is_small_positive_and_of_known_sources():
    path = Path(__file__).parents[3] / "datasets" / "operators.csv.gz"
    assert path.stat().st_size < 1 << 20
    rows = load_operator_rows(path)
    assert len(rows) > 20_000
    assert np.all([row.time_us > 0 for row in rows])
    assert {row.device for row in rows if row.source.startswith("justus")} <= {"K40", "K80", "M60"}
