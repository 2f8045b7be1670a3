"""What measures a collection's configurations: the seam between the runner and the machines.

The runner hands all tasks to an engine and takes replies as they come, in any order. It alone writes the store, the
tables and the progress, so that no engine needs to know of them: a task whose reply did not arrive is measured again by
the next call, whatever ended this one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from gnnpred.collect.recipe import Configuration, MeasureSettings

# {"status": one of store.STATUSES, "reason": text, "result": figures and the manifest of where they were measured};
# "lost_device": true where the GPU did not answer at all, which says nothing of the configuration
Reply = dict[str, Any]
PROBE_LIMIT_S = 300.0


class BudgetSpentError(Exception):
    """The time budget ended; what was being done is not recorded."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One configuration to measure, as engines see it: what it needs, and the message for its worker."""

    configuration: Configuration
    settings: MeasureSettings
    device: str  # cpu or cuda

    @property
    def num_gpus(self) -> int:
        """GPUs that it needs on every node at the same time (on a CPU: processes)."""
        return self.configuration.gpus_per_node

    @property
    def limit_s(self) -> float:
        """From the release of its worker to the reply; what takes longer is ended, with status ``timeout``."""
        return self.settings.time_limit_s

    def message(self) -> dict[str, Any]:
        """The task of :mod:`gnnpred.collect.worker`, as JSON takes it."""
        return {
            "task": "measure",
            "configuration": asdict(self.configuration),
            "settings": asdict(self.settings),
            "device": self.device,
        }

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> "Task":
        """The task of a :meth:`message`."""
        return cls(
            configuration=Configuration.of_fields(message["configuration"]),
            settings=MeasureSettings(**message["settings"]),
            device=message["device"],
        )


def probe_message(device: str | None, models: Sequence[str]) -> dict[str, Any]:
    """The worker's task that looks at a machine and checks the models' names."""
    return {"task": "probe", "device": device, "models": list(models)}


class Engine(Protocol):
    """Runs tasks on one machine or many."""

    overlaps: bool  # whether other work may go on while configurations are measured: exports beside a GPU, not a CPU

    def probe(self, device: str | None, models: Sequence[str], *, deadline: float | None) -> Reply:
        """The reply to :func:`probe_message` where tasks will run: ``result`` has ``manifest`` and ``cpu_device``.

        ``manifest["num_gpus"]`` is how many GPUs a task can have on a node (on a CPU: processes), and
        ``manifest["num_nodes"]``, 1 where it is missing, how many nodes. Raises BudgetSpentError at ``deadline``
        (monotonic seconds).
        """
        ...

    def measure(self, tasks: Sequence[Task], *, deadline: float | None) -> Iterator[tuple[Task, Reply]]:
        """Every task once, with its reply, in the order in which they finish.

        What goes wrong with a task is its reply. Nothing is started while the caller holds the iterator where not
        ``overlaps``. Raises BudgetSpentError at ``deadline``, after the replies that have arrived.
        """
        ...

    def end_all(self) -> None:
        """End everything that was started; called once at the end, whatever ended the work."""
        ...
