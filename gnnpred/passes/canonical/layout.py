"""Which ops copy memory: strides are followed from op to op, as eager PyTorch lays tensors out.

ONNX has no strides, so a Reshape may stand for a free view or for a copy of the tensor; a traced module
shows copies, but only those outside composite functions. Explicit copies are therefore dropped and set again
by the same rules for both: where a view is impossible, and in front of kernels that want contiguous input.
"""

from math import prod

from gnnpred.graph import Op, Role
from gnnpred.op_kinds import Category, category_of
from gnnpred.passes.canonical.editor import GraphEditor

Strides = tuple[int, ...]
# Stands for the batch while strides are followed: at batch 1 every order of axes would look contiguous.
_BATCH_FACTOR = 1009

_CONTIGUOUS_INPUT = ("layer_norm", "rms_norm", "softmax", "log_softmax")
_CONTIGUOUS_OR_CHANNELS_LAST_INPUT = (
    "conv", "conv_transpose", "batch_norm", "group_norm", "max_pool", "avg_pool", "adaptive_avg_pool",
    "adaptive_max_pool", "resize",
)  # fmt: skip
_KEEPS_CHANNELS_LAST = (*_CONTIGUOUS_OR_CHANNELS_LAST_INPUT, "concat", "pad")


def settle_copies(editor: GraphEditor) -> None:
    """Replace explicit copies by those that eager PyTorch needs."""
    for op_idx in editor.positions("copy"):
        op = editor.ops[op_idx]
        if op is not None and len(op.inputs) == 1 and editor.shape(op.inputs[0]) == editor.shape(op.outputs[0]):
            editor.bypass(op_idx, op.inputs[0])
    tracker = _Tracker(editor)
    for op_idx in editor.in_order():
        tracker.follow(op_idx)


