"""Ranks of a distributed step: their process group, the module spread over them, and what they agree on."""

import os
import sys
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Peers that wait longer are ended by the time limit of the configuration; this only has to be longer.
_TIMEOUT = timedelta(hours=1)


class Ranks:
    """This process among those that share a step: one GPU each (NCCL), or one process each of a CPU (gloo).

    ``init_method`` is how they find each other, as ``torch.distributed.init_process_group`` takes it, or
    ``store://HOST:PORT/PREFIX``: keys with that prefix in a store that another process keeps.
    """

    def __init__(self, device: str, *, rank: int, local_rank: int, world_size: int, init_method: str) -> None:
        import torch
        import torch.distributed as dist

        self.rank = rank
        self.size = world_size
        self._device = device
        # as torchrun sets them: a model's own code, and device meshes, look there
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        elif init_method.startswith("file:") and sys.platform == "linux":
            # the machine's name need not lead to an address, and these ranks are all here
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where: dict[str, Any] = {"init_method": init_method}
        if init_method.startswith("store://"):
            where = {"store": _store_at(init_method.removeprefix("store://"))}
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=_TIMEOUT, **where)

    def spread(self, module: "torch.nn.Module", strategy: str, half: "torch.dtype | None") -> "torch.nn.Module":
        """The module as these ranks train it; ``half`` is autocast's type, None without autocast.

        ddp: DistributedDataParallel with its defaults. fsdp: ``fully_shard`` of each repeated layer and of the rest;
        under autocast weights and gradients travel in the half type.
        """
        import torch

        if strategy == "ddp":
            devices = [torch.cuda.current_device()] if self._device == "cuda" else None
            return torch.nn.parallel.DistributedDataParallel(module, device_ids=devices)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert strategy == "fsdp", strategy
        mesh = init_device_mesh(self._device, (self.size,))
        policy = MixedPrecisionPolicy(param_dtype=half)
        for layer in repeated_layers(module):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    def agree(self, value: float) -> float:
        """Rank 0's ``value``, on all: whoever calls this waits for the others."""
        import torch
        import torch.distributed as dist

        shared = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.broadcast(shared, src=0)
        return shared.item()

    def joined(self, result: dict[str, Any]) -> dict[str, Any]:
        """One result of all ranks' results: rank 0's times, the slowest rank's beside them, the highest memory."""
        import torch.distributed as dist

        results: list[dict[str, Any]] = [{} for _ in range(self.size)]
        dist.all_gather_object(results, result)
        return join_results(results)


def _store_at(place: str) -> "torch.distributed.Store":
    import torch.distributed as dist

    address, _, prefix = place.partition("/")
    host, _, port = address.rpartition(":")
    return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT))


def join_results(results: list[dict[str, Any]]) -> dict[str, Any]:
    """See :meth:`Ranks.joined`; ``results`` in the order of ranks."""
    first = results[0]
    memory = [each["peak_memory_mib"] for each in results if each["peak_memory_mib"] is not None]
    losses = [each["loss"] for each in results if isinstance(each["loss"], str)]  # not finite
    warnings = [
        f"{text}{f' (rank {rank})' if rank else ''}"
        for rank in range(len(results))
        for text in filter(None, results[rank]["warning"].split("; "))
    ]
    return {
        **first,
        "step_time_slowest_ms": max(each["step_time_ms"] for each in results),
        "peak_memory_mib": max(memory, default=None),
        "loss": losses[0] if losses else first["loss"],
        "warning": "; ".join(warnings),
    }


def repeated_layers(module: "torch.nn.Module") -> "list[torch.nn.Module]":
    """The blocks that are a unit of FSDP each: members of lists and sequences that hold several of one class.

    Of nested ones the outermost; blocks without submodules (single activations, single products) stay with the rest,
    which is one more unit.
    """
    import torch

    found: list[torch.nn.Module] = []
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    counts = Counter(type(each) for each in module.children())
    for child in module.children():
        has_parts = next(child.children(), None) is not None and next(child.parameters(), None) is not None
        if is_list and has_parts and counts[type(child)] > 1:
            found.append(child)
        else:
            found += repeated_layers(child)
    return found
