"""Fit what collectives take from measured NCCL timings: alpha-beta constants, then a small correction.

    python -m gnnpred.communication_fit.collectives --shared ../shared/data --out gnnpred/communication/constants.json
    python -m gnnpred.communication_fit.collectives --shared ../shared/data --score

Reads ``collectives.csv.gz`` and ``operators/collectives.csv.gz`` (see their README for sources and pitfalls) and
drops degraded set-ups. Physics first: constants per family of links, then per link, pulled towards the family's,
by least absolute log error; then networks; then the correction of :mod:`gnnpred.communication.residual` by ridge
regression, reweighted towards absolute errors. ``--score`` repeats all of it without one fabric, or without one
number of ranks, at a time and prints the errors on what was left out.

The step-level constants (overlap, contention, per-step overhead) are fitted by
:mod:`gnnpred.communication_fit.steps`; this script leaves that section of the file untouched.
"""

import argparse
import csv
import gzip
import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gnnpred.communication import residual
from gnnpred.communication.collectives import (
    CollectiveModel,
    LinkConstants,
    TransportConstants,
    collective_us,
    routes,
)
from gnnpred.communication.fabrics import (
    ClusterFabric,
    find_intra_node,
    intra_node_names,
    names_from_text,
    resolve_fabric,
)
from gnnpred.errors import GnnpredError
from gnnpred.hardware import DeviceSpec, find_device

logger = logging.getLogger(__name__)

MAX_ROWS_PER_SERIES = 40
RANDOM_DIRECTIONS = 12
MIN_ROWS = 10
MAX_ROUNDING_PCT = 3
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "gather",
    "reduce_scatter": "gather",
    "broadcast": "gather",
    "reduce": "gather",
    "all_to_all": "all_to_all",
    "send_recv": "send_recv",
}
_KIND_OF_NAME = {"alltoall": "all_to_all"}
_DTYPE_OF_NAME = {"half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32"}

# No measurement over plain TCP: sockets reach about 0.7 of the line rate with several threads per
# connection (NCCL's default), and a hop costs a kernel network round of about 50 us. Assumed, and said so.
ASSUMED_TCP = TransportConstants(hop_us=50.0, ring_efficiency=0.7, tree_efficiency=0.6)


@dataclass(frozen=True)
class Row:
    """One measured collective."""

    source: str
    gpu: str
    collective: str  # one of COLLECTIVE_KINDS
    num_bytes: float  # as collective_ms counts them
    time_us: float
    fabric: ClusterFabric
    dtype: str = ""
    nccl_version: str = ""

    @property
    def series(self) -> tuple:
        return (self.source, self.gpu, self.fabric.gpus, self.fabric.nodes, self.collective, self.dtype,
                self.nccl_version)  # fmt: skip


def read_rows(shared: Path, rows_per_series: int = MAX_ROWS_PER_SERIES, *, collected: Sequence[Path] = ()) -> list[Row]:
    """Usable rows of both tables and of ``collected`` ones (``gnnpred collect``), so many per series at most, evenly
    over the logarithm of the size.
    """
    rows = [*_rows_of_main_table(shared / "collectives.csv.gz")]
    rows += [row for path in collected for row in rows_of_collected(path)]
    rows += _rows_of_operator_table(shared / "operators" / "collectives.csv.gz")
    by_series: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        by_series[row.series].append(row)
    kept = []
    for series_rows in by_series.values():
        ordered = sorted(series_rows, key=lambda r: r.num_bytes)
        log_sizes = np.log([max(r.num_bytes, 1.0) for r in ordered])
        if len(ordered) <= rows_per_series:
            kept += ordered
            continue
        targets = np.linspace(log_sizes[0], log_sizes[-1], rows_per_series)
        kept += [ordered[position] for position in np.unique(np.abs(log_sizes[:, None] - targets).argmin(axis=0))]
    return kept


