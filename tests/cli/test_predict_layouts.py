"""predict with strategies and layouts, through its arguments."""

import json

import pytest

from tests.helpers.onnx_files import save
from tests.helpers.transformers import transformer_file


@pytest.fixture
def transformer(tmp_path):
    return save(transformer_file(), tmp_path, "transformer.onnx")


BASE = ("--batch-size", 2, "--optimizer", "adam", "--json")


@pytest.mark.parametrize(
    "layout",
    [
        ("--strategy", "fsdp"), ("--strategy", "zero1"), ("--strategy", "zero2"), ("--strategy", "zero3"),
        ("--strategy", "fsdp", "--shard-group", 4), ("--grad-accum", 4), ("--tp", 4),
        ("--tp", 2, "--sequence-parallel"),
        ("--pp", 4, "--microbatches", 8), ("--pp", 2, "--microbatches", 4, "--interleave", 2),
        ("--tp", 2, "--pp", 2, "--grad-accum", 8, "--strategy", "zero1", "--activation-checkpointing", "full"),
    ],
)  # fmt: skip
def test_every_layout_is_predicted_and_its_parts_add_up(gnnpred, transformer, layout):
    outcome = gnnpred("predict", transformer, "--gpus", 8, *layout, *BASE)
    assert outcome.code == 0, outcome.err
    result = outcome.json
    assert sum(result["breakdown_ms"].values()) == pytest.approx(result["step_time_ms"])
    ranks = result["tensor_parallel"] * result["pipeline_parallel"] * result["data_parallel"]
    assert ranks == 8
    assert result["global_batch_size"] == 2 * result["data_parallel"] * result["microbatches"]
    assert result["throughput_samples_per_s"] == pytest.approx(
        result["global_batch_size"] / result["step_time_ms"] * 1e3
    )
    low, high = result["interval_90_ms"]
    assert low < result["step_time_ms"] < high
    assert ("pipeline_bubble" in result["breakdown_ms"]) == ("--pp" in layout)


def test_the_model_keeps_its_parameters_whatever_a_gpu_holds(gnnpred, transformer):
    whole = gnnpred("predict", transformer, *BASE).json
    split = gnnpred("predict", transformer, "--gpus", 4, "--tp", 4, *BASE).json
    assert split["num_parameters"] == whole["num_parameters"]
    assert split["memory_estimate_gib"] < whole["memory_estimate_gib"]


def test_accumulation_alone_needs_no_second_gpu(gnnpred, transformer):
    once, often = (gnnpred("predict", transformer, "--grad-accum", n, *BASE).json for n in (1, 5))
    passes = once["breakdown_ms"]["forward"] + once["breakdown_ms"]["backward"]
    assert often["step_time_ms"] == pytest.approx(5 * passes + once["breakdown_ms"]["optimizer"])
    assert often["global_batch_size"] == 10


def test_the_panel_says_how_the_gpus_share_the_work(gnnpred, transformer):
    out = gnnpred("predict", transformer, "--gpus", 8, "--tp", 2, "--pp", 2, "--microbatches", 4, "--batch-size", 2).out
    assert "tensor parallel 2, pipeline parallel 2, data parallel 2" in out
    assert "2 x 2 data-parallel x 4 micro-batches = 16" in out
    assert "pipeline bubble" in out
    assert "tp 2: nvlink3" in out


def test_a_trace_file_adds_up_to_the_step(gnnpred, transformer, tmp_path):
    path = tmp_path / "step.json"
    result = gnnpred("predict", transformer, "--gpus", 8, "--pp", 2, "--microbatches", 4, "--trace", path, *BASE).json
    content = json.loads(path.read_text())
    assert content["otherData"]["step_time_ms"] == result["step_time_ms"]
    for stage in (0, 1):
        bars = [e for e in content["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (stage, 0)]
        assert sum(e["dur"] for e in bars) == pytest.approx(result["step_time_ms"] * 1e3)
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_a_measured_forward_pass_on_one_gpu_corrects_every_layout(gnnpred, transformer):
    layout = ("--gpus", 8, "--tp", 2, "--pp", 2, "--microbatches", 4)
    plain = gnnpred("predict", transformer, *layout, *BASE).json
    slower = gnnpred("predict", transformer, *layout, *BASE, "--measured-inference-ms", 50).json
    assert slower["compute_time_ms"] > plain["compute_time_ms"]


def test_a_trace_that_cannot_be_written_is_one_line(gnnpred, transformer, tmp_path):
    outcome = gnnpred("predict", transformer, "--trace", tmp_path / "absent" / "step.json", *BASE)
    assert outcome.code == 1
    assert outcome.is_one_error_line()


def test_links_of_ones_own_come_from_a_file(gnnpred, transformer, tmp_path):
    path = tmp_path / "links.toml"
    path.write_text('[intra_node]\nname = "my link"\nrate_gb_s = 1.0\n')
    slow = gnnpred("predict", transformer, "--gpus", 8, "--fabric-file", path, *BASE).json
    assert "my link" in slow["fabric"]
    assert slow["step_time_ms"] > gnnpred("predict", transformer, "--gpus", 8, *BASE).json["step_time_ms"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", 8, "--tp", 3), "--gpus 8 does not divide into --tp 3"),
        (("--gpus", 8, "--tp", 8), "--tp 8 is more than the 4 attention heads"),
        (("--gpus", 8, "--nodes", 4, "--tp", 4), "--tp 4 is more than the 2 GPUs that a node joins"),
        (("--gpus", 8, "--pp", 8, "--microbatches", 8), "--pp 8 is more than the 4 layers"),
        (("--gpus", 8, "--pp", 4), "--pp 4 needs --microbatches"),
        (("--gpus", 16), "a A100-SXM4-80GB server with nvlink3 holds 8"),
        (("--gpus", 8, "--ep", 8), "shows no experts"),
        (("--gpus", 8, "--strategy", "fsdp", "--precision", "fp64"), "excludes fp64"),
        (("--gpus", 8, "--strategy", "zero3", "--optimizer", "lamb"), "excludes lamb"),
        (("--gpus", 8, "--nodes", 2, "--strategy", "dp"), "one node"),
        (("--gpus", 8, "--strategy", "horovod"), "unknown strategy 'horovod'"),
    ],
)
def test_impossible_layouts_are_one_line_and_exit_2(gnnpred, transformer, options, message):
    outcome = gnnpred("predict", transformer, "--batch-size", 2, *options)
    assert outcome.code == 2, outcome
    assert outcome.is_one_error_line(), outcome.err
    assert message in outcome.err


def test_too_few_micro_batches_are_a_warning(gnnpred, transformer):
    result = gnnpred("predict", transformer, "--gpus", 4, "--pp", 4, "--microbatches", 2, *BASE).json
    assert any("2 micro-batches keep 4 pipeline stages waiting" in warning for warning in result["warnings"])
