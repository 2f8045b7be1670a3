"""Files that cannot be read end in one clear line, whatever is wrong with them."""

import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.onnx_io import read_graph
from tests.helpers.onnx_files import save, small_cnn
from tests.onnx_factory import FLOAT, chain, ints, kinds, model_of, node, value, weight


def message(source, **options) -> str:
    with pytest.raises(GnnpredError) as caught:
        read_graph(source, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_missing_file_is_named(tmp_path):
    assert "no such file" in message(tmp_path / "gone.onnx")


def test_a_folder_is_no_model(tmp_path):
    assert "is a directory" in message(tmp_path)


@pytest.mark.parametrize(
    "content", [b"hello, this is plain text\n" * 9, bytes(range(256)) * 40, b"\x89PNG\r\n\x1a\n", b"{}", b"\x08"]
)
def test_text_and_binary_files_are_no_onnx(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert "is not an ONNX file" in message(path)


def test_an_empty_file_is_no_onnx(tmp_path):
    path = tmp_path / "model.onnx"
    path.touch()
    assert "it is empty" in message(path)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.99])
def test_a_truncated_file_says_so_or_says_what_is_missing(tmp_path, share):
    content = small_cnn().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(content[: int(len(content) * share)])
    assert "truncated or damaged" in message(path)


def test_every_cut_of_a_file_is_an_error_of_ours(tmp_path):
    content = chain("Relu", "Sigmoid").SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        message(path)


def test_random_damage_never_gets_past_our_errors(tmp_path):
    content = bytearray(small_cnn().SerializeToString())
    rng = np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(content)
        for position in rng.integers(0, len(content), 4):
            damaged[position] = rng.integers(0, 256)
        path = tmp_path / "model.onnx"
        path.write_bytes(bytes(damaged))
        try:
            read_graph(path)
        except GnnpredError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_a_graph_without_nodes_is_empty():
    assert "empty" in message(model_of([], [value("x", [1])], [value("x", [1])]))


def test_a_graph_without_outputs_is_refused():
    assert "no outputs" in message(model_of([node("Relu", ["x"], ["y"])], [value("x", [1])], []))


def test_a_cycle_is_named():
    nodes = [node("Add", ["x", "b"], ["a"], name="first"), node("Relu", ["a"], ["b"], name="second")]
    assert "cyclic at node Add 'first'" in message(model_of(nodes, [value("x", [1])], [value("b", [1])]))


def test_nodes_out_of_order_are_sorted():
    nodes = [node("Relu", ["a"], ["y"]), node("Sigmoid", ["x"], ["a"])]
    assert kinds(read_graph(model_of(nodes, [value("x", [1, 2])], [value("y", None)]))) == ["sigmoid", "relu"]


def test_a_tensor_that_nothing_makes_is_named():
    assert "'ghost', which nothing" in message(
        model_of([node("Add", ["x", "ghost"], ["y"])], [value("x", [1])], [value("y", None)])
    )


def test_two_makers_of_one_tensor_are_refused():
    nodes = [node("Relu", ["x"], ["y"]), node("Sigmoid", ["x"], ["y"])]
    assert "two nodes make the tensor 'y'" in message(model_of(nodes, [value("x", [1])], [value("y", None)]))


def test_a_missing_opset_import_is_an_error():
    model = chain("Relu")
    del model.opset_import[:]
    assert "missing opset import" in message(model)


def test_the_domain_ai_onnx_is_the_standard_one():
    model = chain("Relu")
    model.opset_import[0].domain = "ai.onnx"
    model.graph.node[0].domain = "ai.onnx"
    assert kinds(read_graph(model)) == ["relu"]


def test_an_unknown_input_type_is_named():
    model = chain("Relu")
    model.graph.input[0].type.tensor_type.elem_type = 99
    assert "input 'x' has the unknown element type 99" in message(model)


def test_an_unknown_initializer_type_is_named():
    model = model_of([node("Add", ["x", "w"], ["y"])], [value("x", [1])], [value("y", None)], [weight("w", [1])])
    model.graph.initializer[0].data_type = 77
    assert "'w' has the unknown element type 77" in message(model)


def test_a_cast_to_an_unknown_type_is_named():
    model = model_of([node("Cast", ["x"], ["y"], to=88)], [value("x", [1, 2])], [value("y", None)])
    assert "unknown element type 88" in message(model)


def external(location: str) -> onnx.ModelProto:
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[4, 1024, 1024], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return model_of([node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 4, 2, 1024])], [value("y", None)], [tensor])


def test_missing_external_data_is_not_needed():
    graph = read_graph(external("weights.bin"))
    assert graph.num_parameters == 4 * 1024 * 1024


def test_two_gigabytes_of_external_data_are_never_opened(tmp_path):
    model = external("weights.bin")
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([512, 1024, 1024])
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(2 * 2**30)  # sparse: takes no room
    start_s = time.process_time()
    read_graph(save(model, tmp_path))
    assert time.process_time() - start_s < 1


@pytest.mark.parametrize(
    "location", ["../secret.bin", "a/../../b", "/etc/passwd", "C:\\weights.bin", "..\\weights.bin", "\\\\host\\w.bin"]
)
def test_external_data_outside_the_folder_is_refused(location):
    assert "outside the model's folder" in message(external(location))


