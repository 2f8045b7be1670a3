"""Ranks for recipes of collectives that need no torch: calls behave as their number of bytes says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

MANIFEST = {
    "device": "cpu", "torch": "2.9.0", "os": "Linux 6", "cpu": "Stand-in", "cuda": "", "cudnn": "", "driver": "",
    "compute_capability": None, "gpu": "Stand-in", "num_gpus": 2, "interconnect": "",
    "network": "", "backend": "gloo", "nccl": "",
    **json.loads(os.environ.get("STAND_IN_MANIFEST", "{}")),
}  # fmt: skip
RESULT = {
    "time_us": 100.0, "time_p10_us": 90.0, "time_p90_us": 110.0, "wall_clock_us": 100.0, "algbw_gb_s": 1.0,
    "busbw_gb_s": 1.0, "num_calls": 5, "num_warmup_calls": 5, "warning": "",
}  # fmt: skip


def time_calls(task, rank):
    def write(content):
        if rank == 0:
            with open(task["lines"], "a") as lines:
                lines.write(json.dumps(content) + "\n")

    write({"manifest": MANIFEST})
    for call in task["calls"]:
        time.sleep(float(os.environ.get("STAND_IN_DELAY_S", "0")))
        if call["num_bytes"] == 3:
            time.sleep(60)
        if call["num_bytes"] == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if call["num_bytes"] == 5:
            time.sleep(60)
        result = {**RESULT, "num_bytes": call["num_bytes"]}
        write({"status": "ok", "reason": "", "result": result})


def main():
    task = json.loads(sys.stdin.readline())
    go = json.loads(sys.stdin.readline())
    reply = {"status": "ok", "reason": "", "result": {}}
    if task["task"] == "probe":
        reply["result"] = {"manifest": MANIFEST, "cpu_device": None}
    elif "STAND_IN_START" in os.environ:
        reply |= {"status": "error", "reason": os.environ["STAND_IN_START"]}
    else:
        time_calls(task, go["ranks"]["rank"])
    Path(sys.argv[1]).write_text(json.dumps(reply))


main()
