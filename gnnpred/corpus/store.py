"""The stored corpus: measured rows (gzipped CSV) and operator graphs (xz-compressed JSON lines).

Readable with the standard library and gnnpred's core alone: neither torch nor the sources are needed.
Graphs are kept as traced, before ``canonicalise`` and without batch or precision, so that any later
pass can be changed without tracing again.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from gnnpred.communication.fabrics import names_from_text
from gnnpred.corpus.devices import load_own_devices
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import replaced_when_done
from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec
from gnnpred.hardware import DeviceSpec, find_device
from gnnpred.job import ActivationRule, JobSpec, Phase, Precision, host_os_of

GRAPHS_FILE = "graphs.jsonl.xz"
LAYOUT_GRAPHS_FILE = "graphs_layouts.jsonl.xz"  # networks that only model-parallel and JAX runs use
MEASUREMENTS_FILE = "measurements.csv.gz"
MULTI_GPU_FILE = "multi_gpu.csv.gz"

_FORMAT = 1
_DTYPES = tuple(DType)
_ROLES = tuple(Role)
_FIRST_CODE = 35  # '#': the printable characters from here on name (role, dtype) pairs
# RMSprop with momentum reads and writes two states per parameter, as Adam does
_OPTIMIZER_OF_JOB = {"rmsprop": "adam", "": "none", "novograd": "adam"}
_COMPILER_OF_JOB = {"tensorrt": "xla"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRow:
    """One measured configuration, in our vocabulary.

    ``batch_size`` is per GPU and micro-batch. ``measurements.csv.gz`` holds runs on one GPU,
    ``multi_gpu.csv.gz`` runs on several.

    ``graph_id`` and ``architecture`` are empty where the model could not be rebuilt
    (``excluded_reason`` says why). ``duplicate_of`` is the ``row_id`` that represents all repeats of
    the same configuration (the one with the median time); ``used_for_training`` is the default choice.
    """

    row_id: str
    source_id: str
    source: str  # repository@commit:path of the figure
    model: str  # the source's name for it
    graph_id: str
    architecture: str  # same value = same network apart from input size and number of classes
    family: str
    phase: Phase
    framework: str
    framework_version: str
    cuda: str
    device: str
    precision: Precision
    activation_rule: ActivationRule
    tf32_matmul: bool
    memory_format: str
    compiler: str  # eager | torch_compile | xla | tensorrt
    batch_size: int
    input: str
    optimizer: str
    grad_accum: int
    host_copy: bool
    data_loader: bool
    input_gradient: bool  # the gradient of the network's input is computed as well
    os: str
    step_time_ms: float
    superseded: bool
    suspect: bool
    unstable: bool
    few_iterations: bool
    duplicate_of: str
    excluded_reason: str
    used_for_training: bool
    note: str
    gpus: int = 1
    nodes: int = 1
    interconnect: str = ""  # as the source names it
    strategy: str = ""  # several GPUs: ddp | dp | fsdp
    checkpointing: str = ""  # "" none | full: every layer's forward pass runs twice
    attention: str = ""  # "" as the framework's version decides | fused | eager
    derived_from: str = ""  # row_id of the run on several GPUs whose compute this is
    # The layout of model-parallel runs (multi_gpu.csv.gz alone; not in repr, which names encodings of single-GPU rows)
    tensor_parallel: int = field(default=1, repr=False)
    pipeline_parallel: int = field(default=1, repr=False)
    context_parallel: int = field(default=1, repr=False)  # GPUs that share the tokens of a sequence
    interleave: int = field(default=1, repr=False)  # chunks of layers per pipeline stage
    sequence_parallel: bool = field(default=False, repr=False)  # activations between products are split as well
    zero_stage: int = field(default=0, repr=False)  # 1: the optimizer's state is spread over data-parallel ranks
    # No column: the corpus's own description of a device that the shipped tables lack (corpus/devices.py)
    own_device: DeviceSpec | None = field(default=None, repr=False, compare=False)

    @property
    def spec(self) -> DeviceSpec:
        """The device that ran it; raises UsageError where neither the tables nor the corpus have it."""
        return self.own_device or find_device(self.device)

    def fabric_names(self) -> dict[str, str]:
        """What the source says of the links, as a job names them; nothing on one GPU."""
        if self.gpus == 1:
            return {}
        interconnect, inter_node = names_from_text(self.interconnect)
        if self.device == "V100-SXM3-32GB" and interconnect in ("nvlink", "nvlink2"):
            interconnect = "nvlink2-nvswitch"  # DGX-2
        if interconnect == "nvlink" and self.spec.nvlink_gb_s <= 0:
            interconnect = "pcie"
        return {"interconnect": interconnect, "inter_node": inter_node}

    @property
    def has_layout(self) -> bool:
        """Whether one GPU runs a part of the graph."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel > 1

    @property
    def data_parallel(self) -> int:
        """Ranks that train on different samples."""
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    def job(self, device: DeviceSpec | None = None) -> JobSpec:
        """The job that was measured. TensorRT engines are treated as compiled graphs.

        Raises UsageError for context parallelism, which a job cannot name.
        """
        if self.context_parallel > 1:
            raise UsageError(f"{self.source_id}: context parallelism is not modelled")
        return JobSpec(
            device=device or self.spec,
            precision=self.precision,
            batch_size=self.batch_size,
            phase=self.phase,
            optimizer=_OPTIMIZER_OF_JOB.get(self.optimizer, self.optimizer),
            memory_format=self.memory_format,
            compiler=_COMPILER_OF_JOB.get(self.compiler, self.compiler),
            framework=self.framework,
            framework_version=self.framework_version,
            host_os=host_os_of(self.os),
            activation_rule=self.activation_rule,
            tf32_matmul=self.tf32_matmul,
            host_copy=self.host_copy,
            data_loader=self.data_loader,
            attention=self.attention or "auto",
            activation_checkpointing=self.checkpointing or "none",
            gpus=self.gpus,
            nodes=self.nodes,
            strategy="zero1" if self.zero_stage and self.data_parallel > 1 else self.strategy or "ddp",
            grad_accum=self.grad_accum if self.gpus > 1 and self.pipeline_parallel == 1 else 1,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
            pipeline_parallel=self.pipeline_parallel,
            microbatches=self.grad_accum if self.pipeline_parallel > 1 else None,
            interleave=self.interleave,
            **self.fabric_names(),
        )


