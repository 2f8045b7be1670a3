"""The step that is measured: a module by name, its inputs, a loss and an optimizer, in one precision and layout."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gnnpred.collect.ranks import Ranks
from gnnpred.collect.recipe import Configuration
from gnnpred.errors import GnnpredError
from gnnpred.job import Phase, Precision
from gnnpred.model_sources import BuiltModel, build_model

if TYPE_CHECKING:
    import torch

# Weights hardly move: every step does the same work and half types do not overflow.
_LEARNING_RATE = 1e-6
_FP16_EPSILON = 1e-4
_FLOAT_DTYPES = {Precision.FP64: "float64", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
_AUTOCAST_DTYPES = {Precision.MIXED: "float16", Precision.MIXED_BF16: "bfloat16"}


class Step:
    """A step that can be called again and again; holds the module, its inputs, targets and optimizer."""

    def __init__(self, run: "Callable[[], torch.Tensor]", inputs: "Sequence[torch.Tensor]") -> None:
        self._run = run
        self.inputs = inputs

    def __call__(self) -> "torch.Tensor":
        """Run once; returns the loss (the outputs' sum in inference), on the device."""
        return self._run()


def build_step(configuration: Configuration, device: str, ranks: Ranks | None = None) -> Step:
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
    if ranks:
        half = _AUTOCAST_DTYPES.get(precision)
        module = ranks.spread(module, configuration.strategy, getattr(torch, half) if half else None)
    eager = module
    if configuration.compile:
        module = torch.compile(module)

    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        if precision not in _AUTOCAST_DTYPES:
            yield
            return
        with torch.autocast(device, dtype=getattr(torch, _AUTOCAST_DTYPES[precision])):
            yield

    fetch = _fetcher(inputs, configuration.host_copy, device)
    if phase is Phase.INFERENCE:

        def infer() -> torch.Tensor:
            with torch.inference_mode(), autocast():
                return sum(output.float().mean() for output in _float_outputs(module(*fetch())))

        return Step(infer, inputs)

    with torch.no_grad(), autocast():  # not compiled: a forward pass without gradients would be compiled apart
        targets = [_target_of(output) for output in _float_outputs(eager(*inputs))]
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
            outputs = _float_outputs(module(*fetch()))
            loss = sum(_loss_of(output, target) for output, target in zip(outputs, targets, strict=True))
        scaler.scale(loss).backward()
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return Step(train, inputs)


def _fetcher(inputs: "list[torch.Tensor]", host_copy: str, device: str) -> "Callable[[], list[torch.Tensor]]":
    """What a step's inputs come from: the device itself, or a copy of host memory each time.

    On a CPU the copy is one within its memory.
    """
    if host_copy == "none":
        return lambda: inputs
    if device == "cpu":
        return lambda: [each.clone() for each in inputs]
    on_host = [each.to("cpu") for each in inputs]
    is_pinned = host_copy == "pinned"
    if is_pinned:
        on_host = [each.pin_memory() for each in on_host]
    return lambda: [each.to(device, non_blocking=is_pinned) for each in on_host]


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
            return torch.optim.Adam(parameters, lr=_LEARNING_RATE, eps=_epsilon_of(parameters))
        case "adamw":
            return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, eps=_epsilon_of(parameters))
    return None


def _epsilon_of(parameters: "list[torch.nn.Parameter]") -> float:
    """PyTorch's default of Adam; in fp16 that is 0, and weights whose gradients are small would become NaN."""
    import torch

    return _FP16_EPSILON if any(each.dtype is torch.float16 for each in parameters) else 1e-8
