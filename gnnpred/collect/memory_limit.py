"""Memory that a measured step may take, and how running out of it is told from other errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gnnpred.errors import GnnpredError
from gnnpred.units import GIB

# Of a CPU's available memory, where no limit is given: well away from swap, whatever else runs.
_DEFAULT_CPU_SHARE = 0.5
# of torch's allocators, cuBLAS, C++, oneDNN and the system, in lower case
_MARKS = (
    "not enough memory", "out of memory", "can't allocate memory", "cublas_status_alloc_failed", "bad_alloc",
    "could not create a memory", "cannot allocate memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch ran out of GPU memory, or the CPU's allocator (a plain RuntimeError) or cuDNN and cuBLAS did."""
    import torch

    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
            mark in str(error).lower() for mark in _MARKS
        ):
            return True
        error = error.__cause__  # building wraps every error of a model's constructor
    return False


@contextmanager
def limited_memory(device: str, limit_gib: float) -> Iterator[None]:
    """Let this process allocate ``limit_gib`` more (0: a GPU's own memory, on a CPU half of what is available).

    What goes beyond fails as when memory is exhausted. Raises GnnpredError on a CPU whose system cannot enforce it.
    """
    if device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if limit_gib:
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total))
        try:
            yield
        finally:
            if limit_gib:
                torch.cuda.set_per_process_memory_fraction(1.0)
        return
    try:
        import resource

        used = _bytes_of("/proc/self/status", "VmData")
        allowed = limit_gib * GIB or _DEFAULT_CPU_SHARE * available_memory_bytes()
    except (ImportError, OSError, KeyError) as error:
        raise GnnpredError(
            "this system sets no limit on a process's memory: name batch sizes instead of the largest"
        ) from error
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(used + allowed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available_memory_bytes() -> int:
    """What processes can still allocate without swapping, files' caches included (Linux).

    Raises OSError or KeyError where the system does not tell.
    """
    return _bytes_of("/proc/meminfo", "MemAvailable")


def _bytes_of(file: str, name: str) -> int:
    """A line ``name:  123 kB`` of Linux's process file system."""
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
