"""Links between GPUs as NVML tells them, in words that the table of fabrics reads."""

from types import SimpleNamespace

import pytest

from gnnpred.collect.interconnect import links_between, network_ports
from gnnpred.communication.fabrics import names_from_text


class NVMLError(Exception):
    pass


def nvml(joined, *, generation=4, has_p2p=True):
    """NVML of a machine in which the pairs ``joined`` have NVLink."""

    def p2p_status(a, b, what):
        if what == 2:
            return 0 if (a, b) in joined else 5
        return 0 if has_p2p else 1

    def pcie_generation(_handle):
        if generation is None:
            raise NVMLError
        return generation

    return SimpleNamespace(
        NVMLError=NVMLError, nvmlDeviceGetP2PStatus=p2p_status, nvmlDeviceGetMaxPcieLinkGeneration=pcie_generation
    )


CUBE = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("machine", "num_gpus", "text", "name"),
    [
        (nvml([(0, 1)]), 2, "nvlink", "nvlink"),
        (nvml(CUBE), 8, "nvlink", "nvlink"),
        (nvml([(0, 1), (2, 3)]), 4, "nvlink-bridge", "nvlink-bridge"),
        (nvml([]), 4, "pcie4", "pcie4"),
        (nvml([], generation=6), 2, "pcie5", "pcie5"),
        (nvml([], has_p2p=False), 2, "pcie4 no p2p", "pcie4-no-p2p"),
        (nvml([], generation=None), 2, "", ""),
        (nvml([(0, 1)]), 1, "", ""),
    ],
)
def test_links_have_names_of_the_table(machine, num_gpus, text, name):
    assert links_between(machine, range(num_gpus)) == text
    assert names_from_text(text) == (name, "")


def test_a_gpu_that_nvml_does_not_know_leaves_the_links_open():
    assert links_between(nvml([(0, 1)]), [0, None]) == ""


def add_port(folder, device, *, rate, layer="InfiniBand", state="4: ACTIVE"):
    port = folder / device / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("state", state), ("rate", rate), ("link_layer", layer)):
        (port / name).write_text(text + "\n")


def test_ports_that_are_up_and_fastest_are_the_network(tmp_path):
    for i in range(8):
        add_port(tmp_path, f"mlx5_{i}", rate="400 Gb/sec (4X NDR)")
    add_port(tmp_path, "mlx5_8", rate="100 Gb/sec (4X EDR)", layer="Ethernet")
    add_port(tmp_path, "mlx5_9", rate="400 Gb/sec (4X NDR)", state="1: DOWN")
    assert network_ports(tmp_path) == "8x400Gb IB"
    assert names_from_text("nvlink + 8x400Gb IB") == ("nvlink", "8xib400")
    assert network_ports(tmp_path / "nothing") == ""


def test_ethernet_ports_with_rdma_are_roce(tmp_path):
    add_port(tmp_path, "mlx5_0", rate="100 Gb/sec (4X EDR)", layer="Ethernet")
    assert network_ports(tmp_path) == "1x100Gb RoCE"
    assert names_from_text("1x100Gb RoCE") == ("", "1xroce100")
