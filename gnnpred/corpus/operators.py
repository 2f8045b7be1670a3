"""Single-kernel timings as a second kind of training row.

Whole-model rows say little about bf16, large GEMMs or attention; the operator tables do. From 1.4 million
forward and backward kernels a stratified sample enters the corpus: equal numbers per (op, device, precision,
phase), spread over the logarithm of time, so that no source dominates.
"""

import csv
import gzip
import io
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gnnpred.corpus.devices import load_own_devices
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.features import KERNEL_FLOOR_US
from gnnpred.files import replaced_when_done
from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec
from gnnpred.hardware import DeviceSpec, find_device

# Launch and timing overhead inside the times of a source, in us. Sources that time whole calls hold the host's
# dispatch, which differs by machine, op and direction: it is read off the group's own smallest kernels
# (:func:`overhead_us`; NeuSight: 12 to 58 us in 60 groups), and these are for groups that have none. Straight lines
# through the times of elementwise ops start near 8 us forward and 20 us backward for Sailor, and at 5 us for
# estimate-train-time.
OVERHEAD_US = {
    ("neusight", "fwd"): 25.0, ("sailor", "fwd"): 8.0, ("sailor", "bwd"): 20.0, ("superscaler", "fwd"): 8.0,
    ("superscaler", "bwd"): 15.0, ("justus2018", "fwd"): 150.0, ("ett", "fwd"): 5.0, ("ett", "bwd"): 5.0,
}  # fmt: skip
_MEASURED_OVERHEAD = ("neusight", "justus2018")
MIN_SMALL_KERNELS = 20  # that a group needs for an overhead of its own
SMALL_KERNEL_US = 2.0  # roofline time below which a kernel's time is its overhead
MIN_OVERHEAD_MULTIPLE = 4.0  # rows below this multiple of the overhead say more about the host than the kernel
MIN_TIME_US = 8.0
PER_STRATUM = 120
PER_PRODUCT_STRATUM = 200  # convolutions, products, attention: shapes matter more
# TensorFlow 1 wall times: of use for the Kepler and Maxwell GPUs that no table of kernel times covers
_SESSION_RUN_DEVICES = ("K40", "K80", "M60")
COLUMNS = ("source", "device", "kind", "phase", "precision", "shape", "time_us")


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One timed kernel. ``shape`` depends on the kind, see :func:`operator_graph`."""

    source: str
    device: str
    kind: str
    phase: str  # fwd | bwd | bwd_data | bwd_weight
    precision: str
    shape: tuple[int, ...]
    time_us: float  # overhead of the source already taken off
    # The corpus's own description of a device that the shipped tables lack (corpus/devices.py)
    own_device: DeviceSpec | None = field(default=None, repr=False, compare=False)

    @property
    def spec(self) -> DeviceSpec:
        """The device that ran it; raises UsageError where neither the tables nor the corpus have it."""
        return self.own_device or find_device(self.device)


_ELEMENTWISE = {"add": "add", "mul": "mul", "gelu": "gelu", "relu": "relu", "dropout": "dropout", "tanh": "tanh"}
_NORM = {"layernorm": "layer_norm", "rmsnorm": "rms_norm", "softmax": "softmax"}
# one kernel each; GPT-NeoX's own softmax and RMSNorm and an fp32 masked softmax are chains of eager kernels
_FUSED_SOFTMAX = {"fused_causal_softmax": ("fp16",), "scaled_masked_softmax": ("fp16",)}
_EAGER_CHAINS = {("ett", "softmax"), ("ett", "rmsnorm")}
_PHASES = {"fwd": "fwd", "bwd": "bwd", "bwd_data": "bwd_data", "bwd_weight": "bwd_weight"}


def _candidates(shared: Path) -> Iterator[OperatorRow]:
    """All usable rows of the operator tables, unfiltered by number."""
    folder = shared / "operators"

    def rows(name: str) -> Iterator[dict[str, str]]:
        with gzip.open(folder / f"{name}.csv.gz", "rt", encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)

    def ints(row: dict[str, str], *names: str) -> tuple[int, ...]:
        return tuple(int(float(row[name] or 1)) for name in names)  # stride and groups are blank where 1

    for name in ("gemm", "gemm_aiconfigurator"):
        for row in rows(name):
            if row.get("optimizer") or row.get("activation") or row["phase"] not in _PHASES:
                continue
            b, m, n, k = ints(row, "b", "m", "n", "k")
            if m < 64 or row["source"].startswith("justus2018"):  # decode shapes; TensorFlow calls of tiny batches
                continue
            kind = "matmul" if b > 1 else "linear"
            yield _row(row, kind, (b, m, n, k))
    for row in rows("conv2d"):
        if (
            (row["source"].startswith("justus2018") and row["gpu"] not in _SESSION_RUN_DEVICES)
            or row.get("optimizer")
            or row["activation"]
            or row["phase"] not in _PHASES
            or not row["pad_h"]
            or float(row["pad_h"]) % 1
        ):
            continue
        shape = ints(row, "n", "c", "h", "w", "k", "r", "s", "stride_h", "stride_w", "pad_h", "pad_w", "groups")
        yield _row(row, "conv", shape)
    for row in rows("elementwise"):
        kind = _ELEMENTWISE.get(row["op"])
        # an add has no backward kernel of its own: what tables call so also sums gradients
        if kind and (row["phase"] == "fwd" or (row["phase"] == "bwd" and kind != "add")):
            yield _row(row, kind, ints(row, "rows", "cols"))
    for row in rows("norm_softmax"):
        kind = _NORM.get(row["op"])
        if row["precision"] in _FUSED_SOFTMAX.get(row["op"], ()):
            kind = "softmax"
        if kind and row["phase"] in ("fwd", "bwd") and (row["source"].split("-")[0], row["op"]) not in _EAGER_CHAINS:
            yield _row(row, kind, ints(row, "rows", "cols"))
    for row in rows("attention"):
        if row["phase"] in ("fwd", "bwd") and row["seq_q"] == row["seq_kv"] and int(row["seq_q"]) >= 128:
            causal = int("causal" in row["op"])
            yield _row(row, "sdpa", (*ints(row, "batch", "heads", "kv_heads", "seq_q", "head_dim"), causal))


def _row(row: dict[str, str], kind: str, shape: tuple[int, ...]) -> OperatorRow:
    return OperatorRow(row["source"], row["gpu"], kind, row["phase"], row["precision"], shape, float(row["time_us"]))


def _roofline_us(row: OperatorRow, device: DeviceSpec) -> float:
    """Coarse lower bound of a kernel's time: no time is taken off that the kernel itself needs."""
    shape = row.shape
    match row.kind:
        case "linear" | "matmul":
            b, m, n, k = shape
            elements, flops = b * (m * k + k * n + m * n), 2 * b * m * n * k
        case "conv":
            num, c, h, w, filters, r, s, stride_h, stride_w, _, _, groups = shape
            pixels = num * (h // stride_h) * (w // stride_w)
            elements, flops = num * c * h * w + pixels * filters, 2 * pixels * filters * (c // groups) * r * s
        case "sdpa":
            batch, heads, _, seq, head_dim, _ = shape
            elements, flops = 4 * batch * heads * seq * head_dim, 4 * batch * heads * seq * seq * head_dim
        case _:
            elements, flops = 2 * shape[0] * shape[1], 0
    width = 4 if row.precision in ("fp32", "tf32") else 2
    peak = device.peak_tflops(_COMPUTE_DTYPES[row.precision]) or device.fp32_tflops
    return max(elements * width / (device.mem_bandwidth_gb_s * 1e3), flops / (peak * 1e6))


_COMPUTE_DTYPES = {"fp32": DType.FP32, "tf32": DType.TF32, "fp16": DType.FP16, "bf16": DType.BF16}


def overhead_us(source: str, phase: str, times_us: Sequence[float], rooflines_us: Sequence[float]) -> float:
    """Overhead inside the times of one (source, device, kind, phase) group.

    Where the source times whole calls and the group has enough kernels that need almost no time, those times are the
    overhead: their first decile, less what an empty kernel takes. Otherwise the source's constant.
    """
    if source in _MEASURED_OVERHEAD:
        small = [t for t, roofline in zip(times_us, rooflines_us, strict=True) if roofline < SMALL_KERNEL_US]
        if len(small) >= MIN_SMALL_KERNELS:
            return max(0.0, float(np.quantile(small, 0.1)) - KERNEL_FLOOR_US)
    return OVERHEAD_US.get((source, phase), 0.0)


def sample_operator_rows(shared: Path, *, seed: int = 0) -> list[OperatorRow]:
    """The stratified sample from ../shared/data; deterministic for a seed."""
    rng = np.random.default_rng(seed)
    groups: dict[tuple[str, ...], list[OperatorRow]] = defaultdict(list)
    for row in _candidates(shared):
        if row.precision in _COMPUTE_DTYPES:
            groups[row.source.split("-")[0], row.device, row.kind, row.phase].append(row)
    chosen: list[OperatorRow] = []
    for key in sorted(groups):
        source, device_name, kind, phase = key
        try:
            device = find_device(device_name)
        except UsageError:
            continue
        group = groups[key]
        overhead = overhead_us(source, phase, [r.time_us for r in group], [_roofline_us(r, device) for r in group])
        kept = [
            replace(row, time_us=row.time_us - overhead)
            for row in group
            if row.time_us >= max(MIN_TIME_US, overhead * MIN_OVERHEAD_MULTIPLE)
        ]
        limit = PER_PRODUCT_STRATUM if kind in ("linear", "matmul", "conv", "sdpa") else PER_STRATUM
        for precision in sorted({row.precision for row in kept}):
            rows = [row for row in kept if row.precision == precision]
            if len(rows) > limit:
                # equal numbers per half decade of time: large kernels are rare in the tables and decisive in steps
                bins = np.floor(2 * np.log10([r.time_us for r in rows])).astype(int)
                weight = 1.0 / np.bincount(bins - bins.min())[bins - bins.min()]
                picked = rng.choice(len(rows), limit, replace=False, p=weight / weight.sum())
                rows = [rows[i] for i in sorted(picked)]
            chosen.extend(rows)
    return chosen


def write_operator_rows(rows: list[OperatorRow], path: Path) -> None:
    """CSV, gzipped, through a temporary file."""
    with (
        replaced_when_done(path) as partial,
        partial.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as zipped,
    ):
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for r in rows:
            shape = "x".join(map(str, r.shape))
            writer.writerow([r.source, r.device, r.kind, r.phase, r.precision, shape, f"{r.time_us:.5g}"])
        zipped.write(text.getvalue().encode())


def load_operator_rows(path: Path) -> list[OperatorRow]:
    """Rows that :func:`write_operator_rows` wrote; raises GnnpredError for another or a damaged file."""
    own = load_own_devices(path.parent)
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return [
                OperatorRow(
                    r["source"], r["device"], r["kind"], r["phase"], r["precision"],
                    tuple(int(v) for v in r["shape"].split("x")), float(r["time_us"]), own.get(r["device"]),
                )
                for r in csv.DictReader(file)
            ]  # fmt: skip
    except OSError as error:
        raise GnnpredError(f"cannot read operator rows {path}: {error.strerror or error}") from error
    except (EOFError, ValueError, KeyError, TypeError, AttributeError, csv.Error, zlib.error) as error:
        raise GnnpredError(f"{path} is not a file of operator rows: {error}") from error


def operator_graph(row: OperatorRow) -> OpGraph:
    """The row's kernel as a graph of one op, fp32, before precision lowering.

    Shapes: linear, matmul (b, m, n, k); conv (n, c, h, w, k, r, s, stride h w, padding h w, groups);
    elementwise, norms and softmax (rows, cols); batch_norm (n, c, pixels);
    sdpa (batch, heads, kv_heads, seq, head_dim, causal).
    """
    fp32 = DType.FP32
    shape = row.shape

    def data(*dims: int) -> TensorSpec:
        return TensorSpec(dims, fp32, Role.INPUT)

    def weight(*dims: int) -> TensorSpec:
        return TensorSpec(dims, fp32, Role.PARAMETER)

    attributes: dict = {}
    match row.kind:
        case "linear":
            _, m, n, k = shape
            inputs, out = [data(m, k), weight(n, k)], (m, n)
        case "matmul":
            b, m, n, k = shape
            inputs, out = [data(b, m, k), data(b, k, n)], (b, m, n)
        case "conv":
            num, c, h, w, filters, r, s, stride_h, stride_w, pad_h, pad_w, groups = shape
            out = (num, filters, (h + 2 * pad_h - r) // stride_h + 1, (w + 2 * pad_w - s) // stride_w + 1)
            inputs = [data(num, c, h, w), weight(filters, c // groups, r, s)]
            attributes = {
                "kernel": (r, s), "stride": (stride_h, stride_w), "dilation": (1, 1), "padding": (pad_h, pad_w),
                "groups": groups,
            }  # fmt: skip
        case "sdpa":
            batch, heads, kv_heads, seq, head_dim, causal = shape
            kv = data(batch, kv_heads, seq, head_dim)
            inputs, out = [data(batch, heads, seq, head_dim), kv, kv], (batch, heads, seq, head_dim)
            attributes = {"causal": bool(causal)}
        case "batch_norm":
            inputs, out = [data(*shape), weight(shape[1]), weight(shape[1])], shape
        case "add" | "mul":
            inputs, out = [data(*shape), data(*shape)], shape
        case "layer_norm" | "rms_norm":
            inputs, out = [data(*shape), weight(shape[1])], shape
            attributes = {"normalized_size": shape[1]}
        case _:
            inputs, out = [data(*shape)], shape
            if row.kind == "softmax":
                attributes = {"axis": 1}
            elif row.kind == "dropout":
                attributes = {"ratio": 0.1}
    tensors = (*inputs, TensorSpec(tuple(out), fp32, Role.ACTIVATION))
    op = Op(row.kind, tuple(range(len(inputs))), (len(inputs),), attributes)
    feeds = tuple(i for i, t in enumerate(inputs) if t.role is Role.INPUT)
    return OpGraph(tensors, (op,), feeds, (len(inputs),), batch_size=1, name=row.kind)
