"""Two streams of one GPU, side by side: kernels and overlapped collectives; and the events they leave in a trace."""

from gnnpred.communication.trace import Trace


class TwoStreams:
    """Advances the clock of one GPU. Collectives run one after the other on a stream of their own.

    While one of them runs, kernels take ``1 + contention`` times as long.
    """

    def __init__(self, contention: float, trace: Trace | None = None, stage: int = 0) -> None:
        self.now_ms = 0.0
        self.network_free_ms = 0.0
        self.communication_ms = 0.0  # busy time of all collectives
        self.trace = trace
        self._stretch = 1.0 + contention
        self._stage = stage

    def compute(self, work_ms: float, name: str = "", category: str = "") -> None:
        """A kernel."""
        start_ms = self.now_ms
        busy_ms = self.network_free_ms - start_ms
        if busy_ms <= 0:
            self.now_ms = start_ms + work_ms
        elif work_ms * self._stretch <= busy_ms:
            self.now_ms = start_ms + work_ms * self._stretch
        else:
            self.now_ms = self.network_free_ms + work_ms - busy_ms / self._stretch
        if self.trace is not None and work_ms > 0:
            self.trace.add(name, "compute", start_ms, self.now_ms - start_ms, category=category, stage=self._stage)

    def communicate(self, duration_ms: float, name: str = "", num_bytes: float = 0.0) -> float:
        """Queue a collective from now on; returns when it ends."""
        start_ms = max(self.network_free_ms, self.now_ms)
        self.network_free_ms = start_ms + duration_ms
        self.communication_ms += duration_ms
        if self.trace is not None and duration_ms > 0:
            self.trace.add(
                name, "communication", start_ms, duration_ms, category="collective", stage=self._stage, bytes=num_bytes
            )
        return self.network_free_ms

    def block(self, duration_ms: float, name: str = "", num_bytes: float = 0.0) -> None:
        """A collective that the next kernel waits for, beside those that overlap (its group has links of its own)."""
        if duration_ms <= 0:
            return
        self.communication_ms += duration_ms
        if self.trace is not None:
            self.trace.add(
                name, "blocking", self.now_ms, duration_ms, category="collective", stage=self._stage, bytes=num_bytes
            )
        self.idle(duration_ms, f"waits for {name}")

    def wait_until(self, end_ms: float, name: str = "waits for communication") -> None:
        """No kernel starts before ``end_ms``."""
        self.idle(max(0.0, end_ms - self.now_ms), name)

    def idle(self, duration_ms: float, name: str) -> None:
        """Time in which no kernel runs."""
        if duration_ms <= 0:
            return
        if self.trace is not None:
            self.trace.add(name, "compute", self.now_ms, duration_ms, category="wait", stage=self._stage)
        self.now_ms += duration_ms

    def repeat(self, duration_ms: float, times: int, communication_ms: float) -> None:
        """``times`` more runs of something that took ``duration_ms`` and communicated ``communication_ms``."""
        if times <= 0:
            return
        if self.trace is not None:
            self.trace.add(
                f"{times} more micro-batches", "compute", self.now_ms, duration_ms * times, category="repeated",
                stage=self._stage,
            )  # fmt: skip
        self.now_ms += duration_ms * times
        self.network_free_ms += duration_ms * times
        self.communication_ms += communication_ms * times
