"""A process that does one task for ``gnnpred collect`` and ends: ``python -m gnnpred.collect.worker REPLY``.

The first line of standard input is the task as JSON. The process imports what it needs and waits for a second line,
``{"gpus": CUDA_VISIBLE_DEVICES, "ranks": ...}``, that says where: both may be missing, ``ranks`` are arguments of
:class:`gnnpred.collect.ranks.Ranks`. Then it does the task and writes the answer to the file REPLY. Standard input
stays open as long as the parent lives: when it closes, the parent was killed, and this process ends at once, so that it
cannot disturb what a next ``collect`` measures.
"""

import contextlib
import errno
import importlib.util
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnnpred.errors import GnnpredError

EXIT_DISK_FULL = 4  # no room for the reply
_PARENT_GONE = 3
_LIBRARIES = {"timm": "timm", "torchvision": "torchvision.models", "hf": "transformers"}


def main(reply_file: str) -> None:
    started = time.monotonic()
    task = json.loads(sys.stdin.readline())
    released: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(released,), daemon=True).start()
    prepare(task)
    prepare_s = time.monotonic() - started
    go = json.loads(released.get())
    if "gpus" in go:  # CUDA looks at it when a process first uses a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = go["gpus"]
    reply = {**run_task(task, go.get("ranks")), "prepare_s": prepare_s}
    try:
        Path(reply_file).write_text(json.dumps(reply), encoding="utf-8")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os._exit(EXIT_DISK_FULL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' clean-up may take seconds or crash; everything is written


def _listen(released: "queue.Queue[str]") -> None:
    if line := sys.stdin.readline():
        released.put(line)
        sys.stdin.read()
    os._exit(_PARENT_GONE)


def prepare(task: dict[str, Any]) -> None:
    """Import what the task needs, which takes seconds; the device is not touched."""
    if task["task"] != "measure":
        import_libraries([])
        return
    configuration = task["configuration"]
    import_libraries([configuration["model"]])
    if task["device"] != "cpu":  # there nothing is gained: no one measures meanwhile
        build_once(configuration["model"], image_size=configuration["image_size"], seq_len=configuration["seq_len"])


def import_libraries(sources: Sequence[str]) -> None:
    """Import torch and the libraries that models of these sources come from; the task itself says what is missing."""
    import gnnpred.collect.measure
    import gnnpred.collect.probe
    import gnnpred.model_sources

    prefixes = dict.fromkeys(source.split(":")[0] for source in sources)
    names = [_LIBRARIES[prefix] for prefix in prefixes if prefix in _LIBRARIES]
    if names and importlib.util.find_spec("torch"):
        gnnpred.model_sources.declare_torchvision_ops()
    for name in ("torch", *names):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def build_once(source: str, *, image_size: int | None = None, seq_len: int | None = None) -> None:
    """Build a library's model without weights and forget it: its own modules are imported at their first use."""
    from gnnpred.model_sources import build_model

    prefix, _, name = source.partition(":")
    if name and prefix in _LIBRARIES:  # a user's own function may do anything
        with contextlib.suppress(Exception):  # the task itself says what is wrong
            build_model(source, batch_size=1, image_size=image_size, seq_len=seq_len)


def run_task(task: dict[str, Any], ranks: dict[str, Any] | None = None) -> dict[str, Any]:
    """``{"status", "reason", "result"}`` of a task; only what no one expects is raised."""
    kind = task["task"]
    try:
        if kind == "probe":
            return _ok(_probe(task["device"], task["models"]))
        if kind == "measure":
            return _measured(task, ranks)
        if kind == "collectives":
            from gnnpred.collect.collective_ranks import time_collectives

            return _ok(time_collectives(task, ranks))
        assert kind == "export", kind
        return _ok(_exported(task))
    except GnnpredError as error:
        return {"status": "error", "reason": str(error), "result": {}, "exit_code": error.exit_code}


def _ok(result: dict[str, Any]) -> dict[str, Any]:
    return {"status": "ok", "reason": "", "result": result}


def _probe(device: str | None, models: list[str]) -> dict[str, Any]:
    from gnnpred.collect.probe import measured_cpu, probe
    from gnnpred.model_sources import check_source

    for model in models:
        check_source(model)
    manifest = probe(device)
    return {"manifest": manifest, "cpu_device": measured_cpu() if manifest["device"] == "cpu" else None}


def _measured(task: dict[str, Any], ranks: dict[str, Any] | None) -> dict[str, Any]:
    from gnnpred.collect.engine import Task
    from gnnpred.collect.measure import measure
    from gnnpred.collect.memory_limit import is_out_of_memory
    from gnnpred.collect.probe import probe
    from gnnpred.collect.ranks import Ranks

    wanted = Task.of_message(task)
    started = time.monotonic()
    if wanted.device == "cuda" and (reason := _unusable_gpu((ranks or {}).get("local_rank", 0))):
        return {"status": "error", "reason": reason, "result": {}, "lost_device": True}
    context_s = time.monotonic() - started if wanted.device == "cuda" else None
    try:
        result = measure(
            wanted.configuration,
            wanted.settings,
            device=wanted.device,
            ranks=Ranks(wanted.device, **ranks) if ranks else None,
        )
    except GnnpredError as error:
        status = "oom" if is_out_of_memory(error) else "error"
        return {"status": status, "reason": str(error), "result": {}}
    except Exception as error:  # a model may raise anything; its row says what
        status = "oom" if is_out_of_memory(error) else "error"
        lines = str(error).strip().splitlines() or [""]
        return {"status": status, "reason": f"{type(error).__name__}: {lines[0][:300]}", "result": {}}
    reply = _ok({**result, "context_s": context_s, "manifest": probe(task["device"])})
    if isinstance(result["loss"], str):
        reply |= {"status": "nan", "reason": f"the loss is {result['loss']}"}
    return reply


def _unusable_gpu(index: int) -> str:
    """Why nothing can be run on the GPU, whatever the configuration; "" where it answers."""
    import torch

    try:
        torch.empty(1, device=f"cuda:{index}")
        torch.cuda.synchronize(index)
    except Exception as error:  # torch raises RuntimeError, AssertionError and its own kinds
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return ""


def _exported(task: dict[str, Any]) -> dict[str, Any]:
    from gnnpred.export import export_model

    summary = export_model(task["model"], Path(task["out"]), image_size=task["image_size"], seq_len=task["seq_len"])
    return {"notes": list(summary.notes)}


if __name__ == "__main__":
    main(sys.argv[1])
