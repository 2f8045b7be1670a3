"""Small modules that together hold what the two front ends must agree on; functions of ``MODULE:FUNCTION`` form."""

import torch
from torch import nn
from torch.nn import functional


def convolutional(batch_size: int = 2):
    """Convolutions with and without bias, batch and group norm, the usual activations, pools, squeeze-excite."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
            self.bn = nn.BatchNorm2d(16)
            self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
            self.gn = nn.GroupNorm(4, 16)
            self.pointwise = nn.Conv2d(16, 24, 1)
            self.squeeze, self.excite = nn.Conv2d(24, 8, 1), nn.Conv2d(8, 24, 1)
            self.head = nn.Linear(24, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.relu(self.bn(self.stem(x)))
            x = functional.max_pool2d(x, 3, 2, 1)
            x = x + functional.hardswish(self.gn(self.depthwise(x)))
            x = functional.silu(functional.relu6(self.pointwise(x)))
            gate = functional.hardsigmoid(self.excite(functional.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))
            x = functional.leaky_relu(functional.avg_pool2d(x * gate, 2))
            return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))

    return Net(), (torch.empty(batch_size, 3, 32, 32),)


def activations(batch_size: int = 2):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.gelu(self.first(x))
            x = functional.gelu(functional.mish(x), approximate="tanh")
            x = functional.elu(functional.silu(x)) + functional.softplus(functional.hardtanh(x))
            x = functional.dropout(self.second(x), 0.1, self.training)
            return torch.sigmoid(torch.tanh(x)).clamp(0.1, 0.9)

    return Net(), (torch.empty(batch_size, 5, 16),)


def norms(batch_size: int = 2):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_norm = nn.LayerNorm(16)
            self.plain = nn.LayerNorm(16, elementwise_affine=False)
            self.linear = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(self.layer_norm(x))
            x = functional.normalize(self.plain(x), dim=-1)
            return functional.softmax(x, dim=-1) + functional.log_softmax(x, dim=-1)

    return Net(), (torch.empty(batch_size, 7, 16),)


def rms_norm(batch_size: int = 2):
    """torch's RMSNorm, which only opset 23 can name."""
    return nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 16)), (torch.empty(batch_size, 7, 16),)


def attention(batch_size: int = 2):
    """Fused attention, causal attention, an explicit one with a learned bias, and nn.MultiheadAttention."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)
            self.bias = nn.Parameter(torch.zeros(1, 4, 6, 6))
            self.out = nn.Linear(32, 32)
            self.mha = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, tokens, width = x.shape
            q, k, v = self.qkv(x).reshape(batch, tokens, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
            y = functional.scaled_dot_product_attention(q, k, v)
            y = y + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            scores = (q * 8**-0.5) @ k.transpose(-2, -1) + self.bias
            y = y + scores.softmax(dim=-1) @ v
            x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
            return x + self.mha(x, x, x, need_weights=False)[0]

    return Net(), (torch.empty(batch_size, 6, 32),)


def classifier_with_loss(batch_size: int = 2):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 10)

        def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.head(self.embedding(tokens).mean(1)), target)

    return Net(), (torch.zeros(batch_size, 7, dtype=torch.long), torch.zeros(batch_size, dtype=torch.long))


def llama_block(batch_size: int = 2):
    """A decoder block as transformers writes it: own RMSNorm, rotary positions, grouped queries, gated MLP."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp_norm = Norm(), Norm()
            self.q, self.k, self.v = (nn.Linear(32, width, bias=False) for width in (32, 16, 16))
            self.o = nn.Linear(32, 32, bias=False)
            self.gate, self.up, self.down = (nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32))
            self.register_buffer("cos_cached", torch.zeros(6, 8), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, tokens, _ = x.shape
            y = self.norm(x)
            q, k, v = (layer(y).view(batch, tokens, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
            q, k = (t * self.cos_cached + rotated(t) * self.cos_cached for t in (q, k))
            k, v = (t[:, :, None].expand(batch, 2, 2, tokens, 8).reshape(batch, 4, tokens, 8) for t in (k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, 32))
            y = self.mlp_norm(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    return Block(), (torch.empty(batch_size, 6, 32),)


def small_vit(batch_size: int = 2):
    from timm.models.vision_transformer import VisionTransformer

    module = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10)
    return module, (torch.empty(batch_size, 3, 32, 32),)


def small_swin(batch_size: int = 2):
    from timm.models.swin_transformer import SwinTransformer

    module = SwinTransformer(
        img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=10,
        drop_path_rate=0.0,
    )  # fmt: skip
    return module, (torch.empty(batch_size, 3, 32, 32),)


def small_convnext(batch_size: int = 2):
    from timm.models.convnext import ConvNeXt

    module = ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=10)
    return module, (torch.empty(batch_size, 3, 64, 64),)


def small_resnet(batch_size: int = 2):
    from timm.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10), (torch.empty(batch_size, 3, 64, 64),)


def small_efficientnet(batch_size: int = 2):
    import timm

    return timm.create_model("mobilenetv3_small_050", num_classes=10), (torch.empty(batch_size, 3, 64, 64),)
