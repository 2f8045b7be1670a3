"""Small modules, and what autocast does with them: PyTorch's side recorded op by op, ours read off the graph."""

from collections import Counter

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gnnpred.corpus.trace import TRACE_BATCH_SIZE, trace_module
from gnnpred.graph import Component, DType, OpPhase
from gnnpred.job import Precision

DTYPES = {torch.float32: DType.FP32, torch.float16: DType.FP16, torch.bfloat16: DType.BF16, torch.float64: DType.FP64}
PRECISIONS = {torch.float16: Precision.MIXED, torch.bfloat16: Precision.MIXED_BF16}

# ATen operator -> our kind, for operators that both sides show one to one.
KINDS = {
    "convolution": "conv", "addmm": "linear", "mm": "linear", "bmm": "matmul", "baddbmm": "matmul",
    "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "native_batch_norm": "batch_norm",
    "_softmax": "softmax", "_log_softmax": "log_softmax", "mean": "reduce_mean", "sum": "reduce_sum",
    "cumsum": "cumsum", "prod": "reduce_prod", "linalg_vector_norm": "reduce_l2", "logsumexp": "logsumexp",
    "cat": "concat", "embedding": "embedding", "gelu": "gelu", "relu": "relu", "silu": "silu", "mish": "mish",
    "sigmoid": "sigmoid", "tanh": "tanh", "hardswish": "hardswish", "softplus": "softplus", "elu": "elu",
    "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal", "pow": "pow_scalar",
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "_prelu_kernel": "prelu", "prelu": "prelu",
    "max_pool2d_with_indices": "max_pool", "avg_pool2d": "avg_pool", "upsample_nearest2d": "resize",
    "upsample_bilinear2d": "resize", "constant_pad_nd": "pad", "addcmul": "addcmul", "atan2": "atan2",
    "grid_sampler_2d": "grid_sample", "native_dropout": "dropout", "mse_loss": "mse_loss",
}  # fmt: skip
SAME_KIND = {"square": "pow_scalar", "conv_transpose": "conv", "pow": "pow_scalar"}


class Recorder(TorchDispatchMode):
    """Casts as (from, to, elements), results as (kind, type of the result), products by operator and type."""

    def __init__(self):
        super().__init__()
        self.casts, self.results, self.products = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "convolution_backward"):
            first = result[1] if isinstance(result, tuple) else result
            self.products[name, DTYPES[first.dtype]] += 1
        base = name[:-1] if name.endswith("_") else name
        if name == "_to_copy" and args[0].dtype in DTYPES and result.dtype in DTYPES:
            if args[0].dtype is not result.dtype:
                self.casts[DTYPES[args[0].dtype], DTYPES[result.dtype], result.numel()] += 1
        elif base in KINDS:
            first = result[0] if isinstance(result, (tuple, list)) else result
            if first.dtype in DTYPES:
                self.results[KINDS[base], DTYPES[first.dtype]] += 1
        return result


def graph_of(module, inputs):
    def widen(x):
        shape = (TRACE_BATCH_SIZE * x.shape[0], *x.shape[1:])
        return torch.empty(shape, dtype=x.dtype, device="meta")

    return trace_module(module, [widen(x) for x in inputs])


def lowered_types(graph, phase):
    casts, results = Counter(), Counter()
    for op in graph.ops:
        if op.phase is not phase:
            continue
        if op.component is Component.CAST:
            source, result = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
            casts[source.dtype, result.dtype, result.num_elements] += 1
        elif op.component is Component.FORWARD and op.outputs:
            kind = SAME_KIND.get(op.kind, op.kind)
            x = graph.tensors[op.inputs[0]]
            if kind == "group_norm" and op.attributes["groups"] == x.shape[1]:
                kind = "batch_norm"  # what an instance norm is inside PyTorch
            if kind in KINDS.values() and graph.tensors[op.outputs[0]].dtype.is_float:
                results[kind, graph.tensors[op.outputs[0]].dtype] += 1
    return casts, results


def backward_products(graph):
    """(operator of PyTorch, type) -> how often; one convolution_backward stands for both gradients."""
    products = Counter()
    convolutions = set()
    for op in graph.ops:
        if op.phase is OpPhase.BACKWARD and op.kind in ("linear", "matmul"):
            products["mm" if op.kind == "linear" else "bmm", graph.tensors[op.outputs[0]].dtype] += 1
        elif op.phase is OpPhase.BACKWARD and op.kind in ("conv", "conv_transpose"):
            convolutions.add((op.forward_op_idx, graph.tensors[op.outputs[0]].dtype))
    for _, dtype in convolutions:
        products["convolution_backward", dtype] += 1
    return products


# ---------------------------------------------------------------------------------------------------------------------
# Modules. Each is (make, inputs); inputs have batch 1.