_ALL_COLUMNS = tuple(column.name for column in fields(MeasurementRow) if column.compare)
LAYOUT_COLUMNS = tuple(column.name for column in fields(MeasurementRow) if column.compare and not column.repr)
ROW_COLUMNS = tuple(name for name in _ALL_COLUMNS if name not in LAYOUT_COLUMNS)
_REQUIRED_COLUMNS = tuple(column.name for column in fields(MeasurementRow) if column.default is MISSING)
_BOOL_COLUMNS = frozenset(
    [
        "tf32_matmul",
        "host_copy",
        "data_loader",
        "input_gradient",
        "superseded",
        "suspect",
        "unstable",
        "few_iterations",
        "used_for_training",
        "sequence_parallel",
    ]
)
_CONVERTERS: dict[str, Any] = {
    "phase": Phase, "precision": Precision, "activation_rule": ActivationRule, "batch_size": int,
    "grad_accum": int, "step_time_ms": float, "gpus": int, "nodes": int,
    "tensor_parallel": int, "pipeline_parallel": int, "context_parallel": int, "interleave": int, "zero_stage": int,
} | {name: (lambda text: text == "1") for name in _BOOL_COLUMNS}  # fmt: skip


# -- rows ------------------------------------------------------------------------------------------
def load_rows(path: str | Path) -> list[MeasurementRow]:
    """All rows of a measurements file, or of the one in a dataset folder, in file order: runs on one GPU."""
    return _read_rows(_in_folder(path, MEASUREMENTS_FILE))


def load_multi_gpu_rows(path: str | Path) -> list[MeasurementRow]:
    """All rows of runs on several GPUs; none where the folder has no such file."""
    path = _in_folder(path, MULTI_GPU_FILE)
    return _read_rows(path) if path.exists() else []


def _read_rows(path: Path) -> list[MeasurementRow]:
    own = load_own_devices(path.parent)
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            missing = [name for name in _REQUIRED_COLUMNS if name not in header]
            if missing:
                raise GnnpredError(
                    f"{path} lacks the columns {', '.join(missing)}: rebuild it with 'gnnpred dataset build'"
                )
            positions = [(name, header.index(name), _CONVERTERS.get(name)) for name in _ALL_COLUMNS if name in header]
            device_at = header.index("device")
            return [
                MeasurementRow(
                    **{n: convert(r[i]) if convert else r[i] for n, i, convert in positions},
                    own_device=own.get(r[device_at]),
                )
                for r in reader
            ]
    except FileNotFoundError as error:
        raise GnnpredError(f"no measurements at {path}: build them with 'gnnpred dataset build'") from error
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise GnnpredError(f"{path} is not a measurements file of this version: {error}") from error


def write_rows(path: str | Path, rows: Iterable[MeasurementRow], *, layouts: bool = False) -> None:
    """Write rows as gzipped CSV, byte-identical for equal rows; ``layouts`` adds the columns of model parallelism."""
    columns = _ALL_COLUMNS if layouts else ROW_COLUMNS
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_text_of(name, getattr(row, name)) for name in columns])
    _write_atomically(Path(path), gzip.compress(text.getvalue().encode(), 9, mtime=0))


