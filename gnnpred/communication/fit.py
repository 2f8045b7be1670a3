"""Fit the alpha-beta constants of the collectives from measured NCCL timings.

    python -m gnnpred.communication.fit --shared ../shared/data --out gnnpred/communication/constants.json

Reads ``collectives.csv.gz`` and ``operators/collectives.csv.gz`` (see their README for sources and
pitfalls), drops degraded set-ups, gives every series (source, GPU, group, collective) the same weight,
minimises the mean absolute log error and writes constants with provenance: sources, rows, error in the
fit and held out (one source left out, or one group size where a fabric has a single source).

The step-level constants (overlap, contention, per-step overhead) are fitted by
:mod:`gnnpred.communication.fit_steps`; this script leaves that section of the file untouched.
"""

import argparse
import csv
import gzip
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gnnpred.communication.collectives import (
    LinkConstants,
    TransportConstants,
    all_reduce_us,
    gather_us,
)
from gnnpred.communication.fabrics import (
    ClusterFabric,
    names_from_text,
    resolve_fabric,
)
from gnnpred.errors import GnnpredError
from gnnpred.hardware import DeviceSpec, find_device

logger = logging.getLogger(__name__)

MAX_ROWS_PER_SERIES = 40
RANDOM_DIRECTIONS = 12
MIN_ROWS = 10
COLLECTIVES = {"all_reduce": "all_reduce", "all_gather": "gather", "reduce_scatter": "gather"}

# Fabrics without a usable measurement take the constants of the nearest one (its efficiency at their own rate).
LINKS_TAKEN_FROM = {"nvlink1": "nvlink2", "nvlink2-nvswitch": "nvlink2", "pcie5-no-p2p": "pcie4-no-p2p"}
TRANSPORTS_TAKEN_FROM = {"opa": "ib"}
# No measurement over plain TCP: sockets reach about 0.7 of the line rate with several threads per
# connection (NCCL's default), and a hop costs a kernel network round of about 50 us. Assumed, and said so.
ASSUMED_TCP = TransportConstants(hop_us=50.0, ring_efficiency=0.7, tree_efficiency=0.6)


@dataclass(frozen=True)
class Row:
    """One measured collective."""

    source: str
    gpu: str
    collective: str  # all_reduce | all_gather | reduce_scatter
    num_bytes: float
    time_us: float
    fabric: ClusterFabric

    @property
    def series(self) -> tuple:
        return (self.source, self.gpu, self.fabric.gpus, self.fabric.nodes, self.collective)


def read_rows(shared: Path) -> list[Row]:
    """Usable rows of both tables, at most 40 per series, evenly over the logarithm of the size."""
    rows = [*_rows_of_main_table(shared / "collectives.csv.gz")]
    rows += _rows_of_operator_table(shared / "operators" / "collectives.csv.gz")
    by_series: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        by_series[row.series].append(row)
    kept = []
    for series_rows in by_series.values():
        ordered = sorted(series_rows, key=lambda r: r.num_bytes)
        log_sizes = np.log([max(r.num_bytes, 1.0) for r in ordered])
        if len(ordered) <= MAX_ROWS_PER_SERIES:
            kept += ordered
            continue
        targets = np.linspace(log_sizes[0], log_sizes[-1], MAX_ROWS_PER_SERIES)
        kept += [ordered[position] for position in np.unique(np.abs(log_sizes[:, None] - targets).argmin(axis=0))]
    return kept


