"""What this machine is: the manifest that every row keeps, and a description of a CPU that predictions can use."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnnpred.collect.gpu_monitor import nvml_facts, nvml_handle, open_nvml
from gnnpred.collect.interconnect import links_between, network_ports
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.hardware import find_device
from gnnpred.units import GB, GIB

_MATMUL_SIZE = 1024
_COPY_BYTES = 256 << 20
_NUM_TRIES = 3
# AVX2: two units of 8 fp32 lanes, 2 flops each (Intel and AMD since 2013 and 2019)
_FLOPS_PER_CYCLE_AND_CORE = 32


def probe(device: str | None) -> dict[str, Any]:
    """The manifest of this process on ``device`` (cpu, cuda; None: cuda where there is a GPU).

    Raises UsageError where there is no such device.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    manifest: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "num_cpu_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
        "host_memory_gib": round(_host_memory_gb() * GB / GIB, 1),
        "cuda": torch.version.cuda or "",
        "cudnn": "",
        "driver": "",
        "compute_capability": None,
        "interconnect": "",
        "network": network_ports(),
    }
    if device == "cpu":
        return {**manifest, "gpu": manifest["cpu"], "num_gpus": max(2, os.cpu_count() or 1)}
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA GPU here; use --device cpu")
    require_one_type([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        **manifest,
        "gpu": _listed_name(torch.cuda.get_device_name()),
        "gpu_memory_mib": properties.total_memory / 2**20,
        "num_gpus": torch.cuda.device_count(),
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "nccl": _nccl_version(),
        "compute_capability": float("{}.{}".format(*torch.cuda.get_device_capability())),
        **_driver_facts(properties),
    }


def require_one_type(names: Sequence[str]) -> None:
    """Raises UsageError for visible GPUs of several names: their rows do not make one collection."""
    if len(set(names)) > 1:
        listed = "; ".join(f"{i}: {names[i]}" for i in range(len(names)))
        raise UsageError(f"this machine has GPUs of several types ({listed}): choose some with CUDA_VISIBLE_DEVICES")


def _nccl_version() -> str:
    """NCCL that torch was built with, "" for a build without (Windows)."""
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, ImportError, RuntimeError):
        return ""


def _driver_facts(properties: Any) -> dict[str, Any]:
    """What NVML tells of driver and GPU; the driver's version at least, where nvidia-smi answers."""
    nvml = open_nvml()
    handle = None if nvml is None else nvml_handle(nvml, properties)
    if handle is None:
        return {"driver": _driver_version()}
    return {**nvml_facts(nvml, handle), "interconnect": links_between(nvml, _visible_handles(nvml))}


def _visible_handles(nvml: Any) -> list[Any]:
    import torch

    return [nvml_handle(nvml, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]


def _listed_name(name: str) -> str:
    """The name in our tables where the GPU is listed, else the driver's name for it."""
    try:
        return find_device(name).name
    except GnnpredError:
        return name


def cpu_name() -> str:
    """The processor's own name for itself, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _driver_version() -> str:
    """NVIDIA driver, "" where nvidia-smi does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()


def measured_cpu() -> dict[str, Any]:
    """A device file's fields for this CPU: peaks are measured with matmul and copies, about two seconds."""
    import torch

    num_threads = torch.get_num_threads()
    fp32_tflops = _matmul_tflops(torch.float32)
    clock_mhz = _clock_mhz() or fp32_tflops * 1e6 / (num_threads * _FLOPS_PER_CYCLE_AND_CORE)
    return {
        "name": cpu_name(),
        "architecture": "CPU",
        "num_sms": num_threads,
        "boost_clock_mhz": round(clock_mhz),
        "fp32_tflops": fp32_tflops,
        "fp64_tflops": _matmul_tflops(torch.float64),
        "bf16_tensor_tflops": _matmul_tflops(torch.bfloat16),
        "memory_gb": round(_host_memory_gb(), 1),
        "mem_bandwidth_gb_s": _copy_gb_s(),
        "note": f"peaks measured with {num_threads} threads",
    }


def _matmul_tflops(dtype: Any) -> float:
    import torch

    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE).to(dtype) for _ in range(2))
    return float(f"{2 * _MATMUL_SIZE**3 / _best_s(lambda: a @ b) / 1e12:.4g}")


def _copy_gb_s() -> float:
    import torch

    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return float(f"{2 * _COPY_BYTES / _best_s(lambda: target.copy_(source)) / 1e9:.4g}")


def _best_s(work: Any) -> float:
    times = []
    work()
    for _ in range(_NUM_TRIES):
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return min(times)


def _clock_mhz() -> float | None:
    try:
        khz = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text(encoding="utf-8")
        return float(khz) / 1e3
    except (OSError, ValueError):
        return None


def _host_memory_gb() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, OSError, ValueError):
        return 8.0  # nothing that is predicted but a warning depends on it
