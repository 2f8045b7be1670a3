"""A small transformer, as a canonical graph and as an ONNX file."""

import numpy as np
import onnx
from onnx import helper

from gnnpred.graph import DType, OpGraph
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.onnx_files import model_of, value, weight


def small_transformer(
    num_layers: int = 4, *, heads: int = 4, width: int = 64, tokens: int = 16, vocabulary: int = 5000, experts: int = 0
) -> OpGraph:
    """Word embedding, pre-norm layers (attention, MLP of four times the width or experts), output layer; batch 1."""
    b = GraphBuilder()
    head_dim = width // heads
    indices = b.input(1, tokens, dtype=DType.INT64)
    x = b.op("embedding", [b.parameter(vocabulary, width), indices], (1, tokens, width))
    for _ in range(num_layers):
        normed = b.op(
            "layer_norm", [x, b.parameter(width), b.parameter(width)], (1, tokens, width), normalized_size=width
        )
        parts = []
        for _ in range(3):
            part = b.op("linear", [normed, b.parameter(width, width), b.parameter(width)], (1, tokens, width))
            part = b.op("view", [part], (1, tokens, heads, head_dim))
            parts.append(b.op("transpose", [part], (1, heads, tokens, head_dim), axes=(0, 2, 1, 3)))
        mixed = b.op("sdpa", parts, (1, heads, tokens, head_dim), causal=True)
        mixed = b.op("transpose", [mixed], (1, tokens, heads, head_dim), axes=(0, 2, 1, 3))
        mixed = b.op("copy", [mixed], (1, tokens, heads, head_dim))
        mixed = b.op("view", [mixed], (1, tokens, width))
        mixed = b.op("linear", [mixed, b.parameter(width, width), b.parameter(width)], (1, tokens, width))
        x = b.op("add", [x, mixed], (1, tokens, width))
        normed = b.op(
            "layer_norm", [x, b.parameter(width), b.parameter(width)], (1, tokens, width), normalized_size=width
        )
        if experts:
            inner = _experts(b, normed, experts, tokens, width)
        else:
            inner = b.op("linear", [normed, b.parameter(4 * width, width)], (1, tokens, 4 * width))
            inner = b.op("gelu", [inner], (1, tokens, 4 * width))
            inner = b.op("linear", [inner, b.parameter(width, 4 * width)], (1, tokens, width))
        x = b.op("add", [x, inner], (1, tokens, width))
    x = b.op("layer_norm", [x, b.parameter(width), b.parameter(width)], (1, tokens, width), normalized_size=width)
    logits = b.op("linear", [x, b.parameter(vocabulary, width)], (1, tokens, vocabulary))
    return b.build(logits)


def _experts(b: GraphBuilder, x: int, experts: int, tokens: int, width: int) -> int:
    """One expert per token, each with its even share of the tokens."""
    scores = b.op("linear", [x, b.parameter(experts, width)], (1, tokens, experts))
    b.op("topk", [scores], (1, tokens, 1), axis=2)
    each = tokens // experts
    routed = b.op("view", [x], (experts, each, width))
    inner = b.op("matmul", [routed, b.parameter(experts, width, 4 * width)], (experts, each, 4 * width))
    inner = b.op("gelu", [inner], (experts, each, 4 * width))
    outer = b.op("matmul", [inner, b.parameter(experts, 4 * width, width)], (experts, each, width))
    return b.op("view", [outer], (1, tokens, width))


def transformer_file(num_layers: int = 4, *, heads: int = 4, width: int = 64, tokens: int = 16) -> onnx.ModelProto:
    """The layers of :func:`small_transformer` on float input, as an exporter writes them."""
    nodes, weights = (
        [],
        [
            helper.make_tensor("split", onnx.TensorProto.INT64, [4], np.array([0, 0, heads, width // heads])),
            helper.make_tensor("merge", onnx.TensorProto.INT64, [3], np.array([0, 0, width])),
            helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [(width // heads) ** -0.5]),
        ],
    )
    x = "x"

    def node(kind: str, inputs: list[str], output: str, **attributes) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def parameter(name: str, *shape: int) -> str:
        weights.append(weight(name, list(shape)))
        return name

    for i in range(num_layers):
        normed = node("LayerNormalization", [x, parameter(f"{i}.g", width), parameter(f"{i}.b", width)], f"{i}.norm")
        parts = {}
        for part in "qkv":
            y = node("MatMul", [normed, parameter(f"{i}.{part}.w", width, width)], f"{i}.{part}")
            y = node("Reshape", [y, "split"], f"{i}.{part}.split")
            parts[part] = node(
                "Transpose", [y], f"{i}.{part}.heads", perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]
            )
        scores = node("MatMul", [parts["q"], parts["k"]], f"{i}.scores")
        scores = node("Mul", [scores, "scale"], f"{i}.scaled")
        mixed = node("MatMul", [node("Softmax", [scores], f"{i}.softmax", axis=-1), parts["v"]], f"{i}.mixed")
        mixed = node("Reshape", [node("Transpose", [mixed], f"{i}.back", perm=[0, 2, 1, 3]), "merge"], f"{i}.merged")
        x = node("Add", [x, node("MatMul", [mixed, parameter(f"{i}.o.w", width, width)], f"{i}.o")], f"{i}.sum")
        normed = node("LayerNormalization", [x, parameter(f"{i}.g2", width), parameter(f"{i}.b2", width)], f"{i}.norm2")
        inner = node(
            "Relu", [node("MatMul", [normed, parameter(f"{i}.up.w", width, 4 * width)], f"{i}.up")], f"{i}.relu"
        )
        inner = node("MatMul", [inner, parameter(f"{i}.down.w", 4 * width, width)], f"{i}.down")
        x = node("Add", [x, inner], f"{i}.out")
    return model_of(nodes, [value("x", ["batch", tokens, width])], [value(x, ["batch", tokens, width])], weights)
