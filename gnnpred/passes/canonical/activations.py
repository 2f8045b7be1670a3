"""GELU (erf, tanh), quick GELU, SiLU, Mish, Hardswish and Hardsigmoid from their arithmetic.

Every form is ``x^p * (scale * A(u(x)) + offset)`` with A one of erf, tanh, sigmoid, relu6 ... and u a
polynomial in x. So the arithmetic is read as such a formula, in whatever order an exporter wrote it, and
looked up.
"""

from dataclasses import dataclass, field

from gnnpred.passes.canonical.editor import GraphEditor
from gnnpred.passes.canonical.matching import near, pieces_are_real, split_scalar, unfused_attributes

_MAX_DEPTH = 8  # arithmetic below the activation: x + 0.044715 * x * x * x, scaled
_MAX_CLIMB = 4  # arithmetic above it: + 1, * 0.5, * x

Polynomial = dict[int, float]

_SQRT_HALF = 0.70710678
_TANH_LINEAR, _TANH_CUBIC = 0.79788456, 0.79788456 * 0.044715


@dataclass(frozen=True)
class _Form:
    kind: str
    anchor: str
    argument: Polynomial
    power: int  # of x outside
    scale: float
    offset: float


_FORMS = (
    _Form("gelu", "erf", {1: _SQRT_HALF}, 1, 0.5, 0.5),
    _Form("gelu_tanh", "tanh", {1: _TANH_LINEAR, 3: _TANH_CUBIC}, 1, 0.5, 0.5),
    _Form("mish", "tanh_softplus", {1: 1.0}, 1, 1.0, 0.0),
    _Form("silu", "sigmoid", {1: 1.0}, 1, 1.0, 0.0),
    _Form("quick_gelu", "sigmoid", {1: 1.702}, 1, 1.0, 0.0),
    _Form("hardswish", "hardsigmoid", {1: 1.0}, 1, 1.0, 0.0),
    _Form("hardswish", "relu6", {0: 3.0, 1: 1.0}, 1, 1 / 6, 0.0),
    _Form("hardsigmoid", "relu6", {0: 3.0, 1: 1.0}, 0, 1 / 6, 0.0),
)
_ANCHORS = {form.anchor for form in _FORMS}


@dataclass
class _Climb:
    """The formula so far: ``x^power * (scale * A + offset)`` in tensor ``top``."""

    top: int
    scale: float = 1.0
    offset: float = 0.0
    power: int = 0
    x: int | None = None
    op_idxs: list[int] = field(default_factory=list)


def fuse_activations(editor: GraphEditor) -> None:
    """Replace every activation written as arithmetic by its op."""
    for op_idx in editor.positions("erf", "tanh", "sigmoid", "relu6", "hardsigmoid"):
        _fuse_one(editor, op_idx)


def _fuse_one(editor: GraphEditor, anchor_idx: int) -> None:
    op = editor.ops[anchor_idx]
    if op is None:
        return
    anchor, argument = op.kind, op.inputs[0]
    inside = [anchor_idx]
    if anchor == "tanh":
        softplus = editor.producer_op(argument, "softplus")
        if softplus is not None and editor.is_private(argument):
            anchor = "tanh_softplus"
            inside.append(editor.producer[argument])
            argument = softplus.inputs[0]
    forms = [form for form in _FORMS if form.anchor == anchor]
    best: tuple[_Form, _Climb, list[int]] | None = None
    for climb in _climbs(editor, op.outputs[0], argument):
        for form in forms:
            below = _matches(editor, form, climb, argument)
            if below is not None:
                best = (form, climb, [*inside, *below])
    if best is not None:
        _replace(editor, *best)


def _climbs(editor: GraphEditor, top: int, argument: int) -> list[_Climb]:
    """The formula after each arithmetic op above the activation, as far as it goes."""
    climb, found = _Climb(top), []
    for _ in range(_MAX_CLIMB):
        reader_idx = editor.sole_reader(climb.top)
        reader = editor.ops[reader_idx] if reader_idx is not None else None
        if reader_idx is None or reader is None or reader.kind not in ("add", "sub", "mul", "div"):
            break
        following = _step(editor, climb, reader_idx)
        if following is None:
            break
        climb = following
        found.append(climb)
    return found


