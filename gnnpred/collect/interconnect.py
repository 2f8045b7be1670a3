"""What joins this machine's GPUs, and its network ports, as far as NVML and the system tell.

The texts are those that :func:`gnnpred.communication.fabrics.names_from_text` reads; "" where nothing is known.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from gnnpred.collect.gpu_monitor import ask

# nvml.h: enum nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t
_P2P_READ, _P2P_NVLINK, _P2P_OK = 0, 2, 0
_INFINIBAND_FOLDER = Path("/sys/class/infiniband")
_GENERATIONS = (3, 4, 5)  # of PCIe, those that the table of fabrics has


def links_between(nvml: Any, handles: Sequence[Any]) -> str:
    """``nvlink`` (of the GPU's own generation), ``nvlink-bridge``, or ``pcie4`` and ``pcie4 no p2p``; "" for one GPU.

    ``handles`` are NVML's, None where it knows one not.
    """
    if len(handles) < 2 or None in handles:
        return ""
    pairs = list(combinations(range(len(handles)), 2))
    joined = [
        pair for pair in pairs if ask(nvml, "nvmlDeviceGetP2PStatus", *_both(handles, pair), _P2P_NVLINK) == _P2P_OK
    ]
    if joined:
        # a bridge joins two boards; in a cube mesh each GPU has several peers, behind a switch all
        most_peers = max(Counter(gpu for pair in joined for gpu in pair).values())
        return "nvlink-bridge" if most_peers == 1 and len(handles) > 2 else "nvlink"
    generation = ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handles[0])
    if generation is None:
        return ""
    reads = [ask(nvml, "nvmlDeviceGetP2PStatus", *_both(handles, pair), _P2P_READ) for pair in pairs]
    is_staged = None not in reads and any(read != _P2P_OK for read in reads)
    nearest = min(max(generation, _GENERATIONS[0]), _GENERATIONS[-1])
    return f"pcie{nearest}{' no p2p' if is_staged else ''}"


def _both(handles: Sequence[Any], pair: tuple[int, int]) -> tuple[Any, Any]:
    return handles[pair[0]], handles[pair[1]]


def network_ports(folder: Path = _INFINIBAND_FOLDER) -> str:
    """``8x400Gb IB`` or ``2x100Gb RoCE``: this node's active RDMA ports of the highest rate; "" without any."""
    ports: Counter[tuple[int, str]] = Counter()
    for port in sorted(folder.glob("*/ports/*")):
        try:
            state, rate, layer = ((port / name).read_text(encoding="utf-8") for name in ("state", "rate", "link_layer"))
        except OSError:
            continue
        match = re.match(r"(\d+)", rate.strip())
        if match and "ACTIVE" in state:
            ports[int(match[1]), "IB" if "InfiniBand" in layer else "RoCE"] += 1
    if not ports:
        return ""
    (rate_gbit_s, kind), number = max(ports.items())
    return f"{number}x{rate_gbit_s}Gb {kind}"
