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
