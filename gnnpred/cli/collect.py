"""gnnpred collect: measure training steps on this machine."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gnnpred.cli.options import AsJson

_MAX_WARNINGS_SHOWN = 10


def collect(
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME|FILE", help="A shipped recipe or a TOML file.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where rows go; the same command again continues there.")
    ],
    time_budget: Annotated[
        str | None,
        typer.Option("--time-budget", metavar="12m", help="Stop then (90s, 12m, 1h30m); what is done is kept."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="Default: cuda where torch sees a GPU.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a recipe's training steps here; killed or stopped, the same command continues."""
    from gnnpred.cli.extras import needs_extra

    with needs_extra("models"):
        from gnnpred.cli.progress import progress_bar
        from gnnpred.collect.nodes import join_nodes
        from gnnpred.collect.recipe import find_recipe, load_recipe
        from gnnpred.collect.runner import collect as collect_rows

        settings = load_recipe(find_recipe(recipe))
        budget_s = None if time_budget is None else seconds_of(time_budget)
        make_engine = join_nodes(os.environ, settings)
        if make_engine is None:  # the first node speaks
            return
        try:
            with progress_bar() as advance:
                report = collect_rows(
                    settings, out, device=device, time_budget_s=budget_s, on_progress=advance, make_engine=make_engine
                )
        except KeyboardInterrupt:
            typer.echo("interrupted: what is measured is kept, the same command continues", err=True)
            raise typer.Exit(130) from None
    if as_json:
        import json

        typer.echo(json.dumps(report.as_dict(), indent=1))
        return
    statuses = ", ".join(f"{count} {status}" for status, count in report.by_status.items()) or "none"
    typer.echo(
        f"{report.num_rows} of {report.num_configurations} configurations on {report.device}: {statuses} "
        f"({report.num_measured_now} now)"
    )
    for warning in report.warnings[:_MAX_WARNINGS_SHOWN]:
        typer.echo(f"! {warning}")
    if len(report.warnings) > _MAX_WARNINGS_SHOWN:
        typer.echo(f"! and {len(report.warnings) - _MAX_WARNINGS_SHOWN} more: column warning")
    if report.num_rows > report.by_status.get("ok", 0):
        typer.echo(f"! reasons of what failed: {report.failed_file}")
    if report.is_cut_off:
        typer.echo("! the time budget ended: the same command continues")
    own_device = f" --device-file {report.device_file}" if report.device_file else ""
    typer.echo(f"gnnpred score {report.runs_file}{own_device}")


def seconds_of(text: str) -> float:
    """``90s``, ``12m``, ``1h30m``, ``1.5h`` -> seconds; raises UsageError."""
    import re

    from gnnpred.errors import UsageError

    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip().lower())
    seconds = (
        sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
    )
    if not seconds > 0:
        raise UsageError(f"--time-budget {text!r}: write a time above 0 with its unit, as in 90s, 12m or 1h30m")
    return seconds
