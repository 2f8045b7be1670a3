"""timm's benchmark tables: eager and compiled, synthetic data on the GPU, autocast without a loss scaler."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from gnnpred.corpus.rebuild import ModelKey
from gnnpred.corpus.sources.record import Interpretation, image_size_of, interpret_common
from gnnpred.errors import GnnpredError

PREFIXES = ("timm-",)
CHECK_FILE = "timm_model_check.csv"


def interpret(record: Mapping[str, str], shared: Path) -> Interpretation | str:
    """One timm row; models that timm no longer builds with the same parameter count are left out."""
    common = interpret_common(record)
    if isinstance(common, str):
        return common
    name = _rebuildable_names(shared / CHECK_FILE).get(record["model"])
    if name is None:
        return "timm builds no model of that name with the source's parameter count today"
    size = image_size_of(record["input"])
    if size is None:
        return f"input {record['input']!r} is no image size"
    return common.replace(key=ModelKey(f"timm:{name}", image_size=size))


@lru_cache(maxsize=1)
def _rebuildable_names(path: Path) -> dict[str, str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {
                row["model"]: row["create_model_name"] or row["model"]
                for row in csv.DictReader(file)
                if row["status"] in ("ok", "alias")
            }
    except OSError as error:
        raise GnnpredError(f"the check of timm names is missing: {path}") from error
