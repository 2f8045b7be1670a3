"""Build the corpus: raw measured tables + rebuilt models -> rows and graphs in ``datasets/``.

The raw tables live outside the repository (``../shared/data``) and are read here only; what training
needs is what this writes. Traced graphs are cached one file per model, so an interrupted build
goes on where it stopped.
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import json
import multiprocessing
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gnnpred.corpus.collections import collected_rows
from gnnpred.corpus.compute_rows import compute_rows
from gnnpred.corpus.families import family_of
from gnnpred.corpus.rebuild import ModelKey, defining_file, trace_key
from gnnpred.corpus.repeats import mark_repeats, with_unique_ids
from gnnpred.corpus.source_table import write_source_table
from gnnpred.corpus.sources import SOURCES
from gnnpred.corpus.sources.record import Interpretation
from gnnpred.corpus.splits import for_balance, write_splits
from gnnpred.corpus.store import (
    GRAPHS_FILE,
    LAYOUT_COLUMNS,
    LAYOUT_GRAPHS_FILE,
    MEASUREMENTS_FILE,
    MULTI_GPU_FILE,
    MeasurementRow,
    architecture_hash,
    decode_graph,
    encode_graph,
    write_graphs,
    write_rows,
)
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import replaced_when_done
from gnnpred.hardware import find_device
from gnnpred.job import ActivationRule, Phase, Precision

RAW_FILES = ("measurements_vision.csv.gz", "measurements_distributed.csv.gz", "measurements_academic.csv.gz")
DEFAULT_SHARED = Path("../shared/data")
DEFAULT_WORK = Path(".cache/corpus")

_SUPERSEDED = "superseded_by_later_commit"


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build wrote: counts, and the models that could not be traced with the reason."""

    num_rows: int
    num_multi_gpu_rows: int
    num_graphs: int
    num_training_rows: int
    num_inference_rows: int
    num_training_devices: int
    excluded_by_reason: Mapping[str, int]
    failed_models: Mapping[str, str]


def build_dataset(
    shared: Path = DEFAULT_SHARED,
    out: Path = Path("datasets"),
    *,
    jobs: int = 2,
    limit: int | None = None,
    resume: bool = True,
    phases: Collection[Phase] | None = None,
    work: Path = DEFAULT_WORK,
    show_progress: bool = True,
) -> BuildReport:
    """Read the tables in ``shared`` and write measurements, graphs and splits to ``out``.

    ``limit`` keeps the first models only (for a trial), ``phases`` the rows of those phases;
    ``resume=False`` traces every model again. Rows of collections that ``out`` holds already stay. Raises GnnpredError
    where a table is missing.
    """
    added = collected_rows(Path(out))  # what dataset add merged stays
    candidates = list(_read_candidates(Path(shared), phases))
    interpretations = [c.interpretation for c in candidates if c.interpretation]
    keys = list(dict.fromkeys(key for i in interpretations for key in (i.key, i.architecture_key) if key))
    if limit is not None:
        keys = keys[:limit]
        kept = set(keys)
        candidates = [c for c in candidates if c.interpretation and c.interpretation.key in kept]
    traced = _trace_all(keys, work=Path(work) / _code_version(), jobs=jobs, resume=resume, show_progress=show_progress)
    rows, multi_gpu_rows = (
        with_unique_ids(mark_repeats([_row_of(c, traced) for c in candidates if (c.num_gpus > 1) is several]))
        for several in (False, True)
    )
    used_ids = {row.graph_id for row in (*rows, *multi_gpu_rows)}
    plain_ids = {row.graph_id for row in rows}
    plain_ids |= {row.graph_id for row in multi_gpu_rows if not row.has_layout and row.framework != "jax"}
    graphs = {t["graph"]["id"]: t["graph"] for t in traced.values() if "graph" in t and t["graph"]["id"] in used_ids}
    rows += compute_rows(multi_gpu_rows, lambda graph_id: decode_graph(graphs[graph_id]))
    rows += added.rows
    multi_gpu_rows += added.multi_gpu_rows
    for graph in added.graphs:
        graphs[graph["id"]] = graph
        plain_ids.add(graph["id"])
    out = Path(out)
    write_rows(out / MEASUREMENTS_FILE, rows)
    write_rows(out / MULTI_GPU_FILE, multi_gpu_rows, layouts=True)
    write_graphs(out / GRAPHS_FILE, [graph for graph in graphs.values() if graph["id"] in plain_ids])
    write_graphs(out / LAYOUT_GRAPHS_FILE, [graph for graph in graphs.values() if graph["id"] not in plain_ids])
    write_splits(out / "splits", for_balance(rows, multi_gpu_rows))
    write_source_table(out / "README.md", rows, multi_gpu_rows)
    kept_rows = [row for row in rows if row.graph_id]
    training = [row for row in kept_rows if row.phase is not Phase.INFERENCE]
    return BuildReport(
        num_rows=len(rows),
        num_multi_gpu_rows=len(multi_gpu_rows),
        num_graphs=len(graphs),
        num_training_rows=len(training),
        num_inference_rows=len(kept_rows) - len(training),
        num_training_devices=len({row.device for row in training}),
        excluded_by_reason=dict(
            Counter(row.excluded_reason for row in (*rows, *multi_gpu_rows) if row.excluded_reason).most_common()
        ),
        failed_models={key.text: t["error"] for key, t in traced.items() if "error" in t},
    )


