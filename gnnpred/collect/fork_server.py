"""A process that has imported the libraries and forks a worker for every task.

``python -m gnnpred.collect.fork_server FD SOURCE...``, with models whose code it imports, or the libraries' prefixes.

Importing torch and a model library takes seconds of a core, forking milliseconds, and the workers share the libraries'
memory. Every worker is still a process of its own: its crash ends itself alone. CUDA does not survive a fork, nor do
threads: after its imports the server looks whether a library started a thread that a fork would lose or touched the
driver, and says so instead of serving.

It listens on the socket FD (SOCK_SEQPACKET). Its first message is ``{"problem": ""}``, or why it cannot serve. Each
request names the file for the reply and carries three file descriptors: the worker's standard input, its log, and a
pipe to which the worker's exit status goes (decimal, as of ``os.waitstatus_to_exitcode``). The answer is
``{"pid": ...}``; the worker leads a process group of its own. The server ends when the socket closes.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from gnnpred.collect import worker

_CUDA_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED (CUDA driver API, enum CUresult)
_MAX_REQUEST_BYTES = 1 << 16
_THREADS_END_S = 1.0  # joined threads are listed a moment longer


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    sources = sys.argv[2:]
    worker.import_libraries(sources)
    for source in sources:
        worker.build_once(source)
    problem = fork_problem()
    channel.send(json.dumps({"problem": problem}).encode())
    if problem:
        return
    gc.collect()
    gc.freeze()  # the collector of a worker does not touch, and so copy, what it shares
    serve(channel)


def fork_problem() -> str:
    """Why this process must not fork workers now; "" where it may."""
    if _num_threads() > 1:
        _fork_once()
        ends = time.monotonic() + _THREADS_END_S
        while (num_threads := _num_threads()) > 1:
            if time.monotonic() >= ends:
                return f"the imports started {num_threads - 1} threads"
            time.sleep(0.01)
    return "the imports touched the GPU's driver" if _driver_is_touched() else ""


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _fork_once() -> None:
    """OpenBLAS (numpy, scipy) starts a thread per core when it is loaded, ends them before every fork and starts them
    again when it next computes: threads that are there after a fork are those of others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _driver_is_touched() -> bool:
    """Whether this process initialised CUDA; asking does not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_NOT_INITIALIZED


def serve(channel: socket.socket) -> None:
    """Fork until the socket closes; tell of every end."""
    status_by_pid: dict[int, int] = {}  # worker -> pipe for its exit status
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # with a handler, the end of a worker wakes select
    while True:
        readable, _, _ = select.select([channel, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        _report_ends(status_by_pid)
        if channel not in readable:
            continue
        request, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 3)
        if not request:
            return
        stdin, log, status = descriptors
        try:
            pid = os.fork()
        except OSError as error:  # no memory, too many processes
            channel.send(json.dumps({"error": str(error)}).encode())
        else:
            if pid == 0:
                inherited = [channel.detach(), woken, wake, status, *status_by_pid.values()]
                _become_worker(json.loads(request)["answer"], stdin, log, inherited)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # the worker does it too: whoever comes first
            status_by_pid[pid] = os.dup(status)
            channel.send(json.dumps({"pid": pid}).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _report_ends(status_by_pid: dict[int, int]) -> None:
    while status_by_pid:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        status = status_by_pid.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # no one waits for it any more
            os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
        os.close(status)


def _become_worker(answer: str, stdin: int, log: int, inherited: list[int]) -> NoReturn:
    """In the forked process: take its own input and output, leave the server's, work, end."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        for descriptor in (*inherited, stdin, log):
            os.close(descriptor)
        worker.main(answer)
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:  # as the interpreter does at the end of a program
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
