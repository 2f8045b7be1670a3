"""Collection recipes: TOML that says what to measure, checked field by field, and the configurations it stands for."""

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gnnpred.collect.collective_recipe import CollectiveCall, calls_of
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import json_digest, read_table, require_known
from gnnpred.job import MEMORY_FORMATS, Phase, Precision

KINDS = ("steps", "collectives")
STRATEGIES = ("ddp", "fsdp")
OPTIMIZERS = ("sgd", "adam", "adamw")  # those that PyTorch itself has
HOST_COPIES = ("none", "pinned", "pageable")
LARGEST = "largest"
ORDERS = ("listed", "stratified")
_MAX_CONFIGURATIONS = 100_000


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training step to measure. ``image_size`` and ``seq_len`` of ``None`` are the model's own, ``batch_size`` of
    ``None`` is the largest that fits. ``host_copy``: the host memory from which every step copies its inputs.
    """

    model: str
    batch_size: int | None
    image_size: int | None = None
    seq_len: int | None = None
    precision: Precision = Precision.FP32
    phase: Phase = Phase.TRAIN
    optimizer: str = "sgd"
    memory_format: str = "nchw"
    compile: bool = False
    host_copy: str = "none"
    gpus: int = 1  # in all, as many on every node; on a CPU: processes
    nodes: int = 1
    strategy: str = ""  # one of STRATEGIES where there are several GPUs

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "Configuration":
        """The configuration whose ``asdict`` went through JSON."""
        return cls(**{**fields, "precision": Precision(fields["precision"]), "phase": Phase(fields["phase"])})

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

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
    min_energy_s: float = (
        1.0  # power is averaged over at least this long: steps go on after the timed ones; 0: no power
    )
    profile_share: float = 0.1  # of the configurations have the times of their operators taken, chosen by config_id
    largest_batch_limit: int = 4096
    largest_batch_s: float = 60.0  # of searching one largest batch
    largest_batch_memory_gib: float = 0.0  # that a step may take; 0: the GPU's, on a CPU half of what is available

    def __post_init__(self) -> None:
        for name in (
            "steps", "min_warmup_steps", "time_limit_s", "export_limit_s", "max_warmup_s", "max_timed_s",
            "largest_batch_limit", "largest_batch_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise GnnpredError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("min_energy_s", "largest_batch_memory_gib"):
            if not getattr(self, name) >= 0:
                raise GnnpredError(f"{name} must not be below 0, got {getattr(self, name)}")
        if not 0 <= self.profile_share <= 1:
            raise GnnpredError(f"profile_share must be from 0 to 1, got {self.profile_share}")
        if self.max_warmup_steps < self.min_warmup_steps:
            raise GnnpredError(
                f"max_warmup_steps {self.max_warmup_steps} is below min_warmup_steps {self.min_warmup_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to measure, in the order in which it is measured, and how."""

    name: str
    configurations: tuple[Configuration, ...] | tuple[CollectiveCall, ...]
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    kind: str = "steps"  # one of KINDS
    whole_id: str = ""  # of the recipe that this one is a part of

    @property
    def model_prefixes(self) -> list[str]:
        """What stands before the colon of its models: the libraries that they come from."""
        return sorted({each.model.split(":")[0] for each in self.configurations if self.kind == "steps"})

    @property
    def recipe_id(self) -> str:
        """Changes with every change of what is measured or how; comments and names do not count. A part has its
        whole's.
        """
        if self.whole_id:
            return self.whole_id
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
    kind = content.get("kind", "steps")
    if kind not in KINDS:
        raise GnnpredError(f"{path}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    of_kind = ("collective",) if kind == "collectives" else ("order", "sample", "sweep")
    require_known(content, ("kind", "measure", *of_kind), str(path))
    try:
        measure = MeasureSettings(**_measure_values(content.get("measure", {}), f"{path}, [measure]"))
    except GnnpredError as error:
        raise error if str(path) in str(error) else GnnpredError(f"{path}, [measure]: {error}") from error
    if kind == "collectives":
        calls = calls_of(content.get("collective"), str(path))
        return Recipe(name=path.stem, configurations=calls, measure=measure, kind=kind)
    sweeps = content.get("sweep")
    if not isinstance(sweeps, list) or not sweeps or not all(isinstance(sweep, dict) for sweep in sweeps):
        raise GnnpredError(f"{path}: a recipe needs at least one table [[sweep]] with models and batch_sizes")
    seen: set[str] = set()
    by_sweep: list[list[Configuration]] = []
    for i in range(len(sweeps)):
        found = _configurations_of(sweeps[i], f"{path}, [[sweep]] {i + 1}")
        by_sweep.append([each for each in found if not (each.config_id in seen or seen.add(each.config_id))])
        if len(seen) > _MAX_CONFIGURATIONS:
            raise GnnpredError(f"{path}: more than {_MAX_CONFIGURATIONS:,} configurations; split the recipe")
    return Recipe(name=path.stem, configurations=tuple(_ordered(by_sweep, content, str(path))), measure=measure)


def _ordered(by_sweep: list[list[Configuration]], content: dict[str, Any], where: str) -> list[Configuration]:
    order = _choice(content.get("order", ORDERS[0]), ORDERS, "order", where)
    sample = content.get("sample")
    if order == "listed":
        if sample is not None:
            raise GnnpredError(f'{where}: sample takes the beginning of order = "stratified": set that too')
        return list(itertools.chain.from_iterable(by_sweep))
    from gnnpred.collect.order import stratified

    num = sum(map(len, by_sweep))
    if sample is not None and (type(sample) is not int or not 1 <= sample <= num):
        raise GnnpredError(
            f"{where}: sample must be a whole number from 1 to {num}, the recipe's configurations, got {sample!r}"
        )
    return stratified(by_sweep)[:sample]


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
    "host_copies": (str, ("none",)),
    "gpus": (int, (1,)),
    "nodes": (int, (1,)),
    "strategies": (str, ("ddp",)),
}


