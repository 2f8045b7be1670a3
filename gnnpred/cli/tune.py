"""gnnpred tune: search better settings of a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gnnpred.training.tune import TuneResult

_NUM_SHOWN = 10


def tune(
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME|FILE", help="The recipe to start from: its values are trial 0.")
    ] = "base",
    trials: Annotated[
        int,
        typer.Option("--trials", min=1, help="Finished trials that the study shall have, those of earlier runs and "
                     "other workers included."),
    ] = 50,
    storage: Annotated[
        str | None,
        typer.Option("--storage", metavar="URL", help="Database of the study, shared by workers that name the same "
                     "one: sqlite:///FILE, postgresql://..., mysql://... [sqlite file tune.db in --work]."),
    ] = None,
    study: Annotated[str | None, typer.Option("--study", metavar="NAME", help="Name of the study [RECIPE].")] = None,
    space: Annotated[
        Path | None,
        typer.Option("--space", metavar="FILE", help="What to search [trainers/RECIPE_search_space.toml, or "
                     "trainers/search_space.toml]."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where best.toml, trials.csv and plots go [runs/STUDY]."),
    ] = None,
    test_seeds: Annotated[
        int,
        typer.Option("--test-seeds", min=0, help="Then train the default and the tuned recipe with this many seeds and "
                     "score both on the families that no trial has seen."),
    ] = 0,
    datasets: Annotated[Path, typer.Option("--datasets", metavar="FOLDER", help="The corpus.")] = Path("datasets"),
    work: Annotated[
        Path, typer.Option("--work", metavar="FOLDER", help="Encoded rows and, without --storage, the study.")
    ] = Path(".cache/training"),
) -> None:  # fmt: skip
    """Search settings of a recipe on held-out families. Run again to go on, or elsewhere to help."""
    from gnnpred.cli.extras import needs_extra
    from gnnpred.cli.render import plain

    with needs_extra("train"):
        from gnnpred.cli.progress import progress_bar
        from gnnpred.training.recipe import find_recipe, load_recipe
        from gnnpred.training.search_space import default_space, load_space
        from gnnpred.training.tune import tune_recipe

        path = find_recipe(recipe)
        settings = load_recipe(path)
        checked = load_space(space or default_space(path.stem), settings)
        with progress_bar() as advance:
            result = tune_recipe(
                path.stem, settings, checked, datasets=datasets, work=work, trials=trials, storage=storage,
                out=out or Path("runs") / (study or path.stem), study_name=study, test_seeds=test_seeds,
                on_progress=advance,
            )  # fmt: skip
    _print_best(result)
    typer.echo(plain(f"study {result.study_name} in {result.storage}"))
    typer.echo(f"written: {', '.join(str(file) for file in (result.recipe, *result.files))}")
    for name, reason in result.missing_plots.items():
        typer.echo(f"not drawn: {name}.png {reason}")
    for name, errors in result.test_errors_pct.items():
        mean = sum(errors) / len(errors)
        by_seed = ", ".join(f"{error:.2f}" for error in errors)
        typer.echo(f"untouched families, {name}: {mean:.2f} % (by seed: {by_seed})")
    typer.echo(
        f"next: gnnpred evaluate --recipe {result.recipe} --retrain, then gnnpred train --recipe {result.recipe}"
    )


def _print_best(result: "TuneResult") -> None:
    from rich.table import Table

    from gnnpred.cli.render import console

    complete = [trial for trial in result.trials if trial.state.name == "COMPLETE"]
    complete.sort(key=lambda trial: (trial.value, trial.number))
    table = Table(title="best trials: mean error over the inner folds", box=None, title_justify="left")
    table.add_column("trial", justify="right")
    table.add_column("error %", justify="right")
    table.add_column("what differs from the recipe")
    for trial in complete[:_NUM_SHOWN]:
        changes = [
            f"{name.split('.')[-1]} {value:.3g}" if isinstance(value, float) else f"{name.split('.')[-1]} {value}"
            for name, value in trial.params.items()
            if value != result.defaults[name]
        ]
        table.add_row(str(trial.number), f"{trial.value:.2f}", ", ".join(changes) or "nothing: the recipe itself")
    console().print(table)
    pruned = len(result.trials) - len(complete)
    typer.echo(f"{len(complete)} trials complete, {pruned} pruned")
    if result.default_error_pct is not None:
        change = (result.best.value / result.default_error_pct - 1) * 100
        typer.echo(
            f"the recipe itself: {result.default_error_pct:.2f} %; best: {result.best.value:.2f} % ({change:+.1f} %)"
        )
