"""Worker processes as ``gnnpred collect`` sees them: started, released, waited for, ended."""

import contextlib
import errno
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnnpred.collect.engine import BudgetSpentError
from gnnpred.collect.forking import ForkedProcess, ForkError, ForkServer
from gnnpred.collect.worker import EXIT_DISK_FULL
from gnnpred.errors import GnnpredError

WORKER_COMMAND = (sys.executable, "-m", "gnnpred.collect.worker")
POLL_S = 0.02
_END_LIMIT_S = 60.0
_log = logging.getLogger(__name__)


class Worker:
    """A process that imports what its task needs, waits for :meth:`release`, does the task and ends."""

    def __init__(
        self, process: "subprocess.Popen[bytes] | ForkedProcess", task: dict[str, Any], answer: Path, log: Path
    ) -> None:
        self.task = task
        self._process = process
        self._answer = answer
        self._log = log
        self._ends: float | None = None
        self._limit_s = 0.0
        self._is_over = False

    def release(self, *, limit_s: float, go: dict[str, Any] | None = None) -> None:
        """Let it do its task, in ``limit_s`` from now; ``go`` says where (:mod:`gnnpred.collect.worker`)."""
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s
        self._send(json.dumps(go or {}).encode() + b"\n")

    def poll(self) -> dict[str, Any] | None:
        """Its reply, a status and reason in its place where there is none, or None while it works."""
        assert self._ends is not None, "release first"
        code = self._process.poll()
        if code is None and time.monotonic() < self._ends:
            return None
        try:
            if code is None:
                return {"status": "timeout", "reason": f"not done after {self._limit_s:g} s", "result": {}}
            try:
                return json.loads(self._answer.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return {"status": "crash", "reason": _crash_reason(code, self._log), "result": {}}
        finally:
            self.end()

    def wait(self, *, deadline: float | None) -> dict[str, Any]:
        """The reply that :meth:`poll` gives in the end; raises BudgetSpentError at ``deadline`` (monotonic seconds)."""
        while (reply := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                self.end()
                raise BudgetSpentError
            time.sleep(POLL_S)
        return reply

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """End it and what it started (compilers); the second time does nothing."""
        if self._is_over:  # the system may have given its number to others
            return
        self._is_over = True
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        ends = time.monotonic() + _END_LIMIT_S
        while not self.has_ended:
            if time.monotonic() >= ends:  # in the driver of a GPU that hangs: no signal reaches it there
                _log.warning("process %d was killed and has not ended for %g s", self._process.pid, _END_LIMIT_S)
                break
            time.sleep(POLL_S / 2)
        self._answer.unlink(missing_ok=True)
        self._log.unlink(missing_ok=True)

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it crashed already: its exit code tells
            self._process.stdin.write(line)
            self._process.stdin.flush()


class Workers:
    """Starts workers; ``scratch`` holds their replies.

    With ``forked`` (models, or libraries' prefixes: their code is imported once) a fork server starts them where the
    system and the libraries allow it. Otherwise, and for every other ``command``, each is a fresh Python that imports
    for itself.
    """

    def __init__(self, command: Sequence[str], scratch: Path, *, forked: Sequence[str] | None = None) -> None:
        self._command = tuple(command)
        self._scratch = scratch
        self._numbers = itertools.count()
        self._started: list[Worker] = []
        self._forked = forked if sys.platform == "linux" and self._command == WORKER_COMMAND else None
        self._server: ForkServer | None = None

    def start(self, task: dict[str, Any]) -> Worker:
        """A worker that prepares for ``task`` and waits for its release."""
        answer, log = self.new_path("json"), self.new_path("log")
        process = self._forked_process(answer, log) or self._fresh_process(answer, log)
        worker = Worker(process, task, answer, log)
        self._started = [other for other in self._started if not other.has_ended] + [worker]
        worker._send(json.dumps(task).encode() + b"\n")
        return worker

    def _forked_process(self, answer: Path, log: Path) -> ForkedProcess | None:
        """One from the fork server, which starts with the first; None where there is none."""
        if self._forked is None:
            return None
        try:
            if self._server is None:
                self._server = ForkServer(
                    self._forked, environment=_worker_environment(), log=self.new_path("server-log")
                )
            return self._server.start(answer, log)
        except (ForkError, OSError) as error:
            _log.warning("every worker imports for itself from now on: %s", error)
            self._forked = None
            return None

    def _fresh_process(self, answer: Path, log: Path) -> "subprocess.Popen[bytes]":
        try:
            with log.open("wb") as sink:
                return subprocess.Popen(
                    [*self._command, str(answer)], stdin=subprocess.PIPE, stdout=sink, stderr=sink,
                    env=_worker_environment(),
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends the worker in its own way
                )  # fmt: skip
        except OSError as error:
            raise GnnpredError(f"cannot start a worker process: {error}") from error

    def new_path(self, suffix: str) -> Path:
        """A file of the scratch folder that no one else has."""
        return self._scratch / f"{next(self._numbers)}.{suffix}"

    def run(self, task: dict[str, Any], *, limit_s: float, deadline: float | None = None) -> dict[str, Any]:
        """Start, release, wait; raises BudgetSpentError at ``deadline``."""
        worker = self.start(task)
        worker.release(limit_s=limit_s)
        return worker.wait(deadline=deadline)

    def end_all(self) -> None:
        """End every worker that is still there, and the fork server."""
        for worker in self._started:
            worker.end()
        if self._server is not None:
            self._server.close()
            self._server = None


def require_space(reply: dict[str, Any]) -> None:
    """Raises GnnpredError where a worker met a full disk: that says nothing of its task, which is done again later."""
    if os.strerror(errno.ENOSPC) in reply["reason"]:
        raise GnnpredError(
            f"the disk is full ({reply['reason']}); all earlier rows are kept: free space, in {tempfile.gettempdir()} "
            "too, and run the same command again"
        )


def _worker_environment() -> dict[str, str]:
    """This process's environment; the package is found where it was imported from."""
    root = str(Path(__file__).parent.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        # a library that asks torch for GPUs at its import would initialise CUDA, which then neither survives a fork nor
        # looks at a CUDA_VISIBLE_DEVICES that comes later; torch asks NVML with this
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _crash_reason(code: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    if code == EXIT_DISK_FULL:  # its log may lie on the full disk too
        return f"{os.strerror(errno.ENOSPC)} for a worker's reply"
    if code >= 0:
        return f"the worker ended with exit code {code}{last}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}{last}"
