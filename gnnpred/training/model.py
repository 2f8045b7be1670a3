"""The graph neural network: a bounded correction to roofline physics, summed over ops."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gnnpred.features import (
    CATEGORIES,
    COMPONENTS,
    GLOBAL_FEATURE_NAMES,
    NODE_FEATURE_NAMES,
    NUM_COMPONENTS,
    NUM_KINDS,
    SPEC_FEATURE_NAMES,
)
from gnnpred.graph import Component
from gnnpred.op_kinds import Category

# Eager training steps of the public tables take 5 to 35 us of host time per kernel (2025 desktop to 2018 server); the
# network scales it per job.
HOST_LAUNCH_MS = 12e-3
_LOG_GROUPS = NODE_FEATURE_NAMES.index("log_groups")
_FIRST_CATEGORY = NODE_FEATURE_NAMES.index(f"category_{CATEGORIES[0]}")
# What a host's speed can be told from where the host itself is unknown: software, and the year of the GPU that it was
# bought for. Few enough, and linear, so that it carries over to GPUs that no training row has.
_HOST_FEATURES = [
    GLOBAL_FEATURE_NAMES.index(name)
    for name in GLOBAL_FEATURE_NAMES
    if name.startswith(("precision_", "framework_", "phase_", "host_"))
    or name in ("is_amd", "all_half", "torch_compile", "xla", "year")
]
_PYTORCH_VERSION = GLOBAL_FEATURE_NAMES.index("pytorch_version")


# What a neighbour sends: a linear view of its state; the same, scaled by a gate of both ends; the same, weighted among
# the neighbours of one op by attention (as GATv2, Brody et al. 2022, with one head).
LAYER_KINDS = ("linear", "gated", "attention")
# Over the neighbours: their sum, their mean, the sum divided by the root of their number, their largest value.
AGGREGATIONS = ("root", "mean", "sum", "max")
# Keeps divisions by nothing finite. A floor, not a summand: the exporter to ONNX drops summands that are nearly zero.
_TINY = 1e-9
_MAX_ATTENTION_LOGIT = 8.0  # bounded, so that the exponentials need no maximum taken off


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Size of the network."""

    width: int = 64
    message_width: int = 24
    num_layers: int = 2  # 0 = per-op network without messages
    layer_kind: str = "linear"  # of LAYER_KINDS
    aggregation: str = "root"  # of AGGREGATIONS; attention has weights of its own
    kind_embedding: int = 16
    dropout: float = 0.1  # on messages
    kind_dropout: float = 0.1  # share of ops whose kind embedding is hidden, so that unknown kinds work
    hidden_dropout: float = 0.0  # on node states
    input_noise: float = 0.0  # standard deviations added to the inputs in training: smooth answers off the data
    feature_clip: float = 4.0  # standard deviations; keeps inputs outside the corpus from running away
    # Bounds of the log corrections. Grouped and depthwise convolutions can run 20 times slower than the physics.
    max_log_grouped_conv: float = 3.0
    max_log_product: float = 1.7  # dense convolutions, matrix products, attention
    max_log_bandwidth: float = 1.2  # of ops bound by memory, whose kernels all stream alike
    # casts, gradient sums and updates are plain streaming kernels that no table times alone: left free, they soak
    # up what other ops miss and run away in networks that have many of them
    max_log_streaming: float = 0.7
    max_log_scale: float = 0.7  # per graph
    max_log_host: float = 2.0  # of the host's time per kernel
    max_log_copy: float = 3.0  # of the input copy: tables time everything from pinned copies to making random images
    pooled_scale: bool = False  # the per-graph scale sees the pooled ops, not only the job
    host_branch: bool = True


