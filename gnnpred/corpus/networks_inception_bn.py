"""Inception with batch normalisation (Ioffe and Szegedy 2015), as MXNet's examples define it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


def _conv(in_channels: int, channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2), nn.BatchNorm2d(channels), nn.ReLU()
    )


class _Mixed(nn.Module):
    """1x1, 3x3, twice 3x3 and pooled branches, joined; a block of stride 2 has no 1x1 branch and keeps its pooling."""

    def __init__(
        self, in_channels: int, one: int, three: tuple[int, int], double: tuple[int, int], pool: str, projected: int
    ) -> None:
        super().__init__()
        stride = 1 if one else 2
        branches = [_conv(in_channels, one, 1)] if one else []
        branches.append(nn.Sequential(_conv(in_channels, three[0], 1), _conv(three[0], three[1], 3, stride)))
        branches.append(
            nn.Sequential(
                _conv(in_channels, double[0], 1), _conv(double[0], double[1], 3), _conv(double[1], double[1], 3, stride)
            )
        )
        pooling = nn.AvgPool2d(3, stride, 1) if pool == "avg" else nn.MaxPool2d(3, stride, 1)
        branches.append(nn.Sequential(pooling, _conv(in_channels, projected, 1)) if projected else pooling)
        self.branches = nn.ModuleList(branches)
        self.out_channels = one + three[1] + double[1] + (projected or in_channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


# (1x1, 3x3, twice 3x3, pooling, projection of the pooled)
_PLAN = (
    (64, (64, 64), (64, 96), "avg", 32), (64, (64, 96), (64, 96), "avg", 64), (0, (128, 160), (64, 96), "max", 0),
    (224, (64, 96), (96, 128), "avg", 128), (192, (96, 128), (96, 128), "avg", 128),
    (160, (128, 160), (128, 160), "avg", 128), (96, (128, 192), (160, 192), "avg", 128),
    (0, (128, 192), (192, 256), "max", 0), (352, (192, 320), (160, 224), "avg", 128),
    (352, (192, 320), (192, 224), "max", 128),
)  # fmt: skip


class InceptionBN(nn.Module):
    """The ImageNet network for 224 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True), _conv(64, 64, 1), _conv(64, 192, 3),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )  # fmt: skip
        blocks: list[nn.Module] = []
        channels = 192
        for one, three, double, pool, projected in _PLAN:
            block = _Mixed(channels, one, three, double, pool, projected)
            channels = block.out_channels
            blocks.append(block)
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.blocks(self.stem(x)).mean((2, 3)))


def inception_bn(*, batch_size: int, seq_len: int | None = None) -> Built:
    return InceptionBN(), (torch.empty(batch_size, 3, 224, 224, device="meta"),)


NETWORKS: dict[str, Callable[..., Built]] = {"inception_bn": inception_bn}
