"""Models of a user's own, for tests: small, broken, greedy."""

import os
import signal
import subprocess
import sys
import time

import torch


def mlp(batch_size):
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), torch.ones(
        batch_size, 8
    )


def cnn(batch_size):
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()), (
        torch.ones(batch_size, 3, 8, 8)
    )


def fixed_batch():
    return torch.nn.Linear(8, 4), torch.ones(2, 8)


class _NotANumber(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0 * 0


def not_a_number(batch_size):
    return _NotANumber(8, 4), torch.ones(batch_size, 8)


class _Greedy(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.ones(1 << 50, device=x.device)[:4]


def greedy(batch_size):
    return _Greedy(8, 4), torch.ones(batch_size, 8)


class _Wide(torch.nn.Linear):
    """8 MiB of activations a sample."""

    def forward(self, x):
        return super().forward(x).repeat(1, 1 << 18).relu().reshape(len(x), 8, -1).mean(-1)


def wide(batch_size):
    return _Wide(8, 8), torch.ones(batch_size, 8)


def network_of_all_kinds(batch_size):
    """One of each kind of op that collections name, on 8x8 images."""
    return _AllKinds(), torch.ones(batch_size, 3, 8, 8)


class _AllKinds(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = torch.nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
        self.batch_norm = torch.nn.BatchNorm2d(8)
        self.projection = torch.nn.Linear(8, 16)
        self.layer_norm = torch.nn.LayerNorm(16)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(16, 4, bias=False)

    def forward(self, x):
        x = self.batch_norm(self.depthwise(torch.relu(self.conv(x)))).flatten(2).transpose(1, 2)  # (batch, 16, 8)
        x = self.layer_norm(self.projection(x))
        heads = x.unflatten(2, (2, 8)).transpose(1, 2)  # (batch, 2, 16, 8)
        fused = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        eager = torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads
        mixed = self.dropout(torch.nn.functional.gelu(fused + eager)) * fused
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


def segfault():
    print("it got lost", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def quits():
    os._exit(7)


def hangs():
    time.sleep(600)


def starts_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    child.wait()


class _Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.product = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.product(self.norm(x)).relu()


def blocks(batch_size):
    return torch.nn.Sequential(_Block(), _Block(), torch.nn.Linear(8, 4)), torch.ones(batch_size, 8)


class _FailsInRank1(torch.nn.Linear):
    def forward(self, x):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise ValueError("not here")
        return super().forward(x)


def fails_in_rank_1(batch_size):
    return _FailsInRank1(8, 4), torch.ones(batch_size, 8)


def large_input(batch_size):
    """192 MiB a sample, of which nothing is computed but a small sum."""
    return _FirstColumns(8, 4), torch.ones(batch_size, 192 << 18)


class _FirstColumns(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :8])
