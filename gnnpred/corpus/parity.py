"""Do the two front ends agree? A model's ONNX export against its trace, op by op and in total cost.

The network learns on traced graphs and predicts on ONNX graphs, so a difference here is an error there.
"""

from collections import Counter
from dataclasses import dataclass

from gnnpred.costs import op_costs
from gnnpred.graph import OpGraph, Role
from gnnpred.job import Phase, Precision
from gnnpred.op_kinds import Category, category_of
from gnnpred.passes.canonical import canonicalise
from gnnpred.passes.step import complete_step, lower_forward

OpSignature = tuple[str, tuple[tuple[int, ...], ...]]  # kind, output shapes


@dataclass(frozen=True)
class Totals:
    """Sums over the ops of one graph."""

    flops: float
    bytes_moved: float
    launches: int

    def relative_to(self, other: "Totals") -> "Totals":
        """Relative differences from ``other``, field by field."""
        pairs = zip(
            (self.flops, self.bytes_moved, self.launches), (other.flops, other.bytes_moved, other.launches), strict=True
        )
        return Totals(*(mine / theirs - 1 if theirs else float(mine > 0) for mine, theirs in pairs))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """``missing`` are ops that only the trace has, ``surplus`` ops that only the ONNX file has.

    ``forward_error`` and ``step_error`` are relative differences of the totals of the file from those of the trace,
    of the forward pass and of a whole training step (fp32, SGD).
    """

    missing: Counter[OpSignature]
    surplus: Counter[OpSignature]
    forward_error: Totals
    step_error: Totals


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
    return ParityReport(
        missing=traced_ops - onnx_ops,
        surplus=onnx_ops - traced_ops,
        forward_error=_totals(onnx_graph).relative_to(_totals(traced_graph)),
        step_error=_totals(_training_step(onnx_graph)).relative_to(_totals(_training_step(traced_graph))),
    )


def _training_step(graph: OpGraph) -> OpGraph:
    lowered = lower_forward(graph, batch_size=None, precision=Precision.FP32)
    return complete_step(lowered, phase=Phase.TRAIN, optimizer="sgd")


def _totals(graph: OpGraph) -> Totals:
    costs = op_costs(graph)
    return Totals(
        flops=sum(cost.flops * op.repeats for cost, op in zip(costs, graph.ops, strict=True)),
        bytes_moved=sum(cost.bytes_moved * op.repeats for cost, op in zip(costs, graph.ops, strict=True)),
        launches=sum(cost.num_launches * op.repeats for cost, op in zip(costs, graph.ops, strict=True)),
    )
