"""gnnpred devices: what GPUs are known."""

from dataclasses import asdict
from typing import Annotated

import typer

from gnnpred.cli.options import AsJson


def devices(
    pattern: Annotated[str | None, typer.Argument(help="Show only names and aliases that contain this.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the known GPUs with their peak rates, memory and aliases."""
    from gnnpred.errors import UsageError
    from gnnpred.graph import DType
    from gnnpred.hardware import DEFAULT_DEVICE_NAME, list_devices

    chosen = [
        device
        for device in list_devices()
        if pattern is None or any(pattern.lower() in name.lower() for name in (device.name, *device.aliases))
    ]
    if not chosen:
        raise UsageError(f"no device name contains {pattern!r}: `gnnpred devices` lists all")
    if as_json:
        import json

        typer.echo(json.dumps([asdict(device) for device in chosen], indent=1))
        return
    from rich.table import Table

    from gnnpred.cli.render import console

    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    table.add_column("device")
    table.add_column("architecture")
    for name in ("year", "fp32", "tf32", "fp16", "bf16", "fp8", "memory", "bandwidth"):
        table.add_column(name, justify="right")
    table.add_column("also called")
    for device in chosen:
        table.add_row(
            device.name,
            device.architecture,
            f"{device.year:.0f}",
            f"{device.peak_tflops(DType.FP32):g}",
            _rate(device.tf32_tflops),
            _rate(device.fp16_tensor_tflops),
            _rate(device.bf16_tensor_tflops),
            _rate(device.fp8_tensor_tflops),
            f"{device.memory_gb:g}",
            f"{device.mem_bandwidth_gb_s:g}",
            ", ".join(device.aliases),
        )
    out = console(min_width=150)
    out.print(table)
    out.print(
        f"\n{len(chosen)} devices; dense TFLOP/s with fp32 accumulation (- = no such unit), GB, GB/s. "
        f"Default: {DEFAULT_DEVICE_NAME}."
    )


def _rate(tflops: float | None) -> str:
    return "-" if tflops is None else f"{tflops:g}"
