"""PyTorch module -> OpGraph, by watching its forward on the meta device.

A dispatch mode sees every ATen op that eager PyTorch would run, with shapes and strides but without
data; a function mode above it keeps composite functions whole (attention, layer norm, RNNs ...)
that ATen would otherwise show in pieces. Nothing is computed, so a ResNet-50 takes about a second.

The batch is bound to a large prime: every dimension that it divides is a batch axis. The graph is
returned at batch size 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gnnpred.errors import GnnpredError
from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec

TRACE_BATCH_SIZE = 1009  # prime, and no model dimension in use is a multiple of it

_DTYPES = {
    torch.float64: DType.FP64, torch.float32: DType.FP32, torch.float16: DType.FP16, torch.bfloat16: DType.BF16,
    torch.int64: DType.INT64, torch.int32: DType.INT32, torch.int16: DType.INT16, torch.int8: DType.INT8,
    torch.uint8: DType.UINT8, torch.bool: DType.BOOL, torch.complex64: DType.COMPLEX64,
    torch.complex128: DType.COMPLEX64, torch.float8_e4m3fn: DType.FP8, torch.float8_e5m2: DType.FP8,
}  # fmt: skip

# ATen name (without the in-place underscore) -> kind. Ops with attributes have a function in _RECORDERS.
_VIEW_KINDS = {
    "view": "view", "_unsafe_view": "view", "_reshape_alias": "view", "unsqueeze": "view", "squeeze": "view",
    "view_as_real": "view", "view_as_complex": "view", "real": "slice", "imag": "slice",
    "slice": "slice", "select": "slice", "narrow": "slice", "as_strided": "slice", "unfold": "slice",
    "diagonal": "slice", "expand": "expand", "alias": "view", "detach": "view", "lift_fresh": "view",
    "split": "split", "split_with_sizes": "split", "unbind": "split", "chunk": "split",
    "unsafe_split": "split", "unsafe_chunk": "split", "unsafe_split_with_sizes": "split",
}  # fmt: skip
_TRANSPOSES = ("permute", "transpose", "t", "numpy_T", "movedim")
_UNARY_KINDS = {
    name: name
    for name in (
        "relu", "silu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus", "exp", "log", "sqrt",
        "rsqrt", "reciprocal", "neg", "abs", "erf", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
        "asinh", "acosh", "atanh", "floor", "ceil", "round", "trunc", "selu", "logical_not", "isnan", "isinf",
        "bitwise_not", "square", "sign", "threshold", "tril", "flip",
    )
} | {
    "relu6": "relu6", "elu": "elu", "celu": "celu", "leaky_relu": "leaky_relu", "rrelu_with_noise": "leaky_relu",
    "log_sigmoid_forward": "softplus", "sgn": "sign", "expm1": "exp", "log1p": "log", "log2": "log",
    "log10": "log", "exp2": "exp", "triu": "tril", "logit": "log", "nan_to_num": "where", "positive": "copy",
}  # fmt: skip
_BINARY_KINDS = {
    "add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "div": "div", "true_divide": "div", "pow": "pow",
    "remainder": "mod", "fmod": "mod", "floor_divide": "div", "maximum": "maximum", "minimum": "minimum",
    "fmax": "maximum", "fmin": "minimum", "where": "where", "eq": "equal", "lt": "less", "le": "less_equal",
    "gt": "greater", "ge": "greater_equal", "ne": "not_equal", "logical_and": "logical_and",
    "logical_or": "logical_or", "logical_xor": "logical_xor", "bitwise_and": "bitwise_and",
    "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor", "__and__": "logical_and", "__or__": "logical_or",
    "__xor__": "logical_xor", "lerp": "lerp", "addcmul": "addcmul", "addcdiv": "addcmul", "atan2": "atan2",
    "masked_fill": "where", "_prelu_kernel": "prelu", "prelu": "prelu", "bitwise_left_shift": "shift",
    "bitwise_right_shift": "shift", "__lshift__": "shift", "__rshift__": "shift", "xlogy": "mul",
}  # fmt: skip
_REDUCTION_KINDS = {
    "mean": "reduce_mean", "sum": "reduce_sum", "amax": "reduce_max", "amin": "reduce_min", "max": "reduce_max",
    "min": "reduce_min", "prod": "reduce_prod", "var": "reduce_var", "std": "reduce_var", "var_mean": "reduce_var",
    "std_mean": "reduce_var", "norm": "reduce_l2", "linalg_vector_norm": "reduce_l2", "logsumexp": "logsumexp",
    "argmax": "argmax", "argmin": "argmin", "cumsum": "cumsum", "cumprod": "cumprod", "all": "all", "any": "any",
}  # fmt: skip
_MOVEMENT_KINDS = {
    "constant_pad_nd": "pad", "reflection_pad1d": "pad", "reflection_pad2d": "pad", "reflection_pad3d": "pad",
    "replication_pad1d": "pad", "replication_pad2d": "pad", "replication_pad3d": "pad",
    "pixel_shuffle": "pixel_shuffle",
    "pixel_unshuffle": "pixel_shuffle", "channel_shuffle": "pixel_shuffle", "native_channel_shuffle": "pixel_shuffle",
    "roll": "roll", "repeat": "tile", "tile": "tile", "im2col": "im2col", "col2im": "col2im", "one_hot": "one_hot",
    "index_select": "gather", "take": "gather", "gather": "gather_elements", "scatter": "scatter",
    "scatter_add": "scatter", "index_add": "scatter", "index_put": "scatter", "_unsafe_index_put": "scatter",
    "index_copy": "scatter", "masked_scatter": "scatter", "scatter_reduce": "scatter", "slice_scatter": "scatter",
    "select_scatter": "scatter", "index_fill": "scatter", "topk": "topk", "sort": "sort", "argsort": "sort",
    "grid_sampler_2d": "grid_sample", "grid_sampler_3d": "grid_sample", "repeat_interleave": "tile",
    "_fft_r2c": "fft", "_fft_c2r": "fft", "_fft_c2c": "fft", "affine_grid_generator": "grid_sample",
    "rot90": "flip", "_embedding_bag": "embedding", "masked_select": "compress", "nonzero": "nonzero",
    "histc": "unique", "bincount": "unique", "searchsorted": "sort", "trunc_normal": "random",
}  # fmt: skip
# Ops that make a tensor from nothing but its arguments' shapes: their results are constants.
_CREATION_OPS = frozenset(
    (
        "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "zeros", "zeros_like",
        "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "arange", "linspace", "eye",
        "rand", "rand_like", "randn", "randn_like", "randint", "randperm", "randint_like", "bernoulli", "uniform",
        "normal", "scalar_tensor", "_efficientzerotensor", "empty_permuted", "tril_indices", "triu_indices",
        "hann_window", "exponential", "geometric", "resize",
    )
)  # fmt: skip


_repeats = [1]  # innermost last


@contextmanager
def repeated(num_times: int) -> Iterator[None]:
    """Ops recorded inside run ``num_times`` per step: the body of a loop that a network of ours writes out once."""
    _repeats.append(_repeats[-1] * num_times)
    try:
        yield
    finally:
        _repeats.pop()


def trace_module(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    batch_size: int = TRACE_BATCH_SIZE,
    name: str = "",
    train: bool = True,
) -> OpGraph:
    """The operator graph of one forward pass of ``module``, at batch size 1.

    ``example_inputs`` are positional (sequence) or keyword (mapping) arguments; their tensors must be
    on the meta device with the batch dimension ``batch_size``, a prime that divides no other
    dimension. ``train=False`` traces the module in eval mode. A module whose forward needs data
    (shapes that depend on values) raises GnnpredError.
    """
    if any(t.device.type != "meta" for t in (*module.parameters(), *module.buffers())):
        module = copy.deepcopy(module).to("meta")
    was_training = module.training
    module.train(train)
    recorder = _Recorder(batch_size)
    for parameter_name, parameter in module.named_parameters():
        recorder.add_parameter(parameter, parameter_name)
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    input_idxs = [recorder.add_input(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    try:
        with torch.no_grad(), torch.device("meta"), _DispatchWatcher(recorder), _FunctionWatcher(recorder):
            result = module(*args, **kwargs)
    except GnnpredError:
        raise
    except Exception as error:  # anything the module's own code raises
        reason = str(error).strip().splitlines()
        raise GnnpredError(
            f"cannot trace {name or type(module).__name__}: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    finally:
        module.train(was_training)
    return recorder.to_graph(input_idxs, _tensors_of(result), name)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in a module's result, dataclass-like model outputs included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in _tensors_of(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors_of(v)]
    if hasattr(value, "__dict__"):
        return [t for v in vars(value).values() for t in _tensors_of(v)]
    return []


class _Recorder:
    """Ops and tensors seen so far.

    A tensor is known by its storage and geometry, not by its Python object: views and shallow copies
    of one tensor are then the same tensor, and in-place ops rebind it.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.suspended = 0
        self.specs: list[TensorSpec] = []
        self.ops: list[Op] = []
        self._idx_by_key: dict[tuple, int] = {}
        self._base_key_by_storage: dict[int, tuple] = {}
        self._alive: list[Any] = []  # storages must outlive the trace: their addresses are keys

    # -- tensors ---------------------------------------------------------------------------------
    @staticmethod
    def _key(tensor: torch.Tensor) -> tuple:
        return (
            tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        )  # fmt: skip

    def _new_idx(self, tensor: torch.Tensor, role: Role, name: str = "") -> int:
        shape, batch_axes = [], []
        for axis, dim in enumerate(tensor.shape):
            if dim and dim % self.batch_size == 0 and role is not Role.PARAMETER:
                batch_axes.append(axis)
                dim //= self.batch_size
            shape.append(dim)
        self.specs.append(
            TensorSpec(tuple(shape), _DTYPES.get(tensor.dtype, DType.FP32), role, tuple(batch_axes), None, name)
        )
        return len(self.specs) - 1

    def _bind(self, tensor: torch.Tensor, idx: int) -> None:
        key = self._key(tensor)
        self._alive.append(tensor.untyped_storage())
        self._base_key_by_storage.setdefault(key[0], key)
        self._idx_by_key[key] = idx

    def add_parameter(self, tensor: torch.Tensor, name: str) -> None:
        self._bind(tensor, self._new_idx(tensor, Role.PARAMETER if tensor.requires_grad else Role.CONSTANT, name))

    def add_input(self, tensor: torch.Tensor) -> int:
        idx = self._new_idx(tensor, Role.INPUT)
        self._bind(tensor, idx)
        return idx

    def idx_of(self, value: torch.Tensor | float | int | bool) -> int:
        """Position of a known tensor; buffers, constants and Python numbers are added when first read."""
        if isinstance(value, torch.Tensor):
            key = self._key(value)
            idx = self._idx_by_key.get(key)
            if idx is None:
                idx = self._adopt(value, key)
            return idx
        dtype = DType.BOOL if isinstance(value, bool) else DType.INT64 if isinstance(value, int) else DType.FP32
        if isinstance(value, int) and not isinstance(value, bool) and value and value % self.batch_size == 0:
            value = None  # a number that grows with the batch is no constant of the model
        if isinstance(value, complex):
            value = None
        self.specs.append(TensorSpec((), dtype, Role.CONSTANT, (), value))
        return len(self.specs) - 1

    def _adopt(self, tensor: torch.Tensor, key: tuple) -> int:
        """A tensor that no op announced: another view of a known storage (as_strided_), or a constant."""
        base_idx = self._idx_by_key.get(self._base_key_by_storage.get(key[0], ()))
        if base_idx is None or self.specs[base_idx].role is Role.CONSTANT:
            idx = self._new_idx(tensor, Role.CONSTANT)
        elif self._same_shape(base_idx, tensor):
            idx = base_idx
        else:
            role = self._result_role((base_idx,))
            idx = self._new_idx(tensor, role)
            self.ops.append(Op("view", (base_idx,), (idx,)))
        self._bind(tensor, idx)
        return idx

    def _same_shape(self, idx: int, tensor: torch.Tensor) -> bool:
        spec = self.specs[idx]
        scaled = tuple(d * self.batch_size if axis in spec.batch_axes else d for axis, d in enumerate(spec.shape))
        return scaled == tuple(tensor.shape)

    # -- ops -------------------------------------------------------------------------------------
    def record(
        self,
        kind: str,
        inputs: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        attributes: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Add one op; results of constants alone stay constants and add nothing."""
        input_idxs = tuple(self.idx_of(value) for value in inputs)
        role = self._result_role(input_idxs)
        output_idxs = [self._new_idx(tensor, role) for tensor in outputs]
        for tensor, idx in zip(outputs, output_idxs, strict=True):
            self._bind(tensor, idx)
        if role is not Role.CONSTANT:
            self.ops.append(Op(kind, input_idxs, tuple(output_idxs), dict(attributes or {}), repeats=_repeats[-1]))
        return output_idxs

    def _result_role(self, input_idxs: Sequence[int]) -> Role:
        roles = {self.specs[idx].role for idx in input_idxs}
        if roles & {Role.INPUT, Role.ACTIVATION}:
            return Role.ACTIVATION
        if roles & {Role.PARAMETER, Role.PARAMETER_DERIVED}:
            return Role.PARAMETER_DERIVED
        return Role.CONSTANT

    def record_in_place(
        self, kind: str, target: torch.Tensor, inputs: Sequence[Any], attributes: Mapping[str, Any] | None = None
    ) -> None:
        """An op that writes into ``target``: the tensor is rebound, and so is the one it is a view of."""
        storage_id = target.untyped_storage()._cdata
        target_key = self._key(target)
        self.record(kind, inputs, [target], attributes)
        base_key = self._base_key_by_storage.get(storage_id)
        if base_key is None or base_key == target_key:
            return
        written_idx = self._idx_by_key[target_key]
        base_idx = self._idx_by_key[base_key]
        if self.specs[base_idx].role is Role.PARAMETER:
            return
        role = self._result_role((base_idx, written_idx))
        old = self.specs[base_idx]
        self.specs.append(TensorSpec(old.shape, old.dtype, role, old.batch_axes))
        self._idx_by_key[base_key] = len(self.specs) - 1
        if role is not Role.CONSTANT:
            self.ops.append(Op("view", (written_idx, base_idx), (len(self.specs) - 1,)))

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take results of a creation op as new constants, whatever their storage held before."""
        for tensor in tensors:
            self._bind(tensor, self._new_idx(tensor, Role.CONSTANT))

    # -- result ----------------------------------------------------------------------------------
    def to_graph(self, input_idxs: list[int], results: list[torch.Tensor], name: str) -> OpGraph:
        """The graph of everything that reaches a result; unused tensors are dropped."""
        outputs = list(
            dict.fromkeys(self._idx_by_key[key] for t in results if (key := self._key(t)) in self._idx_by_key)
        )
        needed = set(outputs)
        kept: list[Op] = []
        for op in reversed(self.ops):
            if any(idx in needed for idx in op.outputs):
                needed.update(op.inputs)
                kept.append(op)
        kept.reverse()
        used = dict.fromkeys(input_idxs)
        for op in kept:
            used.update(dict.fromkeys(op.inputs))
            used.update(dict.fromkeys(op.outputs))
        used.update(dict.fromkeys(idx for idx, spec in enumerate(self.specs) if spec.role is Role.PARAMETER))
        used.update(dict.fromkeys(outputs))
        new_idx = {old: new for new, old in enumerate(used)}
        return OpGraph(
            tensors=tuple(self.specs[old] for old in used),
            ops=tuple(
                replace(op, inputs=tuple(new_idx[i] for i in op.inputs), outputs=tuple(new_idx[i] for i in op.outputs))
                for op in kept
            ),
            inputs=tuple(new_idx[i] for i in input_idxs),
            outputs=tuple(new_idx[i] for i in outputs),
            batch_size=1,
            name=name,
        )


class _DispatchWatcher(TorchDispatchMode):
    """Sees every ATen op below autograd."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder.suspended:
            return func(*args, **kwargs)
        packet = func.overloadpacket
        name = packet.__name__
        mutates = func._schema.is_mutable and name.endswith("_") and not name.endswith("__")
        base_name = name[:-1] if mutates else name
        result = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        if not outputs:
            return result
        _record_aten(recorder, base_name, func._overloadname, args, kwargs, outputs, mutates)
        return result


def _record_aten(
    recorder: _Recorder, name: str, overload: str, args: tuple, kwargs: dict, outputs: list[torch.Tensor], mutates: bool
) -> None:
    if name in _CREATION_OPS or name in ("fill", "zero"):
        if mutates and name in ("fill", "zero"):
            recorder.record_in_place("fill", args[0], [])
        else:
            recorder.forget(outputs)
        return
    if name == "copy":
        kind = "copy" if args[0].dtype == args[1].dtype else "cast"
        recorder.record_in_place(kind, args[0], [args[1]])
        return
    if mutates and (name in _VIEW_KINDS or name in _TRANSPOSES):
        return  # unsqueeze_ and the like: the new geometry is adopted when it is read
    if name in _VIEW_KINDS or name in _TRANSPOSES:
        _record_view(recorder, name, args, outputs)
        return
    special = _RECORDERS.get(name)
    if special is not None and not mutates:
        special(recorder, args, kwargs, outputs)
        return
    kind, attributes = _kind_of(name, args, kwargs)
    inputs = _data_inputs(name, args, kwargs)
    if mutates:
        recorder.record_in_place(kind, args[0], inputs, attributes)
    else:
        recorder.record(kind, inputs, outputs, attributes)


def _kind_of(name: str, args: tuple, kwargs: dict) -> tuple[str, dict[str, Any]]:
    if name in _UNARY_KINDS:
        return _UNARY_KINDS[name], {}
    if name in _BINARY_KINDS:
        return _BINARY_KINDS[name], {}
    if name in ("hardtanh", "clamp", "clamp_min", "clamp_max"):
        low, high = (*args[1:3], None, None)[:2]
        low, high = kwargs.get("min_val", kwargs.get("min", low)), kwargs.get("max_val", kwargs.get("max", high))
        if name == "clamp_max":
            low, high = None, args[1]
        if low == 0 and high == 6:
            return "relu6", {}
        return ("hardtanh" if name == "hardtanh" else "clamp"), {
            key: float(value) for key, value in (("min", low), ("max", high)) if isinstance(value, (int, float))
        }
    if name == "gelu":
        return ("gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu"), {}
    if name in _REDUCTION_KINDS:
        rank = args[0].dim()
        axes = args[1] if len(args) > 1 else kwargs.get("dim")
        if name in ("norm", "linalg_vector_norm"):
            axes = args[2] if len(args) > 2 else kwargs.get("dim")
        if isinstance(axes, (bool, float, torch.Tensor)):
            axes = None
        if isinstance(axes, int):
            axes = [axes]
        axes = tuple(sorted(a % max(rank, 1) for a in axes)) if axes else tuple(range(rank))
        return _REDUCTION_KINDS[name], {"axes": axes}
    if name in _MOVEMENT_KINDS:
        kind = _MOVEMENT_KINDS[name]
        attributes = {"axis": args[1] % args[0].dim()} if name in ("gather", "index_select") and args[0].dim() else {}
        return kind, attributes
    if name.startswith(("upsample_", "_upsample_")):
        return "resize", {"mode": name.lstrip("_").removeprefix("upsample_").rstrip("0123456789d")}
    return "unsupported", {"op_type": name}


def _data_inputs(name: str, args: tuple, kwargs: dict) -> list[Any]:
    """Tensors among the arguments; for binary ops the Python numbers too, in order."""
    if name in _BINARY_KINDS:
        limit = 3 if name in ("where", "lerp", "addcmul", "addcdiv", "masked_fill") else 2
        inputs = [a for a in args[:limit] if isinstance(a, (torch.Tensor, int, float, bool))]
        if name == "rsub":
            inputs.reverse()
        return inputs
    return [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]


def _record_view(recorder: _Recorder, name: str, args: tuple, outputs: list[torch.Tensor]) -> None:
    source = args[0]
    if len(outputs) == 1 and recorder._key(outputs[0]) == recorder._key(source):
        return
    source_key_idx = recorder.idx_of(source)
    if name in _TRANSPOSES:
        rank = source.dim()
        if name == "permute":
            axes = [a % rank for a in args[1]]
        else:
            axes = list(range(rank))
            first, second = (0, 1) if name == "t" else (args[1] % max(rank, 1), args[2] % max(rank, 1))
            if rank > 1:
                axes[first], axes[second] = axes[second], axes[first]
        if axes == sorted(axes):
            for output in outputs:
                recorder._bind(output, source_key_idx)
            return
        recorder.record("transpose", [source], outputs, {"axes": tuple(axes)})
        return
    kind = _VIEW_KINDS[name]
    if len(outputs) == 1 and outputs[0].shape == source.shape and outputs[0].stride() == source.stride():
        recorder._bind(outputs[0], source_key_idx)  # a whole slice, detach, an expand to the same shape
        return
    attributes: dict[str, Any] = {}
    if kind in ("slice", "split") and name not in ("as_strided", "real", "imag"):
        axis = args[2] if name in ("split", "split_with_sizes", "unsafe_split", "chunk") and len(args) > 2 else None
        if name in ("slice", "select", "narrow", "unbind", "unfold"):
            axis = args[1] if len(args) > 1 else 0
        attributes = {"axis": (axis or 0) % max(source.dim(), 1)}
    recorder.record(kind, [source], outputs, attributes)


# -- ops with their own attributes -----------------------------------------------------------------
def _is_parameter(recorder: _Recorder, tensor: torch.Tensor) -> bool:
    return recorder.specs[recorder.idx_of(tensor)].role in (Role.PARAMETER, Role.PARAMETER_DERIVED)


def _record_convolution(recorder, args, kwargs, outputs):
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args[:9]
    rank = weight.dim() - 2

    def spread(values):
        values = tuple(values)
        return values * rank if len(values) == 1 else values

    if groups >= recorder.batch_size and groups % recorder.batch_size == 0:
        groups //= recorder.batch_size  # one group per sample (conditional convolution): the weight carries the batch

    recorder.record(
        "conv_transpose" if transposed else "conv",
        [x, weight, *([bias] if bias is not None else [])],
        outputs,
        {"kernel": tuple(weight.shape[2:]), "stride": spread(stride), "dilation": spread(dilation),
         "padding": spread(padding), "groups": groups},
    )  # fmt: skip


def _record_product(recorder, a, b, bias, outputs):
    """matmul of data by data, or ``linear`` where the right factor is a matrix of parameters."""
    if b.dim() == 2 and _is_parameter(recorder, b) and not _is_parameter(recorder, a):
        recorder.record("linear", [a, b, *([bias] if bias is not None else [])], outputs)
    else:
        recorder.record("matmul", [a, b], outputs)
        if bias is not None:
            recorder.record("add", [outputs[0], bias], outputs)


def _record_addmm(recorder, args, kwargs, outputs):
    bias, a, b = args[:3]
    _record_product(recorder, a, b, bias if kwargs.get("beta", 1) else None, outputs)


def _record_mm(recorder, args, kwargs, outputs):
    _record_product(recorder, args[0], args[1], None, outputs)


def _norm_inputs(*tensors):
    return [t for t in tensors if t is not None]


def _record_native_layer_norm(recorder, args, kwargs, outputs):
    size = 1
    for dim in args[1]:
        size *= dim
    recorder.record("layer_norm", _norm_inputs(args[0], *args[2:4]), outputs[:1], {"normalized_size": size})


def _record_native_group_norm(recorder, args, kwargs, outputs):
    recorder.record("group_norm", _norm_inputs(*args[:3]), outputs[:1], {"groups": args[6]})


def _record_batch_norm(recorder, args, kwargs, outputs):
    recorder.record("batch_norm", _norm_inputs(*args[:3]), outputs[:1])


def _record_softmax(kind):
    def record(recorder, args, kwargs, outputs):
        recorder.record(kind, [args[0]], outputs, {"axis": args[1] % max(args[0].dim(), 1)})

    return record


def _record_pool(kind):
    def record(recorder, args, kwargs, outputs):
        kernel = tuple(args[1])
        stride = tuple(args[2]) if len(args) > 2 and args[2] else kernel
        rank = max(len(kernel), len(stride))
        kernel = kernel * rank if len(kernel) == 1 else kernel
        stride = stride * rank if len(stride) == 1 else stride
        recorder.record(kind, [args[0]], outputs[:1], {"kernel": kernel, "stride": stride})

    return record


def _record_adaptive_pool(kind):
    def record(recorder, args, kwargs, outputs):
        if all(size == 1 for size in args[1]):
            rank = args[0].dim()
            kind_of_one = "reduce_mean" if "avg" in kind else "reduce_max"
            recorder.record(kind_of_one, [args[0]], outputs[:1], {"axes": tuple(range(rank - len(args[1]), rank))})
        else:
            recorder.record(kind, [args[0]], outputs[:1], {"output_size": tuple(args[1])})

    return record


def _record_embedding(recorder, args, kwargs, outputs):
    recorder.record("embedding", [args[0], args[1]], outputs)


def _record_index(recorder, args, kwargs, outputs):
    indices = [t for t in args[1] if t is not None]
    axis = next((i for i, t in enumerate(args[1]) if t is not None), 0)
    recorder.record("gather", [args[0], *indices], outputs, {"axis": axis})


def _record_cat(kind):
    def record(recorder, args, kwargs, outputs):
        axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        tensors = [t for t in args[0] if t.numel() or t.dim() > 1]
        recorder.record(kind, tensors, outputs, {"axis": axis % max(outputs[0].dim(), 1)})

    return record


def _record_clone(recorder, args, kwargs, outputs):
    recorder.record("copy", [args[0]], outputs)


def _record_to_copy(recorder, args, kwargs, outputs):
    if isinstance(args[0], torch.Tensor) and recorder.specs[recorder.idx_of(args[0])].role is Role.CONSTANT:
        recorder.forget(outputs)
        return
    recorder.record("copy" if args[0].dtype == outputs[0].dtype else "cast", [args[0]], outputs)


def _record_glu(recorder, args, kwargs, outputs):
    axis = args[1] if len(args) > 1 else -1
    recorder.suspended += 1
    try:
        value, gate = torch.chunk(args[0], 2, dim=axis)
        activated = torch.sigmoid(gate)
    finally:
        recorder.suspended -= 1
    recorder.record("split", [args[0]], [value, gate], {"axis": axis % args[0].dim()})
    recorder.record("sigmoid", [gate], [activated])
    recorder.record("mul", [value, activated], outputs)


def _record_native_dropout(recorder, args, kwargs, outputs):
    recorder.record("dropout", [args[0]], outputs[:1], {"ratio": float(args[1])})


def _record_weight_norm(recorder, args, kwargs, outputs):
    recorder.record("l2_norm", list(args[:2]), outputs[:1])


def _record_loss(kind):
    def record(recorder, args, kwargs, outputs):
        recorder.record(kind, list(args[:2]), outputs[:1])

    return record


def _record_baddbmm(recorder, args, kwargs, outputs):
    recorder.record("matmul", [args[1], args[2]], outputs)
    if kwargs.get("beta", 1):
        recorder.record("add", [outputs[0], args[0]], outputs)


_RECORDERS = {
    "convolution": _record_convolution,
    "addmm": _record_addmm,
    "mm": _record_mm,
    "bmm": _record_mm,
    "mv": _record_mm,
    "dot": _record_mm,
    "baddbmm": _record_baddbmm,
    "native_layer_norm": _record_native_layer_norm,
    "native_group_norm": _record_native_group_norm,
    "native_batch_norm": _record_batch_norm,
    "_native_batch_norm_legit": _record_batch_norm,
    "_native_batch_norm_legit_functional": _record_batch_norm,
    "cudnn_batch_norm": _record_batch_norm,
    "_batch_norm_with_update": _record_batch_norm,
    "_softmax": _record_softmax("softmax"),
    "_safe_softmax": _record_softmax("softmax"),
    "_log_softmax": _record_softmax("log_softmax"),
    "max_pool2d_with_indices": _record_pool("max_pool"),
    "max_pool3d_with_indices": _record_pool("max_pool"),
    "avg_pool1d": _record_pool("avg_pool"),
    "avg_pool2d": _record_pool("avg_pool"),
    "avg_pool3d": _record_pool("avg_pool"),
    "_adaptive_avg_pool2d": _record_adaptive_pool("adaptive_avg_pool"),
    "_adaptive_avg_pool3d": _record_adaptive_pool("adaptive_avg_pool"),
    "adaptive_max_pool2d": _record_adaptive_pool("adaptive_max_pool"),
    "embedding": _record_embedding,
    "index": _record_index,
    "_unsafe_index": _record_index,
    "cat": _record_cat("concat"),
    "stack": _record_cat("stack"),
    "clone": _record_clone,
    "_to_copy": _record_to_copy,
    "glu": _record_glu,
    "native_dropout": _record_native_dropout,
    "_weight_norm_interface": _record_weight_norm,
    "mse_loss": _record_loss("mse_loss"),
    "binary_cross_entropy_with_logits": _record_loss("bce_loss"),
    "nll_loss_forward": _record_loss("cross_entropy"),
    "nll_loss2d_forward": _record_loss("cross_entropy"),
}


# -- composite functions ---------------------------------------------------------------------------
class _FunctionWatcher(TorchFunctionMode):
    """Keeps composite functions whole: runs them unseen and records one op."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            return self._run_attention_open(func, args, kwargs)
        handler = _FUNCTIONS.get(func)
        if handler is None or self.recorder.suspended:
            return func(*args, **kwargs)
        self.recorder.suspended += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.recorder.suspended -= 1
        handler(self.recorder, args, kwargs, result)
        return result

    def _run_attention_open(self, func, args, kwargs):
        # Inside its own handler a mode is off; re-entering it would come straight back here, so the
        # Python function's own override check is silenced while its parts are watched.
        check = functional.has_torch_function
        functional.has_torch_function = lambda _: False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            functional.has_torch_function = check


def _argument(args, kwargs, position, name, default=None):
    return args[position] if len(args) > position else kwargs.get(name, default)


def _on_linear(recorder, args, kwargs, result):
    x, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    bias = _argument(args, kwargs, 2, "bias")
    recorder.record("linear", [x, weight, *([bias] if bias is not None else [])], [result])


def _on_matmul(recorder, args, kwargs, result):
    a, b = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "other")
    _record_product(recorder, a, b, None, [result])


