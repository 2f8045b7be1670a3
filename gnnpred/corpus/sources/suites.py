"""Lambda's PyTorch and TensorFlow suites: training steps with the optimizer, batch filling the memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.corpus.sources.record import Interpretation, image_size_of, interpret_common
from gnnpred.job import ActivationRule, Precision

PREFIXES = ("lambda-",)

BERT_BASE = "hidden_size=768&num_hidden_layers=12&num_attention_heads=12&intermediate_size=3072"
BERT_LARGE = "hidden_size=1024&num_hidden_layers=24&num_attention_heads=16&intermediate_size=4096"
TF_CNN_SOURCES = {
    "alexnet": "torchvision:alexnet", "vgg16": "torchvision:vgg16", "inception3": "torchvision:inception_v3?aux",
    "inception4": "timm:inception_v4", "resnet50": "own:resnet50_v1", "resnet152": "own:resnet152_v1",
}  # fmt: skip
_XL_BASE_SIZES = "layers=16&width=512&heads=8&inner=2048"
_XL_LARGE_SIZES = "layers=18&width=1024&heads=16&inner=4096&attention_dropout_pct=20"
TRANSFORMER_XL_BASE = f"own:transformer_xl?{_XL_BASE_SIZES}&divide=1"
TRANSFORMER_XL_LARGE = f"own:transformer_xl?{_XL_LARGE_SIZES}&divide=4"
# tokens of a sentence pair of WMT16 en-de, both sides: tokens/s x s / batch in Lambda's logs gives 48.6 to 49.5
GNMT_TOKENS_PER_PAIR = 49.0
GNMT_LENGTH = 25
TRANSLATION_LENGTH = 28  # tokens of a sentence of WMT14 en-de in subwords, either side
# COCO at 800 pixels on the shorter side, padded to the widest image of a batch of mostly 4:3 and 3:2
MASK_RCNN = "own:mask_rcnn?height=800&width=1216"
MASK_RCNN_NOTE = "images of varying size: 800x1216 is the mean of a padded batch"
MASK_RCNN_PADDED = "own:mask_rcnn?height=832&width=1344"  # the TensorFlow example pads every image
_PYTORCH_SOURCES = {
    "gnmt": "own:gnmt_v2",
    "ncf": "own:neumf_ml20m",
    "maskrcnn": MASK_RCNN,
    # LJSpeech, padded to the longest of a batch: 180 characters, 860 frames (its mean is 566 frames)
    "tacotron2": "own:tacotron2?num_frames=860",
    # Lambda's commands lack --adaptive: one softmax over all 267,735 words
    "transformerxlbase": f"own:transformer_xl?{_XL_BASE_SIZES}&divide=0",
    "transformerxllarge": f"own:transformer_xl?{_XL_LARGE_SIZES}&divide=0",
    "resnet50": "torchvision:resnet50",
    "SSD": "own:ssd300",
    "waveglow": "own:waveglow",
    "bert_base_squad": f"hf:BertForQuestionAnswering?{BERT_BASE}",
    "bert_large_squad": f"hf:BertForQuestionAnswering?{BERT_LARGE}",
}

_MASKED_SHARE = 20 / 128  # Google's max_predictions_per_seq: 20 of 128, 80 of 512


def masked_bert_key(sizes: str, seq_len: int) -> ModelKey:
    """BERT pre-training whose vocabulary projection runs on the masked positions alone."""
    options = dict(parse_qsl(sizes))
    return ModelKey(
        f"own:bert_pretraining?layers={options['num_hidden_layers']}&width={options['hidden_size']}"
        f"&heads={options['num_attention_heads']}&masked={round(seq_len * _MASKED_SHARE)}",
        seq_len=seq_len,
    )


def interpret(record: Mapping[str, str], shared: Path) -> Interpretation | str:
    """One Lambda row."""
    common = interpret_common(record)
    if isinstance(common, str):
        return common
    if record["source_id"].startswith("lambda-tf"):
        return _interpret_tensorflow(record, common)
    model = record["model"]
    source = _PYTORCH_SOURCES.get(model)
    if source is None:
        return f"{model}: not rebuilt"
    size = image_size_of(record["input"])
    if model == "gnmt":
        key = ModelKey(source, seq_len=GNMT_LENGTH)
        common = common.replace(notes=(*common.notes, "mean length of both sides: 25 tokens"))
    elif model == "ncf":
        key = ModelKey(source)
    elif model.startswith("transformerxl"):
        key = ModelKey(source, seq_len=192 if model.endswith("base") else 256)
        common = common.replace(optimizer="lamb" if model.endswith("base") else "adam")  # as its commands say
        if common.precision is Precision.MIXED:  # the recipe is Apex O2
            common = common.replace(activation_rule=ActivationRule.ALL_HALF)
        if record["gpus"] != "1":  # 770 MB and more of gradients would take ten times the 1 to 3 ms that GPUs add
            common = common.replace(unused_reason="its GPUs cannot have exchanged gradients in that time")
    elif model == "maskrcnn":
        key = ModelKey(source)
        common = common.replace(notes=(*common.notes, MASK_RCNN_NOTE))
    elif model == "tacotron2":
        key = ModelKey(source, seq_len=180)
        common = common.replace(notes=(*common.notes, "padded to the longest: 180 characters, 860 frames"))
    elif model == "waveglow":
        key = ModelKey(source)
    elif model == "SSD":
        key = ModelKey(source, image_size=(300, 300), num_classes=81)
    elif size is None:
        key = ModelKey(source, seq_len=384)
    else:
        key = ModelKey(source, image_size=size)
    if model.startswith("bert"):  # NVIDIA's script writes attention out, whatever PyTorch has by now
        common = common.replace(attention="eager")
    data = re.search(r"(?:^|;)data=([^;]*)", record["note"])
    real = model in ("SSD", "gnmt", "maskrcnn", "tacotron2") or bool(data and not data.group(1).startswith("synt"))
    if "published_throughput" in record["note"]:
        common = common.replace(notes=(*common.notes, "from_progress_bar"))
    return common.replace(key=key, data_loader=real)


def _interpret_tensorflow(record: Mapping[str, str], common: Interpretation) -> Interpretation | str:
    source = TF_CNN_SOURCES.get(record["model"])
    if source is None:
        return f"{record['model']} is not rebuilt"
    real = "data=real" in record["note"]
    return common.replace(
        key=inception_or_plain(source, image_size_of(record["input"])),
        data_loader=real,
        unused_reason="input-bound: the loader, not the GPU, sets the time" if "input-bound" in record["note"] else "",
    )


def inception_or_plain(source: str, size: tuple[int, int] | None) -> ModelKey:
    """Key of a CNN; ``?aux`` marks Inception-v3, which the benchmarks run without its auxiliary head."""
    if source.endswith("?aux"):
        return ModelKey("timm:inception_v3", image_size=size or (299, 299))
    return ModelKey(source, image_size=size or (224, 224))
