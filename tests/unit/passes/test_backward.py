"""The backward pass and the optimizer on graphs built by hand."""

import pytest

from gnnpred.errors import UsageError
from gnnpred.graph import Component, DType, OpPhase, Role
from gnnpred.job import ActivationRule, Phase, Precision
from gnnpred.passes.backward import add_backward
from gnnpred.passes.precision import lower_precision
from tests.helpers.graph_builder import GraphBuilder


def _backward(graph, **options):
    options.setdefault("phase", Phase.FORWARD_BACKWARD)
    return add_backward(graph, **options)


def _ops(graph, phase=OpPhase.BACKWARD):
    return [op for op in graph.ops if op.phase is phase]


def _summary(graph):
    return [(op.kind, op.component) for op in _ops(graph)]


def _two_layers():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(16, 8), b.parameter(16)], (4, 16))
    h = b.op("relu", [h], (4, 16))
    return b.build(b.op("linear", [h, b.parameter(3, 16)], (4, 3)))


def test_inference_has_no_loss_and_no_backward():
    graph = _two_layers()
    assert add_backward(graph, phase=Phase.INFERENCE) is graph


def test_a_step_runs_forward_loss_backward_in_reverse_and_optimizer():
    graph = _backward(_two_layers(), phase=Phase.TRAIN)
    assert [op.kind for op in _ops(graph, OpPhase.FORWARD)] == ["linear", "relu", "linear", "cross_entropy"]
    assert _summary(graph) == [
        ("fill", Component.INPUT_GRADIENT),
        ("cross_entropy", Component.INPUT_GRADIENT),
        ("linear", Component.INPUT_GRADIENT),
        ("linear", Component.WEIGHT_GRADIENT),
        ("relu", Component.INPUT_GRADIENT),
        ("reduce_sum", Component.WEIGHT_GRADIENT),  # the bias
        ("linear", Component.WEIGHT_GRADIENT),  # and no input gradient at the first layer
    ]
    assert [op.kind for op in _ops(graph, OpPhase.OPTIMIZER)] == ["optimizer_step", "zero_grad"]


def test_backward_ops_point_to_their_forward_op():
    graph = _backward(_two_layers())
    for op in _ops(graph):
        forward = graph.ops[op.forward_op_idx]
        assert forward.phase is OpPhase.FORWARD
        assert op.kind in (forward.kind, "reduce_sum", "fill")


def test_the_input_gets_a_gradient_only_on_request():
    graph = _two_layers()
    assert len(_ops(_backward(graph, input_gradient=True))) == len(_ops(_backward(graph))) + 1


def test_gradients_have_the_shape_and_type_of_their_tensor():
    graph = _backward(lower_precision(_two_layers(), Precision.MIXED))
    step_inputs = next(op for op in graph.ops if op.kind == "zero_grad").inputs
    parameters = [t for t in graph.tensors if t.role is Role.PARAMETER]
    gradients = [graph.tensors[i] for i in step_inputs]
    assert [(t.shape, t.dtype) for t in gradients] == [(t.shape, t.dtype) for t in parameters]
    assert all(graph.tensors[o].role is Role.GRADIENT for op in _ops(graph) for o in op.outputs)


def test_half_products_have_half_gradients_that_are_cast_to_fp32_weights():
    graph = _backward(lower_precision(_two_layers(), Precision.MIXED))
    for op in _ops(graph):
        if op.kind == "linear":
            assert op.compute_dtype is DType.FP16
            assert graph.tensors[op.outputs[0]].dtype is DType.FP16
    casts = [op for op in _ops(graph) if op.component is Component.CAST]
    assert [(graph.tensors[op.inputs[0]].dtype, graph.tensors[op.outputs[0]].dtype) for op in casts] == [
        (DType.FP16, DType.FP32)
    ] * 3


def test_the_loss_of_half_logits_is_fp32_where_weights_are():
    for precision, expected in (
        (Precision.FP16, DType.FP16),
        (Precision.MIXED, DType.FP32),
        (Precision.MIXED_BF16, DType.FP32),
        (Precision.FP64, DType.FP64),
    ):
        graph = _backward(lower_precision(_two_layers(), precision))
        loss = next(op for op in graph.ops if op.kind == "cross_entropy")
        assert graph.tensors[loss.outputs[0]].dtype is expected
    graph = lower_precision(_two_layers(), Precision.MIXED, activation_rule=ActivationRule.ALL_HALF)
    loss = next(op for op in _backward(graph).ops if op.kind == "cross_entropy")
    assert loss.compute_dtype is DType.FP32


