"""gnnpred evaluate: errors on held-out groups, beside the baselines."""

from pathlib import Path
from typing import Annotated

import typer

from gnnpred.cli.options import AsJson


def evaluate(
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME|FILE", help="The recipe to score.")] = "base",
    track: Annotated[
        list[str] | None,
        typer.Option("--track", help="Only this track: family, architecture, device, random, blind; repeatable."),
    ] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train the networks of all folds again.")] = False,
    datasets: Annotated[Path, typer.Option("--datasets", metavar="FOLDER", help="The corpus.")] = Path("datasets"),
    folds: Annotated[
        Path | None, typer.Option("--folds", metavar="FOLDER", help="Networks of the folds [trainers/RECIPE-folds].")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where error table and plots go [checkpoints/RECIPE]."),
    ] = None,
    work: Annotated[Path, typer.Option("--work", metavar="FOLDER", help="Encoded rows are kept here.")] = Path(
        ".cache/training"
    ),
    workers: Annotated[int, typer.Option("--workers", min=1, help="Networks trained at once.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Score every held-out row: n, MAPE, median, p90 and bias by precision and GPU, with baselines and plots."""
    from gnnpred.cli.extras import needs_extra

    with needs_extra("train"):
        import json

        from gnnpred.cli.progress import progress_bar
        from gnnpred.training.recipe import find_recipe, load_recipe
        from gnnpred.training.report import report_lines
        from gnnpred.training.trainer import evaluate_recipe

        path = find_recipe(recipe)
        with progress_bar(show=not as_json) as advance:
            table = evaluate_recipe(
                path.stem,
                load_recipe(path),
                datasets=datasets,
                folds=folds or path.parent / f"{path.stem}-folds",
                out=out or Path("checkpoints") / path.stem,
                work=work,
                tracks=tuple(track) if track else None,
                retrain=retrain,
                num_workers=workers,
                on_progress=advance,
            )
    typer.echo(json.dumps(table, indent=1) if as_json else "\n".join(report_lines(table)))
