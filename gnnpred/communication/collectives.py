"""Times of collective operations in ms: alpha-beta models with constants fitted from measurements.

A collective of S bytes over n ranks takes, for each protocol and algorithm that NCCL could choose,

    t = latency + S * f / B            ring inside a node,  f = 2(n-1)/n for all-reduce
    1/B -> f / (e * L) + 1 / C         L: nominal one-way link rate, e: fitted efficiency, C: endpoint rate

and the smallest of them counts (NCCL's own tuning does the same). ``1/C`` is a cost per byte that does
not grow with the group (copies and reductions at the endpoints); with it one pair (e, C) fits groups of
2 to 8 GPUs alike. The low-latency protocol starts sooner (``base_us + hop_us * hops``) at a fraction of
the bandwidth; the bulk protocol pays ``bulk_latency_factor`` times that latency for the full rate.

Across nodes the flat ring is bounded by the slower of link and network; a tree crosses the network
``2(N-1)/N`` times instead of ``2(n-1)/n`` (N nodes, n ranks) and takes ``log2 N`` network hops.

Constants: ``constants.json``, written by :mod:`gnnpred.communication_fit.collectives` with sources, row counts and
errors.
"""

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from math import ceil, exp, inf, log2

from gnnpred.communication.fabrics import ClusterFabric, InterNodeFabric, IntraNodeFabric
from gnnpred.communication.residual import Term, log_factor, nccl_minor, terms
from gnnpred.errors import GnnpredError, UsageError

_US_PER_MS = 1e3
_BYTES_PER_US_PER_GB_S = 1e3  # 1 GB/s = 1e3 bytes per microsecond


@dataclass(frozen=True, kw_only=True)
class LinkConstants:
    """Fitted constants of one fabric inside a node, for one group of collectives."""

    base_us: float  # launch and rendezvous, low-latency protocol
    hop_us: float  # per ring step
    bulk_latency_factor: float  # latency of the bulk protocol / of the low-latency one
    low_latency_fraction: float  # bandwidth of the low-latency protocol / of the bulk one
    efficiency: float  # reached share of the nominal one-way rate
    endpoint_gb_s: float  # per-byte cost at the endpoints, as a rate

    def latency_us(self, hops: float) -> float:
        return self.base_us + self.hop_us * hops

    def us_per_byte(self, factor: float, one_way_gb_s: float) -> float:
        """Bulk microseconds per byte; ``factor`` = bytes that one link carries per byte of the buffer."""
        link = factor / (self.efficiency * one_way_gb_s)
        return (link + 1 / self.endpoint_gb_s) / _BYTES_PER_US_PER_GB_S


@dataclass(frozen=True, kw_only=True)
class TransportConstants:
    """Fitted constants of one network transport."""

    hop_us: float  # per network step
    ring_efficiency: float  # reached share of the nominal rate, flat ring
    tree_efficiency: float  # the same for trees, inside and between nodes


@lru_cache(maxsize=1)
def load_constants() -> dict:
    """The shipped constants and their provenance, as parsed JSON."""
    return json.loads((files("gnnpred.communication") / "constants.json").read_text(encoding="utf-8"))


COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
# Constants are fitted per group of kinds that move bytes alike; kinds without a fit of their own take the next group's.
_CONSTANT_GROUPS = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("gather", "all_reduce"),
    "reduce_scatter": ("gather", "all_reduce"),
    "broadcast": ("gather", "all_reduce"),
    "reduce": ("gather", "all_reduce"),
    "all_to_all": ("all_to_all", "gather", "all_reduce"),
    "send_recv": ("send_recv", "gather", "all_reduce"),
}
# Tree steps inside a fabric cost more than ring steps (two children, up and down): NVL72 all-reduces of small
# messages take about the same from 16 to 72 GPUs, as 2 * 2 * log2(n) steps of the fitted ring hop would.
_TREE_HOPS_PER_LEVEL = 4
_FIRST_NCCL_MINOR_WITH_TREES = 4  # NCCL 2.4 release notes
# NCCL serves eight peers of an all-to-all at a time (sends and receives of one batch of work).
_PEERS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class Route:
    """One algorithm of a collective: how many steps it takes and what the busiest link carries.

    ``link_bytes`` and ``network_bytes`` are per byte of the buffer: over one GPU's link, and out of one
    NVLink domain or node.
    """

    hops: float
    network_hops: float = 0.0
    link_bytes: float  # 0 where no link inside a node is used
    network_bytes: float = 0.0
    is_tree: bool = False


