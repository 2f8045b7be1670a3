"""The tables of a collection: ``runs.csv`` as ``score`` and ``calibrate`` read it, and what failed beside it."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gnnpred.collect.recipe import Configuration, Recipe
from gnnpred.collect.store import CollectionStore, StoredRow
from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done
from gnnpred.job import Phase, Precision

RUNS_FILE = "runs.csv"
COLLECTIVES_FILE = "collectives.csv"
FAILED_FILE = "failed.csv"
DEVICE_FILE = "device.toml"

RUN_COLUMNS = (
    "onnx", "source_id", "source", "model", "model_library", "phase", "framework", "framework_version", "cuda", "gpu",
    "gpus", "nodes", "interconnect", "precision", "memory_format", "compiled", "batch_per_gpu", "input", "optimizer",
    "grad_accum", "step_time_ms", "throughput", "throughput_unit", "note", "os", "step_p10_ms", "step_p90_ms",
    "wall_clock_ms", "num_steps", "peak_memory_mib", "cudnn_benchmark", "driver", "cudnn", "cpu", "warning",
    "strategy", "step_time_slowest_ms",
)  # fmt: skip
_FAILED_COLUMNS = (
    "model", "batch_size", "image_size", "seq_len", "precision", "phase", "optimizer", "memory_format", "compile",
    "gpus", "nodes", "strategy", "status", "reason",
)  # fmt: skip


def write_tables(store: CollectionStore, recipe: Recipe) -> None:
    """Write both tables anew from the store, rows in the recipe's order."""
    if recipe.kind == "collectives":
        from gnnpred.collect.collective_table import write_collective_tables

        write_collective_tables(store, recipe)
        return
    rows = {row.config_id: row for row in store.rows()}
    graphs = store.graphs()
    runs, failed = [], []
    for configuration in recipe.configurations:
        row = rows.get(configuration.config_id)
        if row is None:
            continue
        if row.status == "ok":
            runs.append(_run_cells(configuration, row, graphs.get(configuration.graph_id, ("", "")), recipe))
        else:
            failed.append({**row.configuration, "status": row.status, "reason": row.reason})
    write_csv(store.folder / RUNS_FILE, RUN_COLUMNS, runs)
    write_csv(store.folder / FAILED_FILE, _FAILED_COLUMNS, failed)


def _run_cells(configuration: Configuration, row: StoredRow, graph: tuple[str, str], recipe: Recipe) -> dict[str, Any]:
    result, manifest = row.result, row.result["manifest"]
    file, not_exported = graph
    notes = ["synthetic data that stays on the device", f"median of {result['num_steps']} steps"]
    if configuration.precision is Precision.TF32:
        notes.append("tf32 matmul switched on")  # PyTorch's default has it for convolutions alone
    notes += filter(None, [result["warning"], not_exported])
    return {
        "onnx": file,
        "source_id": f"collect-{recipe.recipe_id}",
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
        "interconnect": manifest.get("interconnect", "") if configuration.gpus > 1 else "",
        "precision": str(configuration.precision),
        "memory_format": configuration.memory_format,
        "compiled": "torch_compile" if configuration.compile else "eager",
        "batch_per_gpu": configuration.batch_size,
        "input": result["input"],
        "optimizer": "" if configuration.optimizer == "none" else configuration.optimizer,
        "grad_accum": 1,
        "step_time_ms": f"{result['step_time_ms']:.6g}",
        "throughput": f"{configuration.gpus * configuration.batch_size / result['step_time_ms'] * 1e3:.6g}",
        "throughput_unit": "samples/s",
        "note": "; ".join(notes),
        "os": manifest["os"],
        "step_p10_ms": f"{result['step_p10_ms']:.6g}",
        "step_p90_ms": f"{result['step_p90_ms']:.6g}",
        "wall_clock_ms": f"{result['wall_clock_ms']:.6g}",
        "num_steps": result["num_steps"],
        "peak_memory_mib": "" if result["peak_memory_mib"] is None else f"{result['peak_memory_mib']:.1f}",
        "cudnn_benchmark": result["cudnn_benchmark"],
        "driver": manifest["driver"],
        "cudnn": manifest["cudnn"],
        "cpu": manifest["cpu"],
        "warning": result["warning"],
        "strategy": configuration.strategy,
        "step_time_slowest_ms": f"{result['step_time_slowest_ms']:.6g}" if configuration.gpus > 1 else "",
    }


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
