"""The tracing front end: kinds, batch axes, roles and views of small modules worked out by hand."""

from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from gnnpred.corpus.trace import TRACE_BATCH_SIZE, trace_module  # noqa: E402
from gnnpred.errors import GnnpredError  # noqa: E402
from gnnpred.graph import Role  # noqa: E402
from gnnpred.op_kinds import OP_KINDS, Category, category_of  # noqa: E402

pytestmark = pytest.mark.train


def _trace(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32):
    with torch.device("meta"):
        return trace_module(module, (torch.empty(TRACE_BATCH_SIZE, *shape, dtype=dtype),))


def _kernels(graph):
    return [op for op in graph.ops if category_of(op.kind) is not Category.VIEW]


def test_convolution_block_becomes_three_ops_with_batch_first():
    graph = _trace(
        nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)), 3, 32, 32
    )
    assert [op.kind for op in graph.ops] == ["conv", "batch_norm", "relu"]
    conv = graph.ops[0]
    assert conv.attributes == {"kernel": (3, 3), "stride": (2, 2), "dilation": (1, 1), "padding": (1, 1), "groups": 1}
    output = graph.tensors[graph.outputs[0]]
    assert output.shape == (1, 8, 16, 16)
    assert output.batch_axes == (0,)
    assert graph.num_parameters == 8 * 3 * 9 + 16  # running statistics are no parameters


def test_attention_stays_one_op_and_its_views_are_views():
    graph = _trace(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), 7, 64)
    kinds = [op.kind for op in _kernels(graph)]
    assert kinds.count("sdpa") == 1
    assert kinds.count("linear") == 4  # packed qkv, projection, two of the MLP
    assert kinds.count("layer_norm") == 2
    assert "softmax" not in kinds
    assert "matmul" not in kinds
    attention = next(op for op in graph.ops if op.kind == "sdpa")
    assert graph.tensors[attention.inputs[0]].shape == (1, 4, 7, 16)


def test_batch_axis_is_found_where_it_is_not_first():
    with torch.device("meta"):
        graph = trace_module(nn.GRU(16, 8), (torch.empty(10, TRACE_BATCH_SIZE, 16),))
    recurrent = graph.ops[0]
    assert recurrent.kind == "gru"
    assert recurrent.attributes == {"hidden_size": 8, "num_directions": 1, "num_steps_axis": 0}
    output = graph.tensors[recurrent.outputs[0]]
    assert output.shape == (10, 1, 8)
    assert output.batch_axes == (1,)


def test_stacked_lstm_becomes_one_op_per_layer():
    graph = _trace(nn.LSTM(32, 64, num_layers=3, bidirectional=True, batch_first=True), 10, 32)
    assert [op.kind for op in graph.ops] == ["lstm"] * 3
    assert graph.tensors[graph.ops[1].inputs[0]].shape == (1, 10, 128)
    assert graph.ops[0].attributes["num_directions"] == 2


def test_reshape_copies_only_where_memory_must_move():
    class Reshapes(nn.Module):
        def forward(self, x):
            contiguous = x.reshape(x.shape[0], -1)
            moved = x.transpose(1, 2).reshape(x.shape[0], -1)
            return contiguous, moved

    graph = _trace(Reshapes(), 4, 6)
    assert [op.kind for op in graph.ops].count("copy") == 1


def test_in_place_update_of_a_slice_reaches_the_whole_tensor():
    class Writes(nn.Module):
        def forward(self, x):
            y = x * 2
            y[:, :1].relu_()
            return y + 1

    graph = _trace(Writes(), 4)
    assert [op.kind for op in _kernels(graph)] == ["mul", "relu", "add"]
    writers = graph.producer_by_tensor()
    last = graph.ops[-1]
    assert graph.ops[writers[last.inputs[0]]].kind == "view"  # the whole tensor after the write


def test_weight_standardisation_depends_on_parameters_alone():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            weight = nn.functional.batch_norm(
                self.weight.reshape(1, self.out_channels, -1), None, None, training=True
            ).reshape_as(self.weight)
            return nn.functional.conv2d(x, weight, self.bias)

    graph = _trace(Standardised(3, 8, 3), 3, 8, 8)
    norm = next(op for op in graph.ops if op.kind == "batch_norm")
    assert graph.tensors[norm.outputs[0]].role is Role.PARAMETER_DERIVED
    conv = next(op for op in graph.ops if op.kind == "conv")
    assert graph.tensors[conv.inputs[1]].role is Role.PARAMETER_DERIVED
    assert graph.tensors[conv.outputs[0]].role is Role.ACTIVATION


def test_constants_cost_nothing_and_numbers_keep_their_value():
    class Scales(nn.Module):
        def forward(self, x):
            mask = torch.ones(5, 5).tril()  # from constants alone
            return x * 0.125 + mask

    graph = _trace(Scales(), 5, 5)
    assert [op.kind for op in graph.ops] == ["mul", "add"]
    scale, mask = graph.tensors[graph.ops[0].inputs[1]], graph.tensors[graph.ops[1].inputs[1]]
    assert scale.role is Role.CONSTANT
    assert scale.value == 0.125
    assert mask.role is Role.CONSTANT
    assert mask.shape == (5, 5)


def test_dropout_with_ratio_zero_is_no_op():
    kinds = [op.kind for op in _trace(nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.3)), 4).ops]
    assert kinds == ["dropout"]


def test_evaluation_mode_leaves_dropout_out():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
    with torch.device("meta"):
        graph = trace_module(module, (torch.empty(TRACE_BATCH_SIZE, 4),), train=False)
    assert [op.kind for op in graph.ops] == ["linear"]
    assert module.training


def test_unknown_op_is_kept_as_unsupported_with_its_name():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.i0(x)

    op = _trace(Odd(), 4).ops[0]
    assert op.kind == "unsupported"
    assert op.attributes["op_type"]


def test_weights_outside_the_meta_device_are_left_untouched():
    module = nn.Linear(4, 4)
    trace_module(module, (torch.empty(TRACE_BATCH_SIZE, 4, device="meta"),))
    assert module.weight.device.type == "cpu"


def test_forward_that_needs_data_is_refused_in_one_line():
    class DataDependent(nn.Module):
        def forward(self, x):
            return x[x > 0]

    with pytest.raises(GnnpredError, match="cannot trace DataDependent") as error:
        _trace(DataDependent(), 4)
    assert "\n" not in str(error.value)


@pytest.mark.models
@pytest.mark.parametrize(
    ("source", "num_parameters"),
    [("timm:resnet18", 11_689_512), ("timm:vit_tiny_patch16_224", 5_717_416), ("torchvision:mobilenet_v2", 3_504_872)],
)
def test_library_models_keep_every_parameter_and_known_kinds(source, num_parameters):
    if find_spec("timm") is None or find_spec("torchvision") is None:
        pytest.skip("needs the models extra")
    from gnnpred.corpus.rebuild import ModelKey, trace_key

    graph = trace_key(ModelKey(source, image_size=(224, 224)))
    assert graph.num_parameters == num_parameters
    assert {op.kind for op in graph.ops} <= set(OP_KINDS)
    assert "unsupported" not in {op.kind for op in graph.ops}
    assert graph.batch_size == 1
    assert graph.tensors[graph.outputs[0]].shape == (1, 1000)
    read = {idx for op in graph.ops for idx in op.inputs}
    assert all(idx in read for idx, t in enumerate(graph.tensors) if t.role is Role.PARAMETER)
