"""What the shipped checkpoint warns of, and what not."""

from dataclasses import replace

import pytest

from gnnpred import JobSpec, Precision, Predictor, find_device
from tests.helpers.graphs import tiny_cnn

UNSEEN = "op kinds that no training run had"


@pytest.fixture(scope="module")
def predictor():
    return Predictor()


def _unseen_kinds(predictor, graph, **job):
    warnings = predictor.predict(graph, JobSpec(device=find_device("T4"), batch_size=64, **job)).warnings
    return [warning for warning in warnings if UNSEEN in warning]


def test_casts_and_fills_that_training_adds_are_no_unseen_kinds(predictor):
    for precision in (Precision.FP32, Precision.FP16, Precision.MIXED):
        assert not _unseen_kinds(predictor, tiny_cnn(), precision=precision)


def test_a_kind_that_no_run_had_is_named_with_its_backward(predictor):
    graph = tiny_cnn()
    relu = next(i for i, op in enumerate(graph.ops) if op.kind == "relu")
    ops = list(graph.ops)
    ops[relu] = replace(ops[relu], kind="erf")
    (warning,) = _unseen_kinds(predictor, graph.replace(ops=tuple(ops)))
    assert warning.endswith(": erf")
