"""Precision lowering: which type every tensor is stored in and every op computes in, and the casts in between.

``lower_precision`` works on the forward graph; backward ops (``passes.backward``) then inherit the types, because
autograd gives every gradient the type of the tensor it belongs to.

Pure precisions store every float tensor in one type. The mixed ones follow PyTorch's autocast, whose operator lists are
data (``autocast.toml``, source named there):

* weights that require a gradient are cast once per step and then reused (autocast's weight cache, ``cached_cast`` in
  aten/src/ATen/autocast_mode.cpp: fp32 leaves that require a gradient, to the half type only);
* everything else is cast again at each reader;
* elementwise ops and concat read mixed types without a cast kernel and give the widest one (PyTorch's type promotion;
  0-dimensional tensors do not take part).
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from gnnpred.errors import UsageError
from gnnpred.graph import AUTOCAST_KEY, Component, DType, Op, OpGraph, Role, TensorSpec
from gnnpred.job import ActivationRule, Precision
from gnnpred.op_kinds import Category, category_of

_STORAGE = {
    Precision.FP64: DType.FP64,
    Precision.FP32: DType.FP32,
    Precision.TF32: DType.FP32,
    Precision.FP16: DType.FP16,
    Precision.BF16: DType.BF16,
}
HALF_TYPES = {Precision.MIXED: DType.FP16, Precision.MIXED_BF16: DType.BF16}

# FP8 comes only from quantised files and stays what it is.
_LOWERABLE = frozenset({DType.FP64, DType.FP32, DType.TF32, DType.FP16, DType.BF16})
_WIDTH = {DType.FP8: 0, DType.FP16: 1, DType.BF16: 1, DType.FP32: 2, DType.TF32: 2, DType.FP64: 3}

_MATMUL_KINDS = frozenset({"linear", "matmul", "einsum", "sdpa"})
_CONV_KINDS = frozenset({"conv", "conv_transpose", "lstm", "gru", "rnn"})  # the cuDNN switch covers RNNs too

# Several kernels, of which only a later one is on the fp32 list: the input is read in its own type. Cross-entropy asks
# log_softmax for the type of the logits, so that only nll_loss runs in fp32 (cross_entropy_loss in
# aten/src/ATen/native/LossNLL.cpp).
_READS_OWN_TYPE = frozenset({"local_response_norm", "l2_norm", "cross_entropy"})
# fp32_set_opt_dtype ops that have a kernel reading half and writing fp32 only for fp16: softmax() in
# aten/src/ATen/native/SoftMax.cpp converts a bfloat16 input first.
_FUSED_UPCAST_FP16_ONLY = frozenset({"softmax", "log_softmax"})


class AutocastRule:
    """Names of the four lists of ``autocast.toml``, and of the default."""

    LOWER = "lower_precision"
    FP32 = "fp32"
    FP32_FUSED = "fp32_set_opt_dtype"
    PROMOTE = "promote"
    INPUT = "input"  # runs in the types of its inputs


@cache
def autocast_table() -> dict:
    """The autocast lists as stored in ``autocast.toml``."""
    return tomllib.loads(files("gnnpred.passes").joinpath("autocast.toml").read_text(encoding="utf-8"))


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of a framework version such as "2.4.1+cu121"; unknown ("") counts as the newest, (999, 0)."""
    parts = text.strip().lstrip("v").split(".")
    if not parts[0].isdigit():
        return (999, 0)
    minor = "".join(c for c in parts[1] if c.isdigit()) if len(parts) > 1 else ""
    return (int(parts[0]), int(minor or 0))


@cache
def autocast_rules(device_type: str = "cuda", framework_version: str = "") -> dict[str, str]:
    """Op kind -> list it is on, for ``device_type`` "cuda" or "cpu"; kinds that are on none are left out."""
    table = autocast_table()
    lists = table[device_type]
    version = parse_version(framework_version)
    since = lists.get("since", {})
    list_by_operator = {
        operator: rule
        for rule in (AutocastRule.LOWER, AutocastRule.FP32, AutocastRule.FP32_FUSED, AutocastRule.PROMOTE)
        for operator in lists[rule]
        if parse_version(since.get(operator, "0")) <= version
    }
    rules = {}
    for kind, operators in table["kinds"].items():
        for operator in [operators] if isinstance(operators, str) else operators:
            if operator in list_by_operator:
                rules[kind] = list_by_operator[operator]
                break
    return rules


