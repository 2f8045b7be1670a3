"""The backward pass, gradient accumulation and the optimizer step, as ops after the forward ops.

``add_backward`` works on a graph whose precision is already lowered: every gradient has the shape and type of the
tensor it belongs to (autograd's rule), so backward ops inherit the types of the forward.

For each forward op that needs one there is one INPUT_GRADIENT op standing for its whole backward (its cost counts all
kernels, ``costs.py``), except that

* products with a weight (conv, linear, RNNs) have an INPUT_GRADIENT and a WEIGHT_GRADIENT op, each only where wanted,
  and a ``reduce_sum`` (WEIGHT_GRADIENT) for a bias;
* a product of two activations has one INPUT_GRADIENT op per operand (attribute ``operand``: 0 or 1);
* an op that only hands the gradient on (same shape, same type: add, identity, copy) has none;
* autograd converts a gradient to the type of its tensor where promotion had widened it: a CAST op.

Under activation checkpointing every forward op of the repeated layers runs once more just before its backward
(phase BACKWARD, component FORWARD).

A tensor with several readers gets ACCUMULATE ops (kind ``add``), placed where the later gradient arrives.
"""

from dataclasses import dataclass, field
from typing import Any

from gnnpred.errors import UsageError
from gnnpred.graph import Component, DType, Op, OpGraph, OpPhase, Role, TensorSpec
from gnnpred.job import OPTIMIZERS, Phase
from gnnpred.op_kinds import Category, category_of
from gnnpred.passes.checkpointing import checkpointed_region


def _kinds(names: str) -> frozenset[str]:
    return frozenset(names.split())


# No gradient flows through these (integer or boolean results, or a derivative that is zero everywhere).
NOT_DIFFERENTIABLE = _kinds(
    "argmax argmin equal less less_equal greater greater_equal not_equal logical_and logical_or logical_xor "
    "logical_not bitwise_and bitwise_or bitwise_xor bitwise_not shift floor ceil round trunc sign isnan isinf all any "
    "nonzero unique one_hot range random fill nms quantize mod"
)

# What the backward kernels read besides the gradient (derivatives.yaml of PyTorch): "y" the result, "x" the inputs,
# "first" the first input, "index" the integer inputs, "" nothing. Kinds that are not here read all inputs.
_SAVED = {
    **dict.fromkeys(
        _kinds("relu sigmoid tanh exp sqrt rsqrt reciprocal softmax log_softmax relu6 hardtanh clamp"), "y"
    ),
    **dict.fromkeys(
        _kinds(
            "neg dropout add sub avg_pool adaptive_avg_pool lp_pool max_pool adaptive_max_pool pad resize "
            "pixel_shuffle roll tile flip tril im2col col2im reduce_mean reduce_sum cumsum copy concat stack cast view "
            "transpose slice split expand identity sum_loss dequantize"
        ),
        "",
    ),
    **dict.fromkeys(_kinds("embedding gather gather_elements scatter topk sort roi_align compress"), "index"),
    **dict.fromkeys(_kinds("logsumexp reduce_l2 reduce_max reduce_min reduce_prod cumprod"), "xy"),
    **dict.fromkeys(_kinds("cross_entropy"), "logits"),
}
_HANDS_ON = frozenset({"identity", "copy", "add", "sub"})  # sub: its first operand
_ELEMENTWISE_PROMOTING = _kinds("add sub mul div pow maximum minimum where lerp addcmul atan2 concat stack")


