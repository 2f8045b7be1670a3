"""Search space files: which fields of a recipe a study may change, within which ranges, and how trials compare."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnnpred.errors import GnnpredError
from gnnpred.files import json_digest, read_table, require_known
from gnnpred.training.experiments import RecipeSettings
from gnnpred.training.recipe import trainers_folder, values_of, with_values

# What a trial cannot measure: ensembles of other folds than a trial's, and which rows there are.
_NOT_SEARCHABLE = ("seeds", "device_seeds", "inference_rows", "training_rows", "operator_rows")
_PARAMETER_KEYS = {
    "float": {"low", "high", "log"}, "int": {"low", "high", "log", "step"}, "categorical": {"choices"},
}  # fmt: skip
_LISTED = "known are"
_STUDY_KEYS = ("test_fold", "seed", "startup_trials", "stages")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One field of the recipe, by its dotted name, and the values it may take."""

    name: str
    kind: str  # float | int | categorical
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: int = 1
    choices: tuple[int | float | bool | str, ...] = ()

    def admits(self, value: int | float | bool | str) -> bool:
        """Whether a trial may have this value."""
        if self.kind == "categorical":
            return any(type(choice) is type(value) and choice == value for choice in self.choices)
        in_range = self.low <= value <= self.high
        return in_range and (self.kind == "float" or (value - self.low) % self.step == 0)

    @property
    def values_text(self) -> str:
        if self.kind == "categorical":
            return ", ".join(map(str, self.choices))
        step = f" in steps of {self.step}" if self.kind == "int" and self.step > 1 else ""
        return f"{self.low} to {self.high}{step}"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """How much of the recipe a trial spends before it is compared."""

    rows: float  # share of the rows of an epoch
    epochs: float  # share of the epochs
    keep: float = 1.0  # share of the trials, the best, that goes on to the next stage


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A search space file, checked against a recipe."""

    parameters: tuple[Parameter, ...]
    test_fold: int
    seed: int
    startup_trials: int
    stages: tuple[Stage, ...]

    @property
    def digest(self) -> str:
        return json_digest(asdict(self))

    def defaults(self, recipe: RecipeSettings) -> dict[str, int | float | bool | str]:
        """The recipe's own values of the parameters."""
        values = values_of(recipe)
        return {parameter.name: values[parameter.name] for parameter in self.parameters}


def default_space(recipe_name: str) -> Path:
    """The space made for a recipe (NAME_search_space.toml of the shipped ones), otherwise the one for all."""
    own = trainers_folder() / f"{recipe_name}_search_space.toml"
    return own if own.is_file() else trainers_folder() / "search_space.toml"


def load_space(path: Path, recipe: RecipeSettings) -> SearchSpace:
    """Read and check a search space; raises GnnpredError naming the parameter that is wrong."""
    content = read_table(path, "search space", only_toml=True)
    require_known(content, ("study", "parameters"), str(path), listed=_LISTED)
    study, tables = content.get("study"), content.get("parameters")
    if not isinstance(study, dict) or not isinstance(tables, dict) or not tables:
        raise GnnpredError(f"{path}: a search space needs the tables [study] and [parameters]")
    parameters = tuple(_parameter(name, table, recipe, where=str(path)) for name, table in tables.items())
    return SearchSpace(parameters=parameters, **_study(study, where=f"{path}, [study]"))


