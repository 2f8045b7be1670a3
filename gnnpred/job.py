"""What is predicted: the training run (job) on top of a graph."""

from dataclasses import dataclass
from enum import StrEnum

from gnnpred.errors import UsageError
from gnnpred.hardware import DeviceSpec


class Precision(StrEnum):
    """Pure types, and autocast with fp16 (``mixed``) or bf16 (``mixed-bf16``) over fp32 weights."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    MIXED = "mixed"
    MIXED_BF16 = "mixed-bf16"

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """The precision of that name or alias; raises UsageError naming the choices."""
        name = text.strip().lower().replace("_", "-")
        name = {
            "amp": "mixed", "amp-fp16": "mixed", "mixed-fp16": "mixed", "amp-bf16": "mixed-bf16",
            "half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32",
            "float64": "fp64", "double": "fp64",
        }.get(name, name)  # fmt: skip
        try:
            return cls(name)
        except ValueError:
            choices = ", ".join(cls)
            raise UsageError(f"unknown precision {text!r}: choose one of {choices}") from None


class Phase(StrEnum):
    """What one measured iteration holds."""

    TRAIN = "train"  # forward, loss, backward, optimizer step
    FORWARD_BACKWARD = "forward_backward"  # without the optimizer step
    INFERENCE = "inference"  # forward only, no gradient


class ActivationRule(StrEnum):
    """Which dtype activations have between ops under reduced precision.

    ``autocast`` follows PyTorch's op lists (norms and softmax in fp32, casts in between); ``all_half``
    keeps every activation in the half type over fp32 master weights (Apex O2, ``use_fp16`` of
    tf_cnn_benchmarks, MXNet/Paddle pure fp16). It matters only for the mixed precisions.
    """

    AUTOCAST = "autocast"
    ALL_HALF = "all_half"


OPTIMIZERS = ("sgd", "adam", "adamw", "lamb", "none")
MEMORY_FORMATS = ("nchw", "nhwc")
COMPILERS = ("eager", "torch_compile", "xla")
HOST_SYSTEMS = ("linux", "windows", "wsl")
ATTENTIONS = ("auto", "fused", "eager")
CHECKPOINTINGS = ("none", "full")
STRATEGIES = ("ddp", "dp")  # DistributedDataParallel; nn.DataParallel (one process)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job. ``batch_size`` is per GPU; ``None`` keeps the batch of the graph."""

    device: DeviceSpec
    precision: Precision = Precision.FP32
    batch_size: int | None = None
    phase: Phase = Phase.TRAIN
    optimizer: str = "sgd"  # momentum SGD where "sgd"
    memory_format: str = "nchw"
    compiler: str = "eager"
    framework: str = "pytorch"  # pytorch | tensorflow | mxnet | paddle | torch7 ...
    framework_version: str = ""  # e.g. "2.4"; "" = the checkpoint's default
    activation_rule: ActivationRule = ActivationRule.AUTOCAST
    host_os: str = "linux"  # Windows and WSL launch kernels later than Linux
    tf32_matmul: bool = True  # under tf32: also matmul (False: convolutions and RNNs only, PyTorch >= 1.12's default)
    host_copy: bool = False  # the batch is copied from pageable host memory inside the step
    data_loader: bool = False  # a real data pipeline feeds the step
    attention: str = "auto"  # fused: one kernel (flash attention); eager: in pieces; auto: by version
    activation_checkpointing: str = "none"  # full: repeated layers run their forward pass again in the backward pass
    gpus: int = 1
    nodes: int = 1
    strategy: str = "ddp"
    interconnect: str = ""  # inside a node; "" = the device's default
    inter_node: str = ""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size <= 0:
            raise UsageError(f"batch size must be at least 1, got {self.batch_size}")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"unknown optimizer {self.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
        if self.compiler not in COMPILERS:
            raise UsageError(f"unknown compiler {self.compiler!r}: choose one of {', '.join(COMPILERS)}")
        if self.host_os not in HOST_SYSTEMS:
            raise UsageError(f"unknown operating system {self.host_os!r}: choose one of {', '.join(HOST_SYSTEMS)}")
        if self.attention not in ATTENTIONS:
            raise UsageError(f"unknown attention {self.attention!r}: choose one of {', '.join(ATTENTIONS)}")
        if self.activation_checkpointing not in CHECKPOINTINGS:
            raise UsageError(
                f"unknown activation checkpointing {self.activation_checkpointing!r}: "
                f"choose one of {', '.join(CHECKPOINTINGS)}"
            )
        if self.strategy not in STRATEGIES:
            raise UsageError(f"unknown strategy {self.strategy!r}: choose one of {', '.join(STRATEGIES)}")
        if self.memory_format not in MEMORY_FORMATS:
            raise UsageError(f"unknown memory format {self.memory_format!r}: choose one of {', '.join(MEMORY_FORMATS)}")
        if self.gpus < 1 or self.nodes < 1:
            raise UsageError(f"--gpus and --nodes must be at least 1, got {self.gpus} and {self.nodes}")
        if self.gpus % self.nodes:
            raise UsageError(f"--gpus {self.gpus} is the total and must be divisible by --nodes {self.nodes}")


def host_os_of(text: str) -> str:
    """``Win11`` -> windows, ``WSL2 Ubuntu`` -> wsl; any other name, and none, counts as Linux."""
    name = text.lower()
    return "wsl" if "wsl" in name else "windows" if "win" in name.replace("darwin", "") else "linux"


def resolve_precision(precision: Precision, device: DeviceSpec) -> tuple[Precision, str | None]:
    """The precision that the job really runs in on that device, and a note where it differs.

    TF32 without TF32 units is fp32, as in every framework. bf16 without bf16 units is merely emulated
    and nobody trains with it: raises UsageError that names the precision to use instead.
    """
    if device.supports(precision):
        return precision, None
    if precision is Precision.TF32:
        return Precision.FP32, f"{device.name} has no TF32 units: tf32 runs as fp32"
    if precision in (Precision.BF16, Precision.MIXED_BF16):
        instead = Precision.MIXED if precision is Precision.MIXED_BF16 else Precision.FP16
        raise UsageError(
            f"{device.name} has no bf16 units (precision {precision}): use --precision {instead}, "
            "or a device from Ampere (A100, RTX3090) or CDNA (MI100) on"
        )
    raise UsageError(f"{device.name} does not support precision {precision}")
