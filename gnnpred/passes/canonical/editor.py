"""An OpGraph under rewriting: producers and readers of every tensor, kept current at each change."""

from collections.abc import Mapping, Sequence
from typing import Any

from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec


class GraphEditor:
    """Ops can be replaced, inserted, bypassed and removed; dead ops fall away on the spot.

    Ops are known by a position in ``ops`` that never changes (``None`` = removed); an inserted op gets a
    new position and an order key just before its anchor. All look-ups are constant time, so a pass over
    all ops is linear.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.metadata = graph.metadata
        self.tensors: list[TensorSpec] = list(graph.tensors)
        self.ops: list[Op | None] = list(graph.ops)
        self.outputs: list[int] = list(graph.outputs)
        self.notes: list[str] = list(graph.notes)
        self._order: list[tuple[int, int]] = [(op_idx, 0) for op_idx in range(len(self.ops))]
        self._num_inserted = 0
        self.producer: list[int] = [-1] * len(self.tensors)
        # per tensor: position of a reading op -> how many of its inputs the tensor is (constants have thousands)
        self.readers: list[dict[int, int]] = [{} for _ in self.tensors]
        self._is_output = set(graph.outputs)
        for op_idx, op in enumerate(graph.ops):
            for tensor in op.outputs:
                self.producer[tensor] = op_idx
            for tensor in op.inputs:
                self._add_reader(tensor, op_idx)

    # --- looking ------------------------------------------------------------------------------

    def positions(self, *kinds: str) -> list[int]:
        """Positions of the living ops of these kinds, in order of appearance."""
        wanted = set(kinds)
        return [op_idx for op_idx, op in enumerate(self.ops) if op is not None and op.kind in wanted]

    def producer_op(self, tensor: int, *kinds: str) -> Op | None:
        """The op that makes ``tensor``, where it has one of ``kinds`` (any kind without)."""
        op_idx = self.producer[tensor]
        if op_idx < 0:
            return None
        op = self.ops[op_idx]
        return op if op is not None and (not kinds or op.kind in kinds) else None

    def sole_reader(self, tensor: int) -> int | None:
        """Position of the only op that reads ``tensor``; None where there are more, or it is a graph output."""
        readers = self.readers[tensor]
        if len(readers) != 1 or tensor in self._is_output:
            return None
        return next(iter(readers))

    def is_private(self, tensor: int) -> bool:
        """Whether exactly one op reads ``tensor`` and nobody outside sees it."""
        return self.sole_reader(tensor) is not None

    def is_graph_output(self, tensor: int) -> bool:
        return tensor in self._is_output

    def number(self, tensor: int) -> float | None:
        """The number that a constant of one element holds, where known."""
        spec = self.tensors[tensor]
        value = spec.value
        if isinstance(value, tuple):
            value = value[0] if len(value) == 1 else None
        if value is None or spec.role is not Role.CONSTANT:
            return None
        return float(value)

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.tensors[tensor].shape

    def role(self, tensor: int) -> Role:
        return self.tensors[tensor].role

    def is_learned(self, tensor: int) -> bool:
        """Whether ``tensor`` is a parameter or computed from parameters alone."""
        return self.tensors[tensor].role in (Role.PARAMETER, Role.PARAMETER_DERIVED)

    def depends_on_data(self, tensor: int) -> bool:
        return self.tensors[tensor].role in (Role.INPUT, Role.ACTIVATION, Role.GRADIENT)

    def is_ready(self, tensor: int, op_idx: int) -> bool:
        """Whether ``tensor`` exists before the op at ``op_idx`` runs."""
        producer = self.producer[tensor]
        return producer < 0 or self._order[producer] < self._order[op_idx]

    def in_order(self) -> list[int]:
        """Positions of the living ops in execution order."""
        living = (op_idx for op_idx, op in enumerate(self.ops) if op is not None)
        return sorted(living, key=lambda op_idx: self._order[op_idx])

    # --- changing -----------------------------------------------------------------------------

    def add_tensor(self, spec: TensorSpec) -> int:
        self.tensors.append(spec)
        self.producer.append(-1)
        self.readers.append({})
        return len(self.tensors) - 1

    def like(
        self,
        tensor: int,
        *,
        shape: Sequence[int] | None = None,
        batch_axes: Sequence[int] | None = None,
        dtype: DType | None = None,
    ) -> int:
        """A new activation that resembles ``tensor``."""
        old = self.tensors[tensor]
        return self.add_tensor(
            TensorSpec(
                tuple(old.shape if shape is None else shape),
                dtype or old.dtype,
                Role.ACTIVATION if old.role is Role.INPUT else old.role,
                tuple(old.batch_axes if batch_axes is None else batch_axes),
            )
        )

    def replace_op(
        self,
        op_idx: int,
        kind: str,
        inputs: Sequence[int],
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[int] | None = None,
    ) -> None:
        """Another op at the same place; what only the old one needed falls away."""
        old = self.ops[op_idx]
        assert old is not None
        new = Op(
            kind, tuple(inputs), tuple(old.outputs if outputs is None else outputs), dict(attributes or {}),
            name=old.name, repeats=old.repeats,
        )  # fmt: skip
        self._install(op_idx, new)
        self._release(op_idx, old, new)

    def set_inputs(self, op_idx: int, inputs: Sequence[int]) -> None:
        """The same op on other tensors."""
        op = self.ops[op_idx]
        assert op is not None
        self.replace_op(op_idx, op.kind, inputs, op.attributes)

    def insert_before(
        self,
        anchor_idx: int,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        attributes: Mapping[str, Any] | None = None,
    ) -> int:
        """A new op in front of the one at ``anchor_idx``."""
        anchor = self.ops[anchor_idx]
        assert anchor is not None
        self._num_inserted += 1
        op_idx = len(self.ops)
        self.ops.append(None)
        # between the anchor and what is before it, after earlier insertions at the same anchor
        place, rank = self._order[anchor_idx]
        self._order.append((place, rank - 1_000_000_000 + self._num_inserted))
        self._install(
            op_idx, Op(kind, tuple(inputs), tuple(outputs), dict(attributes or {}), anchor.name, repeats=anchor.repeats)
        )
        return op_idx

    def merge_ops(
        self, op_idxs: Sequence[int], kind: str, inputs: Sequence[int], attributes: Mapping[str, Any] | None = None
    ) -> None:
        """One op in the place of several that read the same; its outputs are all of theirs, in their order."""
        first, *rest = sorted(op_idxs, key=lambda op_idx: self._order[op_idx])
        outputs: list[int] = []
        for op_idx in op_idxs:
            op = self.ops[op_idx]
            assert op is not None
            outputs.extend(op.outputs)
        for op_idx in rest:
            self.forget(op_idx)
        self.replace_op(first, kind, inputs, attributes, outputs=outputs)

    def forget(self, op_idx: int) -> None:
        """Remove an op whose results are made elsewhere (or have become constants)."""
        op = self.ops[op_idx]
        assert op is not None
        self.ops[op_idx] = None
        for tensor in op.outputs:
            self.producer[tensor] = -1
        for tensor in op.inputs:
            self._drop_reader(tensor, op_idx)
        for tensor in op.inputs:
            if not self.readers[tensor] and self.producer[tensor] >= 0:
                self._collect(self.producer[tensor])

    def bypass(self, op_idx: int, source: int) -> None:
        """Let everybody who reads the op's (first) output read ``source`` instead."""
        op = self.ops[op_idx]
        assert op is not None
        self.redirect(op.outputs[0], source)
        self._collect(op_idx)

    def redirect(self, old: int, new: int) -> None:
        """All readers of tensor ``old`` read ``new``; graph outputs follow."""
        if old == new:
            return
        for op_idx, count in self.readers[old].items():
            op = self.ops[op_idx]
            self.readers[new][op_idx] = self.readers[new].get(op_idx, 0) + count
            if op is not None:
                inputs = tuple(new if tensor == old else tensor for tensor in op.inputs)
                self.ops[op_idx] = Op(
                    op.kind, inputs, op.outputs, op.attributes, op.name, op.phase, op.component, op.compute_dtype,
                    op.forward_op_idx, op.repeats,
                )  # fmt: skip
        self.readers[old] = {}
        if old in self._is_output:
            self.outputs = [new if tensor == old else tensor for tensor in self.outputs]
            self._is_output.discard(old)
            self._is_output.add(new)

    def remove_unread(self) -> None:
        """Remove ops whose results nobody reads."""
        for op_idx in range(len(self.ops) - 1, -1, -1):
            self._collect(op_idx)

    def _install(self, op_idx: int, op: Op) -> None:
        self.ops[op_idx] = op
        for tensor in op.outputs:
            self.producer[tensor] = op_idx
        for tensor in op.inputs:
            self._add_reader(tensor, op_idx)

    def _add_reader(self, tensor: int, op_idx: int) -> None:
        readers = self.readers[tensor]
        readers[op_idx] = readers.get(op_idx, 0) + 1

    def _drop_reader(self, tensor: int, op_idx: int) -> None:
        readers = self.readers[tensor]
        if readers[op_idx] == 1:
            del readers[op_idx]
        else:
            readers[op_idx] -= 1

    def _release(self, op_idx: int, old: Op, new: Op | None) -> None:
        """Forget what ``old`` read, and collect what became unread."""
        kept = new.outputs if new is not None else ()
        for tensor in old.outputs:
            if tensor not in kept:
                self.producer[tensor] = -1
        for tensor in old.inputs:
            self._drop_reader(tensor, op_idx)
        for tensor in old.inputs:
            if not self.readers[tensor] and self.producer[tensor] >= 0:
                self._collect(self.producer[tensor])

    def _collect(self, op_idx: int) -> None:
        """Remove the op where nothing reads it, and then what fed only it (iteratively: chains are long)."""
        waiting = [op_idx]
        while waiting:
            current = waiting.pop()
            op = self.ops[current]
            if op is None or any(self.readers[tensor] or tensor in self._is_output for tensor in op.outputs):
                continue
            self.ops[current] = None
            for tensor in op.outputs:
                self.producer[tensor] = -1
            for tensor in op.inputs:
                self._drop_reader(tensor, current)
                if not self.readers[tensor] and self.producer[tensor] >= 0:
                    waiting.append(self.producer[tensor])

    # --- result -------------------------------------------------------------------------------

    def to_graph(self) -> OpGraph:
        """The rewritten graph; tensors that nothing reads are left out, parameters and inputs stay."""
        order = self.in_order()
        used = dict.fromkeys(self.graph.inputs)
        for tensor, spec in enumerate(self.tensors):
            if spec.role is Role.PARAMETER:
                used[tensor] = None
        for op_idx in order:
            op = self.ops[op_idx]
            assert op is not None
            used.update(dict.fromkeys(op.inputs))
            used.update(dict.fromkeys(op.outputs))
        used.update(dict.fromkeys(self.outputs))
        new_idx = {old: new for new, old in enumerate(used)}
        ops = []
        for op_idx in order:
            op = self.ops[op_idx]
            assert op is not None
            ops.append(
                Op(
                    op.kind, tuple(new_idx[t] for t in op.inputs), tuple(new_idx[t] for t in op.outputs),
                    op.attributes, op.name, op.phase, op.component, op.compute_dtype, None, op.repeats,
                )
            )  # fmt: skip
        return self.graph.replace(
            tensors=tuple(self.tensors[old] for old in used),
            ops=tuple(ops),
            inputs=tuple(new_idx[tensor] for tensor in self.graph.inputs),
            outputs=tuple(new_idx[tensor] for tensor in self.outputs),
            notes=tuple(self.notes),
        )
