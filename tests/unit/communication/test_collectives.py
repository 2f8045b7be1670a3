"""Alpha-beta times against numbers worked by hand, and properties that physics asks for."""

from dataclasses import replace

import pytest

from gnnpred.communication.collectives import (
    LinkConstants,
    TransportConstants,
    all_gather_ms,
    all_reduce_ms,
    all_reduce_us,
    broadcast_ms,
    gather_us,
    load_constants,
    reduce_scatter_ms,
)
from gnnpred.communication.fabrics import inter_node_names, intra_node_names, resolve_fabric
from gnnpred.errors import GnnpredError
from gnnpred.hardware import find_device

A100 = find_device("A100-SXM4-80GB")
LINKS = LinkConstants(
    base_us=5.0,
    hop_us=1.0,
    bulk_latency_factor=2.0,
    low_latency_fraction=0.5,
    efficiency=0.5,  # of 300 GB/s: 150 GB/s
    endpoint_gb_s=600.0,
)
TRANSPORT = TransportConstants(hop_us=10.0, ring_efficiency=0.8, tree_efficiency=0.5)


def _fabric(gpus, nodes=1, **names):
    names.setdefault("interconnect", "nvlink3")
    if nodes > 1:
        names.setdefault("inter_node", "4xib200")
    return resolve_fabric(device=A100, gpus=gpus, nodes=nodes, **names)


def test_a_large_all_reduce_in_a_node_is_the_bulk_ring():
    # 4 GPUs: hops 6, latency (5 + 6) * 2 = 22 us.
    # 3e8 bytes: link 3e8 * 1.5 / 150e3 = 3000 us, endpoints 3e8 / 600e3 = 500 us.
    assert all_reduce_us(3e8, _fabric(4), LINKS, None) == pytest.approx(22 + 3000 + 500)


def test_a_small_all_reduce_in_a_node_is_the_low_latency_ring():
    # 4 GPUs: latency 11 us; 3000 bytes: (0.03 + 0.005) us, doubled at half bandwidth.
    assert all_reduce_us(3e3, _fabric(4), LINKS, None) == pytest.approx(11 + 0.07)


def test_an_all_gather_moves_each_byte_once():
    # 4 GPUs: hops 3, latency (5 + 3) * 2; factor 3/4: 3e8 * 0.75 / 150e3 = 1500 us, endpoints 500.
    assert gather_us(3e8, _fabric(4), LINKS, None) == pytest.approx(16 + 1500 + 500)


def test_an_all_reduce_across_nodes_takes_the_faster_of_ring_and_tree():
    # 16 GPUs on 2 nodes, network 4 x 25 = 100 GB/s a node.
    # Ring: f = 1.875; network 1.875 / 80e3 us per byte, local 1.875 / 150e3 + 1 / 600e3: the network counts.
    # Tree: f = 1; network 1 / 100e3 us per byte against local 1.4167e-5, over 0.5.
    num_bytes = 1e9
    ring_us = (5 + 2 * 14 + 10 * 2) * 2 + num_bytes * 1.875 / 80e3
    tree_us = (5 + 2 * 7 + 10 * 2) * 2 + num_bytes * (1.875 / 150e3 + 1 / 600e3) / 0.5
    assert ring_us < tree_us
    assert all_reduce_us(num_bytes, _fabric(16, 2), LINKS, TRANSPORT) == pytest.approx(ring_us)
    quick_tree = replace(TRANSPORT, tree_efficiency=0.9)
    tree_us = (5 + 2 * 7 + 10 * 2) * 2 + num_bytes * (1.875 / 150e3 + 1 / 600e3) / 0.9
    assert all_reduce_us(num_bytes, _fabric(16, 2), LINKS, quick_tree) == pytest.approx(tree_us)