def routes(kind: str, fabric: ClusterFabric, nccl_version: str = "") -> tuple[Route, ...]:
    """The algorithms that could serve a collective on that fabric; the fastest counts. Raises UsageError."""
    n, domains, local = fabric.gpus, fabric.num_domains, fabric.gpus_per_domain
    crosses = fabric.inter is not None
    has_links = not crosses or local > 1
    match kind:
        case "all_reduce":
            factor = 2 * (n - 1) / n
            if not crosses:
                tree_hops = _TREE_HOPS_PER_LEVEL * ceil(log2(n))
                return (Route(hops=min(2 * (n - 1), tree_hops), link_bytes=factor),)
            link = factor if has_links else 0.0
            ring = Route(hops=2 * (n - domains), network_hops=2 * (domains - 1), link_bytes=link, network_bytes=factor)
            # A tree's latency: down and up a chain inside the node, then the levels of the tree between nodes.
            tree = Route(
                hops=2 * (local - 1),
                network_hops=2 * ceil(log2(domains)),
                link_bytes=link,
                network_bytes=2 * (domains - 1) / domains if fabric.intra.rail_tree else factor,
                is_tree=True,
            )
            minor = nccl_minor(nccl_version)
            return (ring, tree) if minor is None or minor >= _FIRST_NCCL_MINOR_WITH_TREES else (ring,)
        case "all_gather" | "reduce_scatter":
            factor = (n - 1) / n
            hops, network_hops, network = n - domains, domains - 1, factor
        case "broadcast" | "reduce":  # pipelined along a chain: every byte passes each link once
            factor = network = 1.0
            hops, network_hops = n - domains, ceil(log2(domains))
        case "all_to_all":  # every rank keeps 1/n; a node sends what its ranks have for other nodes
            factor = (n - 1) / n
            hops, network_hops = local - 1, ceil((n - local) / _PEERS_AT_ONCE)
            network = local * (n - local) / n
        case "send_recv":  # every rank sends to one peer; across nodes all ranks of a node do
            factor, hops, network_hops = 1.0, 1.0 if has_links else 0.0, 1
            network = fabric.network_gb_s_per_domain / fabric.network_gb_s_per_gpu if crosses else 0.0
        case _:
            raise UsageError(f"unknown collective {kind!r}: choose one of {', '.join(COLLECTIVE_KINDS)}")
    if not crosses:
        return (Route(hops=hops, link_bytes=factor),)
    return (
        Route(hops=hops, network_hops=network_hops, link_bytes=factor if has_links else 0.0, network_bytes=network),
    )


@dataclass(frozen=True, kw_only=True)
class CollectiveEstimate:
    """One collective: its time, and what the time rests on."""

    kind: str
    num_bytes: float
    dtype: str
    ranks: int
    time_ms: float
    physics_ms: float  # the alpha-beta time before the learned correction
    measured: bool  # inside the range of measurements of that fabric
    basis: str  # one line: measured where, or what is extrapolated

    @property
    def algorithm_bandwidth_gb_s(self) -> float:
        """Bytes of the buffer per time, as nccl-tests' algbw."""
        return self.num_bytes / self.time_ms / 1e6 if self.time_ms > 0 else 0.0

    @property
    def bus_bandwidth_gb_s(self) -> float:
        """What the busiest link carries per time, as nccl-tests' busbw."""
        return self.algorithm_bandwidth_gb_s * bus_factor(self.kind, self.ranks)


