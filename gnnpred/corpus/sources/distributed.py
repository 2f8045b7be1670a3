"""Vendor suites: NVIDIA's DeepLearningExamples and OneFlow's DLPerf.

A step on one GPU that accumulates eight micro-batches or more is entered as forward and backward of one
micro-batch: its share of the optimizer step is below a hundredth. Fewer are kept, but not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.corpus.sources.record import Interpretation, image_size_of, interpret_common, seq_len_of
from gnnpred.corpus.sources.suites import (
    BERT_BASE,
    BERT_LARGE,
    GNMT_LENGTH,
    GNMT_TOKENS_PER_PAIR,
    MASK_RCNN,
    MASK_RCNN_NOTE,
    MASK_RCNN_PADDED,
    TRANSFORMER_XL_BASE,
    TRANSFORMER_XL_LARGE,
    TRANSLATION_LENGTH,
    masked_bert_key,
)
from gnnpred.job import ActivationRule, Phase, Precision

PREFIXES = ("dle-", "dlperf-", "flagperf-", "mlperf-", "distributed-")

_CNNS = {
    "resnet50_v1.5": "torchvision:resnet50", "resnet50_v1b": "timm:resnet50",
    "se-resnext101-32x4d": "timm:seresnext101_32x4d",
    "resnext101-32x4d": "timm:resnext101_32x4d", "efficientnet-b0": "timm:efficientnet_b0",
    "efficientnet-b4": "timm:efficientnet_b4", "efficientnet_v2-s": "timm:efficientnetv2_rw_s",
}  # fmt: skip
# the 3-D U-Net of the TensorFlow examples has the same levels and widths as nnU-Net's
_SEGMENTATION = {
    "nnunet-2d": "own:nnunet2d", "nnunet-3d": "own:nnunet3d", "unet2d-medical": "own:unet_valid",
    "unet3d-medical": "own:nnunet3d",
}  # fmt: skip


_JASPER_FRAMES = 1640
_DENSE_BERT_YEAR = 21  # NVIDIA's PyTorch BERT of 2021 predicts masked positions only and left Apex
MIN_MICRO_BATCHES = 8  # from here on the optimizer's share of a micro-batch is negligible
_LEFT_OUT = {
    "dlrm": "its embeddings are updated sparsely, which no graph here describes",
    "wide-and-deep": "its embeddings are updated sparsely, which no graph here describes",
    "sim": "its embeddings are updated sparsely, which no graph here describes",
    "se3-transformer": "molecules of varying size",
}


def interpret(record: Mapping[str, str], shared: Path) -> Interpretation | str:
    """One row of a vendor suite."""
    model = record["model"]
    for name, reason in _LEFT_OUT.items():
        if model.startswith(name):
            return f"{model}: {reason}"
    if model.startswith("gnmt") and not record["step_time_ms"]:
        record = _with_gnmt_step_time(record)
    common = interpret_common(record)
    if isinstance(common, str):
        return common
    if record["source_id"].startswith(("flagperf", "mlperf", "distributed")):
        return "precision or setup inferred, not stated"
    num_micro_batches = int(record["grad_accum"] or 1)
    # optimized graph executors and fused layers: not what an eager graph describes
    fused = record["framework"] in ("mxnet", "paddle", "oneflow", "mindspore")
    unused = "operators fused by the framework" if fused else ""
    if num_micro_batches >= MIN_MICRO_BATCHES and record["gpus"] == "1":
        common = common.replace(
            phase=Phase.FORWARD_BACKWARD,
            optimizer="none",
            grad_accum=1,
            step_time_ms=common.step_time_ms / num_micro_batches,
            notes=(*common.notes, f"one of {num_micro_batches} accumulated micro-batches"),
        )
    elif num_micro_batches > 1:
        unused = "gradient accumulation: the step holds several forward passes"
    if model in _CNNS:
        key = ModelKey(_CNNS[model], image_size=image_size_of(record["input"]) or (224, 224))
    elif model in _SEGMENTATION:
        key = ModelKey(_SEGMENTATION[model])
        common = common.replace(optimizer="adam")
    elif model == "ssd300-resnet50":
        key = ModelKey("own:ssd300", image_size=(300, 300), num_classes=81)
    elif model in ("bert-large", "bert-base") and (seq_len := seq_len_of(record["input"])):
        sizes = BERT_LARGE if model == "bert-large" else BERT_BASE
        head = "BertForQuestionAnswering" if seq_len == 384 else "BertForPreTraining"
        key = ModelKey(f"hf:{head}?{sizes}", seq_len=seq_len)
        container = re.match(r"ngc-(\d\d)", record["framework_version"])
        is_recent = container is not None and int(container.group(1)) >= _DENSE_BERT_YEAR
        if head == "BertForPreTraining" and (record["framework"].startswith("tensorflow") or is_recent):
            common = common.replace(architecture_key=key)
            key = masked_bert_key(sizes, seq_len)
        if record["framework"] == "pytorch" and common.precision is Precision.MIXED and container and not is_recent:
            common = common.replace(activation_rule=ActivationRule.ALL_HALF)  # Apex O2; native autocast since
    elif model == "electra-base" and (seq_len := seq_len_of(record["input"])):
        key = ModelKey("hf:ElectraForQuestionAnswering?hidden_size=768&embedding_size=768&num_attention_heads=12"
                       "&intermediate_size=3072", seq_len=seq_len)  # fmt: skip
    elif model == "ncf-neumf (ml-20m)" and record["framework"] == "pytorch":
        key = ModelKey("own:neumf_ml20m")
        return common.replace(key=key, unused_reason=unused)
    elif model.startswith("transformer-xl"):
        key = ModelKey(
            TRANSFORMER_XL_BASE if model.endswith("base") else TRANSFORMER_XL_LARGE,
            seq_len=192 if model.endswith("base") else 384,
        )
        if record["framework"] == "pytorch" and common.precision is Precision.MIXED:  # the recipe is Apex O2
            common = common.replace(activation_rule=ActivationRule.ALL_HALF)
        return common.replace(key=key, unused_reason=unused)
    elif model == "gnmt-v2":
        key = ModelKey("own:gnmt_v2", seq_len=GNMT_LENGTH)
        common = common.replace(notes=(*common.notes, "mean length of both sides: 25 tokens; step time from tokens/s"))
        if record["framework"] == "tensorflow":
            unused = unused or "its LSTMs loop over steps in the graph, one cell at a time"
    elif model.startswith("transformer-big"):
        key = ModelKey("own:transformer_big", seq_len=TRANSLATION_LENGTH)
        common = common.replace(batch_size=max(1, round(common.batch_size / TRANSLATION_LENGTH)))
        unused = unused or "the step time is estimated from a limit on tokens"
    elif match := re.fullmatch(r"efficientnet-widese-b([04])", model):
        size = (image_size_of(record["input"]) or (224, 224))[0]
        key = ModelKey(f"own:efficientnet_wide_se?variant={match.group(1)}&image_size={size}")
    elif model == "maskrcnn-resnet50-fpn":
        padded = record["framework"].startswith("tensorflow")
        key = ModelKey(MASK_RCNN_PADDED if padded else MASK_RCNN)
        if not padded:
            common = common.replace(notes=(*common.notes, MASK_RCNN_NOTE))
        elif not record["framework_version"]:
            unused = unused or "software not stated, and three times slower than any stated"
    elif model == "jasper-10x5":
        key = ModelKey("own:jasper", seq_len=_JASPER_FRAMES)
        common = common.replace(notes=(*common.notes, "utterances padded to the longest of the batch, about 16.4 s"))
    elif model.startswith("bert-base (biobert)"):
        key = ModelKey(f"hf:BertForTokenClassification?{BERT_BASE}&vocab_size=28996", seq_len=128)
    elif match := re.match(r"gpt2?(?:-small)?-l(\d+)-h(\d+)-a(\d+)", model):
        layout = re.search(r"DPxTPxPP=\d+x(\d+)x(\d+)", record["note"])
        if layout and layout.groups() != ("1", "1"):
            return "model parallel: one GPU runs a part of the graph"
        layers, width, heads = match.groups()
        length = seq_len_of(record["input"]) or 1024
        key = ModelKey(
            f"hf:GPT2LMHeadModel?n_layer={layers}&n_embd={width}&n_head={heads}&n_positions={length}&vocab_size=51200",
            seq_len=length,
        )
        checkpointing = "full" if "checkpointing on" in record["note"] else ""
        if common.precision is Precision.MIXED:  # Megatron keeps its weights in half beside fp32 masters
            common = common.replace(activation_rule=ActivationRule.ALL_HALF)
        return common.replace(key=key, checkpointing=checkpointing, unused_reason=unused)
    else:
        return f"{model}: not rebuilt"
    return common.replace(key=key, data_loader=True, unused_reason=unused)


def _with_gnmt_step_time(record: Mapping[str, str]) -> Mapping[str, str]:
    """The record with the step time that its rate gives at the mean number of tokens of a sentence pair."""
    try:
        pairs = float(record["batch_per_gpu"]) * int(record["gpus"]) * int(record["grad_accum"] or 1)
        step_time_ms = 1e3 * pairs * GNMT_TOKENS_PER_PAIR / float(record["throughput"])
    except (ValueError, ZeroDivisionError):
        return record
    return {**record, "step_time_ms": f"{step_time_ms:.6g}"}
