"""Rows of measured runs read as jobs."""

import pytest

from gnnpred.errors import GnnpredError
from gnnpred.job import ActivationRule, Phase, Precision, host_os_of
from gnnpred.runs import run_of_row

ROW = {
    "onnx": "resnet50.onnx",
    "gpu": "A100-SXM4-80GB",
    "precision": "amp_fp16",
    "batch_per_gpu": "64",
    "step_time_ms": "41.5",
}


@pytest.mark.parametrize(
    ("text", "host_os"),
    [("Win11", "windows"), ("WSL2", "wsl"), ("Fedora 42", "linux"), ("", "linux"), ("Darwin", "linux")],
)
def test_the_operating_system_of_the_host_is_read_from_its_name(text, host_os):
    assert host_os_of(text) == host_os


def run_with(**cells):
    return run_of_row({**ROW, **cells})


def test_the_required_columns_alone_make_a_training_job_on_one_gpu():
    run = run_of_row(ROW)
    job = run.job
    assert (run.onnx, run.measured_ms, run.job.grad_accum) == ("resnet50.onnx", 41.5, 1)
    assert (job.device.name, job.precision, job.batch_size) == ("A100-SXM4-80GB", Precision.MIXED, 64)
    assert (job.phase, job.optimizer, job.gpus, job.nodes) == (Phase.TRAIN, "sgd", 1, 1)
    assert (job.memory_format, job.compiler, job.framework) == ("nchw", "eager", "pytorch")
    assert run.notes == ()


def test_every_column_of_the_schema_reaches_the_job():
    run = run_with(
        phase="train", framework="tensorflow", framework_version="1.15.3", gpu="V100", gpus="8", nodes="2",
        precision="fp32", memory_format="nhwc", compiled="xla", optimizer="lamb", grad_accum="4",
    )  # fmt: skip
    job = run.job
    assert (job.framework, job.framework_version, job.device.name) == ("tensorflow", "1.15.3", "V100-SXM2-16GB")
    assert (job.gpus, job.nodes, job.memory_format, job.compiler) == (8, 2, "nhwc", "xla")
    assert (job.optimizer, job.grad_accum) == ("lamb", 4)


@pytest.mark.parametrize(
    ("text", "phase", "optimizer"),
    [
        ("infer", Phase.INFERENCE, "none"),
        ("inference", Phase.INFERENCE, "none"),
        ("forward_backward", Phase.FORWARD_BACKWARD, "none"),
        ("", Phase.TRAIN, "sgd"),
    ],
)
def test_phases(text, phase, optimizer):
    job = run_with(phase=text).job
    assert (job.phase, job.optimizer) == (phase, optimizer)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("fp64", "fp64"),
        ("fp32", "fp32"),
        ("tf32", "tf32"),
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ("amp_fp16", "mixed"),
        ("amp_bf16", "mixed-bf16"),
        ("fp32?", "tf32"),
    ],
)
def test_precision_names_of_the_schema(text, precision):
    assert run_with(precision=text).job.precision == precision


def test_fp32_of_unknown_kind_follows_the_frameworks_default_and_says_so():
    old = run_with(precision="fp32?", framework="pytorch", framework_version="1.9?")
    new = run_with(precision="fp32?", framework="pytorch", framework_version="2.1.0")
    tensorflow = run_with(precision="fp32?", framework="tensorflow", framework_version="2.2.0")
    assert (old.job.tf32_matmul, new.job.tf32_matmul) == (True, False)
    assert tensorflow.job.precision is Precision.FP32
    assert "fp32?" in old.notes[0]


@pytest.mark.parametrize(
    ("version", "note", "tf32_matmul"),
    [
        ("1.11", "", True),
        ("1.12", "", False),
        ("2.3.0a0+40ec155e58.nv24.03", "", True),
        ("2.1", "tf32_by_NGC_default", True),
    ],
)
def test_tf32_rows_say_by_version_whether_matmul_used_it(version, note, tf32_matmul):
    assert run_with(precision="tf32", framework_version=version, note=note).job.tf32_matmul is tf32_matmul


def test_an_empty_memory_format_is_the_frameworks():
    assert run_with(framework="tensorflow").job.memory_format == "nhwc"
    assert run_with(framework="pytorch").job.memory_format == "nchw"
    keras = run_with(framework="tensorflow", memory_format="nhwc", note="keras fit from host numpy arrays")
    assert keras.job.memory_format == "nchw"


@pytest.mark.parametrize(
    ("note", "rule"),
    [
        ("from_tqdm;apex_O2;runs=3", ActivationRule.ALL_HALF),
        ("use_fp16: fp16 compute, fp32 variables", ActivationRule.ALL_HALF),
        ("pure_fp16 O2", ActivationRule.ALL_HALF),
        ("apex_O1", ActivationRule.AUTOCAST),
        ("apex O1; 20 iterations", ActivationRule.AUTOCAST),
        ("", ActivationRule.AUTOCAST),
    ],
)
def test_the_note_says_how_activations_are_kept(note, rule):
    assert run_with(note=note).job.activation_rule is rule


def test_a_half_model_over_fp32_masters_is_mixed_with_half_activations():
    job = run_with(precision="fp16", note="half model, fp32 master weights").job
    assert (job.precision, job.activation_rule) == (Precision.MIXED, ActivationRule.ALL_HALF)


