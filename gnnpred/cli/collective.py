"""gnnpred collective: how long one collective operation takes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnpred.cli import options as opt
from gnnpred.errors import UsageError

if TYPE_CHECKING:
    from gnnpred.communication.collectives import CollectiveEstimate
    from gnnpred.communication.fabrics import ClusterFabric

MAX_SWEEP_SIZES = 64
MAX_GPUS = 1_000_000


def collective(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce or send_recv.",
        ),
    ],
    size: Annotated[
        str | None,
        typer.Option("--bytes", metavar="SIZE", help="The whole buffer, as nccl-tests counts it: 100MB, 25MiB, 1e8."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="LOW:HIGH", help="A table over sizes, doubling: 1MB:1GB.")
    ] = None,
    gpus: opt.Gpus = 8,
    nodes: opt.Nodes = 1,
    device: opt.Device = None,
    device_file: opt.DeviceFile = None,
    interconnect: opt.Interconnect = "",
    inter_node: opt.InterNode = "",
    fabric_file: Annotated[
        Path | None, typer.Option("--fabric-file", metavar="FILE", help="Links of your own, as TOML or JSON.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="fp32, fp16, bf16, int8, fp8 ...")] = "",
    nccl_version: Annotated[str, typer.Option("--nccl-version", metavar="X.Y", help="Default: a recent one.")] = "",
    as_json: opt.AsJson = False,
) -> None:
    """Predict the time and bandwidths of one collective operation."""
    from gnnpred.communication.collectives import check_kind, estimate_collective
    from gnnpred.communication.fabrics import load_fabric_file, resolve_fabric
    from gnnpred.communication.residual import nccl_minor

    kind = check_kind(kind)
    dtype = _dtype_of(dtype)
    if nccl_version and nccl_minor(nccl_version) is None:
        raise UsageError(f"--nccl-version {nccl_version!r} is no version of NCCL 2: write it as in 2.27")
    sizes = _sizes_of(size, sweep)
    if not 2 <= gpus <= MAX_GPUS:
        raise UsageError(f"a collective needs from 2 to {MAX_GPUS:,} GPUs, got --gpus {gpus}")
    if nodes < 1 or gpus % nodes:
        raise UsageError(f"--gpus {gpus} is the total and must be divisible by --nodes {nodes}")
    spec = opt.device_of(device, device_file)
    custom = load_fabric_file(fabric_file) if fabric_file is not None else None
    fabric = resolve_fabric(
        device=spec, gpus=gpus, nodes=nodes, interconnect=interconnect, inter_node=inter_node, custom=custom
    )
    estimates = [
        estimate_collective(kind, num_bytes, fabric, dtype=dtype, nccl_version=nccl_version) for num_bytes in sizes
    ]
    warnings = list(fabric.warnings)
    if device is None and device_file is None:
        warnings.insert(0, f"device not given: assumed {spec.name}; set --device")
    if as_json:
        import json

        typer.echo(json.dumps(_as_dict(estimates, fabric, spec.name, warnings, is_sweep=sweep is not None), indent=1))
        return
    _print(estimates, fabric, spec.name, warnings)


_DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int32", "int64")
_OTHER_NAMES = {
    "float": "fp32", "float32": "fp32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16", "double": "fp64",
    "float64": "fp64",
}  # fmt: skip


def _dtype_of(text: str) -> str:
    name = text.strip().lower()
    name = _OTHER_NAMES.get(name, name)
    if name and name not in _DTYPES:
        raise UsageError(f"unknown type {text!r} for --dtype: choose one of {', '.join(_DTYPES)}")
    return name


def _sizes_of(size: str | None, sweep: str | None) -> list[float]:
    from gnnpred.units import parse_bytes

    if (size is None) == (sweep is None):
        raise UsageError("give --bytes SIZE or --sweep LOW:HIGH, one of them")
    if size is not None:
        return [parse_bytes(size)]
    low_text, colon, high_text = sweep.partition(":")
    if not colon:
        raise UsageError(f"--sweep {sweep!r}: write LOW:HIGH, as in 1MB:1GB")
    low, high = parse_bytes(low_text, "--sweep"), parse_bytes(high_text, "--sweep")
    if low > high:
        raise UsageError(f"--sweep {sweep!r}: the first size must not be above the second")
    sizes = [low]
    while sizes[-1] * 2 <= high and len(sizes) < MAX_SWEEP_SIZES:
        sizes.append(sizes[-1] * 2)
    return sizes


def _as_dict(
    estimates: "list[CollectiveEstimate]", fabric: "ClusterFabric", device: str, warnings: list[str], *, is_sweep: bool
) -> dict:
    rows = [
        {
            "bytes": one.num_bytes,
            "time_ms": one.time_ms,
            "algorithm_bandwidth_gb_s": one.algorithm_bandwidth_gb_s,
            "bus_bandwidth_gb_s": one.bus_bandwidth_gb_s,
            "physics_ms": one.physics_ms,
            "measured": one.measured,
            "basis": one.basis,
        }
        for one in estimates
    ]
    first = estimates[0]
    about = {
        "kind": first.kind,
        "gpus": fabric.gpus,
        "nodes": fabric.nodes,
        "device": device,
        "dtype": first.dtype,
        "fabric": fabric.description,
    }
    return {**about, **({"sizes": rows} if is_sweep else rows[0]), "warnings": warnings}


def _print(estimates: "list[CollectiveEstimate]", fabric: "ClusterFabric", device: str, warnings: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from gnnpred.cli.render import console, milliseconds, plain, scaled

    first = estimates[0]
    out = console()
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column()
    of = f"of {scaled(first.num_bytes)}B" if len(estimates) == 1 else f"of {len(estimates)} sizes"
    spread = f" on {fabric.nodes} nodes" if fabric.nodes > 1 else ""
    dtype = f", {plain(first.dtype)}" if first.dtype else ""
    head.add_row(first.kind, f"{of}{dtype}, {fabric.gpus} x {plain(device)}{spread}")
    if len(estimates) == 1:
        head.add_row("time", Text(milliseconds(first.time_ms), style="bold"))
        head.add_row("algorithm bandwidth", f"{first.algorithm_bandwidth_gb_s:.4g} GB/s")
        head.add_row("bus bandwidth", f"{first.bus_bandwidth_gb_s:.4g} GB/s")
    head.add_row("fabric", plain(fabric.description))
    if len(estimates) == 1:
        head.add_row("basis", plain(first.basis))
    out.print(head)
    if len(estimates) > 1:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("size", "time", "algorithm GB/s", "bus GB/s", "basis"):
            table.add_column(name, justify="left" if name == "basis" else "right", no_wrap=name != "basis")
        for one in estimates:
            table.add_row(
                f"{scaled(one.num_bytes)}B",
                milliseconds(one.time_ms),
                f"{one.algorithm_bandwidth_gb_s:.4g}",
                f"{one.bus_bandwidth_gb_s:.4g}",
                "measured" if one.measured else "extrapolated by physics",
            )
        out.print()
        out.print(table)
        for reason in dict.fromkeys(one.basis for one in estimates):
            out.print(Text(plain(reason), style="dim"))
    for warning in warnings:
        out.print(Text(f"! {plain(warning)}", style="yellow"))
