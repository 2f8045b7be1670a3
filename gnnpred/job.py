"""What is predicted: the training run (job) on top of a graph."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from gnnpred.errors import UsageError
from gnnpred.hardware import DeviceSpec

if TYPE_CHECKING:
    from gnnpred.communication.fabrics import FabricFile


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
# DistributedDataParallel; nn.DataParallel (one process); fully sharded (FSDP = ZeRO-3) and the ZeRO stages
STRATEGIES = ("ddp", "dp", "fsdp", "zero1", "zero2", "zero3")
SHARDED_STRATEGIES = ("fsdp", "zero1", "zero2", "zero3")
MAX_MICROBATCHES = 2**16


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job. ``batch_size`` is that of one micro-batch of one data-parallel rank; ``None`` keeps the graph's batch.

    The GPUs are ``tensor_parallel x pipeline_parallel x data_parallel``; a step trains on
    batch_size x data_parallel x num_microbatches samples. With DDP alone a rank is a GPU.
    """

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
    strategy: str = "ddp"  # of the data-parallel ranks
    shard_group: int | None = None  # sharded strategies: ranks that share one copy; None = all (smaller: hybrid)
    grad_accum: int = 1  # micro-batches whose gradients add up before the optimizer runs
    tensor_parallel: int = 1  # GPUs that share every product of the repeated layers (Megatron)
    sequence_parallel: bool = False  # tensor parallel with reduce-scatter + all-gather instead of all-reduce
    pipeline_parallel: int = 1  # stages
    microbatches: int | None = None  # per step through the pipeline; None = grad_accum
    interleave: int = 1  # chunks of layers (virtual stages) per stage
    expert_parallel: int = 1  # data-parallel ranks that share the experts of mixture-of-experts layers
    interconnect: str = ""  # inside a node; "" = the device's default
    inter_node: str = ""
    fabric_file: "FabricFile | None" = None  # links of the user's own, in place of named ones

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
        self._check_layout()
        self._check_strategy()

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks: copies of the model that train on different samples."""
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def num_microbatches(self) -> int:
        """Forward and backward passes of one rank per optimizer step."""
        return self.grad_accum if self.microbatches is None else self.microbatches

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def shard_size(self) -> int:
        """Ranks over which a sharded strategy spreads one copy of weights, gradients or optimizer state."""
        if self.strategy not in SHARDED_STRATEGIES:
            return 1
        return self.data_parallel if self.shard_group is None else self.shard_group

    @property
    def is_plain(self) -> bool:
        """Whether every GPU holds the whole model and steps after every pass, as DDP and DataParallel do."""
        return self.tensor_parallel == self.pipeline_parallel == self.expert_parallel == self.num_microbatches == 1

    def on_one_gpu(self) -> "JobSpec":
        """The same job on one GPU that holds the whole model and steps after every pass."""
        return replace(
            self, gpus=1, nodes=1, strategy="ddp", shard_group=None, grad_accum=1, tensor_parallel=1,
            sequence_parallel=False, pipeline_parallel=1, microbatches=None, interleave=1, expert_parallel=1,
        )  # fmt: skip

    def _check_layout(self) -> None:
        sizes = {
            "--tp": self.tensor_parallel, "--pp": self.pipeline_parallel, "--ep": self.expert_parallel,
            "--grad-accum": self.grad_accum, "--interleave": self.interleave,
            "--microbatches": 1 if self.microbatches is None else self.microbatches,
            "--shard-group": 1 if self.shard_group is None else self.shard_group,
        }  # fmt: skip
        for option, size in sizes.items():
            if size < 1:
                raise UsageError(f"{option} must be at least 1, got {size}")
        if max(sizes["--grad-accum"], sizes["--microbatches"]) > MAX_MICROBATCHES:
            raise UsageError(f"more than {MAX_MICROBATCHES} micro-batches per step: check --grad-accum, --microbatches")
        tp, pp, ep = self.tensor_parallel, self.pipeline_parallel, self.expert_parallel
        if self.gpus % (tp * pp):
            raise UsageError(
                f"--gpus {self.gpus} does not divide into --tp {tp} x --pp {pp} x data-parallel ranks: "
                f"give a multiple of {tp * pp}"
            )
        if self.data_parallel % ep:
            raise UsageError(
                f"--ep {ep} does not divide the {self.data_parallel} data-parallel ranks "
                f"(--gpus {self.gpus} / (--tp {tp} x --pp {pp}))"
            )
        if self.shard_group is not None and self.data_parallel % self.shard_group:
            raise UsageError(
                f"--shard-group {self.shard_group} does not divide the {self.data_parallel} data-parallel ranks"
            )
        if self.microbatches is not None and self.grad_accum not in (1, self.microbatches):
            raise UsageError(
                f"--microbatches {self.microbatches} are the accumulated passes of a step already: "
                f"leave out --grad-accum {self.grad_accum}"
            )
        if pp > 1 and self.microbatches is None and self.grad_accum == 1:
            raise UsageError(f"--pp {pp} needs --microbatches (per step; at least {pp} keep every stage busy)")
        if self.interleave > 1 and pp == 1:
            raise UsageError(f"--interleave {self.interleave} divides pipeline stages: give --pp too")
        if self.interleave > 1 and self.num_microbatches % pp:
            raise UsageError(
                f"--interleave needs --microbatches to be a multiple of --pp {pp}, got {self.num_microbatches}"
            )
        if self.sequence_parallel and tp == 1:
            raise UsageError("--sequence-parallel is a form of tensor parallelism: give --tp too")

    def _check_strategy(self) -> None:
        """What a strategy excludes, whatever the model is."""
        if self.strategy == "dp":
            others = {"--tp": self.tensor_parallel, "--pp": self.pipeline_parallel, "--ep": self.expert_parallel}
            for option, size in others.items():
                if size > 1:
                    raise UsageError(f"--strategy dp (nn.DataParallel) is one process and excludes {option}: use ddp")
            if self.nodes > 1:
                raise UsageError(
                    "--strategy dp (nn.DataParallel) runs in one process on one node: use ddp for several nodes"
                )
        if self.strategy not in SHARDED_STRATEGIES:
            if self.shard_group is not None:
                sharded = ", ".join(SHARDED_STRATEGIES)
                raise UsageError(f"--shard-group belongs to {sharded}; --strategy {self.strategy} shards nothing")
            return
        if self.precision is Precision.FP64:
            raise UsageError(
                f"--strategy {self.strategy} excludes fp64 (communication of shards is defined for fp32 and half types)"
            )
        if self.optimizer == "lamb":
            raise UsageError(
                f"--strategy {self.strategy} excludes lamb: it needs the norm of whole layers, which no shard holds; "
                "use ddp, or adamw"
            )
        if self.pipeline_parallel > 1 and self.strategy in ("zero2", "zero3", "fsdp"):
            raise UsageError(
                f"--strategy {self.strategy} excludes --pp: every micro-batch would reduce or gather all shards again; "
                "use zero1 or ddp"
            )


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
