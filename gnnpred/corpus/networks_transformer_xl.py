"""Transformer-XL as NVIDIA's examples train it, with and without the adaptive softmax."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[Tensor, ...]]


def _ids(batch_size: int, *shape: int) -> Tensor:
    return torch.zeros(batch_size, *shape, dtype=torch.long, device="meta")


class _RelativeAttention(nn.Module):
    """Transformer-XL: keys over memory and segment, a term by content and one by distance, shifted into place."""

    def __init__(self, width: int, num_heads: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, head_dim, dropout
        inner = num_heads * head_dim
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.distance = nn.Linear(width, inner, bias=False)
        self.project = nn.Linear(inner, width, bias=False)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor, distances: Tensor, content: Tensor, position: Tensor) -> Tensor:
        steps, batch, _ = x.shape
        keys = memory.shape[0] + steps
        q, k, v = self.qkv(torch.cat([memory, x], 0)).chunk(3, dim=-1)
        q = q[-steps:].view(steps, batch, self.num_heads, self.head_dim)
        k, v = (t.view(keys, batch, self.num_heads, self.head_dim) for t in (k, v))
        r = self.distance(distances).view(keys, self.num_heads, self.head_dim).permute(1, 2, 0)
        by_content = torch.matmul((q + content).permute(1, 2, 0, 3), k.permute(1, 2, 3, 0))
        by_distance = torch.matmul((q + position).permute(1, 2, 0, 3), r)
        # shift every row by its own distance: pad, reinterpret, cut
        padded = functional.pad(by_distance, (1, 0)).reshape(batch, self.num_heads, keys + 1, steps)
        score = (by_content + padded[:, :, 1:].reshape(by_content.shape)) * self.head_dim**-0.5
        mask = torch.ones(steps, keys, dtype=torch.bool, device=x.device).triu(1 + memory.shape[0])
        weights = functional.softmax(score.float().masked_fill(mask, -65000.0).type_as(score), dim=3)
        weights = functional.dropout(weights, self.dropout, self.training)
        mixed = torch.matmul(weights, v.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
        mixed = mixed.reshape(steps, batch, self.num_heads * self.head_dim)
        return self.norm(x + self.drop(self.project(mixed)))


class _PostNormMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(functional.relu(self.up(x)), 0.1, self.training)
        return self.norm(x + self.drop(self.down(hidden)))


# WikiText-103: sizes of the adaptive softmax's clusters, and the share of tokens in each tail cluster
_WIKITEXT_CUTOFFS = (0, 19_997, 39_997, 199_997, 267_735)
_TAIL_SHARES = (0.045, 0.055, 0.012)
_HEAD_ALONE = (0, 267_735)


class TransformerXL(nn.Module):
    """Transformer-XL on WikiText-103, with tied embedding and softmax: adaptive, or over the whole vocabulary.

    Which tokens fall into a tail cluster depends on the text: a fixed share of every sequence stands for it.
    """

    def __init__(
        self, layers: int, width: int, heads: int, inner: int, divide: int, memory_steps: int, attention_dropout: float
    ) -> None:
        super().__init__()
        self.width, self.memory_steps = width, memory_steps
        cuts = _WIKITEXT_CUTOFFS if divide else _HEAD_ALONE
        widths = [width // max(divide, 1) ** i for i in range(len(cuts) - 1)]
        self.embeddings = nn.ModuleList(
            nn.Embedding(high - low, w) for (low, high), w in zip(pairwise(cuts), widths, strict=True)
        )
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(width, w)) for w in widths if divide > 1)
        self.cluster = nn.Linear(width, len(widths) - 1) if divide else None
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(high - low)) for low, high in pairwise(cuts))
        self.content = nn.Parameter(torch.empty(heads, 64))
        self.position = nn.Parameter(torch.empty(heads, 64))
        self.layers = nn.ModuleList(
            nn.ModuleList([_RelativeAttention(width, heads, 64, attention_dropout), _PostNormMlp(width, inner)])
            for _ in range(layers)
        )
        self.drop = nn.Dropout(0.1)

    def _projected(self, cluster: int, x: Tensor) -> Tensor:
        return functional.linear(x, self.projections[cluster]) if len(self.projections) else x

    def forward(self, ids: Tensor, memory: Tensor, *tail_ids: Tensor) -> list[Tensor]:
        steps = ids.shape[0]
        x = self._projected(0, self.embeddings[0](ids))
        for cluster, rows in enumerate(tail_ids, 1):  # the few tokens of a tail replace their rows
            made = self._projected(cluster, self.embeddings[cluster](rows))
            x = torch.index_copy(x.view(-1, self.width), 0, rows.new_zeros(rows.shape[0]), made).view(x.shape)
        x = self.drop(x * self.width**0.5)
        keys = steps + memory.shape[1]
        phase = torch.outer(
            torch.arange(keys - 1, -1, -1.0, device=x.device), torch.ones(self.width // 2, device=x.device)
        )
        distances = self.drop(torch.cat([phase.sin(), phase.cos()], 1))
        kept = [x]
        for index, (attention, mlp) in enumerate(self.layers):
            x = mlp(attention(x, memory[index], distances, self.content, self.position))
            kept.append(x)
        new_memory = torch.stack([layer[-self.memory_steps :] for layer in kept[:-1]])
        hidden = self.drop(x).view(-1, self.width)
        return [*self._log_probabilities(hidden, tail_ids), new_memory]

    def _log_probabilities(self, hidden: Tensor, tail_ids: tuple[Tensor, ...]) -> list[Tensor]:
        """One row of log-probabilities per token over the head, and per tail token over its cluster."""
        weight, bias = self.embeddings[0].weight, self.biases[0]
        if self.cluster is not None:
            weight, bias = torch.cat([weight, self.cluster.weight], 0), torch.cat([bias, self.cluster.bias], 0)
        head = functional.linear(self._to_cluster(0, hidden), weight, bias)
        results = [functional.log_softmax(head, dim=1)]
        for cluster, rows in enumerate(tail_ids, 1):
            chosen = torch.index_select(hidden, 0, rows)
            tail = functional.linear(
                self._to_cluster(cluster, chosen), self.embeddings[cluster].weight, self.biases[cluster]
            )
            results.append(functional.log_softmax(tail, dim=1))
        return results

    def _to_cluster(self, cluster: int, x: Tensor) -> Tensor:
        return functional.linear(x, self.projections[cluster].t()) if len(self.projections) else x


def transformer_xl(
    *, batch_size: int, seq_len: int, layers: int, width: int, heads: int, inner: int, divide: int,
    attention_dropout_pct: int = 0,
) -> Built:  # fmt: skip
    """``divide``: width ratio of one cluster of the adaptive softmax to the next; 0 is one softmax over all words."""
    model = TransformerXL(layers, width, heads, inner, divide, seq_len, attention_dropout_pct / 100)
    tails = tuple(_ids(max(1, round(share * seq_len)) * batch_size) for share in _TAIL_SHARES) if divide else ()
    memory = torch.empty(layers, seq_len, batch_size, width, device="meta")
    return model, (_ids(seq_len, batch_size), memory, *tails)


NETWORKS: dict[str, Callable[..., Built]] = {"transformer_xl": transformer_xl}
