"""The fork server as the parent sees it: started, asked for workers, closed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_MAX_ANSWER_BYTES = 1 << 12
_START_LIMIT_S = 300.0  # imports from a cold disk, on a busy machine
_FORK_LIMIT_S = 60.0


class ForkError(Exception):
    """The server cannot fork (any more); the message says why."""


class ForkServer:
    """One :mod:`gnnpred.collect.fork_server`, for as long as this object lives. Linux."""

    def __init__(self, sources: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        """Start it; raises ForkError where its imports leave it unfit for forking, which takes seconds to know."""
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("wb") as sink, other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gnnpred.collect.fork_server", str(other.fileno()), *sources],
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, pass_fds=[other.fileno()], env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._channel.settimeout(_START_LIMIT_S)
        try:
            if problem := self._answer()["problem"]:
                raise ForkError(problem)
            self._channel.settimeout(_FORK_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def start(self, answer: Path, log: Path) -> "ForkedProcess":
        """A worker that writes its reply to ``answer``; raises ForkError."""
        stdin_end, stdin = os.pipe()
        status, status_end = os.pipe()
        try:
            with log.open("wb") as sink:
                request = json.dumps({"answer": str(answer)}).encode()
                socket.send_fds(self._channel, [request], [stdin_end, sink.fileno(), status_end])
            found = self._answer()
            if "error" in found:
                raise ForkError(found["error"])
        except OSError as error:
            os.close(stdin)
            os.close(status)
            raise ForkError(str(error)) from error
        except ForkError:
            os.close(stdin)
            os.close(status)
            raise
        finally:
            os.close(stdin_end)
            os.close(status_end)
        return ForkedProcess(found["pid"], stdin, status)

    def close(self) -> None:
        """End the server; workers that still run go on until their input closes."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def _answer(self) -> dict:
        try:
            message = self._channel.recv(_MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise ForkError(f"the fork server does not answer within {self._channel.gettimeout():g} s") from error
        if not message:
            raise ForkError("the fork server ended")
        return json.loads(message)


class ForkedProcess:
    """What :class:`subprocess.Popen` offers of a worker, for one that the server forked."""

    def __init__(self, pid: int, stdin: int, status: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb")
        self.returncode: int | None = None
        self._status = status
        os.set_blocking(status, False)

    def poll(self) -> int | None:
        """Its exit code (minus the signal that ended it), None while it runs."""
        if self.returncode is None:
            try:
                text = os.read(self._status, 16)
            except BlockingIOError:
                return None
            os.close(self._status)
            # without a server no one knows; its workers' input closes with this process at the latest
            self.returncode = int(text) if text else -signal.SIGKILL
        return self.returncode

    def kill(self) -> None:
        """End it alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
