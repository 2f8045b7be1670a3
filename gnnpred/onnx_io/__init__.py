"""Reading ONNX files: structure, shapes and types, never the weights."""

from gnnpred.onnx_io.reader import read_graph

__all__ = ["read_graph"]
