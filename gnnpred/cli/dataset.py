"""gnnpred dataset: the training corpus, built from published runs and extended by one's own."""

from pathlib import Path
from typing import Annotated

import typer

from gnnpred.cli.options import AsJson, phase_of

dataset_app = typer.Typer(help="The corpus of measured runs that checkpoints are trained on.")


@dataset_app.callback(invoke_without_command=True)
def _dataset(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@dataset_app.command()
def build(
    shared: Annotated[
        Path, typer.Option("--shared", metavar="FOLDER", help="The published measurement tables.")
    ] = Path("../shared/data"),
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where rows and graphs go.")] = Path("datasets"),
    work: Annotated[
        Path,
        typer.Option("--work", metavar="FOLDER", help="Traced graphs are kept here; an interrupted build goes on."),
    ] = Path(".cache/corpus"),
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes that trace models.")] = 2,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N models, for a trial.")] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Use graphs traced before.")] = True,
    phase: Annotated[
        list[str] | None, typer.Option("--phase", metavar="PHASE", help="Only rows of this phase; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn measured rows into graphs, jobs and times."""
    from gnnpred.cli.extras import needs_extra

    phases = {phase_of(text) for text in phase} if phase else None
    with needs_extra("models"):
        from gnnpred.corpus.build import build_dataset

        report = build_dataset(
            shared, out, jobs=jobs, limit=limit, resume=resume, phases=phases, work=work, show_progress=not as_json
        )
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps(asdict(report), indent=1, default=dict))
        return
    typer.echo(
        f"{report.num_rows:,} rows on one GPU, {report.num_multi_gpu_rows:,} on several, {report.num_graphs:,} graphs "
        f"in {out}: {report.num_training_rows:,} training or forward+backward rows on {report.num_training_devices} "
        f"GPU types, {report.num_inference_rows:,} of inference"
    )
    for reason, count in sorted(report.excluded_by_reason.items(), key=lambda item: -item[1]):
        typer.echo(f"  {count:7,} left out: {reason}")
    for model, reason in sorted(report.failed_models.items()):
        typer.echo(f"  not traced: {model}: {reason}")


@dataset_app.command()
def add(
    runs: Annotated[Path, typer.Argument(metavar="RUNS_FOLDER", help="What `gnnpred collect --out` wrote.")],
    datasets: Annotated[
        Path, typer.Option("--datasets", metavar="FOLDER", help="The corpus; a folder that is not there is a new one.")
    ] = Path("datasets"),
    name: Annotated[
        str | None, typer.Option("--name", metavar="ID", help="Of the collection [RECIPE-DEVICE-hash].")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be added; write nothing.")] = False,
    accept_outliers: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-outliers",
            metavar="KIND",
            help="Learn from rows marked so all the same (unsteady, throttled, prediction, siblings, all); repeatable.",
        ),
    ] = None,
    device_file: Annotated[
        Path | None, typer.Option("--device-file", metavar="FILE", help="The GPU, where the list lacks it.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="NAME|FOLDER", help="What new rows are compared with.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Merge a collection into a corpus: checked, marked, nothing dropped. Adding it again changes nothing."""
    from gnnpred.additions.merge import add_collection
    from gnnpred.cli.progress import progress_bar
    from gnnpred.predictor import Predictor

    with progress_bar(show=not as_json) as advance:
        report = add_collection(
            runs, datasets, name=name, dry_run=dry_run, accept=tuple(accept_outliers or ()), device_file=device_file,
            make_predictor=lambda: Predictor(checkpoint), on_progress=advance,
        )  # fmt: skip
    if as_json:
        import json

        typer.echo(json.dumps(report.as_dict(), indent=1))
        return
    from gnnpred.cli.render_additions import print_additions

    print_additions(report)