class _Tracker:
    """Strides of every activation seen so far; a tensor without an entry is contiguous."""

    def __init__(self, editor: GraphEditor) -> None:
        self.editor = editor
        self._strides: dict[int, Strides] = {}

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Shape with the batch scaled up."""
        spec = self.editor.tensors[tensor]
        if not spec.batch_axes:
            return spec.shape
        return tuple(dim * _BATCH_FACTOR if axis in spec.batch_axes else dim for axis, dim in enumerate(spec.shape))

    def strides(self, tensor: int) -> Strides:
        return self._strides.get(tensor) or contiguous_strides(self.shape(tensor))

    def _set(self, tensor: int, strides: Strides | None) -> None:
        if strides is not None and strides != contiguous_strides(self.shape(tensor)):
            self._strides[tensor] = strides

    def follow(self, op_idx: int) -> None:
        op = self.editor.ops[op_idx]
        assert op is not None
        if not op.inputs or not any(self.editor.depends_on_data(tensor) for tensor in op.outputs):
            return
        match op.kind:
            case "view":
                self._follow_view(op_idx, op)
            case "transpose":
                strides = self.strides(op.inputs[0])
                self._set(op.outputs[0], tuple(strides[axis] for axis in op.attributes["perm"]))
            case "slice" | "split":
                self._follow_slices(op)
            case "expand":
                self._set(op.outputs[0], self._expanded(op.inputs[0], op.outputs[0]))
            case "linear":
                self._make_rows_mergeable(op_idx, op)
            case "matmul":
                self._make_batch_mergeable(op_idx, op)
            case "sdpa":
                self._follow_attention(op)
            case _ if op.kind in _CONTIGUOUS_INPUT:
                if not self._is_contiguous(op.inputs[0]):
                    self._copy_input(op_idx, 0)
            case _ if op.kind in _KEEPS_CHANNELS_LAST:
                self._follow_memory_format(op_idx, op)
            case _ if _is_elementwise(op):
                for tensor in op.outputs:
                    self._set(tensor, self._elementwise(op, tensor))

    # --- views --------------------------------------------------------------------------------

    def _follow_view(self, op_idx: int, op: Op) -> None:
        source, result = op.inputs[0], op.outputs[0]
        if len(op.inputs) > 1:
            return
        shape, strides = self.shape(source), self.strides(source)
        viewed = view_strides(shape, strides, self.shape(result))
        if viewed is None:
            self._copy_input(op_idx, 0)
            viewed = contiguous_strides(self.shape(result))
        self._set(result, viewed)

    def _follow_slices(self, op: Op) -> None:
        strides, rank = self.strides(op.inputs[0]), len(self.shape(op.inputs[0]))
        axes = op.attributes.get("axes", (op.attributes["axis"],) if "axis" in op.attributes else ())
        steps = dict(zip(axes, op.attributes.get("steps", ()), strict=False))
        for tensor in op.outputs:
            rank_out = len(self.shape(tensor))
            if rank_out == rank:
                self._set(tensor, tuple(stride * steps.get(axis, 1) for axis, stride in enumerate(strides)))
            elif rank_out == rank - len(axes):
                self._set(tensor, tuple(stride for axis, stride in enumerate(strides) if axis not in axes))

    def _expanded(self, source: int, result: int) -> Strides:
        shape, strides, wanted = self.shape(source), self.strides(source), self.shape(result)
        new = len(wanted) - len(shape)
        return tuple(
            0 if axis < new or (shape[axis - new] == 1 and dim != 1) else strides[axis - new]
            for axis, dim in enumerate(wanted)
        )

    # --- kernels ------------------------------------------------------------------------------

    def _make_rows_mergeable(self, op_idx: int, op: Op) -> None:
        shape, strides = self.shape(op.inputs[0]), self.strides(op.inputs[0])
        if len(shape) > 2:
            rows = view_strides(shape, strides, (prod(shape[:-1]), shape[-1]))
            if rows is None or (1 not in rows and prod(shape) > 1):
                self._copy_input(op_idx, 0)

    def _make_batch_mergeable(self, op_idx: int, op: Op) -> None:
        """bmm takes either order of the last two axes, and one batch axis; matmul expands and merges the others."""
        shapes = [self.shape(tensor) for tensor in op.inputs[:2]]
        batch = _broadcast(shapes[0][:-2], shapes[1][:-2])
        for position, tensor in enumerate(op.inputs[:2]):
            shape = shapes[position]
            if len(shape) < 2 or not self.editor.depends_on_data(tensor):
                continue
            if position == 0 and len(shapes[1]) <= 2 < len(shape):
                if view_strides(shape, self.strides(tensor), (prod(shape[:-1]), shape[-1])) is None:
                    self._copy_input(op_idx, position)
                continue
            full = (*batch, *shape[-2:])
            strides = _broadcast_strides(shape, self.strides(tensor), full)
            merged = view_strides(full, strides, (prod(batch), *shape[-2:])) if len(batch) > 1 else strides[-3:]
            if merged is None or (1 not in merged[-2:] and min(shape[-2:]) > 1):
                self._copy_input(op_idx, position)

    def _follow_attention(self, op: Op) -> None:
        """Fused attention writes (B, S, heads, D) memory where q has that order, so merging the heads is free."""
        result = op.outputs[0]
        shape = self.shape(result)
        if len(shape) == 4:
            _batch, heads, seq, width = shape
            self._set(result, (seq * heads * width, width, heads * width, 1))

    def _follow_memory_format(self, op_idx: int, op: Op) -> None:
        channels_last = self._is_channels_last(op.inputs[0])
        if op.kind == "concat":
            channels_last = all(self._is_channels_last(tensor) for tensor in op.inputs)
        elif op.kind in _CONTIGUOUS_OR_CHANNELS_LAST_INPUT and not (channels_last or self._is_contiguous(op.inputs[0])):
            self._copy_input(op_idx, 0)
        if channels_last:
            for tensor in op.outputs:
                shape = self.shape(tensor)
                if len(shape) >= 4:
                    self._set(tensor, channels_last_strides(shape))

    def _elementwise(self, op: Op, result: int) -> Strides | None:
        """TensorIterator's rule: the result keeps the axis order of the first operand of full size."""
        shape = self.shape(result)
        for tensor in op.inputs:
            if self.shape(tensor) == shape:
                strides = self.strides(tensor)
                if 0 in strides:
                    continue
                return _dense_in_order_of(shape, strides)
        return None

    # --- memory -------------------------------------------------------------------------------

    def _is_contiguous(self, tensor: int) -> bool:
        strides = self._strides.get(tensor)
        return strides is None or _same_layout(self.shape(tensor), strides, contiguous_strides(self.shape(tensor)))

    def _is_channels_last(self, tensor: int) -> bool:
        shape = self.shape(tensor)
        if len(shape) < 4 or tensor not in self._strides:
            return False
        return _same_layout(shape, self._strides[tensor], channels_last_strides(shape))

    def _copy_input(self, op_idx: int, position: int) -> None:
        editor = self.editor
        op = editor.ops[op_idx]
        assert op is not None
        source = op.inputs[position]
        spec = editor.tensors[source]
        if spec.role not in (Role.ACTIVATION, Role.INPUT, Role.GRADIENT):
            return
        copied = editor.like(source)
        editor.insert_before(op_idx, "copy", (source,), (copied,))
        editor.set_inputs(op_idx, tuple(copied if i == position else t for i, t in enumerate(op.inputs)))


