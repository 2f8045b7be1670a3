"""Language models and recommenders of published benchmarks that no model library provides any more.

Every function takes the options of its model source (``own:NAME?key=value``) and the sequence length, and
returns the module with its example inputs on the meta device, at the batch the tracer binds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[Tensor, ...]]


def _ids(batch_size: int, *shape: int) -> Tensor:
    return torch.zeros(batch_size, *shape, dtype=torch.long, device="meta")


class _MptBlock(nn.Module):
    """Pre-norm attention and MLP, biases everywhere, one projection for q, k and v."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=2)
        q, k, v = (t.view(batch, steps, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, steps, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """MPT as llm-foundry timed it: learned positions, tied output, no dropout."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, seq_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Parameter(torch.empty(seq_len, width))
        self.blocks = nn.ModuleList(_MptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def mpt(*, batch_size: int, seq_len: int, layers: int, width: int, heads: int, vocab: int) -> Built:
    return Mpt(layers, width, heads, vocab, seq_len), (_ids(batch_size, seq_len),)


class _RelativeAttention(nn.Module):
    """Transformer-XL: keys over memory and segment, a term by content and one by distance, shifted into place."""

    def __init__(self, width: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
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


class TransformerXL(nn.Module):
    """Transformer-XL with adaptive embedding and softmax on WikiText-103, tied.

    Which tokens fall into a tail cluster depends on the text: a fixed share of every sequence stands for it.
    """

    def __init__(self, layers: int, width: int, heads: int, inner: int, divide: int, steps: int, memory: int) -> None:
        super().__init__()
        self.width, self.steps, self.memory_steps = width, steps, memory
        cuts = _WIKITEXT_CUTOFFS
        self.widths = [width // divide**i for i in range(4)]
        self.embeddings = nn.ModuleList(
            nn.Embedding(high - low, w) for low, high, w in zip(cuts, cuts[1:], self.widths, strict=False)
        )
        self.projections = nn.ParameterList(
            nn.Parameter(torch.empty(width, w)) for w in self.widths if w != width or divide > 1
        )
        self.cluster = nn.Linear(width, 3)
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(high - low)) for low, high in pairwise(cuts))
        self.content = nn.Parameter(torch.empty(heads, 64))
        self.position = nn.Parameter(torch.empty(heads, 64))
        self.layers = nn.ModuleList(
            nn.ModuleList([_RelativeAttention(width, heads, 64), _PostNormMlp(width, inner)]) for _ in range(layers)
        )
        self.drop = nn.Dropout(0.1)

    def _projected(self, cluster: int, x: Tensor) -> Tensor:
        return functional.linear(x, self.projections[cluster]) if len(self.projections) else x

    def forward(self, ids: Tensor, tail_ids: tuple[Tensor, ...], memory: Tensor) -> list[Tensor]:
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
        weight = torch.cat([self.embeddings[0].weight, self.cluster.weight], 0)
        bias = torch.cat([self.biases[0], self.cluster.bias], 0)
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
    *, batch_size: int, seq_len: int, layers: int, width: int, heads: int, inner: int, divide: int
) -> Built:
    model = TransformerXL(layers, width, heads, inner, divide, seq_len, seq_len)
    tails = tuple(_ids(max(1, round(share * seq_len)) * batch_size) for share in _TAIL_SHARES)
    memory = torch.empty(layers, seq_len, batch_size, width, device="meta")
    return _Unpacked(model), (_ids(seq_len, batch_size), *tails, memory)


class _Unpacked(nn.Module):
    """Transformer-XL over positional tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, first: Tensor, second: Tensor, third: Tensor, memory: Tensor) -> list[Tensor]:
        return self.model(ids, (first, second, third), memory)


class GnmtV2(nn.Module):
    """GNMT v2: four LSTM layers of 1024 on each side, the first encoder layer bidirectional, Bahdanau attention."""

    def __init__(self, vocab: int, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.encoder = nn.ModuleList(
            [nn.LSTM(width, width, bidirectional=True), nn.LSTM(2 * width, width)]
            + [nn.LSTM(width, width) for _ in range(2)]
        )
        self.decoder = nn.ModuleList([nn.LSTM(width, width)] + [nn.LSTM(2 * width, width) for _ in range(3)])
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.attend, self.scale = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(width))
        self.drop = nn.Dropout(0.2)
        self.classify = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.drop(self.embedding(source))
        x, _ = self.encoder[0](x)
        x, _ = self.encoder[1](self.drop(x))
        for layer in self.encoder[2:]:
            x = layer(self.drop(x))[0] + x
        y, _ = self.decoder[0](self.drop(self.embedding(target)))
        context = self._context(y, x)
        y, _ = self.decoder[1](torch.cat([self.drop(y), context], 2))
        for layer in self.decoder[2:]:
            y = layer(torch.cat([self.drop(y), context], 2))[0] + y
        return functional.log_softmax(self.classify(y).view(-1, self.classify.out_features), dim=1)

    def _context(self, y: Tensor, x: Tensor) -> Tensor:
        queries, keys = self.query(y.transpose(0, 1)), self.key(x.transpose(0, 1))
        energy = torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1) + self.bias)
        direction = self.attend / self.attend.norm() * self.scale
        weights = functional.softmax(functional.linear(energy, direction[None]).squeeze(-1), dim=-1)
        return torch.bmm(weights, x.transpose(0, 1)).transpose(0, 1)


def gnmt_v2(*, batch_size: int, seq_len: int, vocab: int = 31_794) -> Built:
    return GnmtV2(vocab), (_ids(seq_len, batch_size), _ids(seq_len, batch_size))


class NeuMF(nn.Module):
    """Neural collaborative filtering: products of factors beside an MLP over concatenated embeddings."""

    def __init__(
        self, users: int, items: int, factors: int, layers: tuple[int, ...], dropout: float, *, first: bool
    ) -> None:
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(users, factors), nn.Embedding(items, factors)
        half = layers[0] // 2
        self.user_mlp, self.item_mlp = nn.Embedding(users, half), nn.Embedding(items, half)
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(layers))
        self.dropout, self.first = dropout, first
        self.final = nn.Linear(factors + layers[-1], 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = self.user_factors(user) * self.item_factors(item)
        x = torch.cat([self.user_mlp(user), self.item_mlp(item)], 1)
        for layer in self.mlp:
            if self.first:
                x = functional.relu(layer(functional.dropout(x, self.dropout, self.training)))
            else:
                x = functional.dropout(functional.relu(layer(x)), self.dropout, self.training)
        return self.final(torch.cat([product, x], 1))


def neumf_ml20m(*, batch_size: int, seq_len: int | None = None) -> Built:
    """NVIDIA's NCF on MovieLens-20M: factors 64, MLP 256-256-128-64, dropout behind every layer."""
    return NeuMF(138_493, 26_744, 64, (256, 256, 128, 64), 0.5, first=False), (_ids(batch_size), _ids(batch_size))


def neumf_ml1m(*, batch_size: int, seq_len: int | None = None) -> Built:
    """Pollux's NCF on MovieLens-1M: factors 32, MLP 256-128-64-32, dropout 0.1 before every layer."""
    return NeuMF(6_040, 3_706, 32, (256, 128, 64, 32), 0.1, first=True), (_ids(batch_size), _ids(batch_size))


NETWORKS: dict[str, Callable[..., Built]] = {
    "mpt": mpt, "transformer_xl": transformer_xl, "gnmt_v2": gnmt_v2, "neumf_ml20m": neumf_ml20m,
    "neumf_ml1m": neumf_ml1m,
}  # fmt: skip
