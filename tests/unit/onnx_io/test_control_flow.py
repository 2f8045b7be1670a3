"""Bodies of If, Loop and Scan are counted under a stated assumption; local functions are inlined."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from gnnpred.onnx_io import read_graph
from tests.onnx_factory import BOOL, FLOAT, ints, kinds, model_of, node, only, output, scalar, value, weight


def body(nodes, outputs, inputs=()):
    return helper.make_graph(nodes, "body", list(inputs), [value(name, None) for name in outputs])


def if_model(condition_initializer=None):
    cheap = body([node("Relu", ["x"], ["t"])], ["t"])
    costly = body([node("MatMul", ["x", "w"], ["m"]), node("Relu", ["m"], ["e"])], ["e"])
    nodes = [node("If", ["c"], ["i"], then_branch=cheap, else_branch=costly, name="choice"), node("Tanh", ["i"], ["y"])]
    inputs = [value("x", ["batch", 8])]
    weights = [weight("w", [8, 8])]
    if condition_initializer is None:
        inputs.append(value("c", [], BOOL))
    else:
        weights.append(scalar("c", condition_initializer, np.bool_))
    return model_of(nodes, inputs, [value("y", None)], weights)


def test_an_if_on_data_counts_the_costlier_branch_and_says_so():
    graph = read_graph(if_model())
    assert kinds(graph) == ["linear", "relu", "tanh"]
    assert any("If 'choice'" in note and "costlier" in note for note in graph.notes)


def test_an_if_on_a_constant_takes_its_branch():
    graph = read_graph(if_model(condition_initializer=True), batch_size=1)
    assert kinds(graph) == ["relu", "tanh"]
    assert not graph.notes


def loop_model(trip_count: int | None):
    loop_body = body(
        [
            node("MatMul", ["h", "w"], ["m"]),
            node("Relu", ["m"], ["h_next"]),
            node("Identity", ["going"], ["going_next"]),
            node("ReduceSum", ["h_next"], ["total"], keepdims=0),
        ],
        ["going_next", "h_next", "total"],
        [value("i", [], TensorProto.INT64), value("going", [], BOOL), value("h", None)],
    )
    nodes = [node("Loop", ["n", "yes", "x"], ["y", "totals"], body=loop_body, name="steps")]
    inputs = [value("x", ["batch", 8])]
    weights = [weight("w", [8, 8]), scalar("yes", True, np.bool_)]
    if trip_count is None:
        inputs.append(value("n", [], TensorProto.INT64))
    else:
        weights.append(scalar("n", trip_count))
    return model_of(nodes, inputs, [value("y", None), value("totals", None)], weights)


def test_a_loop_with_a_known_trip_count_repeats_its_body():
    graph = read_graph(loop_model(12), batch_size=2)
    assert only(graph, "linear").repeats == 12
    assert output(graph).shape == (2, 8)
    assert output(graph, 1).shape == (12,)
    assert only(graph, "stack").repeats == 1
    assert any("12 times" in note for note in graph.notes)


def test_a_loop_with_an_unknown_trip_count_is_counted_once_and_says_so():
    graph = read_graph(loop_model(None), batch_size=2)
    assert only(graph, "linear").repeats == 1
    assert any("Loop 'steps'" in note and "counted once" in note for note in graph.notes)


def test_an_endless_loop_is_counted_once():
    assert only(read_graph(loop_model(2**62)), "linear").repeats == 1


def test_a_loop_that_is_never_entered_costs_nothing():
    model = loop_model(0)
    model.graph.node.append(node("Sigmoid", ["y"], ["z"]))
    del model.graph.output[:]
    model.graph.output.append(value("z", None))
    assert kinds(read_graph(model)) == ["sigmoid"]


def test_a_scan_repeats_its_body_along_the_scanned_axis():
    scan_body = body(
        [node("MatMul", ["step", "w"], ["m"]), node("Add", ["h", "m"], ["h_next"]), node("Relu", ["h_next"], ["o"])],
        ["h_next", "o"],
        [value("h", None), value("step", None)],
    )
    nodes = [node("Scan", ["h0", "x"], ["h", "y"], body=scan_body, num_scan_inputs=1)]
    inputs = [value("h0", ["batch", 8]), value("x", [20, "batch", 8])]
    graph = read_graph(
        model_of(nodes, inputs, [value("h", None), value("y", None)], [weight("w", [8, 8])]), batch_size=3
    )
    assert only(graph, "linear").repeats == 20
    assert output(graph, 1).shape == (20, 3, 8)


def test_repeats_of_nested_loops_multiply():
    inner = body(
        [node("MatMul", ["a", "w"], ["b"]), node("Identity", ["g"], ["g2"])],
        ["g2", "b"],
        [value("j", [], TensorProto.INT64), value("g", [], BOOL), value("a", None)],
    )
    outer = body(
        [node("Loop", ["three", "yes", "h"], ["h2"], body=inner), node("Identity", ["going"], ["going2"])],
        ["going2", "h2"],
        [value("i", [], TensorProto.INT64), value("going", [], BOOL), value("h", None)],
    )
    nodes = [node("Loop", ["five", "yes", "x"], ["y"], body=outer)]
    constants = [weight("w", [8, 8]), scalar("yes", True, np.bool_), scalar("three", 3), scalar("five", 5)]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 8])], [value("y", None)], constants))
    assert only(graph, "linear").repeats == 15


def test_a_loop_counter_is_not_taken_for_its_first_value():
    """A carried length that grows: the slice in the body must not be folded at its first value."""
    loop_body = body(
        [
            node("Add", ["count", "one"], ["count_next"]),
            node("Cast", ["count_next"], ["f"], to=FLOAT),
            node("Add", ["h", "f"], ["h_next"]),
            node("Identity", ["going"], ["going_next"]),
        ],
        ["going_next", "count_next", "h_next"],
        [value("i", [], TensorProto.INT64), value("going", [], BOOL), value("count", None), value("h", None)],
    )
    nodes = [node("Loop", ["n", "yes", "zero", "x"], ["c", "y"], body=loop_body)]
    constants = [scalar("n", 4), scalar("yes", True, np.bool_), scalar("zero", 0), scalar("one", 1)]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 8])], [value("y", None)], constants))
    added = graph.tensors[only(graph, "add").inputs[1]]
    assert added.value is None


# --- local functions --------------------------------------------------------------------------


def with_functions(model, *functions):
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def function(name, inputs, outputs, nodes, attributes=(), defaults=()):
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, inputs, outputs, nodes, imports, list(attributes), list(defaults))


def refer(made, name, parameter):
    """Attribute ``name`` takes its value from the function's attribute ``parameter``."""
    made.attribute.add(name=name, type=onnx.AttributeProto.INT, ref_attr_name=parameter)


