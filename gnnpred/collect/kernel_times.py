"""Times of the operators inside a step, from torch.profiler: the rows that supervise single nodes.

Kernels are those that an ATen op launched (on a CPU the op's own time). Ops that ``gnnpred.corpus.operators`` has a kind
for become rows of their input shapes; the share of all others is counted.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from gnnpred.job import Precision

_PROFILED_STEPS = 3
_MAX_OTHER_OPS = 10  # that a row names
_BACKWARD_NODE = "autograd::engine::evaluate_function: "
_PRECISION_OF_DTYPE = {
    "float": Precision.FP32, "double": Precision.FP64, "c10::Half": Precision.FP16, "c10::BFloat16": Precision.BF16,
}  # fmt: skip
_TF32_KINDS = ("conv", "linear", "matmul")


class Kernel(NamedTuple):
    """What one op ran, as ``gnnpred.corpus.operators.operator_graph`` reads it."""

    kind: str
    phase: str  # fwd | bwd | bwd_data | bwd_weight
    precision: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepOperators:
    """Operators of one step: every kernel's median time in us and its number in a step, and what no kind covers."""

    times_us: Mapping[Kernel, float]
    calls: Mapping[Kernel, int]
    covered_share: float  # of the ops' total time that ``times_us`` holds
    other_shares: Mapping[str, float]  # ATen op -> share of the total, the largest

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a result."""
        return {
            "operators": [[*kernel, self.calls[kernel], time_us] for kernel, time_us in self.times_us.items()],
            "operator_time_share": self.covered_share,
            "other_operators": dict(self.other_shares),
        }


def profile_step(step: Callable[[], Any], *, device: str, precision: Precision) -> StepOperators:
    """Run ``step`` some times under the profiler. ``precision`` is the configuration's: it decides on TF32."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(_PROFILED_STEPS):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    dtypes = _dtypes_of(profiler)
    roots = [
        _Op(event, dtypes, device)
        for event in profiler.events()
        if event.cpu_parent is None and event.device_type == torch.autograd.DeviceType.CPU  # kernels are events too
    ]
    return operators_of(roots, precision=precision, num_steps=_PROFILED_STEPS)


def _dtypes_of(profiler: Any) -> dict[tuple[int, str], list[str]]:
    """Input types of ops by id and name: torch's own events carry them in its latest versions, their source always did."""
    results = profiler.profiler.kineto_results
    return {(each.correlation_id(), each.name()): each.dtypes() for each in results.events() if each.dtypes()}


class _Op:
    """An event of the profiler as this module reads it."""

    def __init__(self, event: Any, dtypes: Mapping[tuple[int, str], list[str]], device: str) -> None:
        self.name: str = event.name
        self.shapes: Sequence[Sequence[int]] = event.input_shapes or ()
        self.values: Sequence[Any] = event.concrete_inputs or ()
        self.dtypes: Sequence[str] = dtypes.get((event.id, event.name), ())
        self.children = [_Op(child, dtypes, device) for child in event.cpu_children]
        on_gpu = device == "cuda"
        self.total_us: float = event.device_time_total if on_gpu else event.cpu_time_total
        self.self_us: float = event.self_device_time_total if on_gpu else event.self_cpu_time_total


def operators_of(roots: Iterable[Any], *, precision: Precision, num_steps: int) -> StepOperators:
    """Kernels and shares of the ops under ``roots`` (name, shapes, values, dtypes, children, total_us, self_us)."""
    times: dict[Kernel, list[float]] = defaultdict(list)
    others: dict[str, float] = defaultdict(float)
    for root in roots:
        for kernel, op in _kernels(root, precision, in_backward=False):
            if kernel is None:
                others[op.name] += op.self_us
            else:
                times[kernel].append(op.total_us)
    covered_us = sum(map(sum, times.values()))
    total_us = covered_us + sum(others.values()) or 1.0
    largest = sorted(others.items(), key=lambda item: -item[1])[:_MAX_OTHER_OPS]
    return StepOperators(
        times_us={kernel: statistics.median(found) for kernel, found in times.items()},
        calls={kernel: max(1, round(len(found) / num_steps)) for kernel, found in times.items()},
        covered_share=covered_us / total_us,
        other_shares={name: time_us / total_us for name, time_us in largest if time_us > 0},
    )


def _kernels(op: Any, precision: Precision, *, in_backward: bool) -> Iterator[tuple[Kernel | None, Any]]:
    """Outermost ops that have a kind, and all others one by one with None."""
    in_backward = in_backward or op.name.startswith(_BACKWARD_NODE)
    kernel = _kernel_of(op, precision, in_backward=in_backward) if op.total_us > 0 else None
    yield kernel, op
    if kernel is None:
        for child in op.children:
            yield from _kernels(child, precision, in_backward=in_backward)