@dataclass
class GraphBatch:
    """Several graphs side by side. N nodes, C components, B graphs, E edges."""

    node_features: Tensor  # (N, F) float32
    kind_idx: Tensor  # (N,) int64
    physics_ms: Tensor  # (N, C) float32
    count: Tensor  # (N,) float32
    graph_idx: Tensor  # (N,) int64
    in_edges: Tensor  # (2, E) int64
    out_edges: Tensor  # (2, E') int64
    globals: Tensor  # (B, G) float32
    specs_known: Tensor  # (B,) float32, 1 = the device specification may be used
    host_launches: Tensor  # (B,) float32
    host_copy_ms: Tensor  # (B,) float32


class Neighbours(MessagePassing):
    """What the neighbours of every op sum up to; without parameters, zeros for an op that has none."""

    def __init__(self, aggregation: str) -> None:
        super().__init__(aggr="add")
        self.aggregation = aggregation

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """(N, D), (2, E) -> (N, D)"""
        if self.aggregation == "max":
            return _largest_by_target(x[edges[0]], edges[1], x.shape[0])
        return self._scaled(self.propagate(edges, x=x, size=(x.shape[0], x.shape[0])), edges)

    def of_edges(self, values: Tensor, edges: Tensor, num_nodes: int) -> Tensor:
        """(E, D) values of the edges, (2, E) -> (N, D)"""
        if self.aggregation == "max":
            return _largest_by_target(values, edges[1], num_nodes)
        return self._scaled(_sum_by_graph(values, edges[1], num_nodes), edges)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def _scaled(self, total: Tensor, edges: Tensor) -> Tensor:
        if self.aggregation == "sum":
            return total
        ones = torch.ones(edges.shape[1], 1, dtype=total.dtype, device=total.device)
        degree = torch.zeros(total.shape[0], 1, dtype=total.dtype, device=total.device).index_add(0, edges[1], ones)
        degree = (degree + 1e-6).clamp(min=1.0)
        return total / (degree if self.aggregation == "mean" else degree.sqrt())


class Exchange(nn.Module):
    """Gated or attended messages along one direction of the edges."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.is_attention = settings.layer_kind == "attention"
        self.of_source = nn.Linear(settings.width, settings.message_width)
        self.of_target = nn.Linear(settings.width, settings.message_width)
        self.score = nn.Linear(settings.message_width, 1, bias=False) if self.is_attention else None
        self.neighbours = Neighbours("sum" if self.is_attention else settings.aggregation)

    def forward(self, x: Tensor, sent: Tensor, edges: Tensor) -> Tensor:
        """States (N, W), what each op sends (N, D), (2, E) -> (N, D)"""
        both_ends = self.of_source(x)[edges[0]] + self.of_target(x)[edges[1]]
        if self.score is None:
            return self.neighbours.of_edges(sent[edges[0]] * torch.sigmoid(both_ends), edges, x.shape[0])
        logit = _bounded(self.score(nn.functional.leaky_relu(both_ends, 0.2)), _MAX_ATTENTION_LOGIT)
        weight = torch.exp(logit)  # (E, 1)
        total = self.neighbours.of_edges(weight, edges, x.shape[0])
        return self.neighbours.of_edges(sent[edges[0]] * weight, edges, x.shape[0]) / total.clamp(min=_TINY)


class MessageLayer(nn.Module):
    """Residual exchange with producers and consumers, with separate weights for the two."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        self.project_in = nn.Linear(settings.width, settings.message_width)
        self.project_out = nn.Linear(settings.width, settings.message_width)
        self.update = nn.Linear(settings.width + 2 * settings.message_width, settings.width)
        self.is_linear = settings.layer_kind == "linear"
        if self.is_linear:
            self.neighbours = Neighbours(settings.aggregation)
        else:
            self.from_producers, self.from_consumers = Exchange(settings), Exchange(settings)
        self.dropout = settings.dropout

    def forward(self, h: Tensor, in_edges: Tensor, out_edges: Tensor) -> Tensor:
        x = self.norm(h)
        if self.is_linear:
            from_producers = self.neighbours(self.project_in(x), in_edges)
            from_consumers = self.neighbours(self.project_out(x), out_edges)
        else:
            from_producers = self.from_producers(x, self.project_in(x), in_edges)
            from_consumers = self.from_consumers(x, self.project_out(x), out_edges)
        messages = torch.cat([from_producers, from_consumers], 1)
        if self.training and self.dropout > 0:
            # nn.Dropout draws its mask three times slower on a CPU, a tenth of the whole training time
            messages = messages * (torch.rand_like(messages) >= self.dropout) / (1 - self.dropout)
        return h + nn.functional.silu(self.update(torch.cat([x, messages], 1)))


