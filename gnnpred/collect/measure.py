"""One training step on this machine: built, warmed up until steady, timed. Runs in a worker process of its own."""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gnnpred.collect.recipe import Configuration, MeasureSettings
from gnnpred.errors import GnnpredError
from gnnpred.job import Phase, Precision
from gnnpred.model_sources import BuiltModel, build_model

if TYPE_CHECKING:
    import torch

# Warm-up ends when the medians of two successive windows differ by less than this.
_STABLE_PCT = 3.0
_WARMUP_WINDOW = 5
_MIN_TIMED_STEPS = 3
# Above this distance of the 10th from the 90th percentile, in per cent of the median, a run counts as unsteady.
UNSTEADY_SPREAD_PCT = 15.0
# Weights hardly move: every step does the same work and half types do not overflow.
_LEARNING_RATE = 1e-6
_SEED = 0
_FLOAT_DTYPES = {Precision.FP64: "float64", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
_AUTOCAST_DTYPES = {Precision.MIXED: "float16", Precision.MIXED_BF16: "bfloat16"}


def measure(configuration: Configuration, settings: MeasureSettings, *, device: str) -> dict[str, Any]:
    """Figures of one configuration on ``device`` (cpu or cuda): times in ms, memory in MiB.

    Raises GnnpredError for a model that cannot be built or run so, torch.OutOfMemoryError as torch does.
    """
    import torch

    torch.manual_seed(_SEED)
    flags = _set_flags(configuration.precision, settings)
    started = time.perf_counter()
    step = _build_step(configuration, device)
    build_s = time.perf_counter() - started
    warmup_ms, is_stable = _warm_up(step, settings, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    num_steps = _num_timed_steps(warmup_ms[-1], settings)
    started = time.perf_counter()
    step_ms = timed_on_gpu(step, num_steps) if device == "cuda" else timed_on_host(step, num_steps)
    wall_ms = (time.perf_counter() - started) * 1e3 / num_steps
    loss = float(step())
    ordered = sorted(step_ms)
    median_ms = statistics.median(step_ms)
    p10_ms, p90_ms = (ordered[round(share * (num_steps - 1))] for share in (0.1, 0.9))
    spread_pct = (p90_ms - p10_ms) / median_ms * 100
    return {
        "step_time_ms": median_ms,
        "step_p10_ms": p10_ms,
        "step_p90_ms": p90_ms,
        "wall_clock_ms": wall_ms,
        "spread_pct": spread_pct,
        "num_steps": num_steps,
        "num_warmup_steps": len(warmup_ms),
        "warning": _steadiness_warning(is_stable, len(warmup_ms), spread_pct),
        "peak_memory_mib": _peak_memory_mib(device),
        "input": _shape_text(step.inputs),
        "loss": loss if math.isfinite(loss) else str(loss),
        "build_s": build_s,
        "clock": "cuda events" if device == "cuda" else "wall clock",
        **flags,
    }


def _steadiness_warning(is_stable: bool, num_warmup_steps: int, spread_pct: float) -> str:
    if spread_pct > UNSTEADY_SPREAD_PCT:
        return f"not steady: p10 to p90 of the step time spans {spread_pct:.0f} % of the median"
    return "" if is_stable else f"still speeding up or slowing down after {num_warmup_steps} warm-up steps"


def _set_flags(precision: Precision, settings: MeasureSettings) -> dict[str, Any]:
    """TF32 and algorithm search, set whatever the version's defaults are; returns what was set."""
    import torch

    allow_tf32 = precision is Precision.TF32
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    return {"allow_tf32": allow_tf32, "cudnn_benchmark": settings.cudnn_benchmark}


# ---------------------------------------------------------------------------------------- the step


class _Step:
    """A step that can be called again and again; holds the module, its inputs, targets and optimizer."""

    def __init__(self, run: "Callable[[], torch.Tensor]", inputs: "Sequence[torch.Tensor]") -> None:
        self._run = run
        self.inputs = inputs

    def __call__(self) -> "torch.Tensor":
        """Run once; returns the loss (the outputs' sum in inference), on the device."""
        return self._run()


def _build_step(configuration: Configuration, device: str) -> _Step:
    import torch

    precision, phase = configuration.precision, configuration.phase
    built = build_model(
        configuration.model, batch_size=configuration.batch_size, image_size=configuration.image_size,
        seq_len=configuration.seq_len, train=phase is not Phase.INFERENCE, device=device,
    )  # fmt: skip
    _check_batch(built, configuration)
    inputs = _filled_inputs(built, configuration.model)
    module = built.module
    if precision in _FLOAT_DTYPES:
        dtype = getattr(torch, _FLOAT_DTYPES[precision])
        module = module.to(dtype)
        inputs = [each.to(dtype) if each.is_floating_point() else each for each in inputs]
    if configuration.memory_format == "nhwc":
        if not any(each.dim() == 4 for each in inputs):
            raise GnnpredError(f"{configuration.model} takes no images: memory format nhwc does not apply")
        module = module.to(memory_format=torch.channels_last)
        inputs = [each.to(memory_format=torch.channels_last) if each.dim() == 4 else each for each in inputs]
    if configuration.compile:
        module = torch.compile(module)

    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        if precision not in _AUTOCAST_DTYPES:
            yield
            return
        with torch.autocast(device, dtype=getattr(torch, _AUTOCAST_DTYPES[precision])):
            yield

    if phase is Phase.INFERENCE:

        def infer() -> torch.Tensor:
            with torch.inference_mode(), autocast():
                return sum(output.float().mean() for output in _float_outputs(module(*inputs)))

        return _Step(infer, inputs)

    with torch.no_grad(), autocast():
        targets = [_target_of(output) for output in _float_outputs(module(*inputs))]
    if not targets:
        raise GnnpredError(f"{configuration.model} returns no floating-point tensor to train on")
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        raise GnnpredError(f"{configuration.model} has no parameters to train")
    optimizer = _optimizer_of(configuration.optimizer, parameters)
    # autocast in fp16 needs loss scaling; elsewhere a disabled scaler does nothing
    scaler = torch.amp.GradScaler(device, enabled=precision is Precision.MIXED)

    def train() -> torch.Tensor:
        for each in parameters:
            each.grad = None
        with autocast():
            outputs = _float_outputs(module(*inputs))
            loss = sum(_loss_of(output, target) for output, target in zip(outputs, targets, strict=True))
        scaler.scale(loss).backward()
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return _Step(train, inputs)


def _check_batch(built: BuiltModel, configuration: Configuration) -> None:
    first = built.example_inputs[0]
    batch_size = first.shape[0] if first.dim() else 1
    if batch_size != configuration.batch_size:
        raise GnnpredError(
            f"{configuration.model} made an example of batch {batch_size}, the recipe asks for "
            f"{configuration.batch_size}: let the function take batch_size"
        )


def _filled_inputs(built: BuiltModel, model: str) -> "list[torch.Tensor]":
    """Random values for library models, whose example inputs are empty; a user's own examples stay as they are."""
    import torch

    if model.split(":")[0] not in ("timm", "torchvision", "hf"):
        return list(built.example_inputs)
    config = getattr(getattr(built.module, "model", None), "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_tokens = getattr(text_config, "vocab_size", None) or 1
    return [
        torch.randn_like(each) if each.is_floating_point() else torch.randint_like(each, 0, num_tokens)
        for each in built.example_inputs
    ]


def _float_outputs(outputs: Any) -> "list[torch.Tensor]":
    """Every floating-point tensor that a module returned, auxiliary heads included."""
    import torch

    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.is_floating_point() else []
    values = outputs.values() if hasattr(outputs, "values") else outputs if isinstance(outputs, tuple | list) else ()
    return [tensor for value in values for tensor in _float_outputs(value)]


def _target_of(output: "torch.Tensor") -> "torch.Tensor | None":
    """Random classes for outputs of 2 axes and more: the last axis of sequences, the second of images and rows."""
    import torch

    if output.dim() < 2:
        return None
    axis = 2 if output.dim() == 3 else 1
    shape = [size for i, size in enumerate(output.shape) if i != axis]
    return torch.randint(0, output.shape[axis], shape, device=output.device)


def _loss_of(output: "torch.Tensor", target: "torch.Tensor | None") -> "torch.Tensor":
    from torch.nn import functional

    if target is None:
        return output.float().square().mean()
    if output.dim() == 3:
        output, target = output.flatten(0, 1), target.flatten()
    return functional.cross_entropy(output, target)


def _optimizer_of(name: str, parameters: "list[torch.nn.Parameter]") -> "torch.optim.Optimizer | None":
    import torch

    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, lr=_LEARNING_RATE)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=_LEARNING_RATE)
    return None


# ---------------------------------------------------------------------------------------- timing


def _warm_up(step: _Step, settings: MeasureSettings, device: str) -> tuple[list[float], bool]:
    """Times (ms) of the warm-up steps, and whether they had settled when warm-up ended."""
    import torch

    times_ms: list[float] = []
    started = time.perf_counter()
    while len(times_ms) < settings.max_warmup_steps:
        before = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - before) * 1e3)
        if len(times_ms) < settings.min_warmup_steps:
            continue
        if has_settled(times_ms):
            return times_ms, True
        if time.perf_counter() - started > settings.max_warmup_s:
            break
    return times_ms, False


