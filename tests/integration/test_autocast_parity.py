"""Our precision lowering against what torch.autocast really does: the type of every op, and every cast.

Two comparisons, both without a GPU:

* CUDA's lists, forward: fake tensors on device "cuda" reach PyTorch's AutocastCUDA dispatch; no kernel runs. (Fake CUDA
  tensors cannot require a gradient where PyTorch is built without CUDA.)
* forward and backward, with the weight cache: real tensors under ``torch.autocast("cpu")``, our lowering with the CPU
  lists. The rules of gradients and casts are the same on both devices, only the lists differ.
"""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gnnpred.graph import OpPhase, Role  # noqa: E402
from gnnpred.job import Phase, Precision  # noqa: E402
from gnnpred.passes.backward import add_backward  # noqa: E402
from gnnpred.passes.precision import autocast_table, lower_precision  # noqa: E402
from tests.helpers.autocast import (  # noqa: E402
    BATCH_NORM,
    DTYPES,
    MODULES,
    PRECISIONS,
    Apply,
    Recorder,
    backward_products,
    graph_of,
    lowered_types,
    make_inputs,
)

pytestmark = pytest.mark.train


def _on_fake_cuda(module):
    """The module with empty weights on device "cuda"; call it under FakeTensorMode."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    return module


@pytest.fixture
def cuda_autocast():
    """Switches CUDA's autocast on without a GPU; torch.autocast would refuse."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def switch_on(half):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", half)

    yield switch_on
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    torch.clear_autocast_cache()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", MODULES)
def test_forward_types_and_casts_are_those_of_cuda_autocast(name, half, cuda_autocast):
    from torch._subclasses.fake_tensor import FakeTensorMode

    make, shapes = MODULES[name]
    graph = lower_precision(graph_of(make(), make_inputs(shapes, "cpu")), PRECISIONS[half])
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        module = _on_fake_cuda(make())
        inputs = [torch.empty(shape, dtype=x.dtype, device="cuda") for shape, x in
                  zip(shapes, make_inputs(shapes, "cpu"), strict=True)]  # fmt: skip
        cuda_autocast(half)
        with recorder:
            result = module(*inputs)
    casts, results = lowered_types(graph, OpPhase.FORWARD)
    assert casts == recorder.casts
    assert results == recorder.results
    assert graph.tensors[graph.outputs[0]].dtype is DTYPES[result.dtype]


# Several operators in PyTorch, one op of ours: the type of the result is compared.
COMPOSITES = {
    "cross entropy": lambda x: functional.cross_entropy(x, torch.zeros(len(x), 9, dtype=torch.long, device=x.device)),
    "rms norm": lambda x: functional.rms_norm(x, (9,)),
    "local response norm": lambda x: functional.local_response_norm(x, 3),
    "normalize": functional.normalize,
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "square": torch.square,
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_result_types_of_composite_functions_are_those_of_cuda_autocast(name, cuda_autocast):
    from torch._subclasses.fake_tensor import FakeTensorMode

    conv = nn.Conv1d(4, 6, 1)
    module = Apply(lambda m, x: COMPOSITES[name](m.conv(x)), conv=conv)
    graph = lower_precision(graph_of(module, [torch.zeros(1, 4, 9)]), Precision.MIXED)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        cuda_autocast(torch.float16)
        result = _on_fake_cuda(module)(torch.empty(1, 4, 9, device="cuda"))
    assert graph.tensors[graph.outputs[0]].dtype is DTYPES[result.dtype]


def test_the_cuda_lists_are_those_of_the_installed_pytorch():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    lists = autocast_table()["cuda"]

    def listed(macro):
        body = header.split(f"#define {macro}(_)")[1].split("\n\n")[0]
        return set(re.findall(r"_\((?:ADD_NS\()?(\w+)", body))

    assert set(lists["lower_precision"]) == listed("AT_FORALL_LOWER_PRECISION_FP")
    assert set(lists["fp32"]) == listed("AT_FORALL_FP32")
    assert set(lists["promote"]) == listed("AT_FORALL_PROMOTE")
    with_dtype = listed("AT_FORALL_FP32_SET_OPT_DTYPE") | listed("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE")
    assert set(lists["fp32_set_opt_dtype"]) == with_dtype


@pytest.mark.parametrize("name", [*MODULES, *BATCH_NORM])
def test_forward_and_backward_types_and_casts_are_those_of_cpu_autocast(name):
    make, shapes = (MODULES | BATCH_NORM)[name]
    torch.manual_seed(0)
    module, inputs = make(), make_inputs(shapes, "cpu")
    forward, backward = Recorder(), Recorder()
    with torch.autocast("cpu", dtype=torch.bfloat16), forward:
        result = module(*inputs)
    gradient = torch.ones_like(result)
    with backward:
        result.backward(gradient)
    graph = lower_precision(graph_of(make(), inputs), Precision.MIXED_BF16, autocast_device="cpu")
    graph = add_backward(graph, phase=Phase.TRAIN, loss=False)
    casts, results = lowered_types(graph, OpPhase.FORWARD)
    assert casts == forward.casts
    assert results == forward.results
    assert lowered_types(graph, OpPhase.BACKWARD)[0] == backward.casts
    assert backward_products(graph) == backward.products
    for spec, parameter in zip(
        (t for t in graph.tensors if t.role is Role.PARAMETER), module.parameters(), strict=True
    ):
        assert parameter.grad is None or spec.dtype is DTYPES[parameter.grad.dtype]
