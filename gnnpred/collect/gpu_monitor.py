"""What NVML says of a GPU while steps run: clocks, throttling, other processes, temperature, power and energy.

Whatever the driver does not tell stays unknown (None); a machine without NVML has no readings, and no error.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Samples are a few driver calls that release the interpreter lock: far below 1 % of a core at this interval.
_INTERVAL_S = 0.05
# NVML's bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h), named as nvidia-smi names them.
_CLOCK_REASONS = {
    0x1: "gpu_idle", 0x2: "applications_clocks_setting", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost",
    0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}  # fmt: skip
# Idle moments and clocks that someone chose are no throttling.
_NOT_THROTTLING = 0x1 | 0x2 | 0x100
# Large products meet the board's power limit on every data-centre GPU: noted, but it is how such a GPU runs.
_POWER_CAP = "sw_power_cap"
# Two samples of a clock apart by more than this share of the higher: the steps did not all run at one speed.
_UNSTEADY_CLOCK_PCT = 5.0


@dataclass(frozen=True, kw_only=True)
class GpuReadings:
    """Of one window of steps. None: not told by this GPU or driver."""

    sm_clock_mhz: float | None = None  # median of the samples
    sm_clock_min_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None  # seen in any sample, idle and chosen clocks left out
    other_gpu_processes: int | None = None  # most in any sample
    gpu_temperature_c: float | None = None  # highest
    power_w: float | None = None  # mean over the window
    energy_j: float | None = None  # of the window
    power_limit_w: float | None = None

    def warnings(self) -> list[str]:
        """What makes the step times of the window doubtful."""
        found = []
        if slowed := [reason for reason in self.throttle_reasons or () if reason != _POWER_CAP]:
            found.append(f"throttled: {', '.join(slowed)}")
        if self.other_gpu_processes:
            found.append(f"other processes on the GPU: {self.other_gpu_processes}")
        if self.sm_clock_min_mhz and self.sm_clock_max_mhz:
            drop_pct = (1 - self.sm_clock_min_mhz / self.sm_clock_max_mhz) * 100
            if drop_pct > _UNSTEADY_CLOCK_PCT:
                found.append(f"SM clock between {self.sm_clock_min_mhz:.0f} and {self.sm_clock_max_mhz:.0f} MHz")
        return found


class GpuMonitor:
    """Samples one GPU in a thread, from :meth:`start` to :meth:`stop`; the first and last sample are taken there."""

    def __init__(
        self, nvml: Any, handle: Any, *, interval_s: float = _INTERVAL_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._nvml = nvml
        self._handle = handle
        self._interval_s = interval_s
        self._clock = clock
        self._samples: list[dict[str, Any]] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin the window."""
        self._take_sample()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> GpuReadings:
        """End the window; what was read in it."""
        assert self._thread is not None, "start first"
        self._stopped.set()
        self._thread.join()
        self._take_sample()
        return readings_of(self._samples, power_limit_w=_scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3))

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._take_sample()

    def _take_sample(self) -> None:
        nvml = self._nvml
        self._samples.append(
            {
                "energy_j": _scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3),
                "at_s": self._clock(),
                "power_w": _scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
                "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", getattr(nvml, "NVML_CLOCK_SM", 1)),
                "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", getattr(nvml, "NVML_CLOCK_MEM", 2)),
                "clock_reasons": self._ask_first(
                    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
                ),
                "temperature_c": self._ask("nvmlDeviceGetTemperature", getattr(nvml, "NVML_TEMPERATURE_GPU", 0)),
                "num_processes": self._num_processes(),
            }
        )

    def _num_processes(self) -> int | None:
        """Processes that compute on the GPU, this one included; containers see their numbers in another namespace."""
        found = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else len({each.pid for each in found})

    def _ask_first(self, *names: str) -> Any:
        return next((found for name in names if (found := self._ask(name)) is not None), None)

    def _ask(self, name: str, *arguments: Any) -> Any:
        return ask(self._nvml, name, self._handle, *arguments)


