"""From a model named in a measurement to its operator graph."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import parse_qsl

import torch

from gnnpred.corpus import (
    networks_detection,
    networks_inception_bn,
    networks_language,
    networks_small,
    networks_speech,
    networks_tacotron,
    networks_transformer_xl,
)
from gnnpred.corpus.networks import INPUT_SHAPES, NETWORKS
from gnnpred.corpus.trace import TRACE_BATCH_SIZE, trace_module
from gnnpred.errors import GnnpredError
from gnnpred.graph import OpGraph
from gnnpred.model_sources import build_model

# networks that take options and other inputs than one image
OPTION_NETWORKS = {
    name: build
    for module in (
        networks_detection,
        networks_inception_bn,
        networks_language,
        networks_small,
        networks_speech,
        networks_tacotron,
        networks_transformer_xl,
    )
    for name, build in module.NETWORKS.items()
}


@dataclass(frozen=True, slots=True)
class ModelKey:
    """What to build and at which input size; equal keys are traced once.

    ``source`` is a model source of :mod:`gnnpred.model_sources`, or ``own:NAME`` of
    :mod:`gnnpred.corpus.networks`. ``train=False`` is for networks that run other ops in eval mode.
    """

    source: str
    image_size: tuple[int, ...] | None = None  # (height, width), or with a leading number of channels
    seq_len: int | None = None
    num_classes: int | None = None
    train: bool = True

    @property
    def text(self) -> str:
        """One line that names the key, stable between runs."""
        parts = [self.source]
        if self.image_size:
            parts.append("x".join(map(str, self.image_size)))
        if self.seq_len:
            parts.append(f"seq={self.seq_len}")
        if self.num_classes is not None:
            parts.append(f"classes={self.num_classes}")
        if not self.train:
            parts.append("eval")
        return " ".join(parts)


def trace_key(key: ModelKey) -> OpGraph:
    """The graph of a key, at batch size 1; raises GnnpredError where it cannot be built or traced."""
    _prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if key.source.startswith("own:"):
            module, inputs = _build_own(key)
        else:
            module, inputs = build_model(
                key.source,
                batch_size=TRACE_BATCH_SIZE,
                image_size=key.image_size[-2:] if key.image_size else None,
                seq_len=key.seq_len,
                num_classes=key.num_classes,
                train=key.train,
            )
        return trace_module(module, inputs, name=key.text, train=key.train)


def _build_own(key: ModelKey) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    name, _, query = key.source.removeprefix("own:").partition("?")
    if name in OPTION_NETWORKS:
        options = {option: int(value) for option, value in parse_qsl(query)}
        with torch.device("meta"):
            return OPTION_NETWORKS[name](batch_size=TRACE_BATCH_SIZE, seq_len=key.seq_len, **options)
    if name not in NETWORKS or (key.image_size is None and name not in INPUT_SHAPES):
        raise GnnpredError(f"no network of our own is named {name!r}, or its image size is missing")
    image_size = (key.image_size or (0, 0))[-2:]
    shapes = INPUT_SHAPES.get(name, ((3, *image_size),))
    with torch.device("meta"):
        module = NETWORKS[name](image_size, key.num_classes or 1000)
        return module, tuple(torch.empty(TRACE_BATCH_SIZE, *shape) for shape in shapes)


def defining_file(key: ModelKey) -> str:
    """Name of the file of this package that defines a network of our own."""
    name = key.source.removeprefix("own:").partition("?")[0]
    return f"{OPTION_NETWORKS[name].__module__.rpartition('.')[2]}.py" if name in OPTION_NETWORKS else "networks.py"


@lru_cache(maxsize=1)
def _prepare() -> None:
    from gnnpred.model_sources import declare_torchvision_ops

    torch.set_num_threads(1)
    declare_torchvision_ops()
