"""One module, many ways into the graph: all exporters, opsets and the trace end in the same ops and costs."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from gnnpred.corpus.parity import compare_front_ends  # noqa: E402
from gnnpred.corpus.trace import TRACE_BATCH_SIZE, trace_module  # noqa: E402
from gnnpred.export import export_model  # noqa: E402
from gnnpred.model_sources import build_model, declare_torchvision_ops  # noqa: E402
from gnnpred.onnx_io import read_graph  # noqa: E402

pytestmark = pytest.mark.train

WAYS = [("dynamo", 18), ("dynamo", 20), ("dynamo", 23), ("torchscript", 13), ("torchscript", 17)]
PLAIN = ["convolutional", "activations", "norms", "attention", "classifier_with_loss", "llama_block"]
FROM_TIMM = ["small_vit", "small_swin", "small_convnext", "small_resnet", "small_efficientnet"]

# (model, exporter, opset) -> why there is nothing to compare
NOT_EXPORTABLE = {
    ("attention", "torchscript", 13): "scaled_dot_product_attention came with opset 14",
    ("llama_block", "torchscript", 13): "scaled_dot_product_attention came with opset 14",
}


def compare(name, exporter, opset, folder):
    source = f"tests.helpers.small_models:{name}"
    path = folder / "model.onnx"
    export_model(source, path, exporter=exporter, opset=opset)
    module, inputs = build_model(source, batch_size=TRACE_BATCH_SIZE)
    return compare_front_ends(read_graph(path, batch_size=1), trace_module(module, inputs))


def assert_same(report):
    assert not report.missing, f"only traced: {dict(report.missing)}"
    assert not report.surplus, f"only in the file: {dict(report.surplus)}"
    for error in (report.forward_error, report.step_error):
        assert error.flops == pytest.approx(0, abs=1e-6)
        assert error.bytes_moved == pytest.approx(0, abs=1e-3)
        assert error.launches == 0


@pytest.mark.parametrize(
    ("name", "exporter", "opset"),
    [(name, *way) for name in PLAIN for way in WAYS if (name, *way) not in NOT_EXPORTABLE],
)
def test_exports_of_a_module_mean_what_it_runs(name, exporter, opset, tmp_path):
    assert_same(compare(name, exporter, opset, tmp_path))


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "exporter", "opset"),
    [*((name, "torchscript", 17) for name in FROM_TIMM), *((name, "dynamo", 20) for name in FROM_TIMM[:3])],
)
def test_exports_of_timm_models_mean_what_they_run(name, exporter, opset, tmp_path):
    declare_torchvision_ops()
    pytest.importorskip("timm")
    assert_same(compare(name, exporter, opset, tmp_path))


@pytest.mark.parametrize(("exporter", "opset"), [("dynamo", 18), ("dynamo", 20), ("dynamo", 23)])
def test_torchs_rms_norm_is_one_op_at_every_opset(exporter, opset, tmp_path):
    assert_same(compare("rms_norm", exporter, opset, tmp_path))
