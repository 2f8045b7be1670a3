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

Constants: ``constants.json``, written by :mod:`gnnpred.communication.fit` with sources, row counts and errors.
"""

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from math import ceil, inf, log2

from gnnpred.communication.fabrics import ClusterFabric, InterNodeFabric, IntraNodeFabric
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


def link_constants(fabric: IntraNodeFabric, *groups: str) -> LinkConstants:
    """Constants of a link for the first of ``groups`` that was fitted on it, else those of its all-reduce.

    What a user says of an own link (efficiency, latency) replaces the fitted figure.
    """
    entry = load_constants()["links"][fabric.like or fabric.name]
    fields = next((entry[group] for group in groups if group in entry), entry["all_reduce"])
    constants = LinkConstants(**fields["constants"])
    if fabric.efficiency is not None:  # it is the whole share that is reached: no further cost per byte
        constants = replace(constants, efficiency=fabric.efficiency, endpoint_gb_s=inf)
    if fabric.latency_us is not None:
        scale = fabric.latency_us / constants.latency_us(_STEPS_OF_TWO_GPUS)
        constants = replace(constants, base_us=constants.base_us * scale, hop_us=constants.hop_us * scale)
    return constants


def transport_constants(fabric: InterNodeFabric) -> TransportConstants:
    """Constants of a network; a user's own efficiency and latency replace the fitted figures."""
    constants = TransportConstants(**load_constants()["transports"][fabric.transport]["constants"])
    if fabric.efficiency is not None:
        constants = replace(constants, ring_efficiency=fabric.efficiency, tree_efficiency=fabric.efficiency)
    return constants if fabric.latency_us is None else replace(constants, hop_us=fabric.latency_us)


_STEPS_OF_TWO_GPUS = 2  # of an all-reduce's ring


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


def routes(kind: str, fabric: ClusterFabric) -> tuple[Route, ...]:
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
            return ring, tree
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
            near = get_close_matches(kind.replace("-", "_"), COLLECTIVE_KINDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COLLECTIVE_KINDS)}"
            raise UsageError(f"unknown collective {kind!r}: {hint}")
    if not crosses:
        return (Route(hops=hops, link_bytes=factor),)
    return (
        Route(hops=hops, network_hops=network_hops, link_bytes=factor if has_links else 0.0, network_bytes=network),
    )


def collective_ms(kind: str, num_bytes: float, fabric: ClusterFabric, *, dtype: str = "") -> float:
    """Time of one collective over all ranks of ``fabric``, in ms.

    ``num_bytes`` is the full buffer, as nccl-tests counts ``size``:

    * ``all_reduce``, ``broadcast``, ``reduce``: the buffer of one rank;
    * ``all_gather``: the gathered result on every rank; ``reduce_scatter``: the input of one rank;
    * ``all_to_all``: what one rank sends in all (1/n of it to itself);
    * ``send_recv``: one message; every rank sends one to the next rank and receives one.

    ``dtype`` (``fp32``, ``fp16``, ``bf16``, ``int8`` or "") matters little: reductions at the endpoints. Raises
    UsageError for an unknown kind and GnnpredError for a negative number of bytes.
    """
    _check_bytes(num_bytes)
    if fabric.gpus == 1:
        routes(kind, replace(fabric, gpus=2, nodes=1, inter=None))  # an unknown kind is refused here too
        return 0.0
    links = link_constants(fabric.intra, *_CONSTANT_GROUPS.get(kind, ("all_reduce",)))
    transport = transport_constants(fabric.inter) if fabric.inter else None
    return collective_us(kind, num_bytes, fabric, links, transport) / _US_PER_MS


def collective_us(
    kind: str, num_bytes: float, fabric: ClusterFabric, links: LinkConstants, transport: TransportConstants | None
) -> float:
    """The alpha-beta time in microseconds under given constants (the fit varies them)."""
    _check_bytes(num_bytes)
    if fabric.gpus == 1:
        return 0.0
    return min(_route_us(num_bytes, route, fabric, links, transport) for route in routes(kind, fabric))


def _route_us(
    num_bytes: float,
    route: Route,
    fabric: ClusterFabric,
    links: LinkConstants,
    transport: TransportConstants | None,
) -> float:
    """The faster of NCCL's low-latency and bulk protocols over one route."""
    us_per_byte = links.us_per_byte(route.link_bytes, fabric.intra.one_way_gb_s) if route.link_bytes else 0.0
    latency = links.latency_us(route.hops)
    if transport is not None and fabric.inter is not None:
        network = route.network_bytes / fabric.network_gb_s_per_domain / _BYTES_PER_US_PER_GB_S
        latency += transport.hop_us * route.network_hops
        if route.is_tree:
            us_per_byte = max(us_per_byte, network) / transport.tree_efficiency
        else:
            us_per_byte = max(us_per_byte, network / transport.ring_efficiency)
    return min(
        latency + num_bytes * us_per_byte / links.low_latency_fraction,
        latency * links.bulk_latency_factor + num_bytes * us_per_byte,
    )


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
