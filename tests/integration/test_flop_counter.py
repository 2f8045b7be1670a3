"""Our flops against torch.utils.flop_counter, which counts what PyTorch really dispatches, forward and backward."""

import pytest

torch = pytest.importorskip("torch")

from gnnpred.model_sources import declare_torchvision_ops  # noqa: E402

declare_torchvision_ops()
pytest.importorskip("timm")
pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode, conv_flop_count  # noqa: E402

from gnnpred.corpus.trace import TRACE_BATCH_SIZE, trace_module  # noqa: E402
from gnnpred.costs import op_costs  # noqa: E402
from gnnpred.graph import OpPhase  # noqa: E402
from gnnpred.job import Phase, Precision  # noqa: E402
from gnnpred.passes.backward import add_backward  # noqa: E402
from gnnpred.passes.batch import rebind_batch  # noqa: E402
from gnnpred.passes.precision import lower_precision  # noqa: E402

pytestmark = pytest.mark.models

BATCH_SIZE = 2
PRODUCTS = ("conv", "conv_transpose", "linear", "matmul", "sdpa")

TIMM_MODELS = [
    "resnet18", "resnext50_32x4d", "seresnext26d_32x4d", "efficientnet_b0", "mobilenetv3_small_100", "regnety_002",
    "convnext_atto", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "eca_nfnet_l0", "densenet121",
    "ghostnet_100", "mixer_s32_224", "resmlp_12_224", "poolformer_s12", "cait_xxs24_224", "levit_128s",
    "mobilevit_xxs", "crossvit_tiny_240", "gmlp_ti16_224", "pvt_v2_b0", "edgenext_xx_small", "repvgg_a0",
    "swin_tiny_patch4_window7_224", "dla34", "xcit_nano_12_p16_224",
]  # fmt: skip
TORCHVISION_MODELS = [
    "alexnet", "vgg11", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "fcn_resnet50", "r3d_18", "googlenet",
]  # fmt: skip
TRANSFORMERS_MODELS = [
    "bert", "gpt2", "distilbert", "llama", "vit",
]  # fmt: skip


def _build_timm(name):
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, [torch.empty(BATCH_SIZE, *model.default_cfg["input_size"])]


def _build_torchvision(name):
    import torchvision

    shape = (3, 4, 56, 56) if name == "r3d_18" else (3, 224, 224)
    options = {"weights": None}
    if name.startswith("fcn"):
        options["weights_backbone"] = None
    if name == "googlenet":
        options |= {"aux_logits": False, "init_weights": False}
    return torchvision.models.get_model(name, **options), [torch.empty(BATCH_SIZE, *shape)]


def _build_transformers(name):
    import transformers

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    classes = {
        "bert": ("BertConfig", "BertForSequenceClassification", small),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        "distilbert": (
            "DistilBertConfig",
            "DistilBertForSequenceClassification",
            {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
        ),
        "llama": ("LlamaConfig", "LlamaForCausalLM", small | {"num_key_value_heads": 2}),
        "vit": ("ViTConfig", "ViTForImageClassification", small),
    }
    config_class, model_class, fields = classes[name]
    config = getattr(transformers, config_class)(**fields, use_cache=False, attn_implementation="eager")
    model = getattr(transformers, model_class)(config)
    if name == "vit":
        return model, [torch.empty(BATCH_SIZE, 3, 224, 224)]
    tokens = torch.zeros(BATCH_SIZE, 24, dtype=torch.long)
    # A four-dimensional mask is taken as it is; any other is inspected, which needs data.
    mask = {"attention_mask": torch.zeros(BATCH_SIZE, 1, 24, 24)} if name in ("gpt2", "llama") else {}
    return model, {"input_ids": tokens, **mask}


BUILDERS = {"timm": _build_timm, "torchvision": _build_torchvision, "transformers": _build_transformers}
MODELS = [
    *(f"timm:{name}" for name in TIMM_MODELS),
    *(f"torchvision:{name}" for name in TORCHVISION_MODELS),
    *(f"transformers:{name}" for name in TRANSFORMERS_MODELS),
]


def _first_tensor(result):
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, (tuple, list)):
        return sum(_first_tensor(part).sum() for part in result)
    if hasattr(result, "logits"):
        return result.logits
    return _first_tensor(next(iter(result.values())))


def _convolution_backward_flops(
    grad, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, mask, out_shape=None, **_
):
    """PyTorch's formula, but for grouped weight gradients: it ignores the groups there and counts them over again."""
    counted = 0
    if mask[0]:
        counted += conv_flop_count(grad, weight, out_shape[0], transposed=not transposed)
    if mask[1]:
        wide, narrow = (grad, x) if transposed else (x, grad)
        swapped = [[shape[1], shape[0], *shape[2:]] for shape in (wide, narrow, out_shape[1])]
        counted += conv_flop_count(*swapped, transposed=False) // groups
    return counted


def _counted_by_torch(model, inputs):
    """(forward, backward) flops of PyTorch's own counter; matrix products and convolutions only."""
    model.train()
    mapping = {torch.ops.aten.convolution_backward: _convolution_backward_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        result = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        loss = _first_tensor(result).sum()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def _counted_by_us(model, inputs):
    def widen(x):
        return torch.empty(TRACE_BATCH_SIZE, *x.shape[1:], dtype=x.dtype, device="meta")

    inputs = {k: widen(x) for k, x in inputs.items()} if isinstance(inputs, dict) else [widen(x) for x in inputs]
    graph = rebind_batch(trace_module(model, inputs), BATCH_SIZE)
    graph = add_backward(lower_precision(graph, Precision.FP32), phase=Phase.TRAIN)
    totals = {OpPhase.FORWARD: 0.0, OpPhase.BACKWARD: 0.0}
    for op, cost in zip(graph.ops, op_costs(graph), strict=True):
        if op.kind in PRODUCTS:
            flops = cost.flops * op.repeats
            if op.kind == "sdpa" and op.phase is OpPhase.BACKWARD:
                # On the meta device PyTorch runs the plain formula: it keeps the scores, so it saves one of the five
                # products that the fused kernel of a GPU needs.
                flops *= 4 / 5
            totals[op.phase] += flops
    return totals[OpPhase.FORWARD], totals[OpPhase.BACKWARD]


@pytest.mark.parametrize("source", MODELS)
def test_flops_of_products_agree_with_the_flop_counter(source):
    library, name = source.split(":")
    with torch.device("meta"):
        model, inputs = BUILDERS[library](name)
    expected_forward, expected_backward = _counted_by_torch(model, inputs)
    forward, backward = _counted_by_us(model, inputs)
    assert forward == pytest.approx(expected_forward, rel=0.01)
    assert backward == pytest.approx(expected_backward, rel=0.01)