def rows_of_collected(path: Path) -> Iterable[Row]:
    """Rows of a ``collectives.csv`` that ``gnnpred collect`` wrote, those of known GPUs and links."""
    return _rows_of_main_table(path)


def _read_csv(path: Path) -> Iterable[dict[str, str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
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
        kind = _KIND_OF_NAME.get(row["collective"], row["collective"])
        if kind not in COLLECTIVES or "degraded" in row["note"] or device is None:
            continue
        if row["source"].startswith("NVIDIA/nccl#"):  # issues report set-ups that are slower than they should be
            continue
        if "coarse" in row["note"]:  # bandwidth stored to 0.01 GB/s: small sizes are off by up to 50 %
            margin = re.search(r"\+-(\d+) ?%", row["note"])
            if margin is None or int(margin[1]) > MAX_ROUNDING_PCT:
                continue
        if "slow here" in row["interconnect_inter"]:  # a network that its page calls broken, under several notes
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
        dtype = _DTYPE_OF_NAME.get(row.get("dtype", ""), row.get("dtype", ""))
        nccl_version = row.get("nccl_version", "")
        yield Row(source, row["gpu"], kind, float(row["bytes"]), float(row["time_us"]), fabric, dtype, nccl_version)


def _rows_of_operator_table(path: Path) -> Iterable[Row]:
    """Sources that the main table lacks."""
    for row in _read_csv(path):
        source, gpus, nodes, kind = row["source"], int(row["gpus"]), int(row["nodes"]), row["op"]
        if kind not in COLLECTIVES or (source, row["gpu"]) not in _OPERATOR_SERIES:
            continue
        intra, group_sizes, kinds = _OPERATOR_SERIES[source, row["gpu"]]
        num_bytes, time_us = float(row["bytes"]), float(row["time_us"])
        if gpus not in group_sizes or nodes > 1 or kind not in kinds or num_bytes <= 0 or time_us >= OUT_OF_MEMORY_US:
            continue
        if kind == "all_gather" and source in _GATHER_COUNTS_INPUT:
            num_bytes *= gpus
        fabric = resolve_fabric(device=_device(row["gpu"]), gpus=gpus, nodes=nodes, interconnect=intra)
        yield Row(source, row["gpu"], kind, num_bytes, time_us, fabric, row["precision"])


_ALL_REDUCE = ("all_reduce",)
_ALL_BUT_GATHER = ("all_reduce", "reduce_scatter", "all_to_all")
_FOUR_KINDS = (*_ALL_BUT_GATHER, "all_gather")
# (source, GPU) -> fabric, group sizes used, kinds used. Left out: groups whose links are not the fabric's (two A100 of
# a Perlmutter node share 4 of 12 links), eight RTX 3090 across sockets (1.3 GB/s, degraded; pairs are bridged, four
# talk over PCIe), Slingshot without its plugin, V100 all-to-alls among four GPUs that take a detour (19 GB/s beside
# 122 between two), and Sailor's all-gathers on fast links, whose times hold an allocation.
_OPERATOR_SERIES = {
    ("vtrain", "A100-SXM4-80GB"): ("nvlink3", {2, 3, 4, 5, 6, 7, 8}, _ALL_REDUCE),
    ("vtrain", "V100-SXM2-32GB"): ("nvlink2", {2, 3, 4, 5, 6, 7, 8}, _ALL_REDUCE),
    ("sailor", "A100-SXM4-40GB"): ("nvlink3", {2, 4}, _ALL_BUT_GATHER),
    ("sailor", "V100-SXM2-16GB"): ("nvlink2", {2, 4}, ("all_reduce", "reduce_scatter")),
    ("sailor", "RTX2080Ti"): ("pcie3-no-p2p", {2, 4, 8}, _FOUR_KINDS),
    ("sailor", "TitanRTX"): ("pcie3-no-p2p", {2, 4, 8}, _FOUR_KINDS),
    ("sailor", "RTX3090"): ("nvlink-bridge", {2, 4}, _ALL_BUT_GATHER),
    ("ett", "A100-SXM4-80GB"): ("nvlink3", {4}, _ALL_REDUCE),
    ("nnscaler", "MI250X"): ("infinity-fabric", {2, 4, 8}, _FOUR_KINDS),
    ("openxla", "MI300X"): ("infinity-fabric", {2, 4, 8}, _ALL_REDUCE),
    ("superscaler", "V100-SXM2-32GB"): ("nvlink2", {4, 8}, ("all_to_all",)),
}

# The size of these all-gathers is the input of one rank: times n it is the gathered buffer.
_GATHER_COUNTS_INPUT = {"sailor"}
OUT_OF_MEMORY_US = 1e9  # Sailor's tables mark sizes that did not fit with 1e12


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


class Measurements:
    """Rows as columns, with what each algorithm of each collective moves, so that constants can be tried at once."""

    def __init__(self, rows: list[Row]) -> None:
        count = len(rows)
        self.rows = rows
        self.log_us = np.log([row.time_us for row in rows])
        self.num_bytes = np.array([row.num_bytes for row in rows])
        self.rate = np.array([row.fabric.intra.one_way_gb_s for row in rows])
        self.link = np.array([row.fabric.intra.name for row in rows])
        self.group = np.array([COLLECTIVES[row.collective] for row in rows])
        self.family = np.array([row.fabric.intra.family for row in rows])
        self.is_switch = np.array([not (row.fabric.intra.group_share or row.fabric.intra.pairs_only) for row in rows])
        self.measured_as = np.array([row.fabric.measured_as for row in rows])
        self.is_local = np.array([row.fabric.inter is None for row in rows], dtype=bool)
        counts: dict[tuple, int] = defaultdict(int)
        for row in rows:
            counts[row.series] += 1
        # Between every row and every series counting the same.
        self.weight = np.array([counts[row.series] ** -0.5 for row in rows])
        # (count, 2) each; a collective of one algorithm has it twice
        self.hops, self.network_hops = np.zeros((count, 2)), np.zeros((count, 2))
        self.link_us, self.endpoint_us = np.zeros((count, 2)), np.zeros((count, 2))  # per byte at efficiency 1, 1 GB/s
        self.network_us, self.is_tree = np.zeros((count, 2)), np.zeros((count, 2), dtype=bool)
        for position, row in enumerate(rows):
            fabric = row.fabric
            rate = fabric.intra.usable_gb_s(fabric.gpus_per_domain)
            algorithms = routes(row.collective, fabric, row.nccl_version)
            for column in range(2):
                route = algorithms[min(column, len(algorithms) - 1)]
                self.hops[position, column], self.network_hops[position, column] = route.hops, route.network_hops
                self.link_us[position, column] = route.link_bytes / rate / _BYTES_PER_US_PER_GB_S
                self.endpoint_us[position, column] = float(route.link_bytes > 0) / _BYTES_PER_US_PER_GB_S
                if fabric.inter is not None:
                    network = route.network_bytes / fabric.network_gb_s_per_domain
                    self.network_us[position, column] = network / _BYTES_PER_US_PER_GB_S
                self.is_tree[position, column] = route.is_tree

    def where(self, mask: np.ndarray) -> "Measurements":  # (count,) of bool
        part = object.__new__(Measurements)
        for name, value in vars(self).items():
            kept = [one for one, keep in zip(value, mask, strict=True) if keep] if name == "rows" else value[mask]
            setattr(part, name, kept)
        return part

    def alpha_beta_us(
        self,
        links: np.ndarray,  # (6,) or (count, 6): LinkConstants, the endpoint rate in units of the link's
        transport: np.ndarray | None = None,  # (3,) or (count, 3)
    ) -> np.ndarray:  # (count,)
        base, hop, bulk, fraction, efficiency, endpoint = np.split(np.atleast_2d(links), 6, axis=1)
        latency = base + hop * self.hops
        us_per_byte = self.link_us / efficiency + self.endpoint_us / (endpoint * self.rate[:, None])
        if transport is not None:
            network_hop, ring, tree = np.split(np.atleast_2d(transport), 3, axis=1)
            latency = latency + network_hop * self.network_hops
            us_per_byte = np.where(
                self.is_tree,
                np.maximum(us_per_byte, self.network_us) / tree,
                np.maximum(us_per_byte, self.network_us / ring),
            )
        transfer = self.num_bytes[:, None] * us_per_byte
        return np.minimum(latency + transfer / fraction, latency * bulk + transfer).min(axis=1)


_BYTES_PER_US_PER_GB_S = 1e3
# log of base_us, hop_us, bulk factor, low-latency fraction, efficiency, endpoint rate / link rate
_LINK_BOUNDS = np.log(np.array([[1.0, 200.0], [0.1, 60.0], [1.0, 6.0], [0.05, 1.0], [0.02, 1.2], [0.3, 100.0]]))
_TRANSPORT_BOUNDS = np.log(np.array([[1.0, 200.0], [0.05, 0.98], [0.05, 0.98]]))

# Many fabrics have no small or no large messages in the data: a pull (per log unit, beside the mean absolute log
# error) to typical values, and of a fabric to its family, keeps the constants that rows do not determine sane.
_TYPICAL_LINKS = np.array([8.0, 1.2, 3.0, 0.4, 0.8, 4.0])
_OTHER_START = np.array([12.0, 3.0, 3.0, 0.4, 0.3, 2.0])
_TYPICAL_TRANSPORT = np.array([20.0, 0.75, 0.75])
_OTHER_TRANSPORTS = (np.array([15.0, 0.9, 0.75]), np.array([40.0, 0.6, 0.6]))
FAMILY_PULL = 0.01
FABRIC_PULL = 0.005


def _fit_constants(
    measured: Measurements,
    predict: Callable[[np.ndarray], np.ndarray],
    bounds: np.ndarray,  # (num_constants, 2), logs
    prior: np.ndarray,  # (num_constants,)
    *,
    pull: float,
    starts: Sequence[np.ndarray] = (),
) -> np.ndarray:  # (num_constants,)
    weight, log_prior = measured.weight / measured.weight.sum(), np.log(prior)

    def loss(log_values: np.ndarray) -> float:
        inside = np.clip(log_values, bounds[:, 0], bounds[:, 1])
        errors = np.abs(np.log(predict(np.exp(inside))) - measured.log_us)
        return float(
            (weight * errors).sum() + np.abs(log_values - inside).sum() + pull * np.abs(inside - log_prior).sum()
        )

    fits = [pattern_search(loss, np.log(start), step=0.4, smallest_step=0.04) for start in (prior, *starts)]
    return np.exp(np.clip(min(fits, key=lambda fit: fit[1])[0], bounds[:, 0], bounds[:, 1]))


def fit_link_array(
    measured: Measurements, prior: np.ndarray, *, pull: float, starts: Sequence[np.ndarray] = ()
) -> np.ndarray:  # (6,)
    """Constants of links inside a node that explain the measurements best."""
    return _fit_constants(measured, measured.alpha_beta_us, _LINK_BOUNDS, prior, pull=pull, starts=starts)


def _link_dict(values: np.ndarray, rate: float | None) -> dict[str, float]:
    """As :class:`LinkConstants` takes them; without a rate the endpoint stays in units of the link's."""
    scaled = [*values[:5], values[5] * (rate or 1.0)]
    return {name: float(f"{value:.4g}") for name, value in zip(LinkConstants.__dataclass_fields__, scaled, strict=True)}


def fit_links(rows: list[Row]) -> LinkConstants:
    """Constants of one fabric from its rows inside one node (or one NVLink domain)."""
    values = fit_link_array(Measurements(rows), _TYPICAL_LINKS, pull=FABRIC_PULL, starts=[_OTHER_START])
    return LinkConstants(**_link_dict(values, rows[0].fabric.intra.one_way_gb_s))


def predict_us(rows: list[Row], links: LinkConstants, transport: TransportConstants | None) -> np.ndarray:
    """Alpha-beta microseconds per row under given constants."""
    return np.array(
        [
            collective_us(row.collective, row.num_bytes, row.fabric, links, transport, nccl_version=row.nccl_version)
            for row in rows
        ]
    )


def _stand_in(families: dict[str, dict[str, np.ndarray]], family: str, group: str) -> np.ndarray:
    for name, other in ((family, group), (family, "gather"), (family, "all_reduce"), ("nvlink", group)):
        if other in families.get(name, {}):
            return families[name][other]
    return _TYPICAL_LINKS


def fit_all(rows: list[Row]) -> dict:
    """All sections of ``constants.json`` that come from collectives: physics, correction and measured ranges."""
    measured = Measurements(rows)
    groups = sorted(set(COLLECTIVES.values()))
    families: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    fitted: dict[tuple[str, str], np.ndarray] = {}
    for group in groups:
        for family in np.unique(measured.family):
            mask = measured.is_local & (measured.family == family) & (measured.group == group)
            alike = mask & measured.is_switch  # meshes and bridges lean on their family and do not make it
            part = measured.where(alike if alike.sum() >= MIN_ROWS else mask)
            if len(part.rows) >= MIN_ROWS:
                families[family][group] = fit_link_array(part, _TYPICAL_LINKS, pull=FAMILY_PULL, starts=[_OTHER_START])
    for group in groups:
        for link in np.unique(measured.link[measured.is_local]):
            part = measured.where(measured.is_local & (measured.link == link) & (measured.group == group))
            if len(part.rows) >= MIN_ROWS:
                prior = _stand_in(families, part.family[0], group)
                fitted[link, group] = fit_link_array(part, prior, pull=FABRIC_PULL)
    links: dict[str, dict] = defaultdict(dict)
    for (link, group), values in fitted.items():
        chosen = [row for row in rows if row.fabric.inter is None and row.fabric.intra.name == link]
        chosen = [row for row in chosen if COLLECTIVES[row.collective] == group]
        constants = _link_dict(values, _nominal_gb_s(chosen))
        links[link][group] = {
            "constants": constants,
            "fit": _summary(chosen, predict_us(chosen, LinkConstants(**constants), None)),
        }
    constants = {
        "families": {
            family: {group: _link_dict(values, None) for group, values in by_group.items()}
            for family, by_group in families.items()
        },
        "links": {link: links[link] for link in sorted(links)},
        "transports": _fit_transports(measured, families, fitted),
        "measured": _measured_ranges(rows),
    }
    constants["residual"] = _fit_residual(rows, measured.weight, CollectiveModel(constants))
    return constants


def _nominal_gb_s(rows: list[Row]) -> float:
    """The rate that the endpoint is stored for: the usual one of the rows (devices differ behind bridges)."""
    return float(np.median([row.fabric.intra.one_way_gb_s for row in rows]))


def _fit_transports(measured: Measurements, families: dict, fitted: dict) -> dict[str, dict]:
    """Constants of networks, all together first; the links inside the nodes are known."""
    across = measured.where(~measured.is_local)
    any_network = _TYPICAL_TRANSPORT
    transports: dict[str, dict] = {}
    if across.rows:
        inside = np.array(
            [
                fitted.get((link, group), _stand_in(families, family, group))
                for link, group, family in zip(across.link, across.group, across.family, strict=True)
            ]
        )
        any_network = _fit_constants(
            across, lambda values: across.alpha_beta_us(inside, values), _TRANSPORT_BOUNDS, _TYPICAL_TRANSPORT,
            pull=FAMILY_PULL, starts=_OTHER_TRANSPORTS,
        )  # fmt: skip
        for transport in np.unique(across.measured_as):
            mask = across.measured_as == transport
            part = across.where(mask)
            values = _fit_constants(
                part, lambda values, p=part, i=inside[mask]: p.alpha_beta_us(i, values), _TRANSPORT_BOUNDS,
                any_network, pull=FAMILY_PULL, starts=_OTHER_TRANSPORTS,
            )  # fmt: skip
            transports[str(transport)] = {
                "constants": _transport_dict(values),
                "fit": _summary(part.rows, part.alpha_beta_us(inside[mask], values)),
            }
    transports["any"] = {"constants": _transport_dict(any_network), "taken_from": "all measured networks together"}
    return transports


def _transport_dict(values: np.ndarray) -> dict[str, float]:
    return {
        name: float(f"{value:.4g}") for name, value in zip(TransportConstants.__dataclass_fields__, values, strict=True)
    }


def _measured_ranges(rows: list[Row]) -> dict[str, dict[str, dict]]:
    """Where measurements exist: by fabric or network, and kind."""
    grouped: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.fabric.measured_as, row.collective].append(row)
    ranges: dict[str, dict[str, dict]] = defaultdict(dict)
    for (name, kind), chosen in sorted(grouped.items()):
        sizes = [row.num_bytes for row in chosen]
        ranges[name][kind] = {
            "bytes": [min(sizes), max(sizes)],
            "gpus": sorted({row.fabric.gpus for row in chosen}),
            "links": sorted({row.fabric.intra.name for row in chosen}),
            "num_rows": len(chosen),
            "sources": len({row.source for row in chosen}),
        }
    return dict(ranges)


RIDGE = 0.1
NETWORK_RIDGE = 3.0  # a network has few series of one or two sizes each: its curves are kept near zero
SOURCE_RIDGE = 5.0  # 0.3, 5, none: 11.2, 9.9, 9.8 % on ranks left out; without it sources set the slope over ranks
REWEIGHTINGS = 5  # towards the least absolute error, which the median asks for
SMALLEST_ERROR = 0.05


def _fit_residual(rows: list[Row], weight: np.ndarray, model: CollectiveModel) -> dict:
    """Coefficients of :func:`gnnpred.communication.residual.terms` on log(measured / alpha-beta)."""
    columns: dict[tuple[str, int], int] = {}
    per_row: list[list[tuple[int, float]]] = []
    target = np.zeros(len(rows))
    for position, row in enumerate(rows):
        physics_us, found = model.physics_and_terms(
            row.collective, row.num_bytes, row.fabric, dtype=row.dtype, nccl_version=row.nccl_version
        )
        target[position] = np.log(row.time_us / physics_us)
        # What a source measures longer or shorter than others is kept apart, so that the curves over size and ranks
        # come from within sources; the prediction is for no source in particular.
        found += [(f"source {row.source} {row.gpu} {row.fabric.measured_as} {row.collective}", 0, 1.0)]
        per_row.append([(columns.setdefault(term[:2], len(columns)), term[2]) for term in found])
    width, count = max(map(len, per_row)), len(columns)
    at = np.zeros((len(rows), width), dtype=np.int64)  # (num_rows, terms of a row): columns; rows are very sparse
    values = np.zeros((len(rows), width))
    for position, row_terms in enumerate(per_row):
        for slot, (column, value) in enumerate(row_terms):
            at[position, slot], values[position, slot] = column, value
    networks = {row.fabric.measured_as for row in rows if row.fabric.inter is not None}
    ridge = np.array(
        [
            SOURCE_RIDGE if block.startswith("source ") else NETWORK_RIDGE if block.split()[1] in networks else RIDGE
            for block, _ in columns
        ]
    )
    pairs = (at[:, :, None] * count + at[:, None, :]).ravel()
    products = values[:, :, None] * values[:, None, :]
    row_weight, coefficients = weight.copy(), np.zeros(count)
    for _ in range(REWEIGHTINGS):
        weighted = (row_weight[:, None, None] * products).ravel()
        normal = np.bincount(pairs, weights=weighted, minlength=count * count).reshape(count, count)
        moment = np.bincount(at.ravel(), weights=((row_weight * target)[:, None] * values).ravel(), minlength=count)
        coefficients = np.linalg.solve(normal + np.diag(ridge), moment)
        errors = np.abs(target - (coefficients[at] * values).sum(axis=1))
        row_weight = weight * SMALLEST_ERROR / np.maximum(errors, SMALLEST_ERROR)
    blocks: dict[str, list[float]] = {}
    for (block, index), column in columns.items():
        if block.startswith("source "):
            continue
        block_values = blocks.setdefault(block, [0.0] * residual.block_length(block))
        block_values[index] = round(float(coefficients[column]), 4)
    return {"ridge": RIDGE, "network_ridge": NETWORK_RIDGE, "coefficients": dict(sorted(blocks.items()))}


def error_pct(rows: list[Row], predicted: np.ndarray) -> np.ndarray:  # (num_rows,) percent
    return 100 * np.abs(predicted / np.array([row.time_us for row in rows]) - 1)


def is_bucket_size(row: Row) -> bool:
    """1 to 256 MiB: what gradient buckets and sharded layers have."""
    return 2**20 <= row.num_bytes <= 2**28


def _summary(rows: list[Row], predicted: np.ndarray) -> dict:
    errors = error_pct(rows, predicted)
    buckets = np.array([is_bucket_size(row) for row in rows])
    return {
        "num_rows": len(rows),
        "gpus": sorted({row.gpu for row in rows}),
        "group_sizes": sorted({row.fabric.gpus for row in rows}),
        "sources": sorted({row.source for row in rows}),
        "median_error_pct": round(float(np.median(errors)), 1),
        "mape_pct": round(float(errors.mean()), 1),
        "median_error_pct_1mb_to_256mb": round(float(np.median(errors[buckets])), 1) if buckets.any() else None,
    }


def predicted_us(rows: list[Row], constants: dict) -> tuple[np.ndarray, np.ndarray]:
    """Corrected and plain alpha-beta microseconds of rows, by the code that predicts."""
    model = CollectiveModel(constants)
    estimates = [
        model.estimate(row.collective, row.num_bytes, row.fabric, dtype=row.dtype, nccl_version=row.nccl_version)
        for row in rows
    ]
    return (
        np.array([one.time_ms for one in estimates]) * 1e3,
        np.array([one.physics_ms for one in estimates]) * 1e3,
    )


_RANK_FOLDS = ((2,), (3, 5, 6, 7), (4,), (8,), (16, 18), (32, 36), (64, 72), (144, 1440))


def held_out(rows: list[Row], unit: str) -> tuple[list[Row], np.ndarray, np.ndarray]:
    """``(rows, corrected us, alpha-beta us)``, each row predicted by a fit that saw nothing of its group.

    ``fabric``: no row of that link (or network), alone or inside nodes; ``ranks``: no row of that number of GPUs
    on any fabric.
    """
    folds: list[Callable[[Row], bool]]
    if unit == "fabric":
        names = sorted({row.fabric.measured_as for row in rows})
        folds = [lambda row, name=name: row.fabric.measured_as == name for name in names]
    else:
        folds = [lambda row, fold=fold: row.fabric.gpus in fold for fold in _RANK_FOLDS]
    tested: list[Row] = []
    corrected, physics = [], []
    for is_held_out in folds:
        test = [row for row in rows if is_held_out(row)]
        if not test:
            continue
        names = {row.fabric.measured_as for row in test} if unit == "fabric" else set()
        train = [row for row in rows if not is_held_out(row) and row.fabric.intra.name not in names]
        both = predicted_us(test, fit_all(train))
        logger.info("%s held out: %s, median %.1f %%", unit, names or {row.fabric.gpus for row in test},
                    np.median(error_pct(test, both[0])))  # fmt: skip
        tested += test
        corrected.append(both[0])
        physics.append(both[1])
    return tested, np.concatenate(corrected), np.concatenate(physics)


def score_table(rows: list[Row], corrected: np.ndarray, physics: np.ndarray) -> list[str]:
    """Markdown lines: all rows, bucket sizes, by kind, by fabric."""
    measured = np.array([row.time_us for row in rows])
    groups = {"all": np.ones(len(rows), dtype=bool), "1 to 256 MiB": np.array([is_bucket_size(row) for row in rows])}
    for kind in COLLECTIVES:
        groups[kind.replace("_", "-")] = np.array([row.collective == kind for row in rows])
    for name in sorted({row.fabric.measured_as for row in rows}):
        groups[name] = np.array([row.fabric.measured_as == name for row in rows])
    lines = [
        "| rows | n | MAPE % | median % | p90 % | bias % | 1-256 MiB median % | alpha-beta: MAPE % | median % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, mask in groups.items():
        if not mask.any():
            continue
        errors, plain = error_pct(rows, corrected), error_pct(rows, physics)
        bias = 100 * float(np.mean(corrected[mask] / measured[mask] - 1))
        both = mask & groups["1 to 256 MiB"]
        bucket = f"{np.median(errors[both]):.1f}" if both.any() else "-"
        lines.append(
            f"| {name} | {mask.sum()} | {errors[mask].mean():.1f} | {np.median(errors[mask]):.1f} | "
            f"{np.percentile(errors[mask], 90):.1f} | {bias:+.1f} | {bucket} | {plain[mask].mean():.1f} | "
            f"{np.median(plain[mask]):.1f} |"
        )
    return lines


def shipped_sections(rows: list[Row]) -> dict:
    """:func:`fit_all` plus an entry, with its origin, for every link and network that nobody measured."""
    constants = fit_all(rows)
    links, families = constants["links"], constants["families"]
    device = find_device("A100-SXM4-80GB")
    for name in intra_node_names():
        fabric = find_intra_node(name, device)
        if name not in links:
            links[name] = {
                group: {
                    "constants": {**values, "endpoint_gb_s": round(values["endpoint_gb_s"] * fabric.one_way_gb_s, 1)},
                    "taken_from": f"family {fabric.family}",
                }
                for group, values in families[fabric.family].items()
            }
    transports = constants["transports"]
    transports["opa"] = {"constants": transports["ib"]["constants"], "taken_from": "ib"}
    tcp = {key: float(value) for key, value in asdict(ASSUMED_TCP).items()}
    transports["tcp"] = {"constants": tcp, "taken_from": "assumption: no measurement over plain TCP"}
    return constants


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with collectives.csv.gz")
    parser.add_argument("--collected", type=Path, nargs="*", default=[], help="collectives.csv of gnnpred collect")
    parser.add_argument("--out", type=Path, help="constants.json to write (other sections are kept)")
    parser.add_argument("--score", action="store_true", help="print the errors on fabrics and rank counts left out")
    parser.add_argument("--left-out", choices=("ranks", "fabric"), help="with --score: only this table")
    parser.add_argument("--rows-per-series", type=int, default=MAX_ROWS_PER_SERIES, help="thinner is faster")
    options = parser.parse_args(arguments)
    if options.out is None and not options.score:
        parser.error("give --out, --score or both")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = read_rows(options.shared, options.rows_per_series, collected=options.collected)
    logger.info("%d rows in %d series", len(rows), len({row.series for row in rows}))
    if options.out is not None:
        existing = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        existing.update(shipped_sections(rows))
        options.out.write_text(json.dumps(existing, indent=1) + "\n", encoding="utf-8")
    if options.score:
        for unit in ("ranks", "fabric") if options.left_out is None else (options.left_out,):
            print(f"\n{unit} held out\n")
            print("\n".join(score_table(*held_out(rows, unit))), flush=True)


if __name__ == "__main__":
    main()
