"""A worker for ``gnnpred collect`` that needs no torch: configurations behave as their model's name says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

MANIFEST = {
    "device": os.environ.get("STAND_IN_DEVICE", "cpu"), "gpu": os.environ.get("STAND_IN_GPU", "V100"),
    "num_gpus": int(os.environ.get("STAND_IN_NUM_GPUS", "2")), "num_cpu_threads": 1, "torch": "2.9.0", "python": "3.11",
    "compute_capability": float(os.environ.get("STAND_IN_CAPABILITY", "9.0")), "os": "Linux 6", "cpu": "Stand-in",
    "cuda": "", "cudnn": "", "driver": "",
}  # fmt: skip


def measured(task, go):
    rank = go.get("ranks", {}).get("rank", 0)
    configuration = task["configuration"]
    behaviour = configuration["model"].split(":")[1]
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(f"{configuration['model']} {configuration['batch_size']}\n")
    time.sleep(float(os.environ.get("STAND_IN_BUILD_S", "0")))
    began = time.monotonic()
    while behaviour == "meet":  # another one that works at the same time
        if Path(os.environ["STAND_IN_LOG"]).read_text().count("x:meet") >= 2:
            break
        time.sleep(0.01)
    time.sleep(float(os.environ.get("STAND_IN_DELAY_S", "0")))
    if "STAND_IN_BUSY" in os.environ:  # when the device was busy
        with open(os.environ["STAND_IN_BUSY"], "a") as busy:
            busy.write(f"{began} {time.monotonic()} {go.get('gpus', '-')} {configuration['gpus']} {rank}\n")
    if behaviour.endswith("-in-rank-1"):
        if rank == 0:
            return {"status": "error", "reason": "RuntimeError: connection closed by peer", "result": {}}
        behaviour = behaviour.removesuffix("-in-rank-1")
        time.sleep(0.2)
    if behaviour == "hang":
        time.sleep(60)
    if behaviour == "crash":
        print("something broke badly", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "full" and "STAND_IN_FULL" in os.environ:
        print("OSError: [Errno 28] No space left on device", file=sys.stderr, flush=True)
        sys.exit(1)
    if behaviour == "exit":
        sys.exit(7)
    if behaviour in ("oom", "nan", "error"):
        return {"status": behaviour, "reason": f"it is {behaviour}", "result": {}}
    if behaviour == "lost":
        return {"status": "error", "reason": "it is lost", "result": {}, "lost_device": True}
    ms = 10.0 * configuration["batch_size"]
    result = {
        "step_time_ms": ms, "step_time_slowest_ms": ms, "step_p10_ms": ms, "step_p90_ms": ms, "wall_clock_ms": ms,
        "spread_pct": 0.0, "num_steps": 5, "num_warmup_steps": 3, "warning": "", "peak_memory_mib": 1.0,
        "input": "3x8x8", "loss": 1.0, "build_s": 0.0, "clock": "wall clock", "allow_tf32": False,
        "cudnn_benchmark": True, "manifest": MANIFEST,
    }  # fmt: skip
    return {"status": "ok", "reason": "", "result": result}


def main():
    task = json.loads(sys.stdin.readline())
    import_s = float(os.environ.get("STAND_IN_IMPORT_S", "0"))
    time.sleep(import_s)
    go = json.loads(sys.stdin.readline())
    if task["task"] == "probe":
        reply = {"status": "ok", "reason": "", "result": {"manifest": MANIFEST, "cpu_device": None}}
    elif task["task"] == "export":
        time.sleep(float(os.environ.get("STAND_IN_EXPORT_S", "0")))
        Path(task["out"]).write_text(f"graph of {task['model']}")
        reply = {"status": "ok", "reason": "", "result": {}}
    else:
        reply = measured(task, go)
    Path(sys.argv[1]).write_text(json.dumps({**reply, "prepare_s": import_s}))


main()