# -- reading ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Candidate:
    record: Mapping[str, str]
    interpretation: Interpretation | None
    excluded_reason: str

    @property
    def num_gpus(self) -> int:
        return int(self.record["gpus"])


def _read_candidates(shared: Path, phases: Collection[Phase] | None) -> Iterator[_Candidate]:
    missing = [name for name in RAW_FILES if not (shared / name).is_file()]
    if missing:
        raise GnnpredError(
            f"the measured tables are not in {shared}: {', '.join(missing)} missing. "
            "Name their folder with --shared; what training needs is already in datasets/"
        )
    interpreter_by_prefix = {prefix: module.interpret for module in SOURCES for prefix in module.PREFIXES}
    for name in RAW_FILES:
        with gzip.open(shared / name, "rt", encoding="utf-8", newline="") as file:
            for record in csv.DictReader(file):
                source_id = record["source_id"]
                interpret = next(
                    (f for prefix, f in interpreter_by_prefix.items() if source_id.startswith(prefix)), None
                )
                if interpret is None:
                    raise GnnpredError(f"no module of gnnpred.corpus.sources reads the source {source_id}")
                interpretation = interpret(record, shared)
                if isinstance(interpretation, str):
                    candidate = _Candidate(record, None, interpretation)
                else:
                    candidate = _Candidate(record, interpretation, interpretation.excluded_reason)
                if phases is None or _phase_of(candidate) in phases:
                    yield candidate


def _phase_of(candidate: _Candidate) -> Phase:
    return Phase({"infer": "inference"}.get(candidate.record["phase"], candidate.record["phase"]))


