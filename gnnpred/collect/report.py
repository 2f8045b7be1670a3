"""What a call on a collection's folder says of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnpred.collect.recipe import Recipe
from gnnpred.collect.store import StoredRow
from gnnpred.collect.table import FAILED_FILE, measured_file


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """What a folder holds after a call."""

    folder: Path
    device: str
    num_configurations: int
    num_rows: int
    by_status: dict[str, int]
    runs_name: str

    @staticmethod
    def contents(recipe: Recipe, folder: Path, rows: Sequence[StoredRow]) -> dict[str, Any]:
        """The fields that follow from the rows of ``recipe``."""
        return {
            "folder": folder,
            "num_configurations": len(recipe.configurations),
            "num_rows": len(rows),
            "by_status": dict(Counter(row.status for row in rows).most_common()),
            "runs_name": measured_file(recipe),
        }

    @property
    def runs_file(self) -> Path:
        return self.folder / self.runs_name

    @property
    def failed_file(self) -> Path:
        return self.folder / FAILED_FILE

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "runs": str(self.runs_file),
            "failed": str(self.failed_file),
            "device": self.device,
            "num_configurations": self.num_configurations,
            "num_rows": self.num_rows,
            "by_status": self.by_status,
        }
