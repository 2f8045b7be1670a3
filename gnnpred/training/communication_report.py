"""The tracks of the communication head with everything that is at hand: folds' networks, the shipped checkpoint."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnpred.corpus.store import MeasurementRow, load_graphs
from gnnpred.errors import GnnpredError
from gnnpred.training.communication_tracks import (
    Compute,
    communication_lines,
    communication_table,
    layout_rows,
    write_section,
    write_table,
)
from gnnpred.training.evaluate import ENSEMBLE, require_networks, run_track
from gnnpred.training.experiments import Corpus, RecipeSettings, load_encoded_corpus

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]


def communication_of_recipe(
    settings: RecipeSettings,
    *,
    datasets: Path,
    folds: Path,
    out: Path,
    work: Path,
    page: Path | None,
    num_workers: int,
    on_progress: Progress,
) -> dict[str, Any]:
    """Score, write ``communication.json`` to ``out`` and, where ``page`` is given, the tables into that page.

    Without the networks of the folds compute is the measured one; without a checkpoint that can be loaded,
    model-parallel rows are not scored. ``missing`` in the table says what was left out.
    """
    missing = []
    compute = None
    try:
        require_networks(datasets, ("family", "architecture"), settings, folds)
    except GnnpredError as error:
        missing.append(f"predicted compute: {error}")
    else:
        corpus = load_encoded_corpus(datasets, settings, work, num_workers, on_progress, with_blind=False)
        compute = held_out_compute(corpus, settings, folds, on_progress)
    layouts: list[tuple[MeasurementRow, float]] = []
    try:
        layouts = predicted_layouts(datasets, out, on_progress)
    except GnnpredError as error:
        missing.append(f"model-parallel rows: {error}")
    table = communication_table(datasets, compute=compute, layouts=layouts, on_progress=on_progress)
    table["missing"] = missing
    write_table(out, table)
    if page is not None:
        write_section(page, communication_lines(table))
    return table


def held_out_compute(corpus: Corpus, settings: RecipeSettings, folds: Path, on_progress: Progress) -> Compute:
    """Every training row's step on one GPU as the ensemble predicts it that has not seen its family (architecture)."""
    found = {}
    for done, track in enumerate(("family", "architecture")):
        on_progress("held-out compute", done, 2)
        result = run_track(corpus, track, settings, folds)
        predicted = result.predicted_ms[ENSEMBLE].tolist()
        found[track] = {corpus.rows[i].row_id: ms for i, ms in zip(result.row_idx.tolist(), predicted, strict=True)}
    on_progress("held-out compute", 2, 2)
    return Compute(found["family"], found["architecture"])


def predicted_layouts(datasets: Path, checkpoint: Path, on_progress: Progress) -> list[tuple[MeasurementRow, float]]:
    """Model-parallel rows beside the step that the checkpoint predicts for their job."""
    from gnnpred.passes.canonical import canonicalise
    from gnnpred.predictor import Predictor

    rows = sorted(layout_rows(datasets), key=lambda row: (row.graph_id, row.tensor_parallel, row.row_id))
    if not rows:
        return []
    predictor, graphs = Predictor(checkpoint), load_graphs(datasets)
    found = []
    graph_id, graph = "", None
    for done, row in enumerate(rows):
        on_progress("model-parallel rows", done, len(rows))
        if row.graph_id != graph_id:
            graph_id, graph = row.graph_id, canonicalise(graphs[row.graph_id])
        try:
            prediction = predictor.predict(graph, row.job())
        except GnnpredError as error:  # a layout that the model's layers or the node exclude
            logger.warning("left out %s: %s", row.row_id, error)
            continue
        found.append((row, prediction.step_time_ms))
    on_progress("model-parallel rows", len(rows), len(rows))
    return found
