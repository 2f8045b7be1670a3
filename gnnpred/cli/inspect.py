"""gnnpred inspect: the canonical graph of a step as a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnpred.cli import options as opt

if TYPE_CHECKING:
    from gnnpred.prediction import OpPrediction, Prediction

_FORMATS = ("table", "json", "csv")
_COLUMNS = ("op_idx", "kind", "name", "phase", "component", "dtype", "input_shapes", "output_shapes", "flops",
            "bytes_moved", "cost_state", "repeats", "predicted_ms")  # fmt: skip


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The model; weights are not needed.")],
    device: opt.Device = None,
    device_file: opt.DeviceFile = None,
    batch_size: opt.BatchSize = None,
    precision: opt.PrecisionName = "fp32",
    phase: opt.PhaseName = "train",
    optimizer: opt.Optimizer = "sgd",
    memory_format: opt.MemoryFormat = "nchw",
    compiled: opt.Compile = False,
    framework_version: opt.FrameworkVersion = "",
    host_os: opt.HostSystem = "linux",
    attention: opt.Attention = "auto",
    activation_checkpointing: opt.ActivationCheckpointing = "none",
    dim: opt.Dims = None,
    checkpoint: opt.CheckpointName = None,
    top: Annotated[int | None, typer.Option("--top", min=1, help="Only the N slowest ops, slowest first.")] = None,
    output_format: Annotated[
        str, typer.Option("--format", metavar="|".join(_FORMATS), help="csv and json hold full precision.")
    ] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Show what a step runs: every op with shapes, type, flops, bytes and predicted ms."""
    from gnnpred.errors import UsageError
    from gnnpred.job import JobSpec, Precision

    output_format = "json" if as_json else output_format
    if output_format not in _FORMATS:
        raise UsageError(f"unknown format {output_format!r}: choose one of {', '.join(_FORMATS)}")
    job = JobSpec(
        device=opt.device_of(device, device_file),
        precision=Precision.parse(precision),
        batch_size=batch_size,
        phase=opt.phase_of(phase),
        optimizer=optimizer,
        memory_format=memory_format,
        compiler=opt.compiler_of("eager", compiled=compiled),
        framework_version=framework_version,
        host_os=host_os,
        attention=attention,
        activation_checkpointing=activation_checkpointing,
    )
    dims = opt.dims_of(dim)
    from gnnpred.predictor import predict

    prediction = predict(model, job, dims=dims, checkpoint=checkpoint)
    ops = prediction.ops if top is None else prediction.slowest_ops(top)
    {"table": _print_table, "json": _print_json, "csv": _print_csv}[output_format](prediction, ops)


def _print_table(prediction: "Prediction", ops: "tuple[OpPrediction, ...]") -> None:
    from rich.table import Table

    from gnnpred.cli.render import console, milliseconds, plain, scaled, shape_text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("#", "op", "phase", "part", "type", "inputs", "output", "flops", "bytes", "ms", "name"):
        table.add_column(name, justify="right" if name in ("#", "flops", "bytes", "ms") else "left", overflow="fold")
    for op in ops:
        table.add_row(
            str(op.op_idx),
            op.kind + (f" x{op.repeats}" if op.repeats > 1 else "") + (" ?" if op.cost_state == "unsupported" else ""),
            str(op.phase),
            str(op.component).replace("_", " "),
            str(op.dtype or ""),
            " ".join(shape_text(shape) for shape in op.input_shapes[:3]),
            " ".join(shape_text(shape) for shape in op.output_shapes[:2]),
            scaled(op.flops) if op.flops else "",
            scaled(op.bytes_moved) if op.bytes_moved else "",
            f"{op.predicted_ms:.4f}" if op.predicted_ms else "",
            plain(op.name),
        )
    out = console(min_width=180)
    out.print(table)
    job = prediction.job
    out.print(
        f"\n{len(prediction.ops):,} ops; {milliseconds(prediction.compute_time_ms)} on {job.device.name}, "
        f"batch {job.batch_size}, {job.precision}, {job.phase}; coverage {prediction.coverage:.1%}"
        + (" (? = no cost formula)" if prediction.unsupported_ops else "")
    )
    for warning in prediction.warnings:
        out.print(f"! {plain(warning)}")


def _row(op: "OpPrediction") -> dict[str, object]:
    return {name: getattr(op, name) for name in _COLUMNS}


def _print_json(prediction: "Prediction", ops: "tuple[OpPrediction, ...]") -> None:
    import json

    typer.echo(json.dumps({**prediction.as_dict(), "ops": [_row(op) for op in ops]}, indent=1))


def _print_csv(prediction: "Prediction", ops: "tuple[OpPrediction, ...]") -> None:
    import csv
    import sys

    from gnnpred.cli.render import shape_text

    writer = csv.DictWriter(sys.stdout, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for op in ops:
        row = _row(op)
        for name in ("input_shapes", "output_shapes"):
            row[name] = " ".join(shape_text(shape) for shape in getattr(op, name))
        writer.writerow(row)
