"""Rows of one GPU's compute, taken out of runs of sharded language models on several GPUs.

Under full sharding every GPU runs the whole model on its micro-batch; all-gathers of weights and reduce-scatters of
gradients run beside the compute. Where they are short against the step, the time of one micro-batch less what they
and the optimizer add is what one GPU would take with its weights in memory: a ``forward_backward`` row.

What is taken off, per micro-batch (:func:`estimate_overhead`):

* of the collectives (two all-gathers of the weights and one reduce-scatter, in the half type), the part of one layer,
  which nothing hides, and what compute loses while the others run (``contention`` of
  :mod:`gnnpred.communication.timeline`);
* of the update, seven passes over this GPU's share of fp32 weights, gradients and two moments, spread over the
  micro-batches of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gnnpred.communication.collectives import all_gather_ms, reduce_scatter_ms
from gnnpred.communication.fabrics import names_from_text, resolve_fabric
from gnnpred.communication.timeline import step_constants
from gnnpred.corpus.store import MeasurementRow
from gnnpred.graph import OpGraph
from gnnpred.job import Phase, Precision
from gnnpred.passes.checkpointing import checkpointed_region

MAX_COMMUNICATION_SHARE = 0.25  # of a micro-batch's time, hidden or not
MIN_RELATIVE_SPEED = 0.7
_HALF_BYTES = 2
_ADAM_PASSES = 7  # reads weight, gradient and two moments, writes all but the gradient


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What several GPUs and the update add to one micro-batch, in ms."""

    communication_ms: float  # all collectives, hidden or not
    exposed_ms: float
    update_ms: float


def estimate_overhead(row: MeasurementRow, graph: OpGraph) -> Overhead:
    """Overhead of a fully sharded run of ``graph``."""
    device = row.spec
    interconnect, inter_node = names_from_text(row.interconnect)
    fabric = resolve_fabric(
        device=device, gpus=row.gpus, nodes=row.nodes, interconnect=interconnect, inter_node=inter_node
    )
    num_parameters = graph.num_parameters
    half_bytes = _HALF_BYTES * num_parameters
    communication_ms = 2 * all_gather_ms(half_bytes, fabric) + reduce_scatter_ms(half_bytes, fabric)
    _, num_layers = checkpointed_region(graph.ops, graph.tensors)
    state_bytes = _HALF_BYTES if row.precision is Precision.BF16 else 4
    update_bytes = _ADAM_PASSES * state_bytes * num_parameters / row.gpus
    return Overhead(
        communication_ms=communication_ms,
        exposed_ms=communication_ms * (1 / num_layers + step_constants().contention),
        update_ms=update_bytes / (device.mem_bandwidth_gb_s * 1e6) / row.grad_accum,  # 1 GB/s = 1e6 bytes/ms
    )


def compute_rows(rows: Iterable[MeasurementRow], graph_of: Callable[[str], OpGraph]) -> list[MeasurementRow]:
    """One row per model, input, device, precision, checkpointing and framework version.

    Runs on the fewest GPUs with the largest micro-batch represent their configuration, by the one of median time.
    Left out: runs whose collectives take more than a quarter of the step, and runs slower by far than the same work
    on the same chip (memory nearly full).
    """
    sharded = [row for row in rows if row.strategy == "fsdp" and (row.used_for_training or row.duplicate_of)]
    graphs: dict[str, OpGraph] = {}
    found: list[tuple[MeasurementRow, Overhead]] = []
    for row in sorted(sharded, key=lambda row: row.graph_id):
        if row.graph_id not in graphs:
            graphs = {row.graph_id: graph_of(row.graph_id)}
        overhead = estimate_overhead(row, graphs[row.graph_id])
        if overhead.communication_ms <= MAX_COMMUNICATION_SHARE * _micro_batch_ms(row):
            found.append((row, overhead))
    best: dict[tuple, float] = {}
    for row, _ in found:
        key = _work_of(row)
        best[key] = min(best.get(key, float("inf")), _micro_batch_ms(row) / row.batch_size)
    groups: dict[tuple, list[tuple[MeasurementRow, Overhead]]] = defaultdict(list)
    for row, overhead in found:
        if _micro_batch_ms(row) / row.batch_size * MIN_RELATIVE_SPEED <= best[_work_of(row)]:
            groups[(*_work_of(row), row.device, row.precision)].append((row, overhead))
    chosen = []
    for group in groups.values():
        fewest = min(row.gpus for row, _ in group)
        largest = max(row.batch_size for row, _ in group if row.gpus == fewest)
        alike = [pair for pair in group if pair[0].gpus == fewest and pair[0].batch_size == largest]
        alike.sort(key=lambda pair: (_micro_batch_ms(pair[0]), pair[0].row_id))
        chosen.append(_compute_row(*alike[(len(alike) - 1) // 2]))
    return sorted(chosen, key=lambda row: (row.source_id, row.model, row.input, row.row_id))


def _micro_batch_ms(row: MeasurementRow) -> float:
    return row.step_time_ms / row.grad_accum


def _work_of(row: MeasurementRow) -> tuple:
    """Runs that differ in nothing but memory size, micro-batch, half type and cluster: their rates should agree."""
    return (
        row.source_id, row.architecture, row.input, row.device.rsplit("-", 1)[0], row.framework_version, row.compiler,
        row.checkpointing,
    )  # fmt: skip


def _compute_row(row: MeasurementRow, overhead: Overhead) -> MeasurementRow:
    taken_off = overhead.exposed_ms + overhead.update_ms
    note = (
        f"compute of one micro-batch, out of a step on {row.gpus} GPUs: taken off {overhead.exposed_ms:.3g} ms of "
        f"communication and {overhead.update_ms:.3g} ms of update"
    )
    return replace(
        row,
        row_id=f"{row.row_id}-compute",
        derived_from=row.row_id,
        phase=Phase.FORWARD_BACKWARD,
        optimizer="none",
        grad_accum=1,
        step_time_ms=_micro_batch_ms(row) - taken_off,
        gpus=1,
        nodes=1,
        interconnect="",
        strategy="",
        duplicate_of="",
        used_for_training=True,
        note="; ".join(filter(None, (row.note, note))),
    )