def _configurations_of(sweep: dict[str, Any], where: str) -> list[Configuration]:
    """Every combination of the sweep's values; models vary fastest, so that a sweep that is cut off saw them all.

    Optimizers multiply training alone; numbers of GPUs and strategies multiply what has gradients to exchange. GPUs
    that cannot be spread evenly over the nodes are left out.
    """
    require_known(sweep, _SWEEP_FIELDS, where)
    values = {name: _values_of(sweep, name, where) for name in _SWEEP_FIELDS}
    precisions = [_precision_of(text, where) for text in values["precisions"]]
    phases = [_choice(text, tuple(Phase), "phases", where) for text in values["phases"]]
    optimizers = [_choice(text, OPTIMIZERS, "optimizers", where) for text in values["optimizers"]]
    memory_formats = [_choice(text, MEMORY_FORMATS, "memory_formats", where) for text in values["memory_formats"]]
    host_copies = [_choice(text, HOST_COPIES, "host_copies", where) for text in values["host_copies"]]
    strategies = [_choice(text, STRATEGIES, "strategies", where) for text in values["strategies"]]
    if None in values["batch_sizes"] and max(values["gpus"]) > 1:
        raise GnnpredError(f"{where}: the {LARGEST} batch is searched on one GPU alone: give gpus a sweep of their own")
    layouts = _layouts_of(values["gpus"], values["nodes"], strategies, where)
    if None in values["batch_sizes"] and any(layout["gpus"] > 1 for layout in layouts):
        raise GnnpredError(f"{where}: the largest batch is searched on one GPU: name batch_sizes for several gpus")
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
            compile=compiled, host_copy=host_copy, **(layout if phase != Phase.INFERENCE else {}),
        )
        for layout in layouts
        for batch_size, image_size, seq_len, compiled, host_copy, memory_format, optimizer, phase, precision, model in (
            itertools.product(
                values["batch_sizes"], values["image_sizes"], values["seq_lens"], values["compile"], host_copies,
                memory_formats, optimizers, phases, precisions, values["models"],
            )
        )
    ]  # fmt: skip


def _layouts_of(gpus: Sequence[int], nodes: Sequence[int], strategies: list[str], where: str) -> list[dict[str, Any]]:
    layouts = [
        {"gpus": num_gpus, "nodes": num_nodes, "strategy": strategy if num_gpus > 1 else ""}
        for num_gpus, num_nodes, strategy in itertools.product(gpus, nodes, strategies)
        if num_gpus % num_nodes == 0
    ]
    if not layouts:
        raise GnnpredError(f"{where}: no number of gpus {list(gpus)} can be spread evenly over {list(nodes)} nodes")
    return layouts


def _values_of(sweep: dict[str, Any], name: str, where: str) -> tuple[Any, ...]:
    kind, default = _SWEEP_FIELDS[name]
    if name not in sweep:
        if not default:
            raise GnnpredError(f"{where}: {name} is missing")
        return default
    values = sweep[name]
    if not isinstance(values, list) or not values:
        raise GnnpredError(f"{where}: {name} must be a list that is not empty, got {values!r}")
    if name == "batch_sizes":
        values = [None if value == LARGEST else value for value in values]
    for value in values:
        if value is None:
            continue
        if type(value) is not kind:
            expected = f"{kind.__name__}, nor {LARGEST!r}" if name == "batch_sizes" else kind.__name__
            raise GnnpredError(f"{where}: {name} holds {value!r}, which is not of type {expected}")
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
