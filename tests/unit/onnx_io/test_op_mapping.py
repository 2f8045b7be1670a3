"""Each operator becomes the kind that a framework runs, with the conventions of op_kinds."""

import inspect
import re

import numpy as np
import pytest
from onnx import helper

from gnnpred.graph import DType, Role
from gnnpred.onnx_io import handlers, ops_elementwise, ops_reduce, read_graph
from gnnpred.op_kinds import OP_KINDS
from tests.onnx_factory import (
    FLOAT,
    INT64,
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
)

UNARY_KINDS = {
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Erf": "erf", "HardSwish": "hardswish", "Mish": "mish",
    "Softplus": "softplus", "Exp": "exp", "Sqrt": "sqrt", "Reciprocal": "reciprocal", "Neg": "neg", "Elu": "elu",
    "LeakyRelu": "leaky_relu", "HardSigmoid": "hardsigmoid", "Gelu": "gelu", "Floor": "floor", "Cos": "cos",
}  # fmt: skip


@pytest.mark.parametrize(("op_type", "kind"), UNARY_KINDS.items())
def test_unary_ops_keep_the_shape(op_type, kind):
    graph = read_graph(single(op_type, ["batch", 3, 4]), batch_size=2)
    assert kinds(graph) == [kind]
    assert output(graph).shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("op_type", "kind", "dtype"),
    [
        ("Add", "add", DType.FP32),
        ("Mul", "mul", DType.FP32),
        ("Max", "maximum", DType.FP32),
        ("Less", "less", DType.BOOL),
    ],
)
def test_binary_ops_broadcast(op_type, kind, dtype):
    graph = read_graph(single(op_type, ["batch", 3, 1], weight("w", [5, 1, 1, 4])), batch_size=2)
    assert kinds(graph) == [kind]
    assert output(graph).shape == (5, 2, 3, 4)
    assert output(graph).batch_axes == (1,)
    assert output(graph).dtype is dtype


def test_every_kind_that_handlers_emit_is_in_the_vocabulary():
    modules = {inspect.getmodule(inspect.unwrap(handler)) for handler in handlers.HANDLERS.values()}
    source = "".join(inspect.getsource(module) for module in modules)
    emitted = set(re.findall(r'emit(?:_multi)?\(\s*"(\w+)"', source))
    assert len(emitted) > 40
    assert emitted <= OP_KINDS.keys()
    assert set(ops_elementwise._UNARY.values()) <= OP_KINDS.keys()
    assert set(ops_elementwise._BINARY.values()) <= OP_KINDS.keys()
    assert set(ops_reduce._REDUCTIONS.values()) <= OP_KINDS.keys()


# --- products ---------------------------------------------------------------------------------


def test_matmul_with_a_parameter_is_linear_and_with_data_is_matmul():
    assert kinds(read_graph(single("MatMul", ["batch", 7, 8], weight("w", [8, 3])))) == ["linear"]
    nodes = [node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("MatMul", ["x", "t"], ["y"])]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 7, 8])], [value("y", None)]), batch_size=2)
    assert kinds(graph) == ["transpose", "matmul"]
    assert output(graph).shape == (2, 7, 7)


def test_a_linear_sees_its_weight_through_views_of_it():
    nodes = [node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 8])], [value("y", None)], [weight("w", [3, 8])]))
    assert kinds(graph) == ["transpose", "linear"]


@pytest.mark.parametrize("trans_b", [0, 1])
def test_gemm_is_linear_with_its_bias(trans_b):
    w = weight("w", [10, 16] if trans_b else [16, 10])
    bias = helper.make_tensor("b", FLOAT, [10], np.ones(10))
    graph = read_graph(single("Gemm", ["batch", 16], w, bias, transB=trans_b), batch_size=4)
    assert len(only(graph, "linear").inputs) == 3
    assert output(graph).shape == (4, 10)


def test_gemm_of_two_activations_is_a_matmul_with_an_add():
    nodes = [node("Gemm", ["x", "x", "c"], ["y"], transB=1)]
    bias = helper.make_tensor("c", FLOAT, [5], np.ones(5))
    graph = read_graph(model_of(nodes, [value("x", [5, 16])], [value("y", None)], [bias]))
    assert kinds(graph) == ["transpose", "matmul", "add"]


