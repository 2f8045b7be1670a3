"""What `gnnpred dataset add` prints."""

from typing import TYPE_CHECKING

import typer

from gnnpred.cli.render import console, milliseconds, plain

if TYPE_CHECKING:
    from gnnpred.additions.report import AddReport

_MAX_SHOWN = 30  # rows of a table; the collection's file and --json have all


def print_additions(report: "AddReport") -> None:
    """Counts first, then one table each of marked rows, repeats and rows that published tables have too."""
    failed = "".join(f", {count} {status}" for status, count in report.failed.items())
    typer.echo(
        plain(
            f"{report.collection}: {report.num_rows} rows of {report.device} (recipe {report.recipe}){failed}; "
            f"{report.num_new} new"
        )
    )
    for reason, count in report.without_graph.items():
        typer.echo(plain(f"! {count} without a graph: {reason}"))
    if report.num_not_predicted:
        typer.echo(f"! {report.num_not_predicted} rows could not be predicted, so that nothing compares them")
    for note in report.notes:
        typer.echo(plain(f"! {note}"))
    _print_marked(report)
    _print_repeats(report)
    _print_elsewhere(report)
    groups = "".join(
        f", {what} " + ", ".join(f"{name} (fold {fold})" for name, fold in sorted(new.items()))
        for what, new in (("new networks", report.new_architectures), ("new families", report.new_families))
        if new
    )
    kernels = f", {report.num_operators} kernels" if report.num_operators else ""
    kernels += f" ({report.num_short_operators} too short to be timed well)" if report.num_short_operators else ""
    typer.echo(plain(f"{report.num_graphs} graphs, {report.num_new_graphs} of them new{kernels}{groups}"))
    several = f", {report.num_multi_gpu} of several GPUs" if report.num_multi_gpu else ""
    typer.echo(f"{report.num_used} of {report.num_rows} rows are used for training{several}")
    if not report.is_changed:
        typer.echo(f"nothing changes: {report.datasets} has all of it")
    elif report.is_dry_run:
        typer.echo(f"dry run: would write {', '.join(report.files)} in {report.datasets}")
    else:
        typer.echo(f"written to {report.datasets}: {', '.join(report.files)}")


def _print_marked(report: "AddReport") -> None:
    if not report.marked:
        return
    lines = [
        (
            row.configuration,
            milliseconds(row.step_time_ms),
            milliseconds(mark.expected_ms) if mark.expected_ms else "",
            f"{mark.kind}: {mark.detail}",
            "used" if row.is_accepted else "not used",
        )
        for row in report.marked
        for mark in row.marks
    ]
    compared = f" (compared with checkpoint {report.checkpoint})" if report.checkpoint else ""
    _print_table(
        f"{len(report.marked)} rows that something speaks against{compared}",
        ("row", ">measured", ">expected", "what", "for training"),
        lines,
    )
    if any(not row.is_accepted for row in report.marked):
        typer.echo("--accept-outliers KIND trains on rows of a kind all the same")


def _print_repeats(report: "AddReport") -> None:
    lines = [
        (
            repeat.configuration,
            *(f"{milliseconds(time_ms)} ({source})" for source, time_ms in (repeat.times[0], repeat.times[1])),
            str(len(repeat.times)),
            "" if repeat.is_used else "none is used",
        )
        for repeat in report.repeats
    ]
    if lines:
        title = f"{len(lines)} configurations measured more than once: all kept, the one of median time is used"
        _print_table(title, ("configuration", ">used", ">other", ">times", ""), lines)


def _print_elsewhere(report: "AddReport") -> None:
    lines = [
        (
            row.configuration,
            milliseconds(row.step_time_ms),
            milliseconds(row.other_ms),
            f"{row.step_time_ms / row.other_ms:.2f}",
            str(row.num_others),
            ", ".join(row.sources),
        )
        for row in report.elsewhere
    ]
    if lines:
        title = f"{len(lines)} rows that published tables have too, maybe under other software: all kept and used"
        _print_table(title, ("row", ">here", ">there", ">ratio", ">rows there", "sources"), lines)


def _print_table(title: str, columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(title=title, box=None, title_justify="left")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for line in lines[:_MAX_SHOWN]:
        table.add_row(*(plain(cell) for cell in line))
    console(min_width=140).print(table)
    if len(lines) > _MAX_SHOWN:
        typer.echo(f"and {len(lines) - _MAX_SHOWN} more: --json shows all")
