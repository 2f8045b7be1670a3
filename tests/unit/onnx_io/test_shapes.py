"""Shapes: three states kept apart, constants folded, unknown ones reported."""

import numpy as np
import pytest
from onnx import helper

from gnnpred.graph import DType, Role
from gnnpred.onnx_io import read_graph
from tests.onnx_factory import (
    BOOL,
    FLOAT,
    FLOAT16,
    INT64,
    chain,
    ints,
    kinds,
    model_of,
    node,
    only,
    output,
    scalar,
    shapes,
    single,
    value,
    weight,
)  # fmt: skip


def test_a_scalar_a_size_of_zero_and_an_unknown_rank_are_three_things():
    assert output(read_graph(chain("Relu", shape=()))).shape == ()
    assert output(read_graph(chain("Relu", shape=(3, 0)))).shape == (3, 0)
    graph = read_graph(model_of([node("Mystery", ["x"], ["y"], domain="my")], [value("x", [2, 5])], [value("y", None)]))
    assert output(graph).shape == (2, 5)  # a guess, and it says so
    assert graph.metadata["shape_coverage"] == 0
    assert any("rest on a guess" in note and "my::Mystery" in note for note in graph.notes)


def test_an_unknown_op_is_unsupported_and_takes_its_shape_from_value_info():
    nodes = [node("Mystery", ["x"], ["m"], domain="my"), node("Relu", ["m"], ["y"])]
    model = model_of(nodes, [value("x", ["batch", 5])], [value("y", None)])
    model.graph.value_info.append(value("m", ["batch", 7, 9]))
    graph = read_graph(model, batch_size=4)
    assert kinds(graph) == ["unsupported", "relu"]
    assert only(graph, "unsupported").attributes == {"op_type": "Mystery", "domain": "my"}
    assert output(graph).shape == (4, 7, 9)
    assert graph.metadata["shape_coverage"] == 1
    assert graph.metadata["unsupported"] == {"my::Mystery": 1}


def test_stale_value_info_is_not_believed_where_shapes_follow_from_the_ops():
    model = single("MatMul", ["batch", 8], weight("w", [8, 3]))
    model.graph.value_info.append(value("y", [77, 77]))
    model.graph.output[0].CopyFrom(value("y", [5, 5]))
    assert output(read_graph(model, batch_size=2)).shape == (2, 3)


def test_a_node_that_contradicts_its_inputs_is_reported_and_does_not_stop_the_reading():
    nodes = [node("MatMul", ["x", "w"], ["m"], name="bad"), node("Relu", ["m"], ["y"])]
    graph = read_graph(model_of(nodes, [value("x", [2, 8])], [value("y", None)], [weight("w", [9, 3])]))
    assert kinds(graph) == ["unsupported", "relu"]
    assert any("MatMul 'bad'" in note and "8 and 9" in note for note in graph.notes)


def test_nodes_may_share_a_name_or_have_none():
    nodes = [node("Relu", ["x"], ["a"], name="n"), node("Sigmoid", ["a"], ["b"], name="n"), node("Tanh", ["b"], ["y"])]
    assert kinds(read_graph(model_of(nodes, [value("x", [1, 2])], [value("y", None)]))) == ["relu", "sigmoid", "tanh"]


def test_dead_nodes_are_dropped():
    nodes = [node("Relu", ["x"], ["y"]), node("MatMul", ["x", "w"], ["unused"])]
    graph = read_graph(model_of(nodes, [value("x", [1, 2])], [value("y", None)], [weight("w", [2, 2])]))
    assert kinds(graph) == ["relu"]


