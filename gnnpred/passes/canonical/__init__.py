"""Decomposed patterns -> the ops that a framework runs.

Exporters write LayerNorm, GELU or attention as chains of elementwise nodes; counted one by one, their
traffic would be many times what the GPU moves. :func:`canonicalise` recomposes them. It also settles what
no file says: which reshapes copy memory. Both front ends (ONNX files and traced modules) go through it, so
that a model means the same ops whichever way it came.
"""

from gnnpred.graph import OpGraph
from gnnpred.passes.canonical import activations, attention, cleanup, layout, linear, losses, norms, pools, sharing
from gnnpred.passes.canonical.editor import GraphEditor

__all__ = ["canonicalise"]


def canonicalise(graph: OpGraph) -> OpGraph:
    """``graph`` in the ops that eager PyTorch runs; applying it twice changes nothing more.

    Works on the forward graph, before the precision and backward passes.
    """
    editor = GraphEditor(graph)
    cleanup.drop_no_ops(editor)
    cleanup.unify_spellings(editor)
    activations.fuse_activations(editor)
    norms.fuse_norms(editor)
    linear.fuse_biases(editor)
    attention.fuse_attention(editor)
    losses.fuse_losses(editor)
    pools.unify_pools(editor)
    cleanup.merge_slices(editor)
    sharing.separate_shared_vectors(editor)
    layout.settle_copies(editor)
    editor.remove_unread()
    return editor.to_graph()
