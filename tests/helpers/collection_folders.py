"""A collection's folder as `gnnpred collect` leaves it, made without measuring."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from gnnpred.collect.recipe import Configuration, load_recipe
from gnnpred.collect.store import CollectionStore
from gnnpred.collect.table import write_device_file, write_tables
from tests.helpers.onnx_files import FLOAT, model_of, value, weight

CPU_NAME = "Test CPU 8"
CPU_DEVICE = {
    "name": CPU_NAME, "architecture": "CPU", "num_sms": 8, "boost_clock_mhz": 3000, "fp32_tflops": 0.5,
    "fp64_tflops": 0.25, "bf16_tensor_tflops": 0.6, "memory_gb": 16.0, "mem_bandwidth_gb_s": 20.0,
}  # fmt: skip
MANIFEST = {
    "device": "cpu", "torch": "2.9.0", "python": "3.11", "os": "Linux 6", "cpu": CPU_NAME, "num_cpu_threads": 1,
    "cuda": "", "cudnn": "", "driver": "", "compute_capability": None, "gpu": CPU_NAME,
}  # fmt: skip
V100 = {**MANIFEST, "device": "cuda", "gpu": "V100-SXM2-16GB", "cuda": "12.6", "compute_capability": 7.0}
RECIPE = """
[[sweep]]
models = ["torchvision:alexnet", "timm:vgg11", "mine:mixer_small"]
batch_sizes = [4, 8, 16]
precisions = ["fp32", "mixed"]
"""


def mlp(width: int, *, num_layers: int = 3, batch: int | str = "batch") -> onnx.ModelProto:
    """Dense layers with ReLU between, as a graph of its own for every width."""
    nodes, weights, x = [], [], "x"
    for layer in range(num_layers):
        weights.append(weight(f"w{layer}", [width, width]))
        nodes.append(helper.make_node("Gemm", [x, f"w{layer}"], [f"g{layer}"], transB=1, name=f"fc{layer}"))
        nodes.append(helper.make_node("Relu", [f"g{layer}"], [f"r{layer}"], name=f"relu{layer}"))
        x = f"r{layer}"
    nodes.append(helper.make_node("Gemm", [x, "last"], ["y"], transB=1, name="last"))
    weights.append(weight("last", [10, width]))
    return model_of(nodes, [value("x", [batch, width])], [value("y", None, FLOAT)], weights)


def steady_ms(configuration: Configuration) -> float:
    """A time that grows with the batch and shrinks with precision."""
    return (2.0 + 0.5 * configuration.batch_size) * (1.0 if configuration.precision == "fp32" else 0.8)


def write_collection(
    folder: Path,
    *,
    recipe: str = RECIPE,
    time_ms: Callable[[Configuration], float] = steady_ms,
    manifest: Mapping[str, Any] = MANIFEST,
    warning: Callable[[Configuration], str] = lambda configuration: "",
    failed: Callable[[Configuration], str] = lambda configuration: "",
    models: Mapping[str, onnx.ModelProto] | None = None,
) -> Path:
    """Rows for every configuration of ``recipe``; ``failed`` gives a status other than ok, ``models`` the ONNX files
    (by default dense layers, of another width for every model)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f"{folder.name}-recipe.toml"
    path.write_text(recipe, encoding="utf-8")
    loaded = load_recipe(path)
    with CollectionStore(folder) as store:
        store.bind(loaded, f"{manifest['device']} ({manifest['gpu']})")
        if manifest["device"] == "cpu":
            write_device_file(CPU_DEVICE, folder)
        (folder / "models").mkdir(exist_ok=True)
        known = {row.config_id for row in store.rows()}
        graphs = store.graphs()
        names = list(dict.fromkeys(each.model for each in loaded.configurations))
        for each in loaded.configurations:
            if each.config_id in known:
                continue
            ms = time_ms(each)
            result = {
                "batch_size": each.batch_size, "step_time_ms": ms, "step_p10_ms": ms, "step_p90_ms": ms,
                "wall_clock_ms": ms, "num_steps": 10, "warning": warning(each), "peak_memory_mib": 1.0, "input": "64",
                "cudnn_benchmark": True, "manifest": dict(manifest),
            }  # fmt: skip
            if failed(each):
                store.add_row(each, status=failed(each), reason="it did", result={"manifest": dict(manifest)})
                continue
            store.add_row(each, status="ok", result=result)
            if each.graph_id not in graphs:
                model = (models or {}).get(each.model) or mlp(64 * (1 + names.index(each.model)))
                content = model.SerializeToString()
                file = f"models/{hashlib.sha256(content).hexdigest()[:16]}.onnx"
                (folder / file).write_bytes(content)
                store.add_graph(each.graph_id, file=file)
                graphs[each.graph_id] = (file, "")
        write_tables(store, loaded)
    return folder
