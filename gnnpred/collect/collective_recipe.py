"""Recipes of collective operations: TOML that says which to time, at which sizes and among how many GPUs."""

import itertools
from dataclasses import dataclass
from typing import Any

from gnnpred.communication.collectives import COLLECTIVE_KINDS, check_kind
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import json_digest, require_known
from gnnpred.units import parse_bytes

# Our name -> torch's.
TORCH_DTYPES = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn",
    "int8": "int8", "int32": "int32", "int64": "int64",
}  # fmt: skip
_LIST_FIELDS: dict[str, tuple[type, tuple[Any, ...]]] = {
    "operations": (str, COLLECTIVE_KINDS),
    "sizes": (str, ()),
    "dtypes": (str, ("fp32",)),
    "gpus": (int, (2, 4, 8)),
    "nodes": (int, (1,)),
}
_SIZE_FIELDS = ("min_size", "max_size")
_MAX_GPUS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective to time. ``num_bytes`` is the whole buffer, as ``gnnpred collective --bytes`` counts it."""

    operation: str  # one of COLLECTIVE_KINDS
    num_bytes: int
    dtype: str  # one of TORCH_DTYPES
    gpus: int  # in all, as many on every node; on a CPU: processes
    nodes: int = 1

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def config_id(self) -> str:
        """The same for equal calls, in every process and version."""
        return json_digest(["collective", self.operation, self.num_bytes, self.dtype, self.gpus, self.nodes])


def calls_of(tables: Any, path: str) -> tuple[CollectiveCall, ...]:
    """Every combination of the fields of each table [[collective]]; operations vary fastest, then sizes upwards.

    Raises GnnpredError that names the wrong field.
    """
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise GnnpredError(f"{path}: a recipe of collectives needs at least one table [[collective]] with sizes")
    calls: dict[str, CollectiveCall] = {}
    for i in range(len(tables)):
        for call in _calls_of(tables[i], f"{path}, [[collective]] {i + 1}"):
            calls.setdefault(call.config_id, call)
    return tuple(calls.values())


def _calls_of(table: dict[str, Any], where: str) -> list[CollectiveCall]:
    require_known(table, (*_LIST_FIELDS, *_SIZE_FIELDS), where)
    values = {name: _values_of(table, name, where) for name in _LIST_FIELDS}
    try:
        operations = [check_kind(text) for text in values["operations"]]
        sizes = [int(parse_bytes(text, f"{where}: sizes")) for text in values["sizes"]]
    except UsageError as error:
        raise GnnpredError(str(error) if where in str(error) else f"{where}: {error}") from error
    require_known(values["dtypes"], TORCH_DTYPES, where, what="dtype", listed="dtypes are")
    sizes += _doubling(table, where)
    if not sizes:
        raise GnnpredError(f"{where}: say which sizes: min_size and max_size, which double in between, or sizes")
    for gpus in values["gpus"]:
        if not 2 <= gpus <= _MAX_GPUS:
            raise GnnpredError(f"{where}: gpus holds {gpus}: a collective needs from 2 to {_MAX_GPUS:,}")
    layouts = [(gpus, nodes) for nodes, gpus in itertools.product(values["nodes"], values["gpus"]) if gpus % nodes == 0]
    if not layouts:
        gpus, nodes = list(values["gpus"]), list(values["nodes"])
        raise GnnpredError(f"{where}: no number of gpus {gpus} can be spread evenly over {nodes} nodes")
    return [
        CollectiveCall(operation=operation, num_bytes=size, dtype=dtype, gpus=gpus, nodes=nodes)
        for (gpus, nodes), dtype, size, operation in itertools.product(
            layouts, values["dtypes"], sorted(set(sizes)), operations
        )
    ]


def _doubling(table: dict[str, Any], where: str) -> list[int]:
    given = [name for name in _SIZE_FIELDS if name in table]
    if not given:
        return []
    if len(given) == 1:
        raise GnnpredError(f"{where}: min_size and max_size go together, {given[0]} is alone")
    for name in _SIZE_FIELDS:
        if not isinstance(table[name], str):
            raise GnnpredError(f'{where}: {name} must be a text such as "4KiB", got {table[name]!r}')
    try:
        low, high = (int(parse_bytes(table[name], f"{where}: {name}")) for name in _SIZE_FIELDS)
    except UsageError as error:
        raise GnnpredError(str(error)) from error
    if not 1 <= low <= high:
        raise GnnpredError(f"{where}: min_size {table['min_size']} must not be above max_size {table['max_size']}")
    sizes = [low]
    while sizes[-1] * 2 <= high:
        sizes.append(sizes[-1] * 2)
    return sizes


def _values_of(table: dict[str, Any], name: str, where: str) -> tuple[Any, ...]:
    kind, default = _LIST_FIELDS[name]
    values = table.get(name, list(default))
    if not isinstance(values, list) or (not values and name in table):
        raise GnnpredError(f"{where}: {name} must be a list that is not empty, got {values!r}")
    for value in values:
        if type(value) is not kind:
            raise GnnpredError(f"{where}: {name} holds {value!r}, which is not of type {kind.__name__}")
        if kind is int and value < 1:
            raise GnnpredError(f"{where}: {name} must be at least 1, got {value}")
    return tuple(values)
