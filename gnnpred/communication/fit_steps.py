"""Fit the constants of a data-parallel step from measured training runs.

    python -m gnnpred.communication.fit_steps --shared ../shared/data --out gnnpred/communication/constants.json

Every multi-GPU row of the two tables is paired with the single-GPU row of the same source, model, software,
precision, batch and accumulation; the pair's difference is what several GPUs add. No network is needed: the
compute time is the measured step(1), the backward pass is taken as a fixed share of it, and gradients
become ready along a coarse profile (``fit_models.csv``: parameters in all, those ready first, those ready last).

Writes the section ``steps`` of constants.json with provenance and errors, in the fit and with each model held out.
"""

import argparse
import csv
import gzip
import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from gnnpred.communication.collectives import all_reduce_ms
from gnnpred.communication.fabrics import ClusterFabric, names_from_text, resolve_fabric
from gnnpred.communication.fit import pattern_search
from gnnpred.communication.timeline import (
    DataParallelConstants,
    Gradient,
    GradientBucket,
    StepConstants,
    data_parallel_communication_ms,
    fill_buckets,
    local_part,
)
from gnnpred.errors import GnnpredError
from gnnpred.hardware import find_device

logger = logging.getLogger(__name__)

# Backward share of a step with optimizer: backward costs twice the forward (README_academic: 1.7-2.0), the optimizer
# a few per cent.
BACKWARD_SHARE = 0.62
NUM_SEGMENTS = 50  # of the backward pass
# In CNNs most weights lie in the late layers, whose backward comes first.
CNN_READINESS_EXPONENT = 2.5

SOURCES = ("lambda-pt", "dle-pytorch", "dlperf-nvidiadeeplearningexamples")
REFERENCE_SOURCES = ("lambda-tf", "dle-mxnet", "dle-tensorflow", "dlperf-")  # scored, not fitted
BAD_NOTES = ("SUSPECT", "UNSTABLE", "FEW_ITERATIONS", "suspect", "proxy run", "estimated", "fixed global batch")
# Steps of varying length (steps per epoch or tokens differ with the GPU count): their difference is not overhead.
# Lambda's Transformer-XL rows add 1 to 3 ms on eight PCIe cards, where its 770 MB of gradients alone take over 50.
UNUSABLE_MODELS = {"tacotron2", "waveglow", "ncf", "transformerxlbase", "transformerxllarge"}
# Batches of varying shape and host-bound input make their multi-GPU overhead; scored apart, not fitted.
IRREGULAR_MODELS = {"maskrcnn", "maskrcnn-resnet50-fpn", "efficientdet-d0", "gnmt"}
# Lambda's v1 runs on SXM hosts (PyTorch 1.13, virtual machines) reach 1 to 13 GB/s between GPUs that the v0 and v2
# runs join at NVLink rate: the links were not visible to the guest.
BLIND_HOSTS = ("lambda-pt-v1-",)
BLIND_GPUS = ("A100-SXM4", "V100-SXM2")


@dataclass(frozen=True)
class Pair:
    """One multi-GPU configuration beside its single-GPU run: medians over repeats."""

    family: str  # source family
    model: str
    framework: str
    gpu: str
    precision: str
    single_ms: float
    multi_ms: float
    grad_accum: int
    buckets: tuple[GradientBucket, ...]
    local_ms: tuple[float, ...]  # (num_buckets,) all-reduce inside a node, idle machine
    network_ms: tuple[float, ...]  # (num_buckets,) all-reduce over all nodes, idle machine; 0 on one node
    fabric: ClusterFabric

    @property
    def measured_efficiency(self) -> float:
        return self.single_ms / self.multi_ms


