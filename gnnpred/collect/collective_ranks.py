"""What one rank of a timed collective does: one process group for all calls, a line of JSON for every call that ends.

Sizes, bandwidths and the mean over ranks are those of nccl-tests.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gnnpred.collect.collective_launch import CollectiveLaunch
from gnnpred.collect.collective_recipe import TORCH_DTYPES, CollectiveCall
from gnnpred.collect.measure import has_settled, timed_on_gpu, timed_on_host
from gnnpred.collect.recipe import MeasureSettings
from gnnpred.communication.collectives import bus_factor
from gnnpred.errors import GnnpredError

if TYPE_CHECKING:
    import torch

UNSTEADY_SPREAD_PCT = 50.0  # p10 to p90 of microseconds spans more than that of whole steps
_WINDOW = 5  # calls between two looks at whether times have settled
_MIN_TIMED = 5


class _Ranks:
    """This rank, and the group on the CPU that agrees on what to do beside the one that is timed."""

    def __init__(self, device: str, place: dict[str, Any]) -> None:
        import torch.distributed as dist

        from gnnpred.collect.ranks import Ranks

        Ranks(device, **place)
        self.rank: int = place["rank"]
        self.size: int = place["world_size"]
        self.device = device
        self._control = dist.new_group(backend="gloo")

    def agree(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, 0, group=self._control)
        return box[0]

    def all_of(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values


def time_collectives(task: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Time the calls of a :class:`~gnnpred.collect.collective_launch.CollectiveLaunch`; every rank of ``place`` does.

    Rank 0 appends to the launch's file: first the manifest, then ``{"status", "reason", "result"}`` per call. Raises
    GnnpredError where no process group can be made.
    """
    launch = CollectiveLaunch.of_message(task)
    try:
        ranks = _Ranks(launch.device, place)
    except (RuntimeError, ValueError) as error:
        raise GnnpredError(f"cannot start a process group: {_first_line(error)}") from error
    if ranks.rank:
        for call in launch.calls:
            _timed(call, ranks, launch.settings)
        return {}
    with Path(launch.lines).open("w", encoding="utf-8") as lines:
        _write_line(lines, {"manifest": _manifest(launch.device)})
        for call in launch.calls:
            _write_line(lines, _timed(call, ranks, launch.settings))
    return {}


def _write_line(lines: TextIO, content: dict[str, Any]) -> None:
    lines.write(json.dumps(content) + "\n")
    lines.flush()


