"""The tables of a collection: ``runs.csv`` as ``score`` reads it, what failed, and times of operators."""

import csv
import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gnnpred.collect.recipe import LARGEST, Configuration, Recipe
from gnnpred.collect.store import CollectionStore, StoredRow
from gnnpred.corpus.operators import COLUMNS as OPERATOR_COLUMNS
from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done
from gnnpred.job import Phase, Precision

RUNS_FILE = "runs.csv"
COLLECTIVES_FILE = "collectives.csv"
FAILED_FILE = "failed.csv"
DEVICE_FILE = "device.toml"
OPERATORS_FILE = "operators.csv"

RUN_COLUMNS = (
    "onnx", "source_id", "source", "model", "model_library", "phase", "framework", "framework_version", "cuda", "gpu",
    "gpus", "nodes", "interconnect", "precision", "memory_format", "compiled", "batch_per_gpu", "input", "optimizer",
    "grad_accum", "step_time_ms", "throughput", "throughput_unit", "note", "os", "step_p10_ms", "step_p90_ms",
    "wall_clock_ms", "num_steps", "peak_memory_mib", "cudnn_benchmark", "driver", "cudnn", "cpu", "warning",
    "strategy", "step_time_slowest_ms", "host_copy", "onnx_sha256", "batch_is_largest", "drift_pct", "sm_clock_mhz",
    "memory_clock_mhz", "throttle_reasons", "other_gpu_processes", "gpu_temperature_c", "power_w", "energy_per_step_j",
    "power_limit_w", "nccl", "num_cpus", "host_memory_gib", "mig", "operator_time_share", "prepare_s", "context_s",
    "batch_search_s", "build_s", "warmup_s", "measure_s", "profile_s",
)  # fmt: skip
_FAILED_COLUMNS = (
    "model", "batch_size", "image_size", "seq_len", "precision", "phase", "optimizer", "memory_format", "compile",
    "host_copy", "gpus", "nodes", "strategy", "status", "reason",
)  # fmt: skip
# Figures of a result that go to the table as they are; empty where this machine does not tell them.
_FIGURES = (
    "drift_pct", "sm_clock_mhz", "memory_clock_mhz", "other_gpu_processes", "gpu_temperature_c", "power_w",
    "energy_per_step_j", "power_limit_w", "operator_time_share", "prepare_s", "context_s", "batch_search_s", "build_s",
    "warmup_s", "measure_s", "profile_s",
)  # fmt: skip
_MACHINE = ("driver", "cudnn", "cpu", "nccl", "num_cpus", "host_memory_gib", "mig")


def measured_file(recipe: Recipe) -> str:
    """Name of the table of what was measured."""
    return COLLECTIVES_FILE if recipe.kind == "collectives" else RUNS_FILE


def write_tables(store: CollectionStore, recipe: Recipe) -> None:
    """Write the tables anew from the store, rows in the recipe's order."""
    if recipe.kind == "collectives":
        from gnnpred.collect.collective_table import write_collective_tables

        write_collective_tables(store, recipe)
        return
    rows = {row.config_id: row for row in store.rows()}
    graphs = {
        graph_id: (file, reason, _sha256(store.folder / file) if file else "")
        for graph_id, (file, reason) in store.graphs().items()
    }
    runs, failed = [], []
    for configuration in recipe.configurations:
        row = rows.get(configuration.config_id)
        if row is None:
            continue
        if row.status == "ok":
            runs.append(_run_cells(configuration, row, graphs.get(configuration.graph_id, ("", "", "")), recipe))
        else:
            failed.append({**_failed_cells(row.configuration), "status": row.status, "reason": row.reason})
    write_csv(store.folder / RUNS_FILE, RUN_COLUMNS, runs)
    write_csv(store.folder / FAILED_FILE, _FAILED_COLUMNS, failed)
    write_csv(store.folder / OPERATORS_FILE, OPERATOR_COLUMNS, _operator_cells(rows.values(), recipe))


def _failed_cells(configuration: dict[str, Any]) -> dict[str, Any]:
    cells = {name: configuration.get(name) for name in _FAILED_COLUMNS}
    return {**cells, "batch_size": LARGEST if cells["batch_size"] is None else cells["batch_size"]}


def _operator_cells(rows: Iterable[StoredRow], recipe: Recipe) -> list[dict[str, Any]]:
    """One row per kernel: the median over the configurations in which it was timed."""
    times_us: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        for kind, phase, precision, shape, _, time_us in row.result.get("operators", ()):
            device = row.result["manifest"]["gpu"]
            times_us[device, kind, phase, precision, "x".join(map(str, shape))].append(time_us)
    return [
        dict(zip(OPERATOR_COLUMNS, (_source_id(recipe), *kernel, f"{statistics.median(found):.5g}"), strict=True))
        for kernel, found in sorted(times_us.items())
    ]


