"""One GPU's compute out of sharded runs."""

from dataclasses import replace

import pytest

from gnnpred.corpus.compute_rows import compute_rows, estimate_overhead
from gnnpred.job import ActivationRule, Phase, Precision
from tests.helpers.corpus import make_row
from tests.helpers.graph_builder import GraphBuilder

WIDTH, LAYERS = 4096, 8


def _graph(_graph_id="g"):
    b = GraphBuilder()
    h = b.input(2048, WIDTH)
    for _ in range(LAYERS):
        h = b.op("linear", [h, b.parameter(WIDTH, WIDTH)], (2048, WIDTH))
    return b.build(h)


def _run(**changes):
    fields = {
        "source_id": "llm-foundry-mpt", "model": "mpt-1b", "row_id": "r", "precision": Precision.MIXED_BF16,
        "activation_rule": ActivationRule.ALL_HALF, "device": "A100-SXM4-80GB", "batch_size": 8, "input": "seq=2048",
        "grad_accum": 4, "step_time_ms": 400.0, "gpus": 8, "nodes": 1, "interconnect": "nvlink3/nvswitch",
        "strategy": "fsdp", "attention": "fused", "checkpointing": "full", "optimizer": "adam", "note": "",
    }  # fmt: skip
    return make_row(**fields | changes)


def test_a_micro_batch_without_communication_and_update_is_left():
    run = _run()
    overhead = estimate_overhead(run, _graph())
    (row,) = compute_rows([run], _graph)
    assert row.step_time_ms == pytest.approx(100 - overhead.exposed_ms - overhead.update_ms)
    assert 0 < overhead.exposed_ms < overhead.communication_ms < 25
    assert (row.gpus, row.phase, row.grad_accum, row.optimizer) == (1, Phase.FORWARD_BACKWARD, 1, "none")
    assert (row.derived_from, row.row_id, row.used_for_training) == ("r", "r-compute", True)
    job = row.job()
    assert (job.attention, job.activation_checkpointing, job.gpus) == ("fused", "full", 1)
    assert f"{overhead.exposed_ms:.3g} ms of communication" in row.note


def test_the_update_is_this_gpus_share_of_seven_passes_spread_over_micro_batches():
    run = _run()
    bytes_moved = 7 * 4 * LAYERS * WIDTH * WIDTH / 8
    assert estimate_overhead(run, _graph()).update_ms == pytest.approx(bytes_moved / 2039e6 / 4, rel=0.02)
    half = estimate_overhead(replace(run, precision=Precision.BF16), _graph())
    assert half.update_ms == pytest.approx(estimate_overhead(run, _graph()).update_ms / 2)


def test_runs_that_communicate_for_long_or_are_no_sharded_runs_are_left_out():
    assert not compute_rows([_run(step_time_ms=16.0)], _graph)
    assert not compute_rows([_run(strategy="ddp")], _graph)
    assert not compute_rows([_run(used_for_training=False)], _graph)  # suspect, superseded ...


def test_runs_far_slower_than_the_same_work_on_the_same_chip_are_left_out():
    quick, slow = _run(), _run(row_id="s", device="A100-SXM4-40GB", step_time_ms=600.0)
    assert [row.row_id for row in compute_rows([quick, slow], _graph)] == ["r-compute"]
    slower = replace(slow, step_time_ms=520.0)
    assert len(compute_rows([quick, slower], _graph)) == 2


def test_fewest_gpus_and_largest_micro_batch_represent_a_configuration_by_the_median():
    runs = [
        _run(row_id="many", gpus=16),
        _run(row_id="small", batch_size=4, step_time_ms=210.0),
        *(
            _run(row_id=f"t{time}", step_time_ms=float(time), duplicate_of="x" * (time > 400))
            for time in (390, 400, 410)
        ),
    ]
    assert [row.row_id for row in compute_rows(runs, _graph)] == ["t400-compute"]
