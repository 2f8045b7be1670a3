"""What a GPU's driver tells becomes readings and warnings; what it does not tell stays unknown."""

import sys
from types import SimpleNamespace

from gnnpred.collect import gpu_monitor
from gnnpred.collect.gpu_monitor import GpuMonitor, GpuReadings, nvml_facts, nvml_handle, readings_of


class FakeNvml:
    """NVML as a module: functions that ``told`` lacks are not supported; of lists the next."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, **told):
        self.told = told
        self.asked = []

    def __getattr__(self, name):
        if not name.startswith("nvml") or name in self.__dict__.get("absent", ()):
            raise AttributeError(name)

        def function(*arguments):
            self.asked.append((name, arguments))
            if name not in self.told:
                raise self.NVMLError("Not Supported")
            value = self.told[name]
            if callable(value):
                return value(*arguments)
            return (value.pop(0) if len(value) > 1 else value[0]) if isinstance(value, list) else value

        return function


def clock_of(*times):
    left = list(times)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def processes(*pids):
    return [SimpleNamespace(pid=pid) for pid in pids]


def window(nvml, clock):
    monitor = GpuMonitor(nvml, "handle", interval_s=60.0, clock=clock)
    monitor.start()
    return monitor.stop()


def test_a_window_has_clocks_power_and_energy():
    nvml = FakeNvml(
        nvmlDeviceGetClockInfo=lambda _, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetCurrentClocksEventReasons=[0x1, 0x0],
        nvmlDeviceGetTemperature=[50, 61],
        nvmlDeviceGetTotalEnergyConsumption=[1_000_000, 1_900_000],  # mJ
        nvmlDeviceGetPowerUsage=[100_000],  # mW
        nvmlDeviceGetEnforcedPowerLimit=[700_000],
        nvmlDeviceGetComputeRunningProcesses=[processes(7)],
    )
    found = window(nvml, clock_of(10.0, 12.0))
    assert found == GpuReadings(
        sm_clock_mhz=1980, sm_clock_min_mhz=1980, sm_clock_max_mhz=1980, memory_clock_mhz=3201, throttle_reasons=(),
        other_gpu_processes=0, gpu_temperature_c=61, power_w=450.0, energy_j=900.0, power_limit_w=700.0,
    )  # fmt: skip
    assert found.warnings() == []


def test_without_an_energy_counter_power_is_summed_over_time():
    found = window(FakeNvml(nvmlDeviceGetPowerUsage=[100_000, 300_000]), clock_of(0.0, 2.0))
    assert (found.energy_j, found.power_w) == (400.0, 200.0)


def test_a_counter_that_did_not_move_is_no_energy_of_zero():
    nvml = FakeNvml(nvmlDeviceGetTotalEnergyConsumption=[5000], nvmlDeviceGetPowerUsage=[80_000])
    assert window(nvml, clock_of(0.0, 0.5)).energy_j == 40.0
    assert window(FakeNvml(nvmlDeviceGetTotalEnergyConsumption=[5000]), clock_of(0.0, 0.5)).energy_j is None


def test_a_driver_that_tells_nothing_leaves_all_unknown():
    found = window(FakeNvml(), clock_of(0.0, 1.0))
    assert found == GpuReadings()
    assert found.warnings() == []


def test_an_older_library_names_the_reasons_otherwise():
    nvml = FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=[0x4 | 0x1, 0x40])
    nvml.absent = ("nvmlDeviceGetCurrentClocksEventReasons",)
    found = window(nvml, clock_of(0.0, 1.0))
    assert found.throttle_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert found.warnings() == ["throttled: hw_thermal_slowdown"]


def test_the_power_limit_is_noted_and_not_warned_of():
    assert GpuReadings(throttle_reasons=("sw_power_cap",)).warnings() == []


def test_other_processes_and_moving_clocks_are_warned_of():
    nvml = FakeNvml(
        nvmlDeviceGetComputeRunningProcesses=[processes(7, 8, 9), processes(7)],
        nvmlDeviceGetClockInfo=lambda _, kind: 1500,
    )
    assert window(nvml, clock_of(0.0, 1.0)).warnings() == ["other processes on the GPU: 2"]
    moving = GpuReadings(sm_clock_min_mhz=1400, sm_clock_max_mhz=1980)
    assert moving.warnings() == ["SM clock between 1400 and 1980 MHz"]
    assert GpuReadings(sm_clock_min_mhz=1935, sm_clock_max_mhz=1980).warnings() == []


def test_samples_are_taken_while_steps_run():
    nvml = FakeNvml(nvmlDeviceGetPowerUsage=[1000])
    monitor = GpuMonitor(nvml, "handle", interval_s=0.001)
    monitor.start()
    while len(nvml.asked) < 100:  # the thread's own work: two samples alone ask far less
        pass
    monitor.stop()
    asked = len(nvml.asked)
    assert asked >= 100
    assert not any(name.startswith("nvmlShutdown") for name, _ in nvml.asked)


def test_readings_ignore_samples_that_missed_something():
    base = dict.fromkeys(("energy_j", "power_w", "memory_clock_mhz", "clock_reasons", "temperature_c", "num_processes"))
    samples = [{**base, "at_s": float(i), "sm_clock_mhz": clock} for i, clock in enumerate((None, 1000, 1200, 1100))]
    found = readings_of(samples, power_limit_w=None)
    assert (found.sm_clock_mhz, found.sm_clock_min_mhz, found.sm_clock_max_mhz) == (1100, 1000, 1200)
    assert found.throttle_reasons is None


def test_the_gpu_is_found_by_its_identity_never_by_its_number():
    by_uuid = FakeNvml(nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}")
    assert nvml_handle(by_uuid, SimpleNamespace(uuid="GPU-1234")) == "handle of GPU-1234"
    by_bus = FakeNvml(nvmlDeviceGetHandleByPciBusId=lambda bus: f"handle at {bus}")
    properties = SimpleNamespace(uuid="1234", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    assert nvml_handle(by_bus, properties) == "handle at 00000000:1b:00.0"
    assert [arguments[0] for name, arguments in by_bus.asked if name.endswith("UUID")] == [
        "1234", "GPU-1234", "MIG-1234",
    ]  # fmt: skip
    assert nvml_handle(FakeNvml(), properties) is None
    assert nvml_handle(FakeNvml(), SimpleNamespace()) is None


def test_facts_of_driver_and_gpu():
    nvml = FakeNvml(
        nvmlSystemGetDriverVersion=b"570.86",
        nvmlSystemGetCudaDriverVersion=12080,
        nvmlDeviceGetMigMode=lambda _: [1, 1],
        nvmlDeviceGetPciInfo=lambda _: SimpleNamespace(busId=b"00000000:1B:00.0"),
        nvmlDeviceGetMaxPcieLinkGeneration=5,
    )
    assert nvml_facts(nvml, "handle") == {
        "driver": "570.86", "cuda_of_driver": "12.8", "mig": True, "pci_bus_id": "00000000:1B:00.0",
        "pcie_generation": 5, "pcie_lanes": None, "max_sm_clock_mhz": None, "power_limit_w": None,
    }  # fmt: skip
    assert nvml_facts(FakeNvml(), "handle")["mig"] is None


def test_a_machine_without_nvml_has_no_monitor(monkeypatch):
    assert gpu_monitor.open_monitor("cpu") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert gpu_monitor.open_nvml() is None
    pynvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    assert gpu_monitor.open_nvml() is None, "no driver: nvmlInit raises"
    pynvml.told["nvmlInit"] = None
    assert gpu_monitor.open_nvml() is pynvml


def test_gpus_are_held_open_so_that_the_driver_stays_between_workers(monkeypatch):
    nvml = FakeNvml(nvmlDeviceGetCount=2, nvmlDeviceGetHandleByIndex=lambda i: f"handle {i}")
    monkeypatch.setattr(gpu_monitor, "open_nvml", lambda: nvml)
    gpu_monitor.keep_gpus_open()
    assert nvml.asked == [
        ("nvmlDeviceGetCount", ()), ("nvmlDeviceGetHandleByIndex", (0,)), ("nvmlDeviceGetHandleByIndex", (1,)),
    ]  # fmt: skip
    for silent in (None, FakeNvml()):
        monkeypatch.setattr(gpu_monitor, "open_nvml", lambda found=silent: found)
        gpu_monitor.keep_gpus_open()