def bus_factor(kind: str, ranks: int) -> float:
    """nccl-tests' factor from algorithm to bus bandwidth."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


# Their bytes inside a node get fewer when the group spans several.
_KINDS_THAT_SPREAD = ("all_to_all", "send_recv")
_LEAST_SHARE_OF_A_PAIR = 0.93  # reductions inside a switch: 8 GPUs measured up to 7 % faster than 4
_FADING_OCTAVES = 4.0  # outside the measured range the correction fades out over that many doublings
_FIRST_OCTAVE, _LAST_OCTAVE = 0, 38  # log2 of bytes: the knots of the correction and its fading lie between
_FLOORS_PER_OCTAVE = 2


class CollectiveModel:
    """Alpha-beta physics times the learned correction, out of one set of constants."""

    def __init__(self, constants: dict) -> None:
        self._constants = constants
        self._floors: dict[tuple, list[float]] = {}

    def links(self, fabric: IntraNodeFabric, kind: str) -> LinkConstants:
        """Constants of a link: fitted on it, else on its family. What a user says of an own link replaces them."""
        groups = _CONSTANT_GROUPS[kind]
        entry = self._constants["links"].get(fabric.like or fabric.name, {})
        fields = next((entry[group]["constants"] for group in groups if group in entry), None)
        if fields is None:
            families = self._constants["families"]
            family = families.get(fabric.family) or families["nvlink"]
            relative = dict(next(family[group] for group in (*groups, "all_reduce") if group in family))
            fields = {**relative, "endpoint_gb_s": relative["endpoint_gb_s"] * fabric.one_way_gb_s}
        constants = LinkConstants(**fields)
        if fabric.efficiency is not None:  # it is the whole share that is reached: no further cost per byte
            constants = replace(constants, efficiency=fabric.efficiency, endpoint_gb_s=inf)
        if fabric.latency_us is not None:
            scale = fabric.latency_us / constants.latency_us(_STEPS_OF_TWO_GPUS)
            constants = replace(constants, base_us=constants.base_us * scale, hop_us=constants.hop_us * scale)
        return constants

    def transport(self, fabric: InterNodeFabric) -> TransportConstants:
        """Constants of a network; a user's own efficiency and latency replace the fitted figures."""
        transports = self._constants["transports"]
        constants = TransportConstants(**(transports.get(fabric.transport) or transports["any"])["constants"])
        if fabric.efficiency is not None:
            constants = replace(constants, ring_efficiency=fabric.efficiency, tree_efficiency=fabric.efficiency)
        return constants if fabric.latency_us is None else replace(constants, hop_us=fabric.latency_us)

    def estimate(
        self, kind: str, num_bytes: float, fabric: ClusterFabric, *, dtype: str = "", nccl_version: str = ""
    ) -> CollectiveEstimate:
        """See :func:`estimate_collective`."""
        kind = check_kind(kind)
        _check_bytes(num_bytes)
        if fabric.gpus == 1:
            return CollectiveEstimate(
                kind=kind, num_bytes=num_bytes, dtype=dtype, ranks=1, time_ms=0.0, physics_ms=0.0, measured=True,
                basis="one GPU communicates nothing",
            )  # fmt: skip
        time_us, physics_us = self._times_us(kind, num_bytes, fabric, dtype, nccl_version)
        is_corrected = not fabric.is_custom and kind in self._constants.get("measured", {}).get(fabric.measured_as, {})
        floors = self._floors_of(kind, fabric, dtype, nccl_version) if is_corrected else []
        below = int(_FLOORS_PER_OCTAVE * (log2(max(num_bytes, 1.0)) - _FIRST_OCTAVE))
        if floors and below >= 0:  # a measured change of protocol must not make a larger buffer faster
            time_us = max(time_us, floors[min(below, len(floors) - 1)])
        if fabric.inter is not None and fabric.gpus_per_domain > 1 and kind not in _KINDS_THAT_SPREAD:
            # The same buffer over one node's GPUs alone is part of the work over all nodes.
            inside = fabric.subgroup(fabric.gpus_per_domain, max(1, fabric.nodes // fabric.num_domains))
            inside_ms = self.estimate(kind, num_bytes, inside, dtype=dtype, nccl_version=nccl_version).time_ms
            time_us = max(time_us, inside_ms * _US_PER_MS)
        if is_corrected and fabric.is_switched and fabric.gpus > 2:  # sources differ by more than group sizes do
            pair = self.estimate(kind, num_bytes, fabric.subgroup(2, 1), dtype=dtype, nccl_version=nccl_version)
            time_us = max(time_us, _LEAST_SHARE_OF_A_PAIR * pair.time_ms * _US_PER_MS)
        measured, basis = self._basis(kind, num_bytes, fabric)
        return CollectiveEstimate(
            kind=kind, num_bytes=num_bytes, dtype=dtype, ranks=fabric.gpus, time_ms=time_us / _US_PER_MS,
            physics_ms=physics_us / _US_PER_MS, measured=measured, basis=basis,
        )  # fmt: skip

    def _times_us(
        self, kind: str, num_bytes: float, fabric: ClusterFabric, dtype: str, nccl_version: str
    ) -> tuple[float, float]:
        physics_us, found = self.physics_and_terms(kind, num_bytes, fabric, dtype=dtype, nccl_version=nccl_version)
        coefficients = self._constants.get("residual", {}).get("coefficients")
        if not coefficients or fabric.is_custom:
            return physics_us, physics_us
        factor = exp(log_factor(coefficients, found) * self._trust(kind, num_bytes, fabric))
        return physics_us * factor, physics_us

    def physics_and_terms(
        self, kind: str, num_bytes: float, fabric: ClusterFabric, *, dtype: str, nccl_version: str
    ) -> tuple[float, list[Term]]:
        """Alpha-beta microseconds and the basis functions of the correction."""
        links = self.links(fabric.intra, kind)
        transport = self.transport(fabric.inter) if fabric.inter else None
        found = terms(
            kind=kind,
            fabric=fabric.measured_as,
            is_switched=fabric.is_switched,
            num_bytes=num_bytes,
            regime=regime(kind, num_bytes, fabric, links, transport, nccl_version=nccl_version),
            ranks=fabric.gpus,
            dtype=dtype,
            nccl_version=nccl_version,
        )
        physics_us = collective_us(kind, num_bytes, fabric, links, transport, nccl_version=nccl_version)
        return physics_us, found

    def _trust(self, kind: str, num_bytes: float, fabric: ClusterFabric) -> float:
        """1 inside the measured range, less by every doubling outside of it; 1 where only the family counts."""
        rows = self._constants.get("measured", {}).get(fabric.measured_as, {}).get(kind)
        if rows is None:
            return 1.0
        (low, high), ranks = rows["bytes"], rows["gpus"]
        outside = max(0.0, log2(low / max(num_bytes, 1.0)), log2(max(num_bytes, 1.0) / high))
        outside += max(0.0, log2(ranks[0] / fabric.gpus), log2(fabric.gpus / ranks[-1]))
        return max(0.0, 1 - outside / _FADING_OCTAVES)

    def _floors_of(self, kind: str, fabric: ClusterFabric, dtype: str, nccl_version: str) -> list[float]:
        """The longest time of all buffers up to each half-octave of bytes, in microseconds."""
        key = (kind, fabric, dtype, nccl_version)
        if key not in self._floors:
            if len(self._floors) >= _MAX_FLOORS:
                self._floors.clear()
            floors: list[float] = []
            for step in range(_FLOORS_PER_OCTAVE * (_LAST_OCTAVE - _FIRST_OCTAVE) + 1):
                num_bytes = 2.0 ** (_FIRST_OCTAVE + step / _FLOORS_PER_OCTAVE)
                time_us = self._times_us(kind, num_bytes, fabric, dtype, nccl_version)[0]
                floors.append(max(time_us, floors[-1]) if floors else time_us)
            self._floors[key] = floors
        return self._floors[key]

    def _basis(self, kind: str, num_bytes: float, fabric: ClusterFabric) -> tuple[bool, str]:
        if fabric.is_custom:
            return False, "links of your own: physics alone (alpha-beta), no measurement"
        rows = self._constants.get("measured", {}).get(fabric.measured_as, {}).get(kind)
        across = f"across nodes over {fabric.measured_as}" if fabric.inter else f"on {fabric.measured_as}"
        if rows is None:
            return False, f"no {kind} {across} was measured: extrapolated by physics"
        (low, high), ranks = rows["bytes"], rows["gpus"]
        reasons = []
        if not low <= num_bytes <= high:
            reasons.append(f"{_size_text(num_bytes)} (measured {_size_text(low)} to {_size_text(high)})")
        if not ranks[0] <= fabric.gpus <= ranks[-1]:
            reasons.append(f"{fabric.gpus} GPUs (measured {ranks[0]} to {ranks[-1]})")
        if fabric.inter is not None and fabric.intra.name not in rows["links"]:
            reasons.append(f"{fabric.intra.name} inside the nodes (measured {', '.join(rows['links'])})")
        if reasons:
            return False, f"outside the measured range: {', '.join(reasons)}: extrapolated by physics"
        return True, (
            f"measured: {kind} {across}, {ranks[0]} to {ranks[-1]} GPUs, {_size_text(low)} to {_size_text(high)}, "
            f"{rows['num_rows']} rows of {rows['sources']} source{'s' * (rows['sources'] != 1)}"
        )


_STEPS_OF_TWO_GPUS = 2  # of an all-reduce's ring
_MAX_FLOORS = 4096


def _size_text(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.3g} B"


@lru_cache(maxsize=1)
def shipped_model() -> CollectiveModel:
    """The model of the shipped constants."""
    return CollectiveModel(load_constants())


def estimate_collective(
    kind: str, num_bytes: float, fabric: ClusterFabric, *, dtype: str = "", nccl_version: str = ""
) -> CollectiveEstimate:
    """Time of one collective over all ranks of ``fabric`` and what it rests on.

    ``num_bytes`` is the full buffer, as nccl-tests counts ``size``:

    * ``all_reduce``, ``broadcast``, ``reduce``: the buffer of one rank;
    * ``all_gather``: the gathered result on every rank; ``reduce_scatter``: the input of one rank;
    * ``all_to_all``: what one rank sends in all (1/n of it to itself);
    * ``send_recv``: one message; every rank sends one to the next rank and receives one.

    ``dtype`` (``fp32``, ``fp16``, ``bf16``, ``int8`` or "") matters little: reductions at the endpoints. Raises
    UsageError for an unknown kind and GnnpredError for a negative number of bytes.
    """
    return shipped_model().estimate(kind, num_bytes, fabric, dtype=dtype, nccl_version=nccl_version)


def collective_ms(kind: str, num_bytes: float, fabric: ClusterFabric, *, dtype: str = "") -> float:
    """:func:`estimate_collective`'s time in ms; ``num_bytes`` is the full buffer, as it describes."""
    return estimate_collective(kind, num_bytes, fabric, dtype=dtype).time_ms


def check_kind(kind: str) -> str:
    """The kind under its own name (``all-reduce`` and ``alltoall`` too); raises UsageError with the nearest one."""
    name = kind.strip().lower().replace("-", "_")
    name = {known.replace("_", ""): known for known in COLLECTIVE_KINDS}.get(name.replace("_", ""), name)
    if name in COLLECTIVE_KINDS:
        return name
    near = get_close_matches(name, COLLECTIVE_KINDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COLLECTIVE_KINDS)}"
    raise UsageError(f"unknown collective {kind[:40]!r}: {hint}")


def regime(
    kind: str,
    num_bytes: float,
    fabric: ClusterFabric,
    links: LinkConstants,
    transport: TransportConstants | None,
    *,
    nccl_version: str = "",
) -> float:
    """log2 of bulk transfer time / latency: below 0 the latency rules, above 0 the bandwidth."""
    parts = [_route_parts(route, fabric, links, transport) for route in routes(kind, fabric, nccl_version)]
    latency, us_per_byte = min(part[0] for part in parts), min(part[1] for part in parts)
    return log2(max(num_bytes, 1.0) * us_per_byte / latency)


def collective_us(
    kind: str,
    num_bytes: float,
    fabric: ClusterFabric,
    links: LinkConstants,
    transport: TransportConstants | None,
    *,
    nccl_version: str = "",
) -> float:
    """The alpha-beta time in microseconds under given constants (the fit varies them)."""
    _check_bytes(num_bytes)
    if fabric.gpus == 1:
        return 0.0
    algorithms = routes(kind, fabric, nccl_version)
    return min(_route_us(num_bytes, route, fabric, links, transport) for route in algorithms)


def _route_us(
    num_bytes: float,
    route: Route,
    fabric: ClusterFabric,
    links: LinkConstants,
    transport: TransportConstants | None,
) -> float:
    """The faster of NCCL's low-latency and bulk protocols over one route."""
    latency, us_per_byte = _route_parts(route, fabric, links, transport)
    return min(
        latency + num_bytes * us_per_byte / links.low_latency_fraction,
        latency * links.bulk_latency_factor + num_bytes * us_per_byte,
    )


def _route_parts(
    route: Route, fabric: ClusterFabric, links: LinkConstants, transport: TransportConstants | None
) -> tuple[float, float]:
    """Latency of the low-latency protocol in us, and us per byte of the bulk protocol."""
    rate = fabric.intra.usable_gb_s(fabric.gpus_per_domain)
    us_per_byte = links.us_per_byte(route.link_bytes, rate) if route.link_bytes else 0.0
    latency = links.latency_us(route.hops)
    if transport is not None and fabric.inter is not None:
        network = route.network_bytes / fabric.network_gb_s_per_domain / _BYTES_PER_US_PER_GB_S
        latency += transport.hop_us * route.network_hops
        if route.is_tree:
            us_per_byte = max(us_per_byte, network) / transport.tree_efficiency
        else:
            us_per_byte = max(us_per_byte, network / transport.ring_efficiency)
    return latency, us_per_byte


def all_reduce_us(
    num_bytes: float, fabric: ClusterFabric, links: LinkConstants, transport: TransportConstants | None
) -> float:
    """All-reduce under given constants, in microseconds."""
    return collective_us("all_reduce", num_bytes, fabric, links, transport)


def gather_us(
    num_bytes: float, fabric: ClusterFabric, links: LinkConstants, transport: TransportConstants | None
) -> float:
    """Ring all-gather or reduce-scatter under given constants, in microseconds."""
    return collective_us("all_gather", num_bytes, fabric, links, transport)


def all_reduce_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """All-reduce of a buffer of ``num_bytes`` per rank over all ranks, in ms (fastest of ring and tree)."""
    return collective_ms("all_reduce", num_bytes, fabric)


def all_gather_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """All-gather whose result has ``num_bytes`` on every rank, in ms."""
    return collective_ms("all_gather", num_bytes, fabric)


def reduce_scatter_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """Reduce-scatter of a buffer of ``num_bytes`` per rank, in ms."""
    return collective_ms("reduce_scatter", num_bytes, fabric)


def broadcast_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """Broadcast of ``num_bytes`` from one rank to all, in ms."""
    return collective_ms("broadcast", num_bytes, fabric)


def reduce_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """Reduce of ``num_bytes`` to one rank, in ms (the mirror image of broadcast)."""
    return collective_ms("reduce", num_bytes, fabric)


def _check_bytes(num_bytes: float) -> None:
    if not num_bytes >= 0:
        raise GnnpredError(f"a collective needs a number of bytes of at least 0, got {num_bytes}")
