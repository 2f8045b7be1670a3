"""Pipelines: the schedule against its formula, the cuts by hand, what the busiest stage does."""

from itertools import pairwise

import numpy as np
import pytest

from gnnpred.communication import pipeline, step_timeline
from gnnpred.communication.pipeline import balanced_cuts, passes_of_stage, simulate
from gnnpred.costs import op_costs
from gnnpred.hardware import find_device
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.passes.step import complete_step, lower_forward
from tests.helpers.transformers import small_transformer

A100 = find_device("A100-SXM4-80GB")


def _end(stages):
    return max(task.end_ms for tasks in stages for task in tasks)


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 2), (4, 4), (4, 16), (8, 3), (8, 64)])
def test_equal_stages_take_m_plus_pp_minus_1_passes(pp, m):
    stages = simulate([1.0] * pp, [2.0] * pp, pp=pp, microbatches=m)
    assert _end(stages) == pytest.approx((m + pp - 1) * 3.0)
    assert all(len(tasks) == 2 * m for tasks in stages)


@pytest.mark.parametrize(("pp", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (4, 4, 2)])
def test_interleaving_divides_the_bubble(pp, m, v):
    stages = simulate([1.0 / v] * (pp * v), [2.0 / v] * (pp * v), pp=pp, microbatches=m)
    assert _end(stages) == pytest.approx((m + (pp - 1) / v) * 3.0)


def test_the_slowest_stage_sets_the_pace():
    stages = simulate([1.0, 3.0, 1.0], [2.0, 6.0, 2.0], pp=3, microbatches=50)
    # the first stage's forward and the last stage's passes before and behind it, then 50 passes of the slowest
    assert _end(stages) == pytest.approx(50 * 9.0 + (1.0 + 1.0 + 2.0 + 2.0), abs=9.0)
    assert _end(stages) >= 50 * 9.0


def test_every_pass_starts_after_what_it_needs():
    stages = simulate([1.0, 2.0, 1.5, 1.0], [2.0, 3.0, 2.5, 1.0], pp=2, microbatches=4)
    done = {(t.chunk, t.microbatch, t.is_forward): t for tasks in stages for t in tasks}
    for (chunk, microbatch, is_forward), task in done.items():
        before = chunk - 1 if is_forward else chunk + 1
        if (before, microbatch, is_forward) in done:
            assert task.start_ms >= done[before, microbatch, is_forward].end_ms
        if not is_forward:
            assert task.start_ms >= done[chunk, microbatch, True].end_ms
    for tasks in stages:
        assert all(a.end_ms <= b.start_ms for a, b in pairwise(tasks))


def test_1f1b_keeps_no_more_micro_batches_than_stages():
    for stage in range(4):
        alive = most = 0
        for _, _, is_forward in passes_of_stage(stage, 4, 16, 1):
            alive += 1 if is_forward else -1
            most = max(most, alive)
        assert most == 4 - stage


def test_cuts_are_balanced():
    assert balanced_cuts([1, 1, 1, 5], 2) == [3, 4]
    assert balanced_cuts([5, 1, 1, 1], 2) == [1, 4]
    assert balanced_cuts([1, 1, 1, 1, 1, 1], 3) == [2, 4, 6]
    assert balanced_cuts([9, 1, 1], 3) == [1, 2, 3]
    times = np.random.default_rng(1).uniform(1, 2, 12)
    ends = balanced_cuts(times, 4)
    longest = max(times[a:b].sum() for a, b in zip([0, *ends], ends, strict=False))
    assert longest <= times.sum() / 4 + times.max()


def _timeline(**options):
    job = JobSpec(device=A100, batch_size=1, optimizer="adam", precision=Precision.FP32, **options)
    lowered = lower_forward(small_transformer(8), batch_size=None, precision=job.precision)
    step = complete_step(lowered, phase=Phase.TRAIN, optimizer="adam")
    return step_timeline(step, op_costs(step), np.full(len(step.ops), 1.0), job)


def test_more_micro_batches_shrink_the_share_of_the_bubble():
    found = [_timeline(gpus=4, pipeline_parallel=4, microbatches=m) for m in (4, 8, 16, 64)]
    shares = [t.bubble_ms / t.step_ms for t in found]
    assert shares == sorted(shares, reverse=True)
    assert 0.25 < shares[0] < 0.55  # equal stages: 3/7
    assert found[0].bubble_ms == pytest.approx(found[-1].bubble_ms, rel=0.05)


def test_micro_batches_beyond_the_simulated_ones_add_what_they_would_take(monkeypatch):
    short = _timeline(gpus=4, pipeline_parallel=4, microbatches=37)
    monkeypatch.setattr(pipeline, "_SIMULATED_ROUNDS", 1000)
    full = _timeline(gpus=4, pipeline_parallel=4, microbatches=37)
    assert short.step_ms == pytest.approx(full.step_ms)


def test_boundaries_carry_one_activation():
    job = JobSpec(device=A100, batch_size=1, gpus=4, pipeline_parallel=4, microbatches=4)
    lowered = lower_forward(small_transformer(8), batch_size=None, precision=job.precision)
    step = complete_step(lowered, phase=Phase.TRAIN, optimizer="adam")
    from gnnpred.communication.layout import layout_of
    from gnnpred.communication.step_work import make_work

    work = make_work(step, op_costs(step), np.full(len(step.ops), 1.0), job, layout_of(job))
    chunks = pipeline.cut_into_chunks(work)
    assert [chunk.send_bytes for chunk in chunks] == [16 * 64 * 4] * 3 + [0.0]
    assert sum(len(chunk.segments) for chunk in chunks) == 10  # 8 layers, what comes before, what comes behind
    assert sum(chunk.forward_ms + chunk.backward_ms for chunk in chunks) == pytest.approx(
        sum(op.phase != "optimizer" for op in step.ops)
    )
