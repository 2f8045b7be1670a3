"""What export writes: a small file, weightless, in train mode, with nothing folded."""

import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from gnnpred import export as export_module  # noqa: E402
from gnnpred.errors import GnnpredError, UsageError  # noqa: E402
from gnnpred.export import PRIME_BATCH, export_model  # noqa: E402
from gnnpred.graph import Role  # noqa: E402
from gnnpred.onnx_io import read_graph  # noqa: E402
from gnnpred.passes.canonical import canonicalise  # noqa: E402

pytestmark = pytest.mark.train

SMALL = "tests.helpers.small_models:convolutional"


def op_types(path):
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_the_file_holds_structure_but_no_weights_and_nothing_is_folded(exporter, tmp_path):
    path = tmp_path / "net.onnx"
    summary = export_model(SMALL, path, exporter=exporter, opset=18)
    types = op_types(path)
    assert types.count("BatchNormalization") == 1
    assert types.count("Conv") == 5
    assert path.stat().st_size < 40_000
    model = onnx.load(path, load_external_data=False)
    assert all(tensor.external_data for tensor in model.graph.initializer if len(tensor.dims) > 1)
    assert (summary.batch, summary.opset, summary.num_nodes) == ("dynamic", 18, len(types))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_dropout_survives_in_train_mode(exporter, tmp_path):
    path = tmp_path / "net.onnx"
    export_model("tests.helpers.small_models:activations", path, exporter=exporter, opset=18)
    assert "Dropout" in op_types(path)


def test_the_open_batch_is_called_batch_and_binds_to_any_number(tmp_path):
    path = tmp_path / "net.onnx"
    summary = export_model(SMALL, path)
    assert list(summary.input_shapes.values()) == [("batch", 3, 32, 32)]
    graph = read_graph(path, batch_size=6)
    assert graph.tensors[graph.outputs[0]].shape == (6, 10)


def test_no_local_path_or_stack_trace_is_left_in_the_file(tmp_path):
    path = tmp_path / "net.onnx"
    export_model(SMALL, path)
    content = path.read_bytes()
    assert b"small_models.py" not in content
    assert b"stack_trace" not in content
    assert str(tmp_path).encode() not in content


def test_a_fixed_batch_is_baked_in(tmp_path):
    path = tmp_path / "net.onnx"
    summary = export_model(SMALL, path, batch=4)
    assert summary.batch == 4
    assert list(summary.input_shapes.values()) == [(4, 3, 32, 32)]


def test_a_model_without_an_open_batch_falls_back_to_a_prime_one_and_says_so(tmp_path):
    source = tmp_path / "fixed.py"
    source.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.linear = torch.nn.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        if x.shape[0] % 7 == 1:\n            return self.linear(x)\n"
        "        return self.linear(x) * 2\n"
        "def net(batch_size=1):\n    return Net(), torch.zeros(batch_size, 4)\n"
    )
    path = tmp_path / "net.onnx"
    summary = export_model(f"{source}:net", path)
    assert summary.batch == PRIME_BATCH
    assert len(summary.notes) == 1
    assert "baked in" in summary.notes[0]
    graph = read_graph(path, batch_size=3)
    assert graph.tensors[graph.outputs[0]].shape == (3, 2)


def test_parameters_and_buffers_keep_their_roles(tmp_path):
    path = tmp_path / "net.onnx"
    export_model("tests.helpers.small_models:llama_block", path)
    summary = export_model(SMALL, tmp_path / "other.onnx")
    graph = canonicalise(read_graph(tmp_path / "other.onnx", batch_size=1))
    assert graph.num_parameters == summary.num_parameters
    table = [spec for spec in read_graph(path, batch_size=1).tensors if spec.shape == (6, 8)]
    assert table
    assert all(spec.role is Role.CONSTANT for spec in table)


def test_a_model_larger_than_memory_is_written_without_its_weights(tmp_path):
    source = tmp_path / "huge.py"
    source.write_text(
        "import torch\ndef net(batch_size=1):\n"
        "    return torch.nn.Linear(2**20, 2**20), torch.zeros(batch_size, 2**20)\n"  # 4 TiB
    )
    path = tmp_path / "net.onnx"
    summary = export_model(f"{source}:net", path)
    assert summary.num_parameters == 2**40 + 2**20
    assert path.stat().st_size < 10_000
    with pytest.raises(GnnpredError, match="use the dynamo exporter"):
        export_model(f"{source}:net", path, exporter="torchscript", opset=17)


def test_a_failed_export_leaves_an_older_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"older")

    def fail(*_args, **_kwargs):
        raise RuntimeError("Unsupported: something\nwith pages of advice")

    monkeypatch.setattr(export_module, "_program", fail)
    with pytest.raises(GnnpredError, match="cannot be exported with the dynamo exporter") as caught:
        export_model(SMALL, path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "at least 1"),
        ({"batch": "many"}, "a number or 'dynamic'"),
        ({"opset": 9}, "writes opset 18 to"),
        ({"opset": 99}, "writes opset 18 to"),
        ({"exporter": "tf2onnx"}, "choose one of dynamo, torchscript"),
        ({"exporter": "torchscript", "opset": 23}, "writes opset 9 to 20"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        export_model(SMALL, tmp_path / "net.onnx", **options)


def test_the_place_to_write_is_checked_before_the_work(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        export_model(SMALL, tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        export_model(SMALL, tmp_path / "missing" / "net.onnx")