def test_a_tensor_with_three_readers_accumulates_twice():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    branches = [b.op(kind, [h], (4, 8)) for kind in ("relu", "tanh", "exp")]
    total = b.op("concat", branches, (12, 8), axis=0)
    graph = _backward(b.build(total))
    adds = [op for op in _ops(graph) if op.component is Component.ACCUMULATE]
    assert len(adds) == 2
    assert {op.kind for op in adds} == {"add"}
    assert {op.forward_op_idx for op in adds} == {0}  # the op that made the tensor


def test_a_residual_addition_hands_its_gradient_on_without_a_kernel():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    y = b.op("add", [h, b.op("relu", [h], (4, 8))], (4, 8))
    graph = _backward(b.build(b.op("linear", [y, b.parameter(3, 8)], (4, 3))))
    assert [kind for kind, component in _summary(graph) if component is not Component.ACCUMULATE].count("add") == 0
    assert [op.component for op in _ops(graph)].count(Component.ACCUMULATE) == 1


def test_a_widened_gradient_is_converted_back():
    b = GraphBuilder()
    x = b.input(4, 8)
    h = b.op("linear", [x, b.parameter(8, 8)], (4, 8))
    graph = b.build(b.op("add", [h, x], (4, 8)))  # half + fp32
    graph = _backward(lower_precision(graph, Precision.MIXED), loss=False)
    (cast, *_rest) = [op for op in _ops(graph) if op.component is Component.CAST]
    assert graph.tensors[cast.inputs[0]].dtype is DType.FP32
    assert graph.tensors[cast.outputs[0]].dtype is DType.FP16


def test_frozen_weights_have_no_gradient_and_do_not_stop_it():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    h = b.op("linear", [h, b.constant(8, 8)], (4, 8))
    graph = _backward(b.build(h), loss=False)
    products = [(op.forward_op_idx, op.component) for op in _ops(graph) if op.kind == "linear"]
    assert products == [(1, Component.INPUT_GRADIENT), (0, Component.WEIGHT_GRADIENT)]


def test_a_weight_that_is_computed_from_parameters_has_a_backward_of_its_own():
    b = GraphBuilder()
    raw = b.parameter(8, 3, 3, 3)
    mean = b.op("reduce_mean", [raw], (8, 1, 1, 1), axes=(1, 2, 3))
    weight = b.op("sub", [raw, mean], (8, 3, 3, 3))
    graph = _backward(b.build(b.op("conv", [b.input(1, 3, 8, 8), weight], (1, 8, 8, 8), groups=1)))
    kinds = [kind for kind, _ in _summary(graph)]
    assert "sub" in kinds
    assert "reduce_mean" in kinds
    assert next(op for op in graph.ops if op.kind == "zero_grad").attributes["num_tensors"] == 1


def test_a_shared_weight_accumulates_and_is_updated_once():
    b = GraphBuilder()
    w = b.parameter(8, 8)
    h = b.op("linear", [b.input(4, 8), w], (4, 8))
    graph = _backward(b.build(b.op("linear", [h, w], (4, 8))), phase=Phase.TRAIN)
    assert [op.component for op in _ops(graph)].count(Component.ACCUMULATE) == 1
    assert next(op for op in graph.ops if op.kind == "optimizer_step").attributes["num_tensors"] == 1


def test_no_gradient_flows_through_integers_or_comparisons():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    mask = b.op("greater", [h, b.constant(value=0.0)], (4, 8), dtype=DType.BOOL)
    y = b.op("where", [mask, h, b.constant(value=0.0)], (4, 8))
    kinds = [kind for kind, _ in _summary(_backward(b.build(y)))]
    assert "where" in kinds
    assert "greater" not in kinds


def test_branches_off_the_path_to_the_loss_have_no_backward():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    b.op("tanh", [h], (4, 8))  # nothing reads it
    graph = _backward(b.build(b.op("relu", [h], (4, 8))))
    assert "tanh" not in [kind for kind, _ in _summary(graph)]


def test_dropout_without_drops_hands_the_gradient_on():
    for ratio, expected in ((0.0, 0), (0.1, 1)):
        b = GraphBuilder()
        h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
        graph = _backward(b.build(b.op("dropout", [h], (4, 8), ratio=ratio)))
        assert [kind for kind, _ in _summary(graph)].count("dropout") == expected