def _text_of(name: str, value: Any) -> str:
    if name in _BOOL_COLUMNS:
        return "1" if value else ""
    if name == "step_time_ms":
        return f"{value:.7g}"
    return str(value)


# -- graphs ----------------------------------------------------------------------------------------
class GraphStore(Mapping[str, OpGraph]):
    """Graphs by id; each is decoded when asked for and not kept (an OpGraph takes about 1 MB)."""

    def __init__(self, lines_by_id: Mapping[str, bytes]) -> None:
        self._lines_by_id = lines_by_id

    def __getitem__(self, graph_id: str) -> OpGraph:
        return decode_graph(json.loads(self._lines_by_id[graph_id]))

    def encoded(self, graph_id: str) -> dict[str, Any]:
        """As :func:`write_graphs` takes it."""
        return json.loads(self._lines_by_id[graph_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines_by_id)

    def __len__(self) -> int:
        return len(self._lines_by_id)

    def __contains__(self, graph_id: object) -> bool:
        return graph_id in self._lines_by_id


def load_graphs(path: str | Path) -> GraphStore:
    """The graphs of a graphs file, or of those in a dataset folder."""
    path = Path(path)
    if not path.is_dir():
        return GraphStore(_read_graph_lines(path))
    lines = _read_graph_lines(path / GRAPHS_FILE)
    layouts = path / LAYOUT_GRAPHS_FILE
    return GraphStore(lines | (_read_graph_lines(layouts) if layouts.exists() else {}))


def _read_graph_lines(path: Path) -> dict[str, bytes]:
    try:
        data = lzma.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise GnnpredError(f"no graphs at {path}: build them with 'gnnpred dataset build'") from error
    except (lzma.LZMAError, EOFError) as error:
        raise GnnpredError(f"{path} is not a graphs file: {error}") from error
    lines = data.splitlines()
    if not lines or json.loads(lines[0]).get("format") != _FORMAT:
        raise GnnpredError(f"{path} is of another version: rebuild it with 'gnnpred dataset build'")
    # every line starts {"id":"0123456789abcdef",... so that ids are found without parsing the graph
    return {line[7 : line.index(b'"', 7)].decode(): line for line in lines[1:]}


def write_graphs(path: str | Path, encoded_graphs: Iterable[Mapping[str, Any]]) -> None:
    """Write encoded graphs (:func:`encode_graph`), ordered by name so that similar ones compress together."""
    ordered = sorted(encoded_graphs, key=lambda graph: (graph["name"], graph["id"]))
    lines = [json.dumps({"format": _FORMAT})] + [json.dumps(graph, separators=(",", ":")) for graph in ordered]
    _write_atomically(Path(path), lzma.compress(("\n".join(lines) + "\n").encode(), preset=9 | lzma.PRESET_EXTREME))


def encode_graph(graph: OpGraph) -> dict[str, Any]:
    """A graph at batch 1 as small JSON; tensor names are dropped, batch axes are negative dimensions.

    A reference to a tensor is written as its distance back from the next tensor not yet named (0), so
    repeated blocks look alike and compress well.
    """
    shapes: dict[tuple[int, ...], int] = {}
    kinds: dict[str, int] = {}
    shape_idxs, codes, values = [], [], {}
    for tensor_idx, tensor in enumerate(graph.tensors):
        shape = tuple(-dim if axis in tensor.batch_axes else dim for axis, dim in enumerate(tensor.shape))
        shape_idxs.append(shapes.setdefault(shape, len(shapes)))
        codes.append(chr(_FIRST_CODE + _ROLES.index(tensor.role) * len(_DTYPES) + _DTYPES.index(tensor.dtype)))
        if tensor.value is not None:
            values[str(tensor_idx)] = tensor.value
    flat: list[int] = []
    unnamed = 0

    def refer(tensor_idx: int) -> None:
        nonlocal unnamed
        flat.append(unnamed - tensor_idx)
        unnamed = max(unnamed, tensor_idx + 1)

    for op in graph.ops:
        kind = json.dumps([op.kind, op.attributes], sort_keys=True, separators=(",", ":"))
        flat.append(kinds.setdefault(kind, len(kinds)))
        flat.append(len(op.inputs))
        flat.append(len(op.outputs))
        for tensor_idx in (*op.inputs, *op.outputs):
            refer(tensor_idx)
    encoded = {
        "shapes": [list(shape) for shape in shapes],
        "tensors": shape_idxs,
        "types": "".join(codes),
        "values": values,
        "kinds": [json.loads(kind) for kind in kinds],
        "ops": flat,
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
    }
    repeats = {str(op_idx): op.repeats for op_idx, op in enumerate(graph.ops) if op.repeats != 1}
    if repeats:  # bodies of loops
        encoded["repeats"] = repeats
    if "opset" in graph.metadata:  # of an ONNX file: which decomposed ops are the exporter's doing depends on it
        encoded["opset"] = int(graph.metadata["opset"])
    digest = hashlib.sha256(json.dumps(encoded, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return {"id": digest[:16], "name": graph.name, **encoded}


def decode_graph(encoded: Mapping[str, Any]) -> OpGraph:
    """The graph that :func:`encode_graph` wrote."""
    shapes = [
        (tuple(abs(dim) for dim in shape), tuple(axis for axis, dim in enumerate(shape) if dim < 0))
        for shape in encoded["shapes"]
    ]
    values = encoded["values"]
    known: dict[tuple[int, str], TensorSpec] = {}
    tensors = []
    for tensor_idx, (shape_idx, code) in enumerate(zip(encoded["tensors"], encoded["types"], strict=True)):
        spec = known.get((shape_idx, code))
        if spec is None:
            role_idx, dtype_idx = divmod(ord(code) - _FIRST_CODE, len(_DTYPES))
            shape, batch_axes = shapes[shape_idx]
            spec = known[shape_idx, code] = TensorSpec(shape, _DTYPES[dtype_idx], _ROLES[role_idx], batch_axes)
        value = values.get(str(tensor_idx))
        if value is not None:
            spec = TensorSpec(spec.shape, spec.dtype, spec.role, spec.batch_axes,
                              tuple(value) if isinstance(value, list) else value)  # fmt: skip
        tensors.append(spec)
    kinds = [
        (kind, {key: tuple(value) if isinstance(value, list) else value for key, value in attributes.items()})
        for kind, attributes in encoded["kinds"]
    ]
    ops: list[Op] = []
    repeats = encoded.get("repeats", {})
    flat = encoded["ops"]
    position = unnamed = 0
    while position < len(flat):
        kind, attributes = kinds[flat[position]]
        num_inputs, num_outputs = flat[position + 1], flat[position + 2]
        position += 3
        references = []
        for distance in flat[position : position + num_inputs + num_outputs]:
            tensor_idx = unnamed - distance
            references.append(tensor_idx)
            if tensor_idx >= unnamed:
                unnamed = tensor_idx + 1
        position += num_inputs + num_outputs
        ops.append(
            Op(
                kind, tuple(references[:num_inputs]), tuple(references[num_inputs:]), attributes,
                repeats=repeats.get(str(len(ops)), 1),
            )
        )  # fmt: skip
    return OpGraph(
        tensors=tuple(tensors),
        ops=tuple(ops),
        inputs=tuple(encoded["inputs"]),
        outputs=tuple(encoded["outputs"]),
        batch_size=1,
        name=encoded["name"],
        metadata={"opset": encoded["opset"]} if "opset" in encoded else {},
    )


_WEIGHTED_KINDS = frozenset(["conv", "conv_transpose", "linear", "lstm", "gru", "rnn", "embedding"])
_IGNORED_KINDS = frozenset(
    ["view", "transpose", "slice", "split", "expand", "copy", "cast", "dropout", "pad", "identity"]
)


def architecture_hash(graph: OpGraph) -> str:
    """Name of the network that ``graph`` is, whatever its input size and number of classes.

    Two graphs share it when they run the same kinds of ops with the same weight matrices in the same
    order, views, copies, dropout, padding and the width of the last classifier aside.
    """
    parts: list[Any] = []
    last_linear = max((i for i, op in enumerate(graph.ops) if op.kind == "linear"), default=-1)
    for op_idx, op in enumerate(graph.ops):
        if op.kind in _IGNORED_KINDS:
            continue
        part: list[Any] = [op.kind]
        if op.kind in _WEIGHTED_KINDS and len(op.inputs) > 1:
            weight = graph.tensors[op.inputs[0 if op.kind == "embedding" else 1]]
            shape = list(weight.shape)
            if op_idx == last_linear:
                x = graph.tensors[op.inputs[0]]
                shape = [x.shape[-1] if x.shape else 0]
            part.append(shape)
        if op.kind in ("conv", "conv_transpose"):
            part += [list(op.attributes["stride"]), op.attributes["groups"]]
        parts.append(part)
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:12]


# -- files -----------------------------------------------------------------------------------------
def _in_folder(path: str | Path, file_name: str) -> Path:
    path = Path(path)
    return path / file_name if path.is_dir() else path


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_when_done(path) as partial:
        partial.write_bytes(data)
