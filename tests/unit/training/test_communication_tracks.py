"""The tracks of the communication head: what they select, what they print, and where they are written."""

from dataclasses import replace

import numpy as np
import pytest

from gnnpred.communication_fit.gradient_profile import NUM_SEGMENTS, GradientProfile
from gnnpred.communication_fit.pairs import make_pairs, match_rows
from gnnpred.errors import GnnpredError
from gnnpred.job import Phase, Precision
from gnnpred.training.communication_tracks import (
    _dlperf,
    _layouts,
    _precision_effect,
    _ScoredPairs,
    _weak_scaling,
    communication_lines,
    communication_table,
    write_section,
    write_table,
)
from tests.helpers.corpus import make_row

PROFILE = GradientProfile(
    elements=tuple(5e5 for _ in range(NUM_SEGMENTS)), num_tensors=160, num_layers=10, backward_share=0.64,
    num_kernels=400, work_gflop=24.0,
)  # fmt: skip


def _pairs():
    base = {"phase": Phase.TRAIN, "optimizer": "sgd", "strategy": "", "device": "V100-SXM2-16GB", "graph_id": "g"}
    single, multi = [], []
    for source, nodes, gpus in (("dle-pytorch-x", 1, 8), ("dlperf-oneflow-x", 4, 32)):
        framework = source.split("-")[1]
        for precision, alone, together in ((Precision.FP32, 400.0, 420.0), (Precision.MIXED, 200.0, 222.0)):
            for family in "abcdef":
                row = make_row(**base, source_id=source, source=f"r@0:{source}{family}", family=family, model=family,
                               framework=framework, precision=precision, step_time_ms=alone,
                               row_id=f"{source}{precision}{family}")  # fmt: skip
                single.append(row)
                multi.append(replace(row, gpus=gpus, nodes=nodes, strategy="ddp", interconnect="nvlink2",
                                     step_time_ms=together, row_id=row.row_id + "m"))  # fmt: skip
    return make_pairs(match_rows(multi, single), {"g": PROFILE})


@pytest.fixture(scope="module")
def scored():
    pairs = _pairs()
    return _ScoredPairs(pairs, np.array([pair.multi_ms * 1.1 for pair in pairs]))


def test_weak_scaling_is_scored_in_points_beside_both_baselines(scored):
    rows = _weak_scaling(scored)["rows"]
    assert set(rows) == {"8 GPUs, fp32", "8 GPUs, mixed"}
    measured = 400 / 420
    assert rows["8 GPUs, fp32"]["mean_points"] == pytest.approx(100 * measured * (1 - 1 / 1.1), abs=0.06)
    assert rows["8 GPUs, fp32"]["no_overhead_points"] == pytest.approx(100 * (1 - measured), abs=0.06)
    assert rows["8 GPUs, fp32"]["median_efficiency_points"] == 0  # other families scale alike here


def test_dlperf_counts_runs_on_several_nodes_alone(scored):
    rows = _dlperf(scored)["rows"]
    assert rows["fp32"]["n"] == rows["fp32, oneflow"]["n"] == 6
    assert rows["mixed"]["mape_pct"] == 10.0


def test_the_precision_effect_is_a_ratio_of_ratios(scored):
    row = _precision_effect(scored)["rows"]["all software"]
    assert row["n"] == 6
    assert row["mape_pct"] == 0  # one factor on every step cancels
    assert row["no_overhead_median_pct"] == pytest.approx(100 * (1 / (420 / 222 / 2) - 1), abs=0.06)


def test_neusight_is_kept_apart_from_recipes():
    recipe = make_row(source_id="dgxc-gpt3", model="gpt3", gpus=8, tensor_parallel=8, step_time_ms=100.0)
    point = make_row(source_id="neusight-label", model="gpt2", gpus=4, pipeline_parallel=4, step_time_ms=100.0)
    rows = _layouts([(recipe, 110.0), (point, 90.0)])["rows"]
    assert rows["all but NeuSight"]["mape_pct"] == 10.0
    assert rows["neusight, pipeline parallel"]["bias_pct"] == -10.0


def test_tables_go_between_the_marks_of_a_page(tmp_path, scored):
    table = {"tracks": {"dlperf_nodes": _dlperf(scored)}}
    lines = communication_lines(table)
    assert any(line.startswith("| fp32 | 6 |") for line in lines)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- tracks of the communication head -->\nold\n<!-- end of the tracks -->\nz\n")
    write_section(page, lines)
    assert "old" not in page.read_text()
    assert page.read_text().startswith("a\n<!-- tracks")
    assert page.read_text().endswith("<!-- end of the tracks -->\nz\n")
    page.write_text("no marks")
    with pytest.raises(GnnpredError, match="no place for the tracks"):
        write_section(page, lines)
    assert write_table(tmp_path / "new", table).exists()


def test_a_corpus_without_multi_gpu_runs_is_refused(tmp_path):
    from gnnpred.corpus.store import write_graphs, write_rows

    write_rows(tmp_path / "measurements.csv.gz", [make_row()])
    write_graphs(tmp_path / "graphs.jsonl.xz", [])
    with pytest.raises(GnnpredError, match="no runs on several GPUs"):
        communication_table(tmp_path)