@lru_cache(maxsize=1)
def _models() -> dict[str, dict[str, str]]:
    with (files("gnnpred.communication") / "fit_models.csv").open(encoding="utf-8", newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def synthetic_gradients(row: dict[str, str], bytes_per_element: float) -> tuple[Gradient, ...]:
    """Gradients of a model along the backward pass, as (bytes, segment) pieces."""
    total, last, first = (float(row[key]) * 1e6 for key in ("parameters_m", "last_m", "first_m"))
    body = max(0.0, total - last - first)
    edges = np.linspace(0, 1, NUM_SEGMENTS + 1)
    ready = 1 - (1 - edges) ** (CNN_READINESS_EXPONENT if row["profile"] == "cnn" else 1.0)
    sizes = body * np.diff(ready)
    sizes[0] += first
    pieces = [Gradient(float(size) * bytes_per_element, segment) for segment, size in enumerate(sizes)]
    if last:
        pieces.append(Gradient(last * bytes_per_element, NUM_SEGMENTS - 1))
    return tuple(pieces)


def _read(path: Path) -> Iterable[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _half_gradients(row: dict[str, str]) -> bool:
    """Whether the run reduced half gradients: Apex O2 or a half model over master weights."""
    return "apex_O2" in row["note"] or (row["precision"] in ("fp16", "bf16") and "half model" in row["note"])


def read_pairs(shared: Path) -> list[Pair]:
    """Pairs of all usable sources, one per configuration (median over repeats)."""
    rows = [
        row
        for name in ("measurements_vision.csv.gz", "measurements_distributed.csv.gz")
        for row in _read(shared / name)
        if row["phase"] == "train"
        and row["step_time_ms"]
        and row["source_id"].startswith(("lambda-pt", "lambda-tf", "dle-", "dlperf-"))
        and not any(bad in row["note"] for bad in BAD_NOTES)
        and row["model"] in _models()
        and row["model"] not in UNUSABLE_MODELS
        and not (row["source_id"].startswith(BLIND_HOSTS) and row["gpu"].startswith(BLIND_GPUS))
    ]
    single: dict[tuple, list[float]] = defaultdict(list)
    multi: dict[tuple, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        key = _pair_key(row)
        if row["gpus"] == "1":
            single[key].append(float(row["step_time_ms"]))
        else:
            multi[(*key, row["gpus"], row["nodes"], row["interconnect"])].append(row)
    pairs = []
    for key, group in multi.items():
        singles = single.get(key[:-3])
        if singles:
            pair = _pair(group, float(np.median(singles)))
            if pair is not None:
                pairs.append(pair)
    return pairs


def _pair_key(row: dict[str, str]) -> tuple:
    family = _family(row)
    if family.startswith("lambda"):
        # One host per system name: a pair must not mix hosts. Synthetic and real data are kept apart.
        system = next((part for part in row["note"].split(";") if part.startswith("data=")), "")
        origin = f"{row['source_id'].rsplit('-', 1)[0]}{system}"
    else:
        origin = row["source"]
    columns = "model framework framework_version gpu precision batch_per_gpu input optimizer grad_accum memory_format"
    return (origin, *(row[column] for column in columns.split()))


def _family(row: dict[str, str]) -> str:
    return "-".join(row["source_id"].split("-")[:2])


def _pair(group: list[dict[str, str]], single_ms: float) -> Pair | None:
    row = group[0]
    try:
        device = find_device(row["gpu"])
        intra, inter = names_from_text(row["interconnect"])
        if row["gpu"] == "V100-SXM3-32GB" and intra in ("nvlink", "nvlink2"):
            intra = "nvlink2-nvswitch"
        if intra == "nvlink" and device.nvlink_gb_s <= 0:
            intra = "pcie"
        fabric = resolve_fabric(
            device=device, gpus=int(row["gpus"]), nodes=int(row["nodes"]), interconnect=intra, inter_node=inter
        )
    except GnnpredError as error:
        logger.info("left out %s: %s", row["source_id"], error)
        return None
    gradients = synthetic_gradients(_models()[row["model"]], 2.0 if _half_gradients(row) else 4.0)
    buckets = tuple(fill_buckets(gradients))
    local = local_part(fabric)
    return Pair(
        family=_family(row),
        model=row["model"],
        framework=row["framework"],
        gpu=row["gpu"],
        precision=row["precision"],
        single_ms=single_ms,
        multi_ms=float(np.median([float(r["step_time_ms"]) for r in group])),
        grad_accum=int(float(row["grad_accum"] or 1)),
        buckets=buckets,
        local_ms=tuple(all_reduce_ms(bucket.num_bytes, local) if local else 0.0 for bucket in buckets),
        network_ms=tuple(all_reduce_ms(bucket.num_bytes, fabric) if fabric.inter else 0.0 for bucket in buckets),
        fabric=fabric,
    )


@dataclass(frozen=True)
class PairArrays:
    """Pairs as arrays, so that one loss costs milliseconds."""

    single_ms: np.ndarray  # (num_pairs,)
    multi_ms: np.ndarray  # (num_pairs,)
    backward_ms: np.ndarray  # (num_pairs,) of the micro-step that communicates
    local_ms: np.ndarray  # (num_pairs, NUM_SEGMENTS): idle-machine all-reduce time that becomes ready with a segment
    network_ms: np.ndarray  # (num_pairs, NUM_SEGMENTS): the same over all nodes
    log2_gpus: np.ndarray  # (num_pairs,)
    link_class: np.ndarray  # (num_pairs,) position in LINK_CLASSES

    def select(self, chosen: np.ndarray) -> "PairArrays":
        return PairArrays(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


LINK_CLASSES = tuple(
    name for name in StepConstants.__dataclass_fields__ if name.endswith("_slowdown") and name != "network_slowdown"
)


def pair_arrays(pairs: list[Pair]) -> PairArrays:
    """Everything about the pairs that does not depend on the constants."""
    local_ms, network_ms = np.zeros((2, len(pairs), NUM_SEGMENTS))
    for position, pair in enumerate(pairs):
        for bucket, bucket_local_ms, bucket_network_ms in zip(
            pair.buckets, pair.local_ms, pair.network_ms, strict=True
        ):
            local_ms[position, bucket.last_op] += bucket_local_ms
            network_ms[position, bucket.last_op] += bucket_network_ms
    return PairArrays(
        single_ms=np.array([pair.single_ms for pair in pairs]),
        multi_ms=np.array([pair.multi_ms for pair in pairs]),
        # Under accumulation only the last micro-step communicates.
        backward_ms=np.array([BACKWARD_SHARE * pair.single_ms / pair.grad_accum for pair in pairs]),
        local_ms=local_ms,
        network_ms=network_ms,
        log2_gpus=np.log2([pair.fabric.gpus for pair in pairs]),
        link_class=np.array([LINK_CLASSES.index(StepConstants.link_class(pair.fabric)) for pair in pairs]),
    )


def predict_ms(arrays: PairArrays, constants: StepConstants) -> np.ndarray:
    """Step times of the multi-GPU runs from the single-GPU runs, (num_pairs,) ms.

    The same walk as :func:`gnnpred.communication.timeline.overlap`, over all pairs at once.
    """
    slowdowns = np.array([constants.slowdown_of(name) for name in LINK_CLASSES])
    load_ms = np.maximum(
        arrays.local_ms * slowdowns[arrays.link_class][:, None], arrays.network_ms * constants.network_slowdown
    )
    work_ms = arrays.backward_ms / NUM_SEGMENTS
    stretch = 1 + constants.contention
    now_ms = np.zeros(len(work_ms))
    network_free_ms = np.zeros(len(work_ms))
    for segment in range(NUM_SEGMENTS):
        busy_ms = np.maximum(network_free_ms - now_ms, 0)
        # Stretched work fits into the busy time, or fills it and the rest runs at full speed.
        now_ms += np.where(work_ms * stretch <= busy_ms, work_ms * stretch, work_ms + busy_ms * (1 - 1 / stretch))
        load = load_ms[:, segment]
        network_free_ms = np.where(load > 0, np.maximum(network_free_ms, now_ms) + load, network_free_ms)
    exposed_ms = np.maximum(now_ms, network_free_ms) - arrays.backward_ms
    sync_ms = constants.sync_base_ms + constants.sync_ms_per_log2_gpu * arrays.log2_gpus
    return arrays.single_ms + exposed_ms + sync_ms


_FIELDS = tuple(StepConstants.__dataclass_fields__)
_START = {
    "contention": 0.1,
    "sync_base_ms": 2.0,
    "sync_ms_per_log2_gpu": 1.0,
    "nvlink_slowdown": 1.3,
    "pcie_slowdown": 1.5,
    "pcie_crowd_slowdown": 2.0,
    "host_staged_slowdown": 1.5,
    "host_staged_crowd_slowdown": 3.0,
    "network_slowdown": 1.3,
}
_LOWEST = {"contention": 0.01, "sync_base_ms": 0.05, "sync_ms_per_log2_gpu": 0.05}  # slowdowns: at least 1


def _constants_of(log_values: np.ndarray) -> StepConstants:
    values = {
        name: max(_LOWEST.get(name, 1.0), float(np.exp(value))) for name, value in zip(_FIELDS, log_values, strict=True)
    }
    for name in values:  # as they count: a crowd is never quicker than a few
        if "_crowd" in name:
            values[name] = max(values[name], values[name.replace("_crowd", "")])
    return StepConstants(**values)


def _weights(pairs: list[Pair]) -> np.ndarray:  # (num_pairs,)
    """Equal weight per (family, model, GPU), then per configuration inside it."""
    keys = [(p.family, p.model, p.gpu) for p in pairs]
    counts = defaultdict(int)
    for key in keys:
        counts[key] += 1
    weights = np.array([1 / counts[key] for key in keys])
    return weights / weights.sum()


def fit_constants(arrays: PairArrays, weights: np.ndarray) -> StepConstants:
    """Constants that minimise the weighted mean absolute error of the log step time."""
    start = np.log([_START[name] for name in _FIELDS])

    def loss(log_values: np.ndarray) -> float:
        errors = np.abs(np.log(predict_ms(arrays, _constants_of(log_values)) / arrays.multi_ms))
        pull = 1e-3 * np.abs(log_values - start).mean()  # keeps classes without rows at their start
        return float((weights * errors).sum() / weights.sum() + pull)

    best, _ = pattern_search(loss, start, step=0.6, smallest_step=0.04, max_rounds=60)
    return _constants_of(best)


def score(pairs: list[Pair], predicted: np.ndarray) -> dict:
    """Errors of step time (per cent) and of weak-scaling efficiency (points)."""
    measured = np.array([pair.multi_ms for pair in pairs])
    single = np.array([pair.single_ms for pair in pairs])
    step_error = 100 * np.abs(predicted / measured - 1)
    points = 100 * np.abs(single / predicted - single / measured)
    return {
        "num_pairs": len(pairs),
        "step_mape_pct": round(float(step_error.mean()), 1),
        "step_median_error_pct": round(float(np.median(step_error)), 1),
        "efficiency_error_points_mean": round(float(points.mean()), 1),
        "efficiency_error_points_median": round(float(np.median(points)), 1),
        "bias_pct": round(float(100 * (predicted / measured - 1).mean()), 1),
    }


SPREAD_GPUS = (2, 4, 8, 16)


def spread_90_log(measured_ms: np.ndarray, predicted_ms: np.ndarray) -> list[float]:
    """5 % and 95 % quantile of log(measured / predicted): what communication adds to a step's uncertainty."""
    low, high = np.quantile(np.log(measured_ms / predicted_ms), (0.05, 0.95))
    return [round(float(low), 4), round(float(high), 4)]


def spread_by_gpus(pairs: list[Pair], predicted: np.ndarray) -> dict[str, list[float]]:
    """:func:`spread_90_log` by GPU count; predictions by constants that have not seen the pair's model."""
    gpus = np.array([pair.fabric.gpus for pair in pairs])
    measured = np.array([pair.multi_ms for pair in pairs])
    return {
        str(count): spread_90_log(measured[gpus == count], predicted[gpus == count])
        for count in SPREAD_GPUS
        if (gpus == count).any()
    }


def held_out_by_model(pairs: list[Pair]) -> np.ndarray:  # (num_pairs,)
    """Predictions of every pair by constants fitted without its model."""
    arrays, weights = pair_arrays(pairs), _weights(pairs)
    predicted = np.zeros(len(pairs))
    names = np.array([_model_family(pair.model) for pair in pairs])
    for name in sorted(set(names.tolist())):
        test = names == name
        predicted[test] = predict_ms(arrays.select(test), fit_constants(arrays.select(~test), weights[~test]))
    return predicted


def _model_family(model: str) -> str:
    name = model.lower().replace("_", "-")
    for family in (
        "bert-large",
        "bert-base",
        "resnet50",
        "ssd",
        "maskrcnn",
        "transformer-xl",
        "efficientnet",
    ):
        if name.startswith(family):
            return family
    return name


def tables(pairs: list[Pair], predicted: np.ndarray) -> dict:
    """Scores by GPU count and precision, by link class, and the two trivial predictors beside them."""
    full = {"fp32", "tf32"}
    sections: dict[str, dict] = {"all": score(pairs, predicted)}
    selectors = {
        **{
            f"{count} GPUs {label}": (
                lambda p, c=count, f=label == "full": p.fabric.gpus == c and (p.precision in full) == f
            )
            for count in (2, 4, 8, 16)
            for label in ("full", "mixed")
        },
        "nvlink": lambda p: p.fabric.inter is None and p.fabric.intra.name.startswith("nv"),
        "pcie": lambda p: p.fabric.inter is None and p.fabric.intra.name.startswith("pcie"),
        "several nodes": lambda p: p.fabric.inter is not None,
    }
    for name, selector in selectors.items():
        chosen = np.array([selector(pair) for pair in pairs])
        if chosen.any():
            sections[name] = score([p for p, c in zip(pairs, chosen, strict=True) if c], predicted[chosen])
    single = np.array([pair.single_ms for pair in pairs])
    sections["baseline: no overhead"] = score(pairs, single)
    by_count = {
        n: float(np.median([p.measured_efficiency for p in pairs if p.fabric.gpus == n]))
        for n in {p.fabric.gpus for p in pairs}
    }
    sections["baseline: median efficiency of the GPU count (in sample)"] = score(
        pairs, np.array([p.single_ms / by_count[p.fabric.gpus] for p in pairs])
    )
    return sections


@dataclass(frozen=True)
class DataParallelRow:
    """One nn.DataParallel run beside its single-GPU run."""

    source: str
    model: str
    precision: str
    single_ms: float
    multi_ms: float
    gradient_bytes: float
    input_bytes: float
    num_kernels: int
    fabric: ClusterFabric


def read_data_parallel_rows(shared: Path) -> list[DataParallelRow]:
    """The ryu family: torchvision models, forward and backward, nn.DataParallel on 2 to 4 GPUs."""
    with (files("gnnpred.communication") / "fit_data_parallel_models.csv").open(encoding="utf-8", newline="") as file:
        models = {row["model"]: row for row in csv.DictReader(file)}
    single: dict[tuple, float] = {}
    multi: list[tuple[tuple, dict[str, str]]] = []
    for row in _read(shared / "measurements_vision.csv.gz"):
        usable = row["source_id"].startswith("ryu-") and row["phase"] == "forward_backward" and row["model"] in models
        if not usable or not row["step_time_ms"] or any(bad in row["note"] for bad in BAD_NOTES):
            continue
        key = tuple(row[column] for column in ("source_id", "model", "gpu", "precision", "batch_per_gpu"))
        if row["gpus"] == "1":
            single.setdefault(key, float(row["step_time_ms"]))
        else:
            multi.append((key, row))
    rows = []
    for key, row in multi:
        if key not in single:
            continue
        width = {"fp16": 2, "fp64": 8}.get(row["precision"], 4)
        model = models[row["model"]]
        fabric = resolve_fabric(device=find_device(row["gpu"]), gpus=int(row["gpus"]), nodes=1)
        rows.append(
            DataParallelRow(
                source=row["source_id"],
                model=row["model"],
                precision=row["precision"],
                single_ms=single[key],
                multi_ms=float(row["step_time_ms"]),
                gradient_bytes=float(model["parameters_m"]) * 1e6 * width,
                input_bytes=float(row["batch_per_gpu"]) * 3 * 224 * 224 * width,
                num_kernels=int(model["num_forward_kernels"]),
                fabric=fabric,
            )
        )
    return rows


@dataclass(frozen=True)
class DataParallelArrays:
    """The rows as arrays, (num_rows,) each."""

    single_ms: np.ndarray
    multi_ms: np.ndarray
    copy_ms: np.ndarray  # before the scale of host-staged copies
    host_staged: np.ndarray  # bool
    num_kernels: np.ndarray
    gpus: np.ndarray
    weights: np.ndarray  # every source weighs the same

    def select(self, chosen: np.ndarray) -> "DataParallelArrays":
        return DataParallelArrays(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def data_parallel_arrays(rows: list[DataParallelRow]) -> DataParallelArrays:
    """Everything about the rows that does not depend on the constants."""
    unit = DataParallelConstants(base_ms=0, ms_per_kernel=0, ms_per_replica_kernel=0, host_staged_copy_scale=1)
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.source] += 1
    return DataParallelArrays(
        single_ms=np.array([row.single_ms for row in rows]),
        multi_ms=np.array([row.multi_ms for row in rows]),
        copy_ms=np.array(
            [data_parallel_communication_ms(r.gradient_bytes, r.input_bytes, r.fabric, unit) for r in rows]
        ),
        host_staged=np.array([not row.fabric.intra.peer_to_peer for row in rows]),
        num_kernels=np.array([row.num_kernels for row in rows]),
        gpus=np.array([row.fabric.gpus for row in rows]),
        weights=np.array([1 / counts[row.source] for row in rows]),
    )


def predict_data_parallel_ms(arrays: DataParallelArrays, constants: DataParallelConstants) -> np.ndarray:
    """Step times of DataParallel runs from their single-GPU runs, (num_rows,) ms."""
    scale = np.where(arrays.host_staged, constants.host_staged_copy_scale, 1.0)
    return arrays.single_ms + scale * arrays.copy_ms + constants.host_ms(arrays.num_kernels, arrays.gpus)


def fit_data_parallel(arrays: DataParallelArrays) -> DataParallelConstants:
    """Constants that minimise the weighted mean absolute log error."""
    names = tuple(DataParallelConstants.__dataclass_fields__)

    def loss(log_values: np.ndarray) -> float:
        constants = DataParallelConstants(**dict(zip(names, np.exp(log_values).tolist(), strict=True)))
        errors = np.abs(np.log(predict_data_parallel_ms(arrays, constants) / arrays.multi_ms))
        return float((arrays.weights * errors).sum() / arrays.weights.sum())

    best, _ = pattern_search(loss, np.log([2.0, 0.1, 0.1, 0.5]), step=0.6, smallest_step=0.05, max_rounds=40)
    return DataParallelConstants(**dict(zip(names, np.exp(best).tolist(), strict=True)))


def _data_parallel_section(rows: list[DataParallelRow]) -> dict:
    arrays = data_parallel_arrays(rows)
    constants = fit_data_parallel(arrays)
    logger.info("%s", constants)
    sources = np.array([row.source for row in rows])
    held_out = np.zeros(len(rows))
    for source in sorted(set(sources.tolist())):
        test = sources == source
        held_out[test] = predict_data_parallel_ms(arrays.select(test), fit_data_parallel(arrays.select(~test)))

    def summary(predicted: np.ndarray) -> dict:
        errors = 100 * np.abs(predicted / arrays.multi_ms - 1)
        return {"mape_pct": round(float(errors.mean()), 1), "median_error_pct": round(float(np.median(errors)), 1)}

    return {
        "constants": {key: float(f"{value:.4g}") for key, value in asdict(constants).items()},
        "sources": sorted(set(sources.tolist())),
        "num_rows": len(rows),
        "fit": summary(predict_data_parallel_ms(arrays, constants)),
        "held_out_by_source": summary(held_out),
        "spread_90_log": {"2": spread_90_log(arrays.multi_ms, held_out)},
        "baseline: no overhead": summary(arrays.single_ms),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with the measurement tables")
    parser.add_argument("--out", type=Path, required=True, help="constants.json whose section 'steps' is replaced")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    every = read_pairs(options.shared)
    ddp = [pair for pair in every if pair.family.startswith(SOURCES) and pair.framework == "pytorch"]
    pairs = [pair for pair in ddp if pair.model not in IRREGULAR_MODELS]
    irregular = [pair for pair in ddp if pair.model in IRREGULAR_MODELS]
    others = [pair for pair in every if pair.family.startswith(REFERENCE_SOURCES) and pair.framework != "pytorch"]
    logger.info("%d pairs to fit, %d of other frameworks to score", len(pairs), len(others))
    constants = fit_constants(pair_arrays(pairs), _weights(pairs))
    logger.info("%s", constants)
    held_out = held_out_by_model(pairs)
    existing = json.loads(options.out.read_text(encoding="utf-8"))
    section = existing.setdefault("steps", {})
    section["ddp"] = {
        "constants": {key: float(f"{value:.4g}") for key, value in asdict(constants).items()},
        "sources": sorted({pair.family for pair in pairs}),
        "models": sorted({pair.model for pair in pairs}),
        "gpus": sorted({pair.gpu for pair in pairs}),
        "fit": tables(pairs, predict_ms(pair_arrays(pairs), constants)),
        "held_out_by_model": tables(pairs, held_out),
        "spread_90_log": spread_by_gpus(pairs, held_out),
        "irregular_models": tables(irregular, predict_ms(pair_arrays(irregular), constants)),
        "other_frameworks": tables(others, predict_ms(pair_arrays(others), constants)),
    }
    section["dp"] = _data_parallel_section(read_data_parallel_rows(options.shared))
    options.out.write_text(json.dumps(existing, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
