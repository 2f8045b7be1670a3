"""Our precision lowering against torch.autocast on a real GPU, forward and backward."""

import pytest

torch = pytest.importorskip("torch")

from gnnpred.graph import OpPhase  # noqa: E402
from gnnpred.job import Phase  # noqa: E402
from gnnpred.passes.backward import add_backward  # noqa: E402
from gnnpred.passes.precision import lower_precision  # noqa: E402
from tests.helpers.autocast import (  # noqa: E402
    BATCH_NORM,
    MODULES,
    PRECISIONS,
    Recorder,
    backward_products,
    graph_of,
    lowered_types,
    make_inputs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.train,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", [*MODULES, *BATCH_NORM])
def test_types_and_casts_are_those_of_autocast_on_the_gpu(name, half):
    make, shapes = (MODULES | BATCH_NORM)[name]
    module, inputs = make().cuda(), make_inputs(shapes, "cuda")
    forward, backward = Recorder(), Recorder()
    with torch.autocast("cuda", dtype=half), forward:
        result = module(*inputs)
    with backward:
        result.backward(torch.ones_like(result))
    graph = lower_precision(graph_of(make(), make_inputs(shapes, "cpu")), PRECISIONS[half])
    graph = add_backward(graph, phase=Phase.TRAIN, loss=False)
    casts, results = lowered_types(graph, OpPhase.FORWARD)
    assert casts == forward.casts
    assert results == forward.results
    assert lowered_types(graph, OpPhase.BACKWARD)[0] == backward.casts
    assert backward_products(graph) == backward.products
