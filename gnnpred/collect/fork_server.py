"""A process that has imported the libraries and forks a worker for every task.

``python -m gnnpred.collect.fork_server FD PREFIX...``, with the prefixes of models.

Importing torch and a model library takes seconds of a core, forking milliseconds, and the workers share the libraries'
memory. Every worker is still a process of its own: its crash ends itself alone. CUDA does not survive a fork, nor do
threads: after its imports the server looks whether a library started a thread or touched the driver, and says so
instead of serving.

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
import traceback
from pathlib import Path
from typing import NoReturn

from gnnpred.collect import worker

_CUDA_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED (CUDA driver API, enum CUresult)
_MAX_REQUEST_BYTES = 1 << 16


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    worker.import_libraries(sys.argv[2:])
    problem = fork_problem()
    channel.send(json.dumps({"problem": problem}).encode())
    if problem:
        return
    gc.collect()
    gc.freeze()  # the collector of a worker does not touch, and so copy, what it shares
    serve(channel)


def fork_problem() -> str:
    """Why this process must not fork workers now; "" where it may."""
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads > 1:
        return f"the imports started {num_threads - 1} threads"
    return "the imports touched the GPU's driver" if _driver_is_touched() else ""


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
