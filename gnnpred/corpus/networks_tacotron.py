"""Tacotron 2; the decoder's loop over spectrogram frames is written once and repeated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gnnpred.corpus.trace import repeated

Built = tuple[nn.Module, tuple[Tensor, ...]]


def _conv_norm(in_channels: int, channels: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(in_channels, channels, 5, padding=2), nn.BatchNorm1d(channels), activation, nn.Dropout(0.5)
    )


class _DecoderStep(nn.Module):
    """One frame: attention LSTM, location-sensitive attention, decoder LSTM, projections to frame and stop gate."""

    def __init__(self, num_mels: int, width: int = 1024, memory: int = 512, attention: int = 128) -> None:
        super().__init__()
        self.attention_cell, self.decoder_cell = nn.LSTM(256 + memory, width), nn.LSTM(width + memory, width)
        self.query = nn.Linear(width, attention, bias=False)
        self.location = nn.Conv1d(2, 32, 31, padding=15, bias=False)
        self.location_dense = nn.Linear(32, attention, bias=False)
        self.energy = nn.Linear(attention, 1, bias=False)
        self.frame, self.gate = nn.Linear(width + memory, num_mels), nn.Linear(width + memory, 1)

    def forward(self, frame: Tensor, memory: Tensor, keys: Tensor, weights: Tensor, context: Tensor) -> list[Tensor]:
        hidden, _ = self.attention_cell(torch.cat([frame, context], -1)[None])
        hidden = functional.dropout(hidden[0], 0.1, self.training)
        location = self.location_dense(self.location(weights).transpose(1, 2))
        energy = self.energy(torch.tanh(self.query(hidden)[:, None] + location + keys)).squeeze(-1)
        mask = torch.zeros(energy.shape[1], dtype=torch.bool, device=energy.device)
        attended = functional.softmax(energy.masked_fill(mask, -1e9), dim=1)
        context = torch.bmm(attended[:, None], memory)[:, 0]
        weights = torch.stack([attended, weights[:, 1] + attended], 1)
        hidden, _ = self.decoder_cell(torch.cat([hidden, context], -1)[None])
        joined = torch.cat([functional.dropout(hidden[0], 0.1, self.training), context], 1)
        return [self.frame(joined), self.gate(joined), weights]


class Tacotron2(nn.Module):
    """Text to mel spectrogram, fed the true frames as in training."""

    def __init__(self, num_frames: int, num_mels: int = 80) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.embedding = nn.Embedding(148, 512)
        self.encoder = nn.Sequential(*(_conv_norm(512, 512, nn.ReLU()) for _ in range(3)))
        self.recurrent = nn.LSTM(512, 256, batch_first=True, bidirectional=True)
        self.key = nn.Linear(512, 128, bias=False)
        self.prenet = nn.ModuleList([nn.Linear(num_mels, 256, bias=False), nn.Linear(256, 256, bias=False)])
        self.step = _DecoderStep(num_mels)
        widths = (num_mels, 512, 512, 512, 512)
        self.postnet = nn.Sequential(
            *(_conv_norm(a, 512, nn.Tanh()) for a in widths[:4]),
            nn.Conv1d(512, num_mels, 5, padding=2), nn.BatchNorm1d(num_mels), nn.Dropout(0.5),
        )  # fmt: skip

    def forward(self, ids: Tensor, frames: Tensor) -> list[Tensor]:
        memory, _ = self.recurrent(self.encoder(self.embedding(ids).transpose(1, 2)).transpose(1, 2))
        keys = self.key(memory)
        for layer in self.prenet:
            frames = functional.dropout(functional.relu(layer(frames)), 0.5)
        # states of the loop: what the first step starts from has the same shape as what every other one does
        weights = keys[..., :2].transpose(1, 2)
        with repeated(self.num_frames):
            frame, gate, _ = self.step(frames[:, 0], memory, keys, weights, memory[:, 0])
        spectrogram = frame[:, :, None].expand(-1, -1, self.num_frames)
        return [spectrogram, gate, spectrogram + self.postnet(spectrogram)]


def tacotron2(*, batch_size: int, seq_len: int, num_frames: int) -> Built:
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta")
    return Tacotron2(num_frames), (ids, torch.empty(batch_size, num_frames, 80, device="meta"))


NETWORKS: dict[str, Callable[..., Built]] = {"tacotron2": tacotron2}
