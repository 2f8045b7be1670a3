"""Collection recipes: TOML that says what to measure, checked field by field, and the configurations it stands for."""

import difflib
import itertools
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import json_digest, read_table, require_known
from gnnpred.job import MEMORY_FORMATS, Phase, Precision

OPTIMIZERS = ("sgd", "adam", "adamw")  # those that PyTorch itself has
_MAX_CONFIGURATIONS = 100_000


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training step to measure. ``image_size`` and ``seq_len`` of ``None`` are the model's own."""

    model: str
    batch_size: int
    image_size: int | None = None
    seq_len: int | None = None
    precision: Precision = Precision.FP32
    phase: Phase = Phase.TRAIN
    optimizer: str = "sgd"
    memory_format: str = "nchw"
    compile: bool = False

    @property
    def config_id(self) -> str:
        """The same for equal configurations, in every process and version."""
        return json_digest(asdict(self))

    @property
    def graph_id(self) -> str:
        """The same for configurations that run one exported graph."""
        return json_digest([self.model, self.image_size, self.seq_len])


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """How long a configuration is warmed up and timed."""

    steps: int = 20  # timed
    min_warmup_steps: int = 3
    max_warmup_steps: int = 60
    max_warmup_s: float = 20.0
    max_timed_s: float = 20.0  # fewer steps are timed where they would take longer, at least 3
    time_limit_s: float = 180.0  # of the whole process: imports, building, compiling, measuring
    export_limit_s: float = 300.0  # of writing one model's ONNX file
    cudnn_benchmark: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "min_warmup_steps", "time_limit_s", "export_limit_s", "max_warmup_s", "max_timed_s"):
            if not getattr(self, name) > 0:
                raise GnnpredError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.max_warmup_steps < self.min_warmup_steps:
            raise GnnpredError(
                f"max_warmup_steps {self.max_warmup_steps} is below min_warmup_steps {self.min_warmup_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to measure, in the order in which it is measured, and how."""

    name: str
    configurations: tuple[Configuration, ...]
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    text: str = field(default="", compare=False)  # of the file, comments and all

    @property
    def recipe_id(self) -> str:
        """Changes with every change of what is measured or how; comments and names do not count."""
        return json_digest([[asdict(each) for each in self.configurations], asdict(self.measure)])


# ---------------------------------------------------------------------------------------- reading


def recipes_folder() -> Path:
    """Folder of the shipped recipes (in a clone)."""
    return Path(__file__).parent.parent.parent / "datasets" / "recipes"


def find_recipe(name_or_path: str) -> Path:
    """A recipe by shipped name or by path; raises UsageError naming what there is."""
    for path in (Path(name_or_path), recipes_folder() / f"{name_or_path}.toml"):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in recipes_folder().glob("*.toml"))) or "none"
    raise UsageError(f"recipe {name_or_path!r} not found: give a TOML file or a shipped name ({names})")


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe; raises GnnpredError that names the wrong field and the nearest right one."""
    content = read_table(path, "recipe", only_toml=True)
    require_known(content, ("measure", "sweep"), str(path))
    try:
        measure = MeasureSettings(**_measure_values(content.get("measure", {}), f"{path}, [measure]"))
    except GnnpredError as error:
        raise error if str(path) in str(error) else GnnpredError(f"{path}, [measure]: {error}") from error
    sweeps = content.get("sweep")
    if not isinstance(sweeps, list) or not sweeps or not all(isinstance(sweep, dict) for sweep in sweeps):
        raise GnnpredError(f"{path}: a recipe needs at least one table [[sweep]] with models and batch_sizes")
    configurations: dict[str, Configuration] = {}
    for i in range(len(sweeps)):
        for each in _configurations_of(sweeps[i], f"{path}, [[sweep]] {i + 1}"):
            configurations.setdefault(each.config_id, each)
            if len(configurations) > _MAX_CONFIGURATIONS:
                raise GnnpredError(f"{path}: more than {_MAX_CONFIGURATIONS:,} configurations")
    return Recipe(
        name=path.stem,
        configurations=tuple(configurations.values()),
        measure=measure,
        text=path.read_text(encoding="utf-8"),
    )


def _measure_values(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise GnnpredError(f"{where} must be a table")
    kinds = {each.name: each.type for each in fields(MeasureSettings)}
    require_known(content, kinds, where)
    values: dict[str, Any] = {}
    for key, value in content.items():
        if kinds[key] is float and type(value) is int:
            value = float(value)
        if type(value) is not kinds[key]:
            raise GnnpredError(f"{where}: {key} must be of type {kinds[key].__name__}, got {value!r}")
        values[key] = value
    return values


# Field of a sweep -> what each of its values must be, and the values where the field is left out.
_SWEEP_FIELDS: dict[str, tuple[type, tuple[Any, ...]]] = {
    "models": (str, ()),
    "batch_sizes": (int, ()),
    "image_sizes": (int, (None,)),
    "seq_lens": (int, (None,)),
    "precisions": (str, ("fp32",)),
    "phases": (str, ("train",)),
    "optimizers": (str, ("sgd",)),
    "memory_formats": (str, ("nchw",)),
    "compile": (bool, (False,)),
}


def _configurations_of(sweep: dict[str, Any], where: str) -> list[Configuration]:
    """Every combination of the sweep's values; models vary fastest, so that a sweep that is cut off saw them all."""
    require_known(sweep, _SWEEP_FIELDS, where)
    values = {name: _values_of(sweep, name, where) for name in _SWEEP_FIELDS}
    precisions = [_precision_of(text, where) for text in values["precisions"]]
    phases = [_choice(text, tuple(Phase), "phases", where) for text in values["phases"]]
    optimizers = [_choice(text, OPTIMIZERS, "optimizers", where) for text in values["optimizers"]]
    memory_formats = [_choice(text, MEMORY_FORMATS, "memory_formats", where) for text in values["memory_formats"]]
    for model in values["models"]:
        prefix, separator, name = model.partition(":")
        if not (prefix and separator and name):
            raise GnnpredError(
                f"{where}: cannot read the model {model!r}: write timm:NAME, torchvision:NAME, hf:CONFIG.json, "
                "hf:CLASS?size=value&... or MODULE:FUNCTION"
            )
    return [
        Configuration(
            model=model, batch_size=batch_size, image_size=image_size, seq_len=seq_len, precision=precision,
            phase=Phase(phase), optimizer=optimizer if phase == Phase.TRAIN else "none", memory_format=memory_format,
            compile=compiled,
        )
        for batch_size, image_size, seq_len, compiled, memory_format, optimizer, phase, precision, model in (
            itertools.product(
                values["batch_sizes"], values["image_sizes"], values["seq_lens"], values["compile"], memory_formats,
                optimizers, phases, precisions, values["models"],
            )
        )
    ]  # fmt: skip


