"""The tracks of the communication head with everything that is at hand: folds' networks, the shipped checkpoint."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gnnpred.checkpoint import Checkpoint, CheckpointCard
from gnnpred.corpus.splits import load_split
from gnnpred.corpus.store import MeasurementRow, load_graphs
from gnnpred.errors import GnnpredError
from gnnpred.features import FEATURE_SCHEMA_VERSION, GLOBAL_FEATURE_NAMES, NODE_FEATURE_NAMES
from gnnpred.op_kinds import OP_KINDS
from gnnpred.passes.canonical import canonicalise
from gnnpred.predictor import Predictor
from gnnpred.training.communication_tracks import (
    Compute,
    communication_lines,
    communication_table,
    layout_rows,
    write_section,
    write_table,
)
from gnnpred.training.evaluate import ENSEMBLE, require_networks, run_track
from gnnpred.training.experiments import Corpus, Fold, RecipeSettings, load_encoded_corpus
from gnnpred.training.networks import load_networks
from gnnpred.training.release import export_onnx

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

    Without the networks of the folds compute is the measured one and model-parallel rows, which nobody measured on
    one GPU, are not scored; ``missing`` in the table says so.
    """
    missing = []
    compute = None
    layouts: list[tuple[MeasurementRow, float]] = []
    try:
        require_networks(datasets, ("family", "architecture"), settings, folds)
    except GnnpredError as error:
        missing.append(f"predicted compute and model-parallel rows: {error}")
    else:
        corpus = load_encoded_corpus(datasets, settings, work, num_workers, on_progress, with_blind=False)
        compute = held_out_compute(corpus, settings, folds, on_progress)
        layouts = predicted_layouts(datasets, out, settings, folds, on_progress)
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


def fold_checkpoint(card: Mapping[str, Any], settings: RecipeSettings, folds: Path, fold: str) -> Checkpoint:
    """The networks of an architecture fold as a checkpoint, without trees; intervals are those of ``card``."""
    none = np.zeros(0, np.int64)
    members = load_networks(folds, Fold("architecture", fold, none, none), settings)
    model_bytes = export_onnx(members, settings.shares_of(settings.members_of("architecture")))
    content = {
        **card,
        "name": f"architecture-{fold}",
        "feature_schema": FEATURE_SCHEMA_VERSION,
        "node_features": list(NODE_FEATURE_NAMES),
        "global_features": list(GLOBAL_FEATURE_NAMES),
        "op_kinds": list(OP_KINDS),
        "model_sha256": hashlib.sha256(model_bytes).hexdigest(),
        "trees_sha256": "",
        "tree_weight": 0.0,
        "calibration_sha256": "",
    }
    return Checkpoint(CheckpointCard.from_json(content), model_bytes, b"")


def predicted_layouts(
    datasets: Path, checkpoint: Path, settings: RecipeSettings, folds: Path, on_progress: Progress
) -> list[tuple[MeasurementRow, float]]:
    """Model-parallel rows beside the step predicted by networks of the fold that holds out their architecture."""
    split = load_split(datasets / "splits" / "architecture.json")
    card = json.loads((checkpoint / "card.json").read_text(encoding="utf-8"))
    rows = sorted(
        layout_rows(datasets), key=lambda r: (split.fold_of(r), r.graph_id, r.device, r.tensor_parallel, r.row_id)
    )
    graphs = load_graphs(datasets)
    found = []
    current: tuple[int, str] = (-1, "")
    predictor, graph = None, None
    for done, row in enumerate(rows):
        on_progress("model-parallel rows", done, len(rows))
        fold = split.fold_of(row)
        if predictor is None or fold != current[0]:
            predictor = Predictor(fold_checkpoint(card, settings, folds, str(fold)))
        if graph is None or row.graph_id != current[1]:
            graph = canonicalise(graphs[row.graph_id])
        current = (fold, row.graph_id)
        try:
            prediction = predictor.predict(graph, row.job())
        except GnnpredError as error:  # a layout that the model's layers or the node exclude
            logger.warning("left out %s (%s): %s", row.row_id, row.source_id, error)
            continue
        found.append((row, prediction.step_time_ms))
    on_progress("model-parallel rows", len(rows), len(rows))
    return found
