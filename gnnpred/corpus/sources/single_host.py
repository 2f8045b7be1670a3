"""Smaller single-host benchmarks: one repository, a few models, one machine each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.corpus.sources.record import Interpretation, image_size_of, interpret_common, seq_len_of
from gnnpred.corpus.sources.suites import BERT_BASE, BERT_LARGE, TRANSLATION_LENGTH, inception_or_plain, masked_bert_key

PREFIXES = (
    "jcj-", "u39kun", "paddleperf-", "nersc-", "zyr17", "mxnet-perf", "pycls-", "gpuinsights", "mrdbourke", "skb",
    "tlkh", "lucadiliello", "soumith", "paddleclas-", "stylegan", "detectron2-",
)  # fmt: skip

_JCJ = {"googlenet-v1": "torchvision:googlenet", "resnet200": "own:resnet200", "resnet101": "own:resnet101_v1",
        "resnet152": "own:resnet152_v1", "resnet50": "own:resnet50_v1"}  # fmt: skip
_MXNET = {
    "inception-bn": "own:inception_bn",
    "alexnet": "torchvision:alexnet", "resnet50": "own:preact_resnet50", "inception-v3": "timm:inception_v3",
    "resnet-50": "own:preact_resnet50", "vgg16": "torchvision:vgg16", "inception-v4": "timm:inception_v4",
    "resnet152": "own:preact_resnet152", "resnet-152": "own:preact_resnet152",
}  # fmt: skip
_SOUMITH = {"AlexNet": "torchvision:alexnet", "OverFeat[fast]": "own:overfeat", "VGG Model-A": "torchvision:vgg11"}
_PYCLS = {
    "ResNet-50": "torchvision:resnet50", "ResNet-101": "torchvision:resnet101", "ResNet-152": "torchvision:resnet152",
    "ResNeXt-50": "torchvision:resnext50_32x4d", "ResNeXt-101": "timm:resnext101_32x4d",
}  # fmt: skip


_LEFT_OUT = {
    "paddleclas": "latency of a TensorRT engine, not of a framework's graph",
    "stylegan": "a step alternates generator, discriminator and, every few steps, regularisation: no single graph",
    "detectron2": "mean over a whole run of changing image sizes, or with post-processing, on V100s of unstated memory",
    "gpuinsights": "epochs whose number is guessed",
}


def interpret(record: Mapping[str, str], shared: Path) -> Interpretation | str:
    """One row of a single-host benchmark."""
    common = interpret_common(record)
    if isinstance(common, str):
        return common
    source_id = record["source_id"]
    for prefix, interpreter in _INTERPRETERS.items():
        if source_id.startswith(prefix):
            return interpreter(record, common)
    reason = next((text for prefix, text in _LEFT_OUT.items() if source_id.startswith(prefix)), "setup not stated")
    return f"{record['model']}: {reason}"


def _torchvision(name: str, record: Mapping[str, str]) -> ModelKey:
    return ModelKey(f"torchvision:{name}", image_size=image_size_of(record["input"]) or (224, 224))


def _interpret_jcj(record, common):
    model = record["model"]
    key = inception_or_plain(_JCJ.get(model, f"torchvision:{model}"), image_size_of(record["input"]))
    if model == "googlenet-v1":  # Torch's model has no auxiliary classifiers
        key = ModelKey(key.source, image_size=key.image_size, train=False)
    unused = ""
    if record["phase"] == "infer":
        unused = "forward pass in training mode"
    return common.replace(key=key, optimizer="none", unused_reason=unused)


def _interpret_u39kun(record, common):
    return common.replace(
        key=_torchvision(record["model"], record), optimizer="none", input_gradient=record["phase"] != "infer"
    )


def _interpret_paddleperf(record, common):
    model = record["model"]
    fused = record["framework"] in ("mxnet", "paddle")
    if model == "resnet50v1.5":
        return common.replace(
            key=_torchvision("resnet50", record),
            data_loader=True,
            unused_reason="operators fused by the framework" if fused else "",
        )
    if model == "bert-base-pretrain":
        return common.replace(
            key=masked_bert_key(BERT_BASE, seq_len_of(record["input"]) or 128),
            architecture_key=ModelKey(f"hf:BertForPreTraining?{BERT_BASE}", seq_len=128),
            data_loader=True,
        )
    if model == "transformer-big":
        key = ModelKey("own:transformer_big", seq_len=TRANSLATION_LENGTH)
        return common.replace(
            key=key,
            batch_size=max(1, round(common.batch_size / TRANSLATION_LENGTH)),
            data_loader=True,
            unused_reason="the step time is estimated from a limit on tokens",
        )
    return f"{model}: its setup is not stated in full"


def _interpret_nersc(record, common):
    model = record["model"]
    if model in ("resnet50", "alexnet"):
        return common.replace(key=_torchvision(model, record), host_copy=True)
    if model == "lstm":
        return common.replace(key=ModelKey("own:lstm_classifier"), host_copy=True)
    if model == "transformer":
        return common.replace(key=ModelKey("own:encoder_language_model", seq_len=512), host_copy=True)
    return f"{model}: the size of its input is not stated"


def _interpret_zyr17(record, common):
    if record["model"] != "resnet152":
        return "one-layer LSTM of an unstated input layout"
    unused = "BatchNorm in training mode" if record["phase"] == "infer" else ""
    return common.replace(key=_torchvision("resnet152", record), unused_reason=unused)


def _interpret_mxnet(record, common):
    source = _MXNET.get(record["model"].lower())
    if source is None:
        return f"{record['model']} is not rebuilt"
    if source.startswith("own:inception_bn"):
        return common.replace(key=ModelKey(source))
    return common.replace(key=inception_or_plain(source, image_size_of(record["input"])))


def _interpret_pycls(record, common):
    model = record["model"]
    size = image_size_of(record["input"]) or (224, 224)
    source = _PYCLS.get(model)
    if source is None and model.startswith("RegNet"):
        design, _, flops = model.partition("-")
        number = float(flops.rstrip("MGF")) * (1 if flops.endswith("GF") else 0.001)
        source = f"timm:{design.lower()}_{round(number * 10):03d}"
    if source is None and model.startswith("EfficientNet"):
        source = "timm:" + model.lower().replace("-", "_")
    if source is None:
        return f"{model} is not rebuilt"
    return common.replace(key=ModelKey(source, image_size=size))


def _interpret_resnet50_epochs(record, common):
    if record["model"] != "resnet50":
        return f"{record['model']} is not rebuilt"
    return common.replace(
        key=_torchvision("resnet50", record), data_loader=True, unused_reason="epoch time with the loader included"
    )


def _interpret_skb(record, common):
    return common.replace(key=_torchvision("resnet50", record), unused_reason="optimizer and software are not stated")


def _interpret_tlkh(record, common):
    model = record["model"]
    if model == "resnet50":
        key = _torchvision("resnet50", record)
    elif model == "mobilenetv2":
        key = _torchvision("mobilenet_v2", record)
    elif model == "bertlarge":
        key = ModelKey(f"hf:BertForSequenceClassification?{BERT_LARGE}", seq_len=128)
    else:
        key = ModelKey("hf:DistilBertForSequenceClassification?", seq_len=128)
    return common.replace(key=key, data_loader=True)


def _interpret_lucadiliello(record, common):
    return common.replace(
        key=ModelKey(
            f"hf:BertForSequenceClassification?{BERT_BASE}&vocab_size=28996", seq_len=seq_len_of(record["input"])
        )
    )


def _interpret_soumith(record, common):
    source = _SOUMITH.get(record["model"])
    unused = "fp16 storage with fp32 arithmetic" if record["precision"] == "fp16" else ""
    if record["model"] == "GoogleNet":
        key = ModelKey("torchvision:googlenet", image_size=(224, 224), train=False)
    elif source is None:
        return f"{record['model']} is not rebuilt"
    else:
        key = ModelKey(source, image_size=image_size_of(record["input"]))
    return common.replace(key=key, optimizer="none", unused_reason=unused)


_INTERPRETERS = {
    "jcj-": _interpret_jcj,
    "u39kun": _interpret_u39kun,
    "paddleperf-": _interpret_paddleperf,
    "nersc-": _interpret_nersc,
    "zyr17": _interpret_zyr17,
    "mxnet-perf": _interpret_mxnet,
    "pycls-": _interpret_pycls,
    "mrdbourke": _interpret_resnet50_epochs,
    "skb": _interpret_skb,
    "tlkh": _interpret_tlkh,
    "lucadiliello": _interpret_lucadiliello,
    "soumith": _interpret_soumith,
}