def _on_rmatmul(recorder, args, kwargs, result):
    _record_product(recorder, args[1], args[0], None, [result])


def _on_sdpa(recorder, args, kwargs, result):
    names = ("query", "key", "value")
    q, k, v = (_argument(args, kwargs, position, name) for position, name in enumerate(names))
    mask = _argument(args, kwargs, 3, "attn_mask")
    dropout = float(_argument(args, kwargs, 4, "dropout_p", 0.0) or 0.0)
    causal = bool(_argument(args, kwargs, 5, "is_causal", False))
    attributes: dict[str, Any] = {"causal": causal} | ({"dropout": dropout} if dropout else {})
    recorder.record("sdpa", [q, k, v, *([mask] if mask is not None else [])], [result], attributes)


def _on_layer_norm(recorder, args, kwargs, result):
    shape = _argument(args, kwargs, 1, "normalized_shape")
    size = 1
    for dim in [shape] if isinstance(shape, int) else shape:
        size *= dim
    tensors = _norm_inputs(
        _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "weight"), _argument(args, kwargs, 3, "bias")
    )
    recorder.record("layer_norm", tensors, [result], {"normalized_size": size})


def _on_rms_norm(recorder, args, kwargs, result):
    size = 1
    for dim in _argument(args, kwargs, 1, "normalized_shape"):
        size *= dim
    tensors = _norm_inputs(_argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "weight"))
    recorder.record("rms_norm", tensors, [result], {"normalized_size": size})


