"""Recipe files: TOML with the fields of :class:`RecipeSettings`, checked field by field."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import read_table, require_known
from gnnpred.training.experiments import RecipeSettings
from gnnpred.training.model import AGGREGATIONS, LAYER_KINDS

_SHARES = ("tree_weight", "per_op_weight", "hide_specs", "dropout", "kind_dropout", "hidden_dropout")

_CHOICES = {"layer_kind": LAYER_KINDS, "aggregation": AGGREGATIONS}


def trainers_folder() -> Path:
    """Folder of the shipped recipes (in a clone)."""
    return Path(__file__).parent.parent.parent / "trainers"


def shipped_recipes() -> list[Path]:
    """All recipe files of :func:`trainers_folder`; search spaces lie beside them."""
    return [path for path in trainers_folder().glob("*.toml") if not path.stem.endswith("search_space")]


def find_recipe(name_or_path: str) -> Path:
    """A recipe by shipped name or by path; raises UsageError naming what there is."""
    for path in (Path(name_or_path), trainers_folder() / f"{name_or_path}.toml"):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in shipped_recipes())) or "none"
    raise UsageError(f"recipe {name_or_path!r} not found: give a TOML file or a shipped name ({names})")


def load_recipe(path: Path) -> RecipeSettings:
    """Read and check a recipe; a wrong field is named with the nearest right one."""
    return _build(RecipeSettings, read_table(path, "recipe", only_toml=True), where=str(path))


def values_of(settings: RecipeSettings) -> dict[str, int | float | bool | str]:
    """Every field by its dotted name, such as ``train.model.width``."""
    return _flat(settings, "")


def _flat(settings: Any, prefix: str) -> dict[str, int | float | bool | str]:
    values: dict[str, int | float | bool | str] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        values |= _flat(value, f"{prefix}{field.name}.") if is_dataclass(value) else {prefix + field.name: value}
    return values


def with_values(settings: RecipeSettings, values: Mapping[str, Any], *, where: str) -> RecipeSettings:
    """The recipe with some fields changed, by dotted name; checked as a recipe file is."""
    content: dict[str, Any] = {}
    for name, value in (values_of(settings) | dict(values)).items():
        *tables, key = name.split(".")
        table = content
        for part in tables:
            table = table.setdefault(part, {})
        table[key] = value
    return _build(RecipeSettings, content, where=where)


def recipe_text(settings: RecipeSettings, *, comment: str) -> str:
    """A recipe file with every field; :func:`load_recipe` gives equal settings back."""
    tables: dict[str, list[str]] = {}
    for name, value in values_of(settings).items():
        table, _, key = name.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {json.dumps(value)}")  # scalars are the same in TOML
    parts = ["\n".join(f"# {line}" for line in comment.splitlines())]
    parts += ["\n".join([f"[{table}]"] * bool(table) + lines) for table, lines in sorted(tables.items())]
    return "\n\n".join(parts) + "\n"


def _build(kind: type, content: dict[str, Any], *, where: str) -> Any:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    values: dict[str, Any] = {}
    for key, value in content.items():
        require_known([key], names, where)
        expected = hints[key]
        if is_dataclass(expected):
            if not isinstance(value, dict):
                raise GnnpredError(f"{where}: {key} must be a table")
            values[key] = _build(expected, value, where=f"{where}, [{key}]")
            continue
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not expected:
            raise GnnpredError(f"{where}: {key} must be of type {expected.__name__}, got {value!r}")
        if isinstance(value, str):
            if value not in _CHOICES[key]:
                raise GnnpredError(f"{where}: {key} must be one of {', '.join(_CHOICES[key])}, got {value!r}")
        elif not isinstance(value, bool) and value < 0:
            raise GnnpredError(f"{where}: {key} must not be negative, got {value!r}")
        if key in _SHARES and value > 1:
            raise GnnpredError(f"{where}: {key} must be at most 1, got {value!r}")
        values[key] = value
    settings = kind(**values)
    for name in ("seeds", "fold_seeds", "device_seeds", "epochs", "graphs_per_batch", "width"):
        if name in names and getattr(settings, name) < 1:
            raise GnnpredError(f"{where}: {name} must be at least 1")
    return settings