def _values_of(sweep: dict[str, Any], name: str, where: str) -> tuple[Any, ...]:
    kind, default = _SWEEP_FIELDS[name]
    if name not in sweep:
        if not default:
            raise GnnpredError(f"{where}: {name} is missing")
        return default
    values = sweep[name]
    if not isinstance(values, list) or not values:
        raise GnnpredError(f"{where}: {name} must be a list that is not empty, got {values!r}")
    for value in values:
        if type(value) is not kind:
            raise GnnpredError(f"{where}: {name} holds {value!r}, which is not of type {kind.__name__}")
        if kind is int and value < 1:
            raise GnnpredError(f"{where}: {name} must be at least 1, got {value}")
    return tuple(values)


def _precision_of(text: str, where: str) -> Precision:
    try:
        return Precision.parse(text)
    except UsageError as error:
        raise GnnpredError(f"{where}: {error}{_nearest(text, tuple(Precision))}") from error


def _choice(text: str, choices: tuple[str, ...], name: str, where: str) -> str:
    if text not in choices:
        hint = _nearest(text, choices)
        raise GnnpredError(f"{where}: {name} {text!r} is unknown: choose among {', '.join(choices)}{hint}")
    return text


def _nearest(text: str, choices: tuple[str, ...]) -> str:
    nearest = difflib.get_close_matches(text, choices, 1)
    return f"; did you mean {str(nearest[0])!r}?" if nearest else ""