def _on_group_norm(recorder, args, kwargs, result):
    tensors = _norm_inputs(
        _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "weight"), _argument(args, kwargs, 3, "bias")
    )
    recorder.record("group_norm", tensors, [result], {"groups": _argument(args, kwargs, 1, "num_groups")})


def _on_instance_norm(recorder, args, kwargs, result):
    x = _argument(args, kwargs, 0, "input")
    tensors = _norm_inputs(x, _argument(args, kwargs, 3, "weight"), _argument(args, kwargs, 4, "bias"))
    recorder.record("group_norm", tensors, [result], {"groups": x.shape[1]})


def _on_batch_norm(recorder, args, kwargs, result):
    tensors = _norm_inputs(
        _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 3, "weight"), _argument(args, kwargs, 4, "bias")
    )
    recorder.record("batch_norm", tensors, [result])


def _on_dropout(recorder, args, kwargs, result):
    x = _argument(args, kwargs, 0, "input")
    ratio = float(_argument(args, kwargs, 1, "p", 0.5))
    training = _argument(args, kwargs, 2, "training", True)
    if not training or ratio == 0.0:  # PyTorch passes the tensor through
        recorder._bind(result, recorder.idx_of(x))
        return
    in_place = bool(_argument(args, kwargs, 3, "inplace", False))
    if in_place:
        recorder.record_in_place("dropout", x, [x], {"ratio": ratio})
    else:
        recorder.record("dropout", [x], [result], {"ratio": ratio})