def _study(study: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    require_known(study, _STUDY_KEYS, where, listed=_LISTED)
    missing = [key for key in _STUDY_KEYS if key not in study]
    if missing:
        raise GnnpredError(f"{where}: {missing[0]} is missing")
    for key, least in (("test_fold", 0), ("seed", 0), ("startup_trials", 1)):
        if type(study[key]) is not int or study[key] < least:
            raise GnnpredError(f"{where}: {key} must be a whole number from {least} on, got {study[key]!r}")
    stages = study["stages"]
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise GnnpredError(f"{where}: stages must be a list of tables such as {{ rows = 1.0, epochs = 1.0 }}")
    checked = []
    for stage in stages:
        keys = ("rows", "epochs") if stage is stages[-1] else ("rows", "epochs", "keep")
        if stage is stages[-1] and "keep" in stage:
            raise GnnpredError(f"{where}: no stage follows the last one: leave keep out there")
        require_known(stage, keys, f"{where}, stages", listed=_LISTED)
        checked.append(Stage(**{key: _share(stage.get(key), f"{key} of a stage", where=where) for key in keys}))
    if checked[-1] != Stage(rows=1.0, epochs=1.0):
        raise GnnpredError(f"{where}: the last stage must be the whole recipe, {{ rows = 1.0, epochs = 1.0 }}")
    return {**study, "stages": tuple(checked)}


def _share(value: Any, name: str, *, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise GnnpredError(f"{where}: {name} must be above 0 and at most 1, got {value!r}")
    return float(value)


def _parameter(name: str, table: Any, recipe: RecipeSettings, *, where: str) -> Parameter:
    known = values_of(recipe)
    searchable = [field for field in known if field not in _NOT_SEARCHABLE]
    if isinstance(table, dict) and name not in known and "kind" not in table:
        raise GnnpredError(f'{where}: write dotted names in quotes, such as "train.learning_rate" (at {name!r})')
    if name in _NOT_SEARCHABLE:
        raise GnnpredError(f"{where}: {name!r} cannot be searched, a trial does not measure what it changes")
    if name not in searchable:
        require_known([name], searchable, where, what="parameter", listed=_LISTED)
    where = f"{where}, {name!r}"
    if not isinstance(table, dict) or table.get("kind") not in _PARAMETER_KEYS:
        raise GnnpredError(f"{where}: kind must be one of {', '.join(_PARAMETER_KEYS)}")
    kind, field_type = table["kind"], type(known[name])
    require_known(table, ("kind", *sorted(_PARAMETER_KEYS[kind])), where, listed=_LISTED)
    if kind == "categorical":
        parameter = Parameter(name=name, kind=kind, choices=_choices(table.get("choices"), field_type, where=where))
        bounds: tuple = parameter.choices
    else:
        parameter = _range(name, table, field_type, where=where)
        bounds = (parameter.low, parameter.high)
    for value in bounds:
        with_values(recipe, {name: value}, where=where)  # a recipe file may not hold it: neither may a trial
    if not parameter.admits(known[name]):
        raise GnnpredError(f"{where}: the recipe's own value {known[name]} is not among {parameter.values_text}")
    return parameter


def _choices(choices: Any, field_type: type, *, where: str) -> tuple:
    if not isinstance(choices, list) or not choices:
        raise GnnpredError(f"{where}: empty range: choices must be a list of values")
    if field_type is float:
        choices = [float(value) if type(value) is int else value for value in choices]
    for value in choices:
        if type(value) is not field_type:
            raise GnnpredError(f"{where}: choices must be of type {field_type.__name__}, got {value!r}")
    if len(set(choices)) < len(choices):
        raise GnnpredError(f"{where}: a choice is there twice")
    return tuple(choices)


def _range(name: str, table: Mapping[str, Any], field_type: type, *, where: str) -> Parameter:
    kind = {"float": float, "int": int}[table["kind"]]
    if field_type is not kind:
        right = "categorical" if field_type in (bool, str) else field_type.__name__
        raise GnnpredError(f"{where}: kind must be {right}, the field's type, got {table['kind']}")
    bounds = {}
    for key in ("low", "high"):
        value = table.get(key)
        value = float(value) if kind is float and type(value) is int else value
        if type(value) is not kind or not math.isfinite(value):
            raise GnnpredError(f"{where}: {key} must be of type {kind.__name__}, got {table.get(key)!r}")
        bounds[key] = value
    log, step = table.get("log", False), table.get("step", 1)
    if type(log) is not bool:
        raise GnnpredError(f"{where}: log must be true or false, got {log!r}")
    if type(step) is not int or step < 1:
        raise GnnpredError(f"{where}: step must be a whole number from 1 on, got {step!r}")
    low, high = bounds["low"], bounds["high"]
    if not low < high:
        raise GnnpredError(f"{where}: empty range: low = {low} must be below high = {high}")
    if log and low <= 0:
        raise GnnpredError(f"{where}: log = true needs low above 0, got {low}")
    if log and step > 1:
        raise GnnpredError(f"{where}: log = true and a step do not go together")
    if kind is int and (high - low) % step:
        raise GnnpredError(f"{where}: {low} to {high} is not a whole number of steps of {step}")
    return Parameter(name=name, kind=table["kind"], low=low, high=high, log=log, step=step)
