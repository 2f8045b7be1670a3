"""Which stored tensors are trainable weights, and which are buffers or plain constants."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gnnpred.graph import Role
from gnnpred.onnx_io.nodes import Node, Subgraph
from gnnpred.onnx_io.values import Value

# input positions that a framework fills with a weight
_WEIGHT_SLOTS: dict[str, tuple[int, ...]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "DeformConv": (1, 3), "ConvInteger": (1,), "QLinearConv": (3, 8),
    "FusedConv": (1, 2), "Gemm": (1, 2), "FusedGemm": (1, 2), "MatMul": (0, 1), "FusedMatMul": (0, 1),
    "MatMulInteger": (0, 1), "QLinearMatMul": (0, 3), "MatMulIntegerToFloat": (1, 6), "DynamicQuantizeMatMul": (1, 4),
    "MatMulNBits": (1, 5), "MatMulBnb4": (1,), "MatMulFpQ4": (1,),
    "BatchNormalization": (1, 2), "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2), "GroupNormalization": (1, 2), "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,), "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
    "LSTM": (1, 2, 3), "GRU": (1, 2, 3), "RNN": (1, 2, 3), "DynamicQuantizeLSTM": (1, 2, 3), "PRelu": (1,),
    "Gather": (0,), "Attention": (1, 2), "QAttention": (1, 2), "EmbedLayerNormalization": (2, 3, 4, 5, 6),
    "BiasGelu": (1,), "FastGelu": (1,), "GroupNorm": (1, 2), "Einsum": (0, 1),
}  # fmt: skip
_STATISTICS_SLOTS = {"BatchNormalization": (3, 4)}
# ops that hand a weight on unchanged in meaning
_PASS_THROUGH = {
    "Transpose", "Cast", "Identity", "Reshape", "DequantizeLinear", "QuantizeLinear", "Squeeze", "Unsqueeze",
    "CastLike", "Flatten",
}  # fmt: skip
_BUFFER_NAME = re.compile(
    r"(^buffer\.|running_(mean|var)|num_batches_tracked|inv_freq|(cos|sin)_cached|attn_mask|attention_mask|causal_mask|"
    r"position_ids|token_type_ids|relative_position_index|lifted_tensor|_tensor_constant|anchors?$)"
)
_PARAMETER_NAME = re.compile(r"(weight|bias|scale|gamma|beta|alpha)", re.IGNORECASE)
_SMALL = 64  # elements; a bigger float constant inside arithmetic is a bias or a table rather than a literal


def weight_slot_names(nodes: Sequence[Node]) -> tuple[set[str], set[str]]:
    """Names of tensors that reach a weight slot, and of those that are running statistics."""
    weights: set[str] = set()
    statistics: set[str] = set()
    for node in reversed(nodes):
        inputs = node.inputs
        for position in _WEIGHT_SLOTS.get(node.op_type, ()):
            if position < len(inputs) and inputs[position]:
                weights.add(inputs[position])
        for position in _STATISTICS_SLOTS.get(node.op_type, ()):
            if position < len(inputs):
                statistics.add(inputs[position])
        if node.op_type in _PASS_THROUGH and inputs and node.outputs and node.outputs[0] in weights:
            weights.add(inputs[0])
        for body in node.subgraphs():
            inner_weights, inner_statistics = body_weight_slots(body)
            weights |= inner_weights
            statistics |= inner_statistics
    return weights, statistics


def body_weight_slots(body: Subgraph) -> tuple[set[str], set[str]]:
    """The same for an If, Loop or Scan body, found once."""
    if body.weight_slots is None:
        body.weight_slots = weight_slot_names(body.nodes)
    return body.weight_slots


def role_of_stored(value: Value, *, in_weight_slot: bool, is_statistic: bool, from_node: bool) -> Role:
    """Role of an initializer, or of a Constant or ConstantOfShape output (``from_node``)."""
    if is_statistic or _BUFFER_NAME.search(value.name):
        return Role.CONSTANT
    if not value.dtype.is_float:
        # a quantized weight is stored as integers; indices and shapes are constants
        quantized = in_weight_slot and value.dtype.bytes_per_element <= 1 and value.dtype.value != "bool"
        return Role.PARAMETER if quantized and value.num_elements > 1 else Role.CONSTANT
    if value.num_elements <= 1:
        literal = value.has_content and not (_PARAMETER_NAME.search(value.name) and "." in value.name)
        return Role.CONSTANT if literal or from_node else Role.PARAMETER
    if in_weight_slot:
        return Role.PARAMETER
    if value.looks_like_mask():
        return Role.CONSTANT
    if from_node or value.name.startswith("onnx::") or value.name.isdigit():
        return Role.PARAMETER if value.rank and value.num_elements > _SMALL else Role.CONSTANT
    return Role.PARAMETER
