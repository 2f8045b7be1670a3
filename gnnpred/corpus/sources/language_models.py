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
_UNSTATED_LAYOUT = "model parallel: its layout is not stated in full"
# Models whose sizes are public, by the name in the recipe tables of NeMo and MaxText: (source, sequence length).
_RECIPES = {
    "gpt3-175b": ("own:mpt?layers=96&width=12288&heads=96&vocab=51200", 2048),
    "paxml-gpt5b": ("own:mpt?layers=24&width=4096&heads=32&vocab=51200", 2048),
    "llama-3.1-70b": (f"hf:LlamaForCausalLM?{_LLAMA['llama3-70b']}", 8192),
    "maxtext-llama3-70b": (f"hf:LlamaForCausalLM?{_LLAMA['llama3-70b']}", 8192),
    "maxtext-llama2-70b": (f"hf:LlamaForCausalLM?{_LLAMA['llama2-70b']}", 4096),
    "llama-3.1-405b": (
        "hf:LlamaForCausalLM?hidden_size=16384&intermediate_size=53248&num_hidden_layers=126"
        "&num_attention_heads=128&num_key_value_heads=8&vocab_size=128256",
        8192,
    ),
    "nemotron4-15b": (
        "hf:NemotronForCausalLM?hidden_size=6144&intermediate_size=24576&num_hidden_layers=32"
        "&num_attention_heads=48&num_key_value_heads=8&vocab_size=256000",
        4096,
    ),
    "nemotron4-340b": (
        "hf:NemotronForCausalLM?hidden_size=18432&intermediate_size=73728&num_hidden_layers=96"
        "&num_attention_heads=96&num_key_value_heads=8&vocab_size=256000",
        4096,
    ),
}
_MAX_SIZE_ERROR = 0.02
_BIGSCIENCE_VOCAB = 250_880  # 181.2 billion parameters at 72 layers of 14,336


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
    if source_id.startswith("dgxc"):
        return _interpret_recipe(record)
    if source_id.startswith("bigscience-chronicles"):
        return _interpret_bigscience(record)
    if source_id.startswith(("bigscience", "mbridge", "nemo", "megatron", "colossalai")):
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


def _sizes(text: str) -> dict[str, int]:
    """``TP=4,PP=8, MBS=1, VP=12`` or ``DP4 TP8 PP12 ZS1`` as numbers."""
    return {name: int(value) for name, value in re.findall(r"\b(DP|TP|PP|CP|VP|MBS|ZS)\s*=?\s*(\d+)", text)}


def _interpret_recipe(record: Mapping[str, str]) -> Interpretation | str:
    """NVIDIA's recipes for DGX Cloud: NeMo with tensor and pipeline parallelism, MaxText and Paxml fully sharded.

    ``batch_per_gpu`` is the micro-batch of a data-parallel rank or empty; the layout is in the note.
    """
    model, note = record["model"], record["note"]
    if "proxy run" in note:
        return "proxy run: fewer layers than the model has"
    if model not in _RECIPES or record["precision"] != "amp_bf16":
        return _MODEL_PARALLEL
    sizes, total = _sizes(note), re.search(r"global batch (\d+)", note)
    if "MBS" not in sizes or total is None:
        return _UNSTATED_LAYOUT
    sharded = "FSDP" in note
    tp, pp, cp = (sizes.get(name, 1) for name in ("TP", "PP", "CP"))
    ranks = int(record["gpus"]) // (tp * pp * cp)
    common = interpret_common({**record, "batch_per_gpu": str(sizes["MBS"])})
    if isinstance(common, str):
        return common
    source, seq_len = _RECIPES[model]
    return common.replace(
        key=ModelKey(source, seq_len=seq_len),
        family="gpt",
        strategy="fsdp" if sharded else "ddp",
        zero_stage=0 if sharded else 1,  # NeMo's distributed optimizer
        activation_rule=_SHARDED_RULE,
        optimizer="adam",
        attention="fused",
        compiler="xla" if record["framework"] == "jax" else "eager",
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=cp,
        interleave=sizes.get("VP", 1),
        sequence_parallel=tp > 1,
        grad_accum=max(1, round(int(total[1]) / (ranks * sizes["MBS"]))),
        unused_reason=_MODEL_PARALLEL if tp * pp * cp > 1 else "compiled and fused by XLA",
    )


def _interpret_bigscience(record: Mapping[str, str]) -> Interpretation | str:
    """Trials of BLOOM's layout on A100s (Megatron-DeepSpeed), where the note states every size of the network."""
    note = record["note"]
    network = re.search(r"layers (\d+) hidden (\d+) heads (\d+)", note)
    sizes, total = _sizes(note), re.search(r"global batch (\d+)", note)
    if not network or not total or not {"DP", "TP", "PP"} <= sizes.keys():
        return _UNSTATED_LAYOUT
    common = interpret_common({**record, "step_time_ms": record["step_time_ms"]})
    if isinstance(common, str):
        return common
    layers, width, heads = network.groups()
    stated = re.search(r"gpt-(\d+)b", record["model"])
    parameters = 12 * int(layers) * int(width) ** 2 + _BIGSCIENCE_VOCAB * int(width)
    if stated is None or abs(parameters / (1e9 * int(stated[1])) - 1) > _MAX_SIZE_ERROR:
        return "its layers and width, read from the text around the table, are not those of the model's name"
    seq_len = seq_len_of(record["input"]) or _MPT_SEQ_LEN
    return common.replace(
        key=ModelKey(f"own:mpt?layers={layers}&width={width}&heads={heads}&vocab={_BIGSCIENCE_VOCAB}", seq_len=seq_len),
        activation_rule=_SHARDED_RULE,
        optimizer="adam",
        attention="eager",  # Megatron's fused softmax between two products
        checkpointing="full" if "activation checkpointing on" in note else "",
        tensor_parallel=sizes["TP"],
        pipeline_parallel=sizes["PP"],
        zero_stage=sizes.get("ZS", 1),
        grad_accum=max(1, round(int(total[1]) / (sizes["DP"] * common.batch_size))),
        unused_reason=_MODEL_PARALLEL,
    )
