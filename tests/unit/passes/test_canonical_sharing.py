"""Parameter vectors that an exporter stored once because they were equal."""

from gnnpred.graph import Role
from tests.helpers.hand_graph import HandGraph


def two_norms(*, share_matrix: bool):
    g = HandGraph()
    ones, zeros, matrix = g.weight(16), g.weight(16), g.weight(16, 16)
    x = g.input(2, 7, 16)
    for _ in range(2):
        x = g.op("layer_norm", x, ones, zeros, shape=(2, 7, 16), normalized_size=16)
        x = g.op("linear", x, matrix if share_matrix else g.weight(16, 16), shape=(2, 7, 16))
    return g.canonical(x)


def test_norms_of_different_layers_have_weights_of_their_own():
    graph = two_norms(share_matrix=False)
    first, second = (op for op in graph.ops if op.kind == "layer_norm")
    assert not set(first.inputs[1:]) & set(second.inputs[1:])
    assert all(graph.tensors[tensor].role is Role.PARAMETER for tensor in second.inputs[1:])
    assert graph.num_parameters == 2 * (16 * 16 + 2 * 16) + 16 * 16  # and the matrix that nobody reads


def test_a_model_that_shares_whole_layers_shares_their_vectors_too():
    graph = two_norms(share_matrix=True)
    first, second = (op for op in graph.ops if op.kind == "layer_norm")
    assert first.inputs[1:] == second.inputs[1:]
    assert graph.num_parameters == 16 * 16 + 2 * 16


def test_a_matrix_tied_between_embedding_and_head_stays_tied():
    g = HandGraph()
    table, tokens = g.weight(50, 16), g.input(2, 7)
    x = g.op("embedding", table, tokens, shape=(2, 7, 16))
    graph = g.canonical(g.op("linear", x, table, shape=(2, 7, 50)))
    assert graph.num_parameters == 50 * 16
