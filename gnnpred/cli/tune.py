"""gnnpred tune: search better settings of a recipe."""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import typer

from gnnpred.cli.options import AsJson

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from gnnpred.training.tuning.results import TuneResult

_NUM_SHOWN = 10
_ENGINES = ("local", "ray")
_COSTS = (("latency x", "latency_ratio", 1.0), ("kB", "size_bytes", 1e-3))


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
        typer.Option("--storage", metavar="URL|journal:FILE", help="Where the study is kept, shared by commands that "
                     "name the same one: sqlite:///FILE, postgresql://..., mysql://..., or a journal (journal:FILE, or "
                     "a path that ends in .log or .journal) [sqlite file tune.db in --work]."),
    ] = None,
    study: Annotated[str | None, typer.Option("--study", metavar="NAME", help="Name of the study [RECIPE].")] = None,
    objectives: Annotated[
        str,
        typer.Option("--objectives", metavar="LIST", help="error, or error with latency, size or both: the trials that "
                     "no other betters in all of them are written as recipes (Pareto front)."),
    ] = "error",
    space: Annotated[
        Path | None,
        typer.Option("--space", metavar="FILE", help="What to search [trainers/RECIPE_search_space.toml, or "
                     "trainers/search_space.toml]."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where best.toml, trials.csv and plots go [runs/STUDY]."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Trials at once, each on a core of its own.")
    ] = 1,
    engine: Annotated[
        str,
        typer.Option("--engine", metavar="local|ray", help="Where workers run: processes here, or a Ray cluster."),
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", metavar="HOST:PORT", help="Cluster of --engine ray, auto or local [RAY_ADDRESS, "
                     "otherwise local: one started here]."),
    ] = None,
    confirm: Annotated[
        int,
        typer.Option("--confirm", min=0, metavar="N", help="Then train the N best trials and the recipe itself with "
                     "other seeds, and choose by those: the least of many errors is partly luck."),
    ] = 0,
    test_seeds: Annotated[
        int,
        typer.Option("--test-seeds", min=0, help="Then train the default and the tuned recipe with this many seeds and "
                     "score both on the families that no trial has seen."),
    ] = 0,
    datasets: Annotated[Path, typer.Option("--datasets", metavar="FOLDER", help="The corpus.")] = Path("datasets"),
    work: Annotated[
        Path, typer.Option("--work", metavar="FOLDER", help="Encoded rows and, without --storage, the study.")
    ] = Path(".cache/training"),
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Search settings of a recipe on held-out families. Run again to go on, or elsewhere to help."""
    from gnnpred.cli.extras import needs_extra
    from gnnpred.errors import UsageError

    if engine not in _ENGINES:
        raise UsageError(f"unknown engine {engine!r}: choose one of {', '.join(_ENGINES)}")
    if engine == "ray":
        with needs_extra("ray"):
            import ray  # noqa: F401  before anything is read
        ray_address = ray_address or os.environ.get("RAY_ADDRESS")
    elif ray_address is not None:
        raise UsageError("--ray-address goes with --engine ray")
    with needs_extra("train"):
        from gnnpred.cli.trial_table import trial_display
        from gnnpred.training.recipe import find_recipe, load_recipe
        from gnnpred.training.search_space import default_space, load_space
        from gnnpred.training.tune import tune_recipe
        from gnnpred.training.tuning.costs import parse_objectives

        path = find_recipe(recipe)
        settings = load_recipe(path)
        checked = load_space(space or default_space(path.stem), settings)
        names = [parameter.name for parameter in checked.parameters]
        try:
            with trial_display(names) as (advance, show):
                result = tune_recipe(
                    path.stem, settings, checked, datasets=datasets, work=work, trials=trials, storage=storage,
                    objectives=parse_objectives(objectives), out=out or Path("runs") / (study or path.stem),
                    study_name=study, engine=engine, num_workers=workers,
                    ray_address=ray_address or "local", confirm=confirm, test_seeds=test_seeds, on_progress=advance,
                    on_trials=show,
                )  # fmt: skip
        except KeyboardInterrupt:
            typer.echo("interrupted: finished trials are kept, the same command goes on", err=True)
            raise typer.Exit(130) from None
    if as_json:
        import json

        typer.echo(json.dumps(result.as_dict(), indent=1))
    else:
        _print_result(result)


def _print_result(result: "TuneResult") -> None:
    from gnnpred.cli.render import plain

    is_single = result.objectives == ("error",)
    complete = result.complete
    _print_trials(
        complete[:_NUM_SHOWN] if is_single else result.front,
        result,
        title="best trials: mean error over the inner folds" if is_single else
        "Pareto front: no trial is better in every objective",
    )  # fmt: skip
    typer.echo(f"{len(complete)} trials complete, {len(result.trials) - len(complete)} pruned")
    if result.default is not None:
        confirmed = result.confirmed_pct
        default_pct, best_pct = (
            mean(confirmed[trial.number]) if confirmed else trial.values[0] for trial in (result.default, result.best)
        )
        change = (best_pct / default_pct - 1) * 100
        seeds = " with other seeds" if confirmed else ""
        typer.echo(
            f"the recipe itself{seeds}: {default_pct:.2f} %; best: trial {result.best.number}, {best_pct:.2f} % "
            f"({change:+.1f} %)"
        )
    typer.echo(plain(f"study {result.study_name} in {result.storage}"))
    typer.echo(f"written: {', '.join(str(file) for file in (result.recipe, *result.files))}")
    for name, reason in result.missing_plots.items():
        typer.echo(f"not drawn: {name}.png {reason}")
    for name, errors in result.test_errors_pct.items():
        by_seed = ", ".join(f"{error:.2f}" for error in errors)
        typer.echo(f"untouched families, {name}: {mean(errors):.2f} % (by seed: {by_seed})")
    typer.echo(
        f"next: gnnpred evaluate --recipe {result.recipe} --retrain, then gnnpred train --recipe {result.recipe}"
    )


def _print_trials(trials: Sequence["FrozenTrial"], result: "TuneResult", *, title: str) -> None:
    from rich.table import Table

    from gnnpred.cli.render import console
    from gnnpred.cli.trial_table import values_text

    table = Table(title=title, box=None, title_justify="left")
    table.add_column("trial", justify="right")
    table.add_column("error %", justify="right")
    costs = [(heading, name, scale) for heading, name, scale in _COSTS if name in result.best.user_attrs]
    for heading, _, _ in costs:
        table.add_column(heading, justify="right")
    confirmed = result.confirmed_pct
    if confirmed:
        table.add_column("other seeds %", justify="right")
    table.add_column("what differs from the recipe")
    for trial in trials:
        changed = [name for name, value in trial.params.items() if value != result.defaults[name]]
        table.add_row(
            str(trial.number),
            f"{trial.values[0]:.2f}",
            *(f"{trial.user_attrs[name] * scale:.3g}" for _, name, scale in costs),
            *[f"{mean(confirmed[trial.number]):.2f}" if trial.number in confirmed else ""] * bool(confirmed),
            values_text(trial.params, changed) or "nothing: the recipe itself",
        )
    console().print(table)
