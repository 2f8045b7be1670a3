"""Models that others wrote: those in the onnx package, and fresh exports of PyTorch modules."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gnnpred.errors import GnnpredError
from gnnpred.graph import DType
from gnnpred.onnx_io import read_graph
from gnnpred.onnx_io.values import MAX_FOLDED_ELEMENTS
from tests.helpers.onnx_files import small_cnn

DATA = Path(os.path.dirname(onnx.__file__)) / "backend" / "test" / "data"
# parameters of the networks as caffe2 has them: exact, so nothing is missed and no buffer counted
LIGHT_PARAMETERS = {
    "light_bvlc_alexnet": 60_965_224, "light_densenet121": 7_979_112, "light_inception_v1": 6_998_552,
    "light_inception_v2": 11_196_584, "light_resnet50": 25_557_032, "light_shufflenet": 1_393_320,
    "light_squeezenet": 1_235_496, "light_vgg19": 143_667_240, "light_zfnet512": 87_250_536,
}  # fmt: skip


@pytest.mark.parametrize("name", LIGHT_PARAMETERS)
def test_weightless_caffe2_models_are_read_whole(name):
    path = DATA / "light" / f"{name}.onnx"
    if not path.exists():
        pytest.skip("this onnx package ships no light models")
    graph = read_graph(path, batch_size=4)
    assert graph.metadata["shape_coverage"] == 1
    assert not graph.metadata["unsupported"]
    assert graph.num_parameters == LIGHT_PARAMETERS[name]
    assert graph.tensors[graph.outputs[0]].shape[:2] == (4, 1000)


def _operator_cases():
    return sorted(
        path
        for folder in ("pytorch-converted", "pytorch-operator", "simple")
        for path in (DATA / folder).glob("*/model.onnx")
    )


@pytest.mark.skipif(not _operator_cases(), reason="this onnx package ships no operator cases")
def test_operator_cases_of_onnx_have_the_shapes_and_types_that_were_recorded():
    """Every case has its true output beside it; ours must have the same shape and type."""
    wrong, checked = [], 0
    for path in _operator_cases():
        recorded = sorted((path.parent / "test_data_set_0").glob("output_*.pb"))
        model = onnx.load(path, load_external_data=False)
        _make_small_inputs_constant(model, path.parent / "test_data_set_0")
        try:
            graph = read_graph(model)
        except GnnpredError as error:
            if "nothing to time" not in str(error):
                wrong.append((path.parent.name, str(error)))
            continue
        for position, file in enumerate(recorded):
            tensor = onnx.TensorProto.FromString(file.read_bytes())
            if not tensor.data_type or position >= len(graph.outputs):  # a sequence
                continue
            checked += 1
            ours = graph.tensors[graph.outputs[position]]
            if ours.shape != tuple(tensor.dims):
                wrong.append((path.parent.name, ours.shape, tuple(tensor.dims)))
    assert checked > 120
    assert not wrong


def _make_small_inputs_constant(model: onnx.ModelProto, folder: Path) -> None:
    """Shapes that the test feeds at run time are known in real models: store them."""
    for position, info in enumerate(model.graph.input):
        file = folder / f"input_{position}.pb"
        if not file.exists() or info.type.tensor_type.elem_type != onnx.TensorProto.INT64:
            continue
        tensor = onnx.TensorProto.FromString(file.read_bytes())
        if 0 < np.prod(tensor.dims, dtype=int) <= 8 < MAX_FOLDED_ELEMENTS:
            tensor.name = info.name
            model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(tensor), info.name))


def test_a_model_converted_to_half_runs_in_half():
    float16 = pytest.importorskip("onnxconverter_common.float16")
    converted = float16.convert_float_to_float16(onnx.shape_inference.infer_shapes(small_cnn()), keep_io_types=True)
    graph = read_graph(converted, batch_size=2)
    dtypes = {op.kind: graph.tensors[op.outputs[0]].dtype for op in graph.ops if op.kind != "cast"}
    assert set(dtypes.values()) == {DType.FP16}
    assert graph.tensors[graph.inputs[0]].dtype is DType.FP32
    assert graph.tensors[graph.outputs[0]].dtype is DType.FP32


# --- fresh exports ----------------------------------------------------------------------------


def _block():
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Block(nn.Module):
        """Convolution, norm, heads split and merged, a class token: what trips up a batch."""

        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 32, 4, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU())
            self.token = nn.Parameter(torch.zeros(1, 1, 32))
            self.qkv = nn.Linear(32, 96)
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            x = self.stem(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
            b, n, c = x.shape
            q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
            weights = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
            return self.head((x + (weights @ v).transpose(1, 2).reshape(b, n, c)).mean(1))

    return torch, Block().train()


def _signature(graph):
    free = ("view", "transpose", "slice", "split", "expand")
    return Counter((op.kind, graph.tensors[op.outputs[0]].shape) for op in graph.ops if op.kind not in free)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [13, 17])
def test_torchscript_exports_mean_the_same_with_symbolic_and_baked_batch(tmp_path, opset):
    torch, block = _block()
    if not hasattr(torch.onnx, "TrainingMode"):
        pytest.skip("no TorchScript exporter")
    paths = {}
    for name, axes in (("symbolic", {"x": {0: "batch"}}), ("baked", None)):
        paths[name] = tmp_path / f"{name}.onnx"
        torch.onnx.export(
            block, (torch.randn(3, 3, 16, 16),), paths[name], dynamo=False, opset_version=opset, input_names=["x"],
            dynamic_axes=axes, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        )  # fmt: skip
    symbolic, baked = (read_graph(paths[name], batch_size=8) for name in ("symbolic", "baked"))
    assert symbolic.metadata["shape_coverage"] == baked.metadata["shape_coverage"] == 1
    assert _signature(symbolic) == _signature(baked)
    assert symbolic.num_parameters == baked.num_parameters == sum(p.numel() for p in block.parameters())
    assert symbolic.tensors[symbolic.outputs[0]].shape == (8, 10)


@pytest.mark.filterwarnings("ignore")
def test_a_dynamo_export_means_the_same_as_a_torchscript_one(tmp_path):
    torch, block = _block()
    pytest.importorskip("onnxscript")
    torch.onnx.export(
        block, (torch.randn(3, 3, 16, 16),), tmp_path / "old.onnx", dynamo=False, opset_version=17,
        training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False, input_names=["x"],
        dynamic_axes={"x": {0: "batch"}},
    )  # fmt: skip
    program = torch.onnx.export(
        block, (torch.randn(3, 3, 16, 16),), dynamo=True, optimize=False, verbose=False,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    old, new = read_graph(tmp_path / "old.onnx", batch_size=8), read_graph(program.model_proto, batch_size=8)
    assert new.metadata["shape_coverage"] == 1
    assert not new.metadata["unsupported"]
    assert new.num_parameters == old.num_parameters
    products = ("conv", "linear", "matmul", "softmax", "layer_norm", "batch_norm")
    assert {k: n for k, n in _signature(new).items() if k[0] in products} == {
        k: n for k, n in _signature(old).items() if k[0] in products
    }
