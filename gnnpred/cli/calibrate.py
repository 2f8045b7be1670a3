"""gnnpred calibrate: adapt a checkpoint to a user's own machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnpred.cli.options import AsJson, CheckpointName, DeviceFiles, own_devices

if TYPE_CHECKING:
    from gnnpred.calibration_runs import CalibrationGain, CalibrationReport


def calibrate(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="Measured runs (5 to 50), as `score` reads them.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The calibrated checkpoint to write.")],
    device_file: DeviceFiles = None,
    checkpoint: CheckpointName = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a calibrated checkpoint that is in FOLDER.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Adapt a checkpoint to your machine from a few measured runs; use it with --checkpoint FOLDER."""
    from gnnpred.calibration_runs import calibrate as calibrate_checkpoint

    report = calibrate_checkpoint(
        runs, out, checkpoint=checkpoint, devices=own_devices(device_file), overwrite=overwrite
    )
    if as_json:
        import json

        typer.echo(json.dumps(report.as_dict(), indent=1))
        return
    _print_report(report)


def _print_report(report: "CalibrationReport") -> None:
    from gnnpred.cli.render import console, plain

    out = console()
    for device in report.devices:
        runs, models = _count(device.num_runs, "run"), _count(device.num_models, "model")
        unseen = "" if device.was_trained_on else "; training has not seen this GPU"
        out.print(f"{device.device}: {runs} of {models}, predictions x {device.median_factor:.3g} (median){unseen}")
        for used in device.outliers:
            out.print(
                f"! line {used.row.line} ({plain(used.row.run.onnx)}): measured {used.row.run.measured_ms:.4g} ms, "
                f"predicted {used.row.predicted_ms:.4g} ms; it disagrees with the other runs and hardly counts"
            )
    if report.kept_devices:
        out.print(f"kept from the earlier calibration: {', '.join(report.kept_devices)}")
    for reason, count in report.left_out.items():
        out.print(f"! {count} of {report.num_rows} rows not used: {plain(reason)}")
    if report.gain:
        out.print()
        print_gain(report.gain)
    else:
        out.print("! all runs are of one model: how much this helps for other models cannot be told")
    out.print(f"\nwritten: {plain(str(report.folder))} (use it with --checkpoint)")


def print_gain(gain: "CalibrationGain") -> None:
    """The table of errors before and after."""
    from rich.table import Table

    from gnnpred.cli.render import console

    out = console()
    table = Table(
        box=None, pad_edge=False, header_style="bold", title_justify="left",
        title=f"calibration, {gain.num_folds}-fold cross-validation by model",
    )  # fmt: skip
    for name, justify in (("GPU", "left"), ("precision", "left"), ("", "left"), ("n", "right"), ("MAPE %", "right"),
                          ("median %", "right"), ("p90 %", "right"), ("bias %", "right")):  # fmt: skip
        table.add_column(name, justify=justify)
    for key, before, after in (*gain.groups, ({"gpu": "all", "precision": ""}, gain.before, gain.after)):
        style = "bold" if key["gpu"] == "all" else ""
        table.add_row(key["gpu"], key["precision"], "before", *figures(before), style=style)
        table.add_row("", "", "after", *figures(after), style=style)
    out.print(table)
    out.print(
        f"\n90 % interval holds {gain.coverage_before:.0%} of the measured times before, "
        f"{gain.coverage_after:.0%} after"
    )
    if gain.num_unchanged:
        out.print(f"! {gain.num_unchanged} rows have no run of another model on their GPU: before and after are equal")


def figures(summary) -> tuple[str, ...]:
    """n, MAPE, median, p90 and bias of an ErrorSummary as texts."""
    return (
        str(summary.n),
        f"{summary.mape_pct:.1f}",
        f"{summary.median_pct:.1f}",
        f"{summary.p90_pct:.1f}",
        f"{summary.bias_pct:+.1f}",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