class StepTimeGNN(nn.Module):
    """Per-op times and the compute time of a step.

    ``t_op = physics * exp(r)``, ``T = (scale * sum t_op)^4 + host^4)^(1/4) + copy``: a step is bound by the
    GPU or by the host that launches kernels, whichever is slower (the power mean makes it smooth).
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        num_node, num_global = len(NODE_FEATURE_NAMES), len(GLOBAL_FEATURE_NAMES)
        for name, size in (("node", num_node), ("global", num_global)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        width = settings.width
        by_category = dict.fromkeys(CATEGORIES, settings.max_log_bandwidth)
        for category in (Category.CONV, Category.MATMUL, Category.ATTENTION, Category.RECURRENT):
            by_category[category] = settings.max_log_product
        limits = torch.tensor([by_category[category] for category in CATEGORIES])[:, None].repeat(1, NUM_COMPONENTS)
        for component in (Component.CAST, Component.ACCUMULATE, Component.OPTIMIZER):
            limits[:, COMPONENTS.index(component)] = settings.max_log_streaming
        grouped = limits[CATEGORIES.index(Category.CONV)].clone()
        grouped[: len(COMPONENTS[:3])] = settings.max_log_grouped_conv
        self.register_buffer("grouped_limit", grouped)  # (C,)
        self.register_buffer("correction_limit", limits)  # (categories, C)
        self.kind_embedding = nn.Embedding(NUM_KINDS, settings.kind_embedding)
        nn.init.normal_(self.kind_embedding.weight, std=0.1)
        self.node_in = nn.Linear(num_node + settings.kind_embedding, width)
        self.global_in = nn.Linear(num_global + 1, width)
        self.hidden = nn.Linear(width, width)
        self.hidden_dropout = nn.Dropout(settings.hidden_dropout)
        self.layers = nn.ModuleList(MessageLayer(settings) for _ in range(settings.num_layers))
        self.head = nn.Linear(width, NUM_COMPONENTS)
        self.scale_in = nn.Linear(num_global + 1 + width, width)
        self.scale_head = nn.Linear(width, 3)  # log scale of GPU time, of host time, of the input copy
        self.host_head = nn.Linear(len(_HOST_FEATURES) + 2, 2)  # log scale of host time and of the input copy
        for head in (self.head, self.scale_head, self.host_head):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(self, batch: GraphBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Times per op and per step in ms, and how far the corrections leave the physics.

        (N, C) times of one instance of each merged node, (B,) step times, (B,) mean squared log correction of
        each graph, weighted by physics time.
        """
        num_graphs = batch.globals.shape[0]
        clip = self.settings.feature_clip
        x = ((batch.node_features - self.node_mean) / self.node_std).clamp(-clip, clip)
        g = ((batch.globals - self.global_mean) / self.global_std).clamp(-clip, clip)
        if self.training and self.settings.input_noise > 0:
            x = x + self.settings.input_noise * torch.randn_like(x)
            g = g + self.settings.input_noise * torch.randn_like(g)
        num_specs = len(SPEC_FEATURE_NAMES)
        known = batch.specs_known[:, None]
        g = torch.cat([g[:, :num_specs] * known, g[:, num_specs:], known], 1)
        kind = self.kind_embedding(batch.kind_idx)
        if self.training and self.settings.kind_dropout > 0:
            kind = kind * (torch.rand(len(kind), 1) >= self.settings.kind_dropout).to(kind.dtype)
        h = nn.functional.silu(self.node_in(torch.cat([x, kind], 1)) + self.global_in(g)[batch.graph_idx])
        h = self.hidden_dropout(h + nn.functional.silu(self.hidden(h)))
        for layer in self.layers:
            h = layer(h, batch.in_edges, batch.out_edges)
        category = batch.node_features[:, _FIRST_CATEGORY : _FIRST_CATEGORY + len(CATEGORIES)]
        limit = category @ self.correction_limit
        is_grouped = batch.node_features[:, _LOG_GROUPS] > math.log(2.5)  # log(groups + 1)
        limit = limit + (self.grouped_limit - limit).clamp(min=0) * is_grouped[:, None]
        correction = _bounded(self.head(h), limit)
        op_ms = batch.physics_ms * torch.exp(correction)
        weight = batch.physics_ms.sum(1) * batch.count
        total = _sum_by_graph(weight[:, None], batch.graph_idx, num_graphs)
        deviation = _sum_by_graph(
            (correction**2 * batch.physics_ms).sum(1, keepdim=True) * batch.count[:, None], batch.graph_idx, num_graphs
        )[:, 0] / total[:, 0].clamp(min=_TINY)
        if self.settings.pooled_scale:
            pooled = _sum_by_graph(h * weight[:, None], batch.graph_idx, num_graphs) / total.clamp(min=_TINY)
        else:
            pooled = h.new_zeros(num_graphs, h.shape[1])
        scales = self.scale_head(nn.functional.silu(self.scale_in(torch.cat([g, pooled], 1))))
        gpu_scale = torch.exp(_bounded(scales[:, 0], self.settings.max_log_scale))
        op_ms = op_ms * gpu_scale[batch.graph_idx][:, None]
        gpu_ms = _sum_by_graph(op_ms.sum(1, keepdim=True) * batch.count[:, None], batch.graph_idx, num_graphs)[:, 0]
        version = batch.globals[:, _PYTORCH_VERSION]
        has_version = (version > 0).to(version.dtype)
        software = torch.stack([has_version * (version - 2.0), has_version], 1)
        host = self.host_head(torch.cat([batch.globals[:, _HOST_FEATURES], software], 1))
        # a known GPU stands for the hosts that the corpus timed it on
        host = host + known * _bounded(scales[:, 1:], self.settings.max_log_scale)
        copy_ms = batch.host_copy_ms * torch.exp(_bounded(host[:, 1], self.settings.max_log_copy))
        if not self.settings.host_branch:
            return op_ms, gpu_ms + copy_ms, deviation
        host_ms = batch.host_launches * HOST_LAUNCH_MS * torch.exp(_bounded(host[:, 0], self.settings.max_log_host))
        # factored so that neither fourth power over- nor underflows
        larger = torch.maximum(gpu_ms, host_ms).clamp(min=_TINY)
        bound_ms = larger * ((gpu_ms / larger) ** 4 + (host_ms / larger) ** 4) ** 0.25
        return op_ms, bound_ms + copy_ms, deviation


def _bounded(log_value: Tensor, limit: float | Tensor) -> Tensor:
    """The value, bent smoothly into (-limit, limit)."""
    return limit * torch.tanh(log_value / limit)


def _largest_by_target(values: Tensor, target_idx: Tensor, num_nodes: int) -> Tensor:
    """(E, D), (E,) -> (N, D); 0 where nothing arrives."""
    lowest = -1e9  # far below any message
    found = values.new_full((num_nodes, values.shape[1]), lowest).scatter_reduce(
        0, target_idx[:, None].expand(-1, values.shape[1]), values, "amax"
    )
    return torch.where(found > lowest, found, torch.zeros_like(found))


def _sum_by_graph(values: Tensor, graph_idx: Tensor, num_graphs: int) -> Tensor:
    """(N, D) -> (B, D)"""
    return torch.zeros(num_graphs, values.shape[1], dtype=values.dtype, device=values.device).index_add(
        0, graph_idx, values
    )
