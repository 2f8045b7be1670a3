"""gnnpred evaluate: errors on held-out groups, beside the baselines."""

from pathlib import Path
from typing import Annotated

import typer

from gnnpred.cli.options import AsJson


def evaluate(
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME|FILE", help="The recipe to score.")] = "base",
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track",
            help="Only this track: family, architecture, device, neusight, random, blind, blind_fp32; repeatable.",
        ),
    ] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train the networks of all folds again.")] = False,
    contrast: Annotated[
        bool,
        typer.Option("--contrast", help="What precision does to step time, and to a predictor that ignores it."),
    ] = False,
    communication: Annotated[
        bool,
        typer.Option(
            "--communication",
            help="Score runs on several GPUs; with the folds' networks also end to end from predicted compute.",
        ),
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Also write the accuracy page, and the README's section from it.")
    ] = False,
    docs: Annotated[
        Path | None, typer.Option("--docs", metavar="FILE", help="Accuracy page of --report [docs/ACCURACY.md].")
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option("--readme", metavar="FILE", help="File of --report with a marked accuracy section [README.md]."),
    ] = None,
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
    from gnnpred.errors import UsageError

    if contrast and (track or retrain or report):
        raise UsageError("--contrast scores its own tracks with the kept networks: leave --track, --retrain, --report")
    if communication and (track or retrain or contrast):
        raise UsageError("--communication scores its own tracks: leave --track, --retrain, --contrast")
    if (docs or readme) and not report:
        raise UsageError("--docs and --readme belong to --report")
    with needs_extra("train"):
        import json

        from gnnpred.cli.progress import progress_bar
        from gnnpred.training.contrast import contrast_of_recipe
        from gnnpred.training.recipe import find_recipe, load_recipe
        from gnnpred.training.report import contrast_lines, report_lines
        from gnnpred.training.trainer import evaluate_recipe

        path = find_recipe(recipe)
        settings = load_recipe(path)
        folds = folds or path.parent / f"{path.stem}-folds"
        with progress_bar(show=not as_json) as advance:
            if communication:
                from gnnpred.training.communication_report import communication_of_recipe

                table = communication_of_recipe(
                    settings,
                    datasets=datasets,
                    folds=folds,
                    out=out or Path("checkpoints") / path.stem,
                    work=work,
                    page=(docs or Path("docs/communication.md")) if report else None,
                    num_workers=workers,
                    on_progress=advance,
                )
            elif contrast:
                table = contrast_of_recipe(
                    settings, datasets=datasets, folds=folds, work=work, num_workers=workers, on_progress=advance
                )
            else:
                table = evaluate_recipe(
                    path.stem,
                    settings,
                    datasets=datasets,
                    folds=folds,
                    out=out or Path("checkpoints") / path.stem,
                    work=work,
                    tracks=tuple(track) if track else None,
                    retrain=retrain,
                    docs=(docs or Path("docs/ACCURACY.md")) if report else None,
                    readme=(readme or Path("README.md")) if report else None,
                    num_workers=workers,
                    on_progress=advance,
                )
    if communication:
        from gnnpred.training.communication_tracks import communication_lines

        lines = communication_lines(table)
    else:
        lines = contrast_lines(table) if contrast else report_lines(table)
    typer.echo(json.dumps(table, indent=1) if as_json else "\n".join(lines))