def _step(editor: GraphEditor, climb: _Climb, reader_idx: int) -> _Climb | None:
    reader = editor.ops[reader_idx]
    assert reader is not None
    top, op_idxs = reader.outputs[0], [*climb.op_idxs, reader_idx]
    scalar = split_scalar(editor, reader)
    if scalar is not None and scalar[0] == climb.top:
        number = scalar[1]
        data_first = reader.inputs[0] == climb.top
        if reader.kind == "add" and climb.power == 0:
            return _Climb(top, climb.scale, climb.offset + number, 0, None, op_idxs)
        if reader.kind == "mul" or (reader.kind == "div" and data_first and number):
            factor = number if reader.kind == "mul" else 1 / number
            return _Climb(top, climb.scale * factor, climb.offset * factor, climb.power, climb.x, op_idxs)
        return None
    if reader.kind != "mul" or climb.power or len(reader.inputs) != 2:
        return None
    other = reader.inputs[1] if reader.inputs[0] == climb.top else reader.inputs[0]
    if editor.shape(other) != editor.shape(top):
        return None
    # x may carry the 0.5: 0.5 * x * (1 + erf(...))
    factor, x = 1.0, other
    scaling = editor.producer_op(other, "mul", "div")
    if scaling is not None and editor.is_private(other):
        part = split_scalar(editor, scaling)
        if part is not None and part[1] and (scaling.kind == "mul" or scaling.inputs[0] == part[0]):
            number = part[1] if scaling.kind == "mul" else 1 / part[1]
            if near(number, 0.5) or near(number, 1 / 6):
                factor, x = number, part[0]
                op_idxs.append(editor.producer[other])
    return _Climb(top, climb.scale * factor, climb.offset * factor, 1, x, op_idxs)


def _matches(editor: GraphEditor, form: _Form, climb: _Climb, argument: int) -> list[int] | None:
    """Positions of the ops that compute the argument, where ``climb`` is ``form``."""
    if climb.power != form.power or not near(climb.scale, form.scale):
        return None
    if abs(climb.offset - form.offset) > 0.01:
        return None
    x = climb.x
    if form.power == 0:
        affine = editor.producer_op(argument, "add")
        part = split_scalar(editor, affine) if affine is not None else None
        if part is None:
            return None
        x = climb.x = part[0]
    assert x is not None
    op_idxs: list[int] = []
    polynomial = _polynomial(editor, argument, x, op_idxs, 0)
    if polynomial is None:
        return None
    terms = {power: value for power, value in polynomial.items() if value}
    if terms.keys() != form.argument.keys():
        return None
    return op_idxs if all(near(terms[power], value) for power, value in form.argument.items()) else None


def _polynomial(editor: GraphEditor, tensor: int, x: int, op_idxs: list[int], depth: int) -> Polynomial | None:
    """``tensor`` as a polynomial in ``x``; adds the ops it is made of to ``op_idxs``."""
    if tensor == x:
        return {1: 1.0}
    number = editor.number(tensor)
    if number is not None:
        return {0: number}
    op = editor.producer_op(tensor, "add", "sub", "mul", "div", "pow_scalar", "square")
    if op is None or depth >= _MAX_DEPTH or len(op_idxs) > 2 * _MAX_DEPTH or editor.is_graph_output(tensor):
        return None
    first = _polynomial(editor, op.inputs[0], x, op_idxs, depth + 1)
    if first is None:
        return None
    if op.kind in ("pow_scalar", "square"):
        exponent = 2 if op.kind == "square" else op.attributes.get("exponent")
        if exponent not in (2, 3) or len(first) != 1:
            return None
        ((power, value),) = first.items()
        result: Polynomial | None = {power * int(exponent): value ** int(exponent)}
    else:
        second = _polynomial(editor, op.inputs[1], x, op_idxs, depth + 1)
        result = None if second is None else _combine(op.kind, first, second)
    if result is not None:
        op_idxs.append(editor.producer[tensor])
    return result


def _combine(kind: str, first: Polynomial, second: Polynomial) -> Polynomial | None:
    if kind in ("add", "sub"):
        sign = 1 if kind == "add" else -1
        return {p: first.get(p, 0.0) + sign * second.get(p, 0.0) for p in {*first, *second}}
    if kind == "div":
        if second.keys() != {0} or not second[0]:
            return None
        return {power: value / second[0] for power, value in first.items()}
    product: Polynomial = {}
    for power, value in first.items():
        for other_power, other in second.items():
            product[power + other_power] = product.get(power + other_power, 0.0) + value * other
    return product if max(product) <= 3 else None


def _replace(editor: GraphEditor, form: _Form, climb: _Climb, inside: list[int]) -> None:
    op_idxs = list(dict.fromkeys([*inside, *climb.op_idxs]))
    final_idx = editor.producer[climb.top]
    attributes = {}
    # the cost rules know that quick_gelu runs in pieces; silu in pieces cannot be told from the function
    handwritten = pieces_are_real(editor, form.kind) or (form.power == 1 and _halves_x(editor, climb))
    if form.kind not in ("silu", "quick_gelu") and handwritten:
        attributes = unfused_attributes(editor, op_idxs, climb.top)
    assert climb.x is not None
    editor.replace_op(final_idx, form.kind, (climb.x,), attributes)


def _halves_x(editor: GraphEditor, climb: _Climb) -> bool:
    """``x * 0.5`` with the number second: models write GELU so; exporters put the half first or last."""
    ops = (editor.ops[op_idx] for op_idx in climb.op_idxs)
    return any(
        op is not None and op.kind == "mul" and op.inputs[0] == climb.x and near(editor.number(op.inputs[1]), 0.5)
        for op in ops
    )
