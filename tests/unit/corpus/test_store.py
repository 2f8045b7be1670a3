"""The stored corpus keeps every row and graph exactly, and refuses files that are not its own."""

import gzip
import lzma
from dataclasses import replace

import pytest

from gnnpred.corpus.store import (
    GRAPHS_FILE,
    LAYOUT_GRAPHS_FILE,
    architecture_hash,
    decode_graph,
    encode_graph,
    load_graphs,
    load_rows,
    write_graphs,
    write_rows,
)
from gnnpred.errors import GnnpredError
from gnnpred.job import Precision
from tests.helpers.corpus import make_graph, make_row


def test_graph_survives_encoding_unchanged():
    graph = make_graph()
    back = decode_graph(encode_graph(graph))
    assert back.tensors == graph.tensors
    assert back.ops == graph.ops
    assert (back.inputs, back.outputs, back.batch_size, back.name) == ((0,), (7,), 1, "small")


def test_loop_bodies_keep_how_often_they_run():
    graph = make_graph()
    looped = graph.replace(ops=(graph.ops[0], replace(graph.ops[1], repeats=7), *graph.ops[2:]))
    encoded = encode_graph(looped)
    assert decode_graph(encoded).ops == looped.ops
    assert encoded["id"] != encode_graph(graph)["id"]
    assert "repeats" not in encode_graph(graph)


def test_equal_graphs_of_different_names_share_one_id():
    graph = make_graph()
    assert encode_graph(graph)["id"] == encode_graph(graph.replace(name="other"))["id"]
    assert encode_graph(graph)["id"] != encode_graph(make_graph(image=16))["id"]


def test_architecture_ignores_input_size_and_classes_but_not_weights():
    assert architecture_hash(make_graph()) == architecture_hash(make_graph(image=32, classes=1000))
    assert architecture_hash(make_graph()) != architecture_hash(make_graph(kernel=5))


def test_rows_survive_writing_and_files_are_reproducible(tmp_path):
    rows = [make_row(), make_row(row_id="def", duplicate_of="abc", used_for_training=False, step_time_ms=1.234567)]
    write_rows(tmp_path / "a.csv.gz", rows)
    write_rows(tmp_path / "b.csv.gz", rows)
    assert load_rows(tmp_path / "a.csv.gz") == rows
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


def test_graphs_are_found_by_id(tmp_path):
    encoded = [encode_graph(make_graph(image=image)) for image in (8, 16, 32)]
    write_graphs(tmp_path / "graphs.jsonl.xz", encoded)
    graphs = load_graphs(tmp_path)
    assert set(graphs) == {graph["id"] for graph in encoded}
    assert graphs[encoded[1]["id"]].tensors[0].shape == (1, 3, 16, 16)


def test_row_gives_the_job_that_was_measured():
    job = make_row(optimizer="rmsprop", compiler="tensorrt").job()
    assert (job.batch_size, job.precision, job.device.name) == (32, Precision.MIXED, "RTX3090")
    assert job.optimizer == "adam"  # two states per parameter, as RMSprop with momentum has
    assert job.host_copy
    assert not job.tf32_matmul


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(b"row_id,model\na,b\n"), gzip.compress(b"")])
def test_foreign_measurement_files_are_refused(tmp_path, content):
    path = tmp_path / "measurements.csv.gz"
    path.write_bytes(content)
    with pytest.raises(GnnpredError, match=r"measurements\.csv\.gz"):
        load_rows(path)


@pytest.mark.parametrize("content", [b"not xz", lzma.compress(b'{"format": 0}\n'), lzma.compress(b"")])
def test_foreign_graph_files_are_refused(tmp_path, content):
    path = tmp_path / "graphs.jsonl.xz"
    path.write_bytes(content)
    with pytest.raises(GnnpredError, match=r"graphs\.jsonl\.xz"):
        load_graphs(path)


def test_missing_files_say_how_to_build_them(tmp_path):
    with pytest.raises(GnnpredError, match="dataset build"):
        load_rows(tmp_path)
    with pytest.raises(GnnpredError, match="dataset build"):
        load_graphs(tmp_path)


def test_layouts_are_kept_where_asked_and_leave_single_gpu_rows_as_they_are(tmp_path):
    row = make_row(gpus=64, nodes=8, tensor_parallel=4, pipeline_parallel=8, interleave=12, sequence_parallel=True,
                   zero_stage=1, grad_accum=32, strategy="ddp", device="A100-SXM4-80GB")  # fmt: skip
    write_rows(tmp_path / "layouts.csv.gz", [row], layouts=True)
    write_rows(tmp_path / "plain.csv.gz", [row])
    assert load_rows(tmp_path / "layouts.csv.gz") == [row]
    assert load_rows(tmp_path / "plain.csv.gz")[0].tensor_parallel == 1
    assert "tensor_parallel" not in repr(row)  # the name of encoded single-GPU rows
    job = row.job()
    assert (job.data_parallel, job.num_microbatches, job.strategy, job.interleave) == (2, 32, "zero1", 12)


def test_context_parallel_rows_describe_no_job():
    with pytest.raises(GnnpredError, match="context parallelism"):
        make_row(gpus=8, context_parallel=2, strategy="ddp").job()


def test_graphs_of_layouts_lie_in_a_file_of_their_own(tmp_path):
    plain, layout = (encode_graph(make_graph(image=image)) for image in (8, 16))
    write_graphs(tmp_path / GRAPHS_FILE, [plain])
    write_graphs(tmp_path / LAYOUT_GRAPHS_FILE, [layout])
    assert set(load_graphs(tmp_path)) == {plain["id"], layout["id"]}
    assert set(load_graphs(tmp_path / GRAPHS_FILE)) == {plain["id"]}
