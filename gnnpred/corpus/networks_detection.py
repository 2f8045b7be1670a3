"""Two-stage detectors, with what depends on the data fixed: 512 sampled boxes an image, 128 of them with a mask.

Reading a box's features is written as one gather of its 7x7 or 14x14 bins; matching and suppression of
boxes, which is host work and small kernels, is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[Tensor, ...]]

BOXES_PER_LEVEL = (256, 128, 64, 64)
MASKS_PER_LEVEL = (64, 32, 16, 16)


class MaskRCNN(nn.Module):
    """Mask R-CNN with a feature pyramid on ResNet-50, its batch norms and first two stages frozen."""

    def __init__(self, num_classes: int = 81) -> None:
        super().__init__()
        from torchvision.models import resnet50
        from torchvision.ops import FeaturePyramidNetwork
        from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
        from torchvision.ops.misc import FrozenBatchNorm2d

        body = resnet50(norm_layer=FrozenBatchNorm2d)
        self.stem = nn.Sequential(body.conv1, body.bn1, body.relu, body.maxpool)
        self.stages = nn.ModuleList([body.layer1, body.layer2, body.layer3, body.layer4])
        for parameter in (*self.stem.parameters(), *body.layer1.parameters()):
            parameter.requires_grad_(False)
        self.pyramid = FeaturePyramidNetwork([256, 512, 1024, 2048], 256, LastLevelMaxPool())
        self.rpn, self.objectness, self.deltas = (
            nn.Conv2d(256, 256, 3, 1, 1),
            nn.Conv2d(256, 3, 1),
            nn.Conv2d(256, 12, 1),
        )
        self.hidden = nn.ModuleList([nn.Linear(256 * 49, 1024), nn.Linear(1024, 1024)])
        self.score, self.regress = nn.Linear(1024, num_classes), nn.Linear(1024, 4 * num_classes)
        self.mask_convolutions = nn.ModuleList(nn.Conv2d(256, 256, 3, 1, 1) for _ in range(4))
        self.mask_up, self.mask = nn.ConvTranspose2d(256, 256, 2, 2), nn.Conv2d(256, num_classes, 1)

    def forward(self, x: Tensor, *bins: Tensor) -> list[Tensor]:
        x = self.stem(x)
        maps = {}
        for index, stage in enumerate(self.stages):
            x = stage(x)
            maps[str(index)] = x
        levels = list(self.pyramid(maps).values())
        results = []
        for level in levels:
            shared = functional.relu(self.rpn(level))
            results += [self.objectness(shared), self.deltas(shared)]
        boxes = self._pooled(levels, bins[:4], 7).flatten(1)
        for layer in self.hidden:
            boxes = functional.relu(layer(boxes))
        masks = self._pooled(levels, bins[4:], 14)
        for convolution in self.mask_convolutions:
            masks = functional.relu(convolution(masks))
        return [*results, self.score(boxes), self.regress(boxes), self.mask(functional.relu(self.mask_up(masks)))]

    def _pooled(self, levels: list[Tensor], bins: tuple[Tensor, ...], side: int) -> Tensor:
        pieces = []
        for level, chosen in zip(levels[:4], bins, strict=True):
            rows = level.permute(0, 2, 3, 1).reshape(-1, level.shape[1])
            pieces.append(torch.index_select(rows, 0, chosen).view(-1, side, side, level.shape[1]))
        return torch.cat(pieces).permute(0, 3, 1, 2)


def mask_rcnn(*, batch_size: int, seq_len: int | None = None, height: int, width: int) -> Built:
    bins = [
        torch.zeros(batch_size * count * side * side, dtype=torch.long, device="meta")
        for counts, side in ((BOXES_PER_LEVEL, 7), (MASKS_PER_LEVEL, 14))
        for count in counts
    ]
    return MaskRCNN(), (torch.empty(batch_size, 3, height, width, device="meta"), *bins)


NETWORKS: dict[str, Callable[..., Built]] = {"mask_rcnn": mask_rcnn}
