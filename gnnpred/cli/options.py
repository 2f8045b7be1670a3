"""Options that several commands share, and how they become a job."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnpred.errors import UsageError
from gnnpred.hardware import DEFAULT_DEVICE_NAME, DeviceSpec, find_device, load_device_file
from gnnpred.job import (
    ATTENTIONS,
    CHECKPOINTINGS,
    COMPILERS,
    HOST_SYSTEMS,
    MEMORY_FORMATS,
    OPTIMIZERS,
    STRATEGIES,
    ActivationRule,
    Phase,
    Precision,
)

if TYPE_CHECKING:
    from gnnpred.communication.fabrics import FabricFile
    from gnnpred.inference_correction import MeasuredInference

Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME", help=f"GPU; `gnnpred devices` lists them. Default: {DEFAULT_DEVICE_NAME}."
    ),
]
DeviceFile = Annotated[
    Path | None, typer.Option("--device-file", metavar="FILE", help="A GPU of your own, as TOML or JSON.")
]
DeviceFiles = Annotated[
    list[Path] | None,
    typer.Option("--device-file", metavar="FILE", help="A GPU that the CSV names and the list lacks; repeatable."),
]
Gpus = Annotated[int, typer.Option("--gpus", help="GPUs in all.")]
Nodes = Annotated[int, typer.Option("--nodes", help="Hosts they are spread over, evenly.")]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", help="Samples per data-parallel rank and micro-batch. Default: the file's."),
]
PrecisionName = Annotated[
    str, typer.Option("--precision", metavar="|".join(Precision), help="Or amp, amp_fp16, amp_bf16.")
]
PhaseName = Annotated[str, typer.Option("--phase", metavar="|".join(Phase), help="What one iteration holds.")]
Optimizer = Annotated[str, typer.Option("--optimizer", metavar="|".join(OPTIMIZERS), help="sgd has momentum.")]
MemoryFormat = Annotated[
    str, typer.Option("--memory-format", metavar="|".join(MEMORY_FORMATS), help="Layout of images.")
]
Compile = Annotated[bool, typer.Option("--compile", help="The model runs under torch.compile.")]
Compiler = Annotated[
    str,
    typer.Option("--compiler", metavar="|".join(COMPILERS), help="How the model is run; --compile = torch_compile."),
]
Framework = Annotated[str, typer.Option("--framework", metavar="NAME", help="pytorch, tensorflow, mxnet, paddle ...")]
FrameworkVersion = Annotated[
    str, typer.Option("--framework-version", metavar="X.Y", help="Default: the newest that the checkpoint has seen.")
]
HostSystem = Annotated[
    str, typer.Option("--host-os", metavar="|".join(HOST_SYSTEMS), help="Operating system of the training host.")
]
ActivationRuleName = Annotated[
    str,
    typer.Option(
        "--activation-rule",
        metavar="|".join(ActivationRule),
        help="Under mixed precision: follow autocast, or keep all activations in half (Apex O2, use_fp16).",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        "--attention",
        metavar="|".join(ATTENTIONS),
        help="fused: one kernel (flash attention, sdpa); eager: in pieces. auto: fused from PyTorch 2.0 on.",
    ),
]
ActivationCheckpointing = Annotated[
    str,
    typer.Option(
        "--activation-checkpointing",
        metavar="|".join(CHECKPOINTINGS),
        help="full: repeated layers keep no activations and run their forward pass again.",
    ),
]
HostCopy = Annotated[bool, typer.Option("--host-copy", help="Each step copies its batch from pageable host memory.")]
Strategy = Annotated[
    str, typer.Option("--strategy", metavar="|".join(STRATEGIES), help="How data-parallel ranks share the work.")
]
ShardGroup = Annotated[
    int | None,
    typer.Option("--shard-group", help="fsdp, zero*: ranks that share one copy, e.g. those of a node. Default: all."),
]
GradAccum = Annotated[
    int, typer.Option("--grad-accum", help="Passes of --batch-size samples whose gradients add up to one step.")
]
TensorParallel = Annotated[int, typer.Option("--tp", help="GPUs that share each layer's products.")]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="With --tp: what lies between the products is split too.")
]
PipelineParallel = Annotated[int, typer.Option("--pp", help="Pipeline stages (1F1B).")]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", help="Micro-batches of --batch-size samples per step and pipeline.")
]
Interleave = Annotated[int, typer.Option("--interleave", help="Chunks of layers per stage (interleaved 1F1B).")]
ExpertParallel = Annotated[int, typer.Option("--ep", help="Data-parallel ranks that share the experts.")]
Interconnect = Annotated[
    str, typer.Option("--interconnect", metavar="NAME", help="Between GPUs of a node. Default: the device's own.")
]
InterNode = Annotated[str, typer.Option("--inter-node", metavar="NAME", help="Between nodes, e.g. ib200, eth100.")]
FabricFileName = Annotated[
    Path | None, typer.Option("--fabric-file", metavar="FILE", help="Links of your own, as TOML or JSON.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE.json", help="Write the timeline for ui.perfetto.dev (Chrome trace format)."),
]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=VALUE", help="Bind a symbolic dimension other than the batch; repeatable."),
]
CheckpointName = Annotated[
    str | None, typer.Option("--checkpoint", metavar="NAME|FOLDER", help="Default: the shipped base.")
]
MeasuredInferenceMs = Annotated[
    float | None,
    typer.Option(
        "--measured-inference-ms",
        metavar="MS",
        help="Timed forward pass (eval mode) of the same model on one GPU with the same software: corrects the step.",
    ),
]
MeasuredBatch = Annotated[
    int | None, typer.Option("--measured-batch", metavar="N", help="Batch of that forward pass. Default: the job's.")
]
MeasuredPrecision = Annotated[
    str | None, typer.Option("--measured-precision", metavar="P", help="Its precision. Default: the job's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def device_of(name: str | None, file: Path | None) -> DeviceSpec:
    """The device of ``--device`` or ``--device-file``; the default where neither is given."""
    if name is not None and file is not None:
        raise UsageError("--device and --device-file exclude each other")
    return load_device_file(file) if file is not None else find_device(DEFAULT_DEVICE_NAME if name is None else name)


def own_devices(files: list[Path] | None) -> list[DeviceSpec]:
    """The devices of repeated ``--device-file`` options."""
    return [load_device_file(file) for file in files or ()]


def fabric_of(file: Path | None) -> "FabricFile | None":
    """The links of ``--fabric-file``."""
    if file is None:
        return None
    from gnnpred.communication.fabrics import load_fabric_file

    return load_fabric_file(file)


def phase_of(text: str) -> Phase:
    name = text.strip().lower().replace("-", "_")
    try:
        return Phase({"infer": "inference", "training": "train"}.get(name, name))
    except ValueError:
        raise UsageError(f"unknown phase {text!r}: choose one of {', '.join(Phase)}") from None


def activation_rule_of(text: str) -> ActivationRule:
    try:
        return ActivationRule(text.strip().lower().replace("-", "_"))
    except ValueError:
        raise UsageError(f"unknown activation rule {text!r}: choose one of {', '.join(ActivationRule)}") from None


def compiler_of(name: str, *, compiled: bool) -> str:
    if compiled and name == "xla":
        raise UsageError("--compile is torch.compile and excludes --compiler xla")
    return "torch_compile" if compiled else name


def measured_inference_of(
    milliseconds: float | None, batch: int | None, precision: str | None
) -> "MeasuredInference | None":
    """What ``--measured-inference-ms`` and the options that describe it say; None without them."""
    if milliseconds is None:
        if batch is not None or precision is not None:
            raise UsageError("--measured-batch and --measured-precision describe --measured-inference-ms: give it too")
        return None
    from gnnpred.inference_correction import MeasuredInference

    return MeasuredInference(
        ms=milliseconds, batch_size=batch, precision=Precision.parse(precision) if precision is not None else None
    )


def dims_of(texts: list[str] | None) -> dict[str, int]:
    """``["seq=128"]`` -> ``{"seq": 128}``; raises UsageError that names the offender."""
    dims: dict[str, int] = {}
    for text in texts or ():
        name, equals, value = text.rpartition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"--dim {text!r}: write NAME=VALUE, e.g. --dim sequence=128")
        try:
            dims[name] = int(value)
        except ValueError:
            raise UsageError(f"--dim {text!r}: {value!r} is not a whole number") from None
        if dims[name] <= 0:
            raise UsageError(f"--dim {text!r}: a dimension must be at least 1")
    return dims
