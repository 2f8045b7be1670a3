"""How much training has seen of a GPU and of GPUs like it: what intervals and warnings go by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.graph import DType
from gnnpred.hardware import DeviceSpec, device_of_fields, find_device

MIN_ROWS_OF_RELATIVE = 20  # a GPU with fewer training rows is no help to one like it
# Held out, K80, M60, RTX 5090, RX 6800 and RX 7700S are farther than that from every known GPU, the others within 1.2.
FAR_DISTANCE = 1.5
MAX_DISTANCE = 4.0
_PLENTY_OF_ROWS = 1000
# Standard deviations of the specification vector over the GPUs of the corpus.
_SPEC_SCALES = np.array([0.85, 0.84, 0.88, 0.62, 0.66, 0.25, 1.21, 2.6])


@dataclass(frozen=True)
class Novelty:
    """0 everywhere: a GPU that training knows well."""

    distance: float = 0.0  # to the specification of the nearest known GPU of the same vendor, 0 to MAX_DISTANCE
    few_generation_rows: float = 0.0  # 1 without a training row of its architecture, 0 from 1,000 on
    few_device_rows: float = 0.0  # 1 without a training row of its own, 0 from 1,000 on
    nearest: str = ""  # name of that known GPU


@dataclass(frozen=True)
class KnownDevices:
    """Training rows of whole steps by GPU name."""

    rows_by_device: Mapping[str, int]
    own_devices: Mapping[str, DeviceSpec] = field(default_factory=dict)  # of the corpus, which the tables lack

    @classmethod
    def from_json(cls, content: Any, *, own_devices: Any = (), where: str) -> "KnownDevices":
        """From a table of GPU name to rows and a list of devices by their fields; raises GnnpredError for anything
        else. ``where`` names the file."""
        is_table = isinstance(content, Mapping) and all(
            isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in content.values()
        )
        if not is_table:
            raise GnnpredError(f"{where}: device_rows must be a table of GPU name to number of rows")
        if not isinstance(own_devices, list | tuple) or not all(isinstance(each, Mapping) for each in own_devices):
            raise GnnpredError(f"{where}: own_devices must be a list of devices")
        own = [device_of_fields(each, where=where) for each in own_devices]
        return cls({str(name): count for name, count in content.items()}, {device.name: device for device in own})

    @cached_property
    def _specs(self) -> dict[str, DeviceSpec]:
        specs = {}
        for name in self.rows_by_device:
            try:
                specs[name] = self.own_devices.get(name) or find_device(name)
            except UsageError:  # a user's own device file: known by its name alone
                continue
        return specs

    def rows_of_generation(self, device: DeviceSpec) -> int:
        """Training rows on GPUs of the same architecture."""
        return sum(
            self.rows_by_device[name] for name, spec in self._specs.items() if spec.architecture == device.architecture
        )

    def rows_of_vendor(self, device: DeviceSpec) -> int:
        """Training rows on GPUs of NVIDIA, or on all others."""
        return sum(self.rows_by_device[n] for n, spec in self._specs.items() if spec.is_nvidia == device.is_nvidia)

    @cached_property
    def _novelty_of(self) -> dict[DeviceSpec, Novelty]:
        return {}

    def novelty(self, device: DeviceSpec) -> Novelty:
        """What there is of the GPU, of its generation and of GPUs with a like specification."""
        if device not in self._novelty_of:  # a warm predictor asks for the same few again and again
            self._novelty_of[device] = self._find_novelty(device)
        return self._novelty_of[device]

    def _find_novelty(self, device: DeviceSpec) -> Novelty:
        own = spec_vector(device)
        nearest, distance = "", MAX_DISTANCE
        for name, spec in self._specs.items():
            if self.rows_by_device[name] < MIN_ROWS_OF_RELATIVE or spec.is_nvidia != device.is_nvidia:
                continue
            apart = float(np.linalg.norm((spec_vector(spec) - own) / _SPEC_SCALES))
            if apart < distance:
                nearest, distance = name, apart
        return Novelty(
            distance=distance,
            few_generation_rows=_scarcity(self.rows_of_generation(device)),
            few_device_rows=_scarcity(self.rows_by_device.get(device.name, 0)),
            nearest=nearest,
        )


def spec_vector(device: DeviceSpec) -> np.ndarray:
    """(8,) logs of rates, their ratios, parallelism, clock and cache; and the year."""
    half = device.peak_tflops(DType.FP16)
    return np.array(
        [
            np.log(device.fp32_tflops), np.log(device.mem_bandwidth_gb_s), np.log(half / device.fp32_tflops),
            np.log(device.fp32_tflops * 1e3 / device.mem_bandwidth_gb_s), np.log(device.num_sms),
            np.log(device.boost_clock_mhz), np.log(max(device.l2_mb, 0.25)), device.year - 2018,
        ]
    )  # fmt: skip


def _scarcity(num_rows: int) -> float:
    return max(0.0, 1 - float(np.log1p(num_rows) / np.log1p(_PLENTY_OF_ROWS)))


def device_warnings(known: KnownDevices, device: DeviceSpec) -> dict[str, str]:
    """What about the GPU is unlike everything in training: name of the reason -> one line. Empty: nothing is."""
    warnings: dict[str, str] = {}
    if not known.rows_of_vendor(device):
        warnings["unseen_vendor"] = (
            f"training has no GPU of the vendor of {device.name}: libraries and kernels differ, errors are larger"
        )
    if not known.rows_of_generation(device):
        warnings["unseen_generation"] = (
            f"training has no GPU of the generation of {device.name} ({device.architecture}): errors there are larger"
        )
    novelty = known.novelty(device)
    if novelty.distance > FAR_DISTANCE:
        nearest = f"; the nearest is {novelty.nearest}" if novelty.nearest else ""
        warnings["far_specification"] = (
            f"no GPU that training knows well has a specification like that of {device.name}{nearest}"
        )
    return warnings
