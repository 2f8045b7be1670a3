"""What a composite costs that the model writes out itself."""

from gnnpred.costs import op_costs
from gnnpred.graph import Component, DType, Op, OpGraph, OpPhase, Role, TensorSpec
from tests.helpers.hand_graph import HandGraph

SIZE = 2 * 7 * 16


def rms_norm_of_the_models_own():
    g = HandGraph()
    x = g.input(2, 7, 16)
    mean = g.mean(g.op("pow_scalar", x, exponent=2.0), -1)
    root = g.op("rsqrt", g.op("add", mean, 1e-6))
    return g.canonical(g.op("mul", g.weight(16), g.op("mul", x, root)))


def test_an_rms_norm_in_pieces_costs_the_sum_of_its_kernels():
    graph = rms_norm_of_the_models_own()
    (cost,) = op_costs(graph)
    rows = 2 * 7
    # pow reads and writes x; mean reads that; add and rsqrt touch rows; mul: x and rows; mul: the weight and y
    read = SIZE + SIZE + (rows + 1) + rows + (SIZE + rows) + (16 + SIZE)
    written = SIZE + rows + rows + rows + SIZE + SIZE
    assert cost.num_launches == 6
    assert abs(cost.bytes_read - 4 * read) / (4 * read) < 2e-3  # passes are kept to three digits
    assert abs(cost.bytes_written - 4 * written) / (4 * written) < 2e-3


def test_the_same_norm_as_one_kernel_is_cheaper():
    graph = rms_norm_of_the_models_own()
    (op,) = graph.ops
    fused = graph.replace(ops=(Op("rms_norm", op.inputs, op.outputs, {"normalized_size": 16}),))
    assert op_costs(fused)[0].bytes_moved < 0.4 * op_costs(graph)[0].bytes_moved
    assert op_costs(fused)[0].num_launches == 1


def test_the_backward_of_pieces_is_in_proportion_to_them():
    graph = rms_norm_of_the_models_own()
    (op,) = graph.ops
    gradient = TensorSpec((2, 7, 16), DType.FP32, Role.GRADIENT, (0,))
    tensors = (*graph.tensors, gradient, gradient)
    first = len(graph.tensors)
    source = TensorSpec((2, 7, 16), DType.FP32, Role.INPUT, (0,))
    tensors = (*tensors, source)
    backward = Op(
        "rms_norm", (first + 2, op.inputs[0]), (first + 1,), phase=OpPhase.BACKWARD,
        component=Component.INPUT_GRADIENT, forward_op_idx=0,
    )  # fmt: skip
    forward_cost, backward_cost = op_costs(OpGraph(tensors, (op, backward), graph.inputs, graph.outputs, 2))
    assert backward_cost.bytes_moved > 2 * forward_cost.bytes_moved
    assert backward_cost.num_launches > 2 * forward_cost.num_launches
