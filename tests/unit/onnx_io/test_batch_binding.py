"""The batch: found by name or place, marked on every tensor, rebound where it is baked in."""

import pytest

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.onnx_io import read_graph
from gnnpred.passes.batch import rebind_batch
from tests.onnx_factory import INT64, chain, ints, kinds, model_of, node, only, output, scalar, single, value, weight


@pytest.mark.parametrize("symbol", ["batch", "batch_size", "batch _size", "N", "bs", "s0", "unk__214", "anything"])
def test_a_symbolic_first_dimension_is_the_batch(symbol):
    graph = read_graph(chain("Relu", shape=(symbol, 4)), batch_size=6)
    assert output(graph).shape == (6, 4)
    assert output(graph).batch_axes == (0,)
    assert graph.batch_size == 6


@pytest.mark.parametrize("dim_value", [-1, 0])
def test_a_first_dimension_without_a_size_is_the_batch(dim_value):
    model = chain("Relu", shape=(1, 4))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = dim_value
    assert output(read_graph(model, batch_size=3)).shape == (3, 4)


def test_a_named_batch_need_not_be_the_first_dimension():
    graph = read_graph(chain("Relu", shape=("seq", "batch", 4)), batch_size=3, dims={"seq": 7})
    assert output(graph).shape == (7, 3, 4)
    assert output(graph).batch_axes == (1,)


def test_blanks_in_a_name_make_no_other_dimension():
    inputs = [value("a", ["batch _size", 4]), value("b", ["batch_size", 4])]
    graph = read_graph(model_of([node("Add", ["a", "b"], ["y"])], inputs, [value("y", None)]), batch_size=5)
    assert output(graph).shape == (5, 4)
    assert not graph.notes


def test_a_symbolic_batch_without_a_size_is_one_and_says_so():
    graph = read_graph(chain("Relu"))
    assert graph.batch_size == 1
    assert any("batch of 1" in note for note in graph.notes)


def test_the_batch_can_be_bound_by_its_name():
    assert read_graph(chain("Relu"), dims={"batch": 9}).batch_size == 9
    with pytest.raises(UsageError, match="disagree"):
        read_graph(chain("Relu"), dims={"batch": 9}, batch_size=8)


def test_a_node_count_is_no_batch():
    inputs = [value("x", ["num_nodes", 16]), value("edge_index", [2, "num_edges"], INT64)]
    nodes = [
        node("Gather", ["edge_index", "zero"], ["source"]),
        node("Gather", ["x", "source"], ["y"]),
    ]
    model = model_of(nodes, inputs, [value("y", None)], [scalar("zero", 0)])
    with pytest.raises(GnnpredError, match="--dim num_nodes=VALUE --dim num_edges=VALUE"):
        read_graph(model)
    graph = read_graph(model, dims={"num_nodes": 50, "num_edges": 300}, batch_size=4)
    assert output(graph).shape == (300, 16)
    assert graph.batch_size is None
    assert any("no batch dimension" in note for note in graph.notes)


def test_expressions_of_dimensions_are_worked_out():
    inputs = [value("a", ["batch", "past + new"]), value("b", ["batch", "past"]), value("c", ["batch", "new"])]
    nodes = [node("Concat", ["b", "c"], ["d"], axis=1), node("Add", ["a", "d"], ["y"])]
    graph = read_graph(model_of(nodes, inputs, [value("y", None)]), dims={"past": 5, "new": 2}, batch_size=2)
    assert output(graph).shape == (2, 7)


def test_a_dimension_of_1009_is_not_mistaken_for_the_batch():
    graph = read_graph(single("MatMul", ["batch", 1009], weight("w", [1009, 2018])), batch_size=2)
    assert output(graph).shape == (2, 2018)
    assert output(graph).batch_axes == (0,)


def test_batch_axes_follow_shape_arithmetic_in_the_file():
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axis"], ["n1"]),
        node("Concat", ["n1", "rest"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = [scalar("zero", 0), ints("axis", 0), ints("rest", -1)]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 4, 5])], [value("y", None)], constants), batch_size=3)
    assert kinds(graph) == ["view"]
    assert output(graph).shape == (3, 20)
    assert output(graph).batch_axes == (0,)


