"""How quick and how small predicting is, beside the targets. Needs the train extra for the comparison.

    python benchmarks/predict_latency.py [--repeats 5] [--check]

Whole processes are measured from outside (wall time, peak resident memory of the child); the import of
torch and torch_geometric runs in the same script, alternating with ours, so that a busy machine slows both.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "resnet50.onnx"
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not


@dataclass(frozen=True)
class Figure:
    """One measured figure; it is met where ``measured <= target``."""

    name: str
    measured: float
    unit: str
    target: float | None

    @property
    def is_met(self) -> bool:
        return self.target is None or self.measured <= self.target


def child(arguments: list[str]) -> tuple[float, float]:
    """Wall time in s and peak resident memory in MB of one Python process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT, env=environment
    )
    message = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed: {message.decode(errors='replace').strip()}")
    return wall_s, usage.ru_maxrss / 1e3  # kB on Linux


def whole_process(repeats: int) -> list[Figure]:
    predict = ["-m", "gnnpred", "predict", str(EXAMPLE), "--batch-size", "64", "--precision", "fp16", "--json"]
    imports = ["-c", "import torch, torch_geometric"]
    child(predict), child(imports)  # fill the file cache for both
    ours, theirs = [], []
    for _ in range(repeats):
        theirs.append(child(imports))
        ours.append(child(predict))
    predict_s = statistics.median(wall for wall, _ in ours)
    import_s = statistics.median(wall for wall, _ in theirs)
    return [
        Figure("import torch, torch_geometric: whole process", import_s, "s", None),
        Figure("predict ResNet-50: whole process", predict_s, "s", None),
        Figure("predict / import of torch, torch_geometric", predict_s / import_s, "", 0.35),
        Figure("predict ResNet-50: peak memory", max(peak for _, peak in ours), "MB", 350),
    ]


def warm_calls(repeats: int) -> list[Figure]:
    from gnnpred import JobSpec, Precision, Predictor, find_device, read_canonical

    predictor = Predictor()
    graph = read_canonical(EXAMPLE, batch_size=32)
    devices = [find_device(name) for name in ("A100-SXM4-80GB", "V100", "RTX3090", "T4")]

    def call_ms(batch_size: int, device_idx: int, model: object) -> float:
        job = JobSpec(device=devices[device_idx % 4], precision=Precision.MIXED, batch_size=batch_size)
        started = time.perf_counter()
        predictor.predict(model, job)
        return (time.perf_counter() - started) * 1e3

    call_ms(8, 0, EXAMPLE)
    same = statistics.median(call_ms(8, i, EXAMPLE) for i in range(4 * repeats))
    other = statistics.median(call_ms(9 + i, i, graph) for i in range(4 * repeats))
    return [
        Figure("warm Predictor: same model and batch, other device", same, "ms", 25),
        Figure("warm Predictor: same model, new batch each call", other, "ms", 25),
    ]


def long_chain(num_nodes: int) -> onnx.ModelProto:
    """Convolutions, activations and additions in a long chain with skips."""
    weight = helper.make_tensor(
        "w", TensorProto.FLOAT, [16, 16, 3, 3], np.zeros(16 * 16 * 9, np.float32).tobytes(), raw=True
    )
    nodes, last, skip = [], "x", "x"
    for i in range(num_nodes):
        name = f"t{i}"
        if i % 3 == 0:
            nodes.append(helper.make_node("Conv", [last, "w"], [name], pads=[1, 1, 1, 1], kernel_shape=[3, 3]))
        elif i % 3 == 1:
            nodes.append(helper.make_node("Relu", [last], [name]))
        else:
            nodes.append(helper.make_node("Add", [last, skip], [name]))
            skip = name
        last = name
    shape = ["batch", 16, 32, 32]
    graph = helper.make_graph(
        nodes,
        "long_chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, shape)],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def large_graph(folder: Path) -> list[Figure]:
    from gnnpred import JobSpec, Predictor, find_device

    path = folder / "long_chain.onnx"
    onnx.save(long_chain(20_000), str(path))
    predictor = Predictor()
    predictor.predict(EXAMPLE, JobSpec(device=find_device("V100"), batch_size=2))
    started = time.perf_counter()
    predictor.predict(path, JobSpec(device=find_device("V100"), batch_size=2))
    return [Figure("20,000-node graph: file to prediction", time.perf_counter() - started, "s", 3)]


def external_data_model(folder: Path, *, size_bytes: int) -> Path:
    """Matrix products whose weights lie in one sparse file of ``size_bytes``."""
    side = 8192
    num_weights = size_bytes // (side * side * 4)
    weights, nodes, last = [], [], "x"
    for i in range(num_weights):
        tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[side, side])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights.bin"), ("offset", i * side * side * 4), ("length", side * side * 4)):
            tensor.external_data.add(key=key, value=str(value))
        weights.append(tensor)
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"t{i}"]))
        last = f"t{i}"
    shape = ["batch", side]
    graph = helper.make_graph(
        nodes,
        "external",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, shape)],
        weights,
    )
    path = folder / "external.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(path))
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(size_bytes)
    return path


def external_data(folder: Path) -> list[Figure]:
    from gnnpred import read_canonical

    path = external_data_model(folder, size_bytes=2 * 2**30)
    data = folder / "weights.bin"
    os.utime(data, ns=(0, data.stat().st_mtime_ns))  # an access time in the past is renewed by any read
    started = time.perf_counter()
    graph = read_canonical(path, batch_size=4)
    read_s = time.perf_counter() - started
    touched = data.stat().st_atime_ns != 0
    with data.open("rb") as file:
        file.read(1)
    if data.stat().st_atime_ns == 0:
        raise SystemExit(f"{folder} keeps no access times: set TMPDIR to a file system that does")
    data.unlink()
    if read_canonical(path, batch_size=4).num_parameters != graph.num_parameters:
        raise SystemExit("the answer depends on whether the data file is there")
    return [
        Figure("2 GiB of external data: reading the model", read_s, "s", 1),
        Figure("2 GiB of external data: reads of the data file", float(touched), "", 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = [
            *whole_process(arguments.repeats),
            *warm_calls(arguments.repeats),
            *large_graph(Path(folder)),
            *external_data(Path(folder)),
        ]
    width = max(len(figure.name) for figure in figures)
    print(f"{'':{width}}  {'measured':>12}  {'target':>10}  measured/target")
    for figure in figures:
        target = "" if figure.target is None else f"{figure.target:g} {figure.unit}"
        ratio = f"{figure.measured / figure.target:.2f}" if figure.target else ""
        verdict = "" if figure.target is None else ("met" if figure.is_met else "MISSED")
        print(
            f"{figure.name:{width}}  {f'{figure.measured:.3g} {figure.unit}':>12}  {target:>10}  {ratio:>6}  {verdict}"
        )
    if arguments.check and not all(figure.is_met for figure in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
