"""A worker for ``gnnpred collect`` that needs no torch: configurations behave as their model's name says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

MANIFEST = {
    "device": "cpu", "torch": "2.9.0", "python": "3.11", "os": "Linux 6", "cpu": "Stand-in", "num_cpu_threads": 1,
    "cuda": "", "cudnn": "", "driver": "", "compute_capability": None, "gpu": os.environ.get("STAND_IN_GPU", "V100"),
}  # fmt: skip


def measured(task):
    configuration = task["configuration"]
    behaviour = configuration["model"].split(":")[1]
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(f"{configuration['model']} {configuration['batch_size']}\n")
    began = time.monotonic()
    time.sleep(float(os.environ.get("STAND_IN_DELAY_S", "0")))
    if "STAND_IN_BUSY" in os.environ:  # when the device was busy
        with open(os.environ["STAND_IN_BUSY"], "a") as busy:
            busy.write(f"{began} {time.monotonic()}\n")
    if behaviour == "hang":
        time.sleep(60)
    if behaviour == "crash":
        print("something broke badly", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "exit":
        sys.exit(7)
    if behaviour in ("oom", "nan", "error"):
        return {"status": behaviour, "reason": f"it is {behaviour}", "result": {}}
    ms = 10.0 * configuration["batch_size"]
    result = {
        "step_time_ms": ms, "step_p10_ms": ms, "step_p90_ms": ms, "wall_clock_ms": ms, "spread_pct": 0.0,
        "num_steps": 5, "num_warmup_steps": 3, "warning": "", "peak_memory_mib": 1.0, "input": "3x8x8", "loss": 1.0,
        "build_s": 0.0, "clock": "wall clock", "allow_tf32": False, "cudnn_benchmark": True, "manifest": MANIFEST,
    }  # fmt: skip
    return {"status": "ok", "reason": "", "result": result}


def main():
    task = json.loads(sys.stdin.readline())
    time.sleep(float(os.environ.get("STAND_IN_IMPORT_S", "0")))
    assert sys.stdin.readline() == "go\n"
    if task["task"] == "probe":
        reply = {"status": "ok", "reason": "", "result": {"manifest": MANIFEST, "cpu_device": None}}
    elif task["task"] == "export":
        time.sleep(float(os.environ.get("STAND_IN_EXPORT_S", "0")))
        Path(task["out"]).write_text(f"graph of {task['model']}")
        reply = {"status": "ok", "reason": "", "result": {}}
    else:
        reply = measured(task)
    Path(sys.argv[1]).write_text(json.dumps(reply))


main()
