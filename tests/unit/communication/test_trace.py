"""The trace file: valid, complete, and on every stage's thread of kernels the whole step."""

import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from gnnpred.communication import step_timeline
from gnnpred.communication.trace import STREAMS, Trace, write_trace
from gnnpred.costs import op_costs
from gnnpred.errors import GnnpredError
from gnnpred.hardware import find_device
from gnnpred.job import JobSpec, Phase
from gnnpred.passes.step import complete_step, lower_forward
from gnnpred.passes.tensor_parallel import split_products
from tests.helpers.transformers import small_transformer

A100 = find_device("A100-SXM4-80GB")


def _traced(**options):
    job = JobSpec(device=A100, batch_size=1, optimizer="adam", **options)
    share = split_products(
        lower_forward(small_transformer(4), batch_size=None, precision=job.precision), job.tensor_parallel
    )
    step = complete_step(share.graph, phase=Phase.TRAIN, optimizer="adam")
    trace = Trace()
    op_ms = np.random.default_rng(0).uniform(0.01, 1, len(step.ops))
    found = step_timeline(
        step, op_costs(step), op_ms, job, collectives=share.collectives, repeated_ops=share.repeated_ops, trace=trace
    )
    return trace, found


@pytest.mark.parametrize(
    "layout",
    [
        {"gpus": 1}, {"gpus": 8}, {"gpus": 8, "grad_accum": 6}, {"gpus": 4, "strategy": "dp"},
        {"gpus": 8, "strategy": "fsdp", "grad_accum": 2}, {"gpus": 8, "strategy": "zero2"},
        {"gpus": 8, "tensor_parallel": 4, "sequence_parallel": True},
        {"gpus": 8, "tensor_parallel": 2, "pipeline_parallel": 2, "microbatches": 6, "strategy": "zero1"},
        {"gpus": 2, "pipeline_parallel": 2, "microbatches": 4, "interleave": 2},
    ],
)  # fmt: skip
def test_kernels_and_waits_fill_the_step_on_every_stage(tmp_path, layout):
    trace, found = _traced(**layout)
    path = tmp_path / "step.json"
    write_trace(trace, path, model="small")
    content = json.loads(path.read_text())
    events = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == set(range(layout.get("pipeline_parallel", 1)))
    compute = defaultdict(list)
    for event in events:
        assert event["dur"] > 0
        assert 0 <= event["ts"] + event["dur"] <= found.step_ms * 1e3 * (1 + 1e-9) + 1e-6
        if STREAMS[event["tid"]] == "compute":
            compute[event["pid"]].append((event["ts"], event["dur"]))
    for bars in compute.values():
        bars.sort()
        assert sum(duration for _, duration in bars) == pytest.approx(found.step_ms * 1e3)
        for (start, duration), (following, _) in pairwise(bars):
            assert start + duration == pytest.approx(following, abs=1e-3)


def test_bars_say_what_runs():
    trace, _ = _traced(gpus=8)
    categories = {event.category for event in trace.events}
    assert categories >= {"forward", "backward", "optimizer", "collective", "wait"}
    names = {event.name for event in trace.events}
    assert {"all-reduce of gradients", "linear", "linear weight gradient", "optimizer_step", "synchronisation"} <= names
    collectives = [event for event in trace.events if event.category == "collective"]
    assert all(event.arguments["bytes"] > 0 for event in collectives)


def test_overlapped_collectives_do_not_overlap_each_other():
    trace, _ = _traced(gpus=8, strategy="fsdp")
    bars = sorted((e.start_ms, e.duration_ms) for e in trace.events if e.stream == "communication")
    for (start, duration), (following, _) in pairwise(bars):
        assert following >= start + duration - 1e-9


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(GnnpredError, match="cannot write"):
        write_trace(Trace(), tmp_path / "absent" / "step.json")
    assert list(tmp_path.iterdir()) == []
