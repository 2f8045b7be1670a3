"""What single records of the tables are taken for: the setups that are easily misread."""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
if find_spec("timm") is None or find_spec("torchvision") is None:
    pytest.skip("needs the models extra", allow_module_level=True)

from gnnpred.corpus.sources import academic, distributed, language_models, suites
from gnnpred.job import ActivationRule, Phase, Precision
from tests.unit.corpus.test_build import make_record

pytestmark = pytest.mark.models
NOWHERE = Path()


def _train(**changes: str) -> dict[str, str]:
    return make_record(phase="train", note="", grad_accum="1", **changes)


def test_lambdas_transformer_xl_has_one_softmax_over_all_words_and_apex_o2():
    record = _train(source_id="lambda-pt-v1-A100", model="transformerxllarge", precision="amp_fp16", optimizer="lamb")
    row = suites.interpret(record, NOWHERE)
    assert "divide=0" in row.key.source
    assert row.key.seq_len == 256
    assert (row.precision, row.activation_rule) == (Precision.MIXED, ActivationRule.ALL_HALF)
    assert row.optimizer == "adam"


def test_nvidias_transformer_xl_has_the_adaptive_softmax():
    row = distributed.interpret(
        _train(source_id="dle-pytorch-txl", model="transformer-xl-large", optimizer="lamb"), NOWHERE
    )
    assert "divide=4" in row.key.source
    assert row.key.seq_len == 384


def test_gnmts_step_time_follows_from_its_rate_and_the_mean_length():
    record = _train(source_id="dle-pytorch-gnmt", model="gnmt-v2", precision="fp32", batch_per_gpu="128")
    row = distributed.interpret(record | {"step_time_ms": "", "throughput": "24500"}, NOWHERE)
    assert row.step_time_ms == pytest.approx(1e3 * 128 * 49 / 24_500)
    assert any("mean length" in note for note in row.notes)


def test_one_gpu_that_accumulates_is_entered_as_one_micro_batch_and_several_are_not():
    record = _train(source_id="dle-pytorch-bert", model="bert-large", input="seq=128", optimizer="lamb")
    record |= {"grad_accum": "64", "step_time_ms": "6400"}
    alone = distributed.interpret(record, NOWHERE)
    assert (alone.phase, alone.step_time_ms, alone.optimizer) == (Phase.FORWARD_BACKWARD, 100.0, "none")
    together = distributed.interpret(record | {"gpus": "8"}, NOWHERE)
    assert (together.phase, together.step_time_ms, together.optimizer) == (Phase.TRAIN, 6400.0, "lamb")
    assert together.unused_reason


def test_sharded_runs_keep_their_checkpointing():
    record = _train(source_id="llm-foundry-mpt", model="mpt-7b", input="seq=2048", precision="amp_bf16", gpus="8")
    note = "FSDP FULL_SHARD; activation checkpointing True; params 6658859008; flash attention"
    record |= {"framework_version": "2.1", "note": note}
    row = language_models.interpret(record, NOWHERE)
    assert (row.strategy, row.checkpointing, row.precision) == ("fsdp", "full", Precision.MIXED_BF16)
    assert (row.attention, row.activation_rule) == ("fused", ActivationRule.ALL_HALF)
    assert row.key.source == "own:mpt?layers=32&width=4096&heads=32&vocab=50368"
    early = language_models.interpret(record | {"framework_version": "1.13"}, NOWHERE)
    assert not early.unused_reason
    assert early.architecture_key == row.architecture_key == row.key


@pytest.mark.parametrize(
    ("source_id", "model", "note"),
    [
        ("bigscience-gpt2", "gpt-52b", ""),
        ("internevo-7b", "internlm-7b", "(tp=2, zero1=-1)"),
        ("torchtitan-x", "llama3.1-70b", "FSDP 32 x TP 8; full activation checkpointing"),
    ],
)
def test_parts_of_a_graph_are_left_out(source_id, model, note):
    record = _train(source_id=source_id, model=model, input="seq=2048", precision="amp_bf16", gpus="64")
    assert "model parallel" in language_models.interpret(record | {"note": note}, NOWHERE)


def test_rows_that_the_host_sets_are_not_used():
    for model in ("NeuMF", "yolov3-darknet53", "deepspeech2"):
        row = academic.interpret(_train(source_id="sia-azure", model=model, precision="fp32"), NOWHERE)
        assert row.key is not None
        assert "host" in row.unused_reason


def test_sparse_embedding_updates_are_left_out():
    record = _train(source_id="dle-pytorch-dlrm", model="dlrm-small", precision="fp32")
    assert "sparsely" in distributed.interpret(record, NOWHERE)
