"""Another batch size is a substitution."""

import pytest

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec
from gnnpred.passes.batch import rebind_batch


def graph_at(batch_size: int | None) -> OpGraph:
    tensors = (
        TensorSpec((4, 3), DType.FP32, Role.INPUT, (0,)),
        TensorSpec((3, 8), DType.FP32, Role.PARAMETER),
        TensorSpec((2, 12, 8), DType.FP32, Role.ACTIVATION, (1,)),
    )
    return OpGraph(tensors, (Op("linear", (0, 1), (2,)),), (0,), (2,), batch_size)


def test_batch_axes_scale_and_others_stay():
    rebound = rebind_batch(graph_at(4), 10)
    assert [tensor.shape for tensor in rebound.tensors] == [(10, 3), (3, 8), (2, 30, 8)]
    assert rebound.batch_size == 10


def test_the_same_batch_is_the_same_graph():
    graph = graph_at(4)
    assert rebind_batch(graph, 4) is graph


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True])
def test_a_batch_that_is_no_positive_number_is_a_usage_error(batch_size):
    with pytest.raises(UsageError, match="not a positive whole number"):
        rebind_batch(graph_at(4), batch_size)


def test_a_graph_without_a_batch_cannot_be_rebound():
    with pytest.raises(UsageError, match="no batch dimension"):
        rebind_batch(graph_at(None), 4)


def test_an_absurd_batch_is_an_error():
    with pytest.raises(GnnpredError, match="elements"):
        rebind_batch(graph_at(4), 2**60)