def test_einsum_with_a_weight_is_linear():
    nodes = [node("Einsum", ["x", "w"], ["y"], equation="bsd,dhk->bshk")]
    graph = read_graph(
        model_of(nodes, [value("x", ["batch", 5, 32])], [value("y", None)], [weight("w", [32, 4, 8])]), batch_size=2
    )
    linear = only(graph, "linear")
    assert shapes(graph, linear.outputs) == [(2, 5, 32)]
    assert graph.tensors[linear.inputs[1]].num_elements == 32 * 32
    assert output(graph).shape == (2, 5, 4, 8)


def test_einsum_of_attention_scores_is_a_batched_matmul():
    inputs = [value("q", ["batch", 5, 4, 8]), value("k", ["batch", 6, 4, 8])]
    nodes = [node("Einsum", ["q", "k"], ["y"], equation="bqhd,bkhd->bhqk")]
    graph = read_graph(model_of(nodes, inputs, [value("y", None)]), batch_size=2)
    assert shapes(graph, only(graph, "matmul").inputs) == [(2, 4, 5, 8), (2, 4, 8, 6)]
    assert output(graph).shape == (2, 4, 5, 6)


def test_einsum_with_an_ellipsis_and_no_arrow():
    inputs = [value("a", ["batch", 3, 4]), value("b", ["batch", 4, 5])]
    graph = read_graph(
        model_of([node("Einsum", ["a", "b"], ["y"], equation="...ij,...jk")], inputs, [value("y", None)])
    )
    assert "matmul" in kinds(graph)
    assert output(graph).shape == (1, 3, 5)


def test_einsum_of_three_operands_stays_einsum():
    inputs = [value(name, [3, 3]) for name in "abc"]
    graph = read_graph(
        model_of([node("Einsum", list("abc"), ["y"], equation="ij,jk,kl->il")], inputs, [value("y", None)])
    )
    assert kinds(graph) == ["einsum"]


# --- convolution and pooling ------------------------------------------------------------------


def test_conv_has_the_attributes_of_the_framework():
    graph = read_graph(
        single("Conv", ["batch", 8, 33, 32], weight("w", [16, 4, 3, 5]), strides=[2, 1], pads=[1, 2, 1, 2],
               dilations=[1, 1], group=2),
        batch_size=3,
    )  # fmt: skip
    assert output(graph).shape == (3, 16, 17, 32)
    assert only(graph, "conv").attributes == {
        "kernel": (3, 5), "stride": (2, 1), "dilation": (1, 1), "padding": (1, 2), "groups": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("auto_pad", "size"), [("SAME_UPPER", 17), ("SAME_LOWER", 17), ("VALID", 16), ("NOTSET", 16)])
def test_conv_pads_as_it_is_told(auto_pad, size):
    graph = read_graph(single("Conv", [1, 3, 33], weight("w", [4, 3, 3]), auto_pad=auto_pad, strides=[2]))
    assert output(graph).shape == (1, 4, size)


def test_conv_transpose_grows():
    graph = read_graph(
        single("ConvTranspose", [1, 8, 14, 14], weight("w", [8, 4, 3, 3]), strides=[2, 2], pads=[1] * 4,
               output_padding=[1, 1])
    )  # fmt: skip
    assert kinds(graph) == ["conv_transpose"]
    assert output(graph).shape == (1, 4, 28, 28)


@pytest.mark.parametrize(("ceil_mode", "size"), [(0, 15), (1, 16)])
def test_max_pool_with_ceil_mode(ceil_mode, size):
    graph = read_graph(single("MaxPool", [1, 4, 32, 32], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=ceil_mode))
    assert only(graph, "max_pool").attributes == {"kernel": (3, 3), "stride": (2, 2)}
    assert output(graph).shape == (1, 4, size, size)


def test_global_average_pooling_is_a_mean():
    graph = read_graph(single("GlobalAveragePool", ["batch", 8, 7, 7]))
    assert only(graph, "reduce_mean").attributes["axes"] == (2, 3)


