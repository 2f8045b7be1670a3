"""gnnpred dataset: build the training corpus from measured runs."""

import typer

dataset_app = typer.Typer(help="The corpus of measured runs that checkpoints are trained on.")


@dataset_app.callback(invoke_without_command=True)
def _dataset(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