def test_external_data_of_a_constant_inside_a_body_is_checked_too():
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../x")
    body = helper.make_graph([node("Constant", [], ["k"], value=tensor)], "b", [], [value("k", None)])
    nodes = [node("If", ["c"], ["y"], then_branch=body, else_branch=body)]
    assert "outside" in message(model_of(nodes, [value("c", [], TensorProto.BOOL)], [value("y", None)]))


def test_an_open_dimension_is_named_with_the_option_that_binds_it():
    text = message(chain("Relu", shape=("batch", "seq", 8)))
    assert "'seq'" in text
    assert "--dim seq=VALUE" in text


def test_an_unnamed_open_dimension_gets_a_name_to_bind_it_by():
    model = chain("Relu", shape=("batch", -1, 8))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -1
    assert "--dim x_dim1=VALUE" in message(model)
    assert read_graph(model, dims={"x_dim1": 5}).tensors[0].shape == (1, 5, 8)


def test_an_unknown_dimension_name_lists_those_there_are():
    text = message(chain("Relu", shape=("batch", "seq")), dims={"sequence": 4})
    assert "'sequence'" in text
    assert "batch, seq" in text


@pytest.mark.parametrize("batch_size", [0, -4, True])
def test_a_batch_below_one_is_a_usage_error(batch_size):
    with pytest.raises(UsageError, match="not a positive number"):
        read_graph(chain("Relu"), batch_size=batch_size)


@pytest.mark.parametrize("size", [0, -1, 2**50])
def test_an_impossible_dimension_is_a_usage_error(size):
    with pytest.raises(UsageError, match="not a positive number"):
        read_graph(chain("Relu", shape=("batch", "seq")), dims={"seq": size})


def test_an_input_without_a_shape_is_an_error():
    model = chain("Relu")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert "input 'x' has no shape" in message(model)


def test_an_absurd_batch_is_an_error():
    assert "more than 2**50 elements" in message(chain("Relu"), batch_size=2**60)


def test_sizes_that_overflow_along_the_way_are_an_error():
    nodes = [node("Tile", ["x" if i == 0 else f"t{i}", "big"], [f"t{i + 1}"]) for i in range(6)]
    model = model_of(nodes, [value("x", [1, 2])], [value("t6", None)], [ints("big", 2**40, 2**40)])
    assert "absurdly large" in message(model)


def test_a_negative_initializer_dimension_is_an_error():
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[-3])
    assert "negative dimension" in message(
        model_of([node("Add", ["x", "w"], ["y"])], [value("x", [1, 2])], [value("y", None)], [tensor])
    )


def test_functions_that_explode_when_inlined_are_refused():
    functions = []
    for level in range(30):
        inner = f"f{level - 1}" if level else "Relu"
        domain = "bomb" if level else ""
        body = [node(inner, ["a"], ["b"], domain=domain), node(inner, ["b"], ["c"], domain=domain)]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("bomb", 1)]
        functions.append(helper.make_function("bomb", f"f{level}", ["a"], ["c"], body, imports))
    model = model_of([node("f29", ["x"], ["y"], domain="bomb")], [value("x", [1, 2])], [value("y", None)])
    model.functions.extend(functions)
    assert "once local functions are inlined" in message(model)


def test_a_function_that_calls_itself_is_refused():
    body = [node("f", ["a"], ["b"], domain="loop")]
    function = helper.make_function("loop", "f", ["a"], ["b"], body, [helper.make_opsetid("loop", 1)])
    model = model_of([node("f", ["x"], ["y"], domain="loop")], [value("x", [1, 2])], [value("y", None)])
    model.functions.append(function)
    assert "calls itself" in message(model)


def test_bodies_nested_too_deep_are_refused():
    body = helper.make_graph([node("Relu", ["x"], ["b"])], "b", [], [value("b", None)])
    for level in range(20):
        made = node("If", ["c"], [f"y{level}"], then_branch=body, else_branch=body)
        body = helper.make_graph([made], f"g{level}", [], [value(f"y{level}", None)])
        if body.ByteSize() > 2**17:
            break
    inputs = [value("x", [1, 2]), value("c", [], TensorProto.BOOL)]
    model = model_of([node("If", ["c"], ["y"], then_branch=body, else_branch=body)], inputs, [value("y", None)])
    start_s = time.process_time()
    read_graph(model)  # thousands of leaves, but each is walked once
    assert time.process_time() - start_s < 20


def test_huge_constants_are_not_evaluated():
    nodes = [
        node("ConstantOfShape", ["n"], ["zeros"]),
        node("Range", ["zero", "limit", "one"], ["r"]),
        node("Cast", ["r"], ["rf"], to=FLOAT),
        node("Add", ["zeros", "rf"], ["big"]),
        node("Add", ["x", "big"], ["y"]),
    ]
    constants = [
        ints("n", 2**30),
        *(helper.make_tensor(name, 7, [], [number]) for name, number in (("zero", 0), ("limit", 2**30), ("one", 1))),
    ]
    start_s = time.process_time()
    graph = read_graph(model_of(nodes, [value("x", [1, 1])], [value("y", None)], constants))
    assert graph.tensors[graph.outputs[0]].shape == (1, 2**30)
    assert time.process_time() - start_s < 1


def test_a_graph_of_constants_alone_has_nothing_to_time():
    nodes = [node("Add", ["a", "a"], ["y"])]
    assert "nothing to time" in message(model_of(nodes, [], [value("y", None)], [ints("a", 1, 2)]))
