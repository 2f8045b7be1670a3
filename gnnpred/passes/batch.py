"""Another batch size by substitution: every batch axis grows in proportion."""

from __future__ import annotations

from dataclasses import replace

from gnnpred.errors import UsageError
from gnnpred.graph import OpGraph, TensorSpec


def rebind_batch(graph: OpGraph, batch_size: int) -> OpGraph:
    """``graph`` at another batch size per GPU.

    Raises UsageError for a batch size below 1 and for a graph that has no batch dimension.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch size {batch_size} is not a positive whole number")
    if batch_size == graph.batch_size:
        return graph
    if graph.batch_size is None:
        raise UsageError(f"{graph.name or 'the model'} has no batch dimension, so no batch size can be set")
    old = graph.batch_size
    return graph.replace(tensors=tuple(_at(tensor, old, batch_size) for tensor in graph.tensors), batch_size=batch_size)


def _at(tensor: TensorSpec, old: int, new: int) -> TensorSpec:
    if not tensor.batch_axes:
        return tensor
    shape = list(tensor.shape)
    for axis in tensor.batch_axes:
        shape[axis] = shape[axis] // old * new
    return replace(tensor, shape=tuple(shape))