class Apply(nn.Module):
    """A function over some layers."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def _parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


def _attention(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    weights = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1)
    return m.out(weights @ v)


def _standardised(m, x):
    weight = m.conv.weight
    mean = weight.mean((1, 2, 3), keepdim=True)
    return functional.conv2d(x, (weight - mean) * 0.5, padding=1)


def _rms_norm(m, x):
    h = m.fc(x)
    return m.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))


def _clip(m, x):
    a, b = m.image(x), m.text(x)
    return (a @ b.transpose(-1, -2)) * m.logit_scale.exp()


def _squeeze_excite(m, x):
    h = m.conv(x)
    gate = m.fc2(torch.relu(m.fc1(h.mean((2, 3), keepdim=True))))
    return h * torch.sigmoid(gate)


IMAGE = ((1, 8, 12, 12),)
TOKENS = ((1, 10, 16),)

MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), TOKENS),
    "mlp without bias": (lambda: nn.Sequential(nn.Linear(16, 32, bias=False), nn.SiLU(), nn.Linear(32, 4)), TOKENS),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False)), IMAGE),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(), nn.Conv2d(8, 4, 1)), IMAGE),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(10, 6, 3), nn.Tanh(), nn.Conv1d(6, 4, 3)), TOKENS),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 3), nn.ELU(), nn.Conv3d(4, 2, 3)), ((1, 3, 8, 8, 8),)),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(8, 4, 2, 2), nn.ReLU()), IMAGE),
    "layer norm": (lambda: nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)), TOKENS),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1)), IMAGE),
    "instance norm": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 4, 1)), IMAGE),
    "rms norm": (lambda: Apply(_rms_norm, fc=nn.Linear(16, 8), weight=_parameter(8)), TOKENS),
    "attention": (lambda: Apply(_attention, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)), TOKENS),
    "residual": (lambda: Apply(lambda m, x: x + m.fc2(m.fc1(x)), fc1=nn.Linear(16, 8), fc2=nn.Linear(8, 16)), TOKENS),
    "layer scale": (lambda: Apply(lambda m, x: x + m.g * m.fc(x), fc=nn.Linear(16, 16), g=_parameter(16)), TOKENS),
    "position": (lambda: Apply(lambda m, x: m.b(m.a(x) + m.p), a=nn.Linear(16, 8), b=nn.Linear(8, 4),
                                p=_parameter(10, 8)), TOKENS),
    "concat": (lambda: Apply(lambda m, x: m.b(torch.cat([x, m.a(x)], -1)), a=nn.Linear(16, 8), b=nn.Linear(24, 4)),
               TOKENS),
    "squeeze excite": (lambda: Apply(_squeeze_excite, conv=nn.Conv2d(8, 8, 3), fc1=nn.Conv2d(8, 2, 1),
                                      fc2=nn.Conv2d(2, 8, 1)), IMAGE),
    "pooling": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(),
                                      nn.Linear(32, 4)), IMAGE),
    "softmax": (lambda: Apply(lambda m, x: m.b(m.a(x).softmax(-1)), a=nn.Linear(16, 8), b=nn.Linear(8, 4)), TOKENS),
    "log softmax": (lambda: Apply(lambda m, x: m.a(x).log_softmax(-1), a=nn.Linear(16, 8)), TOKENS),
    "powers": (lambda: Apply(lambda m, x: m.b(m.a(x).pow(2) + 1), a=nn.Linear(16, 8), b=nn.Linear(8, 4)), TOKENS),
    "exponential": (lambda: Apply(lambda m, x: m.b(m.a(x).exp()), a=nn.Linear(16, 8), b=nn.Linear(8, 4)), TOKENS),
    "sums": (lambda: Apply(lambda m, x: (lambda h: h.sum(1) + h.mean(1))(m.a(x)), a=nn.Linear(16, 8)), TOKENS),
    "cumulative sum": (lambda: Apply(lambda m, x: m.b(m.a(x).cumsum(1)), a=nn.Linear(16, 8), b=nn.Linear(8, 4)),
                       TOKENS),
    "softplus": (lambda: Apply(lambda m, x: m.b(functional.softplus(m.a(x))), a=nn.Linear(16, 8), b=nn.Linear(8, 4)),
                 TOKENS),
    "mish": (lambda: nn.Sequential(nn.Linear(16, 8), nn.Mish(), nn.Linear(8, 4)), TOKENS),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.PReLU(8), nn.Conv2d(8, 4, 1)), IMAGE),
    "clip": (lambda: Apply(_clip, image=nn.Linear(16, 8), text=nn.Linear(16, 8), logit_scale=nn.Parameter(
        torch.tensor(2.0))), TOKENS),
    "weight standardisation": (lambda: Apply(_standardised, conv=nn.Conv2d(8, 4, 3)), IMAGE),
    "upsampling": (lambda: nn.Sequential(nn.Conv2d(8, 4, 3), nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 3)), IMAGE),
    "gated": (lambda: Apply(lambda m, x: m.c(functional.silu(m.a(x)) * m.b(x)), a=nn.Linear(16, 8),
                             b=nn.Linear(16, 8), c=nn.Linear(8, 4)), TOKENS),
    "embedding": (lambda: nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 8)), ((1, 10),)),
    "padding": (lambda: Apply(lambda m, x: m.b(functional.pad(m.a(x), (1, 1, 1, 1))), a=nn.Conv2d(8, 4, 3),
                               b=nn.Conv2d(4, 2, 3)), IMAGE),
}  # fmt: skip
BATCH_NORM = {
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)), IMAGE),
    "shared weights": (lambda: Apply(lambda m, x: m.a(torch.relu(m.a(x))), a=nn.Linear(16, 16)), TOKENS),
}


def make_inputs(shapes, device):
    if len(shapes[0]) == 2:
        return [torch.zeros(shapes[0], dtype=torch.long, device=device)]
    return [torch.randn(shape, device=device) for shape in shapes]
