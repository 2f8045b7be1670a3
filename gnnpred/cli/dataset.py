"""gnnpred dataset: build the training corpus from measured runs."""

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
