"""Links between GPUs: inside a node and between nodes, by name or by the device's default.

The table (``fabrics.json``) holds nominal line rates with a source each; what NCCL reaches of them
is fitted from measurements and lives in ``constants.json`` (:mod:`gnnpred.communication.collectives`).
Nothing is assumed silently: every default that fills a gap is named in ``ClusterFabric.warnings``.
"""

import json
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from math import log
from pathlib import Path
from typing import Any

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import read_table
from gnnpred.hardware import DeviceSpec

BITS_PER_BYTE = 8

# What a node of that kind usually has towards other nodes (vendors' reference systems: DGX-1, DGX-2,
# DGX A100, DGX H100, DGX B200, GB200 NVL72). Used only when --inter-node is not given, with a warning.
_USUAL_INTER_NODE = {
    "nvlink1": (4, "ib100"),
    "nvlink2": (4, "ib100"),
    "nvlink2-nvswitch": (8, "ib100"),
    "nvlink3": (8, "ib200"),
    "nvlink4": (8, "ib400"),
    "nvlink5": (8, "ib400"),
    "nvl72": (4, "ib400"),
    "infinity-fabric": (8, "ib200"),
}
_FALLBACK_INTER_NODE = (1, "eth100")
MAX_PORTS_PER_NODE = 64


@dataclass(frozen=True, kw_only=True)
class IntraNodeFabric:
    """Links between the GPUs of one node. ``one_way_gb_s`` is the nominal rate of one GPU, one direction."""

    name: str
    title: str
    one_way_gb_s: float
    max_gpus_per_node: int
    source: str
    peer_to_peer: bool = True
    pairs_only: bool = False  # bridges join two cards; larger groups go over PCIe
    rail_tree: bool = True  # trees across nodes gain on flat rings (False: NICs hang on shared PCIe switches)
    domain_gpus: int | None = None  # the fabric spans nodes up to this many GPUs (NVL72)
    # Links that join GPUs directly, without a switch: the share of a GPU's links that a group of 2, 3, ... can use.
    group_share: tuple[float, ...] = ()
    like: str = ""  # a user's own link: the fabric whose fitted constants it takes ("" = its own name's)
    efficiency: float | None = None  # a user's own: reached share of the rate, instead of the fitted one
    latency_us: float | None = None  # a user's own: the smallest all-reduce between two GPUs

    @property
    def family(self) -> str:
        """Links that behave alike and stand in for each other where one was not measured."""
        name = self.like or self.name
        if name.startswith(("nvlink", "nvl72")):
            return "nvlink"
        if name == "infinity-fabric":
            return name
        return "pcie" if self.peer_to_peer else "pcie-staged"

    def usable_gb_s(self, gpus: int) -> float:
        """Nominal one-way rate of one GPU inside a group of ``gpus`` on its node, in GB/s."""
        if not self.group_share or gpus < 2:
            return self.one_way_gb_s
        return self.one_way_gb_s * self.group_share[min(gpus, len(self.group_share) + 1) - 2]


@dataclass(frozen=True, kw_only=True)
class InterNodeFabric:
    """One network port type. ``transport`` selects the fitted constants."""

    name: str
    title: str
    gbit_s_per_port: float
    default_ports_per_node: int
    transport: str  # tcp | roce | ib | opa | efa | tcpxo
    source: str
    efficiency: float | None = None  # a user's own: reached share of the rate, instead of the fitted one
    latency_us: float | None = None  # a user's own: one step between nodes
    is_custom: bool = False

    @property
    def gb_s_per_port(self) -> float:
        """Bytes a second and direction of one port, in GB/s."""
        return self.gbit_s_per_port / BITS_PER_BYTE