def has_fused_upcast(kind: str, dtype: DType) -> bool:
    """Whether the fp32 kernel of ``kind`` reads an input of type ``dtype`` itself, without a cast kernel before it."""
    return dtype is DType.FP16 or kind not in _FUSED_UPCAST_FP16_ONLY


def lower_precision(
    graph: OpGraph,
    precision: Precision,
    *,
    activation_rule: ActivationRule = ActivationRule.AUTOCAST,
    tf32_matmul: bool = True,
    tf32_conv: bool = True,
    framework_version: str = "",
    autocast_device: str = "cuda",
) -> OpGraph:
    """The forward graph at ``precision``: storage types, a ``compute_dtype`` on every op, and cast ops.

    The file's own float types do not count: they are all taken as fp32 first, and casts between them are dropped
    (a note says so if any activation or weight was not fp32).

    ``tf32_matmul`` and ``tf32_conv`` are PyTorch's two TF32 switches and matter for ``tf32`` only.
    ``framework_version`` selects the autocast lists of that PyTorch ("" = the newest known).

    Raises UsageError for an unknown autocast device.
    """
    if autocast_device not in ("cuda", "cpu"):
        raise UsageError(f"autocast device must be cuda or cpu, got {autocast_device!r}")
    graph = _normalise_to_fp32(graph)
    if precision in _STORAGE:
        return _lower_pure(graph, precision, tf32_matmul=tf32_matmul, tf32_conv=tf32_conv)
    half = HALF_TYPES[precision]
    if activation_rule is ActivationRule.ALL_HALF:
        return _lower_all_half(graph, half)
    return _lower_autocast(graph, half, autocast_rules(autocast_device, framework_version))


def _retyped(tensor: TensorSpec, dtype: DType) -> TensorSpec:
    return TensorSpec(tensor.shape, dtype, tensor.role, tensor.batch_axes, tensor.value, tensor.name)


def _with_compute(op: Op, compute_dtype: DType | None, inputs: tuple[int, ...] | None = None) -> Op:
    return Op(
        op.kind,
        op.inputs if inputs is None else inputs,
        op.outputs,
        op.attributes,
        op.name,
        op.phase,
        op.component,
        compute_dtype,
        op.forward_op_idx,
        op.repeats,
    )


def _normalise_to_fp32(graph: OpGraph) -> OpGraph:
    """All floats fp32; casts between floats removed. A graph that is fp32 already comes back as it is."""
    tensors = graph.tensors
    odd = [t for t in tensors if t.dtype in _LOWERABLE and t.dtype is not DType.FP32]
    has_float_cast = any(_is_float_cast(op, tensors) for op in graph.ops)
    if not odd and not has_float_cast:
        return graph
    alias: dict[int, int] = {}
    ops = []
    for op in graph.ops:
        inputs = tuple(alias.get(i, i) for i in op.inputs) if alias else op.inputs
        if _is_float_cast(op, tensors):
            alias[op.outputs[0]] = inputs[0]
            continue
        ops.append(op if inputs == op.inputs else _with_compute(op, op.compute_dtype, inputs))
    notes = graph.notes
    types = sorted({str(t.dtype) for t in odd if t.role is not Role.CONSTANT})
    if types:
        notes = (
            *notes,
            f"the file stores floats as {', '.join(types)}; its own types and casts were set aside and the chosen "
            "precision applied to the whole model",
        )
    return graph.replace(
        tensors=tuple(_retyped(t, DType.FP32) if t.dtype in _LOWERABLE else t for t in tensors),
        ops=tuple(ops),
        outputs=tuple(alias.get(o, o) for o in graph.outputs),
        notes=notes,
    )


def _is_float_cast(op: Op, tensors: tuple[TensorSpec, ...]) -> bool:
    return (
        op.kind == "cast"
        and len(op.inputs) == 1
        and tensors[op.inputs[0]].dtype in _LOWERABLE
        and tensors[op.outputs[0]].dtype in _LOWERABLE
    )


def _compute_type(op: Op, dtypes: list[DType], widest: DType | None) -> DType:
    """Type that an op without a rule computes in: its widest float input, else a float result, else its first input."""
    if widest is not None:
        return widest
    if op.outputs and (not op.inputs or dtypes[op.outputs[0]].is_float):
        return dtypes[op.outputs[0]]
    return dtypes[op.inputs[0]] if op.inputs else DType.FP32


