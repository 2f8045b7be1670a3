"""One training step on this machine: built, warmed up until steady, timed. Runs in a worker process of its own."""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gnnpred.collect.gpu_monitor import GpuReadings, open_monitor
from gnnpred.collect.kernel_times import profile_step
from gnnpred.collect.largest_batch import find_largest_batch, next_smaller
from gnnpred.collect.memory_limit import is_out_of_memory, limited_memory
from gnnpred.collect.ranks import Ranks
from gnnpred.collect.recipe import Configuration, MeasureSettings
from gnnpred.collect.step import Step, build_step
from gnnpred.job import Precision

if TYPE_CHECKING:
    import torch

# Warm-up ends when the medians of two successive windows differ by less than this.
_STABLE_PCT = 3.0
_WARMUP_WINDOW = 5
_MIN_TIMED_STEPS = 3
# Above this distance of the 10th from the 90th percentile, in per cent of the median, a run counts as unsteady.
UNSTEADY_SPREAD_PCT = 15.0
# Medians of the first and the last third of the timed steps that are further apart: something heats up or fills up.
DRIFT_PCT = 5.0
# Two steps see every allocation of later ones: gradients and the optimizer's state are made in the first.
_NUM_TRIAL_STEPS = 2
_MAX_SMALLER_BATCHES = 3  # tried where the largest one that fit does not fit again
_SEED = 0


