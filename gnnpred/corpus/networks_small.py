"""Small networks of single benchmarks, and the translation Transformer, written out in full."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[Tensor, ...]]


def _ids(batch_size: int, *shape: int) -> Tensor:
    return torch.zeros(batch_size, *shape, dtype=torch.long, device="meta")


class LastState(nn.Module):
    """One LSTM layer of 500 over 50 steps; a classifier reads the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.classify = nn.LSTM(500, 500, batch_first=True), nn.Linear(500, 4)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.recurrent(x)
        return self.classify(state[-1])


def lstm_classifier(*, batch_size: int, seq_len: int | None = None) -> Built:
    return LastState(), (torch.empty(batch_size, 50, 500, device="meta"),)


class EncoderLanguageModel(nn.Module):
    """PyTorch's word-level example: a Transformer encoder under a causal mask, sequence first."""

    def __init__(self, vocab: int, width: int, heads: int, inner: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout
        self.embedding = nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, inner, dropout) for _ in range(layers))
        self.classify = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.permute(1, 0)
        steps = ids.shape[0]
        positions = torch.empty(steps, 1, self.width, device=ids.device)
        x = functional.dropout(self.embedding(ids) * math.sqrt(self.width) + positions, self.dropout, self.training)
        mask = torch.empty(steps, steps, device=ids.device)
        for layer in self.encoder:
            x = layer(x, src_mask=mask)
        return self.classify(x).permute(1, 2, 0)


def encoder_language_model(*, batch_size: int, seq_len: int) -> Built:
    return EncoderLanguageModel(1024, 512, 8, 512, 4, 0.5), (_ids(batch_size, seq_len),)


class TranslationTransformer(nn.Module):
    """Transformer "big" for WMT14 en-de: six layers a side, one table of 33,712 tokens for all three uses."""

    def __init__(self, vocab: int, width: int = 1024, heads: int = 16, inner: int = 4096, layers: int = 6) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, inner, 0.1) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, heads, inner, 0.1) for _ in range(layers))

    def _embedded(self, ids: Tensor) -> Tensor:
        positions = torch.empty(ids.shape[0], 1, self.width, device=ids.device)
        return functional.dropout(self.embedding(ids) * math.sqrt(self.width) + positions, 0.1, self.training)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self._embedded(source), self._embedded(target)
        for layer in self.encoder:
            x = layer(x)
        mask = torch.empty(target.shape[0], target.shape[0], device=target.device)
        for layer in self.decoder:
            y = layer(y, x, tgt_mask=mask)
        return functional.log_softmax(functional.linear(y, self.embedding.weight), dim=-1)


def transformer_big(*, batch_size: int, seq_len: int) -> Built:
    return TranslationTransformer(33_712), (_ids(seq_len, batch_size), _ids(seq_len, batch_size))


def efficientnet_wide_se(*, batch_size: int, seq_len: int | None = None, variant: int, image_size: int) -> Built:
    """NVIDIA's "widese" EfficientNet: squeeze layers a quarter of the expanded width, not of the block's input."""
    import timm
    from timm.models._efficientnet_blocks import SqueezeExcite

    model = timm.create_model(f"efficientnet_b{variant}")
    for block in model.modules():
        if isinstance(block, SqueezeExcite):
            width = block.conv_reduce.in_channels
            block.conv_reduce, block.conv_expand = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)
    return model, (torch.empty(batch_size, 3, image_size, image_size, device="meta"),)


NETWORKS: dict[str, Callable[..., Built]] = {
    "lstm_classifier": lstm_classifier, "encoder_language_model": encoder_language_model,
    "transformer_big": transformer_big, "efficientnet_wide_se": efficientnet_wide_se,
}  # fmt: skip
