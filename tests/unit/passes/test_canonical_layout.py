"""Which ops copy memory."""

import pytest

from gnnpred.passes.canonical.layout import channels_last_strides, contiguous_strides, view_strides
from tests.helpers.hand_graph import HandGraph


def test_strides_of_views_match_those_of_torch():
    torch = pytest.importorskip("torch")
    cases = [
        (torch.empty(4, 6, 8), (24, 8)), (torch.empty(4, 6, 8).transpose(1, 2), (4, 48)),
        (torch.empty(4, 6, 8).transpose(1, 2), (4, 8, 2, 3)), (torch.empty(4, 6, 8).transpose(0, 1), (6, 4, 2, 4)),
        (torch.empty(4, 1, 8).transpose(0, 1), (4, 8)), (torch.empty(4, 6, 8)[:, ::2], (4, 24)),
        (torch.empty(4, 6, 8)[:, :3], (4, 3, 8, 1)), (torch.empty(4, 1, 8).expand(4, 5, 8), (20, 8)),
        (torch.empty(2, 3, 4, 5).permute(0, 2, 3, 1), (2, 20, 3)), (torch.empty(1, 5), (5,)),
        (torch.empty(5), (1, 5, 1)),
    ]  # fmt: skip
    for tensor, wanted in cases:
        try:
            expected = tensor.view(wanted).stride()
        except RuntimeError:
            expected = None
        assert view_strides(tuple(tensor.shape), tensor.stride(), wanted) == expected, (tensor.shape, wanted)


def test_channels_last_strides_match_those_of_torch():
    torch = pytest.importorskip("torch")
    tensor = torch.empty(2, 3, 5, 7).to(memory_format=torch.channels_last)
    assert channels_last_strides((2, 3, 5, 7)) == tensor.stride()
    assert contiguous_strides((2, 3, 5, 7)) == torch.empty(2, 3, 5, 7).stride()


def test_flattening_a_feature_map_is_free():
    g = HandGraph()
    x = g.op("relu", g.input(2, 8, 4, 4))
    assert g.kinds(g.view(x, 2, 128)) == ["relu", "view"]


def test_a_reshape_across_permuted_axes_copies_first():
    g = HandGraph()
    x = g.input(2, 8, 4, 4)
    graph = g.canonical(g.view(g.transpose(x, 0, 2, 3, 1), 2, 128))
    assert [op.kind for op in graph.ops] == ["transpose", "copy", "view"]
    assert graph.tensors[graph.ops[1].outputs[0]].shape == (2, 4, 4, 8)


def test_merging_axes_that_stay_neighbours_is_free():
    g = HandGraph()
    tokens = g.transpose(g.view(g.input(2, 8, 4, 4), 2, 8, 16), 0, 2, 1)
    assert "copy" not in g.kinds(g.view(tokens, 2, 4, 4, 8))


def test_batch_one_in_the_file_does_not_hide_a_copy():
    g = HandGraph()
    x = g.input(1, 5, 8)
    assert "copy" in g.kinds(g.view(g.transpose(x, 1, 0, 2), 5, 8, batch_axes=(1,)))


def test_an_explicit_copy_that_nothing_needs_is_dropped():
    g = HandGraph()
    assert g.kinds(g.op("relu", g.op("copy", g.input(2, 8)))) == ["relu"]


def test_elementwise_ops_keep_the_order_of_axes():
    g = HandGraph()
    x = g.transpose(g.input(2, 8, 16), 0, 2, 1)
    y = g.op("add", g.op("relu", x), g.op("relu", x))
    assert "copy" not in g.kinds(g.view(g.transpose(y, 0, 2, 1), 2, 128))
    assert "copy" in g.kinds(g.view(y, 2, 128))


def test_a_layer_norm_of_a_permuted_map_copies_it():
    g = HandGraph()
    x = g.transpose(g.input(2, 8, 4, 4), 0, 2, 3, 1)
    assert g.kinds(g.op("layer_norm", x, g.weight(8), shape=(2, 4, 4, 8), normalized_size=8)) == [
        "transpose", "copy", "layer_norm",
    ]  # fmt: skip


def test_a_convolution_reads_channels_last_memory_as_it_is():
    g = HandGraph()
    x = g.op("layer_norm", g.input(2, 4, 4, 8), g.weight(8), normalized_size=8)
    image = g.transpose(x, 0, 3, 1, 2)
    y = g.op("conv", image, g.weight(8, 8, 1, 1), shape=(2, 8, 4, 4), kernel=(1, 1), groups=1)
    # its result is channels last too, so permuting back is contiguous
    tokens = g.transpose(y, 0, 2, 3, 1)
    assert "copy" not in g.kinds(g.op("layer_norm", tokens, g.weight(8), shape=(2, 4, 4, 8), normalized_size=8))


def test_merging_the_heads_of_fused_attention_is_free():
    g = HandGraph()
    q, k, v = (g.input(2, 3, 5, 4) for _ in range(3))
    y = g.op("sdpa", q, k, v, shape=(2, 3, 5, 4), causal=False)
    merged = g.view(g.transpose(y, 0, 2, 1, 3), 2, 5, 12)
    assert "copy" not in g.kinds(g.op("copy", merged))


def test_a_batched_product_takes_transposed_operands_without_a_copy():
    g = HandGraph()
    a, b = g.input(2, 3, 5, 4), g.input(2, 3, 6, 4)
    assert "copy" not in g.kinds(g.op("matmul", a, g.transpose(b, 0, 1, 3, 2), shape=(2, 3, 5, 6)))


def test_a_batched_product_copies_operands_whose_batch_axes_do_not_merge():
    g = HandGraph()
    a, b = g.input(2, 5, 3, 4), g.input(2, 3, 4, 6)
    assert g.kinds(g.op("matmul", g.transpose(a, 0, 2, 1, 3), b, shape=(2, 3, 5, 6))) == ["transpose", "copy", "matmul"]
