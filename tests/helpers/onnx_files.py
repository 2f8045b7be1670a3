"""Small ONNX files, good and bad, made on the spot."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT


def weight(name: str, shape: list[int]) -> TensorProto:
    return helper.make_tensor(name, FLOAT, shape, np.zeros(shape, np.float32).tobytes(), raw=True)


def value(name: str, shape: list[int | str] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(nodes, inputs, outputs, weights=(), *, opset: int = 17, **fields) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "small", list(inputs), list(outputs), list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], **fields)


def small_cnn(batch: int | str = "batch") -> onnx.ModelProto:
    """conv 3->16, relu, global average, flatten, gemm 16->10 on 32x32 images."""
    nodes = [
        helper.make_node("Conv", ["x", "conv.w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], name="conv"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "fc.w"], ["y"], transB=1, name="fc"),
    ]
    weights = [weight("conv.w", [16, 3, 3, 3]), weight("fc.w", [10, 16])]
    return model_of(nodes, [value("x", [batch, 3, 32, 32])], [value("y", [batch, 10])], weights)


def save(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path