def test_one_gpu_a_node_uses_the_network_alone():
    # 2 nodes with one GPU: f = 1; ring over 100 GB/s at 0.8.
    ring_us = (5 + 10 * 2) * 2 + 1e9 / 80e3
    assert all_reduce_us(1e9, _fabric(2, 2), LINKS, TRANSPORT) == pytest.approx(ring_us)


def test_one_gpu_communicates_nothing():
    fabric = resolve_fabric(device=A100, gpus=1, nodes=1)
    assert all_reduce_ms(1e9, fabric) == all_gather_ms(1e9, fabric) == broadcast_ms(1e9, fabric) == 0


def test_negative_bytes_are_refused():
    with pytest.raises(GnnpredError, match="bytes"):
        all_reduce_ms(-1, _fabric(8))
    with pytest.raises(GnnpredError, match="bytes"):
        all_reduce_ms(float("nan"), _fabric(8))


@pytest.mark.parametrize("collective", [all_reduce_ms, all_gather_ms, reduce_scatter_ms, broadcast_ms])
@pytest.mark.parametrize("num_bytes", [1e3, 1e6, 3e7, 1e9])
def test_more_gpus_never_make_a_collective_faster(collective, num_bytes):
    layouts = [(2, 1), (4, 1), (8, 1), (16, 2), (32, 4), (64, 8), (1024, 128)]
    for interconnect in ("nvlink3", "pcie4", "pcie4-no-p2p"):
        times = [collective(num_bytes, _fabric(gpus, nodes, interconnect=interconnect)) for gpus, nodes in layouts]
        assert times == sorted(times)


@pytest.mark.parametrize("name", intra_node_names())
def test_more_bytes_take_longer_on_every_fabric(name):
    sizes = [2.0**power for power in range(4, 34)]
    times = [all_reduce_ms(size, _fabric(2, interconnect=name)) for size in sizes]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("transport", ["eth", "ib", "roce", "efa"])
def test_a_faster_network_of_one_kind_is_never_slower(transport):
    names = sorted(
        (n for n in inter_node_names() if n.startswith(transport)), key=lambda n: int("".join(filter(str.isdigit, n)))
    )
    assert len(names) > 1
    for num_bytes in (1e4, 2.6e7, 1e9):
        times = [all_reduce_ms(num_bytes, _fabric(16, 2, inter_node=name)) for name in names]
        assert times == sorted(times, reverse=True)
        ports = [all_reduce_ms(num_bytes, _fabric(16, 2, inter_node=f"{count}x{names[0]}")) for count in (1, 2, 4, 8)]
        assert ports == sorted(ports, reverse=True)


def test_faster_links_move_gradient_buckets_faster():
    order = ["pcie3", "pcie4", "pcie5", "nvlink2", "nvlink3", "nvlink4", "nvlink5"]
    for gpus in (2, 4, 8):
        times = [all_reduce_ms(25 * 2**20, _fabric(gpus, interconnect=name)) for name in order]
        assert times == sorted(times, reverse=True), dict(zip(order, times, strict=True))


@pytest.mark.parametrize(
    ("fabric", "gpus", "busbw_gb_s"),
    [("nvlink3", 8, 225), ("nvlink4", 8, 400), ("nvlink5", 8, 640), ("pcie4", 4, 23.6), ("nvl72", 72, 780)],
)
def test_shipped_constants_reach_measured_bus_bandwidths(fabric, gpus, busbw_gb_s):
    # Medians of the measured tables at 1 GB (README of the data).
    time_ms = all_reduce_ms(1e9, _fabric(gpus, interconnect=fabric))
    assert 2 * (gpus - 1) / gpus * 1e9 / (time_ms * 1e6) == pytest.approx(busbw_gb_s, rel=0.15)


def test_every_constant_names_where_it_comes_from():
    constants = load_constants()
    for section in [*constants["links"].values(), *({"all_reduce": t} for t in constants["transports"].values())]:
        for group in section.values():
            assert "taken_from" in group or (group["fit"]["sources"] and group["fit"]["num_rows"] > 0)
