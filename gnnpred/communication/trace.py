"""The timeline of a step in Chrome's trace-event format, for chrome://tracing and ui.perfetto.dev.

One process per pipeline stage (identical ranks are drawn once), with three threads: kernels, collectives that overlap
them, collectives that they wait for. On the thread of kernels, kernels and waits together fill the step.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done

STREAMS = ("compute", "communication", "blocking")
_STREAM_TITLES = {
    "compute": "compute stream",
    "communication": "communication stream (overlapped)",
    "blocking": "communication stream (waited for)",
}
_US_PER_MS = 1e3


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One bar of the picture."""

    name: str
    stream: str
    start_ms: float
    duration_ms: float
    stage: int
    category: str  # forward, backward, optimizer, collective, wait, repeated
    arguments: Mapping[str, Any]


@dataclass
class Trace:
    """Collects what a timeline simulates."""

    events: list[TraceEvent] = field(default_factory=list)

    def add(
        self,
        name: str,
        stream: str,
        start_ms: float,
        duration_ms: float,
        *,
        category: str,
        stage: int = 0,
        **arguments: Any,
    ) -> None:
        self.events.append(TraceEvent(name, stream, start_ms, duration_ms, stage, category, arguments))

    def as_dict(self, **metadata: Any) -> dict[str, Any]:
        """The JSON object format of the trace-event specification: complete events ("X"), times in microseconds."""
        rows: list[dict[str, Any]] = []
        for stage in sorted({event.stage for event in self.events}):
            rows.append({"name": "process_name", "ph": "M", "pid": stage, "args": {"name": f"pipeline stage {stage}"}})
            rows += [
                {"name": "thread_name", "ph": "M", "pid": stage, "tid": tid, "args": {"name": _STREAM_TITLES[stream]}}
                for tid, stream in enumerate(STREAMS)
            ]
        for event in self.events:
            rows.append(
                {
                    "name": event.name,
                    "cat": event.category,
                    "ph": "X",
                    "ts": event.start_ms * _US_PER_MS,
                    "dur": event.duration_ms * _US_PER_MS,
                    "pid": event.stage,
                    "tid": STREAMS.index(event.stream),
                    "args": dict(event.arguments),
                }
            )
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": metadata}


def write_trace(trace: Trace, path: str | Path, **metadata: Any) -> None:
    """Write a trace file; it appears under its name only when it is complete."""
    path = Path(path)
    try:
        with replaced_when_done(path) as partial:
            partial.write_text(json.dumps(trace.as_dict(**metadata)), encoding="utf-8")
    except OSError as error:
        raise GnnpredError(f"cannot write {path}: {error.strerror or error}") from error