def readings_of(samples: Sequence[dict[str, Any]], *, power_limit_w: float | None) -> GpuReadings:
    """What a window's samples say together. Energy is the difference of the GPU's own counter, or power over time."""

    def known(name: str) -> list[Any]:
        return [each[name] for each in samples if each[name] is not None]

    sm_clocks, memory_clocks, reasons = known("sm_clock_mhz"), known("memory_clock_mhz"), known("clock_reasons")
    temperatures, num_processes = known("temperature_c"), known("num_processes")
    energy_j = _energy_j(samples)
    window_s = samples[-1]["at_s"] - samples[0]["at_s"]
    seen = 0
    for each in reasons:
        seen |= int(each)
    throttling = tuple(name for bit, name in _CLOCK_REASONS.items() if seen & bit & ~_NOT_THROTTLING)
    return GpuReadings(
        sm_clock_mhz=statistics.median(sm_clocks) if sm_clocks else None,
        sm_clock_min_mhz=min(sm_clocks, default=None),
        sm_clock_max_mhz=max(sm_clocks, default=None),
        memory_clock_mhz=statistics.median(memory_clocks) if memory_clocks else None,
        throttle_reasons=throttling if reasons else None,
        # this process has work on the GPU, so one of them is itself, under whatever number
        other_gpu_processes=max(0, max(num_processes) - 1) if num_processes else None,
        gpu_temperature_c=max(temperatures, default=None),
        power_w=energy_j / window_s if energy_j is not None and window_s > 0 else None,
        energy_j=energy_j,
        power_limit_w=power_limit_w,
    )


def _energy_j(samples: Sequence[dict[str, Any]]) -> float | None:
    first, last = samples[0]["energy_j"], samples[-1]["energy_j"]
    if first is not None and last is not None and last > first:
        return last - first
    timed = [(each["at_s"], each["power_w"]) for each in samples if each["power_w"] is not None]
    if len(timed) < 2:
        return None
    return sum(
        (timed[i + 1][0] - timed[i][0]) * (timed[i][1] + timed[i + 1][1]) / 2 for i in range(len(timed) - 1)
    )  # trapezoids


# ---------------------------------------------------------------------------------------- NVML


def ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """What an NVML function returns; None where the library, the driver or the GPU does not know it."""
    function = getattr(nvml, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def open_nvml() -> Any:
    """The NVML module (package nvidia-ml-py), ready; None where there is none, or no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def nvml_handle(nvml: Any, properties: Any) -> Any:
    """NVML's handle of the GPU with torch's device properties; None where it cannot be told which one it is.

    By its UUID or its place on the bus: NVML counts all GPUs, whatever CUDA_VISIBLE_DEVICES hides.
    """
    uuid = str(getattr(properties, "uuid", "") or "")
    if uuid:
        for text in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
            handle = ask(nvml, "nvmlDeviceGetHandleByUUID", text)
            if handle is not None:
                return handle
    if all(hasattr(properties, name) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")):
        bus_id = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return ask(nvml, "nvmlDeviceGetHandleByPciBusId", bus_id)
    return None


def keep_gpus_open() -> None:
    """Hold every GPU open in this process until it ends.

    Without persistence mode the driver shuts a GPU down whenever no process has it open, as between two workers, and
    the next one waits for seconds and begins at idle clocks.
    """
    nvml = open_nvml()
    if nvml is not None:
        for i in range(ask(nvml, "nvmlDeviceGetCount") or 0):
            ask(nvml, "nvmlDeviceGetHandleByIndex", i)


def open_monitor(device: str) -> GpuMonitor | None:
    """A monitor of the GPU that torch uses; None on a CPU and where NVML does not answer."""
    if device != "cuda":
        return None
    import torch

    nvml = open_nvml()
    if nvml is None:
        return None
    handle = nvml_handle(nvml, torch.cuda.get_device_properties(torch.cuda.current_device()))
    return None if handle is None else GpuMonitor(nvml, handle)


def nvml_facts(nvml: Any, handle: Any) -> dict[str, Any]:
    """What stays the same of a GPU and its driver, for the manifest; "" or None where it is not told."""
    cuda_version = ask(nvml, "nvmlSystemGetCudaDriverVersion")
    mig_mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    pci = ask(nvml, "nvmlDeviceGetPciInfo", handle)
    return {
        "driver": _text(ask(nvml, "nvmlSystemGetDriverVersion")),
        # the newest that the driver runs; torch brings its own runtime ("cuda")
        "cuda_of_driver": "" if cuda_version is None else f"{cuda_version // 1000}.{cuda_version % 1000 // 10}",
        "mig": None if mig_mode is None else bool(mig_mode[0]),
        "pci_bus_id": "" if pci is None else _text(pci.busId),
        "pcie_generation": ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcie_lanes": ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        "max_sm_clock_mhz": ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, getattr(nvml, "NVML_CLOCK_SM", 1)),
        "power_limit_w": _scaled(ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
    }


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