@pytest.mark.parametrize("opset", [13, 18])
def test_reduction_axes_come_from_attribute_or_input(opset):
    if opset < 18:
        model = single("ReduceMean", ["batch", 8, 7], axes=[-1], keepdims=0, opset=opset)
    else:
        model = single("ReduceMean", ["batch", 8, 7], ints("axes", -1), keepdims=0, opset=opset)
    graph = read_graph(model, batch_size=2)
    assert only(graph, "reduce_mean").attributes["axes"] == (2,)
    assert output(graph).shape == (2, 8)


# --- normalisation, activation, movement --------------------------------------------------------


def test_norms_keep_what_the_cost_needs():
    w, b = weight("w", [8]), weight("b", [8])
    layer = only(read_graph(single("LayerNormalization", ["batch", 6, 8], w, b, axis=-1)), "layer_norm")
    assert layer.attributes["normalized_size"] == 8
    assert len(layer.inputs) == 3
    rms = only(read_graph(single("RMSNormalization", ["batch", 6, 8], w, opset=23)), "rms_norm")
    assert rms.attributes["normalized_size"] == 8
    group = only(read_graph(single("GroupNormalization", ["batch", 8, 5], w, b, opset=21, num_groups=4)), "group_norm")
    assert group.attributes["groups"] == 4
    instance = only(read_graph(single("InstanceNormalization", ["batch", 8, 5], w, b)), "group_norm")
    assert instance.attributes["groups"] == 8


def test_clip_between_0_and_6_is_relu6():
    low, high = scalar("low", 0.0, np.float32), scalar("high", 6.0, np.float32)
    assert kinds(read_graph(single("Clip", ["batch", 4], low, high))) == ["relu6"]
    assert kinds(read_graph(single("Clip", ["batch", 4], min=0.0, max=6.0, opset=9))) == ["relu6"]
    clamp = only(read_graph(single("Clip", ["batch", 4], low)), "clamp")
    assert clamp.attributes == {"min": 0.0}


def test_a_power_with_a_known_exponent_carries_it():
    graph = read_graph(single("Pow", ["batch", 4], scalar("e", 3.0, np.float32)))
    assert only(graph, "pow_scalar").attributes == {"exponent": 3.0}


def test_dropout_keeps_its_ratio_and_one_of_zero_is_nothing():
    assert only(read_graph(single("Dropout", ["batch", 4], scalar("r", 0.1, np.float32))), "dropout").attributes[
        "ratio"
    ] == pytest.approx(0.1)
    nodes = [node("Dropout", ["x", "r"], ["d"]), node("Relu", ["d"], ["y"])]
    zero = scalar("r", 0.0, np.float32)
    assert kinds(read_graph(model_of(nodes, [value("x", [1, 4])], [value("y", None)], [zero]))) == ["relu"]


@pytest.mark.parametrize("op_type", ["Reshape", "Flatten", "Squeeze", "Unsqueeze"])
def test_reshapes_are_views(op_type):
    model = {
        "Reshape": single("Reshape", ["batch", 1, 6], ints("s", 0, -1)),
        "Flatten": single("Flatten", ["batch", 1, 6]),
        "Squeeze": single("Squeeze", ["batch", 1, 6], ints("a", 1)),
        "Unsqueeze": single("Unsqueeze", ["batch", 6], ints("a", 2)),
    }[op_type]
    assert kinds(read_graph(model)) == ["view"]


def test_a_slice_says_which_axes_it_cuts_and_a_whole_one_is_nothing():
    constants = [ints("starts", 0, 2), ints("ends", 2**31, 4), ints("axes", 1, 2)]
    graph = read_graph(single("Slice", ["batch", 5, 8], *constants), batch_size=2)
    assert only(graph, "slice").attributes == {"axes": (2,), "steps": (1,), "starts": (2,)}
    assert output(graph).shape == (2, 5, 2)


