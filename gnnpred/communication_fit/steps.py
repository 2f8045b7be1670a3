"""Fit the constants of a step on several GPUs from the measured runs of the corpus.

    python -m gnnpred.communication_fit.steps --datasets datasets --out gnnpred/communication/constants.json

Reads ``multi_gpu.csv.gz``, ``measurements.csv.gz`` and the graphs of ``datasets/``; no network is involved. Three
parts of the section ``steps`` of constants.json are written, each with provenance and held-out errors:

* ``ddp``: runs on several GPUs beside the run on one (:mod:`gnnpred.communication_fit.pairs`), constants and factors
  per software family (:mod:`gnnpred.communication_fit.step_model`), a model family held out at a time;
* ``fsdp``: runs on many GPUs beside those on few (:mod:`gnnpred.communication_fit.sharded`), a model size held out;
* ``dp``: nn.DataParallel, a source held out.
"""

import argparse
import csv
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from gnnpred.communication.fabrics import ClusterFabric
from gnnpred.communication.timeline import DataParallelConstants, data_parallel_communication_ms
from gnnpred.communication_fit.collectives import pattern_search
from gnnpred.communication_fit.gradient_profile import profiles_of
from gnnpred.communication_fit.pairs import Pair, fabric_of, is_irregular, make_pairs, match_rows, thin
from gnnpred.communication_fit.sharded import (
    fit_sharded,
    held_out_by_size,
    match_sharded,
    predict_sharded,
    sharded_rows,
    without_overhead,
)
from gnnpred.communication_fit.step_model import (
    fit_constants,
    held_out_constants,
    pair_arrays,
    pair_weights,
    predict_held_out,
    predict_ms,
)
from gnnpred.corpus.store import MeasurementRow, load_graphs, load_multi_gpu_rows, load_rows
from gnnpred.job import Phase, Precision

logger = logging.getLogger(__name__)

# Gavel's and ElasticFlow's setups are not stated in full: their pairs are left out.
LEFT_OUT_SITES = frozenset({"gavel", "elasticflow"})
SPREAD_GPUS = (2, 4, 8, 16)


def step_pairs(datasets: Path) -> tuple[list[Pair], list[Pair]]:
    """``(regular, irregular)`` pairs of synchronous data parallelism in a corpus."""
    matched = match_rows(load_multi_gpu_rows(datasets), load_rows(datasets))
    profiles = profiles_of([group[0].graph_id for group, _ in matched], load_graphs(datasets))
    pairs = [pair for pair in make_pairs(matched, profiles) if pair.site not in LEFT_OUT_SITES]
    irregular = [pair for pair in pairs if is_irregular(pair)]
    return thin([pair for pair in pairs if not is_irregular(pair)]), irregular


def score(single_ms: np.ndarray, multi_ms: np.ndarray, predicted_ms: np.ndarray) -> dict:
    """Errors of step time (per cent) and of weak-scaling efficiency (points)."""
    step_error = 100 * np.abs(predicted_ms / multi_ms - 1)
    points = 100 * np.abs(single_ms / predicted_ms - single_ms / multi_ms)
    return {
        "num_pairs": len(multi_ms),
        "step_mape_pct": round(float(step_error.mean()), 1),
        "step_median_error_pct": round(float(np.median(step_error)), 1),
        "efficiency_error_points_mean": round(float(points.mean()), 1),
        "efficiency_error_points_median": round(float(np.median(points)), 1),
        "bias_pct": round(float(100 * (predicted_ms / multi_ms - 1).mean()), 1),
    }


def spread_90_log(measured_ms: np.ndarray, predicted_ms: np.ndarray) -> list[float]:
    """5 % and 95 % quantile of log(measured / predicted): what communication adds to a step's uncertainty."""
    low, high = np.quantile(np.log(measured_ms / predicted_ms), (0.05, 0.95))
    return [round(float(low), 4), round(float(high), 4)]


def spread_by_gpus(pairs: Sequence[Pair], predicted_ms: np.ndarray) -> dict[str, list[float]]:
    """:func:`spread_90_log` of PyTorch's pairs by GPU count; 16 stands for 16 and more."""
    gpus = np.array([min(pair.fabric.gpus, SPREAD_GPUS[-1]) for pair in pairs])
    own = np.array([pair.group == "torch-ddp" and pair.site != "sia" for pair in pairs])
    measured = np.array([pair.multi_ms for pair in pairs])
    return {
        str(count): spread_90_log(measured[own & (gpus == count)], predicted_ms[own & (gpus == count)])
        for count in SPREAD_GPUS
        if (own & (gpus == count)).any()
    }


