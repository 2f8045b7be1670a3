"""One training step out of a canonical forward graph: the passes in their order, for predicting and training alike."""

from gnnpred.graph import OpGraph
from gnnpred.job import ActivationRule, Phase, Precision
from gnnpred.passes.backward import add_backward
from gnnpred.passes.batch import rebind_batch
from gnnpred.passes.precision import lower_precision


def lower_forward(
    graph: OpGraph,
    *,
    batch_size: int | None,
    precision: Precision,
    activation_rule: ActivationRule = ActivationRule.AUTOCAST,
    tf32_matmul: bool = True,
) -> OpGraph:
    """The forward ops at a batch (``None`` keeps the graph's) and precision."""
    if batch_size is not None and batch_size != graph.batch_size:
        graph = rebind_batch(graph, batch_size)
    return lower_precision(graph, precision, activation_rule=activation_rule, tf32_matmul=tf32_matmul)


def complete_step(
    lowered: OpGraph,
    *,
    phase: Phase,
    optimizer: str,
    input_gradient: bool = False,
    foreach: bool = True,
    checkpointing: bool = False,
) -> OpGraph:
    """The lowered forward graph with its backward and optimizer ops.

    ``foreach``: whether the optimizer updates lists of tensors (:func:`gnnpred.software.has_foreach_optimizer`).
    ``checkpointing``: repeated layers keep no activations and run their forward pass again.
    """
    return add_backward(
        lowered, phase=phase, optimizer=optimizer, input_gradient=input_gradient, foreach=foreach,
        checkpointing=checkpointing,
    )  # fmt: skip
