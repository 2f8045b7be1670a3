"""Which network of the corpus a collected model is: by the weights that its ops read.

A corpus graph was traced, a collected one comes from an ONNX file: kinds and order of ops differ, so that
:func:`gnnpred.corpus.store.architecture_hash` cannot compare the two. The sizes of their weight matrices can.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from gnnpred.corpus.families import family_of
from gnnpred.corpus.store import MeasurementRow, architecture_hash
from gnnpred.graph import OpGraph, Role
from gnnpred.passes.canonical import canonicalise

Weights = tuple[tuple[int, ...], ...]


def weights_of(graph: OpGraph) -> Weights:
    """Sorted sizes of the weights with two axes or more, each read first where it is listed, without the last one.

    The last one is the classifier, whose width depends on the data set. Axes are sorted, since exporters transpose.
    """
    sizes: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for op in graph.ops:
        for tensor_idx in op.inputs:
            tensor = graph.tensors[tensor_idx]
            size = tuple(sorted(dim for dim in tensor.shape if dim > 1))
            if tensor.role is Role.PARAMETER and tensor_idx not in seen and len(size) > 1:
                seen.add(tensor_idx)
                sizes.append(size)
    return tuple(sorted(sizes[:-1]))


class KnownArchitectures:
    """The networks of a corpus by their weights."""

    def __init__(self, rows: Iterable[MeasurementRow], graphs: Mapping[str, OpGraph]) -> None:
        self._graphs = graphs
        self._rows_by_graph = Counter(row.graph_id for row in rows if row.graph_id)
        self._group_of = {row.graph_id: (row.architecture, row.family) for row in rows if row.graph_id}
        self._by_weights: dict[Weights, list[tuple[str, str]]] | None = None  # (graph_id, graph's name)

    def find(self, graph: OpGraph, source: str) -> tuple[str, str, bool]:
        """(architecture, family, whether the corpus has it) of a collected graph of the model ``source``.

        Several networks may share all weights (with and without BatchNorm, say): the one built from the same source
        comes first, then one of the same family, then the one with most rows.
        """
        family = family_of(source)
        weights = weights_of(graph)
        candidates = self._candidates().get(weights, []) if weights else []
        if not candidates:
            return architecture_hash(canonicalise(graph)), family, False

        def rank(candidate: tuple[str, str]) -> tuple:
            graph_id, name = candidate
            return (
                name.split(" ")[0] != source,
                self._group_of[graph_id][1] != family,
                -self._rows_by_graph[graph_id],
                graph_id,
            )

        return (*self._group_of[min(candidates, key=rank)[0]], True)

    def _candidates(self) -> dict[Weights, list[tuple[str, str]]]:
        if self._by_weights is None:
            self._by_weights = {}
            for graph_id in sorted(self._group_of):
                graph = self._graphs[graph_id]
                self._by_weights.setdefault(weights_of(graph), []).append((graph_id, graph.name))
        return self._by_weights
