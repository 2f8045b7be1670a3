"""The vocabulary of canonical ops: what a framework launches, whatever the exporter wrote.

Both front ends (ONNX files, traced PyTorch modules) end in these kinds. Conventions, by kind:

===================== ============================= ================================================
kind                  inputs                        attributes
===================== ============================= ================================================
conv                  x (N,C,*), weight, [bias]     kernel, stride, dilation, padding (tuples), groups
conv_transpose        x, weight, [bias]             as conv
linear                x (..., k), weight, [bias]    -   (output (..., n); weight has n*k elements and
                                                    is a parameter or derived from parameters)
matmul                a (..., m, k), b (..., k, n)  -   (both depend on data; bmm and einsum too)
sdpa                  q, k, v, [mask]               causal; q is (B, heads, seq_q, head_dim)
lstm gru rnn          x, weights...                 hidden_size, num_directions, num_steps_axis
batch_norm            x, [weight, bias]             -   (running statistics are left out)
layer_norm rms_norm   x, [weight, bias]             normalized_size (elements per normalised group)
group_norm            x, [weight, bias]             groups (instance norm: groups = channels)
local_response_norm   x                             size
softmax log_softmax   x                             axis
max_pool avg_pool     x                             kernel, stride
reduce_*              x                             axes (global average pooling is reduce_mean)
embedding             weight, indices               -
gather                x, indices                    axis
concat                x...                          axis
pad                   x                             -
resize                x                             mode
dropout               x                             ratio
cast copy             x                             -
cross_entropy         logits, [target]              -
view transpose slice  x                             -   (free in forward; slice and expand cost in backward)
expand split
===================== ============================= ================================================

``slice`` and ``split`` are views; a ``split`` has several outputs. ``copy`` is a materialised
view (contiguous(), a reshape that cannot be a view). ``view`` covers reshape, squeeze, flatten.
"""

from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """Coarse class of an op: chooses cost formula and feature one-hot."""

    CONV = "conv"
    MATMUL = "matmul"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    NORM = "norm"
    SOFTMAX = "softmax"
    POOL = "pool"
    REDUCTION = "reduction"
    UNARY = "unary"  # elementwise, one data input
    BINARY = "binary"  # elementwise, two or more data inputs (broadcasting)
    MOVEMENT = "movement"  # copy, concat, pad, cast, resize ...
    INDEXING = "indexing"  # gather, embedding, scatter, sort ...
    LOSS = "loss"
    OPTIMIZER = "optimizer"
    VIEW = "view"  # no kernel in forward
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class OpKind:
    name: str
    category: Category


_KINDS_BY_CATEGORY: dict[Category, str] = {
    Category.CONV: "conv conv_transpose",
    Category.MATMUL: "linear matmul",
    Category.ATTENTION: "sdpa",
    Category.RECURRENT: "lstm gru rnn selective_scan",
    Category.NORM: "batch_norm layer_norm rms_norm group_norm local_response_norm l2_norm",
    Category.SOFTMAX: "softmax log_softmax",
    Category.POOL: "max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool",
    Category.REDUCTION: "reduce_mean reduce_sum reduce_max reduce_min reduce_prod reduce_var reduce_l2 "
    "logsumexp argmax argmin cumsum cumprod all any",
    Category.UNARY: "relu leaky_relu prelu elu selu celu gelu gelu_tanh quick_gelu silu mish hardswish hardsigmoid "
    "hardtanh relu6 clamp sigmoid tanh softplus softsign threshold exp log sqrt rsqrt reciprocal neg abs sign erf "
    "sin cos tan asin acos atan sinh cosh asinh acosh atanh floor ceil round trunc square pow_scalar logical_not "
    "isnan isinf bitwise_not dropout rope fake_quantize",
    Category.BINARY: "add sub mul div pow mod maximum minimum where equal less less_equal greater greater_equal "
    "not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor shift lerp addcmul atan2",
    Category.MOVEMENT: "copy cast concat stack pad resize pixel_shuffle roll tile flip fill range one_hot tril "
    "im2col col2im quantize dequantize random",
    Category.INDEXING: "embedding gather gather_elements scatter topk sort nonzero unique grid_sample roi_align nms "
    "compress",
    Category.LOSS: "cross_entropy mse_loss bce_loss sum_loss",
    Category.OPTIMIZER: "optimizer_step zero_grad unscale",
    Category.VIEW: "view transpose slice split expand identity",
    Category.OTHER: "unsupported einsum fft control_flow",
}

OP_KINDS: dict[str, OpKind] = {
    name: OpKind(name, category) for category, names in _KINDS_BY_CATEGORY.items() for name in names.split()
}


def category_of(kind: str) -> Category:
    """Category of an op kind; kinds outside the vocabulary are ``OTHER``."""
    known = OP_KINDS.get(kind)
    return known.category if known else Category.OTHER
