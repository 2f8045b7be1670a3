"""From corpus rows to checkpoint input: the same passes, costs and features that predicting uses."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnnpred.corpus.operators import OperatorRow, operator_graph
from gnnpred.corpus.store import MeasurementRow
from gnnpred.costs import op_costs
from gnnpred.features import COMPONENTS, GraphArrays, GraphStructure, encode, graph_structure
from gnnpred.graph import OpGraph
from gnnpred.hardware import find_device
from gnnpred.job import ActivationRule, JobSpec, Phase, Precision
from gnnpred.passes.backward import add_backward
from gnnpred.passes.canonical import canonicalise
from gnnpred.passes.precision import lower_precision
from gnnpred.passes.step import complete_step, lower_forward
from gnnpred.software import has_foreach_optimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StructureKey:
    """What a structure depends on: rows that differ in device or software share one."""

    graph_id: str
    batch_size: int
    precision: Precision
    activation_rule: ActivationRule
    tf32_matmul: bool
    phase: Phase
    optimizer: str
    input_gradient: bool
    foreach: bool
    checkpointing: bool

    @classmethod
    def of(cls, row: MeasurementRow, job: JobSpec) -> "StructureKey":
        is_mixed = job.precision in (Precision.MIXED, Precision.MIXED_BF16)
        return cls(
            graph_id=row.graph_id,
            batch_size=row.batch_size,
            precision=job.precision,
            activation_rule=job.activation_rule if is_mixed else ActivationRule.AUTOCAST,
            tf32_matmul=job.tf32_matmul if job.precision is Precision.TF32 else True,
            phase=job.phase,
            optimizer=job.optimizer if job.phase is Phase.TRAIN else "none",
            input_gradient=row.input_gradient,
            foreach=has_foreach_optimizer(job.framework, job.framework_version, job.optimizer),
            checkpointing=job.activation_checkpointing == "full",
        )


def build_structure(graph: OpGraph, key: StructureKey) -> GraphStructure:
    """Rebind, lower, differentiate, cost and merge one graph."""
    lowered = lower_forward(
        graph, batch_size=key.batch_size, precision=key.precision, activation_rule=key.activation_rule,
        tf32_matmul=key.tf32_matmul,
    )  # fmt: skip
    full = complete_step(
        lowered, phase=key.phase, optimizer=key.optimizer, input_gradient=key.input_gradient, foreach=key.foreach,
        checkpointing=key.checkpointing,
    )  # fmt: skip
    return graph_structure(full, op_costs(full))


def blind_job(job: JobSpec) -> JobSpec:
    """The job as a predictor sees it that knows nothing of precision: everything reads as fp32."""
    return replace(job, precision=Precision.FP32, activation_rule=ActivationRule.AUTOCAST, tf32_matmul=True)


def encode_rows(
    rows: Sequence[MeasurementRow],
    load_graph: Callable[[str], OpGraph],
    *,
    blind: bool = False,
    on_row: Callable[[], None] = lambda: None,
) -> list[GraphArrays]:
    """Checkpoint input for every row, in order. Rows that share graph and job share the work."""
    order = sorted(range(len(rows)), key=lambda i: (rows[i].graph_id, rows[i].batch_size))
    encoded: list[GraphArrays | None] = [None] * len(rows)
    structures: dict[StructureKey, GraphStructure] = {}
    current = ""
    graph: OpGraph | None = None
    for position in order:
        row = rows[position]
        if row.graph_id != current:
            current, graph = row.graph_id, canonicalise(load_graph(row.graph_id))
            structures.clear()
        job = blind_job(row.job()) if blind else row.job()
        key = StructureKey.of(row, job)
        structure = structures.get(key)
        if structure is None:
            structure = structures[key] = build_structure(graph, key)
        encoded[position] = encode(structure, job, input_gradient=row.input_gradient)
        on_row()
    return encoded  # type: ignore[return-value]


_OPERATOR_COMPONENTS = {"fwd": (0,), "bwd": (1, 2), "bwd_data": (1,), "bwd_weight": (2,)}


def encode_operator_rows(rows: Sequence[OperatorRow]) -> tuple[list[GraphArrays], np.ndarray]:
    """Checkpoint input of single-kernel rows and which components were timed, (n, C) float32."""
    encoded = []
    timed = np.zeros((len(rows), len(COMPONENTS)), np.float32)
    for i, row in enumerate(rows):
        precision = Precision(row.precision)
        # without a backward pass a dropout is an inference one and runs nothing, a batch norm takes no statistics
        is_backward = row.phase != "fwd" or row.kind in ("dropout", "batch_norm")
        phase = Phase.FORWARD_BACKWARD if is_backward else Phase.INFERENCE
        graph = lower_precision(operator_graph(row), precision)
        if is_backward:
            graph = add_backward(graph, phase=phase, optimizer="none", input_gradient=True, loss=False)
        structure = graph_structure(graph, op_costs(graph))
        job = JobSpec(
            device=find_device(row.device), precision=precision, phase=phase, optimizer="none", batch_size=1,
            framework="kernel",
        )  # fmt: skip
        encoded.append(encode(structure, job))
        timed[i, list(_OPERATOR_COMPONENTS[row.phase])] = 1
    return encoded, timed
