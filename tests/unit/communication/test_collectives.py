"""Alpha-beta times against numbers worked by hand, and properties that physics asks for."""

from dataclasses import replace
from itertools import pairwise

import pytest

from gnnpred.communication.collectives import (
    COLLECTIVE_KINDS,
    LinkConstants,
    TransportConstants,
    all_gather_ms,
    all_reduce_ms,
    all_reduce_us,
    broadcast_ms,
    check_kind,
    collective_ms,
    collective_us,
    estimate_collective,
    gather_us,
    load_constants,
    reduce_scatter_ms,
)
from gnnpred.communication.fabrics import inter_node_names, intra_node_names, resolve_fabric
from gnnpred.errors import GnnpredError, UsageError
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
    for interconnect in ("nvlink3", "pcie4", "nvlink4"):
        times = [collective(num_bytes, _fabric(gpus, nodes, interconnect=interconnect)) for gpus, nodes in layouts]
        for fewer, more in pairwise(times):  # 8 GPUs reduce inside the switch, 4 do not: measured up to 7 % faster
            assert more >= 0.9 * fewer, times


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
        # Two V100 of a cube mesh share one or two of six links: no more than PCIe 5 gives.
        names = [name for name in order if gpus > 2 or name != "nvlink2"]
        times = [all_reduce_ms(25 * 2**20, _fabric(gpus, interconnect=name)) for name in names]
        assert times == sorted(times, reverse=True), dict(zip(names, times, strict=True))


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


def test_an_all_to_all_keeps_its_own_share_and_shares_the_network():
    # 4 GPUs in a node: hops 3, 3/4 of 3e8 bytes over 150 GB/s, endpoints 500 us.
    assert collective_us("all_to_all", 3e8, _fabric(4), LINKS, None) == pytest.approx((5 + 3) * 2 + 1500 + 500)
    # 16 GPUs on 2 nodes: 8 ranks send half of their bytes over 100 GB/s at 0.8; one batch of eight peers.
    network_us = 8 * 0.5 * 3e8 / 80e3
    assert collective_us("all_to_all", 3e8, _fabric(16, 2), LINKS, TRANSPORT) == pytest.approx(
        (5 + 7 + 10) * 2 + network_us
    )


def test_a_send_goes_over_one_link_or_one_gpus_share_of_the_network():
    assert collective_us("send_recv", 3e8, _fabric(8), LINKS, None) == pytest.approx(12 + 2000 + 500)
    # 8 ranks a node share 4 x 25 GB/s: 12.5 each at 0.8; two nodes of one GPU: one port of four.
    assert collective_us("send_recv", 3e8, _fabric(16, 2), LINKS, TRANSPORT) == pytest.approx(
        (5 + 1 + 10) * 2 + 3e8 / 10e3
    )
    assert collective_us("send_recv", 3e8, _fabric(2, 2), LINKS, TRANSPORT) == pytest.approx((5 + 10) * 2 + 3e8 / 20e3)


def test_groups_of_a_cluster_share_its_network():
    cluster = _fabric(16, 2)
    data_parallel = cluster.subgroup(2, 2, groups_per_node=8)
    assert data_parallel.network_gb_s_per_domain == pytest.approx(100 / 8)
    assert collective_us("all_reduce", 1e9, data_parallel, LINKS, TRANSPORT) == pytest.approx(30 * 2 - 10 + 1e9 / 10e3)
    inside = cluster.subgroup(8, 1)
    assert inside.inter is None
    assert inside.description == "nvlink3 (300 GB/s each way)"


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_bandwidths_are_those_of_nccl_tests(kind):
    estimate = estimate_collective(kind, 1e9, _fabric(8))
    assert estimate.algorithm_bandwidth_gb_s == pytest.approx(1 / estimate.time_ms * 1e3)
    factor = {"all_reduce": 1.75, "all_gather": 0.875, "reduce_scatter": 0.875, "all_to_all": 0.875}.get(kind, 1)
    assert estimate.bus_bandwidth_gb_s == pytest.approx(factor * estimate.algorithm_bandwidth_gb_s)
    assert estimate.bus_bandwidth_gb_s < 300  # the nominal rate of the link
    assert collective_ms(kind, 1e9, _fabric(8)) == estimate.time_ms


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("layout", [(2, 1), (8, 1), (16, 2), (1024, 128)])
def test_larger_buffers_never_take_less_time(kind, layout):
    times = [collective_ms(kind, 2.0 ** (power / 3), _fabric(*layout)) for power in range(110)]
    for smaller, larger in pairwise(times):  # floors stand at half-octaves: between them by a hair
        assert larger > 0.995 * smaller


def test_what_was_measured_and_what_is_extrapolated_is_said():
    assert estimate_collective("all_reduce", 1e8, _fabric(8)).basis.startswith("measured: all_reduce on nvlink3")
    tcp = estimate_collective("all_reduce", 1e8, _fabric(16, 2, inter_node="eth100"))
    assert not tcp.measured
    assert "tcp" in tcp.basis
    too_many = estimate_collective("all_reduce", 1e8, _fabric(16384, 2048))
    assert "16384 GPUs" in too_many.basis
    assert "extrapolated by physics" in too_many.basis
    assert not estimate_collective("all_to_all", 1e8, _fabric(16, 2)).measured


def test_kinds_have_other_spellings_and_near_names():
    assert check_kind("AllReduce") == check_kind("all-reduce") == "all_reduce"
    assert check_kind("alltoall") == "all_to_all"
    with pytest.raises(UsageError, match="did you mean all_reduce"):
        check_kind("al_reduce")
    with pytest.raises(UsageError, match="unknown collective"):
        collective_ms("teleport", 1e6, _fabric(8))
    with pytest.raises(UsageError, match="unknown collective"):
        collective_ms("teleport", 1e6, resolve_fabric(device=A100, gpus=1, nodes=1))


def test_a_thousand_gpus_cost_no_more_to_predict_than_eight():
    import time

    def seconds(gpus, nodes):
        start = time.perf_counter()
        for size in range(200):
            collective_ms("all_reduce", 1e6 + 1e5 * size, _fabric(gpus, nodes))
        return time.perf_counter() - start

    seconds(8, 1)
    assert seconds(1024, 128) < 20 * seconds(8, 1) + 0.5
