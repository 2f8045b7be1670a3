"""gnnpred predict: how long one training iteration takes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnpred.cli import options as opt

if TYPE_CHECKING:
    from gnnpred.job import JobSpec
    from gnnpred.prediction import Prediction

_NAME_WIDTH = 30


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The model; weights are not needed.")],
    device: opt.Device = None,
    device_file: opt.DeviceFile = None,
    gpus: opt.Gpus = 1,
    nodes: opt.Nodes = 1,
    batch_size: opt.BatchSize = None,
    precision: opt.PrecisionName = "fp32",
    phase: opt.PhaseName = "train",
    optimizer: opt.Optimizer = "sgd",
    memory_format: opt.MemoryFormat = "nchw",
    compiled: opt.Compile = False,
    compiler: opt.Compiler = "eager",
    framework: opt.Framework = "pytorch",
    framework_version: opt.FrameworkVersion = "",
    host_os: opt.HostSystem = "linux",
    activation_rule: opt.ActivationRuleName = "autocast",
    attention: opt.Attention = "auto",
    activation_checkpointing: opt.ActivationCheckpointing = "none",
    host_copy: opt.HostCopy = False,
    strategy: opt.Strategy = "ddp",
    shard_group: opt.ShardGroup = None,
    grad_accum: opt.GradAccum = 1,
    tp: opt.TensorParallel = 1,
    sequence_parallel: opt.SequenceParallel = False,
    pp: opt.PipelineParallel = 1,
    microbatches: opt.Microbatches = None,
    interleave: opt.Interleave = 1,
    ep: opt.ExpertParallel = 1,
    interconnect: opt.Interconnect = "",
    inter_node: opt.InterNode = "",
    fabric_file: opt.FabricFileName = None,
    trace: opt.TraceFile = None,
    dim: opt.Dims = None,
    checkpoint: opt.CheckpointName = None,
    measured_inference_ms: opt.MeasuredInferenceMs = None,
    measured_batch: opt.MeasuredBatch = None,
    measured_precision: opt.MeasuredPrecision = None,
    as_json: opt.AsJson = False,
) -> None:
    """Predict the time of one training iteration of an ONNX model."""
    from gnnpred.job import JobSpec, Precision

    job = JobSpec(
        device=opt.device_of(device, device_file),
        precision=Precision.parse(precision),
        batch_size=batch_size,
        phase=opt.phase_of(phase),
        optimizer=optimizer,
        memory_format=memory_format,
        compiler=opt.compiler_of(compiler, compiled=compiled),
        framework=framework,
        framework_version=framework_version,
        host_os=host_os,
        activation_rule=opt.activation_rule_of(activation_rule),
        attention=attention,
        activation_checkpointing=activation_checkpointing,
        host_copy=host_copy,
        gpus=gpus,
        nodes=nodes,
        strategy=strategy,
        shard_group=shard_group,
        grad_accum=grad_accum,
        tensor_parallel=tp,
        sequence_parallel=sequence_parallel,
        pipeline_parallel=pp,
        microbatches=microbatches,
        interleave=interleave,
        expert_parallel=ep,
        interconnect=interconnect,
        inter_node=inter_node,
        fabric_file=opt.fabric_of(fabric_file),
    )
    dims = opt.dims_of(dim)
    measured = opt.measured_inference_of(measured_inference_ms, measured_batch, measured_precision)
    from gnnpred.predictor import predict as predict_step

    timeline = None
    if trace is not None:
        from gnnpred.communication.trace import Trace, write_trace

        timeline = Trace()
    prediction = predict_step(model, job, dims=dims, checkpoint=checkpoint, measured_inference=measured, trace=timeline)
    if trace is not None and timeline is not None:
        write_trace(timeline, trace, model=prediction.model, step_time_ms=prediction.step_time_ms)
    if as_json:
        import json

        typer.echo(json.dumps(prediction.as_dict(), indent=1))
        return
    chosen = device is not None or device_file is not None
    _print_panel(prediction, device_was_chosen=chosen, batch_was_chosen=batch_size is not None)


def _print_panel(prediction: "Prediction", *, device_was_chosen: bool, batch_was_chosen: bool) -> None:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from gnnpred.cli.render import console, plain

    parts = [_summary_table(prediction, device_was_chosen=device_was_chosen, batch_was_chosen=batch_was_chosen)]
    parts += [Text(), _ops_table(prediction)]
    if prediction.warnings:
        parts.append(Text())
        parts += [Text(f"! {plain(warning)}", style="yellow") for warning in prediction.warnings]
    name = plain(Path(prediction.model).name) or "model"
    console(min_width=120).print(
        Panel(Group(*parts), title=Text(name), title_align="left", expand=False, padding=(1, 2))
    )


def _summary_table(prediction: "Prediction", *, device_was_chosen: bool, batch_was_chosen: bool):
    from rich.table import Table
    from rich.text import Text

    from gnnpred.cli.render import milliseconds, rate, scaled
    from gnnpred.job import Phase

    job = prediction.job
    low, high = prediction.interval_90_ms
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    step = Text(milliseconds(prediction.step_time_ms), style="bold")
    step.append(f"   90 % between {milliseconds(low)} and {milliseconds(high)}", style="not bold")
    table.add_row(
        {Phase.TRAIN: "one step", Phase.FORWARD_BACKWARD: "forward + backward"}.get(job.phase, "one forward"), step
    )
    shares = [
        f"{name.replace('_', ' ')} {milliseconds(value)} ({value / prediction.step_time_ms:.0%})"
        for name, value in prediction.breakdown_ms.items()
        if value > 0
    ]
    table.add_row("of it", ", ".join(shares))
    table.add_row("throughput", f"{rate(prediction.throughput_samples_per_s)} samples/s")
    device_note = "" if device_was_chosen else " (default; choose with --device)"
    machines = f"{job.gpus} x " if job.gpus > 1 else ""
    spread = f", {job.nodes} nodes" if job.nodes > 1 else ""
    fabric = f", {prediction.fabric}" if prediction.fabric else ""
    table.add_row("device", f"{machines}{job.device.name}{device_note}{spread}{fabric}")
    batch_note = "" if batch_was_chosen else " (from the file or default; choose with --batch-size)"
    table.add_row("batch", _batch_text(job) + batch_note)
    if layout := _layout_text(job):
        table.add_row("layout", layout)
    host = "" if job.host_os == "linux" else f"on {job.host_os}"
    software = " ".join(filter(None, (job.framework, job.framework_version, job.compiler, job.memory_format, host)))
    optimizer = f", {job.optimizer}" if job.phase is Phase.TRAIN else ""
    options = "" if job.attention == "auto" else f", {job.attention} attention"
    if job.activation_checkpointing != "none" and job.phase is not Phase.INFERENCE:
        options += f", {job.activation_checkpointing} activation checkpointing"
    table.add_row("job", f"{job.precision}{optimizer}, {software}{options}")
    table.add_row(
        "model", f"{scaled(prediction.num_parameters)} parameters, {len(prediction.graph.ops):,} ops per step"
    )
    table.add_row("memory", f"about {prediction.memory_estimate_gib:.3g} GiB (estimate)")
    table.add_row("coverage", f"{prediction.coverage:.1%} of the work has a cost formula")
    table.add_row("checkpoint", prediction.checkpoint)
    if prediction.calibration:
        own = prediction.calibration
        table.add_row(
            "calibrated",
            f"x {own.factor:.3g} by {own.num_runs} run{'s' * (own.num_runs != 1)} of {own.num_groups} "
            f"model{'s' * (own.num_groups != 1)} on {job.device.name}",
        )
    if prediction.measured_inference:
        applied = prediction.measured_inference
        table.add_row(
            "corrected",
            f"x {applied.factor:.3g}: forward pass measured {milliseconds(applied.measured_ms)}, predicted "
            f"{milliseconds(applied.predicted_ms)} (batch {applied.batch_size}, {applied.precision})",
        )
    return table


def _batch_text(job: "JobSpec") -> str:
    if job.is_plain:
        return f"{job.batch_size} per GPU"
    parts = f"{job.batch_size} x {job.data_parallel} data-parallel"
    if job.num_microbatches > 1:
        parts += f" x {job.num_microbatches} micro-batches"
    return f"{parts} = {job.batch_size * job.data_parallel * job.num_microbatches}"


def _layout_text(job: "JobSpec") -> str:
    """How the GPUs share the work, where it is more than plain DDP."""
    sizes = {
        "tensor": job.tensor_parallel, "pipeline": job.pipeline_parallel, "data": job.data_parallel,
        "expert": job.expert_parallel,
    }  # fmt: skip
    if job.gpus == 1 or (job.is_plain and job.strategy == "ddp"):
        return ""
    parts = [f"{name} parallel {size}" for name, size in sizes.items() if size > 1]
    if job.shard_size > 1:
        parts.append(f"{job.strategy} over {job.shard_size}")
    elif job.strategy != "ddp":
        parts.append(job.strategy)
    if job.interleave > 1:
        parts.append(f"{job.interleave} chunks per stage")
    if job.sequence_parallel:
        parts.append("sequence parallel")
    return ", ".join(parts)


def _ops_table(prediction: "Prediction"):
    from rich.table import Table

    from gnnpred.cli.render import plain, scaled, shape_text

    table = Table(box=None, pad_edge=False, header_style="bold", title="slowest ops", title_justify="left")
    for name, justify in (("ms", "right"), ("share", "right"), ("op", "left"), ("part", "left"), ("type", "left"),
                          ("output", "left"), ("flops", "right"), ("bytes", "right"), ("name", "left")):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=name != "name", overflow="ellipsis")
    for op in prediction.slowest_ops(10):
        table.add_row(
            f"{op.predicted_ms:.3f}",
            f"{op.predicted_ms / prediction.step_time_ms:.1%}",
            op.kind,
            str(op.component).replace("_", " "),
            str(op.dtype or ""),
            shape_text(op.output_shapes[0]) if op.output_shapes else "",
            scaled(op.flops) if op.flops else "",
            scaled(op.bytes_moved),
            _end_of(plain(op.name)),
        )
    return table


def _end_of(name: str) -> str:
    """The last characters of a long name: that is where exporters number ops."""
    return name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}"
