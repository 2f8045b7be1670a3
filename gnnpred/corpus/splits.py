"""Splits of the corpus by group: which rows are held out together.

A split file maps a group (family, architecture, device or source) to its fold, not rows, so it stays
valid when rows are added; groups that a file does not know yet join the lightest fold when splits are
made again. ``family`` holds out a whole building block, ``architecture`` a variant whose siblings may
be known, ``device`` one GPU at a time, ``source`` one published benchmark at a time; ``random`` leaks
between repeats and siblings and is there for reference only.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gnnpred.corpus.store import MeasurementRow
from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done
from gnnpred.job import Phase

NUM_FOLDS = 5
MIN_ROWS_OF_HELD_OUT_DEVICE = 60
FOLD_SPLITS = ("family", "architecture")
SPLITS = ("family", "architecture", "device", "source", "random")


@dataclass(frozen=True)
class Split:
    """One way to hold out rows: ``fold_by_group`` names the fold of each group."""

    name: str
    fold_by_group: Mapping[str, int]

    @property
    def num_folds(self) -> int:
        return NUM_FOLDS if self.name == "random" else max(self.fold_by_group.values(), default=-1) + 1

    def fold_of(self, row: MeasurementRow) -> int | None:
        """Fold in which ``row`` is held out; None where it never is (a device with too few rows)."""
        if self.name == "random":
            return int(hashlib.sha256(row.row_id.encode()).hexdigest()[:8], 16) % NUM_FOLDS
        group = group_of(self.name, row)
        fold = self.fold_by_group.get(group)
        if fold is None and self.name in FOLD_SPLITS:  # a group newer than the file
            return int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) % NUM_FOLDS
        return fold


def group_of(split_name: str, row: MeasurementRow) -> str:
    """The group of ``row`` that the split keeps together."""
    if split_name == "source":
        return row.source_id.split("-")[0].rstrip("0123456789")
    return str(getattr(row, {"random": "row_id"}.get(split_name, split_name)))


def make_split(name: str, rows: Iterable[MeasurementRow], *, known: Mapping[str, int] | None = None) -> Split:
    """Assign groups to folds of about equal numbers of training rows; assignments in ``known`` are kept.

    Largest groups first, each to the lightest fold; equal counts are ordered by name, so the result
    depends on the rows alone. ``device`` and ``source`` give every group its own fold.
    """
    if name not in SPLITS:
        raise GnnpredError(f"no split is named {name!r}: choose one of {', '.join(SPLITS)}")
    if name == "random":
        return Split(name, {})
    counts: Counter[str] = Counter()
    for row in rows:
        if row.graph_id:
            counts[group_of(name, row)] += bool(row.used_for_training and row.phase is not Phase.INFERENCE)
    ordered = sorted(counts, key=lambda group: (-counts[group], group))
    folds = dict(known or {})
    if name in ("device", "source"):
        if name == "device":
            ordered = [group for group in ordered if counts[group] >= MIN_ROWS_OF_HELD_OUT_DEVICE]
        for group in ordered:
            folds.setdefault(group, max(folds.values(), default=-1) + 1)
        return Split(name, folds)
    loads = [0] * NUM_FOLDS
    for group, fold in folds.items():
        loads[fold] += counts[group]
    for group in ordered:
        if group not in folds:
            # a group without training rows (inference only) still weighs a little, so that they spread
            fold = min(range(NUM_FOLDS), key=lambda f: (loads[f], f))
            folds[group] = fold
            loads[fold] += max(counts[group], 1)
    return Split(name, folds)


def write_splits(folder: str | Path, rows: Iterable[MeasurementRow], *, keep: bool = True) -> dict[str, Split]:
    """Write every split to ``folder``; ``keep`` leaves the groups that a file already names where they are."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    splits = {}
    for name in SPLITS:
        path = folder / f"{name}.json"
        known = load_split(path).fold_by_group if keep and path.is_file() else {}
        split = splits[name] = make_split(name, rows, known=known)
        with replaced_when_done(path) as partial:
            partial.write_text(split_text(split), encoding="utf-8")
    return splits


def split_text(split: Split) -> str:
    """Content of a split file."""
    content = {"split": split.name, "num_folds": split.num_folds, "folds": dict(sorted(split.fold_by_group.items()))}
    return json.dumps(content, indent=1) + "\n"


def for_balance(rows: Iterable[MeasurementRow], multi_gpu_rows: Iterable[MeasurementRow]) -> list[MeasurementRow]:
    """What splits are made of: rows of several GPUs name their groups, but folds are balanced by what trains."""
    return [*rows, *(replace(row, used_for_training=False) for row in multi_gpu_rows)]


def load_split(path: str | Path) -> Split:
    """Read one split file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return Split(content["split"], {str(group): int(fold) for group, fold in content["folds"].items()})
    except OSError as error:
        raise GnnpredError(f"cannot read the split {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GnnpredError(f"{path} is not a split file: {error}") from error
