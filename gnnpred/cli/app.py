"""The Typer application: one file per command, each importing what it needs when it runs."""

from typing import Annotated, Any

import typer

from gnnpred.cli.calibrate import calibrate
from gnnpred.cli.collect import collect
from gnnpred.cli.collective import collective
from gnnpred.cli.dataset import dataset_app
from gnnpred.cli.devices import devices
from gnnpred.cli.evaluate import evaluate
from gnnpred.cli.export import export
from gnnpred.cli.inspect import inspect
from gnnpred.cli.predict import predict
from gnnpred.cli.score import score
from gnnpred.cli.train import train
from gnnpred.cli.tune import tune

app = typer.Typer(
    name="gnnpred",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Predict how long one training iteration takes, from an ONNX file, without a GPU.",
)
app.command()(predict)
app.command()(score)
app.command()(calibrate)
app.command()(inspect)
app.command()(collective)
app.command()(devices)
app.command()(export)
app.command()(collect)
app.add_typer(dataset_app, name="dataset")
app.command()(train)
app.command()(evaluate)
app.command()(tune)


def _print_version(wanted: bool) -> None:
    if wanted:
        from gnnpred import __version__

        typer.echo(f"gnnpred {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (accepted anywhere).")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def command() -> Any:
    """The click command of the whole application."""
    return typer.main.get_command(app)