def _on_local_response_norm(recorder, args, kwargs, result):
    size = _argument(args, kwargs, 1, "size")
    recorder.record("local_response_norm", [_argument(args, kwargs, 0, "input")], [result], {"size": size})


def _on_cross_entropy(recorder, args, kwargs, result):
    logits, target = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "target")
    recorder.record("cross_entropy", [logits, target], [result])


def _on_rnn(kind, gates):
    def record(recorder, args, kwargs, result):
        x = args[0]
        packed = isinstance(args[3], (list, tuple))  # (data, batch_sizes, state, weights, ...): a packed sequence
        weights, _has_biases, num_layers, _dropout, _train, bidirectional = args[3:9] if packed else args[2:8]
        batch_first = not packed and args[8]
        outputs, *states = result
        num_directions = 2 if bidirectional else 1
        per_layer = len(weights) // num_layers
        hidden_size = weights[0].shape[0] // gates
        layer_input = x
        for layer in range(num_layers):
            last = layer == num_layers - 1
            made = [outputs, *states] if last else [torch.empty_like(outputs)]
            recorder.record(
                kind,
                [layer_input, *weights[layer * per_layer : (layer + 1) * per_layer]],
                made,
                {
                    "hidden_size": hidden_size,
                    "num_directions": num_directions,
                    "num_steps_axis": 1 if batch_first else 0,
                },
            )
            layer_input = made[0]

    return record


_FUNCTIONS = {
    functional.linear: _on_linear,
    torch.matmul: _on_matmul,
    torch.Tensor.matmul: _on_matmul,
    torch.Tensor.__matmul__: _on_matmul,
    torch.Tensor.__rmatmul__: _on_rmatmul,
    functional.scaled_dot_product_attention: _on_sdpa,
    functional.layer_norm: _on_layer_norm,
    functional.rms_norm: _on_rms_norm,
    functional.group_norm: _on_group_norm,
    functional.instance_norm: _on_instance_norm,
    functional.batch_norm: _on_batch_norm,
    functional.dropout: _on_dropout,
    functional.dropout1d: _on_dropout,
    functional.dropout2d: _on_dropout,
    functional.dropout3d: _on_dropout,
    functional.alpha_dropout: _on_dropout,
    functional.local_response_norm: _on_local_response_norm,
    functional.cross_entropy: _on_cross_entropy,
    torch.lstm: _on_rnn("lstm", 4),
    torch.gru: _on_rnn("gru", 3),
    torch.rnn_tanh: _on_rnn("rnn", 1),
    torch.rnn_relu: _on_rnn("rnn", 1),
}