@dataclass(frozen=True, kw_only=True)
class ClusterFabric:
    """What ``gpus`` ranks on ``nodes`` hosts talk over.

    ``intra`` is the fabric that the group really uses (bridges joining pairs fall back to PCIe for
    larger groups); ``inter`` is None when no network is crossed.
    """

    intra: IntraNodeFabric
    inter: InterNodeFabric | None
    ports_per_node: int
    gpus: int
    nodes: int
    description: str
    warnings: tuple[str, ...] = ()
    network_share: float = 1.0  # of a node's ports: below 1 where several groups of a node use them at once

    @property
    def num_domains(self) -> int:
        """Groups of GPUs that only the network joins: nodes, or racks of a fabric that spans nodes."""
        if self.intra.domain_gpus is None:
            return self.nodes
        return max(1, -(-self.gpus // self.intra.domain_gpus)) if self.nodes > 1 else 1

    @property
    def gpus_per_domain(self) -> int:
        return -(-self.gpus // self.num_domains)

    @property
    def is_custom(self) -> bool:
        """Whether a user's own link takes part."""
        return bool(self.intra.like and self.gpus_per_domain > 1) or bool(self.inter and self.inter.is_custom)

    @property
    def measured_as(self) -> str:
        """Under which name measurements of such groups are kept: the network's transport, or the link."""
        return self.inter.transport if self.inter is not None else self.intra.name

    @property
    def family(self) -> str:
        return "network" if self.inter is not None else self.intra.family

    @property
    def is_switched(self) -> bool:
        """Whether every group size has the same links (not so in cube meshes and across nodes)."""
        return self.inter is None and not self.intra.group_share

    @property
    def network_gb_s_per_domain(self) -> float:
        """Nominal network rate out of one domain, one direction, in GB/s; 0 without a network."""
        if self.inter is None:
            return 0.0
        nodes_per_domain = max(1, self.nodes // self.num_domains)
        return self.inter.gb_s_per_port * self.ports_per_node * nodes_per_domain * self.network_share

    @property
    def network_gb_s_per_gpu(self) -> float:
        """What one GPU can send to another node while the others of its group do the same, in GB/s.

        Its share of the ports, and never more than belong to one GPU (eight ports of an eight-GPU node: one each).
        """
        if self.inter is None:
            return 0.0
        own_ports = max(1.0, self.ports_per_node / self.intra.max_gpus_per_node)
        return min(self.network_gb_s_per_domain / self.gpus_per_domain, self.inter.gb_s_per_port * own_ports)

    def subgroup(self, gpus: int, nodes: int, *, groups_per_node: int = 1) -> "ClusterFabric":
        """The fabric as a group of some of the ranks sees it (``gpus`` in all on ``nodes`` hosts).

        ``groups_per_node`` such groups communicate at the same time and share a node's ports. Data-parallel groups
        of one rank a node beside tensor parallelism over 8 GPUs: ``subgroup(nodes, nodes, groups_per_node=8)``.
        """
        part = replace(self, gpus=gpus, nodes=nodes, network_share=self.network_share / groups_per_node)
        if part.num_domains == 1:  # inside one node, or one rack that joins its nodes itself
            part = replace(part, inter=None, ports_per_node=0)
        return replace(part, description=_describe(part))


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, dict], dict[str, dict]]:
    data = json.loads((files("gnnpred.communication") / "fabrics.json").read_text(encoding="utf-8"))
    return ({row["name"]: row for row in data["intra_node"]}, {row["name"]: row for row in data["inter_node"]})


def intra_node_names() -> tuple[str, ...]:
    """Names that ``--interconnect`` takes (besides ``nvlink`` and ``pcie``: the device's own generation)."""
    return tuple(_table()[0])


def inter_node_names() -> tuple[str, ...]:
    """Names that ``--inter-node`` takes, alone or with a port count (``8xib200``)."""
    return tuple(_table()[1])


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _find(text: str, rows: dict[str, dict], option: str, extra: tuple[str, ...] = ()) -> dict:
    by_key = {_key(name): row for row in rows.values() for name in (row["name"], *row["aliases"])}
    row = by_key.get(_key(text))
    if row is not None:
        return row
    near = get_close_matches(_key(text), [*by_key, *map(_key, extra)], n=3, cutoff=0.4)
    names = list(dict.fromkeys(by_key[key]["name"] if key in by_key else key for key in near))
    hint = f"did you mean {', '.join(names)}?" if names else f"choose one of {', '.join((*extra, *rows))}"
    raise UsageError(f"unknown fabric {text!r} for {option}: {hint}")


def _intra_from_row(row: dict, device: DeviceSpec) -> IntraNodeFabric:
    fields = {key: value for key, value in row.items() if key != "aliases"}
    fields["group_share"] = tuple(row.get("group_share", ()))
    if fields["one_way_gb_s"] is None:
        if device.nvlink_gb_s <= 0:
            raise UsageError(
                f"--interconnect {row['name']} needs GPUs with such links, and {device.name} has none; "
                "use pcie3, pcie4 or pcie5"
            )
        fields["one_way_gb_s"] = device.nvlink_gb_s / 2
    return IntraNodeFabric(**fields)


def find_intra_node(text: str, device: DeviceSpec) -> IntraNodeFabric:
    """The fabric called ``text``; ``nvlink`` and ``pcie`` mean the device's generation.

    Raises UsageError with the nearest names.
    """
    rows = _table()[0]
    key = _key(text)
    if key in ("pcie", "pci"):
        return _pcie_of(device)
    if key in ("nvlink", "nvswitch"):
        if device.nvlink_gb_s <= 0:
            raise UsageError(f"--interconnect {text} does not fit {device.name}, which has no NVLink; use pcie")
        return _nvlink_of(device)
    fabric = _intra_from_row(_find(text, rows, "--interconnect", ("nvlink", "pcie")), device)
    own = default_intra_node(device)
    return own if own.name == fabric.name else fabric


def find_inter_node(text: str) -> tuple[InterNodeFabric, int]:
    """``(fabric, ports per node)`` of ``ib200``, ``8xib200`` or ``ib200x8``; raises UsageError."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?(.*?)(?:\s*[xX*]\s*(\d+))?\s*", text)
    ports_text = match and (match[1] or match[3])
    name = match[2] if match else text
    row = _find(name, _table()[1], "--inter-node")
    fabric = InterNodeFabric(**{key: value for key, value in row.items() if key != "aliases"})
    ports = int(ports_text) if ports_text else fabric.default_ports_per_node
    if not 1 <= ports <= MAX_PORTS_PER_NODE:
        raise UsageError(f"--inter-node {text!r}: ports per node must be from 1 to {MAX_PORTS_PER_NODE}, got {ports}")
    return fabric, ports


def _is_amd(device: DeviceSpec) -> bool:
    return device.name.upper().startswith("MI") or device.architecture.upper().startswith(("CDNA", "GCN", "RDNA"))


def _is_geforce(device: DeviceSpec) -> bool:
    name = _key(device.name)
    return name.startswith(("gtx", "titan")) or (re.match(r"rtx\d{4}", name) is not None and "ada" not in name)


def _has_soldered_links(device: DeviceSpec) -> bool:
    """Whether the part's links are there by construction (SXM, superchips, OAM) and not an optional bridge."""
    if device.nvlink_gb_s <= 0:
        return False
    name = _key(device.name)
    if "pcie" in name or "nvl1" in name or re.search(r"nvl\d{2,3}gb", name) or _is_geforce(device):
        return False
    if re.match(r"(rtx|quadro|a30|a40|a10|l4)", name) and "sxm" not in name and not name.startswith("a100"):
        return False
    return name not in ("mi100", "mi210")


def _pcie_of(device: DeviceSpec) -> IntraNodeFabric:
    generation = min(5, max(3, int(device.pcie_generation or 3)))
    # GeForce drivers disable peer-to-peer over PCIe since Turing (NCCL then stages through host memory).
    year_of_turing = 2018
    no_p2p = _is_geforce(device) and device.year >= year_of_turing
    return _intra_from_row(_table()[0][f"pcie{generation}{'-no-p2p' if no_p2p else ''}"], device)


def _nvlink_of(device: DeviceSpec) -> IntraNodeFabric:
    rows = _table()[0]
    name = _key(device.name)
    one_way = device.nvlink_gb_s / 2
    if _is_amd(device):
        return _intra_from_row(rows["infinity-fabric"], device)
    if not _has_soldered_links(device):
        return _intra_from_row(rows["nvlink-bridge"], device)
    if name.startswith(("gb200", "gb300")):
        chosen = "nvl72"
    elif "sxm3" in name:
        chosen = "nvlink2-nvswitch"
    else:
        by_capability = {6: "nvlink1", 7: "nvlink2", 8: "nvlink3", 9: "nvlink4", 10: "nvlink5"}
        capability = int(device.compute_capability or 0)
        nearest = min(
            ("nvlink1", "nvlink2", "nvlink3", "nvlink4", "nvlink5"),
            key=lambda n: abs(rows[n]["one_way_gb_s"] - one_way),
        )
        chosen = by_capability.get(capability, nearest)
    return _own_rate(_intra_from_row(rows[chosen], device), device)


def _own_rate(fabric: IntraNodeFabric, device: DeviceSpec) -> IntraNodeFabric:
    """Cut-down parts (A800, H800) have fewer links than the systems of their generation: their own rate counts."""
    one_way = device.nvlink_gb_s / 2
    return replace(fabric, one_way_gb_s=one_way) if 0 < one_way < fabric.one_way_gb_s else fabric


def default_intra_node(device: DeviceSpec) -> IntraNodeFabric:
    """What systems with this GPU usually have: NVLink where it is soldered, else PCIe without bridges."""
    return _nvlink_of(device) if _has_soldered_links(device) else _pcie_of(device)


@dataclass(frozen=True, kw_only=True)
class FabricFile:
    """A user's own links. ``notes``: (link name, what the file leaves out and what was taken instead)."""

    path: str
    intra: IntraNodeFabric | None = None
    inter: InterNodeFabric | None = None
    ports_per_node: int = 1
    notes: tuple[tuple[str, str], ...] = ()


_MAX_NAME_LENGTH = 80
# Field -> (lowest, highest) value, or str for text.
_INTRA_FIELDS = {
    "name": str,
    "rate_gb_s": (1e-3, 1e5),
    "efficiency": (1e-3, 1.0),
    "latency_us": (1e-2, 1e6),
    "gpus_per_node": (1, 1024),
    "like": str,
}
_INTER_FIELDS = {
    "name": str,
    "rate_gbit_s": (1e-3, 1e5),
    "efficiency": (1e-3, 1.0),
    "latency_us": (1e-2, 1e6),
    "ports_per_node": (1, MAX_PORTS_PER_NODE),
    "like": str,
}
# Without `like`, a link inside a node takes the constants of the nearest of these by rate.
_TYPICAL_LINKS = ("pcie3", "pcie4", "pcie5", "nvlink3", "nvlink4", "nvlink5")


def load_fabric_file(path: str | Path) -> FabricFile:
    """The user's own links from a TOML or JSON file; every mistake is one GnnpredError line that names the field.

    Tables ``[intra_node]`` (``rate_gb_s``: one GPU, one direction) and ``[inter_node]`` (``rate_gbit_s``: one port),
    at least one of them; both take ``name``, ``efficiency`` (reached share of the rate), ``latency_us`` and ``like``
    (a known fabric whose constants fill what is left out), the first ``gpus_per_node``, the second ``ports_per_node``.
    """
    path = Path(path)
    tables = _read_fabric_tables(path)
    notes: list[tuple[str, str]] = []
    intra = _intra_from_file(path, tables["intra_node"], notes) if "intra_node" in tables else None
    inter = _inter_from_file(path, tables["inter_node"], notes) if "inter_node" in tables else None
    ports = int(tables.get("inter_node", {}).get("ports_per_node", 1))
    return FabricFile(path=str(path), intra=intra, inter=inter, ports_per_node=ports, notes=tuple(notes))


def _read_fabric_tables(path: Path) -> dict[str, dict]:
    values = read_table(path, "fabric file", too_large=": that is no description of links")
    wanted = "the tables are intra_node and inter_node"
    if not isinstance(values, dict):
        raise GnnpredError(f"fabric file {path} must hold tables, not a {type(values).__name__}: {wanted}")
    if unknown := sorted(set(values) - {"intra_node", "inter_node"}):
        raise GnnpredError(f"fabric file {path}: unknown table or field {unknown[0]!r}; {wanted}")
    if not values:
        raise GnnpredError(f"fabric file {path} is empty: {wanted}, at least one of them")
    for name, fields, rate in (
        ("intra_node", _INTRA_FIELDS, "rate_gb_s"),
        ("inter_node", _INTER_FIELDS, "rate_gbit_s"),
    ):
        if name in values:
            _check_fabric_table(path, name, values[name], fields, rate)
    return values


def _check_fabric_table(path: Path, name: str, table: Any, fields: dict, rate: str) -> None:
    if not isinstance(table, dict):
        raise GnnpredError(f"fabric file {path}: {name} must be a table, got {type(table).__name__}")
    if unknown := sorted(set(table) - set(fields)):
        near = get_close_matches(unknown[0], fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(fields)}"
        raise GnnpredError(f"fabric file {path}: unknown field {name}.{unknown[0]}: {hint}")
    if rate not in table:
        raise GnnpredError(f"fabric file {path}: {name}.{rate} is missing")
    for key, value in table.items():
        where = f"fabric file {path}: {name}.{key}"
        if fields[key] is str:
            if (
                not isinstance(value, str)
                or not value.strip()
                or len(value) > _MAX_NAME_LENGTH
                or not value.isprintable()
            ):
                raise GnnpredError(
                    f"{where} must be a text of 1 to {_MAX_NAME_LENGTH} characters, got {str(value)[:40]!r}"
                )
            continue
        low, high = fields[key]
        whole = isinstance(low, int)
        right_type = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not right_type or not low <= value <= high:
            number = "a whole number" if whole else "a number"
            raise GnnpredError(f"{where} must be {number} from {low:g} to {high:g}, got {str(value)[:40]}")


def _like(path: Path, table: dict, rows: dict[str, dict], name: str) -> dict:
    """The known fabric that a table of a fabric file names in ``like``."""
    try:
        return _find(table["like"], rows, f"{name}.like")
    except UsageError as error:
        raise GnnpredError(f"fabric file {path}: {error}") from error


def _assumed(path: Path, name: str, table: dict, source: str) -> list[tuple[str, str]]:
    """What is said of constants that a fabric file leaves open."""
    missing = [field for field in ("efficiency", "latency_us") if field not in table]
    return [(name, f"fabric file {path}: {name} has no {' and '.join(missing)}: {source}")] if missing else []


def _intra_from_file(path: Path, table: dict, notes: list[tuple[str, str]]) -> IntraNodeFabric:
    rows = _table()[0]
    rate = float(table["rate_gb_s"])
    name = table.get("name", "own link")
    if "like" in table:
        base = _like(path, table, rows, "intra_node")
    else:
        base = min((rows[n] for n in _TYPICAL_LINKS), key=lambda row: abs(log(row["one_way_gb_s"] / rate)))
    notes += _assumed(path, name, table, f"as on {base['name']}")
    return IntraNodeFabric(
        name=name,
        title=f"{name} ({path})",
        one_way_gb_s=rate,
        max_gpus_per_node=int(table.get("gpus_per_node", base["max_gpus_per_node"])),
        source=f"fabric file {path}",
        peer_to_peer=base["peer_to_peer"],
        rail_tree=base.get("rail_tree", True),
        like=base["name"],
        efficiency=table.get("efficiency"),
        latency_us=table.get("latency_us"),
    )


def _inter_from_file(path: Path, table: dict, notes: list[tuple[str, str]]) -> InterNodeFabric:
    name = table.get("name", "own network")
    transport, like = "tcp", "plain TCP"
    if "like" in table:
        known = {row["transport"]: row for row in _table()[1].values()}
        row = known.get(table["like"].lower()) or _like(path, table, _table()[1], "inter_node")
        transport = like = row["transport"]
    notes += _assumed(path, name, table, f"as over {like}")
    return InterNodeFabric(
        name=name,
        title=f"{name} ({path})",
        gbit_s_per_port=float(table["rate_gbit_s"]),
        default_ports_per_node=int(table.get("ports_per_node", 1)),
        transport=transport,
        source=f"fabric file {path}",
        efficiency=table.get("efficiency"),
        latency_us=table.get("latency_us"),
        is_custom=True,
    )


def resolve_fabric(
    *,
    device: DeviceSpec,
    gpus: int,
    nodes: int,
    interconnect: str = "",
    inter_node: str = "",
    custom: FabricFile | None = None,
) -> ClusterFabric:
    """The links of a job; defaults are named in ``warnings``. Raises UsageError for unknown names.

    ``custom`` (:func:`load_fabric_file`) holds the user's own links; naming the same link as well is an error.
    """
    warnings: list[str] = []
    if custom is not None:
        for name, given, option in (
            ("[intra_node]", custom.intra and interconnect, "--interconnect"),
            ("[inter_node]", custom.inter and inter_node, "--inter-node"),
        ):
            if given:
                raise UsageError(f"{option} and {name} of --fabric-file {custom.path} exclude each other: keep one")
    if custom is not None and custom.intra is not None:
        intra = custom.intra
    elif interconnect:
        intra = find_intra_node(interconnect, device)
    else:
        intra = default_intra_node(device)
        if gpus > nodes:
            bridge = " (NVLink bridges not assumed)" if device.nvlink_gb_s > 0 and intra.name.startswith("pcie") else ""
            warnings.append(
                f"interconnect not given: assumed {intra.name} ({intra.title}){bridge}, the usual one of "
                f"{device.name}; set --interconnect"
            )
    gpus_per_node = -(-gpus // nodes)
    if gpus > 1 and "nvlink" in intra.name and not intra.like and device.nvlink_gb_s <= 0:
        warnings.append(f"{device.name} has no NVLink; predicted with {intra.name} as asked")
    limit = intra.domain_gpus if nodes == 1 and intra.domain_gpus else intra.max_gpus_per_node
    if gpus_per_node > limit:
        warnings.append(
            f"{gpus_per_node} GPUs in one node are more than {intra.name} systems hold ({limit}): predicted as if one "
            "node held them; set --nodes"
        )
    if intra.pairs_only and gpus_per_node > 2:
        pairs, intra = intra, _pcie_of(device)
        warnings.append(
            f"{pairs.name} joins pairs only: a group of {gpus_per_node} GPUs in a node talks over {intra.name}"
        )
    if custom is not None and custom.inter is not None:
        inter, ports = (custom.inter, custom.ports_per_node) if nodes > 1 else (None, 0)
    else:
        inter, ports = _resolve_inter_node(inter_node, intra, nodes, warnings)
    if custom is not None and gpus > 1:
        links = [link for link in (intra if gpus > nodes else None, inter) if link is not None]
        warnings += [note for name, note in custom.notes if any(link.name == name for link in links)]
    probe = ClusterFabric(
        intra=intra, inter=inter, ports_per_node=ports, gpus=gpus, nodes=nodes, description="", warnings=tuple(warnings)
    )
    if probe.num_domains == 1 and nodes > 1:  # the rack's own fabric joins the nodes: no network is crossed
        probe = replace(
            probe, inter=None, ports_per_node=0, warnings=tuple(w for w in warnings if "inter-node" not in w)
        )
    return replace(probe, description=_describe(probe))


def _resolve_inter_node(
    text: str, intra: IntraNodeFabric, nodes: int, warnings: list[str]
) -> tuple[InterNodeFabric | None, int]:
    if text:
        inter, ports = find_inter_node(text)  # checked even on one node: a typo should not pass
        if nodes == 1:
            return None, 0
        return inter, ports
    if nodes == 1:
        return None, 0
    ports, name = _USUAL_INTER_NODE.get(intra.name, _FALLBACK_INTER_NODE)
    inter, _ = find_inter_node(name)
    warnings.append(
        f"inter-node network not given: assumed {ports}x{name} ({inter.title}, ports per node: {ports}); "
        "set --inter-node"
    )
    return inter, ports


def _describe(fabric: ClusterFabric) -> str:
    intra = f"{fabric.intra.name} ({fabric.intra.one_way_gb_s:g} GB/s each way)"
    if fabric.gpus == 1:
        return "single GPU"
    if fabric.inter is None:
        return intra
    network = f"{fabric.ports_per_node}x{fabric.inter.name} per node"
    return network if fabric.gpus == fabric.nodes else f"{intra} + {network}"


_NETWORK_PATTERNS = (
    (r"omni-?path", "opa100"),
    (r"tcpxo", "tcpxo200"),
    (r"efa", "efa{rate}"),
    (r"roce|rdma", "roce{rate}"),
    (r"\bib\s*\d*|infiniband|\bedr\b|\bhdr\b|\bndr\b|\bfdr\b", "ib{rate}"),
    (r"ethernet|gbe\b", "eth{rate}"),
)


def names_from_text(text: str) -> tuple[str, str]:
    """``(interconnect, inter-node)`` names out of a free-text description, "" where it says nothing.

    For tables of measured runs (``nvlink``, ``pcie``, ``ib200``, ``nvswitch + 8x200Gb IB HDR/node``).
    """
    lowered = text.lower()
    intra = ""
    for pattern, name in (
        (r"nvl72", "nvl72"),
        (r"bridge|pairwise", "nvlink-bridge"),
        (r"nvlink\s*5", "nvlink5"),
        (r"nvlink\s*4", "nvlink4"),
        (r"nvlink\s*3", "nvlink3"),
        (r"nvlink\s*2", "nvlink2"),
        (r"nvlink\s*1", "nvlink1"),
        (r"nvlink|nvswitch", "nvlink"),
        (r"infinity|xgmi", "infinity-fabric"),
    ):
        if re.search(pattern, lowered):
            intra = name
            break
    if not intra and (match := re.search(r"pcie?\s*-?(?:gen)?\s*([345])?", lowered)):
        suffix = "-no-p2p" if match[1] and re.search(r"no[ -]?p2p", lowered) else ""
        intra = f"pcie{match[1] or ''}{suffix}"
    # "3200Gb/s RoCE or IB per node": a sum over the eight ports of an HGX node
    if total := re.search(r"(\d{4})\s*gb/s\s*(roce|ib)\b.*per node", lowered):
        name = f"{total[2]}{int(total[1]) // 8}"
        return intra, f"8x{name}" if name in _table()[1] else ""
    for pattern, template in _NETWORK_PATTERNS:
        if not re.search(pattern, lowered):
            continue
        rate = re.search(r"(?:ib|eth|roce|efa)?\s*(\d{2,3})\s*(?:gb|g\b|$)|(?:ib|eth|roce|efa)(\d{2,3})", lowered)
        generation = next((r for n, r in (("fdr", 56), ("edr", 100), ("hdr", 200), ("ndr", 400)) if n in lowered), None)
        number = int(rate[1] or rate[2]) if rate else generation
        name = template.format(rate=number)
        if name not in _table()[1]:
            return intra, ""
        found = re.search(r"(\d+)\s*x\s*\d{2,3}\s*gb", lowered) or re.search(r"x\s*(\d+)\s*/\s*node", lowered)
        ports = int(found[1]) if found else 0
        if not ports and "per gpu" in lowered:
            ports = 4 if intra == "nvl72" else 8
        return intra, f"{ports}x{name}" if 0 < ports <= MAX_PORTS_PER_NODE else name
    return intra, ""
