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
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import ceil, log2

from gnnpred.communication.fabrics import ClusterFabric
from gnnpred.errors import GnnpredError

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


def link_constants(fabric_name: str, group: str) -> LinkConstants:
    """Constants of a fabric; ``group`` is ``all_reduce`` or ``gather`` (all-gather, reduce-scatter, broadcast)."""
    links = load_constants()["links"]
    entry = links[fabric_name]
    fields = entry.get(group) or entry["all_reduce"]
    return LinkConstants(**fields["constants"])


def transport_constants(transport: str) -> TransportConstants:
    """Constants of a network transport."""
    return TransportConstants(**load_constants()["transports"][transport]["constants"])


def all_reduce_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """All-reduce of a buffer of ``num_bytes`` per rank over all ranks, in ms (fastest of ring and tree)."""
    if fabric.gpus == 1:
        return 0.0
    links = link_constants(fabric.intra.name, "all_reduce")
    transport = transport_constants(fabric.inter.transport) if fabric.inter else None
    return all_reduce_us(num_bytes, fabric, links, transport) / _US_PER_MS


def all_reduce_us(
    num_bytes: float, fabric: ClusterFabric, links: LinkConstants, transport: TransportConstants | None
) -> float:
    """:func:`all_reduce_ms` in microseconds under given constants (the fit varies them)."""
    _check_bytes(num_bytes)
    n, domains, local = fabric.gpus, fabric.num_domains, fabric.gpus_per_domain
    ring_factor = 2 * (n - 1) / n
    local_us_per_byte = links.us_per_byte(ring_factor, fabric.intra.one_way_gb_s)
    if transport is None or fabric.inter is None:
        ring_latency = links.latency_us(2 * (n - 1))
        tree_latency = links.latency_us(_TREE_HOPS_PER_LEVEL * ceil(log2(n)))
        return _fastest_us(num_bytes, links, [(min(ring_latency, tree_latency), local_us_per_byte)])
    network = fabric.network_gb_s_per_domain
    on_one_gpu_nodes = local == 1
    ring_network = ring_factor / (network * transport.ring_efficiency) / _BYTES_PER_US_PER_GB_S
    ring_us_per_byte = ring_network if on_one_gpu_nodes else max(local_us_per_byte, ring_network)
    ring_latency = links.latency_us(2 * (n - domains)) + transport.hop_us * 2 * (domains - 1)
    # A tree's latency: down and up a chain inside the node, then the levels of the tree between nodes.
    tree_latency = links.latency_us(2 * (local - 1)) + transport.hop_us * 2 * ceil(log2(domains))
    tree_factor = 2 * (domains - 1) / domains if fabric.intra.rail_tree else ring_factor
    tree_network = tree_factor / network / _BYTES_PER_US_PER_GB_S
    tree_local = 0.0 if on_one_gpu_nodes else local_us_per_byte
    tree_us_per_byte = max(tree_local, tree_network) / transport.tree_efficiency
    return _fastest_us(num_bytes, links, [(ring_latency, ring_us_per_byte), (tree_latency, tree_us_per_byte)])


# Tree steps inside a fabric cost more than ring steps (two children, up and down): NVL72 all-reduces of small
# messages take about the same from 16 to 72 GPUs, as 2 * 2 * log2(n) steps of the fitted ring hop would.
_TREE_HOPS_PER_LEVEL = 4


def _fastest_us(num_bytes: float, links: LinkConstants, algorithms: list[tuple[float, float]]) -> float:
    """The smallest time over algorithms (latency us, us per byte) and the two protocols."""
    return min(
        min(
            latency + num_bytes * us_per_byte / links.low_latency_fraction,
            latency * links.bulk_latency_factor + num_bytes * us_per_byte,
        )
        for latency, us_per_byte in algorithms
    )


def all_gather_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """All-gather whose result has ``num_bytes`` on every rank, in ms."""
    if fabric.gpus == 1:
        return 0.0
    links = link_constants(fabric.intra.name, "gather")
    transport = transport_constants(fabric.inter.transport) if fabric.inter else None
    return gather_us(num_bytes, fabric, links, transport) / _US_PER_MS


def reduce_scatter_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """Reduce-scatter of a buffer of ``num_bytes`` per rank, in ms (the mirror image of all-gather)."""
    return all_gather_ms(num_bytes, fabric)


def gather_us(
    num_bytes: float, fabric: ClusterFabric, links: LinkConstants, transport: TransportConstants | None
) -> float:
    """Ring all-gather or reduce-scatter in microseconds under given constants."""
    _check_bytes(num_bytes)
    n, domains, local = fabric.gpus, fabric.num_domains, fabric.gpus_per_domain
    factor = (n - 1) / n
    us_per_byte = links.us_per_byte(factor, fabric.intra.one_way_gb_s)
    latency = links.latency_us(n - domains)
    if transport is not None and fabric.inter is not None:
        network = factor / (fabric.network_gb_s_per_domain * transport.ring_efficiency) / _BYTES_PER_US_PER_GB_S
        us_per_byte = network if local == 1 else max(us_per_byte, network)
        latency += transport.hop_us * (domains - 1)
    return _fastest_us(num_bytes, links, [(latency, us_per_byte)])


def broadcast_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """Broadcast of ``num_bytes`` from one rank to all, in ms: pipelined along a ring, so every byte passes
    each link once; latency grows with the chain."""
    if fabric.gpus == 1:
        return 0.0
    _check_bytes(num_bytes)
    links = link_constants(fabric.intra.name, "gather")
    us_per_byte = links.us_per_byte(1.0, fabric.intra.one_way_gb_s)
    latency = links.latency_us(fabric.gpus - fabric.num_domains)
    if fabric.inter is not None:
        transport = transport_constants(fabric.inter.transport)
        network = 1 / (fabric.network_gb_s_per_domain * transport.ring_efficiency) / _BYTES_PER_US_PER_GB_S
        us_per_byte = network if fabric.gpus_per_domain == 1 else max(us_per_byte, network)
        latency += transport.hop_us * ceil(log2(fabric.num_domains))
    return _fastest_us(num_bytes, links, [(latency, us_per_byte)]) / _US_PER_MS


def reduce_ms(num_bytes: float, fabric: ClusterFabric) -> float:
    """Reduce of ``num_bytes`` to one rank, in ms (the mirror image of broadcast)."""
    return broadcast_ms(num_bytes, fabric)


def _check_bytes(num_bytes: float) -> None:
    if not num_bytes >= 0:
        raise GnnpredError(f"a collective needs a number of bytes of at least 0, got {num_bytes}")
