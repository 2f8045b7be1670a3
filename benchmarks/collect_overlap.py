"""What collect costs beside measuring: overhead per configuration, and how long a GPU waits in a sweep.

    python benchmarks/collect_overlap.py [--configurations 40] [--check]

Overhead: real workers on this machine's CPU, from the start of a worker until it is ready for its device, forked from a
process that has the libraries and as a fresh Python. Waiting: a sweep with stand-in workers that sleep where a real one
imports, touches the GPU for the first time and builds its model, and measures, so that no GPU and no cores are needed;
their times are arguments. Needs the models extra for the first part.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from gnnpred.collect.local_engine import LocalEngine  # noqa: E402
from gnnpred.collect.recipe import Configuration, MeasureSettings, Recipe  # noqa: E402
from gnnpred.collect.runner import collect  # noqa: E402
from gnnpred.collect.workers import POLL_S, WORKER_COMMAND, Workers  # noqa: E402

STAND_IN = (sys.executable, str(ROOT / "tests" / "helpers" / "stand_in_worker.py"))
MODEL = "torchvision:resnet18"
MOST_OVERHEAD_S = 6.0
MOST_IDLE = 0.35


def overhead_s(*, is_forked: bool, repeats: int, scratch: Path) -> tuple[float, float]:
    """Median seconds until a worker is ready, and of that what it spent on imports and a build without weights."""
    workers = Workers(WORKER_COMMAND, scratch, forked=["torchvision"] if is_forked else None)
    task = {
        "task": "measure",
        "configuration": asdict(Configuration(model=MODEL, batch_size=1, image_size=32)),
        "settings": asdict(MeasureSettings(steps=1, min_warmup_steps=1, max_warmup_steps=1, profile_share=0.0)),
        "device": "cpu",
    }
    ready_s, prepare_s = [], []
    try:
        if is_forked:
            workers.run(task, limit_s=600)  # the server's own imports count once for a sweep
        for _ in range(repeats):
            before = time.monotonic()
            worker = workers.start(task)
            started_s = time.monotonic() - before
            worker.release(limit_s=600)
            while (reply := worker.poll()) is None:
                time.sleep(POLL_S)
            prepare_s.append(reply["prepare_s"])
            ready_s.append(started_s + reply["prepare_s"])
    finally:
        workers.end_all()
    return statistics.median(ready_s), statistics.median(prepare_s)


def idle_share(out: Path, *, num_configurations: int, ahead: int | None, times_s: dict[str, float]) -> float:
    """Share of the sweep, from the first to the last measurement, in which the one GPU did not measure."""
    busy, log = out / "busy", out / "log"
    out.mkdir()
    os.environ |= {"STAND_IN_DEVICE": "cuda", "STAND_IN_NUM_GPUS": "1", "STAND_IN_BUSY": str(busy)}
    os.environ |= {"STAND_IN_LOG": str(log), **{f"STAND_IN_{name}_S": str(value) for name, value in times_s.items()}}
    recipe = Recipe(
        name="stand-in",
        configurations=tuple(Configuration(model="x:good", batch_size=1 + i) for i in range(num_configurations)),
    )
    make_engine = partial(LocalEngine, overlaps=ahead != 0, max_ahead=ahead or None)
    collect(recipe, out / "runs", make_engine=make_engine, worker_command=STAND_IN)
    spans = sorted(tuple(map(float, line.split()[:2])) for line in busy.read_text().splitlines())
    return 1 - sum(end - begin for begin, end in spans) / (spans[-1][1] - spans[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--import-s", type=float, default=8.0, help="imports of a fresh worker")
    parser.add_argument("--forked-s", type=float, default=0.5, help="what a forked worker prepares")
    parser.add_argument("--build-s", type=float, default=0.7, help="first use of the GPU and building the model")
    parser.add_argument("--busy-s", type=float, default=2.0, help="warm-up and timed steps")
    parser.add_argument("--cores", type=int, default=16, help="of the GPU node; two are left to who measures")
    parser.add_argument("--only-waiting", action="store_true", help="leave the real workers out")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    options = parser.parse_args()
    is_met = True
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if not options.only_waiting:
            for name, is_forked in (("forked worker", True), ("fresh worker", False)):
                ready_s, prepare_s = overhead_s(is_forked=is_forked, repeats=options.repeats, scratch=scratch)
                print(f"{name}: ready after {ready_s:.2f} s ({prepare_s:.2f} s of them imports; {MODEL})", flush=True)
                is_met &= not is_forked or ready_s <= MOST_OVERHEAD_S
        ahead = options.cores - 2
        for name, num_ahead, import_s in (
            ("fresh workers, one after the other", 0, options.import_s),
            ("fresh workers, one ahead", 1, options.import_s),
            ("fresh workers, by measured times", ahead, options.import_s),
            ("forked workers, by measured times", ahead, options.forked_s),
        ):
            share = idle_share(
                scratch / name.replace(" ", "-"),
                num_configurations=options.configurations if num_ahead > 1 else max(3, options.configurations // 8),
                ahead=num_ahead,
                times_s={"IMPORT": import_s, "BUILD": options.build_s, "DELAY": options.busy_s},
            )
            print(f"{name}: the GPU waits {share:.0%} of the sweep", flush=True)
            is_met &= num_ahead <= 1 or share < MOST_IDLE
    if options.check and not is_met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