def _ddp_section(pairs: list[Pair], irregular: list[Pair]) -> dict:
    arrays = pair_arrays(pairs)
    learned = fit_constants(arrays, pair_weights(pairs))
    logger.info("%s", learned)
    held_out = predict_held_out(pairs, held_out_constants(pairs))
    other = pair_arrays(irregular)

    def errors(chosen: np.ndarray) -> dict:
        return score(arrays.single_ms[chosen], arrays.multi_ms[chosen], held_out[chosen])

    groups = np.array([pair.group for pair in pairs])
    sections = {f"{group}": errors(groups == group) for group in sorted(set(groups.tolist()))}
    return {
        "constants": {name: float(f"{value:.4g}") for name, value in learned.constants.items()},
        "factors": {
            group: {name: float(f"{value:.4g}") for name, value in values.items()}
            for group, values in learned.factors.items()
        },
        "sites": sorted({pair.site for pair in pairs}),
        "models": sorted({pair.row.model for pair in pairs}),
        "gpus": sorted({pair.row.device for pair in pairs}),
        "fit": score(arrays.single_ms, arrays.multi_ms, predict_ms(arrays, learned)),
        "held_out_by_family": {"all": errors(np.ones(len(pairs), bool)), **sections},
        "baseline: no overhead": score(arrays.single_ms, arrays.multi_ms, arrays.single_ms),
        "spread_90_log": spread_by_gpus(pairs, held_out),
        "irregular_models": score(other.single_ms, other.multi_ms, predict_ms(other, learned)),
    }


def _sharded_section(datasets: Path, ddp: dict) -> dict:
    rows = sharded_rows(load_multi_gpu_rows(datasets))
    profiles = profiles_of([row.graph_id for row in rows], load_graphs(datasets))
    pairs = match_sharded(rows, profiles)
    constants = fit_sharded(pairs, np.ones(pairs.num_pairs, bool))
    logger.info("%s", constants)
    measured = pairs.many.step_ms
    held_out = held_out_by_size(pairs)

    def summary(predicted: np.ndarray) -> dict:
        errors = 100 * np.abs(predicted / measured - 1)
        return {"mape_pct": round(float(errors.mean()), 1), "median_error_pct": round(float(np.median(errors)), 1)}

    shared = {name: value for name, value in ddp["constants"].items() if name not in constants}
    shared["straggler_share_per_log2_gpu"] = 0.0  # runs on few and many GPUs do not tell it from the overhead in ms
    return {
        # links that no sharded run used keep the constants of DDP
        "constants": shared | {name: float(f"{value:.4g}") for name, value in constants.items()},
        "models": sorted({row.model for row in pairs.many_rows}),
        "gpus": sorted({row.device for row in pairs.many_rows}),
        "num_pairs": pairs.num_pairs,
        "fit": summary(predict_sharded(pairs, constants)),
        "held_out_by_size": summary(held_out),
        "spread_90_log": {"2": spread_90_log(measured, held_out)},
        "baseline: no overhead": summary(without_overhead(pairs)),
    }


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


def read_data_parallel_rows(datasets: Path) -> list[DataParallelRow]:
    """The ryu family: torchvision models, forward and backward, nn.DataParallel on 2 to 4 GPUs."""
    with (files("gnnpred.communication_fit") / "data_parallel_models.csv").open(encoding="utf-8", newline="") as file:
        models = {row["model"]: row for row in csv.DictReader(file)}

    def usable(row: MeasurementRow) -> bool:
        return (
            row.source_id.startswith("ryu-") and row.phase is Phase.FORWARD_BACKWARD and row.model in models
            and row.step_time_ms > 0 and not (row.suspect or row.unstable or row.few_iterations)
        )  # fmt: skip

    def key(row: MeasurementRow) -> tuple:
        return (row.source_id, row.model, row.device, row.precision, row.batch_size)

    single: dict[tuple, float] = {}
    for row in load_rows(datasets):
        if usable(row):
            single.setdefault(key(row), row.step_time_ms)
    rows = []
    for row in load_multi_gpu_rows(datasets):
        if not usable(row) or key(row) not in single or row.strategy != "dp":
            continue
        width = {Precision.FP16: 2, Precision.FP64: 8}.get(row.precision, 4)
        model = models[row.model]
        rows.append(
            DataParallelRow(
                source=row.source_id,
                model=row.model,
                precision=row.precision,
                single_ms=single[key(row)],
                multi_ms=row.step_time_ms,
                gradient_bytes=float(model["parameters_m"]) * 1e6 * width,
                input_bytes=float(row.batch_size) * 3 * 224 * 224 * width,
                num_kernels=int(model["num_forward_kernels"]),
                fabric=fabric_of(row),
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
    parser.add_argument("--datasets", type=Path, default=Path("datasets"), help="folder of the corpus")
    parser.add_argument("--out", type=Path, required=True, help="constants.json whose section 'steps' is replaced")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pairs, irregular = step_pairs(options.datasets)
    logger.info("%d pairs to fit, %d irregular ones to score", len(pairs), len(irregular))
    existing = json.loads(options.out.read_text(encoding="utf-8"))
    section = existing.setdefault("steps", {})
    section["ddp"] = _ddp_section(pairs, irregular)
    section["fsdp"] = _sharded_section(options.datasets, section["ddp"])
    section["dp"] = _data_parallel_section(read_data_parallel_rows(options.datasets))
    options.out.write_text(json.dumps(existing, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