def has_settled(times_ms: Sequence[float]) -> bool:
    """Whether the medians of the last two windows agree."""
    if len(times_ms) < 2 * _WARMUP_WINDOW:
        return False
    last = statistics.median(times_ms[-_WARMUP_WINDOW:])
    before = statistics.median(times_ms[-2 * _WARMUP_WINDOW : -_WARMUP_WINDOW])
    return abs(last - before) <= _STABLE_PCT / 100 * last


def _num_timed_steps(step_ms: float, settings: MeasureSettings) -> int:
    fitting = int(settings.max_timed_s * 1e3 / max(step_ms, 1e-6))
    return max(_MIN_TIMED_STEPS, min(settings.steps, fitting))


def timed_on_host(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Times in ms by the host's clock."""
    times_ms = []
    for _ in range(num_steps):
        before = time.perf_counter()
        step()
        times_ms.append((time.perf_counter() - before) * 1e3)
    return times_ms


def timed_on_gpu(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Times in ms between events that the GPU itself records after every step; the host waits at the end alone."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for i in range(num_steps):
        step()
        events[i + 1].record()
    torch.cuda.synchronize()
    return [events[i].elapsed_time(events[i + 1]) for i in range(num_steps)]


def _peak_memory_mib(device: str) -> float | None:
    """Tensors that torch held at most on a GPU; on the CPU the largest resident size of this process."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    if os.name != "posix":
        return None
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB on Linux, bytes on macOS
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _shape_text(inputs: "Sequence[torch.Tensor]") -> str:
    """``3x224x224``: sizes without the batch, inputs separated by spaces."""
    return " ".join("x".join(str(size) for size in each.shape[1:]) or "1" for each in inputs)
