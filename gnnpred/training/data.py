"""Rows of the corpus as flat arrays, from which batches are cut without Python loops over rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gnnpred.features import GraphArrays
from gnnpred.files import replaced_when_done
from gnnpred.training.model import GraphBatch


@dataclass(frozen=True)
class FlatRows:
    """All rows' :class:`GraphArrays`, concatenated; ``*_start`` are (num_rows + 1,) offsets."""

    node_features: np.ndarray
    kind_idx: np.ndarray
    physics_ms: np.ndarray
    count: np.ndarray
    node_start: np.ndarray
    in_edges: np.ndarray
    in_start: np.ndarray
    out_edges: np.ndarray
    out_start: np.ndarray
    globals: np.ndarray  # (num_rows, G)
    host_launches: np.ndarray  # (num_rows,)
    host_copy_ms: np.ndarray  # (num_rows,)

    @property
    def num_rows(self) -> int:
        return len(self.globals)

    @classmethod
    def from_arrays(cls, arrays: Sequence[GraphArrays]) -> "FlatRows":
        def starts(sizes: list[int]) -> np.ndarray:
            return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

        return cls(
            node_features=np.concatenate([a.node_features for a in arrays]),
            kind_idx=np.concatenate([a.kind_idx for a in arrays]),
            physics_ms=np.concatenate([a.physics_ms for a in arrays]),
            count=np.concatenate([a.count for a in arrays]),
            node_start=starts([len(a.kind_idx) for a in arrays]),
            in_edges=np.concatenate([a.in_edges for a in arrays], 1).astype(np.int32),
            in_start=starts([a.in_edges.shape[1] for a in arrays]),
            out_edges=np.concatenate([a.out_edges for a in arrays], 1).astype(np.int32),
            out_start=starts([a.out_edges.shape[1] for a in arrays]),
            globals=np.stack([a.globals for a in arrays]),
            host_launches=np.array([a.host_launches for a in arrays], np.float32),
            host_copy_ms=np.array([a.host_copy_ms for a in arrays], np.float32),
        )

    def save(self, path: Path) -> None:
        """Arrays as an .npz file (no pickles), through a temporary file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_when_done(path) as partial, partial.open("wb") as file:
            np.savez(file, **vars(self))

    @classmethod
    def load(cls, path: Path) -> "FlatRows":
        with np.load(path, allow_pickle=False) as stored:
            return cls(**{name: stored[name] for name in stored.files})

    def arrays_of(self, row: int) -> GraphArrays:
        """One row as the checkpoint takes it."""
        nodes = slice(self.node_start[row], self.node_start[row + 1])
        return GraphArrays(
            node_features=self.node_features[nodes],
            kind_idx=self.kind_idx[nodes],
            physics_ms=self.physics_ms[nodes],
            count=self.count[nodes],
            in_edges=self.in_edges[:, self.in_start[row] : self.in_start[row + 1]].astype(np.int64),
            out_edges=self.out_edges[:, self.out_start[row] : self.out_start[row + 1]].astype(np.int64),
            globals=self.globals[row],
            host_launches=float(self.host_launches[row]),
            host_copy_ms=float(self.host_copy_ms[row]),
        )

    def batch(self, row_idx: np.ndarray, *, specs_known: np.ndarray) -> GraphBatch:
        """The rows of that order as one batch. row_idx (B,) int64, specs_known (B,) float."""
        nodes, sizes = _ranges(self.node_start, row_idx)
        first_node = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        in_pos, in_sizes = _ranges(self.in_start, row_idx)
        out_pos, out_sizes = _ranges(self.out_start, row_idx)
        return GraphBatch(
            node_features=torch.from_numpy(self.node_features[nodes]),
            kind_idx=torch.from_numpy(self.kind_idx[nodes]),
            physics_ms=torch.from_numpy(self.physics_ms[nodes]),
            count=torch.from_numpy(self.count[nodes]),
            graph_idx=torch.from_numpy(np.repeat(np.arange(len(row_idx)), sizes)),
            in_edges=torch.from_numpy(self.in_edges[:, in_pos] + np.repeat(first_node, in_sizes)),
            out_edges=torch.from_numpy(self.out_edges[:, out_pos] + np.repeat(first_node, out_sizes)),
            globals=torch.from_numpy(self.globals[row_idx]),
            specs_known=torch.from_numpy(specs_known.astype(np.float32)),
            host_launches=torch.from_numpy(self.host_launches[row_idx]),
            host_copy_ms=torch.from_numpy(self.host_copy_ms[row_idx]),
        )


def _ranges(start: np.ndarray, row_idx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of all items of the chosen rows, in order, and how many each row has."""
    sizes = start[row_idx + 1] - start[row_idx]
    offsets = np.repeat(start[row_idx] - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
    return np.arange(sizes.sum()) + offsets, sizes