def _widest_float(indices: tuple[int, ...], dtypes: list[DType]) -> DType | None:
    widest = None
    for i in indices:
        dtype = dtypes[i]
        if dtype.is_float and (widest is None or _WIDTH[dtype] > _WIDTH[widest]):
            widest = dtype
    return widest


def _lower_pure(graph: OpGraph, precision: Precision, *, tf32_matmul: bool, tf32_conv: bool) -> OpGraph:
    storage = _STORAGE[precision]
    tensors = tuple(
        _retyped(t, storage) if t.dtype in _LOWERABLE and t.dtype is not storage else t for t in graph.tensors
    )
    dtypes = [t.dtype for t in tensors]
    tf32_kinds: set[str] = set()
    if precision is Precision.TF32:
        tf32_kinds |= _MATMUL_KINDS if tf32_matmul else set()
        tf32_kinds |= _CONV_KINDS if tf32_conv else set()
    ops = []
    for op in graph.ops:
        compute = _compute_type(op, dtypes, _widest_float(op.inputs, dtypes))
        if compute is DType.FP32 and op.kind in tf32_kinds:
            compute = DType.TF32
        ops.append(_with_compute(op, compute))
    return graph.replace(tensors=tensors, ops=tuple(ops))


@dataclass
class _Lowering:
    """The graph under construction: tensors keep their positions, cast results are appended."""

    tensors: list[TensorSpec]
    dtypes: list[DType]
    ops: list[Op]
    weight_cast: dict[int, int]  # parameter -> its half copy of this step

    def cast(self, tensor_idx: int, dtype: DType, pending: list[tuple[int, int]], *, cached: bool) -> int:
        """Position of ``tensor_idx`` in type ``dtype``; a new cast goes to ``pending`` as (source, result)."""
        if cached and tensor_idx in self.weight_cast:
            return self.weight_cast[tensor_idx]
        source = self.tensors[tensor_idx]
        role = Role.PARAMETER_DERIVED if source.role is Role.PARAMETER else source.role
        if role in (Role.INPUT, Role.CONSTANT):
            role = Role.ACTIVATION  # made at every step, unlike its source
        result = len(self.tensors)
        self.tensors.append(TensorSpec(source.shape, dtype, role, source.batch_axes, source.value, source.name))
        self.dtypes.append(dtype)
        pending.append((tensor_idx, result))
        if cached:
            self.weight_cast[tensor_idx] = result
        return result

    def append(self, op: Op, inputs: tuple[int, ...], compute: DType, pending: list[tuple[int, int]]) -> None:
        """Add ``op`` after the casts that feed it."""
        op_idx = len(self.ops) + len(pending)
        for source, result in pending:
            once = self.tensors[source].role is Role.PARAMETER
            self.ops.append(
                Op(
                    "cast",
                    (source,),
                    (result,),
                    component=Component.CAST,
                    compute_dtype=self.dtypes[result],
                    forward_op_idx=op_idx,
                    repeats=1 if once else op.repeats,
                )
            )
        self.ops.append(_with_compute(op, compute, inputs))

    def set_dtype(self, tensor_idx: int, dtype: DType) -> None:
        if self.dtypes[tensor_idx] is not dtype:
            self.dtypes[tensor_idx] = dtype
            self.tensors[tensor_idx] = _retyped(self.tensors[tensor_idx], dtype)

    def finish(self, graph: OpGraph) -> OpGraph:
        return graph.replace(tensors=tuple(self.tensors), ops=tuple(self.ops))


def _start(graph: OpGraph) -> _Lowering:
    return _Lowering(list(graph.tensors), [t.dtype for t in graph.tensors], [], {})


def _rule_of(op: Op, rules: dict[str, str], tensors: list[TensorSpec]) -> str:
    rule = rules.get(op.kind, AutocastRule.INPUT)
    if op.kind == "group_norm":
        # Instance norm is a batch norm inside PyTorch, which is on no list.
        shape = tensors[op.inputs[0]].shape
        if len(shape) > 1 and op.attributes.get("groups") == shape[1]:
            return AutocastRule.INPUT
    return rule