# -- tracing ---------------------------------------------------------------------------------------
def _trace_all(
    keys: list[ModelKey], *, work: Path, jobs: int, resume: bool, show_progress: bool
) -> dict[ModelKey, dict[str, Any]]:
    """Result per key: ``{"graph", "architecture"}`` or ``{"error"}``; cached in ``work``."""
    work.mkdir(parents=True, exist_ok=True)
    results: dict[ModelKey, dict[str, Any]] = {}
    pending = []
    for key in keys:
        cached = _read_cached(_cache_path(work, key)) if resume else None
        if cached is None:
            pending.append(key)
        else:
            results[key] = cached
    columns = (TextColumn("tracing models"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not show_progress) as progress:
        task = progress.add_task("", total=len(keys), completed=len(results))
        if jobs <= 1 or len(pending) < 4:
            for key in pending:
                results[key] = _trace_to_cache(key, work)
                progress.advance(task)
            return results
        # spawned, not forked: torch's thread pools do not survive a fork
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            futures = {pool.submit(_trace_to_cache, key, work): key for key in pending}
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                progress.advance(task)
    return results


def _trace_to_cache(key: ModelKey, work: Path) -> dict[str, Any]:
    try:
        graph = trace_key(key)
        # an eval-mode graph may lack auxiliary heads; it is still the same network
        trained = graph if key.train else trace_key(replace(key, train=True))
        result: dict[str, Any] = {"graph": encode_graph(graph), "architecture": architecture_hash(trained)}
    except GnnpredError as error:
        result = {"error": str(error)}
    path = _cache_path(work, key)
    with replaced_when_done(path) as partial:
        partial.write_text(json.dumps(result))
    return result


def _read_cached(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _cache_path(work: Path, key: ModelKey) -> Path:
    text = key.text
    if key.source.startswith("own:"):
        text += _syntax_digest(defining_file(key))
    return work / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def _code_version() -> str:
    """Changes when the code that shapes a graph does, so that stale graphs are not reused."""
    return hashlib.sha256(
        (
            _syntax_digest("trace.py") + _syntax_digest("store.py", functions=("encode_graph", "architecture_hash"))
        ).encode()
    ).hexdigest()[:12]


@lru_cache(maxsize=8)
def _syntax_digest(file_name: str, *, functions: tuple[str, ...] = ()) -> str:
    """Digest of a module's syntax tree (comments and layout do not count), or of some of its functions."""
    tree = ast.parse((Path(__file__).parent / file_name).read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if not functions or getattr(node, "name", "") in functions]
    return hashlib.sha256("".join(ast.dump(node) for node in nodes).encode()).hexdigest()


# -- rows ------------------------------------------------------------------------------------------
def _row_of(candidate: _Candidate, traced: Mapping[ModelKey, Mapping[str, Any]]) -> MeasurementRow:
    record, interpretation = candidate.record, candidate.interpretation
    excluded = candidate.excluded_reason
    graph_id = architecture = family = ""
    if interpretation and interpretation.key and not excluded:
        result = traced.get(interpretation.key, {"error": "not traced"})
        if "error" in result:
            excluded = f"cannot be rebuilt: {result['error']}"
        else:
            graph_id, architecture = result["graph"]["id"], result["architecture"]
            if interpretation.architecture_key:
                architecture = traced.get(interpretation.architecture_key, {}).get("architecture", architecture)
            family = interpretation.family or family_of(interpretation.key.source)
    try:
        device = find_device(record["gpu"]).name
    except UsageError:
        device, excluded = record["gpu"], excluded or f"{record['gpu']} is not in the device table"
    if excluded:
        graph_id = architecture = ""
    note = record["note"]
    superseded = _SUPERSEDED in note
    suspect, unstable, few = "SUSPECT" in note, "UNSTABLE" in note, "FEW_ITERATIONS" in note
    not_eval = "NOT eval()" in note
    unused = interpretation.unused_reason if interpretation else ""
    num_nodes = _whole_number(record["nodes"])
    if candidate.num_gpus % num_nodes:
        unused = unused or "GPUs spread unevenly over the nodes"
    extra = [
        text for text in ((interpretation.notes if interpretation else ()) + ((unused,) if unused else ())) if text
    ]
    if not_eval:
        extra.append("forward pass in training mode")
    used = bool(graph_id) and not (superseded or suspect or unstable or few or not_eval or unused)
    return MeasurementRow(
        row_id=_row_id(record),
        source_id=record["source_id"],
        source=record["source"],
        model=record["model"],
        graph_id=graph_id,
        architecture=architecture,
        family=family,
        phase=interpretation.phase if interpretation else _phase_of(candidate),
        framework=record["framework"],
        framework_version=record["framework_version"],
        cuda=record["cuda"],
        device=device,
        precision=interpretation.precision if interpretation else Precision.FP32,
        activation_rule=interpretation.activation_rule if interpretation else ActivationRule.AUTOCAST,
        tf32_matmul=interpretation.tf32_matmul if interpretation else True,
        memory_format=interpretation.memory_format if interpretation else "nchw",
        compiler=interpretation.compiler if interpretation else "eager",
        batch_size=interpretation.batch_size if interpretation else 0,
        input=record["input"],
        optimizer=interpretation.optimizer if interpretation else "none",
        grad_accum=(interpretation and interpretation.grad_accum) or _whole_number(record["grad_accum"]),
        host_copy=interpretation.host_copy if interpretation else False,
        data_loader=interpretation.data_loader if interpretation else False,
        input_gradient=interpretation.input_gradient if interpretation else False,
        os=interpretation.os if interpretation else "",
        step_time_ms=interpretation.step_time_ms if interpretation else _number(record["step_time_ms"]),
        superseded=superseded,
        suspect=suspect,
        unstable=unstable,
        few_iterations=few,
        duplicate_of="",
        excluded_reason=excluded,
        used_for_training=used,
        note="; ".join(extra),
        gpus=candidate.num_gpus,
        nodes=num_nodes,
        interconnect=record["interconnect"] if candidate.num_gpus > 1 else "",
        strategy=(interpretation.strategy if interpretation else "ddp") if candidate.num_gpus > 1 else "",
        checkpointing=interpretation.checkpointing if interpretation else "",
        attention=interpretation.attention if interpretation else "",
        **({name: getattr(interpretation, name) for name in LAYOUT_COLUMNS} if interpretation else {}),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _whole_number(text: str) -> int:
    return int(text) if text.isdigit() else 1


def _row_id(record: Mapping[str, str]) -> str:
    names = ("source_id", "source", "model", "phase", "gpu", "precision", "memory_format", "compiled", "batch_per_gpu",
             "input", "optimizer", "step_time_ms", "note")  # fmt: skip
    if record["gpus"] != "1":
        names += ("gpus", "nodes")
    return hashlib.sha256("\x1f".join(record[name] for name in names).encode()).hexdigest()[:12]
