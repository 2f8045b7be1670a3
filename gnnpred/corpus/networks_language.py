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


class BertPreTraining(nn.Module):
    """BERT whose language-model head sees the masked positions alone, as in Google's code and what follows it."""

    def __init__(self, layers: int, width: int, heads: int, masked: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel
        from transformers.models.bert.modeling_bert import BertPreTrainingHeads

        config = BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width
        )
        self.bert, self.heads, self.masked = BertModel(config), BertPreTrainingHeads(config), masked
        self.heads.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states, pooled = self.bert(ids, return_dict=False)
        return self.heads(states[:, : self.masked].contiguous(), pooled)


def bert_pretraining(*, batch_size: int, seq_len: int, layers: int, width: int, heads: int, masked: int) -> Built:
    return BertPreTraining(layers, width, heads, masked), (_ids(batch_size, seq_len),)


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
    "mpt": mpt, "bert_pretraining": bert_pretraining, "gnmt_v2": gnmt_v2, "neumf_ml20m": neumf_ml20m,
    "neumf_ml1m": neumf_ml1m,
}  # fmt: skip
