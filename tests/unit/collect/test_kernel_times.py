"""Operators of a step, profiled for real on the CPU: kinds, shapes and phases, as the corpus reads them."""

from dataclasses import asdict
from pathlib import Path

import pytest

from gnnpred.collect.recipe import Configuration, MeasureSettings
from gnnpred.job import Precision

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.models

MODELS = Path(__file__).with_name("small_modules.py")
BATCH = 3


def operators_in(precision, *, phase="train"):
    from gnnpred.collect.worker import run_task

    settings = MeasureSettings(steps=3, max_warmup_steps=3, max_warmup_s=0.1, profile_share=1.0)
    configuration = Configuration(
        model=f"{MODELS}:network_of_all_kinds", batch_size=BATCH, precision=precision, phase=phase
    )
    task = {"task": "measure", "configuration": asdict(configuration), "settings": asdict(settings), "device": "cpu"}
    reply = run_task(task)
    assert reply["status"] == "ok", reply
    return reply["result"]


def test_every_kind_has_the_shape_of_its_inputs_forward_and_backward():
    result = operators_in(Precision.FP32)
    found = {(kind, phase, tuple(shape)) for kind, phase, _, shape, _, _ in result["operators"]}
    first_conv, depthwise = (BATCH, 3, 8, 8, 8, 3, 3, 1, 1, 1, 1, 1), (BATCH, 8, 8, 8, 8, 3, 3, 2, 2, 1, 1, 8)
    tokens = BATCH * 16
    expected = {
        ("conv", "fwd", first_conv),
        ("conv", "bwd_weight", first_conv),  # nobody asks for the gradient of the images
        ("conv", "fwd", depthwise),
        ("conv", "bwd", depthwise),
        ("batch_norm", "fwd", (BATCH, 8, 16)),
        ("batch_norm", "bwd", (BATCH, 8, 16)),
        ("relu", "fwd", (BATCH * 8 * 8, 8)),
        ("relu", "bwd", (BATCH * 8 * 8, 8)),
        ("linear", "fwd", (1, tokens, 16, 8)),
        ("linear", "bwd", (1, tokens, 16, 8)),
        ("linear", "fwd", (1, BATCH, 4, 16)),
        ("linear", "bwd", (1, BATCH, 4, 16)),
        ("layer_norm", "fwd", (tokens, 16)),
        ("layer_norm", "bwd", (tokens, 16)),
        ("sdpa", "fwd", (BATCH, 2, 2, 16, 8, 1)),
        ("sdpa", "bwd", (BATCH, 2, 2, 16, 8, 1)),
        ("matmul", "fwd", (BATCH * 2, 16, 16, 8)),
        ("matmul", "bwd", (BATCH * 2, 16, 16, 8)),
        ("matmul", "fwd", (BATCH * 2, 16, 8, 16)),
        ("softmax", "fwd", (BATCH * 2 * 16, 16)),
        ("softmax", "bwd", (BATCH * 2 * 16, 16)),
        ("gelu", "fwd", (BATCH * 2 * 16, 8)),
        ("gelu", "bwd", (BATCH * 2 * 16, 8)),
        ("add", "fwd", (BATCH * 2 * 16, 8)),
        ("mul", "fwd", (BATCH * 2 * 16, 8)),
    }
    assert expected <= found, expected - found
    assert all(time_us > 0 and calls >= 1 for *_, calls, time_us in result["operators"])
    assert 0.2 < result["operator_time_share"] < 1
    assert sum(result["other_operators"].values()) <= 1 - result["operator_time_share"] + 1e-6


def test_autocast_ops_have_the_type_they_run_in_and_inference_has_no_backward():
    result = operators_in(Precision.MIXED_BF16)
    types = {(kind, precision) for kind, _, precision, *_ in result["operators"]}
    assert {("conv", "bf16"), ("linear", "bf16")} <= types
    forward = operators_in(Precision.FP64, phase="inference")["operators"]
    assert {(phase, precision) for _, phase, precision, *_ in forward} == {("fwd", "fp64")}


def test_every_row_is_a_kernel_that_the_corpus_encodes():
    from gnnpred.corpus.operators import OperatorRow
    from gnnpred.training.rows import encode_operator_rows

    result = operators_in(Precision.MIXED_BF16)
    rows = [
        OperatorRow("collect", "A100-SXM4-40GB", kind, phase, precision, tuple(shape), time_us)
        for kind, phase, precision, shape, _, time_us in result["operators"]
    ]
    encoded, timed = encode_operator_rows(rows)
    assert len(encoded) == len(rows) > 20
    assert (timed.sum(axis=1) >= 1).all()


