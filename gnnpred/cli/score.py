"""gnnpred score: the predictor against a user's own measured runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnpred.cli.options import AsJson, CheckpointName, DeviceFiles, own_devices

if TYPE_CHECKING:
    from gnnpred.score import ScoreReport

_MAX_PROBLEMS_SHOWN = 10


def score(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="Measured runs, with a column onnx.")],
    device_file: DeviceFiles = None,
    checkpoint: CheckpointName = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the rows with predicted_ms beside them.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Also show the errors after calibrating to these runs, by cross-validation."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with measured runs, by GPU and precision and over all."""
    from gnnpred.errors import GnnpredError
    from gnnpred.predictor import Predictor
    from gnnpred.score import score_runs, write_predictions

    predictor = Predictor(checkpoint)
    gain = None
    if calibrate:
        from gnnpred.calibration_runs import score_with_gain

        report, gain = score_with_gain(runs, predictor=predictor, devices=own_devices(device_file))
    else:
        report = score_runs(runs, predictor=predictor, devices=own_devices(device_file))
    if out is not None:
        write_predictions(report, out)
    if as_json:
        import json

        content = {**report.as_dict(), "calibration": gain.as_dict()} if gain else report.as_dict()
        typer.echo(json.dumps(content, indent=1))
    else:
        _print_report(report)
        if gain:
            from gnnpred.cli.calibrate import print_gain
            from gnnpred.cli.render import console

            console().print()
            print_gain(gain)
    if report.overall is None:
        reason = next(iter(report.problems))
        raise GnnpredError(f"none of the {len(report.rows)} rows of {runs} could be scored; the first reason: {reason}")


def _print_report(report: "ScoreReport") -> None:
    from rich.table import Table

    from gnnpred.cli.calibrate import figures
    from gnnpred.cli.render import console, plain

    out = console()
    if report.overall is not None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("GPU")
        table.add_column("precision")
        for name in ("n", "MAPE %", "median %", "p90 %", "bias %"):
            table.add_column(name, justify="right")
        for key, summary in report.groups:
            table.add_row(key["gpu"], key["precision"], *figures(summary))
        table.add_section()
        table.add_row("all", "", *figures(report.overall), style="bold")
        out.print(table)
        out.print(f"\n90 % interval holds {report.interval_coverage:.0%} of the measured times; {report.checkpoint}")
    scored = report.overall.n if report.overall else 0
    if scored < len(report.rows):
        out.print(f"\n{len(report.rows) - scored} of {len(report.rows)} rows not scored:")
        for reason, count in list(report.problems.items())[:_MAX_PROBLEMS_SHOWN]:
            out.print(f"  {count:6}  {plain(reason)}")
        if len(report.problems) > _MAX_PROBLEMS_SHOWN:
            out.print(
                f"  ... and {len(report.problems) - _MAX_PROBLEMS_SHOWN} other reasons (--json or --out list all)"
            )
    for note, count in report.as_dict()["reading_notes"].items():
        out.print(f"! {count} rows: {plain(note)}")
