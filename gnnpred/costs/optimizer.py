"""Cost rules of the optimizer step, gradient zeroing and gradient unscaling."""

from math import ceil

from gnnpred.costs.base import RawCost, Sizes
from gnnpred.graph import Op

# Bytes per parameter as (reads, writes) of the stored type; optimizer states have the parameter's type.
OPTIMIZER_PASSES = {
    "sgd": (3, 2),  # p, g, momentum -> p, momentum: 20 bytes per fp32 parameter
    "adam": (4, 3),  # p, g, m, v -> p, m, v: 28 bytes
    "adamw": (4, 3),
    "lamb": (8, 4),  # adam's states, the update written out, both norms, then p and update again: 48 bytes
}
# Elementwise kernels per tensor in a loop over tensors, and list kernels of the foreach form
# (torch/optim/sgd.py, adam.py): sgd with weight decay and momentum 4, adam 8.
_OPTIMIZER_KERNELS = {"sgd": 4, "adam": 8, "adamw": 8, "lamb": 14}
_OPTIMIZER_FLOPS = {"sgd": 6, "adam": 14, "adamw": 14, "lamb": 20}
# multi_tensor_apply of aten/src/ATen/native/cuda/MultiTensorApply.cuh: at most 64 tensors of two lists and 320 blocks
# of 65536 elements per launch.
_FOREACH_TENSORS = 64
_FOREACH_ELEMENTS = 320 * 65536


def foreach_launches(num_tensors: int, num_elements: int) -> int:
    """Launches of one multi-tensor kernel over that many tensors."""
    return max(1, ceil(num_tensors / _FOREACH_TENSORS), ceil(num_elements / _FOREACH_ELEMENTS))


def _optimizer_step(op: Op, s: Sizes) -> RawCost:
    name, num_bytes = op.attributes["optimizer"], op.attributes["num_bytes"]
    num_tensors, num_elements = op.attributes["num_tensors"], op.attributes["num_elements"]
    reads, writes = OPTIMIZER_PASSES.get(name, (0, 0))
    per_kernel = foreach_launches(num_tensors, num_elements) if op.attributes["foreach"] else num_tensors
    launches = _OPTIMIZER_KERNELS.get(name, 0) * per_kernel
    return _OPTIMIZER_FLOPS.get(name, 0) * num_elements, reads * num_bytes, writes * num_bytes, launches


def _zero_grad(op: Op, s: Sizes) -> RawCost:
    """Dropped gradients cost nothing. Zeroed ones are filled, and backward then adds to each instead of storing it."""
    if op.attributes["set_to_none"]:
        return 0, 0, 0, 0
    num_bytes, num_tensors = op.attributes["num_bytes"], op.attributes["num_tensors"]
    return op.attributes["num_elements"], 2 * num_bytes, 2 * num_bytes, 2 * num_tensors


def _unscale(op: Op, s: Sizes) -> RawCost:
    """GradScaler: every gradient is read, checked, scaled and written (always a multi-tensor kernel)."""
    num_bytes = op.attributes["num_bytes"]
    launches = foreach_launches(op.attributes["num_tensors"], op.attributes["num_elements"])
    return 2 * op.attributes["num_elements"], num_bytes, num_bytes, launches


OPTIMIZER_RULES = {"optimizer_step": _optimizer_step, "zero_grad": _zero_grad, "unscale": _unscale}
