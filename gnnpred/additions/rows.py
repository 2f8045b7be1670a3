"""Measured lines of a collection as rows of the corpus, and their ONNX files as its graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gnnpred.additions.architectures import KnownArchitectures
from gnnpred.additions.collection import Collection, MeasuredLine
from gnnpred.corpus.collections import SOURCE_PREFIX
from gnnpred.corpus.operators import MIN_TIME_US, OperatorRow
from gnnpred.corpus.store import MeasurementRow, encode_graph
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.hardware import DeviceSpec, find_device
from gnnpred.job import JobSpec
from gnnpred.onnx_io import read_graph
from gnnpred.runs import MeasuredRun, run_of_row

CPU_ARCHITECTURE = "CPU"  # in the device file that collect writes
MIN_TIMED_STEPS = 3  # a median of fewer says nothing
# What a row says in other words than a job: links are text, and None is the same as what follows from it
_NOT_COMPARED = frozenset(["interconnect", "inter_node", "microbatches", "grad_accum"])


@dataclass(frozen=True, kw_only=True)
class CollectedRow:
    """A row of the corpus before anything is marked, and where it comes from."""

    row: MeasurementRow
    run: MeasuredRun
    warning: str  # what collect itself said of the measurement
    onnx: Path | None  # None where the row has no graph


@dataclass(frozen=True, kw_only=True)
class CollectedCorpus:
    """What a collection is in the corpus's terms."""

    rows: tuple[CollectedRow, ...]
    graphs: Mapping[str, dict[str, Any]]  # graph_id -> encoded
    graph_of_file: Mapping[str, str] = field(default_factory=dict)  # onnx cell -> graph_id
    new_architectures: frozenset[str] = frozenset()
    operators: tuple[OperatorRow, ...] = ()
    num_short_operators: int = 0  # left out: too short to be timed well


def corpus_of(
    collection: Collection,
    name: str,
    *,
    devices: Mapping[str, DeviceSpec],
    known: KnownArchitectures,
    on_graph: Callable[[int, int], None] = lambda done, total: None,
) -> CollectedCorpus:
    """Rows and graphs of ``collection`` under its ``name``.

    ``devices`` describe what the shipped tables lack. Raises GnnpredError for a device that nothing describes and for a
    cell that cannot be read.
    """
    runs = [(line, _run_of(collection, line, devices)) for line in collection.measured]
    graphs = _Graphs(collection.folder, known)
    sources = {line.cells["onnx"]: line.cells["model"] for line, _ in runs if line.cells["onnx"].strip()}
    for done, (file, model) in enumerate(sources.items()):
        on_graph(done, len(sources))
        graphs.read(file, model)
    on_graph(len(sources), len(sources))
    rows = [_collected_row(collection, name, line, run, graphs, devices) for line, run in runs]
    operators = [
        replace(
            row,
            source=SOURCE_PREFIX + name,
            device=(spec := device_of(row.device, devices)).name,
            own_device=devices.get(spec.name),
            time_us=float(f"{row.time_us:.5g}"),  # as it is stored
        )
        for row in collection.operators
    ]
    long_enough = tuple(row for row in operators if row.time_us >= MIN_TIME_US)
    return CollectedCorpus(
        rows=tuple(rows),
        graphs=graphs.encoded,
        graph_of_file={file: graph_id for file, (graph_id, *_) in graphs.found.items()},
        new_architectures=frozenset(graphs.new_architectures),
        operators=long_enough,
        num_short_operators=len(operators) - len(long_enough),
    )


