"""Networks of published benchmarks that no model library provides, as PyTorch modules of our own.

The corpus needs their graphs: layer widths, kernels and strides follow what the benchmark ran; a
framework's padding ``same`` is written as the symmetric padding of equal output size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def _flat_features(features: nn.Module, image_size: tuple[int, int], in_channels: int = 3) -> int:
    """Elements per sample that ``features`` makes of an image."""
    with torch.no_grad():
        return features(torch.empty(1, in_channels, *image_size, device="meta")).flatten(1).shape[1]


def _conv_relu(in_channels: int, out_channels: int, kernel: int, padding: int = 0, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, kernel, stride, padding), nn.ReLU()]


def _with_head(
    features: nn.Sequential, image_size: tuple[int, int], head: Callable[[int], list[nn.Module]]
) -> nn.Module:
    features = features.to("meta")
    features.eval()
    width = _flat_features(features, image_size)
    return nn.Sequential(features, nn.Flatten(), *head(width))


def lenet5(image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling."""
    features = nn.Sequential(*_conv_relu(3, 6, 5), nn.MaxPool2d(2), *_conv_relu(6, 16, 5), nn.MaxPool2d(2))
    return _with_head(
        features,
        image_size,
        lambda w: [
            nn.Linear(w, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
            nn.Softmax(1),
        ],
    )


def mnist_cnn(image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Two convolutions and one classifier: the Keras introduction to MNIST."""
    features = nn.Sequential(*_conv_relu(3, 32, 3), nn.MaxPool2d(2), *_conv_relu(32, 64, 3), nn.MaxPool2d(2))
    return _with_head(features, image_size, lambda w: [nn.Dropout(0.5), nn.Linear(w, num_classes), nn.Softmax(1)])


def cifar10_cnn(image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Four convolutions with dropout: the Keras CIFAR-10 example."""
    features = nn.Sequential(
        *_conv_relu(3, 32, 3, 1), *_conv_relu(32, 32, 3), nn.MaxPool2d(2), nn.Dropout(0.25),
        *_conv_relu(32, 64, 3, 1), *_conv_relu(64, 64, 3), nn.MaxPool2d(2), nn.Dropout(0.25),
    )  # fmt: skip
    return _with_head(
        features,
        image_size,
        lambda w: [nn.Linear(w, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, num_classes), nn.Softmax(1)],
    )


def alexnet_bn(image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """The wide AlexNet of the PROFET benchmark: stride-1 stem, batch normalisation everywhere."""

    def block(in_channels: int, out_channels: int, kernel: int, *, pad: int = 0, pool: bool = True) -> list[nn.Module]:
        layers: list[nn.Module] = [nn.ZeroPad2d(pad)] if pad else []
        layers += [
            nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
        ]
        return layers + ([nn.MaxPool2d(2)] if pool else [])

    features = nn.Sequential(
        *block(3, 96, 11), *block(96, 256, 5), *block(256, 512, 3, pad=1), *block(512, 1024, 3, pad=1, pool=False),
        *block(1024, 1024, 3, pad=1),
    )  # fmt: skip
    return _with_head(
        features,
        image_size,
        lambda w: [
            nn.Linear(w, 3072), nn.BatchNorm1d(3072), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(3072, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(4096, num_classes), nn.BatchNorm1d(num_classes), nn.Softmax(1),
        ],
    )  # fmt: skip


_VGG_WIDTHS = {
    "vgg11": (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "vgg13": (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "vgg16": (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0),
    "vgg19": (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0),
}


def vgg_of(name: str) -> Callable[[tuple[int, int], int], nn.Module]:
    """VGG whose classifier follows the input size (no adaptive pooling) and has no dropout."""

    def build(image_size: tuple[int, int], num_classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        channels = 3
        for width in _VGG_WIDTHS[name]:
            if width:
                layers += _conv_relu(channels, width, 3, 1)
                channels = width
            else:
                layers.append(nn.MaxPool2d(2))
        return _with_head(
            nn.Sequential(*layers),
            image_size,
            lambda w: [
                nn.Linear(w, 4096),
                nn.ReLU(),
                nn.Linear(4096, 4096),
                nn.ReLU(),
                nn.Linear(4096, num_classes),
                nn.Softmax(1),
            ],
        )

    return build


class _PlainResidual(nn.Module):
    """Two 1x1 convolutions with a projected shortcut where the stride is not 1."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.shortcut = (
            nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride), nn.BatchNorm2d(channels))
            if stride != 1
            else nn.Identity()
        )
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, channels, 1, stride), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.body(x))


def resnet_small(image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Four residual blocks of 1x1 convolutions behind a 7x7 stem."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, 1),
        _PlainResidual(64, 64, 2), _PlainResidual(64, 64, 1), _PlainResidual(64, 128, 2), _PlainResidual(128, 128, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes), nn.Softmax(1),
    )  # fmt: skip


class _PreActivation(nn.Module):
    """Pre-activation residual block; the shortcut is a bare convolution where shapes differ."""

    def __init__(self, in_channels: int, channels: int, stride: int, *, bottleneck: bool, first: bool) -> None:
        super().__init__()
        out_channels = channels * 4 if bottleneck else channels
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        layers: list[nn.Module] = []
        width_in = in_channels
        for position, kernel in enumerate(kernels):
            width_out = out_channels if position == len(kernels) - 1 else channels
            if not (first and position == 0):  # the stem has just normalised
                layers += [nn.BatchNorm2d(width_in), nn.ReLU()]
            layers.append(nn.Conv2d(width_in, width_out, kernel, stride if position == 0 else 1, kernel // 2))
            width_in = width_out
        self.body = nn.Sequential(*layers)
        project = stride != 1 or in_channels != out_channels
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)


def preact_resnet_of(repetitions: Sequence[int], *, bottleneck: bool) -> Callable[[tuple[int, int], int], nn.Module]:
    """Pre-activation ResNet without normalised shortcuts."""

    def build(image_size: tuple[int, int], num_classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        in_channels, channels = 64, 64
        for stage, repetition in enumerate(repetitions):
            for block in range(repetition):
                stride = 2 if block == 0 and stage > 0 else 1
                first = stage == 0 and block == 0
                layers.append(_PreActivation(in_channels, channels, stride, bottleneck=bottleneck, first=first))
                in_channels = channels * 4 if bottleneck else channels
            channels *= 2
        layers += [nn.BatchNorm2d(in_channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(in_channels, num_classes), nn.Softmax(1))

    return build


def resnet_v1_of(depth: int) -> Callable[[tuple[int, int], int], nn.Module]:
    """ResNet with the stride in the first 1x1 convolution of a block (v1, as in the paper)."""

    def build(image_size: tuple[int, int], num_classes: int) -> nn.Module:
        from torchvision.models import resnet

        model = getattr(resnet, f"resnet{depth}")(num_classes=num_classes)
        for block in model.modules():
            if isinstance(block, resnet.Bottleneck) and block.conv2.stride != (1, 1):
                block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)
        return model

    return build


def resnet200(image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """ResNet-200 with plain (post-activation) bottlenecks."""
    from torchvision.models import resnet

    return resnet.ResNet(resnet.Bottleneck, [3, 24, 36, 3], num_classes=num_classes)


def cifar_resnet18(image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """ResNet-18 for 32x32 images: 3x3 stem with stride 1 and no pooling."""
    from torchvision.models import resnet

    model = resnet.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def overfeat(image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """OverFeat, fast model."""
    features = nn.Sequential(
        *_conv_relu(3, 96, 11, 0, 4), nn.MaxPool2d(2), *_conv_relu(96, 256, 5), nn.MaxPool2d(2),
        *_conv_relu(256, 512, 3, 1), *_conv_relu(512, 1024, 3, 1), *_conv_relu(1024, 1024, 3, 1), nn.MaxPool2d(2),
    )  # fmt: skip
    return _with_head(
        features,
        image_size,
        lambda w: [nn.Linear(w, 3072), nn.ReLU(), nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, num_classes)],
    )


class _BasicConv(nn.Sequential):
    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
        )


class SSD300(nn.Module):
    """SSD300 on a ResNet-50 cut after its third stage, whose stride is removed (38x38 maps)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        from torchvision.models import resnet50

        backbone = resnet50()
        stage = backbone.layer3[0]
        stage.conv1.stride = stage.conv2.stride = stage.downsample[0].stride = (1, 1)
        self.backbone = nn.Sequential(
            backbone.conv1,
            backbone.bn1,
            backbone.relu,
            backbone.maxpool,
            backbone.layer1,
            backbone.layer2,
            backbone.layer3,
        )
        widths = (1024, 512, 512, 256, 256, 256)
        middle = (256, 256, 128, 128, 128)
        self.extra = nn.ModuleList(
            nn.Sequential(
                _BasicConv(widths[i], middle[i], 1),
                _BasicConv(middle[i], widths[i + 1], 3, stride=2 if i < 3 else 1, padding=1 if i < 3 else 0),
            )
            for i in range(5)
        )
        boxes = (4, 6, 6, 6, 4, 4)
        self.locations = nn.ModuleList(nn.Conv2d(w, 4 * n, 3, padding=1) for w, n in zip(widths, boxes, strict=True))
        self.scores = nn.ModuleList(
            nn.Conv2d(w, num_classes * n, 3, padding=1) for w, n in zip(widths, boxes, strict=True)
        )
        self.num_classes = num_classes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = [self.backbone(x)]
        for block in self.extra:
            maps.append(block(maps[-1]))
        batch = x.shape[0]
        locations = [head(m).reshape(batch, 4, -1) for head, m in zip(self.locations, maps, strict=True)]
        scores = [head(m).reshape(batch, self.num_classes, -1) for head, m in zip(self.scores, maps, strict=True)]
        return torch.cat(locations, 2), torch.cat(scores, 2)


class DarknetResidual(nn.Module):
    """1x1 then 3x3 convolution with leaky ReLU, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_leaky_conv(channels, channels // 2, 1), _leaky_conv(channels // 2, channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _leaky_conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.LeakyReLU(0.1),
    )


class YOLOv3(nn.Module):
    """YOLOv3: Darknet-53 with three detection scales."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        channels = 32
        self.stem = _leaky_conv(3, channels, 3)
        for repetition in (1, 2, 8, 8, 4):
            blocks = [DarknetResidual(channels * 2) for _ in range(repetition)]
            self.stages.append(nn.Sequential(_leaky_conv(channels, channels * 2, 3, 2), *blocks))
            channels *= 2
        out = 3 * (num_classes + 5)
        self.necks, self.heads, self.laterals = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate((512, 256, 128)):
            in_channels = 1024 if level == 0 else width * 3
            self.necks.append(
                nn.Sequential(
                    _leaky_conv(in_channels, width, 1), _leaky_conv(width, width * 2, 3),
                    _leaky_conv(width * 2, width, 1), _leaky_conv(width, width * 2, 3),
                    _leaky_conv(width * 2, width, 1),
                )
            )  # fmt: skip
            self.heads.append(nn.Sequential(_leaky_conv(width, width * 2, 3), nn.Conv2d(width * 2, out, 1)))
            if level < 2:
                self.laterals.append(nn.Sequential(_leaky_conv(width, width // 2, 1), nn.Upsample(scale_factor=2)))

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        results = []
        for level in range(3):
            neck = self.necks[level](x)
            results.append(self.heads[level](neck))
            if level < 2:
                x = torch.cat([self.laterals[level](neck), maps[3 - level]], 1)
        return results


class _UNetBlock(nn.Sequential):
    """Two 3x3 convolutions, each with instance norm and leaky ReLU."""

    def __init__(self, rank: int, in_channels: int, channels: int, stride: int = 1) -> None:
        conv = nn.Conv2d if rank == 2 else nn.Conv3d
        norm = nn.InstanceNorm2d if rank == 2 else nn.InstanceNorm3d
        super().__init__(
            conv(in_channels, channels, 3, stride, 1), norm(channels, affine=True), nn.LeakyReLU(0.01, inplace=True),
            conv(channels, channels, 3, 1, 1), norm(channels, affine=True), nn.LeakyReLU(0.01, inplace=True),
        )  # fmt: skip


class NNUNet(nn.Module):
    """nnU-Net for brain tumours (BraTS): strided encoder, transposed convolutions, deep supervision."""

    def __init__(self, rank: int, num_levels: int, *, in_channels: int = 4, num_classes: int = 4) -> None:
        super().__init__()
        widths = [min(2 ** (5 + level), 512 if rank == 2 else 320) for level in range(num_levels)]
        conv = nn.Conv2d if rank == 2 else nn.Conv3d
        transposed = nn.ConvTranspose2d if rank == 2 else nn.ConvTranspose3d
        self.encoder = nn.ModuleList(
            _UNetBlock(rank, in_channels if level == 0 else widths[level - 1], width, 1 if level == 0 else 2)
            for level, width in enumerate(widths)
        )
        self.upsample = nn.ModuleList(
            transposed(widths[level + 1], widths[level], 2, 2, bias=False) for level in range(num_levels - 1)
        )
        self.decoder = nn.ModuleList(
            _UNetBlock(rank, 2 * widths[level], widths[level]) for level in range(num_levels - 1)
        )
        self.heads = nn.ModuleList(conv(widths[level], num_classes, 1) for level in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        skips = []
        for block in self.encoder:
            x = block(x)
            skips.append(x)
        results = []
        for level in reversed(range(len(self.decoder))):
            x = self.decoder[level](torch.cat([self.upsample[level](x), skips[level]], 1))
            if level < len(self.heads):
                results.append(self.heads[level](x))
        return results


class ValidUNet(nn.Module):
    """The first U-Net: unpadded convolutions and cropped skips; one channel in, two classes out."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)

        def block(in_channels: int, channels: int) -> nn.Sequential:
            return nn.Sequential(*_conv_relu(in_channels, channels, 3), *_conv_relu(channels, channels, 3))

        self.down = nn.ModuleList(block(i, o) for i, o in zip((1, *widths[:-1]), widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
        self.merge = nn.ModuleList(block(2 * w, w) for w in widths[-2::-1])
        self.classify = nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = up(x)
            margin = (skip.shape[-1] - x.shape[-1]) // 2
            skip = skip[:, :, margin : margin + x.shape[-2], margin : margin + x.shape[-1]]
            x = merge(torch.cat([skip, x], 1))
        return self.classify(x)


class _WaveNet(nn.Module):
    """Dilated gated convolutions, conditioned on the spectrogram: the coupling network of WaveGlow."""

    def __init__(self, half: int, num_mels: int, *, num_layers: int = 8, channels: int = 512) -> None:
        super().__init__()
        self.channels = channels
        self.start = nn.utils.weight_norm(nn.Conv1d(half, channels, 1))
        self.end = nn.Conv1d(channels, 2 * half, 1)
        self.dilated = nn.ModuleList(
            nn.utils.weight_norm(nn.Conv1d(channels, 2 * channels, 3, dilation=2**i, padding=2**i))
            for i in range(num_layers)
        )
        self.condition = nn.ModuleList(
            nn.utils.weight_norm(nn.Conv1d(num_mels, 2 * channels, 1)) for _ in range(num_layers)
        )
        self.skip = nn.ModuleList(
            nn.utils.weight_norm(nn.Conv1d(channels, 2 * channels if i < num_layers - 1 else channels, 1))
            for i in range(num_layers)
        )

    def forward(self, audio: Tensor, spectrogram: Tensor) -> Tensor:
        audio = self.start(audio)
        output = None
        for dilated, condition, skip in zip(self.dilated, self.condition, self.skip, strict=True):
            gates = dilated(audio) + condition(spectrogram)
            mixed = skip(torch.tanh(gates[:, : self.channels]) * torch.sigmoid(gates[:, self.channels :]))
            if mixed.shape[1] > self.channels:
                audio = mixed[:, : self.channels] + audio
                mixed = mixed[:, self.channels :]
            output = mixed if output is None else mixed + output
        return self.end(output)


class WaveGlow(nn.Module):
    """WaveGlow: twelve flows over audio in groups of eight samples, two of them leaving every four flows."""

    def __init__(self, num_samples: int = 8000, *, num_mels: int = 80, num_flows: int = 12, group: int = 8) -> None:
        super().__init__()
        self.num_samples, self.group, self.num_mels = num_samples, group, num_mels
        self.upsample = nn.ConvTranspose1d(num_mels, num_mels, 1024, 256)
        self.mix, self.couple = nn.ModuleList(), nn.ModuleList()
        remaining = group
        self.leaves = []
        for flow in range(num_flows):
            self.leaves.append(flow % 4 == 0 and flow > 0)
            remaining -= 2 if self.leaves[-1] else 0
            self.mix.append(nn.Conv1d(remaining, remaining, 1, bias=False))
            self.couple.append(_WaveNet(remaining // 2, num_mels * group))

    def forward(self, audio: Tensor, spectrogram: Tensor) -> list[Tensor]:
        batch, steps = audio.shape[0], self.num_samples // self.group
        spectrogram = self.upsample(spectrogram)[:, :, : self.num_samples]
        spectrogram = spectrogram.reshape(batch, self.num_mels, steps, self.group).permute(0, 2, 1, 3)
        spectrogram = spectrogram.reshape(batch, steps, -1).permute(0, 2, 1)
        audio = audio.reshape(batch, steps, self.group).permute(0, 2, 1)
        results = []
        for leaves, mix, couple in zip(self.leaves, self.mix, self.couple, strict=True):
            if leaves:
                results.append(audio[:, :2])
                audio = audio[:, 2:]
            audio = mix(audio)
            half = audio.shape[1] // 2
            first, second = audio[:, :half], audio[:, half:]
            shift_scale = couple(first, spectrogram)
            log_scale = shift_scale[:, half:]
            second = torch.exp(log_scale) * second + shift_scale[:, :half]
            results.append(log_scale)
            audio = torch.cat([first, second], 1)
        return [*results, audio]


NETWORKS: dict[str, Callable[[tuple[int, int], int], nn.Module]] = {
    "lenet5": lenet5,
    "mnist_cnn": mnist_cnn,
    "cifar10_cnn": cifar10_cnn,
    "alexnet_bn": alexnet_bn,
    **{f"{name}_flat": vgg_of(name) for name in _VGG_WIDTHS},
    "resnet_small": resnet_small,
    "preact_resnet18": preact_resnet_of((2, 2, 2, 2), bottleneck=False),
    "preact_resnet34": preact_resnet_of((3, 4, 6, 3), bottleneck=False),
    "preact_resnet50": preact_resnet_of((3, 4, 6, 3), bottleneck=True),
    "preact_resnet152": preact_resnet_of((3, 8, 36, 3), bottleneck=True),
    "resnet50_v1": resnet_v1_of(50),
    "resnet101_v1": resnet_v1_of(101),
    "resnet152_v1": resnet_v1_of(152),
    "resnet200": resnet200,
    "cifar_resnet18": cifar_resnet18,
    "overfeat": overfeat,
    "ssd300": lambda image_size, num_classes: SSD300(num_classes),
    "yolov3": lambda image_size, num_classes: YOLOv3(num_classes),
    "nnunet2d": lambda image_size, num_classes: NNUNet(2, 6),
    "nnunet3d": lambda image_size, num_classes: NNUNet(3, 6),
    "unet_valid": lambda image_size, num_classes: ValidUNet(),
    "waveglow": lambda image_size, num_classes: WaveGlow(),
}

# shapes of one sample of each input, where it is not one image of three channels
INPUT_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "nnunet2d": ((4, 192, 160),),
    "nnunet3d": ((4, 128, 128, 128),),
    "unet_valid": ((1, 572, 572),),
    "waveglow": ((8000,), (80, 32)),
}