def _kernel_of(op: Any, precision: Precision, *, in_backward: bool) -> Kernel | None:
    read = (_BACKWARD_OPS if in_backward else _FORWARD_OPS).get(op.name)
    dtype = _dtype_of(op)
    if read is None or dtype is None:
        return None
    try:
        found = read(op)
    except (IndexError, TypeError, ValueError):  # an overload of other arguments
        return None
    if found is None or min(found[2]) < 0:
        return None
    kind, phase, shape = found
    if precision is Precision.TF32 and dtype is Precision.FP32 and kind in _TF32_KINDS:
        dtype = Precision.TF32
    return Kernel(kind, phase, str(dtype), tuple(int(size) for size in shape))


def _dtype_of(op: Any) -> Precision | None:
    """That of the first floating-point tensor among the op's arguments."""
    return next((_PRECISION_OF_DTYPE[name] for name in op.dtypes if name in _PRECISION_OF_DTYPE), None)


# ------------------------------------------------------------------------- ATen ops -> kind, phase, shape

_Found = tuple[str, str, tuple[int, ...]] | None


def _convolution(op: Any) -> _Found:
    """convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)"""
    return _conv_shape("fwd", op.shapes[0], op.shapes[1], op.values[3:9])


def _convolution_backward(op: Any) -> _Found:
    """convolution_backward(grad, input, weight, bias_sizes, stride, ..., groups, output_mask)"""
    of_input, of_weight = op.values[10][:2]
    phase = "bwd" if of_input and of_weight else "bwd_data" if of_input else "bwd_weight"
    return _conv_shape(phase, op.shapes[1], op.shapes[2], op.values[4:10])


