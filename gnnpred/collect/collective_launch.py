"""Calls that one set of ranks times: what a :class:`~gnnpred.collect.engine.Task` is to a recipe of steps."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gnnpred.collect.collective_recipe import CollectiveCall
from gnnpred.collect.recipe import MeasureSettings

START_LIMIT_S = 180.0  # imports, and the process group


@dataclass(frozen=True, kw_only=True)
class CollectiveLaunch:
    """Calls among the same GPUs, one process group for all. ``lines``: the file to which rank 0 reports."""

    calls: Sequence[CollectiveCall]
    settings: MeasureSettings
    device: str  # cpu or cuda
    lines: str

    @property
    def configuration(self) -> CollectiveCall:
        """Any of the calls: all have its ``gpus`` and ``nodes``."""
        return self.calls[0]

    @property
    def num_gpus(self) -> int:
        """On every node (on a CPU: processes)."""
        return self.configuration.gpus_per_node

    @property
    def limit_s(self) -> float:
        """Of the whole; who reads the lines keeps each call's own."""
        return START_LIMIT_S + len(self.calls) * self.settings.time_limit_s

    def message(self) -> dict[str, Any]:
        """The task of :mod:`gnnpred.collect.worker`, as JSON takes it."""
        return {
            "task": "collectives",
            "calls": [asdict(call) for call in self.calls],
            "settings": asdict(self.settings),
            "device": self.device,
            "lines": self.lines,
        }

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> "CollectiveLaunch":
        """The launch of a :meth:`message`."""
        return cls(
            calls=tuple(CollectiveCall(**fields) for fields in message["calls"]),
            settings=MeasureSettings(**message["settings"]),
            device=message["device"],
            lines=message["lines"],
        )
