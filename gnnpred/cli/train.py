"""gnnpred train: fit the networks of a recipe and write a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME|FILE", help="A shipped recipe or a TOML file.")
    ] = "base",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Checkpoint folder [checkpoints/RECIPE].")
    ] = None,
    datasets: Annotated[Path, typer.Option("--datasets", metavar="FOLDER", help="The corpus.")] = Path("datasets"),
    work: Annotated[
        Path,
        typer.Option("--work", metavar="FOLDER", help="Finished networks are kept here; an interrupted run goes on."),
    ] = Path(".cache/training"),
    workers: Annotated[int, typer.Option("--workers", min=1, help="Networks trained at once.")] = 2,
) -> None:
    """Train a checkpoint on the corpus. Killed runs continue with the networks that are not finished."""
    from gnnpred.cli.extras import needs_extra

    with needs_extra("train"):
        from gnnpred.cli.progress import progress_bar
        from gnnpred.training.recipe import find_recipe, load_recipe
        from gnnpred.training.trainer import train_checkpoint

        path = find_recipe(recipe)
        settings = load_recipe(path)
        folder = out or Path("checkpoints") / path.stem
        with progress_bar() as advance:
            train_checkpoint(
                path.stem, settings, datasets=datasets, out=folder, work=work, num_workers=workers, on_progress=advance
            )
    typer.echo(f"checkpoint written to {folder}: gnnpred predict MODEL.onnx --checkpoint {folder}")