def _read_csv(path: Path) -> Iterable[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _device(name: str) -> DeviceSpec | None:
    name = {"GB200": "GB200-186GB", "GB300": "GB300-288GB", "TITAN-X-Pascal": "TitanX-Pascal"}.get(name, name)
    name = {"TITAN-X-Maxwell": "TitanX-Maxwell", "RTX-PRO-6000-Blackwell-Server": "RTXPRO6000-Blackwell-Server"}.get(
        name, name
    )
    try:
        return find_device(name)
    except GnnpredError:
        return None


def _cluster(device: DeviceSpec, intra_text: str, inter_text: str, gpus: int, nodes: int) -> ClusterFabric | None:
    """The fabric of a row, or None where the text does not say enough."""
    intra, _ = names_from_text(intra_text)
    if "one tray" in intra_text:
        intra = "nvl72"
    inter = "" if "switch" in inter_text else names_from_text(f"{intra} + {inter_text}")[1]
    if nodes > 1 and intra != "nvl72" and not inter:
        return None
    try:
        return resolve_fabric(device=device, gpus=gpus, nodes=nodes, interconnect=intra, inter_node=inter)
    except GnnpredError:
        return None


def _rows_of_main_table(path: Path) -> Iterable[Row]:
    for row in _read_csv(path):
        device = _device(row["gpu"])
        if row["collective"] not in COLLECTIVES or "degraded" in row["note"] or device is None:
            continue
        if row["source"].startswith("NVIDIA/nccl#"):  # issues report set-ups that are slower than they should be
            continue
        if "coarse" in row["note"]:  # bandwidth stored to 0.01 GB/s: small sizes are off by up to 50 %
            continue
        gpus, nodes = int(row["gpus"]), int(row["nodes"])
        if gpus % nodes:
            nodes = -(-gpus // 4)  # NVL72 groups of 18 on trays of 4
            nodes = next(n for n in range(nodes, gpus + 1) if gpus % n == 0)
        intra_text = row["interconnect_intra"]
        if "hybrid" in intra_text or "fully connected" in intra_text:
            intra_text = "nvlink2"
        elif intra_text.startswith("none"):
            intra_text = ""
        fabric = _cluster(device, intra_text, row["interconnect_inter"], gpus, nodes)
        if fabric is None:
            continue
        source = row["source"].split("@")[0].split("#")[0].split(" ")[0]
        yield Row(source, row["gpu"], row["collective"], float(row["bytes"]), float(row["time_us"]), fabric)


def _rows_of_operator_table(path: Path) -> Iterable[Row]:
    """Sources that the main table lacks."""
    for row in _read_csv(path):
        source, gpus, nodes = row["source"], int(row["gpus"]), int(row["nodes"])
        if row["op"] not in COLLECTIVES or (source, row["gpu"]) not in _OPERATOR_SERIES:
            continue
        intra, inter, group_sizes = _OPERATOR_SERIES[source, row["gpu"]]
        if gpus not in group_sizes or (nodes > 1 and not inter):
            continue
        if float(row["time_us"]) >= OUT_OF_MEMORY_US:
            continue
        if row["op"] != "all_reduce" and source not in _GATHER_COUNTS_OUTPUT:
            continue
        device = _device(row["gpu"])
        fabric = resolve_fabric(device=device, gpus=gpus, nodes=nodes, interconnect=intra, inter_node=inter)
        yield Row(source, row["gpu"], row["op"], float(row["bytes"]), float(row["time_us"]), fabric)


# Pairs of RTX 3090 are bridged (44 GB/s), four of them talk over PCIe (9.3 GB/s).
# (source, GPU) -> fabric, network, group sizes used. Left out: groups whose links are not the fabric's (two
# A100 of a Perlmutter node share 4 of 12 links; odd V100 groups lie badly in the cube mesh), eight RTX 3090
# across sockets (1.3 GB/s, degraded), Slingshot without its plugin.
_OPERATOR_SERIES = {
    ("vtrain", "A100-SXM4-80GB"): ("nvlink3", "", {2, 3, 4, 5, 6, 7, 8}),
    ("vtrain", "V100-SXM2-32GB"): ("nvlink2", "", {4, 8}),
    ("sailor", "A100-SXM4-40GB"): ("nvlink3", "", {2, 4}),
    ("sailor", "V100-SXM2-16GB"): ("nvlink2", "", {2, 4}),
    ("sailor", "RTX2080Ti"): ("pcie3-no-p2p", "", {2, 4, 8}),
    ("sailor", "TitanRTX"): ("pcie3-no-p2p", "", {2, 4, 8}),
    ("sailor", "RTX3090"): ("nvlink-bridge", "", {2, 4}),
    ("ett", "A100-SXM4-80GB"): ("nvlink3", "", {4}),
    ("nnscaler", "MI250X"): ("infinity-fabric", "", {2, 4, 8}),
    ("openxla", "MI300X"): ("infinity-fabric", "", {2, 4, 8}),
}

# Sailor's and ett's all-gather sizes are the input of one rank and their times hold an allocation: all-reduce only.
_GATHER_COUNTS_OUTPUT = {"nnscaler", "openxla", "vtrain"}
OUT_OF_MEMORY_US = 1e9  # Sailor's tables mark sizes that did not fit with 1e12


def _weights(rows: list[Row]) -> np.ndarray:  # (num_rows,)
    """Every series counts the same."""
    counts: dict[tuple, int] = defaultdict(int)
    for row in rows:
        counts[row.series] += 1
    weights = np.array([1 / counts[row.series] for row in rows])
    return weights / weights.sum()


def pattern_search(
    loss: Callable[[np.ndarray], float],
    start: np.ndarray,  # (num_parameters,)
    *,
    step: float,
    smallest_step: float,
    max_rounds: int = 200,
) -> tuple[np.ndarray, float]:
    """Pattern search (Hooke-Jeeves; seeded random directions where the axes fail).

    Deterministic and without gradients, for a handful of parameters.
    """
    generator = np.random.default_rng(0)
    best, best_loss = start.copy(), loss(start)
    for _ in range(max_rounds):
        before, improved = best.copy(), False
        for axis in range(len(best)):
            for sign in (1.0, -1.0):
                trial = best.copy()
                trial[axis] += sign * step
                trial_loss = loss(trial)
                if trial_loss < best_loss - 1e-9:
                    best, best_loss, improved = trial, trial_loss, True
                    break
        if not improved:  # a valley between axes: a few random directions before the step shrinks
            for direction in generator.standard_normal((RANDOM_DIRECTIONS, len(best))):
                trial = best + step * direction / np.linalg.norm(direction)
                trial_loss = loss(trial)
                if trial_loss < best_loss - 1e-9:
                    best, best_loss, improved = trial, trial_loss, True
                    break
        if improved:
            leap = best + (best - before)
            leap_loss = loss(leap)
            if leap_loss < best_loss:
                best, best_loss = leap, leap_loss
        else:
            step /= 2
            if step < smallest_step:
                break
    return best, best_loss


_LINK_BOUNDS = np.log(
    np.array([[1.0, 200.0], [0.1, 60.0], [1.0, 6.0], [0.1, 1.0], [0.02, 0.98], [5.0, 5000.0]])
)  # (num_parameters, 2): log of base_us, hop_us, bulk factor, low-latency fraction, efficiency, endpoint GB/s
_TRANSPORT_BOUNDS = np.log(np.array([[1.0, 200.0], [0.05, 0.98], [0.05, 0.98]]))


# Many fabrics have no small or no large messages in the data: a weak pull to typical values keeps the constants
# that the rows do not determine (latency without small messages, endpoint rate of a single group size) sane.
_TYPICAL_LINKS = (8.0, 1.2, 3.0, 0.4, 0.8, 1000.0)
PRIOR_WEIGHT = 0.004


def _links_of(log_values: np.ndarray) -> LinkConstants:
    values = np.exp(np.clip(log_values, _LINK_BOUNDS[:, 0], _LINK_BOUNDS[:, 1]))
    return LinkConstants(**dict(zip(LinkConstants.__dataclass_fields__, map(float, values), strict=True)))


def _transport_of(log_values: np.ndarray) -> TransportConstants:
    values = np.exp(np.clip(log_values, _TRANSPORT_BOUNDS[:, 0], _TRANSPORT_BOUNDS[:, 1]))
    return TransportConstants(**dict(zip(TransportConstants.__dataclass_fields__, map(float, values), strict=True)))


def predict_us(rows: list[Row], links: LinkConstants, transport: TransportConstants | None) -> np.ndarray:
    """Predicted microseconds per row."""
    model = {"all_reduce": all_reduce_us, "gather": gather_us}
    return np.array([model[COLLECTIVES[r.collective]](r.num_bytes, r.fabric, links, transport) for r in rows])


def fit_links(rows: list[Row]) -> LinkConstants:
    """Constants of one fabric from its rows inside one node (or one NVLink domain)."""
    measured, weights = np.log([row.time_us for row in rows]), _weights(rows)

    def loss(log_values: np.ndarray) -> float:
        outside = np.maximum(0, log_values - _LINK_BOUNDS[:, 1]) + np.maximum(0, _LINK_BOUNDS[:, 0] - log_values)
        errors = np.abs(np.log(predict_us(rows, _links_of(log_values), None)) - measured)
        prior = PRIOR_WEIGHT * np.abs(log_values - np.log(_TYPICAL_LINKS)).sum()
        return float((weights * errors).sum() + outside.sum() + prior)

    starts = [_TYPICAL_LINKS, (12, 3, 3, 0.4, 0.3, 100), (30, 2, 2, 0.6, 0.9, 1500)]
    fits = [pattern_search(loss, np.log(np.array(s)), step=0.4, smallest_step=0.01) for s in starts]
    return _links_of(min(fits, key=lambda fit: fit[1])[0])


def fit_transport(rows: list[Row], links: dict[str, LinkConstants]) -> TransportConstants:
    """Constants of one network transport, the links inside the nodes being known."""
    measured, weights = np.log([row.time_us for row in rows]), _weights(rows)

    def loss(log_values: np.ndarray) -> float:
        outside = np.maximum(0, log_values - _TRANSPORT_BOUNDS[:, 1]) + np.maximum(
            0, _TRANSPORT_BOUNDS[:, 0] - log_values
        )
        transport = _transport_of(log_values)
        predicted = [predict_us([row], links[row.fabric.intra.name], transport)[0] for row in rows]
        return float((weights * np.abs(np.log(predicted) - measured)).sum() + outside.sum())

    starts = [(15, 0.9, 0.75), (40, 0.6, 0.6)]
    fits = [pattern_search(loss, np.log(np.array(s)), step=0.4, smallest_step=0.01) for s in starts]
    return _transport_of(min(fits, key=lambda fit: fit[1])[0])


def error_pct(rows: list[Row], predicted: np.ndarray) -> np.ndarray:  # (num_rows,) percent
    return 100 * np.abs(predicted / np.array([row.time_us for row in rows]) - 1)


def _held_out(rows: list[Row], fit_and_predict: Callable[[list[Row], list[Row]], np.ndarray]) -> dict:
    """Error on rows of a source (or group size) that the fit did not see."""
    sources = sorted({row.source for row in rows})
    unit = "source" if len(sources) > 1 else "gpus"
    keys = [row.source if unit == "source" else row.fabric.gpus for row in rows]
    if len(set(keys)) < 2:
        return {"unit": "none", "note": "one source and one group size: nothing to hold out"}
    errors = []
    for key in sorted(set(keys)):
        train = [row for row, k in zip(rows, keys, strict=True) if k != key]
        test = [row for row, k in zip(rows, keys, strict=True) if k == key]
        errors.append(error_pct(test, fit_and_predict(train, test)))
    return {
        "unit": unit,
        "groups": len(errors),
        "median_error_pct": round(float(np.median(np.concatenate(errors))), 1),
        "mape_pct": round(float(np.mean([e.mean() for e in errors])), 1),
    }


def _summary(rows: list[Row], predicted: np.ndarray) -> dict:
    errors = error_pct(rows, predicted)
    buckets = np.array([2**20 <= row.num_bytes <= 2**28 for row in rows])
    return {
        "num_rows": len(rows),
        "gpus": sorted({row.gpu for row in rows}),
        "group_sizes": sorted({row.fabric.gpus for row in rows}),
        "sources": sorted({row.source for row in rows}),
        "median_error_pct": round(float(np.median(errors)), 1),
        "mape_pct": round(float(errors.mean()), 1),
        "median_error_pct_1mb_to_256mb": round(float(np.median(errors[buckets])), 1) if buckets.any() else None,
    }


def _rounded(constants: LinkConstants | TransportConstants) -> dict:
    return {key: float(f"{value:.4g}") for key, value in asdict(constants).items()}


def fit_all(rows: list[Row]) -> dict:
    """All sections of ``constants.json`` that come from collectives."""
    links: dict[str, dict] = {}
    local = [row for row in rows if row.fabric.inter is None]
    for name in sorted({row.fabric.intra.name for row in local}):
        links[name] = {}
        for group in ("all_reduce", "gather"):
            chosen = [r for r in local if r.fabric.intra.name == name and COLLECTIVES[r.collective] == group]
            if len(chosen) < MIN_ROWS:
                continue
            constants = fit_links(chosen)
            logger.info("%s %s: %s", name, group, constants)
            links[name][group] = {
                "constants": _rounded(constants),
                "fit": _summary(chosen, predict_us(chosen, constants, None)),
                "held_out": _held_out(chosen, lambda train, test: predict_us(test, fit_links(train), None)),
            }
    links = {name: groups for name, groups in links.items() if "all_reduce" in groups}
    for name, other in LINKS_TAKEN_FROM.items():
        links[name] = {
            group: {"constants": entry["constants"], "taken_from": other} for group, entry in links[other].items()
        }
    by_name = {name: LinkConstants(**entry["all_reduce"]["constants"]) for name, entry in links.items()}
    transports: dict[str, dict] = {}
    across = [
        row
        for row in rows
        if row.fabric.inter is not None and row.collective == "all_reduce" and row.fabric.intra.name in by_name
    ]
    for transport in sorted({row.fabric.inter.transport for row in across}):
        chosen = [row for row in across if row.fabric.inter.transport == transport]
        constants = fit_transport(chosen, by_name)
        logger.info("%s: %s", transport, constants)

        def predict(test: list[Row], fitted: TransportConstants) -> np.ndarray:
            return np.array([predict_us([row], by_name[row.fabric.intra.name], fitted)[0] for row in test])

        transports[transport] = {
            "constants": _rounded(constants),
            "fit": _summary(chosen, predict(chosen, constants)),
            "held_out": _held_out(chosen, lambda train, test: predict(test, fit_transport(train, by_name))),
        }
    for name, other in TRANSPORTS_TAKEN_FROM.items():
        transports[name] = {"constants": transports[other]["constants"], "taken_from": other}
    transports["tcp"] = {"constants": _rounded(ASSUMED_TCP), "taken_from": "assumption: no measurement over plain TCP"}
    return {"links": links, "transports": transports}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with collectives.csv.gz")
    parser.add_argument("--out", type=Path, required=True, help="constants.json to write (other sections are kept)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = read_rows(options.shared)
    logger.info("%d rows in %d series", len(rows), len({row.series for row in rows}))
    existing = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    existing.update(fit_all(rows))
    options.out.write_text(json.dumps(existing, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