# --- baked in ---------------------------------------------------------------------------------


def attention_like(batch: int):
    """Heads split, moved beside the batch and merged with it, and back: every constant holds the batch."""
    nodes = [
        node("MatMul", ["x", "w"], ["q"]),
        node("Reshape", ["q", "split"], ["q4"]),
        node("Transpose", ["q4"], ["qt"], perm=[0, 2, 1, 3]),
        node("Reshape", ["qt", "merge"], ["q3"]),
        node("Transpose", ["q3"], ["k3"], perm=[0, 2, 1]),
        node("MatMul", ["q3", "k3"], ["scores"]),
        node("MatMul", ["scores", "q3"], ["o3"]),
        node("Reshape", ["o3", "unmerge"], ["o4"]),
        node("Transpose", ["o4"], ["ot"], perm=[0, 2, 1, 3]),
        node("Reshape", ["ot", "join"], ["y"]),
    ]
    constants = [
        weight("w", [32, 32]),
        ints("split", batch, 7, 4, 8),
        ints("merge", batch * 4, 7, 8),
        ints("unmerge", batch, 4, 7, 8),
        ints("join", batch, 7, 32),
    ]
    return model_of(nodes, [value("x", [batch, 7, 32])], [value("y", None)], constants)


@pytest.mark.parametrize("baked", [1, 2, 6])
def test_a_baked_batch_is_carried_through_reshapes(baked):
    symbolic = attention_like(1)
    symbolic.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    graph = read_graph(attention_like(baked), batch_size=5)
    scores = only(graph, "linear")
    assert graph.batch_size == 5
    assert graph.tensors[scores.outputs[0]].shape == (5, 7, 32)
    merged = [graph.tensors[op.outputs[0]].shape for op in graph.ops if op.kind == "matmul"]
    assert merged == [(20, 7, 7), (20, 7, 8)]
    assert output(graph).shape == (5, 7, 32)
    assert not graph.notes


def test_a_baked_batch_stays_exact_where_no_other_is_asked_for():
    graph = read_graph(attention_like(6))
    assert graph.batch_size == 6
    assert output(graph).shape == (6, 7, 32)


def test_a_batch_that_is_the_inner_factor_of_a_merged_axis_is_carried():
    # (S, B, E) -> (S*B, E) -> (S, B, E)
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node("Reshape", ["t", "flat"], ["f"]),
        node("MatMul", ["f", "w"], ["m"]),
        node("Reshape", ["m", "back"], ["y"]),
    ]
    constants = [ints("flat", 21, 8), weight("w", [8, 16]), ints("back", 7, 3, 16)]
    graph = read_graph(model_of(nodes, [value("x", [3, 7, 8])], [value("y", None)], constants), batch_size=5)
    assert output(graph).shape == (7, 5, 16)
    assert output(graph).batch_axes == (1,)


def test_a_class_token_expanded_to_the_baked_batch_follows_and_is_counted_as_a_guess():
    nodes = [node("Expand", ["token", "size"], ["t"]), node("Concat", ["t", "x"], ["y"], axis=1)]
    constants = [weight("token", [1, 1, 8]), ints("size", 4, 1, 8)]
    graph = read_graph(model_of(nodes, [value("x", [4, 6, 8])], [value("y", None)], constants), batch_size=2)
    assert output(graph).shape == (2, 7, 8)
    assert any("was guessed" in note for note in graph.notes)


def test_a_symbolic_batch_with_a_reshape_made_for_one_batch_is_guessed():
    nodes = [node("Reshape", ["x", "to"], ["y"])]
    graph = read_graph(
        model_of(nodes, [value("x", ["batch", 4, 6])], [value("y", None)], [ints("to", 2, 24)]), batch_size=8
    )
    assert output(graph).shape == (8, 24)
    assert any("was guessed" in note for note in graph.notes)


# --- rebinding --------------------------------------------------------------------------------


def test_rebinding_equals_reading_at_that_batch():
    model = attention_like(2)
    rebound, read = rebind_batch(read_graph(model), 9), read_graph(model, batch_size=9)
    assert [t.shape for t in rebound.tensors] == [t.shape for t in read.tensors]
    assert rebound.ops == read.ops
    assert rebound.batch_size == 9