@dataclass
class _Tape:
    """The graph under construction and the gradient known so far of each tensor."""

    tensors: list[TensorSpec]
    ops: list[Op]
    needs_grad: bytearray
    producer: dict[int, int]
    gradient: dict[int, int] = field(default_factory=dict)

    def new_gradient(self, of: int, *, dtype: DType | None = None) -> int:
        """A gradient tensor for tensor ``of``; ``dtype`` only where the kernel computes it in another type."""
        spec = self.tensors[of]
        self.tensors.append(
            TensorSpec(spec.shape, spec.dtype if dtype is None else dtype, Role.GRADIENT, spec.batch_axes)
        )
        return len(self.tensors) - 1

    def emit(
        self,
        forward: Op,
        forward_idx: int,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        component: Component,
        *,
        kind: str = "",
        attributes: Any = None,
        compute_dtype: DType | None = None,
    ) -> None:
        self.ops.append(
            Op(
                kind or forward.kind,
                inputs,
                outputs,
                forward.attributes if attributes is None else attributes,
                forward.name,
                OpPhase.BACKWARD,
                component,
                compute_dtype or forward.compute_dtype,
                forward_idx,
                forward.repeats,
            )
        )

    def deposit(self, tensor_idx: int, gradient_idx: int, forward: Op, forward_idx: int) -> None:
        """Hand a gradient to a tensor: convert it to the tensor's type, add it to one that is already there."""
        spec = self.tensors[tensor_idx]
        if self.tensors[gradient_idx].dtype is not spec.dtype:
            converted = self.new_gradient(tensor_idx)
            self.emit(
                forward,
                forward_idx,
                (gradient_idx,),
                (converted,),
                Component.CAST,
                kind="cast",
                attributes={},
                compute_dtype=spec.dtype,
            )
            gradient_idx = converted
        known = self.gradient.get(tensor_idx)
        if known is not None:
            total = self.new_gradient(tensor_idx)
            self.emit(
                forward,
                self.producer.get(tensor_idx, forward_idx),
                (known, gradient_idx),
                (total,),
                Component.ACCUMULATE,
                kind="add",
                attributes={},
                compute_dtype=spec.dtype,
            )
            gradient_idx = total
        self.gradient[tensor_idx] = gradient_idx