def measure(
    configuration: Configuration, settings: MeasureSettings, *, device: str, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Figures of one configuration on ``device`` (cpu or cuda): times in ms, memory in MiB, power in W, energy in J.

    ``ranks``: the processes of a distributed step, each of which calls this. Raises GnnpredError for a model that
    cannot be built or run so, torch.OutOfMemoryError as torch does.
    """
    import torch

    torch.manual_seed(_SEED + (ranks.rank if ranks else 0))  # every rank has data of its own
    flags = _set_flags(configuration.precision, settings)
    if configuration.batch_size is not None:
        return {**_measured(configuration, settings, device, ranks), **flags}
    started = time.perf_counter()
    with limited_memory(device, settings.largest_batch_memory_gib):
        largest = find_largest_batch(
            lambda batch_size: _fits(replace(configuration, batch_size=batch_size), device),
            limit=settings.largest_batch_limit,
            max_s=settings.largest_batch_s,
        )
        search_s = time.perf_counter() - started
        if not largest.batch_size:
            raise MemoryError("out of memory: not even a batch of 1 fits")
        result, batch_size = _measured_largest(configuration, settings, device, largest.batch_size)
    notes = [result["warning"]]
    if largest.ended_early:
        notes.append(f"the search for the largest batch ended {largest.ended_early}")
    if batch_size < largest.batch_size:
        notes.append(f"a batch of {largest.batch_size} fit in the search, not when it was measured")
    result["warning"] = "; ".join(filter(None, notes))
    return {**result, **flags, "batch_search_s": search_s, "num_batch_tries": largest.num_tries}


def _measured_largest(
    configuration: Configuration, settings: MeasureSettings, device: str, batch_size: int
) -> tuple[dict[str, Any], int]:
    """Figures of the batch found, or of one a little smaller: memory is never free in the same pieces twice."""
    for tries_left in range(_MAX_SMALLER_BATCHES, -1, -1):
        try:
            return _measured(replace(configuration, batch_size=batch_size), settings, device), batch_size
        except Exception as error:
            smaller = next_smaller(batch_size)
            if not (tries_left and smaller and is_out_of_memory(error)):
                raise
        batch_size = smaller
        _free_memory(device)
    raise AssertionError("the last try returns or raises")


def _fits(configuration: Configuration, device: str) -> bool:
    """Whether some steps of that batch run (uncompiled: compiling every try would take minutes)."""
    import torch

    step = None
    try:
        step = build_step(replace(configuration, compile=False), device)
        for _ in range(_NUM_TRIAL_STEPS):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return True
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    finally:
        del step
        _free_memory(device)


def _free_memory(device: str) -> None:
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _measured(
    configuration: Configuration, settings: MeasureSettings, device: str, ranks: Ranks | None = None
) -> dict[str, Any]:
    import torch

    def agreed(value: float) -> float:  # ranks that took different numbers of steps would wait for each other for ever
        return ranks.agree(value) if ranks else value

    started = time.perf_counter()
    step = build_step(configuration, device, ranks)
    monitor = open_monitor(device)  # here: it takes a moment, in which a warm GPU would rest
    built_at = time.perf_counter()
    warmup_ms, is_stable = _warm_up(step, settings, device, agreed)
    warmed_at = time.perf_counter()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    num_steps = int(agreed(_num_timed_steps(warmup_ms[-1], settings)))
    if monitor is not None:
        monitor.start()
    timed_from = time.perf_counter()
    step_ms = timed_on_gpu(step, num_steps) if device == "cuda" else timed_on_host(step, num_steps)
    wall_ms = (time.perf_counter() - timed_from) * 1e3 / num_steps
    num_more = 0
    if monitor is not None:  # power is averaged for long enough
        num_more = max(0, math.ceil((settings.min_energy_s - wall_ms * num_steps / 1e3) * 1e3 / wall_ms))
    num_more = int(agreed(num_more))
    for _ in range(num_more):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    readings, num_window_steps = monitor.stop() if monitor is not None else GpuReadings(), num_steps + num_more
    loss = float(step())
    ordered = sorted(step_ms)
    median_ms = statistics.median(step_ms)
    p10_ms, p90_ms = (ordered[round(share * (num_steps - 1))] for share in (0.1, 0.9))
    spread_pct = (p90_ms - p10_ms) / median_ms * 100
    warnings = [_steadiness_warning(is_stable, len(warmup_ms), spread_pct), _drift_warning(step_ms)]
    result = {
        "batch_size": configuration.batch_size,
        "step_time_ms": median_ms,
        "step_p10_ms": p10_ms,
        "step_p90_ms": p90_ms,
        "wall_clock_ms": wall_ms,
        "spread_pct": spread_pct,
        "drift_pct": drift_pct(step_ms),
        "num_steps": num_steps,
        "num_warmup_steps": len(warmup_ms),
        "peak_memory_mib": _peak_memory_mib(device),
        "input": _shape_text(step.inputs),
        "loss": loss if math.isfinite(loss) else str(loss),
        "clock": "cuda events" if device == "cuda" else "wall clock",
        **_gpu_figures(readings, num_window_steps, has_energy=settings.min_energy_s > 0),
        "build_s": built_at - started,
        "warmup_s": warmed_at - built_at,
        "measure_s": time.perf_counter() - warmed_at,
        "profile_s": 0.0,
    }
    warnings += readings.warnings()
    is_alone = ranks is None  # a rank that cannot be profiled would leave the others waiting
    if is_alone and not configuration.compile and is_profiled(configuration.config_id, settings.profile_share):
        before = time.perf_counter()
        try:
            result |= profile_step(step, device=device, precision=configuration.precision).as_dict()
        except Exception as error:  # a driver that forbids it, full buffers, another version's events: the row stands
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            warnings.append(f"operators not timed: {reason}")
        result["profile_s"] = time.perf_counter() - before
    result = {**result, "warning": "; ".join(filter(None, warnings))}
    return ranks.joined(result) if ranks else result


def _gpu_figures(readings: GpuReadings, num_steps: int, *, has_energy: bool) -> dict[str, Any]:
    figures = asdict(readings)
    energy_j = figures.pop("energy_j") if has_energy else None
    return {
        **figures,
        "power_w": readings.power_w if has_energy else None,
        "energy_per_step_j": None if energy_j is None else energy_j / num_steps,
    }


def is_profiled(config_id: str, share: float) -> bool:
    """Whether a configuration is of the sample whose operators are timed: the same ones in every run."""
    return int(config_id[:8], 16) < share * 2**32


def _steadiness_warning(is_stable: bool, num_warmup_steps: int, spread_pct: float) -> str:
    if spread_pct > UNSTEADY_SPREAD_PCT:
        return f"not steady: p10 to p90 of the step time spans {spread_pct:.0f} % of the median"
    return "" if is_stable else f"still speeding up or slowing down after {num_warmup_steps} warm-up steps"


def drift_pct(step_ms: Sequence[float]) -> float:
    """By how much the median of the last third of the steps is above that of the first, in per cent."""
    third = max(1, len(step_ms) // 3)
    first, last = statistics.median(step_ms[:third]), statistics.median(step_ms[-third:])
    return (last / first - 1) * 100


def _drift_warning(step_ms: Sequence[float]) -> str:
    drift = drift_pct(step_ms)
    if abs(drift) <= DRIFT_PCT:
        return ""
    return f"drifting: the last third of the steps took {drift:+.0f} % of the first's time"


def _set_flags(precision: Precision, settings: MeasureSettings) -> dict[str, Any]:
    """TF32 and algorithm search, set whatever the version's defaults are; returns what was set."""
    import torch

    allow_tf32 = precision is Precision.TF32
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    return {"allow_tf32": allow_tf32, "cudnn_benchmark": settings.cudnn_benchmark}


# ---------------------------------------------------------------------------------------- timing


_GO_ON, _SETTLED, _LATE = range(3)


def _warm_up(
    step: Step, settings: MeasureSettings, device: str, agreed: Callable[[float], float]
) -> tuple[list[float], bool]:
    """Times (ms) of the warm-up steps, and whether they had settled when warm-up ended."""
    import torch

    times_ms: list[float] = []
    started = time.perf_counter()
    while len(times_ms) < settings.max_warmup_steps:
        before = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - before) * 1e3)
        if len(times_ms) < settings.min_warmup_steps:
            continue
        is_late = time.perf_counter() - started > settings.max_warmup_s
        decision = agreed(_SETTLED if has_settled(times_ms) else _LATE if is_late else _GO_ON)
        if decision == _SETTLED:
            return times_ms, True
        if decision == _LATE:
            break
    return times_ms, has_settled(times_ms, window=min(_WARMUP_WINDOW, len(times_ms) // 2))


def has_settled(times_ms: Sequence[float], *, window: int = _WARMUP_WINDOW) -> bool:
    """Whether the medians of the last two windows agree."""
    if not 0 < 2 * window <= len(times_ms):
        return False
    last = statistics.median(times_ms[-window:])
    before = statistics.median(times_ms[-2 * window : -window])
    return abs(last - before) <= _STABLE_PCT / 100 * last


def _num_timed_steps(step_ms: float, settings: MeasureSettings) -> int:
    fitting = int(settings.max_timed_s * 1e3 / max(step_ms, 1e-6))
    return max(_MIN_TIMED_STEPS, min(settings.steps, fitting))


def timed_on_host(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Times in ms by the host's clock."""
    times_ms = []
    for _ in range(num_steps):
        before = time.perf_counter()
        step()
        times_ms.append((time.perf_counter() - before) * 1e3)
    return times_ms


def timed_on_gpu(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Times in ms between events that the GPU itself records after every step; the host waits at the end alone."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for i in range(num_steps):
        step()
        events[i + 1].record()
    torch.cuda.synchronize()
    return [events[i].elapsed_time(events[i + 1]) for i in range(num_steps)]


def _peak_memory_mib(device: str) -> float | None:
    """Tensors that torch held at most on a GPU; on the CPU the largest resident size of this process."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    if os.name != "posix":
        return None
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB on Linux, bytes on macOS
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _shape_text(inputs: "Sequence[torch.Tensor]") -> str:
    """``3x224x224``: sizes without the batch, inputs separated by spaces."""
    return " ".join("x".join(str(size) for size in each.shape[1:]) or "1" for each in inputs)
