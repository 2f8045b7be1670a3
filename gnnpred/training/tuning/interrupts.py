"""Ctrl-C, and the signal that ends a worker, at moments that must not be cut in two."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class InterruptDelay:
    """A context in which the first interrupt waits: until :meth:`end`, or until the context is left.

    It is then handled as it would have been. A second one is not held back, so that what hangs can be ended.
    :meth:`begin` delays again.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> "InterruptDelay":
        self.begin()
        return self

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):  # neither ignored nor the system's own end
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is None:
            self._waiting = number, frame
        else:
            self._handlers[number](number, frame)

    def end(self) -> None:
        """Handle what came meanwhile, and from now on what comes."""
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        waiting, self._waiting = self._waiting, None
        if waiting:
            handlers[waiting[0]](*waiting)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """A process started meanwhile ignores Ctrl-C from its first moment on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
