"""Data sets of earlier predictors: PROFET (Keras CNNs), NeuSight (transformers), Sia, Gavel and others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.corpus.sources.record import Interpretation, image_size_of, interpret_common, seq_len_of
from gnnpred.corpus.sources.suites import BERT_BASE, BERT_LARGE

PREFIXES = ("profet-", "neusight-", "sia-", "gavel-", "justus2018-", "prenet-", "elasticflow-", "cmdare-")

_PROFET = {
    "LeNet5": "own:lenet5", "MNIST_CNN": "own:mnist_cnn", "CIFAR10_CNN": "own:cifar10_cnn", "AlexNet": "own:alexnet_bn",
    "ResNetSmall": "own:resnet_small", "VGG11": "own:vgg11_flat", "VGG13": "own:vgg13_flat", "VGG16": "own:vgg16_flat",
    "VGG19": "own:vgg19_flat", "ResNet18": "own:preact_resnet18", "ResNet34": "own:preact_resnet34",
    "ResNet50": "own:preact_resnet50", "MobileNetV2": "torchvision:mobilenet_v2", "InceptionV3": "timm:inception_v3",
    "InceptionResNetV2": "timm:inception_resnet_v2",
}  # fmt: skip
_PROFET_CLASSES = {32: 10, 64: 100, 128: 100, 224: 1000, 256: 1000}


def _gpt(layers: int, hidden: int, heads: int) -> str:
    return f"hf:GPT2LMHeadModel?n_layer={layers}&n_embd={hidden}&n_head={heads}&n_positions=2048"


_NEUSIGHT = {
    "bert_large": f"hf:BertForMaskedLM?{BERT_LARGE}",
    "gpt2_large": _gpt(36, 1280, 20),
    "gpt3_xl": _gpt(24, 3072, 24),  # by the shapes in the source's traces: wider than the GPT-3 XL of 1.3 billion
    "gpt3_27": _gpt(32, 2560, 32),
    "opt_13": "hf:OPTForCausalLM?hidden_size=2048&num_hidden_layers=24&num_attention_heads=32&ffn_dim=8192"
    "&word_embed_proj_dim=2048",
}

# A backward takes 1.7 to 2.1 times its forward; allocation inside the timed region brings that to 0.6 to 1.4
_MIN_BACKWARD_TO_FORWARD = 1.5


def interpret(record: Mapping[str, str], shared: Path) -> Interpretation | str:
    """One row of an earlier predictor's data set."""
    common = interpret_common(record)
    if isinstance(common, str):
        return common
    source_id, model = record["source_id"], record["model"]
    if source_id.startswith("profet"):
        return _interpret_profet(record, common)
    if source_id.startswith("neusight"):
        return _interpret_neusight(record, common)
    if source_id.startswith("sia"):
        return _interpret_sia(record, common)
    if source_id.startswith("cmdare"):
        return "asynchronous parameter server: not a synchronous step"
    if source_id.startswith("justus2018"):
        return common.replace(key=ModelKey("torchvision:vgg16", image_size=(224, 224)))
    if source_id.startswith(("gavel", "elasticflow")):
        if model == "ResNet-50" or model == "resnet50":
            key = ModelKey("torchvision:resnet50", image_size=(224, 224))
            return common.replace(key=key, data_loader=True, unused_reason="real data loader, setup not stated in full")
        return f"{model}: its setup is not stated in full"
    return f"{model}: its setup is not stated in full"


def _interpret_profet(record: Mapping[str, str], common: Interpretation) -> Interpretation | str:
    size = image_size_of(record["input"])
    source = _PROFET.get(record["model"])
    if source is None or size is None:
        return f"{record['model']} is not rebuilt"
    # Keras lays out NHWC, TensorFlow transposes to NCHW around cuDNN kernels in fp32
    return common.replace(
        key=ModelKey(source, image_size=size, num_classes=_PROFET_CLASSES[size[0]]),
        memory_format="nchw",
        host_copy=True,
    )


def _interpret_neusight(record: Mapping[str, str], common: Interpretation) -> Interpretation | str:
    source = _NEUSIGHT.get(record["model"])
    if source is None:
        return f"{record['model']}: its sizes are not stated, and which expert runs depends on the data"
    layout = re.match(r"(pipeline|tensor) parallel (\d+)", record["note"])
    if layout:
        common = common.replace(**{f"{layout[1]}_parallel": int(layout[2])}, unused_reason="model parallel")
    parts = re.search(r"fwd ([\d.]+) ms, bwd ([\d.]+) ms", record["note"])
    if parts:
        inflated = float(parts[2]) < _MIN_BACKWARD_TO_FORWARD * float(parts[1])
    else:  # nothing tells which inference runs of this GPU are
        inflated = "A100-80GB-PCIe" in record["source_id"] or record["gpu"].startswith("A100-PCIe-80")
    return common.replace(
        key=ModelKey(source, seq_len=seq_len_of(record["input"]) or 512),
        optimizer="none",
        unused_reason=common.unused_reason
        or ("allocation inside the timed region inflates the forward pass here" if inflated else ""),
    )


_HOST_BOUND = "the host sets the time: it hardly depends on the GPU"
_YOLO_SIZE = 480
_DEEPSPEECH_FRAMES = 450


def _interpret_sia(record: Mapping[str, str], common: Interpretation) -> Interpretation | str:
    model = record["model"]
    common = common.replace(data_loader=True)
    if model == "resnet50":
        return common.replace(key=ModelKey("torchvision:resnet50", image_size=(224, 224)))
    if model.startswith("ResNet18"):
        return common.replace(key=ModelKey("own:cifar_resnet18", image_size=(32, 32), num_classes=10))
    if model == "bert-base-uncased":
        return common.replace(key=ModelKey(f"hf:BertForQuestionAnswering?{BERT_BASE}", seq_len=384))
    if model == "NeuMF":
        # T4 and V100 take 7 and 100 ms for 32 samples, and hardly more for a thousand times as many
        return common.replace(key=ModelKey("own:neumf_ml1m"), unused_reason=_HOST_BOUND)
    if model.startswith("yolov3"):
        return common.replace(
            key=ModelKey("own:yolov3", image_size=(_YOLO_SIZE, _YOLO_SIZE), num_classes=20),
            notes=(*common.notes, "images of 320 to 608 pixels, changing every ten steps: 480 has their mean area"),
            unused_reason=_HOST_BOUND,
        )
    if model == "deepspeech2":
        return common.replace(
            key=ModelKey("own:deepspeech2", seq_len=_DEEPSPEECH_FRAMES),
            unused_reason=_HOST_BOUND,
            notes=(*common.notes, "the length of its utterances is not stated: 4.5 s assumed"),
        )
    return f"{model}: not rebuilt"