def _conv_shape(phase: str, data: Sequence[int], weight: Sequence[int], values: Sequence[Any]) -> _Found:
    stride, padding, dilation, is_transposed, _, groups = values
    if len(data) != 4 or is_transposed or any(size != 1 for size in dilation):
        return None
    stride, padding = (list(each) * (2 // len(each)) for each in (stride, padding))
    filters, _, height, width = weight
    return "conv", phase, (*data, filters, height, width, *stride, *padding, groups)


def _addmm(op: Any) -> _Found:
    """addmm(bias, a, b): a linear layer."""
    return _product("linear", op.shapes[1], op.shapes[2])


def _mm(op: Any) -> _Found:
    """mm(a, b) outside the backward pass: a linear layer without bias."""
    return _product("linear", op.shapes[0], op.shapes[1])


def _bmm(op: Any) -> _Found:
    return _product("matmul", op.shapes[0], op.shapes[1])


def _baddbmm(op: Any) -> _Found:
    return _product("matmul", op.shapes[1], op.shapes[2])


def _product(kind: str, a: Sequence[int], b: Sequence[int]) -> _Found:
    (*batch, m, k), n = a, b[-1]
    return kind, "fwd", (prod(batch), m, n, k)


def _product_backward(kind: str, product: str) -> Callable[[Any], _Found]:
    """Of a backward node that holds one product (the weight's gradient alone) or two."""

    def read(op: Any) -> _Found:
        *batch, m, n = op.shapes[0]  # the gradient of the (m, n) result
        products = [each for each in _descendants(op) if each.name == product]
        if len(products) not in (1, 2):
            return None
        gradient = [*batch, m, n]
        # the input's gradient is (m, n) x (n, k), the weight's (k, m) x (m, n) or its transpose
        for a, b in (each.shapes[:2] for each in products):
            if list(a) == gradient:
                k, is_data = b[-1], True
            else:
                k, is_data = (a[-2] if list(b) == gradient else b[-1]), False
            if len(products) == 1:
                return kind, "bwd_data" if is_data else "bwd_weight", (prod(batch), m, n, k)
        return kind, "bwd", (prod(batch), m, n, k)

    return read


def _descendants(op: Any) -> Iterator[Any]:
    for child in op.children:
        yield child
        yield from _descendants(child)


def _attention(phase: str, *, query: int, mask: int | None, causal: int) -> Callable[[Any], _Found]:
    """Positions of the arguments; a mask, or keys of another length, have no kind."""

    def read(op: Any) -> _Found:
        (batch, heads, length, head_dim), keys = op.shapes[query : query + 2]
        has_mask = mask is not None and len(op.shapes[mask]) > 0
        if keys[2] != length or has_mask:
            return None
        return "sdpa", phase, (batch, heads, keys[1], length, head_dim, int(bool(op.values[causal])))

    return read


def _normalised(kind: str, phase: str, *, data: int, sizes: int) -> Callable[[Any], _Found]:
    def read(op: Any) -> _Found:
        columns = prod(op.values[sizes])
        return kind, phase, (prod(op.shapes[data]) // columns, columns)

    return read


def _batch_norm(phase: str) -> Callable[[Any], _Found]:
    """The first argument is the input, or its gradient: both have its shape."""

    def read(op: Any) -> _Found:
        batch, channels, *pixels = op.shapes[0]
        return "batch_norm", phase, (batch, channels, prod(pixels))

    return read


def _softmax(phase: str, axis: int) -> Callable[[Any], _Found]:
    def read(op: Any) -> _Found:
        shape = op.shapes[0]
        if op.values[axis] not in (-1, len(shape) - 1):
            return None
        return "softmax", phase, (prod(shape[:-1]), shape[-1])

    return read


def _unary(kind: str, phase: str = "fwd") -> Callable[[Any], _Found]:
    def read(op: Any) -> _Found:
        return kind, phase, _rows_and_columns(op.shapes[0])

    return read


def _binary(kind: str) -> Callable[[Any], _Found]:
    """Of two tensors of one shape; broadcasting and numbers move other bytes."""

    def read(op: Any) -> _Found:
        a, b = op.shapes[:2]
        return (kind, "fwd", _rows_and_columns(a)) if list(a) == list(b) else None

    return read


def _rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    if not shape:
        raise ValueError("a number, not a tensor")
    return prod(shape[:-1]), shape[-1]


_ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "tanh": "tanh", "silu": "silu", "sigmoid": "sigmoid", "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid", "hardtanh": "relu6", "leaky_relu": "leaky_relu", "elu": "elu", "mish": "mish",
}  # fmt: skip

_FORWARD_OPS: dict[str, Callable[[Any], _Found]] = {
    "aten::convolution": _convolution,
    "aten::addmm": _addmm,
    "aten::_addmm_activation": _addmm,
    "aten::mm": _mm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _baddbmm,
    "aten::_scaled_dot_product_flash_attention": _attention("fwd", query=0, mask=None, causal=4),
    "aten::_scaled_dot_product_efficient_attention": _attention("fwd", query=0, mask=3, causal=6),
    "aten::_scaled_dot_product_cudnn_attention": _attention("fwd", query=0, mask=3, causal=6),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention("fwd", query=0, mask=5, causal=4),
    "aten::native_layer_norm": _normalised("layer_norm", "fwd", data=0, sizes=1),
    "aten::_fused_rms_norm": _normalised("rms_norm", "fwd", data=0, sizes=1),
    "aten::_batch_norm_impl_index": _batch_norm("fwd"),
    "aten::_softmax": _softmax("fwd", 1),
    "aten::native_dropout": _unary("dropout"),
    "aten::add": _binary("add"),
    "aten::add_": _binary("add"),
    "aten::mul": _binary("mul"),
    "aten::mul_": _binary("mul"),
    **{f"aten::{name}{end}": _unary(kind) for name, kind in _ACTIVATIONS.items() for end in ("", "_")},
}
# Sums of gradients are adds too, but no backward pass of one.
_BACKWARD_OPS: dict[str, Callable[[Any], _Found]] = {
    "aten::convolution_backward": _convolution_backward,
    "AddmmBackward0": _product_backward("linear", "aten::mm"),
    "MmBackward0": _product_backward("linear", "aten::mm"),
    "BmmBackward0": _product_backward("matmul", "aten::bmm"),
    "aten::_scaled_dot_product_flash_attention_backward": _attention("bwd", query=1, mask=None, causal=11),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention("bwd", query=1, mask=4, causal=11),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention("bwd", query=1, mask=8, causal=14),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention("bwd", query=1, mask=8, causal=7),
    "aten::native_layer_norm_backward": _normalised("layer_norm", "bwd", data=1, sizes=2),
    "aten::_fused_rms_norm_backward": _normalised("rms_norm", "bwd", data=1, sizes=2),
    "aten::batch_norm_backward": _batch_norm("bwd"),
    "aten::native_batch_norm_backward": _batch_norm("bwd"),
    "aten::cudnn_batch_norm_backward": _batch_norm("bwd"),
    "aten::miopen_batch_norm_backward": _batch_norm("bwd"),
    "aten::_softmax_backward_data": _softmax("bwd", 2),
    "aten::native_dropout_backward": _unary("dropout", "bwd"),
    "aten::threshold_backward": _unary("relu", "bwd"),
    **{f"aten::{name}_backward": _unary(kind, "bwd") for name, kind in _ACTIVATIONS.items() if name != "relu"},
}
