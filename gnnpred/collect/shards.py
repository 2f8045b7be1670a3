"""Parts of a recipe that run apart, as in a Slurm array: each in a folder of its own, taken into one store later.

A shard's folder is a whole collection (rows, tables, graphs): no two machines ever write to one SQLite file, which
shared file systems do not bear.
"""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnnpred.collect.recipe import Recipe
from gnnpred.collect.report import FolderReport
from gnnpred.collect.store import STORE_FILE, CollectionStore, InUseError, StoredRow
from gnnpred.collect.table import DEVICE_FILE, write_tables
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import replaced_when_done

SHARDS_FOLDER = "shards"
_MAX_SHARDS = 10_000


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The ``index``-th of ``count`` parts of a recipe, counted from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """``3/8``; raises UsageError."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
        if match is None:
            raise UsageError(f"--shard {text!r}: write I/N, as in 3/8 for the third of eight parts")
        index, count = int(match[1]), int(match[2])
        if not 1 <= count <= _MAX_SHARDS:
            raise UsageError(f"--shard {text!r}: the number of parts must be from 1 to {_MAX_SHARDS:,}")
        if not 1 <= index <= count:
            raise UsageError(
                f"--shard {text!r}: parts count from 1, so this must be from 1/{count} to {count}/{count} "
                f"(Slurm: --array=1-{count})"
            )
        return cls(index=index, count=count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def part_of(self, recipe: Recipe) -> Recipe:
        """Every ``count``-th configuration, so that long and short ones spread; raises UsageError where none is left.

        The part keeps the recipe's identity.
        """
        configurations = recipe.configurations[self.index - 1 :: self.count]
        if not configurations:
            raise UsageError(
                f"--shard {self}: the recipe has {len(recipe.configurations)} configurations, none for this part"
            )
        return replace(recipe, configurations=configurations, whole_id=recipe.recipe_id)

    def folder(self, out: Path) -> Path:
        """Where this part is collected."""
        return out / SHARDS_FOLDER / f"{self.index}-of-{self.count}"


def shard_folders(out: Path) -> list[Path]:
    """Folders of the shards that lie in ``out``, by number of parts, then in their order."""
    found = []
    for path in out.glob(f"{SHARDS_FOLDER}/*-of-*/{STORE_FILE}"):
        match = re.fullmatch(r"(\d+)-of-(\d+)", path.parent.name)
        if match is not None:
            found.append(((int(match[2]), int(match[1])), path.parent))
    return [folder for _, folder in sorted(found)]


@dataclass(frozen=True, kw_only=True)
class MergeReport(FolderReport):
    """What taking shards in did, and what the folder holds now; ``device`` is "" while nothing was measured."""

    num_shards: int
    num_added: int  # rows that this call took in
    at_work: tuple[str, ...]  # shards that are still being collected: not taken in

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        added = {"num_shards": self.num_shards, "num_added": self.num_added, "at_work": list(self.at_work)}
        return {**super().as_dict(), **added}


def merge_shards(recipe: Recipe, out: Path, *, may_be_at_work: bool) -> MergeReport:
    """Take the rows and graphs of all shards in ``out`` into its own store and write its tables.

    Rows that are there stay; merging again changes nothing. A shard that is still being collected is left out where
    it ``may_be_at_work``. Raises UsageError where shards hold another recipe's rows or rows of several devices,
    GnnpredError where a folder is in use.
    """
    folders = shard_folders(out)
    if not folders and not (out / STORE_FILE).exists():
        raise UsageError(f"nothing to merge in {out}: it holds no shard and no rows")
    with CollectionStore(out) as store:
        shards: list[CollectionStore] = []
        at_work = []
        try:
            for folder in folders:
                try:
                    shards.append(CollectionStore(folder))
                except InUseError as error:
                    if not may_be_at_work:
                        raise InUseError(
                            f"shard {folder.name} in {out} is still being collected: wait for it, or take in what the "
                            "others hold with --merge-only"
                        ) from error
                    at_work.append(folder.name)
            # a shard that was killed before it knew its device holds nothing
            bound = [shard for shard in shards if shard.bound_device() is not None]
            device = _common_device(store, bound)
            if device is not None:
                store.bind(recipe, device)  # refuses another recipe in the folder itself
            for shard in bound:
                shard.bind(recipe, device)
            num_added = _take_in(recipe, store, bound)
        finally:
            for shard in shards:
                shard.close()
        write_tables(store, recipe)
        rows = store.rows()
    return MergeReport(
        **FolderReport.contents(recipe, out, rows),
        device=device or "",
        num_shards=len(folders),
        num_added=num_added,
        at_work=tuple(at_work),
    )


def _common_device(store: CollectionStore, shards: Iterable[CollectionStore]) -> str | None:
    """The one device of all of them; raises UsageError where there are several: rows must not be mixed unseen."""
    names: dict[str, list[str]] = {}
    for each in (store, *shards):
        device = each.bound_device()
        if device is not None:
            names.setdefault(device, []).append("the folder itself" if each is store else each.folder.name)
    if len(names) > 1:
        parts = "; ".join(f"{device} in {', '.join(where)}" for device, where in names.items())
        raise UsageError(
            f"{store.folder} has rows of several devices ({parts}), which do not make one collection: each shard's "
            "table stands for itself; ask the scheduler for one type of GPU, with an --out for each type"
        )
    return next(iter(names), None)


def _take_in(recipe: Recipe, store: CollectionStore, shards: Iterable[CollectionStore]) -> int:
    """Rows in the recipe's order, graphs and device files of the shards; returns how many rows are new."""
    rows: dict[str, StoredRow] = {}
    graphs: dict[str, tuple[str, str]] = {}
    for shard in shards:
        for row in shard.rows():  # parts of different counts overlap: a measured row goes before one that failed
            if row.config_id not in rows or (row.status == "ok" and rows[row.config_id].status != "ok"):
                rows[row.config_id] = row
        for graph_id, (file, reason) in shard.graphs().items():
            if graph_id not in graphs or (file and not graphs[graph_id][0]):
                graphs[graph_id] = (file, reason)
                if file:
                    _copy(shard.folder / file, store.folder / file)
        if (shard.folder / DEVICE_FILE).exists() and not (store.folder / DEVICE_FILE).exists():
            _copy(shard.folder / DEVICE_FILE, store.folder / DEVICE_FILE)
    order = [each.config_id for each in recipe.configurations]
    return store.take_in([rows[config_id] for config_id in order if config_id in rows], graphs)


def _copy(source: Path, target: Path) -> None:
    """Copy a file that is complete under its name or not there at all; what is there stays."""
    if target.exists():
        return
    try:
        target.parent.mkdir(exist_ok=True)
        with replaced_when_done(target) as partial:
            shutil.copyfile(source, partial)
    except OSError as error:
        raise GnnpredError(f"cannot copy {source} to {target}: {error.strerror or error}") from error
