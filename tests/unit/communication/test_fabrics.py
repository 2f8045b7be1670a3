"""Fabrics: names, defaults, what is assumed and said."""

import pytest

from gnnpred.communication.collectives import load_constants
from gnnpred.communication.fabrics import (
    default_intra_node,
    find_inter_node,
    find_intra_node,
    inter_node_names,
    intra_node_names,
    names_from_text,
    resolve_fabric,
)
from gnnpred.errors import UsageError
from gnnpred.hardware import find_device, list_devices


@pytest.mark.parametrize(
    ("device", "fabric"),
    [
        ("V100-SXM2-16GB", "nvlink2"),
        ("A100-SXM4-80GB", "nvlink3"),
        ("A100-PCIe-80GB", "pcie4"),
        ("H100-SXM5-80GB", "nvlink4"),
        ("H100-PCIe-80GB", "pcie5"),
        ("B200-SXM-180GB", "nvlink5"),
        ("GB200-186GB", "nvl72"),
        ("RTX3090", "pcie4-no-p2p"),
        ("RTX6000Ada", "pcie4"),
        ("GTX1080Ti", "pcie3"),
        ("MI300X", "infinity-fabric"),
    ],
)
def test_the_default_link_inside_a_node_follows_the_device(device, fabric):
    assert default_intra_node(find_device(device)).name == fabric


def test_every_device_has_a_default_link_with_fitted_constants():
    links = load_constants()["links"]
    for device in list_devices():
        fabric = default_intra_node(device)
        assert fabric.name in links, device.name
        assert fabric.one_way_gb_s > 0


def test_every_named_fabric_resolves_and_has_constants():
    constants = load_constants()
    device = find_device("A100-SXM4-80GB")
    for name in intra_node_names():
        assert find_intra_node(name, device).name in constants["links"]
    for name in inter_node_names():
        fabric, ports = find_inter_node(name)
        assert fabric.transport in constants["transports"]
        assert ports >= 1


def test_a_cut_down_part_is_not_given_its_generations_full_rate():
    assert default_intra_node(find_device("A800-SXM4-80GB")).one_way_gb_s == 200
    assert find_intra_node("nvlink3", find_device("A800-SXM4-80GB")).one_way_gb_s == 200


def test_an_unknown_fabric_is_refused_with_near_names():
    device = find_device("A100-SXM4-80GB")
    with pytest.raises(UsageError, match=r"--interconnect.*did you mean.*nvlink"):
        find_intra_node("nvlnk3", device)
    with pytest.raises(UsageError, match=r"--inter-node.*did you mean.*ib200"):
        find_inter_node("ib2000")
    with pytest.raises(UsageError, match="has no NVLink"):
        find_intra_node("nvlink", find_device("T4"))


@pytest.mark.parametrize(
    ("text", "name", "ports"), [("ib200", "ib200", 1), ("8xib200", "ib200", 8), ("HDR x4", "ib200", 4)]
)
def test_ports_per_node_may_stand_before_or_after_the_network(text, name, ports):
    fabric, found_ports = find_inter_node(text)
    assert (fabric.name, found_ports) == (name, ports)


def test_an_impossible_number_of_ports_is_refused():
    with pytest.raises(UsageError, match="ports per node"):
        find_inter_node("0xib200")
    with pytest.raises(UsageError, match="ports per node"):
        find_inter_node("900xib200")


def test_what_is_assumed_is_said():
    device = find_device("V100-SXM2-16GB")
    warnings = resolve_fabric(device=device, gpus=16, nodes=2).warnings
    assert any("interconnect not given: assumed nvlink2" in warning for warning in warnings)
    assert any("inter-node network not given: assumed 4xib100" in warning for warning in warnings)
    given = resolve_fabric(device=device, gpus=16, nodes=2, interconnect="nvlink2", inter_node="4xib100")
    assert given.warnings == ()
    assert given.description == "nvlink2 (150 GB/s each way) + 4xib100 per node"


def test_a_single_gpu_needs_no_fabric_and_no_warning():
    fabric = resolve_fabric(device=find_device("T4"), gpus=1, nodes=1)
    assert fabric.warnings == ()
    assert fabric.description == "single GPU"


def test_more_gpus_in_a_node_than_systems_hold_is_said():
    device = find_device("A100-SXM4-80GB")
    assert any("--nodes" in w for w in resolve_fabric(device=device, gpus=16, nodes=1, interconnect="nvlink3").warnings)
    assert not resolve_fabric(device=device, gpus=8, nodes=1, interconnect="nvlink3").warnings
    assert not resolve_fabric(device=find_device("GB200-186GB"), gpus=72, nodes=18, interconnect="nvl72").warnings


def test_the_rack_fabric_joins_nodes_without_a_network_up_to_72_gpus():
    device = find_device("GB200-186GB")
    rack = resolve_fabric(device=device, gpus=72, nodes=18, interconnect="nvl72")
    assert rack.inter is None
    assert rack.num_domains == 1
    two_racks = resolve_fabric(device=device, gpus=144, nodes=36, interconnect="nvl72", inter_node="4xib400")
    assert two_racks.num_domains == 2
    assert two_racks.network_gb_s_per_domain == 50 * 4 * 18


def test_bridges_join_pairs_only():
    device = find_device("RTX3090")
    pair = resolve_fabric(device=device, gpus=2, nodes=1, interconnect="nvlink-bridge")
    assert pair.intra.name == "nvlink-bridge"
    assert pair.intra.one_way_gb_s == pytest.approx(56.25)
    four = resolve_fabric(device=device, gpus=4, nodes=1, interconnect="nvlink-bridge")
    assert four.intra.name == "pcie4-no-p2p"
    assert any("pairs only" in warning for warning in four.warnings)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ("", "")),
        ("nvlink", ("nvlink", "")),
        ("pcie4, no p2p", ("pcie4-no-p2p", "")),
        ("ib200", ("", "ib200")),
        ("nvswitch + 8x200Gb IB HDR/node", ("nvlink", "8xib200")),
        ("nvlink2 (NV1/NV2 mesh) + 100Gb IB EDR x1/node", ("nvlink2", "1xib100")),
        ("EFA 4x100Gb per node", ("", "4xefa100")),
        ("nvlink4/nvswitch + 400Gb/s RDMA per GPU", ("nvlink4", "8xroce400")),
    ],
)
def test_descriptions_in_tables_are_read(text, names):
    assert names_from_text(text) == names
