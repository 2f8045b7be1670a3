"""``collectives.csv``: timed collectives in the columns that :mod:`gnnpred.communication_fit.collectives` reads."""

from typing import Any

from gnnpred.collect.collective_recipe import CollectiveCall
from gnnpred.collect.recipe import Recipe
from gnnpred.collect.store import CollectionStore, StoredRow
from gnnpred.collect.table import COLLECTIVES_FILE, FAILED_FILE, write_csv
from gnnpred.communication.collectives import estimate_collective
from gnnpred.communication.fabrics import names_from_text, resolve_fabric
from gnnpred.errors import GnnpredError
from gnnpred.hardware import find_device

COLLECTIVE_COLUMNS = (
    "source", "gpu", "gpus", "nodes", "interconnect_intra", "interconnect_inter", "nccl_version", "collective", "dtype",
    "bytes", "time_us", "algbw_gbs", "busbw_gbs", "note", "time_p10_us", "time_p90_us", "wall_clock_us", "num_calls",
    "backend", "framework_version", "cuda", "driver", "os", "cpu", "warning", "predicted_us", "predicted_basis",
)  # fmt: skip
_FAILED_COLUMNS = ("operation", "num_bytes", "dtype", "gpus", "nodes", "status", "reason")


def write_collective_tables(store: CollectionStore, recipe: Recipe) -> None:
    """Write both tables anew from the store, rows in the recipe's order."""
    rows = {row.config_id: row for row in store.rows()}
    timed, failed = [], []
    for call in recipe.configurations:
        row = rows.get(call.config_id)
        if row is None:
            continue
        if row.status == "ok":
            timed.append(_cells(call, row, recipe))
        else:
            failed.append({**row.configuration, "status": row.status, "reason": row.reason})
    write_csv(store.folder / COLLECTIVES_FILE, COLLECTIVE_COLUMNS, timed)
    write_csv(store.folder / FAILED_FILE, _FAILED_COLUMNS, failed)


def _cells(call: CollectiveCall, row: StoredRow, recipe: Recipe) -> dict[str, Any]:
    result, manifest = row.result, row.result["manifest"]
    predicted_us, basis = predicted(call, result["num_bytes"], manifest)
    return {
        "source": f"gnnpred collect:{recipe.name}:{row.config_id}",
        "gpu": manifest["gpu"],
        "gpus": call.gpus,
        "nodes": call.nodes,
        "interconnect_intra": manifest["interconnect"] if call.gpus_per_node > 1 else "",
        "interconnect_inter": manifest["network"] if call.nodes > 1 else "",
        "nccl_version": manifest["nccl"],
        "collective": call.operation,
        "dtype": call.dtype,
        "bytes": result["num_bytes"],
        "time_us": f"{result['time_us']:.6g}",
        "algbw_gbs": f"{result['algbw_gb_s']:.6g}",
        "busbw_gbs": f"{result['busbw_gb_s']:.6g}",
        "note": f"torch.distributed, median of {result['num_calls']} calls, mean over ranks",
        "time_p10_us": f"{result['time_p10_us']:.6g}",
        "time_p90_us": f"{result['time_p90_us']:.6g}",
        "wall_clock_us": f"{result['wall_clock_us']:.6g}",
        "num_calls": result["num_calls"],
        "backend": manifest["backend"],
        "framework_version": manifest["torch"],
        "cuda": manifest["cuda"],
        "driver": manifest["driver"],
        "os": manifest["os"],
        "cpu": manifest["cpu"],
        "warning": result["warning"],
        "predicted_us": "" if predicted_us is None else f"{predicted_us:.6g}",
        "predicted_basis": basis,
    }


def predicted(call: CollectiveCall, num_bytes: int, manifest: dict[str, Any]) -> tuple[float | None, str]:
    """What ``gnnpred collective`` says of the call in microseconds, and on what it rests; None where no list of GPUs
    or fabrics knows the machine.
    """
    if manifest["device"] != "cuda":
        return None, ""
    try:
        intra, inter = names_from_text(f"{manifest['interconnect']} + {manifest['network']}")
        fabric = resolve_fabric(
            device=find_device(manifest["gpu"]), gpus=call.gpus, nodes=call.nodes, interconnect=intra, inter_node=inter
        )
        estimate = estimate_collective(
            call.operation, num_bytes, fabric, dtype=call.dtype, nccl_version=manifest["nccl"]
        )
    except GnnpredError:
        return None, ""
    return estimate.time_ms * 1e3, estimate.basis
