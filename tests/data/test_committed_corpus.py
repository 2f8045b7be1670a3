"""The committed corpus is whole: counts, references, provenance, splits, size."""

import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from gnnpred.corpus.source_table import source_table
from gnnpred.corpus.splits import SPLITS, load_split
from gnnpred.corpus.store import (
    GRAPHS_FILE,
    MEASUREMENTS_FILE,
    MULTI_GPU_FILE,
    load_graphs,
    load_multi_gpu_rows,
    load_rows,
)
from gnnpred.hardware import find_device
from gnnpred.job import Phase, Precision
from gnnpred.op_kinds import OP_KINDS

DATASETS = Path(__file__).resolve().parents[2] / "datasets"
FORWARD_AND_BACKWARD = (Phase.TRAIN, Phase.FORWARD_BACKWARD)


@pytest.fixture(scope="module")
def rows():
    return load_rows(DATASETS)


@pytest.fixture(scope="module")
def multi_gpu_rows():
    return load_multi_gpu_rows(DATASETS)


@pytest.fixture(scope="module")
def graphs():
    return load_graphs(DATASETS)


@pytest.fixture(scope="module")
def kept(rows):
    return [row for row in rows if row.graph_id]


def test_rows_reach_the_promised_numbers(kept):
    training = [row for row in kept if row.phase in FORWARD_AND_BACKWARD]
    assert len(training) >= 9_000
    assert len(kept) - len(training) >= 25_000
    assert len({row.device for row in training}) >= 35
    wanted = {Precision.FP64, Precision.FP32, Precision.TF32, Precision.FP16, Precision.MIXED}
    assert wanted <= {row.precision for row in training}


def test_every_row_is_either_usable_or_says_why_not(rows):
    for row in rows:
        assert bool(row.graph_id) != bool(row.excluded_reason), row.row_id
        assert bool(row.graph_id) == bool(row.architecture)
        if row.used_for_training:
            assert row.graph_id
            marks = (row.duplicate_of, row.superseded, row.suspect, row.unstable, row.few_iterations)
            assert not any(marks)


def test_row_ids_are_unique_and_repeats_point_at_a_used_row(rows):
    by_id = {row.row_id: row for row in rows}
    assert len(by_id) == len(rows)
    for row in rows:
        if row.duplicate_of:
            representative = by_id[row.duplicate_of]
            assert representative.used_for_training
            assert representative.graph_id == row.graph_id
            assert (representative.device, representative.precision) == (row.device, row.precision)


def test_every_row_has_provenance(rows):
    for row in rows:
        assert re.search(r"^[^/\s]+/[^@\s]+@[0-9a-f]{7,}", row.source), row.source
        assert row.source_id


def test_times_batches_and_devices_are_usable(kept):
    for row in kept:
        assert math.isfinite(row.step_time_ms)
        assert row.step_time_ms > 0
        assert row.batch_size >= 1
    for name in {row.device for row in kept}:
        assert find_device(name).name == name


def test_every_row_describes_a_job(kept):
    seen = {(r.optimizer, r.memory_format, r.compiler, r.phase, r.precision): r for r in kept}
    for row in seen.values():
        assert row.job().batch_size == row.batch_size


def test_rows_and_graphs_refer_to_each_other(kept, multi_gpu_rows, graphs):
    assert {row.graph_id for row in (*kept, *multi_gpu_rows) if row.graph_id} == set(graphs)


def test_runs_on_several_gpus_are_apart(rows, multi_gpu_rows):
    assert {row.gpus for row in rows} == {1}
    assert min(row.gpus for row in multi_gpu_rows) == 2
    assert not {row.row_id for row in rows} & {row.row_id for row in multi_gpu_rows}
    assert all(bool(row.graph_id) != bool(row.excluded_reason) for row in multi_gpu_rows)


def test_most_usable_rows_are_rebuilt(rows, multi_gpu_rows):
    table = source_table(rows, multi_gpu_rows)
    assert table in (DATASETS / "README.md").read_text(encoding="utf-8")
    share = re.search(r"(\d+) % of the usable rows", table)
    assert int(share[1]) >= 85


def test_graphs_are_complete_and_in_the_vocabulary(graphs):
    for graph_id in list(graphs)[::20]:
        graph = graphs[graph_id]
        assert graph.batch_size == 1
        assert graph.ops, graph.name
        assert {op.kind for op in graph.ops} <= set(OP_KINDS), graph.name
        assert "unsupported" not in {op.kind for op in graph.ops}, graph.name
        assert all(graph.tensors[idx].batch_axes for idx in (*graph.inputs, *graph.outputs)), graph.name


def test_known_models_have_their_published_size(kept, graphs):
    million = {"resnet50": 25.557, "vgg16": 138.358, "vit_base_patch16_224": 86.568, "efficientnet_b0": 5.289}
    for name, parameters in million.items():
        row = next(
            r for r in kept if r.model == name and r.input == "3x224x224" and r.source_id.startswith(("timm", "ryu"))
        )
        assert graphs[row.graph_id].num_parameters / 1e6 == pytest.approx(parameters, abs=0.001)


@pytest.mark.parametrize("name", SPLITS)
def test_split_files_exist_and_know_every_group(name, kept):
    split = load_split(DATASETS / "splits" / f"{name}.json")
    folds = Counter(split.fold_of(row) for row in kept if row.used_for_training and row.phase in FORWARD_AND_BACKWARD)
    assert split.num_folds >= 5
    assert set(folds) - {None} == set(range(split.num_folds)) or name == "source"
    if name in ("family", "architecture"):
        assert None not in folds
        groups = {getattr(row, name) for row in kept}
        assert groups <= set(split.fold_by_group)


def test_no_group_straddles_folds(kept):
    family, architecture = (load_split(DATASETS / "splits" / f"{name}.json") for name in ("family", "architecture"))
    folds_by_family, folds_by_architecture, families_of_model = defaultdict(set), defaultdict(set), defaultdict(set)
    for row in kept:
        folds_by_family[row.family].add(family.fold_of(row))
        folds_by_architecture[row.architecture].add(architecture.fold_of(row))
        families_of_model[row.architecture].add(row.family)
    assert all(len(folds) == 1 for folds in folds_by_family.values())
    assert all(len(folds) == 1 for folds in folds_by_architecture.values())
    mixed = {architecture: names for architecture, names in families_of_model.items() if len(names) > 1}
    assert not mixed, mixed


def test_one_graph_belongs_to_one_architecture(kept):
    architectures = defaultdict(set)
    for row in kept:
        architectures[row.graph_id].add(row.architecture)
    assert all(len(names) == 1 for names in architectures.values())


def test_corpus_stays_small():
    size = sum((DATASETS / name).stat().st_size for name in (GRAPHS_FILE, MEASUREMENTS_FILE, MULTI_GPU_FILE))
    assert size <= 40e6
