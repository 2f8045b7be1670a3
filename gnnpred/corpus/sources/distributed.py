"""Single-GPU rows of vendor suites: NVIDIA's DeepLearningExamples and OneFlow's DLPerf.

Only models whose input has one size and whose step has no accumulation are rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.corpus.sources.record import Interpretation, image_size_of, interpret_common, seq_len_of
from gnnpred.corpus.sources.suites import BERT_BASE, BERT_LARGE

PREFIXES = ("dle-", "dlperf-", "flagperf-", "mlperf-", "distributed-")

_CNNS = {
    "resnet50_v1.5": "torchvision:resnet50", "resnet50_v1b": "timm:resnet50",
    "se-resnext101-32x4d": "timm:seresnext101_32x4d",
    "resnext101-32x4d": "timm:resnext101_32x4d", "efficientnet-b0": "timm:efficientnet_b0",
    "efficientnet-b4": "timm:efficientnet_b4", "efficientnet_v2-s": "timm:efficientnetv2_rw_s",
}  # fmt: skip
_SEGMENTATION = {"nnunet-2d": "own:nnunet2d", "nnunet-3d": "own:nnunet3d", "unet2d-medical": "own:unet_valid"}


def interpret(record: Mapping[str, str], shared: Path) -> Interpretation | str:
    """One row of a vendor suite."""
    common = interpret_common(record)
    if isinstance(common, str):
        return common
    if record["source_id"].startswith(("flagperf", "mlperf", "distributed")):
        return "precision or setup inferred, not stated"
    model = record["model"]
    accumulates = record["grad_accum"] not in ("", "1")
    # optimized graph executors and fused layers: not what an eager graph describes
    fused = record["framework"] in ("mxnet", "paddle", "oneflow", "mindspore")
    unused = "operators fused by the framework" if fused else ""
    if accumulates:
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
    elif model == "electra-base" and (seq_len := seq_len_of(record["input"])):
        key = ModelKey("hf:ElectraForQuestionAnswering?hidden_size=768&embedding_size=768&num_attention_heads=12"
                       "&intermediate_size=3072", seq_len=seq_len)  # fmt: skip
    else:
        return f"{model}: inputs of varying size or a model that is not rebuilt"
    return common.replace(key=key, data_loader=True, unused_reason=unused)
