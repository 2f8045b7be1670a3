"""gnnpred export: a model by name, or of your own, as a small weightless ONNX file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gnnpred.cli.options import AsJson


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="timm:NAME, torchvision:NAME, hf:CONFIG.json, hf:CLASS or module:function."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The ONNX file to write.")],
    batch: Annotated[
        str, typer.Option("--batch", metavar="dynamic|N", help="dynamic: predict chooses it with --batch-size.")
    ] = "dynamic",
    opset: Annotated[int | None, typer.Option("--opset", help="ONNX operator set.")] = None,
    image_size: Annotated[
        str | None, typer.Option("--image-size", metavar="N|HxW", help="Images. Default: the model's own.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Tokens per sample. Default: the model's own.")
    ] = None,
    num_classes: Annotated[int | None, typer.Option("--num-classes", help="Default: the model's own.")] = None,
    train: Annotated[
        bool, typer.Option("--train/--eval", help="The mode that is traced; a step needs --train.")
    ] = True,
    exporter: Annotated[
        str, typer.Option("--exporter", metavar="dynamo|torchscript", help="Which of PyTorch's exporters.")
    ] = "dynamo",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="NAME=VALUE", help="Sizes of a transformers config, e.g. num_hidden_layers=24."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model as an ONNX file without weights, as a training step runs it."""
    from gnnpred.cli.extras import needs_extra

    with needs_extra("models"):
        from gnnpred.export import DEFAULT_OPSET, export_model

        summary = export_model(
            source,
            out,
            batch=_batch_of(batch),
            opset=DEFAULT_OPSET if opset is None else opset,
            image_size=_image_size_of(image_size),
            seq_len=seq_len,
            num_classes=num_classes,
            train=train,
            exporter=exporter,
            model_options=_model_options_of(option),
        )
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps(asdict(summary), indent=1, default=str))
        return
    inputs = ", ".join(f"{name} ({', '.join(map(str, shape))})" for name, shape in summary.input_shapes.items())
    typer.echo(
        f"wrote {summary.path}: {summary.num_nodes:,} nodes, {summary.num_parameters:,} parameters (no weights), "
        f"{summary.path.stat().st_size / 1e3:,.0f} kB, opset {summary.opset}, batch {summary.batch}, "
        f"inputs {inputs}, {summary.seconds:.1f} s"
    )
    for note in summary.notes:
        typer.echo(f"! {note}")


def _batch_of(text: str) -> int | str:
    from gnnpred.errors import UsageError

    if text == "dynamic":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--batch {text!r}: give a whole number or dynamic") from None


def _image_size_of(text: str | None) -> int | tuple[int, int] | None:
    from gnnpred.errors import UsageError

    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sizes = []
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise UsageError(f"--image-size {text!r}: write one number or HxW, e.g. 224 or 224x320")
    return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


def _model_options_of(texts: list[str] | None) -> dict[str, Any] | None:
    import json

    from gnnpred.errors import UsageError

    if not texts:
        return None
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--option {text!r}: write NAME=VALUE")
        try:
            options[name.strip()] = json.loads(value)  # numbers, true, lists; anything else is text
        except ValueError:
            options[name.strip()] = value
    return options