def test_a_gather_of_one_position_is_a_slice_and_of_a_table_an_embedding():
    graph = read_graph(single("Gather", ["batch", 5, 8], scalar("i", -1), axis=1), batch_size=2)
    assert only(graph, "slice").attributes["starts"] == (4,)
    assert output(graph).shape == (2, 8)
    model = model_of(
        [node("Gather", ["table", "ids"], ["y"])], [value("ids", ["batch", 7], INT64)], [value("y", None)],
        [weight("table", [100, 16])],
    )  # fmt: skip
    graph = read_graph(model, batch_size=2)
    assert kinds(graph) == ["embedding"]
    assert graph.tensors[only(graph, "embedding").inputs[0]].role is Role.PARAMETER
    assert output(graph).shape == (2, 7, 16)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    constants = [weight("w", [2, gates * 16, 8]), weight("r", [2, gates * 16, 16]), weight("b", [2, 2 * gates * 16])]
    graph = read_graph(
        model_of(
            [node(kind, ["x", "w", "r", "b"], ["y", "h"], hidden_size=16, direction="bidirectional")],
            [value("x", [12, "batch", 8])], [value("y", None), value("h", None)], constants,
        ),
        batch_size=3,
    )  # fmt: skip
    op = only(graph, kind.lower())
    assert op.attributes == {"hidden_size": 16, "num_directions": 2, "num_steps_axis": 0}
    assert shapes(graph, op.outputs)[:2] == [(12, 2, 3, 16), (2, 3, 16)]


def test_cross_entropy():
    inputs = [value("x", ["batch", 10]), value("t", ["batch"], INT64)]
    graph = read_graph(model_of([node("SoftmaxCrossEntropyLoss", ["x", "t"], ["y"])], inputs, [value("y", None)]))
    assert kinds(graph) == ["cross_entropy"]
    assert output(graph).shape == ()


# --- attention --------------------------------------------------------------------------------


def test_attention_on_four_axes_is_sdpa():
    inputs = [
        value(name, ["batch", heads, length, 8]) for name, heads, length in (("q", 4, 5), ("k", 2, 6), ("v", 2, 6))
    ]
    model = model_of([node("Attention", ["q", "k", "v"], ["y"], is_causal=1)], inputs, [value("y", None)], opset=23)
    graph = read_graph(model, batch_size=2)
    assert only(graph, "sdpa").attributes == {"causal": True}
    assert output(graph).shape == (2, 4, 5, 8)


def test_attention_on_three_axes_splits_and_merges_heads():
    inputs = [value("q", ["batch", 5, 32]), value("k", ["batch", 6, 16]), value("v", ["batch", 6, 16])]
    made = node("Attention", ["q", "k", "v"], ["y"], q_num_heads=4, kv_num_heads=2)
    graph = read_graph(model_of([made], inputs, [value("y", None)], opset=23), batch_size=2)
    assert shapes(graph, only(graph, "sdpa").inputs) == [(2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)]
    assert output(graph).shape == (2, 5, 32)


MICROSOFT = "com.microsoft"


def contrib(op_type: str, inputs, *weights, outputs=("y",), batch_size=2, **attributes):
    names = [*(info.name for info in inputs), *(tensor.name for tensor in weights)]
    made = node(op_type, names, list(outputs), domain=MICROSOFT, **attributes)
    model = model_of([made], inputs, [value(name, None) for name in outputs if name], weights)
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return read_graph(model, batch_size=batch_size)


def test_a_packed_attention_is_projection_split_and_sdpa():
    graph = contrib("Attention", [value("x", ["batch", 6, 32])], weight("w", [32, 96]), weight("b", [96]), num_heads=4)
    assert [kind for kind in kinds(graph) if kind not in ("view", "transpose")] == ["linear", "split", "sdpa"]
    assert shapes(graph, only(graph, "sdpa").inputs)[:3] == [(2, 4, 6, 8)] * 3
    assert output(graph).shape == (2, 6, 32)


def test_grouped_query_attention_keeps_the_key_heads_and_appends_the_cache():
    inputs = [
        value("q", ["batch", 1, 32]), value("k", ["batch", 1, 16]), value("v", ["batch", 1, 16]),
        value("past_k", ["batch", 2, 9, 8]), value("past_v", ["batch", 2, 9, 8]),
    ]  # fmt: skip
    graph = contrib("GroupQueryAttention", inputs, num_heads=4, kv_num_heads=2, outputs=("y", "pk", "pv"))
    assert shapes(graph, only(graph, "sdpa").inputs) == [(2, 4, 1, 8), (2, 2, 10, 8), (2, 2, 10, 8)]
    assert output(graph, 1).shape == (2, 2, 10, 8)


