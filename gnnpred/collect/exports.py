"""ONNX files of the models of a collection: written by workers beside the measuring, named by their content."""

import hashlib
import os
from collections import deque
from pathlib import Path

from gnnpred.collect.recipe import Configuration, Recipe
from gnnpred.collect.store import CollectionStore
from gnnpred.collect.workers import Worker, Workers, require_space
from gnnpred.errors import GnnpredError

MODELS_FOLDER = "models"
# An export keeps about one core busy, and the processes that measure need theirs.
_CORES_PER_EXPORT = 4


class Exports:
    """Exports each graph of ``recipe`` that the store lacks once; ``num_at_once`` at a time (by default what leaves
    cores to those that measure), the others wait.
    """

    def __init__(
        self, store: CollectionStore, workers: Workers, recipe: Recipe, *, num_at_once: int | None = None
    ) -> None:
        self._store = store
        self._workers = workers
        self._limit_s = recipe.measure.export_limit_s
        self._folder = store.folder / MODELS_FOLDER
        self._asked = set(store.graphs())
        self._waiting: deque[Configuration] = deque()
        self._running: list[tuple[str, Worker]] = []  # graph_id and who exports it
        self._num_at_once = num_at_once or max(1, (os.cpu_count() or 1) // _CORES_PER_EXPORT)
        try:
            self._folder.mkdir(exist_ok=True)
            for partial in self._folder.glob(".*.partial.onnx"):  # of a call that was killed
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from error

    @property
    def num_open(self) -> int:
        """Graphs that are asked for and not yet stored."""
        return len(self._waiting) + len(self._running)

    def add(self, configuration: Configuration) -> None:
        """Have the graph of ``configuration`` exported, unless that was asked for before; does not wait."""
        if configuration.graph_id not in self._asked:
            self._asked.add(configuration.graph_id)
            self._waiting.append(configuration)
            self.advance()

    def advance(self) -> None:
        """Store what has finished and start what waits."""
        for graph_id, worker in list(self._running):
            if (reply := worker.poll()) is not None:
                self._running.remove((graph_id, worker))
                self._add_graph(graph_id, reply)
        while self._waiting and len(self._running) < self._num_at_once:
            self._start(self._waiting.popleft())

    def finish(self, deadline: float | None) -> None:
        """Wait for all; raises BudgetSpentError at ``deadline`` (monotonic seconds)."""
        while self._running:
            graph_id, worker = self._running.pop(0)
            try:
                reply = worker.wait(deadline=deadline)
            except BaseException:
                self._partial(graph_id).unlink(missing_ok=True)
                raise
            self._add_graph(graph_id, reply)
            self.advance()

    def end_all(self) -> None:
        """End what runs; the next call exports it."""
        for graph_id, worker in self._running:
            worker.end()
            self._partial(graph_id).unlink(missing_ok=True)
        self._running.clear()

    def _start(self, configuration: Configuration) -> None:
        worker = self._workers.start(
            {
                "task": "export",
                "model": configuration.model,
                "image_size": configuration.image_size,
                "seq_len": configuration.seq_len,
                "out": str(self._partial(configuration.graph_id)),
            }
        )
        # no GPU: tracing would keep its random state, and with that a context on the GPU that is being measured
        worker.release(limit_s=self._limit_s, go={"gpus": ""})
        self._running.append((configuration.graph_id, worker))

    def _add_graph(self, graph_id: str, reply: dict) -> None:
        """Store the file, named by its content, or why there is none."""
        partial = self._partial(graph_id)
        try:
            require_space(reply)
            if reply["status"] != "ok":
                self._store.add_graph(graph_id, file="", reason=f"not exported: {reply['reason']}")
                return
            name = hashlib.sha256(partial.read_bytes()).hexdigest()[:16] + ".onnx"
            os.replace(partial, self._folder / name)
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            partial.unlink(missing_ok=True)
        self._store.add_graph(graph_id, file=f"{MODELS_FOLDER}/{name}")

    def _partial(self, graph_id: str) -> Path:
        return self._folder / f".{graph_id}.partial.onnx"

    def _cannot_write(self, error: OSError) -> GnnpredError:
        return GnnpredError(f"cannot write {self._folder}: {error.strerror or error}")
