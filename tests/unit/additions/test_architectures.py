"""A collected model is recognised as a network of the corpus by its weights, whatever exporter wrote it."""

from gnnpred.additions.architectures import KnownArchitectures, weights_of
from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec
from gnnpred.onnx_io import read_graph
from tests.helpers.collection_folders import mlp
from tests.helpers.corpus import make_row


def traced_mlp(width: int, *, classes: int = 10) -> OpGraph:
    """The same layers as :func:`mlp` in another form: products of transposed weights, without names."""
    tensors = [TensorSpec((1, width), DType.FP32, Role.INPUT, (0,))]
    ops = []
    for out in (width, width, width, classes):
        tensors.append(TensorSpec((width, out), DType.FP32, Role.PARAMETER))
        tensors.append(TensorSpec((1, out), DType.FP32, Role.ACTIVATION, (0,)))
        ops.append(Op("matmul", (len(tensors) - 3 if ops else 0, len(tensors) - 2), (len(tensors) - 1,)))
    return OpGraph(tuple(tensors), tuple(ops), inputs=(0,), outputs=(len(tensors) - 1,), batch_size=1, name="traced")


def known(*entries: tuple[str, OpGraph, str, str]) -> KnownArchitectures:
    """(graph_id, graph, architecture, family) each."""
    rows = [make_row(graph_id=g, architecture=a, family=f, row_id=g) for g, _, a, f in entries]
    return KnownArchitectures(rows, {g: graph for g, graph, _, _ in entries})


def test_the_same_weights_are_the_same_network_with_another_number_of_classes():
    graph = read_graph(mlp(64), batch_size=1)
    assert weights_of(graph) == weights_of(traced_mlp(64, classes=7)) == ((64, 64),) * 3
    assert known(("g", traced_mlp(64, classes=7), "a1", "mlp")).find(graph, "mine:net") == ("a1", "mlp", True)


def test_other_weights_are_a_new_network_of_the_family_that_its_name_says():
    architecture, family, is_known = known(("g", traced_mlp(64), "a1", "mlp")).find(
        read_graph(mlp(32), batch_size=1), "timm:resnet18.tv_in1k"
    )
    assert (family, is_known) == ("resnet", False)
    assert architecture not in ("", "a1")


def test_of_several_with_equal_weights_the_same_source_comes_first_then_the_family():
    graph = read_graph(mlp(64), batch_size=1)
    entries = [
        ("g1", traced_mlp(64), "a1", "vgg"),
        ("g2", traced_mlp(64), "a2", "resnet"),
        ("g3", traced_mlp(64).replace(name="timm:vgg11 224x224"), "a3", "odd"),
    ]
    assert known(*entries).find(graph, "timm:vgg11") == ("a3", "odd", True)
    assert known(*entries[:2]).find(graph, "timm:resnet18") == ("a2", "resnet", True)