def test_multi_head_attention():
    inputs = [value("q", ["batch", 5, 32]), value("k", ["batch", 6, 32]), value("v", ["batch", 6, 32])]
    graph = contrib("MultiHeadAttention", inputs, num_heads=4)
    assert "sdpa" in kinds(graph)
    assert output(graph).shape == (2, 5, 32)


def test_fused_norms_and_activations_are_taken_apart():
    x, skip = value("x", ["batch", 6, 8]), value("s", ["batch", 6, 8])
    graph = contrib("SkipLayerNormalization", [x, skip], weight("w", [8]), weight("b", [8]))
    assert kinds(graph) == ["add", "layer_norm"]
    graph = contrib("SkipSimplifiedLayerNormalization", [x, skip], weight("w", [8]))
    assert kinds(graph) == ["add", "rms_norm"]
    assert kinds(contrib("BiasGelu", [x], weight("b", [8]))) == ["add", "gelu"]
    assert kinds(contrib("FastGelu", [x])) == ["gelu_tanh"]
    assert kinds(contrib("QuickGelu", [x])) == ["quick_gelu"]
    graph = contrib("FusedMatMul", [x], weight("w", [3, 8]), transB=1, alpha=0.5)
    assert kinds(graph) == ["transpose", "linear", "mul"]
    assert output(graph).shape == (2, 6, 3)


def test_fused_conv_runs_its_activation():
    graph = contrib("FusedConv", [value("x", ["batch", 3, 8, 8])], weight("w", [4, 3, 3, 3]), activation="Relu")
    assert kinds(graph) == ["conv", "relu"]


def test_a_packed_weight_keeps_its_logical_size():
    packed = helper.make_tensor("w", 2, [64, 2, 16], bytes(64 * 2 * 16), raw=True)
    graph = contrib("MatMulNBits", [value("x", ["batch", 5, 64])], packed, weight("scales", [128]), K=64, N=64, bits=4)
    linear = only(graph, "linear")
    assert graph.tensors[linear.inputs[1]].shape == (64, 64)
    assert graph.tensors[linear.inputs[1]].dtype is DType.INT4
    assert output(graph).shape == (2, 5, 64)


def test_embed_layer_normalization():
    inputs = [value("ids", ["batch", 7], 6), value("segments", ["batch", 7], 6)]
    tables = [weight("word", [100, 16]), weight("position", [50, 16]), weight("segment", [2, 16])]
    graph = contrib(
        "EmbedLayerNormalization", inputs, *tables, weight("g", [16]), weight("b", [16]), outputs=("y", "mask")
    )
    assert kinds(graph).count("embedding") == 2
    assert kinds(graph)[-2:] == ["layer_norm", "reduce_sum"]
    assert output(graph).shape == (2, 7, 16)


# --- quantized --------------------------------------------------------------------------------


def test_a_qdq_graph_keeps_weights_as_parameters_and_products_as_linear():
    scale, zero = scalar("scale", 0.1, np.float32), scalar("zero", 0, np.int8)
    quantized = helper.make_tensor("w", 3, [8, 4], bytes(32), raw=True)
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"]),
        node("DequantizeLinear", ["w", "scale", "zero"], ["wd"]),
        node("MatMul", ["xd", "wd"], ["y"]),
    ]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 8])], [value("y", None)], [scale, zero, quantized]))
    assert kinds(graph) == ["quantize", "dequantize", "dequantize", "linear"]
    assert graph.num_parameters == 32
    assert output(graph).dtype is DType.FP32


def test_integer_products():
    zero = scalar("zero", 0, np.uint8)
    quantized = helper.make_tensor("w", 2, [8, 4], bytes(32), raw=True)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["xq", "s", "z"]),
        node("MatMulInteger", ["xq", "w", "z", "zero"], ["i"]),
        node("Cast", ["i"], ["f"], to=FLOAT),
        node("Mul", ["f", "s"], ["y"]),
    ]
    graph = read_graph(model_of(nodes, [value("x", ["batch", 8])], [value("y", None)], [zero, quantized]), batch_size=3)
    assert kinds(graph) == ["quantize", "linear", "cast", "mul"]
    assert output(graph).shape == (3, 4)
