"""What a second worker gains: trials per hour of one study with one and with two workers. Needs the train extra.

    python benchmarks/tune_workers.py [--trials 24] [--epochs 30] [--storage sqlite|journal] [--check]

Every worker needs a core of its own: on a machine that does anything else the ratio says how busy that is, which the
CPU time per trial beside it shows. The recipe is `smoke` with more epochs; all trials cost alike (what is searched
changes no cost, and nothing is pruned). Counted from when every worker has ended its first trial, as the study has it:
importing, encoding and the boosted trees, which a study of hours does once per worker, are left out.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

ROOT = Path(__file__).resolve().parent.parent
TARGET = 1.7
SPACE = """
[study]
test_fold = 2
seed = 0
startup_trials = {startup_trials}
stages = [{{ rows = 1.0, epochs = 1.0 }}]

[parameters]
"train.learning_rate" = {{ kind = "float", low = 1e-3, high = 1e-2, log = true }}
"tree_weight" = {{ kind = "float", low = 0.0, high = 0.8 }}
"""


@dataclass(frozen=True)
class Run:
    """One study."""

    num_workers: int
    num_trials: int
    num_counted: int  # ended after every worker's first
    wall_s: float  # in which they ended
    cpu_s: float  # of the command and its workers, with their start

    @property
    def trials_per_hour(self) -> float:
        return self.num_counted / self.wall_s * 3600


def run_study(num_workers: int, num_trials: int, epochs: int, kind: str, datasets: Path, folder: Path) -> Run:
    recipe, space = folder / "recipe.toml", folder / "space.toml"
    text = (ROOT / "trainers" / "smoke.toml").read_text(encoding="utf-8")
    if "\nepochs = 2\n" not in text:
        raise SystemExit("trainers/smoke.toml no longer has epochs = 2")
    recipe.write_text(text.replace("\nepochs = 2\n", f"\nepochs = {epochs}\n"), encoding="utf-8")
    space.write_text(SPACE.format(startup_trials=num_trials), encoding="utf-8")
    file = folder / f"{num_workers}.{kind}"
    storage = f"journal:{file}" if kind == "journal" else f"sqlite:///{file}"
    command = [
        sys.executable, str(ROOT / "cli.py"), "tune", "--recipe", str(recipe), "--space", str(space), "--trials",
        str(num_trials), "--workers", str(num_workers), "--storage", storage, "--study", "s", "--datasets",
        str(datasets), "--work", str(folder / "work"), "--out", str(folder / "out"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"gnnpred tune failed with exit code {process.returncode}")
    opened = JournalStorage(JournalFileBackend(str(file))) if kind == "journal" else storage
    trials = [trial for trial in optuna.load_study(study_name="s", storage=opened).trials if trial.datetime_complete]
    firsts: dict[str, datetime] = {}
    for ended, worker in sorted((trial.datetime_complete, trial.user_attrs.get("worker", "")) for trial in trials):
        firsts.setdefault(worker, ended)
    begun, last = max(firsts.values()), max(trial.datetime_complete for trial in trials)
    counted = sum(trial.datetime_complete > begun for trial in trials)
    if len(firsts) < num_workers or not counted:
        raise SystemExit(f"{len(trials)} trials are too few for {num_workers} workers: raise --trials or --epochs")
    return Run(
        num_workers, len(trials), counted, (last - begun).total_seconds(), usage.ru_utime + usage.ru_stime
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--storage", choices=("sqlite", "journal"), default="sqlite")
    parser.add_argument("--datasets", type=Path, default=ROOT / "datasets")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 where two workers gain less than {TARGET}")
    arguments = parser.parse_args()
    runs = []
    for num_workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(
                run_study(
                    num_workers, arguments.trials, arguments.epochs, arguments.storage, arguments.datasets, Path(folder)
                )
            )
    print(f"{'workers':>7}  {'counted':>7}  {'wall s':>8}  {'trials/h':>8}  {'CPU s/trial':>11}")
    for run in runs:
        print(
            f"{run.num_workers:>7}  {run.num_counted:>7}  {run.wall_s:>8.1f}  {run.trials_per_hour:>8.0f}  "
            f"{run.cpu_s / run.num_trials:>11.2f}"
        )
    ratio = runs[1].trials_per_hour / runs[0].trials_per_hour
    load = os.getloadavg()[0]
    print(f"two workers against one: {ratio:.2f} (target {TARGET}); {os.cpu_count()} cores, load {load:.1f} at the end")
    if arguments.check and ratio < TARGET:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