def test_a_dimension_computed_from_another_is_folded():
    """pool to half of the size that Shape reports: Cast, Div, Floor, Cast, Slice, Concat as exporters write it."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Slice", ["s", "two", "four"], ["hw"]),
        node("Cast", ["hw"], ["hwf"], to=FLOAT),
        node("Div", ["hwf", "half"], ["scaled"]),
        node("Floor", ["scaled"], ["floored"]),
        node("Cast", ["floored"], ["new"], to=INT64),
        node("Slice", ["s", "zero", "two"], ["nc"]),
        node("Concat", ["nc", "new"], ["size"], axis=0),
        node("Resize", ["x", "", "", "size"], ["y"], mode="nearest"),
    ]
    constants = [ints("zero", 0), ints("two", 2), ints("four", 4), scalar("half", 2.0, np.float32)]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 3, 33, 40])], [value("y", None)], constants), batch_size=2)
    assert kinds(graph) == ["resize"]
    assert output(graph).shape == (2, 3, 16, 20)
    assert output(graph).batch_axes == (0,)


def test_a_branch_on_shapes_is_decided_by_the_shapes():
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Equal", ["s", "minus"], ["is_minus"]),
        node("Where", ["is_minus", "ones", "target"], ["size"]),
        node("Expand", ["x", "size"], ["y"]),
    ]
    constants = [ints("minus", -1, -1), ints("ones", 1, 1), ints("target", 4, 6)]
    graph = read_graph(model_of(nodes, [value("x", [4, 1])], [value("y", None)], constants))
    assert output(graph).shape == (4, 6)


def test_small_constants_carry_their_value_and_batch_dependent_ones_do_not():
    nodes = [
        node("Mul", ["x", "scale"], ["a"]),
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Cast", ["n"], ["nf"], to=FLOAT),
        node("Div", ["a", "nf"], ["y"]),
    ]
    constants = [scalar("scale", 0.125, np.float32), scalar("zero", 0)]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 8])], [value("y", None)], constants), batch_size=2)
    scale = graph.tensors[only(graph, "mul").inputs[1]]
    assert (scale.role, scale.value) == (Role.CONSTANT, 0.125)
    count = graph.tensors[only(graph, "div").inputs[1]]
    assert (count.role, count.value) == (Role.CONSTANT, None)


def test_weights_are_parameters_and_buffers_are_not():
    constants = [
        weight("conv.w", [8, 3, 3, 3]),
        weight("bn.weight", [8]),
        weight("bn.bias", [8]),
        weight("bn.running_mean", [8]),
        weight("bn.running_var", [8]),
    ]
    nodes = [
        node("Conv", ["x", "conv.w"], ["c"]),
        node("BatchNormalization", ["c", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"], ["y"]),
    ]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 3, 9, 9])], [value("y", None)], constants))
    assert graph.num_parameters == 8 * 27 + 16
    assert len(only(graph, "batch_norm").inputs) == 3


def test_statistics_are_known_by_their_slot_whatever_they_are_called():
    constants = [weight(name, [4]) for name in "abcd"]
    nodes = [node("BatchNormalization", ["x", "a", "b", "c", "d"], ["y"])]
    model = model_of(nodes, [value("x", ["batch", 4, 2])], [value("y", None)], constants)
    assert read_graph(model).num_parameters == 8


def test_initializers_listed_as_inputs_are_no_inputs():
    model = single("MatMul", ["batch", 8], weight("w", [8, 3]))
    model.graph.input.append(value("w", [8, 3]))
    graph = read_graph(model)
    assert len(graph.inputs) == 1
    assert kinds(graph) == ["linear"]


@pytest.mark.parametrize("maker", ["Constant", "ConstantOfShape"])
def test_weights_may_come_from_nodes(maker):
    if maker == "Constant":
        made = node("Constant", [], ["w"], value=weight("k", [8, 3]))
        constants = []
    else:
        made = node("ConstantOfShape", ["size"], ["w"])
        constants = [ints("size", 8, 3)]
    model = model_of(
        [made, node("MatMul", ["x", "w"], ["y"])], [value("x", ["batch", 8])], [value("y", None)], constants
    )
    graph = read_graph(model)
    assert kinds(graph) == ["linear"]
    assert graph.num_parameters == 24


@pytest.mark.parametrize(("stored", "num_parameters"), [(True, 24), (False, 24 + 300)])
def test_tables_in_nodes_are_constants_where_weights_are_initializers(stored, num_parameters):
    table = node("Constant", [], ["t"], value=weight("k", [100, 3]))
    made = [] if stored else [node("Constant", [], ["w"], value=weight("k", [8, 3]))]
    nodes = [table, *made, node("MatMul", ["x", "w"], ["y"]), node("Add", ["y", "t"], ["z"])]
    constants = [weight("w", [8, 3])] if stored else []
    graph = read_graph(model_of(nodes, [value("x", ["batch", 100, 8])], [value("z", None)], constants))
    assert graph.num_parameters == num_parameters


def test_what_depends_on_parameters_alone_is_marked():
    nodes = [node("Mul", ["w", "w"], ["squared"]), node("MatMul", ["x", "squared"], ["y"])]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 8])], [value("y", None)], [weight("w", [8, 3])]))
    assert kinds(graph) == ["mul", "linear"]
    assert graph.tensors[only(graph, "mul").outputs[0]].role is Role.PARAMETER_DERIVED


def test_a_stored_attention_mask_is_no_parameter():
    mask = helper.make_tensor("onnx::Add_9", FLOAT, [16, 16], np.triu(np.full((16, 16), -1e4), 1).ravel().tolist())
    graph = read_graph(single("Add", ["batch", 16, 16], mask))
    assert graph.num_parameters == 0
    table = helper.make_tensor("pos_embed", FLOAT, [1, 16, 16], np.ones(256).tolist())
    assert read_graph(single("Add", ["batch", 16, 16], table)).num_parameters == 256


def test_types_are_derived_again_in_half_converted_files():
    nodes = [
        node("Cast", ["x"], ["h"], to=FLOAT16),
        node("MatMul", ["h", "w"], ["m"]),
        node("Cast", ["m"], ["y"], to=FLOAT),
    ]
    w = helper.make_tensor("w", FLOAT16, [8, 4], np.zeros((8, 4), np.float16).tobytes(), raw=True)
    model = model_of(nodes, [value("x", ["batch", 8])], [value("y", ["batch", 4], FLOAT16)], [w])
    model.graph.value_info.append(value("m", ["batch", 4], FLOAT))  # the conversion left the wrong type
    graph = read_graph(model)
    assert [graph.tensors[op.outputs[0]].dtype for op in graph.ops] == [DType.FP16, DType.FP16, DType.FP32]


def test_a_cast_to_the_type_it_has_is_nothing():
    nodes = [node("Cast", ["x"], ["c"], to=FLOAT), node("Relu", ["c"], ["y"])]
    assert kinds(read_graph(model_of(nodes, [value("x", [1, 2])], [value("y", None)]))) == ["relu"]


def test_data_dependent_counts_are_an_upper_bound_and_say_so():
    nodes = [node("NonZero", ["x"], ["n"]), node("Transpose", ["n"], ["y"], perm=[1, 0])]
    graph = read_graph(model_of(nodes, [value("x", [3, 4], BOOL)], [value("y", None)]))
    assert output(graph).shape == (12, 2)
    assert any("NonZero" in note and "largest" in note for note in graph.notes)
    assert graph.metadata["shape_coverage"] < 1


def test_rare_standard_ops_get_their_shape_from_onnx_itself():
    graph = read_graph(single("Det", ["batch", 5, 5]), batch_size=3)
    assert output(graph).shape == (3,)
    assert graph.metadata["shape_coverage"] == 1


@pytest.mark.parametrize(("version", "text"), [(8, "opset 8 is older"), (99, "opset 99 is newer")])
def test_old_and_new_opsets_are_read_with_a_note(version, text):
    graph = read_graph(chain("Relu", opset=version))
    assert kinds(graph) == ["relu"]
    assert any(text in note for note in graph.notes)


def test_multiple_outputs_of_a_split_keep_their_sizes():
    nodes = [node("Split", ["x", "sizes"], ["a", "b"], axis=1)]
    graph = read_graph(
        model_of(nodes, [value("x", ["batch", 10])], [value("a", None), value("b", None)], [ints("sizes", 3, 7)]),
        batch_size=2,
    )
    assert shapes(graph, graph.outputs) == [(2, 3), (2, 7)]