def test_recurrent_layers_have_one_op_for_data_and_one_for_weights():
    b = GraphBuilder()
    x = b.op("linear", [b.input(5, 3, 8), b.parameter(8, 8)], (5, 3, 8))
    h = b.op("lstm", [x, b.parameter(64, 8), b.parameter(64, 16)], (5, 3, 16), hidden_size=16)
    graph = _backward(b.build(h), loss=False)
    assert [(op.component, len(op.outputs)) for op in _ops(graph) if op.kind == "lstm"] == [
        (Component.INPUT_GRADIENT, 1),
        (Component.WEIGHT_GRADIENT, 2),
    ]


def test_repeats_carry_over():
    b = GraphBuilder()
    graph = b.build(b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8), repeats=7))
    assert {op.repeats for op in _ops(_backward(graph)) if op.kind == "linear"} == {7}


# ---------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4, 10), "cross_entropy"),
        ((4, 6, 100), "cross_entropy"),
        ((4, 21, 8, 8), "cross_entropy"),
        ((4, 3, 8, 8), "sum_loss"),
        ((4, 1), "sum_loss"),
        ((4,), "sum_loss"),
    ],
)
def test_the_loss_is_a_cross_entropy_where_the_output_looks_like_logits(shape, kind):
    b = GraphBuilder()
    y = b.op("mul", [b.input(*shape), b.parameter(*shape)], shape)
    graph = _backward(b.build(y))
    assert _ops(graph, OpPhase.FORWARD)[-1].kind == kind


def test_auxiliary_heads_join_the_loss_and_cached_activations_do_not():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    head = b.op("linear", [h, b.parameter(3, 8)], (4, 3))
    boxes = b.op("linear", [h, b.parameter(4, 8)], (4, 4))
    graph = _backward(b.build(head, boxes, h))
    assert [op.kind for op in _ops(graph, OpPhase.FORWARD)][3:] == ["cross_entropy", "sum_loss"]
    assert next(op for op in graph.ops if op.kind == "zero_grad").attributes["num_tensors"] == 3


def test_a_graph_with_a_loss_keeps_it():
    b = GraphBuilder()
    h = b.op("linear", [b.input(4, 8), b.parameter(8, 8)], (4, 8))
    graph = _backward(b.build(b.op("mse_loss", [h, b.input(4, 8)], ())))
    assert [op.kind for op in _ops(graph, OpPhase.FORWARD)] == ["linear", "mse_loss"]


def test_without_a_loss_every_output_is_given_a_gradient():
    graph = _backward(_two_layers(), loss=False)
    assert [op.kind for op in _ops(graph, OpPhase.FORWARD)] == ["linear", "relu", "linear"]
    assert _summary(graph)[0] == ("fill", Component.INPUT_GRADIENT)


# ---------------------------------------------------------------------------------------- optimizer


def test_the_optimizer_step_says_what_it_updates():
    step = next(
        op for op in _backward(_two_layers(), phase=Phase.TRAIN, optimizer="adam").ops if op.kind == "optimizer_step"
    )
    elements = 16 * 8 + 16 + 3 * 16
    assert step.attributes["optimizer"] == "adam"
    assert (step.attributes["num_tensors"], step.attributes["num_elements"]) == (3, elements)
    assert step.attributes["num_bytes"] == 4 * elements
    assert step.attributes["foreach"]


@pytest.mark.parametrize("options", [{"phase": Phase.FORWARD_BACKWARD}, {"phase": Phase.TRAIN, "optimizer": "none"}])
def test_without_an_optimizer_only_the_gradients_are_cleared(options):
    graph = add_backward(_two_layers(), **options)
    assert [op.kind for op in _ops(graph, OpPhase.OPTIMIZER)] == ["zero_grad"]


def test_the_gradient_scaler_unscales_before_the_step():
    graph = _backward(_two_layers(), phase=Phase.TRAIN, grad_scaler=True)
    assert [op.kind for op in _ops(graph, OpPhase.OPTIMIZER)] == ["unscale", "optimizer_step", "zero_grad"]


def test_a_model_without_weights_is_noted():
    b = GraphBuilder()
    graph = _backward(b.build(b.op("relu", [b.input(4, 8)], (4, 8))), phase=Phase.TRAIN)
    assert not _ops(graph)
    assert not _ops(graph, OpPhase.OPTIMIZER)
    assert "no weight gets a gradient" in graph.notes[0]


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UsageError, match="adagrad"):
        add_backward(_two_layers(), phase=Phase.TRAIN, optimizer="adagrad")