def _manifest(device: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from gnnpred.collect.probe import probe

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else ""
    return {**probe(device), "backend": dist.get_backend(), "nccl": nccl}


def _timed(call: CollectiveCall, ranks: _Ranks, settings: MeasureSettings) -> dict[str, Any]:
    """``{"status", "reason", "result"}``; the same status on every rank, so that none waits for another."""
    run: Callable[[], None] | None = None
    failure = None
    try:
        run, num_bytes = _prepared(call, ranks)
    except Exception as error:  # allocators and types raise all sorts; the row says what
        failure = _failure_of(error)
    if failure := _first_failure(ranks, failure):
        return failure
    try:
        run()
        _finish(ranks)
    except Exception as error:  # the backend lacks the operation or the type
        failure = _failure_of(error)
    if failure := _first_failure(ranks, failure):
        return failure
    num_warmup, is_settled, call_s = _warm_up(run, ranks, settings)
    fitting = settings.max_timed_s / max(call_s, 1e-9)
    num_calls = ranks.agree(max(_MIN_TIMED, int(min(settings.steps, fitting))))
    ranks.all_of(None)  # all begin together
    started = time.perf_counter()
    time_calls = timed_on_gpu if ranks.device == "cuda" else timed_on_host
    own_us = [each * 1e3 for each in time_calls(run, num_calls)]
    wall_us = (time.perf_counter() - started) * 1e6 / num_calls
    by_rank = ranks.all_of(own_us)
    times_us = [statistics.fmean(each) for each in zip(*by_rank, strict=True)]
    figures = _figures(call, num_bytes, times_us, wall_us, num_warmup, is_settled)
    return {"status": "ok", "reason": "", "result": figures}


def _figures(
    call: CollectiveCall, num_bytes: int, times_us: Sequence[float], wall_us: float, num_warmup: int, is_settled: bool
) -> dict[str, Any]:
    ordered = sorted(times_us)
    median_us = statistics.median(ordered)
    p10_us, p90_us = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    spread_pct = (p90_us - p10_us) / median_us * 100
    warning = ""
    if spread_pct > UNSTEADY_SPREAD_PCT:
        warning = f"not steady: p10 to p90 spans {spread_pct:.0f} % of the median"
    elif not is_settled:
        warning = f"still speeding up or slowing down after {num_warmup} calls"
    algorithm_gb_s = num_bytes / median_us / 1e3
    return {
        "num_bytes": num_bytes,
        "time_us": median_us,
        "time_p10_us": p10_us,
        "time_p90_us": p90_us,
        "wall_clock_us": wall_us,
        "algbw_gb_s": algorithm_gb_s,
        "busbw_gb_s": algorithm_gb_s * bus_factor(call.operation, call.gpus),
        "num_calls": len(times_us),
        "num_warmup_calls": num_warmup,
        "warning": warning,
    }


def _first_failure(ranks: _Ranks, own: dict[str, Any] | None) -> dict[str, Any] | None:
    """Any rank's failure, on every rank."""
    return next((each for each in ranks.all_of(own) if each is not None), None)


def _failure_of(error: Exception) -> dict[str, Any]:
    import torch.distributed as dist

    from gnnpred.collect.memory_limit import is_out_of_memory

    status = "unsupported"
    if is_out_of_memory(error):
        status = "oom"
    elif isinstance(error, dist.DistError):  # the network or a peer, not the operation
        status = "error"
    return {"status": status, "reason": f"{type(error).__name__}: {_first_line(error)}", "result": {}}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


# ---------------------------------------------------------------------------------------- operations


def _prepared(call: CollectiveCall, ranks: _Ranks) -> tuple[Callable[[], None], int]:
    """The call over buffers of zeros, and the bytes of its whole buffer: as many as divide evenly over the ranks."""
    import torch
    import torch.distributed as dist

    dtype = getattr(torch, TORCH_DTYPES[call.dtype], None)
    if dtype is None:
        raise GnnpredError(f"this torch has no {TORCH_DTYPES[call.dtype]}")
    size = dtype.itemsize
    is_split = call.operation in ("all_gather", "reduce_scatter", "all_to_all")
    num_elements = call.num_bytes // size // (ranks.size if is_split else 1) * (ranks.size if is_split else 1)
    if num_elements == 0:
        raise GnnpredError(f"{call.num_bytes} bytes are too few for {call.gpus} ranks")

    def zeros(count: int) -> "torch.Tensor":
        # through bytes, since not every type can be filled
        return torch.zeros(count * size, dtype=torch.uint8, device=ranks.device).view(dtype)

    whole = zeros(num_elements)
    part = zeros(num_elements // ranks.size) if is_split else whole
    match call.operation:
        case "all_reduce":

            def run() -> None:
                dist.all_reduce(whole)

        case "all_gather":
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

            def run() -> None:
                gather(whole, part)

        case "reduce_scatter":
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

            def run() -> None:
                scatter(part, whole)

        case "all_to_all":
            received = zeros(num_elements)

            def run() -> None:
                dist.all_to_all_single(received, whole)

        case "broadcast":

            def run() -> None:
                dist.broadcast(whole, 0)

        case "reduce":

            def run() -> None:
                dist.reduce(whole, 0)

        case _:  # send_recv: every rank sends to the next one
            received = zeros(num_elements)
            following, previous = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size

            def run() -> None:
                sends = [dist.P2POp(dist.isend, whole, following), dist.P2POp(dist.irecv, received, previous)]
                for work in dist.batch_isend_irecv(sends):
                    work.wait()

    return run, num_elements * size


def _finish(ranks: _Ranks) -> None:
    import torch

    if ranks.device == "cuda":
        torch.cuda.synchronize()


def _warm_up(run: Callable[[], None], ranks: _Ranks, settings: MeasureSettings) -> tuple[int, bool, float]:
    """Calls made, whether their times had settled on rank 0, and the seconds of the last one."""
    times_ms: list[float] = []
    started = time.perf_counter()
    while True:
        for _ in range(_WINDOW):
            before = time.perf_counter()
            run()
            _finish(ranks)
            times_ms.append((time.perf_counter() - before) * 1e3)
        is_settled = len(times_ms) >= settings.min_warmup_steps and has_settled(times_ms)
        is_over = len(times_ms) >= settings.max_warmup_steps or time.perf_counter() - started > settings.max_warmup_s
        is_settled, is_over = ranks.agree((is_settled, is_over))
        if is_settled or is_over:
            return len(times_ms), is_settled, statistics.median(times_ms[-_WINDOW:]) / 1e3