def test_local_functions_are_inlined_with_their_own_names_and_attributes():
    concat = node("Concat", ["a", "b"], ["joined"])
    refer(concat, "axis", "along")
    double = function(
        "Double", ["a"], ["t"], [node("Identity", ["a"], ["b"]), concat, node("Relu", ["joined"], ["t"])], ["along"]
    )
    nodes = [
        node("Double", ["x"], ["t"], domain="local", along=1),
        node("Double", ["t"], ["y"], domain="local", along=2),
    ]
    graph = read_graph(
        with_functions(model_of(nodes, [value("x", ["batch", 3, 4])], [value("y", None)]), double), batch_size=2
    )
    assert kinds(graph) == ["concat", "relu"] * 2
    assert output(graph).shape == (2, 6, 8)


def test_functions_call_functions_and_default_attributes_hold():
    leaky = node("LeakyRelu", ["a"], ["b"])
    inner = function("Inner", ["a"], ["b"], [leaky])
    soft = node("Softmax", ["c"], ["d"])
    refer(soft, "axis", "axis")
    outer = function(
        "Outer", ["a", "unused"], ["d"], [node("Inner", ["a"], ["c"], domain="local"), soft],
        defaults=[helper.make_attribute("axis", 1)],
    )  # fmt: skip
    nodes = [node("Outer", ["x"], ["y"], domain="local")]
    graph = read_graph(with_functions(model_of(nodes, [value("x", ["batch", 3, 4])], [value("y", None)]), outer, inner))
    assert kinds(graph) == ["leaky_relu", "softmax"]
    assert only(graph, "softmax").attributes["axis"] == 1


def test_weights_inside_functions_are_found():
    made = function(
        "Layer", ["a", "w"], ["b"], [node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["a", "t"], ["b"])]
    )
    nodes = [node("Layer", ["x", "w"], ["y"], domain="local")]
    model = model_of(nodes, [value("x", ["batch", 8])], [value("y", None)], [weight("w", [3, 8])])
    graph = read_graph(with_functions(model, made))
    assert kinds(graph) == ["transpose", "linear"]
    assert graph.num_parameters == 24


def test_a_baked_batch_is_carried_through_functions_called_twice():
    made = function("Flat", ["a", "s"], ["b"], [node("Reshape", ["a", "s"], ["r"]), node("Relu", ["r"], ["b"])])
    nodes = [
        node("Flat", ["x", "s1"], ["m"], domain="local"),
        node("Flat", ["m", "s2"], ["y"], domain="local"),
    ]
    model = model_of(nodes, [value("x", [4, 6, 2])], [value("y", None)], [ints("s1", 24, 2), ints("s2", 4, 12)])
    graph = read_graph(with_functions(model, made), batch_size=3)
    assert output(graph).shape == (3, 12)
    assert not graph.notes