def add_backward(
    graph: OpGraph,
    *,
    phase: Phase,
    optimizer: str = "sgd",
    input_gradient: bool = False,
    loss: bool = True,
    grad_scaler: bool = False,
    foreach: bool = True,
    checkpointing: bool = False,
) -> OpGraph:
    """The whole iteration: forward, loss, backward, optimizer, as ``phase`` asks.

    ``Phase.INFERENCE`` returns the graph as it is. ``input_gradient``: the float inputs need a gradient too.
    Without ``loss`` the outputs are given gradients of ones. ``grad_scaler``: the gradients are unscaled before the
    optimizer step (torch.amp.GradScaler). Without ``foreach`` (PyTorch before 2.0) the optimizer
    loops over tensors and gradients are zeroed instead of dropped. ``checkpointing``: the forward ops of repeated
    layers run again before their backward.

    Raises UsageError for an unknown optimizer.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    if phase is Phase.INFERENCE:
        return graph
    tape = _Tape(list(graph.tensors), list(graph.ops), bytearray(), graph.producer_by_tensor())
    seeds = _loss_seeds(tape, graph, loss=loss)
    tape.needs_grad = _propagate_needs_grad(tape, input_gradient=input_gradient)
    num_forward_ops = len(tape.ops)
    for seed in seeds:
        if seed < len(tape.needs_grad) and tape.needs_grad[seed]:
            gradient = tape.new_gradient(seed)
            forward_idx = tape.producer.get(seed)
            tape.ops.append(
                Op(
                    "fill",
                    (),
                    (gradient,),
                    phase=OpPhase.BACKWARD,
                    component=Component.INPUT_GRADIENT,
                    compute_dtype=tape.tensors[seed].dtype,
                    forward_op_idx=forward_idx,
                )
            )
            tape.gradient[seed] = gradient
    region = checkpointed_region(graph.ops, graph.tensors)[0] if checkpointing else range(0)
    repeated_idx: dict[int, int] = {}
    for forward_idx in range(num_forward_ops - 1, -1, -1):
        op = tape.ops[forward_idx]
        if forward_idx in region:
            _run_again(tape, op, forward_idx, repeated_idx)
        if any(o in tape.gradient for o in op.outputs):
            _differentiate(tape, op, forward_idx)
    notes = graph.notes
    if not any(t.role is Role.PARAMETER and i in tape.gradient for i, t in enumerate(graph.tensors)):
        notes = (*notes, "no weight gets a gradient: the step has no backward pass and no optimizer work")
    _append_optimizer(
        tape,
        graph,
        phase=phase,
        optimizer=optimizer,
        unscale=grad_scaler,
        foreach=foreach,
    )
    return graph.replace(tensors=tuple(tape.tensors), ops=tuple(tape.ops), notes=notes)


def _run_again(tape: _Tape, op: Op, forward_idx: int, repeated_idx: dict[int, int]) -> None:
    """Append the second run of a forward op; ``repeated_idx`` knows where those already appended stand."""
    if not any(tape.needs_grad[o] for o in op.outputs):
        return
    belongs_to = forward_idx
    if op.component is Component.CAST:  # comes after the op that it feeds, for the loop walks backwards
        found = repeated_idx.get(op.forward_op_idx if op.forward_op_idx is not None else -1)
        if found is None:
            return
        belongs_to = found
    results = []
    for o in op.outputs:
        results.append(len(tape.tensors))
        tape.tensors.append(tape.tensors[o])
    repeated_idx[forward_idx] = len(tape.ops)
    tape.emit(op, belongs_to, op.inputs, tuple(results), op.component)


def _loss_seeds(tape: _Tape, graph: OpGraph, *, loss: bool) -> list[int]:
    """Tensors that backward starts from; appends a loss where the graph has none.

    The first float output is taken as logits and gets a cross-entropy, if it looks like logits: (N, C), (N, S, C) or
    (N, C, H, W) with more than four channels. Other outputs that nothing reads (auxiliary heads, boxes) are summed, so
    that their branches have a backward; outputs that the model itself reads on (attention caches) are left alone.
    """
    own = [o for op in graph.ops if category_of(op.kind) is Category.LOSS for o in op.outputs]
    if own:
        return own[-1:] if len(own) == 1 else [o for o in own if o in graph.outputs] or own[-1:]
    outputs = [o for o in dict.fromkeys(graph.outputs) if graph.tensors[o].dtype.is_float and o in tape.producer]
    if not loss:
        return outputs
    read = {i for op in graph.ops for i in op.inputs}
    # Half activations over fp32 weights: the loss is taken in fp32 (autocast's list, Apex O2 alike).
    has_masters = any(t.role is Role.PARAMETER and t.dtype is DType.FP32 for t in graph.tensors)
    seeds = []
    for position, output in enumerate(outputs):
        if position > 0 and output in read:
            continue
        seeds.append(_append_loss(tape, output, first=position == 0, in_fp32=has_masters))
    return seeds


def _append_loss(tape: _Tape, output: int, *, first: bool, in_fp32: bool) -> int:
    spec = tape.tensors[output]
    rank = len(spec.shape)
    kind, attributes = "sum_loss", {}
    if first and rank in (2, 3) and spec.shape[-1] > 1:
        kind, attributes = "cross_entropy", {"axis": rank - 1}
    elif first and rank in (4, 5) and spec.shape[1] > 4:
        kind, attributes = "cross_entropy", {"axis": 1}
    dtype = spec.dtype
    if in_fp32 and dtype in (DType.FP16, DType.BF16):
        dtype = DType.FP32
    tape.tensors.append(TensorSpec((), dtype, Role.ACTIVATION, name="loss"))
    result = len(tape.tensors) - 1
    tape.producer[result] = len(tape.ops)
    tape.ops.append(Op(kind, (output,), (result,), attributes, "loss", compute_dtype=dtype))
    return result


def _propagate_needs_grad(tape: _Tape, *, input_gradient: bool) -> bytearray:
    needs = bytearray(len(tape.tensors))
    tensors = tape.tensors
    for i, tensor in enumerate(tensors):
        if tensor.dtype.is_float and (tensor.role is Role.PARAMETER or (input_gradient and tensor.role is Role.INPUT)):
            needs[i] = 1
    for op in tape.ops:
        if op.kind in NOT_DIFFERENTIABLE:
            continue
        for i in op.inputs:
            if needs[i]:
                for o in op.outputs:
                    if tensors[o].dtype.is_float:
                        needs[o] = 1
                break
    return needs


def _differentiate(tape: _Tape, op: Op, forward_idx: int) -> None:
    """Append the backward ops of one forward op and hand the gradients to its inputs."""
    tensors, needs = tape.tensors, tape.needs_grad
    wanted = [(position, i) for position, i in enumerate(op.inputs) if needs[i]]
    if not wanted or op.kind in NOT_DIFFERENTIABLE:
        return
    grads = tuple(tape.gradient[o] for o in op.outputs if o in tape.gradient)
    kind = op.kind
    if kind in ("conv", "conv_transpose", "linear"):
        _differentiate_weight_product(tape, op, forward_idx, grads[0])
    elif kind == "matmul":
        _differentiate_matmul(tape, op, forward_idx, grads[0], wanted)
    elif kind in ("lstm", "gru", "rnn"):
        _differentiate_recurrent(tape, op, forward_idx, grads, wanted)
    elif op.component is Component.CAST or kind == "cast":
        result = tape.new_gradient(op.inputs[0])
        component = Component.CAST if op.component is Component.CAST else Component.INPUT_GRADIENT
        tape.emit(op, forward_idx, grads, (result,), component, compute_dtype=tensors[result].dtype)
        tape.deposit(op.inputs[0], result, op, forward_idx)
    elif kind == "dropout" and not op.attributes.get("ratio", 0.5):
        tape.deposit(op.inputs[0], grads[0], op, forward_idx)
    else:
        _differentiate_generic(tape, op, forward_idx, grads, wanted)


def _differentiate_generic(
    tape: _Tape, op: Op, forward_idx: int, grads: tuple[int, ...], wanted: list[tuple[int, int]]
) -> None:
    tensors = tape.tensors
    out = tensors[op.outputs[0]]
    remaining = wanted
    if op.kind in _HANDS_ON:
        remaining = []
        for position, i in wanted:
            if tensors[i].shape == out.shape and (op.kind != "sub" or position == 0):
                tape.deposit(i, grads[0], op, forward_idx)
            else:
                remaining.append((position, i))
        if not remaining:
            return
    saved = _SAVED.get(op.kind)
    if saved == "y":
        read = op.outputs
    elif saved == "":
        read = ()
    elif saved == "index":
        read = tuple(i for i in op.inputs if not tensors[i].dtype.is_float)
    elif saved == "xy":
        read = op.inputs + op.outputs
    elif saved == "logits":
        read = op.inputs[:1]
    elif op.kind == "sdpa":
        read = op.inputs + op.outputs
    elif category_of(op.kind) is Category.NORM:
        read = op.inputs[:2]  # x and the weight; no kernel needs the bias again
    elif op.kind in ("mul", "div") and len(wanted) == 1 and wanted[0][0] == 0:
        read = op.inputs[1:]
    elif op.kind == "mul" and len(wanted) == 1:
        read = op.inputs[:1]
    else:
        read = op.inputs
    # Where promotion widened the result, the gradient is computed in the wide type and then converted.
    widened = op.kind in _ELEMENTWISE_PROMOTING
    results = tuple(tape.new_gradient(i, dtype=out.dtype if widened else None) for _, i in remaining)
    tape.emit(op, forward_idx, grads + read, results, Component.INPUT_GRADIENT)
    for (_, i), result in zip(remaining, results, strict=True):
        tape.deposit(i, result, op, forward_idx)


def _differentiate_weight_product(tape: _Tape, op: Op, forward_idx: int, grad: int) -> None:
    """Input gradient from the weight, weight gradient from the input, bias gradient by a sum."""
    needs = tape.needs_grad
    x, weight = op.inputs[:2]
    # The engine runs the bias sum and both products as one node; DDP sees the weight gradient last.
    if len(op.inputs) > 2 and needs[op.inputs[2]]:
        bias = op.inputs[2]
        result = tape.new_gradient(bias)
        tape.emit(op, forward_idx, (grad,), (result,), Component.WEIGHT_GRADIENT, kind="reduce_sum", attributes={})
        tape.deposit(bias, result, op, forward_idx)
    if needs[x]:
        result = tape.new_gradient(x)
        tape.emit(op, forward_idx, (grad, weight), (result,), Component.INPUT_GRADIENT)
        tape.deposit(x, result, op, forward_idx)
    if needs[weight]:
        result = tape.new_gradient(weight)
        tape.emit(op, forward_idx, (x, grad), (result,), Component.WEIGHT_GRADIENT)
        tape.deposit(weight, result, op, forward_idx)


def _differentiate_matmul(tape: _Tape, op: Op, forward_idx: int, grad: int, wanted: list[tuple[int, int]]) -> None:
    for position, i in wanted:
        if position > 1:
            continue
        result = tape.new_gradient(i)
        other = op.inputs[1 - position]
        is_weight = tape.tensors[i].role in (Role.PARAMETER, Role.PARAMETER_DERIVED)
        tape.emit(
            op,
            forward_idx,
            (grad, other),
            (result,),
            Component.WEIGHT_GRADIENT if is_weight else Component.INPUT_GRADIENT,
            attributes={**op.attributes, "operand": position},
        )
        tape.deposit(i, result, op, forward_idx)


def _differentiate_recurrent(
    tape: _Tape, op: Op, forward_idx: int, grads: tuple[int, ...], wanted: list[tuple[int, int]]
) -> None:
    tensors = tape.tensors
    weights = [i for _, i in wanted if tensors[i].role in (Role.PARAMETER, Role.PARAMETER_DERIVED)]
    data = [i for _, i in wanted if i not in weights]
    # The chain through time is walked in any case; without data to differentiate its result stays inside.
    results = tuple(tape.new_gradient(i) for i in data)
    tape.emit(op, forward_idx, grads + op.inputs + op.outputs[:1], results, Component.INPUT_GRADIENT)
    for i, result in zip(data, results, strict=True):
        tape.deposit(i, result, op, forward_idx)
    if weights:
        results = tuple(tape.new_gradient(i) for i in weights)
        tape.emit(op, forward_idx, (op.inputs[0], *op.outputs[:1], *grads), results, Component.WEIGHT_GRADIENT)
        for i, result in zip(weights, results, strict=True):
            tape.deposit(i, result, op, forward_idx)


def _append_optimizer(
    tape: _Tape, graph: OpGraph, *, phase: Phase, optimizer: str, unscale: bool, foreach: bool
) -> None:
    parameters = [i for i, t in enumerate(graph.tensors) if t.role is Role.PARAMETER and i in tape.gradient]
    if not parameters:
        return
    gradients = tuple(tape.gradient[i] for i in parameters)
    specs = [graph.tensors[i] for i in parameters]
    attributes = {
        "optimizer": optimizer,
        "num_tensors": len(parameters),
        "num_elements": sum(t.num_elements for t in specs),
        "num_bytes": sum(t.num_bytes for t in specs),
        "foreach": foreach,  # torch.optim's default on CUDA since 2.0
        "set_to_none": foreach,  # zero_grad's default since 2.0
    }

    def append(kind: str, inputs: tuple[int, ...]) -> None:
        tape.ops.append(
            Op(
                kind,
                inputs,
                (),
                attributes,
                phase=OpPhase.OPTIMIZER,
                component=Component.OPTIMIZER,
                compute_dtype=specs[0].dtype,
            )
        )

    if phase is Phase.TRAIN and optimizer != "none":
        if unscale:
            append("unscale", gradients)
        append("optimizer_step", gradients + tuple(parameters))
    append("zero_grad", gradients)