def _promoted(op: Op, state: _Lowering, weak: set[int]) -> DType | None:
    """Result type of an elementwise op by PyTorch's promotion: tensors with dimensions beat 0-dimensional ones."""
    strong = tuple(i for i in op.inputs if i not in weak and state.tensors[i].shape != ())
    result = _widest_float(strong, state.dtypes)
    return result if result is not None else _widest_float(op.inputs, state.dtypes)


# Ops whose output takes the type of the first input whatever types their parameters have.
_FOLLOWS_FIRST = frozenset({Category.NORM, Category.POOL, Category.RECURRENT})


def _lower_autocast(graph: OpGraph, half: DType, rules: dict[str, str]) -> OpGraph:
    state = _start(graph)
    tensors, dtypes = state.tensors, state.dtypes
    # Python numbers and values made without an input (random masks) take the type of what they meet.
    weak = {i for i, t in enumerate(tensors) if t.role is Role.CONSTANT and t.value is not None and t.num_elements == 1}
    for op in graph.ops:
        rule = _rule_of(op, rules, tensors)
        pending: list[tuple[int, int]] = []
        inputs = op.inputs
        if rule is not AutocastRule.INPUT:
            target = half
            if rule == AutocastRule.PROMOTE:
                target = _widest_float(inputs, dtypes) or DType.FP32
            elif rule != AutocastRule.LOWER:
                target = DType.FP32
            fused = op.kind in _READS_OWN_TYPE or rule == AutocastRule.FP32_FUSED
            new_inputs = []
            for i in inputs:
                dtype = dtypes[i]
                fits = dtype is target or dtype not in _LOWERABLE or dtype is DType.FP64
                if fits or (fused and has_fused_upcast(op.kind, dtype)):
                    new_inputs.append(i)
                else:
                    cached = target is half and tensors[i].role is Role.PARAMETER
                    new_inputs.append(state.cast(i, target, pending, cached=cached))
            inputs = tuple(new_inputs)
            result = compute = target
        else:
            first = dtypes[inputs[0]] if inputs else None
            if first is not None and first.is_float and category_of(op.kind) in _FOLLOWS_FIRST:
                result = compute = first
            else:
                result = _promoted(op, state, weak)
                compute = _compute_type(op, dtypes, result)
        for o in op.outputs:
            if result is not None and dtypes[o] in _LOWERABLE:
                state.set_dtype(o, result)
            if not inputs or all(i in weak for i in inputs):
                weak.add(o)
        state.append(op, inputs, compute, pending)
    return state.finish(graph.replace(metadata={**graph.metadata, AUTOCAST_KEY: str(half)}))


def _lower_all_half(graph: OpGraph, half: DType) -> OpGraph:
    """Apex O2, TensorFlow's ``use_fp16``: half everywhere, fp32 master weights, norm weights and loss.

    Every weight has one cast per step from its master, every float input one on arrival.
    """
    state = _start(graph)
    tensors, dtypes = state.tensors, state.dtypes
    for i, tensor in enumerate(tensors):
        if tensor.dtype in _LOWERABLE and tensor.role not in (Role.PARAMETER, Role.INPUT):
            state.set_dtype(i, half)
    for op in graph.ops:
        category = category_of(op.kind)
        pending: list[tuple[int, int]] = []
        if category is Category.LOSS:
            inputs = tuple(
                state.cast(i, DType.FP32, pending, cached=False) if dtypes[i] is half else i for i in op.inputs
            )
            for o in op.outputs:
                if dtypes[o] in _LOWERABLE:
                    state.set_dtype(o, DType.FP32)
            state.append(op, inputs, DType.FP32, pending)
            continue
        new_inputs = []
        for position, i in enumerate(op.inputs):
            is_norm_weight = category is Category.NORM and position > 0
            if dtypes[i] is DType.FP32 and tensors[i].role in (Role.PARAMETER, Role.INPUT) and not is_norm_weight:
                new_inputs.append(state.cast(i, half, pending, cached=True))
            else:
                new_inputs.append(i)
        inputs = tuple(new_inputs)
        first = dtypes[inputs[0]] if inputs else None
        widest = first if first is not None and first.is_float else _widest_float(inputs, dtypes)
        state.append(op, inputs, _compute_type(op, dtypes, widest), pending)
    return state.finish(graph)
