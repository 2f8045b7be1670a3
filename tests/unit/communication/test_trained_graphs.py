"""The timeline on graphs that the precision and backward passes built."""

import numpy as np
import pytest

from gnnpred.communication import step_timeline
from gnnpred.costs import op_costs
from gnnpred.graph import DType, Op, OpGraph, OpPhase, Role, TensorSpec
from gnnpred.hardware import find_device
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.passes.backward import add_backward
from gnnpred.passes.precision import lower_precision

NUM_PARAMETERS = 512 * 1024 + 1024 + 1024 * 10


def _mlp():
    tensors = (
        TensorSpec((16, 512), DType.FP32, Role.INPUT, (0,)),
        TensorSpec((1024, 512), DType.FP32, Role.PARAMETER),
        TensorSpec((1024,), DType.FP32, Role.PARAMETER),
        TensorSpec((16, 1024), DType.FP32, Role.ACTIVATION, (0,)),
        TensorSpec((16, 1024), DType.FP32, Role.ACTIVATION, (0,)),
        TensorSpec((10, 1024), DType.FP32, Role.PARAMETER),
        TensorSpec((16, 10), DType.FP32, Role.ACTIVATION, (0,)),
    )
    ops = (Op("linear", (0, 1, 2), (3,)), Op("relu", (3,), (4,)), Op("linear", (4, 5), (6,)))
    return OpGraph(tensors, ops, (0,), (6,), 16)


@pytest.mark.parametrize(
    ("precision", "bytes_per_gradient"),
    [(Precision.FP32, 4), (Precision.TF32, 4), (Precision.MIXED, 4), (Precision.FP16, 2), (Precision.BF16, 2)],
)
@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.FORWARD_BACKWARD])
def test_every_parameter_is_reduced_once_in_the_type_of_its_gradient(precision, bytes_per_gradient, phase):
    graph = add_backward(lower_precision(_mlp(), precision), phase=phase, optimizer="adam")
    job = JobSpec(device=find_device("A100-SXM4-80GB"), precision=precision, gpus=8, batch_size=16, phase=phase)
    timeline = step_timeline(graph, op_costs(graph), np.full(len(graph.ops), 0.1), job)
    assert timeline.gradient_bytes == bytes_per_gradient * NUM_PARAMETERS
    assert timeline.exposed_ms > 0
    assert timeline.backward_ms == pytest.approx(0.1 * sum(op.phase is OpPhase.BACKWARD for op in graph.ops))