class Op:
    """What the profiler tells of an op, for GPU ops that a CPU never runs."""

    def __init__(self, name, shapes=(), values=(), children=(), us=4.0, dtype="c10::Half"):
        self.name, self.shapes, self.values, self.children = name, shapes, values, children
        self.dtypes = [dtype] * len(shapes)
        self.total_us = us
        self.self_us = us - sum(child.total_us for child in children)


def kernels(*roots, precision=Precision.FP16):
    from gnnpred.collect.kernel_times import operators_of

    return {tuple(kernel): us for kernel, us in operators_of(roots, precision=precision, num_steps=1).times_us.items()}


QKV = [[2, 8, 128, 64], [2, 4, 128, 64], [2, 4, 128, 64]]


@pytest.mark.parametrize(
    ("name", "shapes", "values"),
    [
        ("flash_attention", QKV, [None] * 3 + [0.0, True]),
        ("efficient_attention", [*QKV, []], [None] * 4 + [True, 0.0, True]),
        ("cudnn_attention", [*QKV, []], [None] * 4 + [True, 0.0, True]),
    ],
)
def test_attention_of_every_library_is_one_kernel(name, shapes, values):
    name = f"aten::_scaled_dot_product_{name}"
    assert kernels(Op(name, shapes, values)) == {("sdpa", "fwd", "fp16", (2, 8, 4, 128, 64, 1)): 4.0}
    if "flash" not in name:
        shapes = [*QKV, [2, 8, 128, 128]]
        assert kernels(Op(name, shapes, values)) == {}, "a mask is more than the kind says"
    longer = [QKV[0], [2, 4, 256, 64], [2, 4, 256, 64], *shapes[3:]]
    assert kernels(Op(name, longer, values)) == {}


def test_tf32_is_the_type_of_products_alone():
    linear = Op("aten::addmm", [[16], [4, 8], [8, 16]], [None] * 3, dtype="float")
    gelu = Op("aten::gelu", [[4, 16]], [None], dtype="float")
    found = kernels(linear, gelu, precision=Precision.TF32)
    assert {kernel[2] for kernel in found} == {"tf32", "fp32"}
    assert ("linear", "fwd", "tf32", (1, 4, 16, 8)) in found


def test_a_first_linear_layer_has_the_weights_gradient_alone():
    def backward(*products):
        node = Op("AddmmBackward0", [[4, 16]], children=products, us=9.0)
        return Op("autograd::engine::evaluate_function: AddmmBackward0", children=[node], us=9.0)

    of_weight = Op("aten::mm", [[16, 4], [4, 8]])
    of_input = Op("aten::mm", [[4, 16], [16, 8]])
    assert list(kernels(backward(of_weight))) == [("linear", "bwd_weight", "fp16", (1, 4, 16, 8))]
    assert list(kernels(backward(of_input))) == [("linear", "bwd_data", "fp16", (1, 4, 16, 8))]
    assert list(kernels(backward(of_input, of_weight))) == [("linear", "bwd", "fp16", (1, 4, 16, 8))]


def test_what_no_kind_describes_is_counted():
    from gnnpred.collect.kernel_times import operators_of

    dilated = Op(
        "aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3], []],
        [None, None, None, [1, 1], [1, 1], [2, 2], False, [0, 0], 1], us=6.0,
    )  # fmt: skip
    found = operators_of([dilated, Op("aten::relu", [[4, 4]], us=4.0)], precision=Precision.FP16, num_steps=1)
    assert found.covered_share == pytest.approx(0.4)
    assert dict(found.other_shares) == {"aten::convolution": pytest.approx(0.6)}


def test_the_median_over_calls_and_how_often_a_step_makes_them():
    from gnnpred.collect.kernel_times import operators_of

    ops = [Op("aten::relu", [[4, 4]], us=us) for us in (1.0, 2.0, 9.0, 2.0, 2.0, 2.0)]
    found = operators_of(ops, precision=Precision.FP16, num_steps=3)
    ((kernel, time_us),) = found.times_us.items()
    assert (time_us, found.calls[kernel]) == (2.0, 2)
