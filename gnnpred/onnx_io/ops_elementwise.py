"""Elementwise operators: one kernel each, output shape by broadcasting."""

from __future__ import annotations

from gnnpred.graph import DType, Role
from gnnpred.onnx_io.builder import Builder
from gnnpred.onnx_io.folding import fold_cast
from gnnpred.onnx_io.handlers import HANDLERS, Handler, Inputs, handles, optional, required
from gnnpred.onnx_io.nodes import Node
from gnnpred.onnx_io.values import Value, dtype_of

_UNARY = {
    "Relu": "relu", "Elu": "elu", "Selu": "selu", "Celu": "celu", "Mish": "mish", "HardSwish": "hardswish",
    "HardSigmoid": "hardsigmoid", "Swish": "silu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Softplus": "softplus",
    "Softsign": "softsign", "ThresholdedRelu": "threshold", "Shrink": "threshold", "Exp": "exp", "Log": "log",
    "Sqrt": "sqrt", "Reciprocal": "reciprocal", "Neg": "neg", "Abs": "abs", "Sign": "sign", "Erf": "erf",
    "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan", "Sinh": "sinh",
    "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Floor": "floor", "Ceil": "ceil",
    "Round": "round", "Not": "logical_not", "BitwiseNot": "bitwise_not",
}  # fmt: skip
_UNARY_TO_BOOL = {"IsNaN": "isnan", "IsInf": "isinf"}
_BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Mod": "mod", "Max": "maximum", "Min": "minimum",
    "Sum": "add", "Mean": "add", "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
    "BitShift": "shift", "PRelu": "prelu",
}  # fmt: skip
_BINARY_TO_BOOL = {
    "Equal": "equal", "Less": "less", "LessOrEqual": "less_equal", "Greater": "greater",
    "GreaterOrEqual": "greater_equal", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor",
}  # fmt: skip


