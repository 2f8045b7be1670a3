"""Large language models on many GPUs: llm-foundry's MPT and others; model-parallel runs are left out.

A graph is the work of one GPU. Under data parallelism, sharded or not, that is the whole model at the
micro-batch; under tensor, pipeline, context or expert parallelism it is a part that no table describes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.corpus.sources.record import Interpretation, interpret_common, seq_len_of
from gnnpred.job import ActivationRule

PREFIXES = (
    "llm-foundry", "internevo-", "torchtitan-", "bigscience-", "mbridge-", "nemo-", "dgxc-", "jax-", "maskrcnn-",
    "colossalai-", "megatron-lm",
)  # fmt: skip

_VOCAB_OF_GPT2 = 50_257  # llm-foundry's first tables; later ones pad to 50368
MPT_LAYERS_WIDTH_HEADS = {
    "mpt-125m": (12, 768, 12), "mpt-350m": (24, 1024, 16), "mpt-760m": (24, 1536, 12), "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20), "mpt-7b": (32, 4096, 32), "mpt-13b": (40, 5120, 40), "mpt-30b": (48, 7168, 56),
    "mpt-70b": (80, 8192, 64),
}  # fmt: skip
_LLAMA = {
    "llama2-13b": "hidden_size=5120&intermediate_size=13824&num_hidden_layers=40&num_attention_heads=40",
    "llama2-70b": "hidden_size=8192&intermediate_size=28672&num_hidden_layers=80&num_attention_heads=64"
    "&num_key_value_heads=8",
    "llama3-8b": "hidden_size=4096&intermediate_size=14336&num_hidden_layers=32&num_attention_heads=32"
    "&num_key_value_heads=8&vocab_size=128256",
    "llama3-70b": "hidden_size=8192&intermediate_size=28672&num_hidden_layers=80&num_attention_heads=64"
    "&num_key_value_heads=8&vocab_size=128256",
    "internlm-7b": "hidden_size=4096&intermediate_size=11008&num_hidden_layers=32&num_attention_heads=32"
    "&vocab_size=103168",
}  # fmt: skip
# FSDP's mixed precision gathers weights in half: norms, embeddings and the residual stream are in half as well
_SHARDED_RULE = ActivationRule.ALL_HALF
_MPT_SEQ_LEN = 2048
_MODEL_PARALLEL = "model parallel: one GPU runs a part of the graph"


def mpt_source(model: str, num_parameters: int | None, seq_len: int) -> str:
    """Model source of an MPT; the published number of parameters tells which vocabulary it had."""
    layers, width, heads = MPT_LAYERS_WIDTH_HEADS[model]
    body = layers * (12 * width * width + 13 * width) + 2 * width + seq_len * width
    vocab = 50_368
    if num_parameters is not None and num_parameters == body + _VOCAB_OF_GPT2 * width:
        vocab = _VOCAB_OF_GPT2
    return f"own:mpt?layers={layers}&width={width}&heads={heads}&vocab={vocab}"


def interpret(record: Mapping[str, str], shared: Path) -> Interpretation | str:
    """One row of a language-model table."""
    source_id, model, note = record["source_id"], record["model"], record["note"]
    if source_id.startswith(("bigscience", "mbridge", "nemo", "dgxc", "megatron", "colossalai")):
        return _MODEL_PARALLEL
    common = interpret_common(record)
    if isinstance(common, str):
        return common
    seq_len = seq_len_of(record["input"])
    if source_id.startswith("llm-foundry") and model in MPT_LAYERS_WIDTH_HEADS and seq_len:
        published = re.search(r"params (\d+)", note)
        source = mpt_source(model, int(published.group(1)) if published else None, seq_len)
        suspect = re.search(r"MFU (?:1\d\d|\d\.)[\d.]*", note) and float(re.search(r"MFU ([\d.]+)", note)[1]) > 100
        return common.replace(
            key=ModelKey(source, seq_len=seq_len),
            # padding the vocabulary makes no other network
            architecture_key=ModelKey(mpt_source(model, None, _MPT_SEQ_LEN), seq_len=_MPT_SEQ_LEN),
            strategy="fsdp",
            activation_rule=_SHARDED_RULE,
            checkpointing="full" if "activation checkpointing True" in note else "",
            unused_reason="its own utilisation is above the peak" if suspect else "",
        )
    if source_id.startswith("internevo"):
        if "tp=1" not in note:
            return _MODEL_PARALLEL
        return common.replace(key=ModelKey(f"hf:LlamaForCausalLM?{_LLAMA['internlm-7b']}", seq_len=seq_len))
    if source_id.startswith("torchtitan"):
        if re.search(r"TP|PP|CP", note) or model not in _LLAMA:
            return _MODEL_PARALLEL if re.search(r"TP|PP|CP", note) else f"{model}: not rebuilt"
        if "selective" in note:
            return "selective activation checkpointing: which ops run twice is not stated"
        return common.replace(
            key=ModelKey(f"hf:LlamaForCausalLM?{_LLAMA[model]}", seq_len=seq_len),
            strategy="fsdp",
            activation_rule=_SHARDED_RULE,
            checkpointing="full" if "checkpointing full" in note else "",
        )
    if source_id.startswith("maskrcnn"):
        return "inputs of varying size and the mean over a whole training run"
    return f"{model}: not rebuilt"