def _sha256(path: Path) -> str:
    """Of a graph's file, "" where it is gone."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _source_id(recipe: Recipe) -> str:
    return f"collect-{recipe.recipe_id}"


def _run_cells(
    configuration: Configuration, row: StoredRow, graph: tuple[str, str, str], recipe: Recipe
) -> dict[str, Any]:
    result, manifest = row.result, row.result["manifest"]
    file, not_exported, onnx_sha256 = graph
    batch_size = configuration.batch_size or result["batch_size"]
    has_host_copy = configuration.host_copy != "none"
    notes = ["synthetic data that stays on the device", f"median of {result['num_steps']} steps"]
    if has_host_copy:
        notes[0] = f"synthetic inputs copied H2D from {configuration.host_copy} memory in every step"
    if configuration.precision is Precision.TF32:
        notes.append("tf32 matmul switched on")  # PyTorch's default has it for convolutions alone
    notes += filter(None, [result["warning"], not_exported])
    return {
        "onnx": file,
        "source_id": _source_id(recipe),
        "source": f"gnnpred collect:{recipe.name}:{row.config_id}",
        "model": configuration.model,
        "model_library": _library_of(configuration.model),
        "phase": "infer" if configuration.phase is Phase.INFERENCE else str(configuration.phase),
        "framework": "pytorch",
        "framework_version": manifest["torch"],
        "cuda": manifest["cuda"],
        "gpu": manifest["gpu"],
        "gpus": configuration.gpus,
        "nodes": configuration.nodes,
        "interconnect": _interconnect_of(configuration, manifest),
        "precision": str(configuration.precision),
        "memory_format": configuration.memory_format,
        "compiled": "torch_compile" if configuration.compile else "eager",
        "batch_per_gpu": batch_size,
        "input": result["input"],
        "optimizer": "" if configuration.optimizer == "none" else configuration.optimizer,
        "grad_accum": 1,
        "step_time_ms": f"{result['step_time_ms']:.6g}",
        "throughput": f"{configuration.gpus * batch_size / result['step_time_ms'] * 1e3:.6g}",
        "throughput_unit": "samples/s",
        "note": "; ".join(notes),
        "os": manifest["os"],
        "step_p10_ms": f"{result['step_p10_ms']:.6g}",
        "step_p90_ms": f"{result['step_p90_ms']:.6g}",
        "wall_clock_ms": f"{result['wall_clock_ms']:.6g}",
        "num_steps": result["num_steps"],
        "peak_memory_mib": "" if result["peak_memory_mib"] is None else f"{result['peak_memory_mib']:.1f}",
        "cudnn_benchmark": result["cudnn_benchmark"],
        "warning": result["warning"],
        "strategy": configuration.strategy,
        "step_time_slowest_ms": f"{result['step_time_slowest_ms']:.6g}" if configuration.gpus > 1 else "",
        "host_copy": "1" if has_host_copy else "",
        "onnx_sha256": onnx_sha256,
        "batch_is_largest": "1" if configuration.batch_size is None else "",
        "throttle_reasons": " ".join(result.get("throttle_reasons") or ()),
        **{name: manifest.get(name) for name in _MACHINE},
        **{name: _figure(result.get(name)) for name in _FIGURES},
    }


def _interconnect_of(configuration: Configuration, manifest: dict[str, Any]) -> str:
    """The links that the ranks used, as ``names_from_text`` of gnnpred.communication.fabrics reads them."""
    links = [manifest.get("interconnect", "")] if configuration.gpus_per_node > 1 else []
    if configuration.nodes > 1:
        links.append(manifest.get("network", ""))
    return " + ".join(filter(None, links))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _library_of(model: str) -> str:
    prefix = model.split(":")[0]
    return {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}.get(prefix, "user")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write a table, complete or not at all; raises GnnpredError."""
    try:
        with replaced_when_done(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise GnnpredError(f"cannot write {path}: {error.strerror or error}") from error


def write_device_file(values: dict[str, Any], folder: Path) -> None:
    """A device file for ``--device-file``; the first one of a folder stays, so that predictions do not move."""
    path = folder / DEVICE_FILE
    if path.exists():
        return
    lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
    try:
        with replaced_when_done(path) as partial:
            partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise GnnpredError(f"cannot write {path}: {error.strerror or error}") from error


def _toml(value: Any) -> str:
    if isinstance(value, str):
        plain = "".join(c for c in value if c.isprintable()).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{plain}"'
    return repr(value)
