"""GPU specifications: the shipped table, names and aliases, and a user's own device file."""

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from gnnpred.errors import UsageError
from gnnpred.graph import DType

DEFAULT_DEVICE_NAME = "A100-SXM4-80GB"


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU. Peaks are dense, tensor rates with fp32 accumulation (what PyTorch runs).

    A peak of ``None`` means that the device has no such unit; :meth:`peak_tflops` then gives the
    rate at which the work really runs.
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

    # (to be completed: peak_tflops(dtype), supports(precision) ...)


def _number(text: str) -> float | None:
    return float(text) if text.strip() else None


@lru_cache(maxsize=1)
def list_devices() -> tuple[DeviceSpec, ...]:
    """All shipped devices, in the order of the table."""
    with (files("gnnpred.hardware") / "gpus.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_device_of_row(row) for row in csv.DictReader(file))


def _device_of_row(row: dict[str, str]) -> DeviceSpec:
    return DeviceSpec(
        name=row["gpu"],
        aliases=tuple(alias for alias in row["aliases"].split(";") if alias),
        architecture=row["architecture"],
        year=float(row["year"]),
        compute_capability=_number(row["compute_capability"]),
        num_sms=int(float(row["sms"] or 0)),
        boost_clock_mhz=float(row["boost_clock_mhz"] or 0),
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
    )


def find_device(name: str) -> DeviceSpec:
    """The device of that name or alias (case and punctuation do not matter)."""
    wanted = _normalised(name)
    for device in list_devices():
        if wanted in {_normalised(n) for n in (device.name, *device.aliases)}:
            return device
    raise UsageError(f"unknown device {name!r}")


def _normalised(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def load_device_file(path: str) -> DeviceSpec:
    """A user's own GPU from a TOML or JSON file with the fields of :class:`DeviceSpec`."""
    raise NotImplementedError


_ = DType
