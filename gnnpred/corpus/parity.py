"""Do the two front ends agree? A model's ONNX export against its trace, op by op and in total cost.

The network learns on traced graphs and predicts on ONNX graphs, so a difference here is an error there.
"""

from collections import Counter
from dataclasses import dataclass

from gnnpred.costs import op_costs
from gnnpred.graph import OpGraph, Role
from gnnpred.op_kinds import Category, category_of
from gnnpred.passes.canonical import canonicalise

OpSignature = tuple[str, tuple[tuple[int, ...], ...]]  # kind, output shapes


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """``missing`` are ops that only the trace has, ``surplus`` ops that only the ONNX file has."""

    missing: Counter[OpSignature]
    surplus: Counter[OpSignature]
    flops_trace: float
    flops_onnx: float
    bytes_trace: float
    bytes_onnx: float
    launches_trace: int
    launches_onnx: int

    @property
    def flops_error(self) -> float:
        """Relative difference of the total flops."""
        return self.flops_onnx / self.flops_trace - 1 if self.flops_trace else float(self.flops_onnx > 0)

    @property
    def bytes_error(self) -> float:
        """Relative difference of the total bytes moved."""
        return self.bytes_onnx / self.bytes_trace - 1 if self.bytes_trace else float(self.bytes_onnx > 0)

    @property
    def launches_error(self) -> float:
        """Relative difference of the number of kernels."""
        return self.launches_onnx / self.launches_trace - 1 if self.launches_trace else float(self.launches_onnx > 0)


def op_signatures(graph: OpGraph) -> Counter[OpSignature]:
    """How often each (kind, output shapes) occurs among ops on data that run a kernel."""
    signatures: Counter[OpSignature] = Counter()
    for op in graph.ops:
        on_data = any(graph.tensors[tensor].role is not Role.PARAMETER_DERIVED for tensor in op.outputs)
        if category_of(op.kind) is not Category.VIEW and on_data:
            signatures[op.kind, tuple(graph.tensors[tensor].shape for tensor in op.outputs[:1])] += op.repeats
    return signatures


def compare_front_ends(onnx_graph: OpGraph, traced_graph: OpGraph) -> ParityReport:
    """Both graphs at the same batch size, as their front ends left them; canonicalised here."""
    onnx_graph, traced_graph = canonicalise(onnx_graph), canonicalise(traced_graph)
    onnx_ops, traced_ops = op_signatures(onnx_graph), op_signatures(traced_graph)
    totals = []
    for graph in (onnx_graph, traced_graph):
        costs = op_costs(graph)
        totals.append(
            (
                sum(cost.flops * op.repeats for cost, op in zip(costs, graph.ops, strict=True)),
                sum(cost.bytes_moved * op.repeats for cost, op in zip(costs, graph.ops, strict=True)),
                sum(cost.num_launches * op.repeats for cost, op in zip(costs, graph.ops, strict=True)),
            )
        )
    (flops_onnx, bytes_onnx, launches_onnx), (flops_trace, bytes_trace, launches_trace) = totals
    return ParityReport(
        missing=traced_ops - onnx_ops,
        surplus=onnx_ops - traced_ops,
        flops_trace=flops_trace,
        flops_onnx=flops_onnx,
        bytes_trace=bytes_trace,
        bytes_onnx=bytes_onnx,
        launches_trace=launches_trace,
        launches_onnx=launches_onnx,
    )