@pytest.mark.parametrize(
    ("note", "host_copy", "data_loader"),
    [
        ("n=50;input copied H2D inside the timed region; 8 loader workers", True, False),
        ("keras fit from host numpy arrays (host-to-device copy included)", True, False),
        ("CPU-resident dummy data copied each step", True, False),
        ("input resident on GPU", False, False),
        ("real data loaders, per-step mean", False, True),
        ("data=dali-cpu;runs=1", False, True),
        ("data=syntetic;runs=1", False, False),
        ("synthetic data", False, False),
    ],
)
def test_the_note_says_what_feeds_the_step(note, host_copy, data_loader):
    job = run_with(note=note).job
    assert (job.host_copy, job.data_loader) == (host_copy, data_loader)


@pytest.mark.parametrize(("cell", "host_copy"), [("1", True), ("", False), ("0", False), ("yes", True)])
def test_a_column_says_whether_the_step_copies_its_inputs(cell, host_copy):
    assert run_with(host_copy=cell).job.host_copy is host_copy


def test_the_note_counts_where_the_column_is_empty_and_other_words_are_refused():
    assert run_with(host_copy="", note="inputs copied H2D in every step").job.host_copy
    assert not run_with(host_copy="0", note="synthetic data").job.host_copy
    with pytest.raises(GnnpredError, match="host_copy 'pinned' is not one of"):
        run_with(host_copy="pinned")


def test_optimizers_without_a_cost_of_their_own_take_the_nearest_by_state():
    assert run_with(optimizer="rmsprop").job.optimizer == "adam"
    assert "counted as adam" in run_with(optimizer="rmsprop").notes[0]
    assert run_with(optimizer="AdamW").job.optimizer == "adamw"
    assert "unknown" in run_with(optimizer="sophia").notes[0]


def test_the_note_says_whether_several_gpus_ran_under_data_parallel():
    assert run_with(gpus="4", note="8 loader workers;DataParallel").job.strategy == "dp"
    assert run_with(gpus="1", note="8 loader workers;DataParallel").job.strategy == "ddp"
    assert run_with(gpus="4", note="DDP").job.strategy == "ddp"


def test_an_uneven_spread_is_predicted_at_the_fullest_node():
    run = run_with(gpus="9", nodes="2")
    assert (run.job.gpus, run.job.nodes) == (10, 2)
    assert "unevenly" in run.notes[0]


def test_a_fractional_batch_is_rounded_and_said():
    run = run_with(batch_per_gpu="10.67")
    assert run.job.batch_size == 11
    assert "rounded" in run.notes[0]


def test_free_text_names_the_links():
    job = run_with(gpus="16", nodes="2", interconnect="nvlink intra, ib100 inter").job
    assert (job.interconnect, job.inter_node) == ("nvlink", "ib100")


def test_dims_bind_symbolic_dimensions():
    assert run_with(dims="sequence=128; frames=300").dims == {"sequence": 128, "frames": 300}


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"gpu": "A10000"}, "unknown device"),
        ({"gpu": ""}, "gpu is empty"),
        ({"onnx": " "}, "onnx is empty"),
        ({"precision": "fp8"}, "not modelled"),
        ({"precision": "fp13"}, "unknown precision"),
        ({"batch_per_gpu": "0"}, "batch_per_gpu must be at least 1"),
        ({"batch_per_gpu": "inf"}, "batch_per_gpu must be at least 1"),
        ({"batch_per_gpu": ""}, "batch_per_gpu is empty"),
        ({"gpus": "2.5"}, "gpus must be a whole number from 1 up"),
        ({"batch_per_gpu": "many"}, "batch_per_gpu 'many' is not a number"),
        ({"step_time_ms": "-1"}, "step_time_ms must be above 0"),
        ({"step_time_ms": "nan"}, "step_time_ms must be above 0"),
        ({"phase": "eval"}, "phase 'eval'"),
        ({"compiled": "tvm"}, "compiled 'tvm' is not modelled"),
        ({"strategy": "pipeline"}, "strategy 'pipeline' is not modelled"),
        ({"gpus": "2", "nodes": "4"}, "2 gpus cannot be spread over 4 nodes"),
        ({"dims": "sequence"}, "NAME=VALUE"),
    ],
)
def test_a_wrong_cell_is_named(cells, message):
    with pytest.raises(GnnpredError, match=message):
        run_with(**cells)


@pytest.mark.parametrize(
    ("cells", "attention", "checkpointing"),
    [
        ({}, "auto", "none"),
        ({"attention": "Fused", "activation_checkpointing": "full"}, "fused", "full"),
        ({"note": "flash attention; activation checkpointing True"}, "fused", "full"),
        ({"note": "eager attention; activation checkpointing FALSE"}, "eager", "none"),
        ({"note": "no gradient checkpointing"}, "auto", "none"),
        ({"note": "activation checkpointing selective op"}, "auto", "none"),
        ({"note": "flash attention", "attention": "eager"}, "eager", "none"),
    ],
)
def test_attention_and_checkpointing_come_from_their_columns_or_the_note(cells, attention, checkpointing):
    job = run_with(**cells).job
    assert (job.attention, job.activation_checkpointing) == (attention, checkpointing)


@pytest.mark.parametrize("column", ["attention", "activation_checkpointing"])
def test_an_unknown_attention_or_checkpointing_is_named(column):
    with pytest.raises(GnnpredError, match=f"{column} 'odd' is not modelled"):
        run_with(**{column: "odd"})