def _unary(kind: str, dtype: DType | None = None) -> Handler:
    def handler(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
        x = required(inputs, 0)
        return [builder.emit(kind, [x], x.shape, dtype or x.dtype)]

    return handler


def _binary(kind: str, dtype: DType | None = None) -> Handler:
    def handler(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
        operands = [value for value in inputs if value is not None]
        first = required(operands, 0)
        if len(operands) == 1:  # Sum, Max, Min of one tensor
            return [first]
        result = first
        for operand in operands[1:]:
            shape = builder.broadcast(result.shape, operand.shape)
            result = builder.emit(kind, [result, operand], shape, dtype or _common_dtype(first, operand))
        return [result]

    return handler


def _common_dtype(first: Value, second: Value) -> DType:
    # ONNX wants equal types; half-converted files sometimes leave a float32 scalar beside half data
    if first.dtype is second.dtype or second.num_elements == 1 or first.num_elements > 1:
        return first.dtype
    return second.dtype


for _op_type, _kind in _UNARY.items():
    HANDLERS["", _op_type] = _unary(_kind)
for _op_type, _kind in _UNARY_TO_BOOL.items():
    HANDLERS["", _op_type] = _unary(_kind, DType.BOOL)
for _op_type, _kind in _BINARY.items():
    HANDLERS["", _op_type] = _binary(_kind)
for _op_type, _kind in _BINARY_TO_BOOL.items():
    HANDLERS["", _op_type] = _binary(_kind, DType.BOOL)


@handles("LeakyRelu")
def leaky_relu(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return [builder.emit("leaky_relu", [x], x.shape)]


@handles("Gelu")
def gelu(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    kind = "gelu_tanh" if node.text("approximate", "none") == "tanh" else "gelu"
    return [builder.emit(kind, [x], x.shape)]


@handles("Clip")
def clip(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    low = node.get("min") if len(inputs) < 2 else builder.number(optional(inputs, 1))
    high = node.get("max") if len(inputs) < 3 else builder.number(optional(inputs, 2))
    if low == 0 and high == 6:
        return [builder.emit("relu6", [x], x.shape)]
    limits = {name: value for name, value in (("min", low), ("max", high)) if value is not None}
    tensors = [x, *(value for value in inputs[1:] if value is not None and value.depends_on_data)]
    return [builder.emit("clamp", tensors, x.shape, **limits)]


@handles("Pow")
def power(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    base, exponent = required(inputs, 0), required(inputs, 1)
    number = builder.number(exponent)
    if number is not None and exponent.rank <= base.rank:
        return [builder.emit("pow_scalar", [base], base.shape, exponent=number)]
    return [builder.emit("pow", [base, exponent], builder.broadcast(base.shape, exponent.shape), base.dtype)]


@handles("Where")
def where(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    condition, first, second = (required(inputs, position) for position in range(3))
    shape = builder.broadcast(condition.shape, first.shape, second.shape)
    return [builder.emit("where", [condition, first, second], shape, _common_dtype(first, second))]


@handles("Dropout")
def dropout(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    if builder.opset >= 12:
        ratio_input = optional(inputs, 1)
        ratio = 0.5 if ratio_input is None else builder.number(ratio_input)
    else:
        ratio = node.get("ratio", 0.5)
    if ratio == 0:  # frameworks return the input
        return [x, builder.constant([True])][: len(node.outputs)]
    attributes = {} if ratio is None else {"ratio": float(ratio)}
    if len(node.outputs) > 1 and node.outputs[1]:
        return builder.emit_multi("dropout", [x], [x.shape, x.shape], [x.dtype, DType.BOOL], **attributes)
    return [builder.emit("dropout", [x], x.shape, **attributes)]


@handles("Cast")
def cast(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    dtype = dtype_of(node.get("to", 0), f"node {node.label}")
    return [cast_to(builder, required(inputs, 0), dtype)]


@handles("CastLike")
def cast_like(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return [cast_to(builder, required(inputs, 0), required(inputs, 1).dtype)]


def cast_to(builder: Builder, value: Value, dtype: DType) -> Value:
    """``value`` in ``dtype``; nothing happens where it has that type already."""
    if value.dtype is dtype:
        return value
    if value.is_constant:
        folded = fold_cast(builder, value, dtype)
        if folded is not None:
            return folded
    return builder.emit("cast", [value], value.shape, dtype)


@handles("QuantizeLinear")
def quantize(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, zero_point = required(inputs, 0), optional(inputs, 2)
    dtype = DType.UINT8 if zero_point is None else zero_point.dtype
    if zero_point is None and node.get("output_dtype", 0):
        dtype = dtype_of(node.get("output_dtype"), f"node {node.label}")
    return [builder.emit("quantize", [x, optional(inputs, 1)], x.shape, dtype)]


@handles("DequantizeLinear")
def dequantize(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x, scale = required(inputs, 0), required(inputs, 1)
    return [builder.emit("dequantize", [x, scale], x.shape, scale.dtype)]


@handles("DynamicQuantizeLinear")
def dynamic_quantize(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    return builder.emit_multi("quantize", [x], [x.shape, (), ()], [DType.UINT8, DType.FP32, DType.UINT8])


@handles("Bernoulli", "RandomNormalLike", "RandomUniformLike")
def random_like(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    x = required(inputs, 0)
    dtype = dtype_of(node.get("dtype"), f"node {node.label}") if node.get("dtype") else x.dtype
    return random_values(builder, x.shape, dtype)


@handles("RandomNormal", "RandomUniform")
def random(builder: Builder, node: Node, inputs: Inputs) -> list[Value]:
    return random_values(builder, node.get("shape", ()), dtype_of(node.get("dtype", 1), f"node {node.label}"))


def random_values(builder: Builder, shape: tuple[int, ...], dtype: DType) -> list[Value]:
    return builder.emit_multi("random", [], [shape], [dtype], role=Role.ACTIVATION)