def device_of(name: str, devices: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """A device by the name in a collection; raises GnnpredError where neither ``devices`` nor the tables have it."""
    own = next((device for device in devices.values() if device.name.lower() == name.strip().lower()), None)
    try:
        return own or find_device(name)
    except UsageError as error:
        raise GnnpredError(
            f"{name} is not in the list of GPUs: describe it in a device file (see `gnnpred predict --help`) and give "
            "--device-file FILE"
        ) from error


def _run_of(collection: Collection, line: MeasuredLine, devices: Mapping[str, DeviceSpec]) -> MeasuredRun:
    device_of(line.cells["gpu"], devices)
    # a row without graph is read too; run_of_row wants a file
    cells = line.cells | {"onnx": line.cells["onnx"].strip() or "none"}
    try:
        return run_of_row(cells, devices=tuple(devices.values()))
    except GnnpredError as error:
        raise GnnpredError(f"{collection.folder}, runs.csv, line {line.line}: {error}") from error


class _Graphs:
    """ONNX files of a collection as stored graphs."""

    def __init__(self, folder: Path, known: KnownArchitectures) -> None:
        self._folder = folder
        self._known = known
        self.encoded: dict[str, dict[str, Any]] = {}
        self.found: dict[str, tuple[str, str, str]] = {}  # onnx cell -> graph_id, architecture, family
        self.failed: dict[str, str] = {}  # onnx cell -> why it cannot be a graph of the corpus
        self.new_architectures: set[str] = set()

    def read(self, file: str, model: str) -> None:
        try:
            graph = read_graph(self._folder / file, batch_size=1)
        except GnnpredError as error:
            self.failed[file] = f"its ONNX file cannot be read: {error}"
            return
        if graph.batch_size is None:
            self.failed[file] = "its ONNX file has no batch dimension, so that no other batch size follows from it"
            return
        graph = graph.replace(name=model)
        architecture, family, is_known = self._known.find(graph, model)
        encoded = encode_graph(graph)
        self.encoded[encoded["id"]] = encoded
        self.found[file] = (encoded["id"], architecture, family)
        if not is_known:
            self.new_architectures.add(architecture)


def _collected_row(
    collection: Collection,
    name: str,
    line: MeasuredLine,
    run: MeasuredRun,
    graphs: _Graphs,
    devices: Mapping[str, DeviceSpec],
) -> CollectedRow:
    cells, job = line.cells, run.job
    file = cells["onnx"].strip()
    graph_id, architecture, family = graphs.found.get(file, ("", "", ""))
    excluded = graphs.failed.get(file, "") if file else f"its graph was not exported: {_why_not_exported(cells)}"
    row = MeasurementRow(
        row_id=line.row_id,
        source_id=SOURCE_PREFIX + name,
        source=f"collections/{name}@{collection.manifest_digest}:{collection.recipe}/{line.config_id}",
        model=cells["model"],
        graph_id=graph_id,
        architecture=architecture,
        family=family,
        phase=job.phase,
        framework=job.framework,
        framework_version=job.framework_version,
        cuda=cells["cuda"],
        device=job.device.name,
        precision=job.precision,
        activation_rule=job.activation_rule,
        tf32_matmul=job.tf32_matmul,
        memory_format=job.memory_format,
        compiler=job.compiler,
        batch_size=job.batch_size,
        input=cells["input"],
        optimizer=job.optimizer,
        grad_accum=job.num_microbatches,
        host_copy=job.host_copy,
        data_loader=job.data_loader,
        input_gradient=False,
        os=cells["os"],
        step_time_ms=float(f"{run.measured_ms:.7g}"),  # as it is stored
        superseded=False,
        suspect=False,
        unstable=False,
        few_iterations=_num_steps(cells) < MIN_TIMED_STEPS,
        duplicate_of="",
        excluded_reason="",
        used_for_training=False,
        note="; ".join(run.notes),
        gpus=job.gpus,
        nodes=job.nodes,
        interconnect=cells.get("interconnect", "") if job.gpus > 1 else "",
        strategy=("ddp" if job.strategy == "zero1" else job.strategy) if job.gpus > 1 else "",
        checkpointing="full" if job.activation_checkpointing == "full" else "",
        attention="" if job.attention == "auto" else job.attention,
        tensor_parallel=job.tensor_parallel,
        pipeline_parallel=job.pipeline_parallel,
        interleave=job.interleave,
        sequence_parallel=job.sequence_parallel,
        zero_stage=int(job.strategy == "zero1"),
        own_device=devices.get(job.device.name),
    )
    if not excluded and (difference := _what_is_lost(row.job(), job)):
        excluded = f"a row of the corpus cannot hold its {difference}"
    if not excluded and "from pinned memory" in cells.get("note", ""):
        excluded = "inputs are copied from pinned memory: rows of the corpus know pageable memory alone"
    if not excluded and not job.device.supports(job.precision):
        excluded = f"{job.device.name} has no units for {job.precision}"
    if excluded:
        row = replace(row, graph_id="", architecture="", family="", excluded_reason=excluded)
    return CollectedRow(
        row=row, run=run, warning=cells["warning"].strip(), onnx=collection.folder / file if row.graph_id else None
    )


def _what_is_lost(kept: JobSpec, measured: JobSpec) -> str:
    """Fields of a job that its row would say wrongly."""
    lost = [
        each.name
        for each in fields(JobSpec)
        if each.name not in _NOT_COMPARED and getattr(kept, each.name) != getattr(measured, each.name)
    ]
    if kept.num_microbatches != measured.num_microbatches:
        lost.append("micro-batches")
    return ", ".join(lost)


def _why_not_exported(cells: Mapping[str, str]) -> str:
    reason = cells.get("note", "").partition("not exported: ")[2]
    return reason or "the collection was cut off; the same `gnnpred collect` makes up for it"


def _num_steps(cells: Mapping[str, str]) -> int:
    text = cells["num_steps"].strip()
    return int(float(text)) if text.replace(".", "", 1).isdigit() else 0
