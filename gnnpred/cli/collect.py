"""gnnpred collect: measure training steps on this machine."""

import os
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnpred.cli.options import AsJson
from gnnpred.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gnnpred.collect.ray_engine import RayEngine
    from gnnpred.collect.shards import MergeReport

ENGINES = ("local", "ray")
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
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", help="Only the I-th of N parts, I from 1, in a folder of its own in DIR."
        ),
    ] = None,
    merge_only: Annotated[
        bool, typer.Option("--merge-only", help="Take in the rows of the shards in DIR; measure nothing.")
    ] = False,
    export_only: Annotated[
        bool,
        typer.Option("--export-only", help="Export the graphs that rows in DIR lack, on any machine; measure nothing."),
    ] = False,
    engine: Annotated[
        str, typer.Option("--engine", metavar="local|ray", help="This machine, or the nodes of a Ray cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address", metavar="HOST:PORT", help="Default: RAY_ADDRESS, else Ray on this machine alone."
        ),
    ] = None,
    ray_accelerator: Annotated[
        str | None,
        typer.Option("--ray-accelerator", metavar="TYPE", help="Which GPUs of a cluster that has several types: H100."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a recipe's training steps here; killed or stopped, the same command continues.

    Without --shard, the rows of shards that lie in the folder are taken in first.
    """
    from gnnpred.cli.extras import needs_extra

    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}: choose one of {', '.join(ENGINES)}")
    if engine != "ray" and (ray_address or ray_accelerator):
        raise UsageError("--ray-address and --ray-accelerator go with --engine ray")
    with needs_extra("models"):
        from gnnpred.cli.progress import progress_bar
        from gnnpred.collect.nodes import join_nodes
        from gnnpred.collect.recipe import find_recipe, load_recipe
        from gnnpred.collect.runner import collect as collect_rows
        from gnnpred.collect.runner import export_graphs
        from gnnpred.collect.shards import Shard, merge_shards, shard_folders

        settings = load_recipe(find_recipe(recipe))
        budget_s = None if time_budget is None else seconds_of(time_budget)
        if settings.kind == "collectives":
            if engine == "ray":
                raise UsageError("collectives run on one machine or under torchrun, not with --engine ray")
            if export_only:
                raise UsageError("--export-only: collectives have no graphs")
            from gnnpred.collect.collective_runner import collect_collectives as collect_rows
        whole = out
        if shard is not None:
            if merge_only:
                raise UsageError("--shard measures one part, --merge-only measures nothing: give one of them")
            part = Shard.parse(shard)
            settings, out = part.part_of(settings), part.folder(out)
        if merge_only and export_only:
            raise UsageError("--merge-only takes in shards, --export-only exports graphs: one after the other")
        if merge_only:
            _show_merged(merge_shards(settings, out, may_be_at_work=True), as_json=as_json)
            return
        if export_only:
            measure = export_graphs
        else:
            make_engine = (
                join_nodes(os.environ, settings) if engine == "local" else ray_engine(ray_address, ray_accelerator)
            )
            if make_engine is None:  # the first node speaks
                return
            measure = partial(collect_rows, device=device, make_engine=make_engine)
        if shard_folders(out):
            merge_shards(settings, out, may_be_at_work=False)
        try:
            with _terminated_as_interrupted(), progress_bar() as advance:
                report = measure(settings, out, time_budget_s=budget_s, on_progress=advance)
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
    if report.num_graphs_missing:
        part = f" --shard {shard}" if shard is not None else ""
        typer.echo(
            f"! graphs not yet exported: {report.num_graphs_missing}; on any machine: "
            f"gnnpred collect --recipe {recipe} --out {whole}{part} --export-only"
        )
    if shard is not None:
        typer.echo(f"gnnpred collect --recipe {recipe} --out {whole} --merge-only")
        return
    if settings.kind == "collectives":
        typer.echo(report.runs_file)
        return
    own_device = f" --device-file {report.device_file}" if report.device_file else ""
    typer.echo(f"gnnpred score {report.runs_file}{own_device}")


@contextmanager
def _terminated_as_interrupted() -> "Iterator[None]":
    """SIGTERM, with which schedulers and ``timeout`` end a job, ends the collection as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ray_engine(address: str | None, accelerator: str | None) -> "Callable[[object], RayEngine]":
    """What makes the engine of a Ray cluster; raises UsageError where Ray is not installed."""
    from gnnpred.cli.extras import needs_extra

    with needs_extra("ray"):
        from gnnpred.collect.ray_engine import RayEngine

    return lambda _workers: RayEngine(address=address, accelerator=accelerator)


def _show_merged(merged: "MergeReport", *, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(merged.as_dict(), indent=1))
        return
    typer.echo(
        f"{merged.num_rows} of {merged.num_configurations} configurations, {merged.num_added} of them new, "
        f"from {merged.num_shards} shards"
    )
    for name in merged.at_work:
        typer.echo(f"! shard {name} is still being collected: not taken in")
    typer.echo(merged.runs_file)


def seconds_of(text: str) -> float:
    """``90s``, ``12m``, ``1h30m``, ``1.5h`` -> seconds; raises UsageError."""
    import re

    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip().lower())
    seconds = (
        sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
    )
    if not seconds > 0:
        raise UsageError(f"--time-budget {text!r}: write a time above 0 with its unit, as in 90s, 12m or 1h30m")
    return seconds
