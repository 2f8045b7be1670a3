"""Speech networks of published benchmarks; ``seq_len`` is the number of spectrogram frames (10 ms each)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[Tensor, ...]]


class _JasperBlock(nn.Module):
    """Five convolutions; the sum of normalised 1x1 projections of all earlier block results joins the last."""

    def __init__(
        self, sources: tuple[int, ...], channels: int, kernel: int, dropout: float, *, repeat: int = 5
    ) -> None:
        super().__init__()
        widths = (sources[-1], *[channels] * repeat)
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, kernel, padding=kernel // 2, bias=False), nn.BatchNorm1d(b))
            for a, b in pairwise(widths)
        )
        self.residuals = nn.ModuleList(
            nn.Sequential(nn.Conv1d(c, channels, 1, bias=False), nn.BatchNorm1d(channels)) for c in sources
        )
        self.dropout = dropout

    def forward(self, earlier: list[Tensor]) -> Tensor:
        x = earlier[-1]
        for index, convolution in enumerate(self.convolutions):
            x = convolution(x)
            if index == len(self.convolutions) - 1:
                for residual, source in zip(self.residuals, earlier, strict=True):
                    x = x + residual(source)
            x = functional.dropout(functional.relu(x), self.dropout, self.training)
        return x


def _conv_block(in_channels: int, channels: int, kernel: int, dropout: float, stride: int = 1, dilation: int = 1):
    padding = dilation * (kernel - 1) // 2
    return nn.Sequential(
        nn.Conv1d(in_channels, channels, kernel, stride, padding, dilation, bias=False), nn.BatchNorm1d(channels),
        nn.ReLU(), nn.Dropout(dropout),
    )  # fmt: skip


class Jasper(nn.Module):
    """Jasper 10x5 with dense residuals: 64 mel bands in, 29 characters out."""

    def __init__(self) -> None:
        super().__init__()
        self.prologue = _conv_block(64, 256, 11, 0.2, stride=2)
        plan = ((256, 11, 0.2), (384, 13, 0.2), (512, 17, 0.2), (640, 21, 0.3), (768, 25, 0.3))
        self.blocks = nn.ModuleList()
        sources = [256]
        for channels, kernel, dropout in plan:
            for _ in range(2):
                self.blocks.append(_JasperBlock(tuple(sources), channels, kernel, dropout))
                sources.append(channels)
        self.epilogue = nn.Sequential(_conv_block(768, 896, 29, 0.4, dilation=2), _conv_block(896, 1024, 1, 0.4))
        self.classify = nn.Conv1d(1024, 29, 1)

    def forward(self, spectrogram: Tensor) -> Tensor:
        results = [self.prologue(spectrogram)]
        for block in self.blocks:
            results.append(block(results))
        return functional.log_softmax(self.classify(self.epilogue(results[-1])).transpose(1, 2), dim=-1)


def jasper(*, batch_size: int, seq_len: int) -> Built:
    return Jasper(), (torch.empty(batch_size, 64, seq_len, device="meta"),)


class DeepSpeech2(nn.Module):
    """Two 2-D convolutions over 161 frequencies, five bidirectional GRU layers of 800 whose directions are summed."""

    def __init__(self, hidden: int = 800, layers: int = 5, num_labels: int = 29) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.recurrent = nn.ModuleList(
            nn.GRU(32 * 41 if i == 0 else hidden, hidden, bidirectional=True) for i in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(layers))
        self.classify = nn.Linear(hidden, num_labels, bias=False)

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = self.conv(spectrogram)
        x = x.flatten(1, 2).permute(2, 0, 1).contiguous()
        for index, (layer, norm) in enumerate(zip(self.recurrent, self.norms, strict=True)):
            if index:
                x = norm(x.view(-1, x.shape[2])).view(x.shape)
            x, _ = layer(x)
            x = x.view(x.shape[0], x.shape[1], 2, -1).sum(2)
        steps, batch, hidden = x.shape
        x = self.classify(self.norms[0](x.view(steps * batch, hidden)))
        return functional.log_softmax(x.view(steps, batch, -1), dim=-1)


def deepspeech2(*, batch_size: int, seq_len: int) -> Built:
    return DeepSpeech2(), (torch.empty(batch_size, 1, 161, seq_len, device="meta"),)


NETWORKS: dict[str, Callable[..., Built]] = {"jasper": jasper, "deepspeech2": deepspeech2}