# --- stride arithmetic ------------------------------------------------------------------------


def contiguous_strides(shape: tuple[int, ...]) -> Strides:
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: tuple[int, ...]) -> Strides:
    """Strides of (N, C, *) with the channels innermost."""
    moved = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (moved[0], moved[-1], *moved[1:-1])


def view_strides(shape: tuple[int, ...], strides: Strides, wanted: tuple[int, ...]) -> Strides | None:
    """Strides of ``wanted`` over the same memory, None where that needs a copy (ATen's computeStride)."""
    if prod(shape) != prod(wanted):
        return None
    if prod(shape) == 0:
        return contiguous_strides(wanted)
    result = [0] * len(wanted)
    view_axis = len(wanted) - 1
    base_stride = strides[-1] if strides else 1
    tensor_numel = view_numel = 1
    for axis in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[axis]
        last_of_chunk = axis == 0 or (shape[axis - 1] != 1 and strides[axis - 1] != tensor_numel * base_stride)
        if not last_of_chunk:
            continue
        while view_axis >= 0 and (view_numel < tensor_numel or wanted[view_axis] == 1):
            result[view_axis] = view_numel * base_stride
            view_numel *= wanted[view_axis]
            view_axis -= 1
        if view_numel != tensor_numel:
            return None
        if axis > 0:
            base_stride = strides[axis - 1]
            tensor_numel = view_numel = 1
    if view_axis != -1:
        if any(wanted[axis] != 1 for axis in range(view_axis + 1)):
            return None
        for axis in range(view_axis + 1):
            result[axis] = 1
    return tuple(result)


def _same_layout(shape: tuple[int, ...], first: Strides, second: Strides) -> bool:
    """Equal strides, where axes of one element do not count."""
    return all(dim == 1 or a == b for dim, a, b in zip(shape, first, second, strict=True))


def _dense_in_order_of(shape: tuple[int, ...], strides: Strides) -> Strides:
    order = sorted(range(len(shape)), key=lambda axis: (strides[axis], -axis))
    result, step = [0] * len(shape), 1
    for axis in order:
        result[axis] = step
        step *= max(shape[axis], 1)
    return tuple(result)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(first), len(second))
    a = (1,) * (rank - len(first)) + first
    b = (1,) * (rank - len(second)) + second
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))


def _broadcast_strides(shape: tuple[int, ...], strides: Strides, wanted: tuple[int, ...]) -> Strides:
    new = len(wanted) - len(shape)
    return tuple(
        0 if axis < new or (shape[axis - new] == 1 and dim != 1) else strides[axis - new]
        for axis, dim in enumerate(wanted)
    )


def _is_elementwise(op: Op) -> bool:
    return category_of(op.kind) in (Category.UNARY, Category.BINARY) or op.kind in ("cast", "copy", "dropout")
