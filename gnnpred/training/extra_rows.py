"""Rows that no network trains on and that are still predicted by the fold that holds out their group.

Two kinds: timed forward passes of networks whose training step is in the corpus (what a user who gives
``--measured-inference-ms`` has), and NeuSight's training points that the corpus leaves out of training because
their forward pass contains memory allocation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gnnpred.corpus.store import MeasurementRow, load_graphs
from gnnpred.training.data import FlatRows
from gnnpred.training.experiments import Corpus, Fold, encoding_digest
from gnnpred.training.rows import encode_rows
from gnnpred.training.trees import roofline_of, summed_features

NEUSIGHT = "neusight"


@dataclass(frozen=True)
class ExtraRows:
    """Rows beside the corpus, encoded. e rows in the order of ``rows``."""

    rows: tuple[MeasurementRow, ...]
    flat: FlatRows | None  # None where there are no rows

    @cached_property
    def devices(self) -> np.ndarray:
        return np.array([row.spec.name for row in self.rows], dtype=object).astype(str)

    @cached_property
    def summary(self) -> np.ndarray:
        """(e, len(SUMMARY_FEATURE_NAMES)) float32."""
        return summed_features(self.flat)

    @cached_property
    def roofline_ms(self) -> np.ndarray:
        """(e,) float64."""
        return roofline_of(self.flat)

    def held_out_by(self, corpus: Corpus, fold: Fold) -> np.ndarray:
        """Positions of the extra rows that a fold of ``family``, ``architecture`` or ``neusight`` holds out."""
        if fold.track == NEUSIGHT:
            chosen = [not is_forward_pass(row) and d in fold.hidden_devices
                      for row, d in zip(self.rows, self.devices, strict=True)]  # fmt: skip
        elif fold.track in ("family", "architecture"):
            split = corpus.splits[fold.track]
            chosen = [is_forward_pass(row) and split.fold_of(row) == int(fold.name) for row in self.rows]
        else:
            chosen = [False] * len(self.rows)
        return np.flatnonzero(np.array(chosen, bool))


def is_forward_pass(row: MeasurementRow) -> bool:
    return row.phase == "inference"


def software_key(row: MeasurementRow) -> tuple:
    """What a forward pass must share with a training step to correct it."""
    return (
        row.graph_id,
        row.device,
        row.framework,
        row.framework_version,
        row.memory_format,
        row.compiler,
        row.precision,
    )


def choose_extra_rows(corpus: Corpus, all_rows: Sequence[MeasurementRow]) -> tuple[MeasurementRow, ...]:
    """One forward pass for every training row of timm in NCHW that has one of the same graph, GPU, precision and
    software (the nearest batch), and NeuSight's points that are left out of training."""
    passes: dict[tuple, list[MeasurementRow]] = {}
    for row in all_rows:
        if is_forward_pass(row) and row.used_for_training and row.graph_id and row.compiler != "tensorrt":
            passes.setdefault(software_key(row), []).append(row)
    chosen: dict[str, MeasurementRow] = {}
    for row in corpus.rows:
        if is_forward_pass(row) or not row.source_id.startswith("timm") or row.memory_format != "nchw":
            continue
        partner = nearest_pass(row, passes.get(software_key(row), ()))
        if partner:
            chosen[partner.row_id] = partner
    known = {row.row_id for row in corpus.rows}
    points = [
        row
        for row in all_rows
        if row.source_id.startswith(NEUSIGHT) and row.graph_id and not is_forward_pass(row)
        and not row.used_for_training and not row.duplicate_of and row.gpus == 1 and row.row_id not in known
    ]  # fmt: skip
    return (*sorted(chosen.values(), key=lambda row: row.row_id), *points)


def nearest_pass(row: MeasurementRow, passes: Sequence[MeasurementRow]) -> MeasurementRow | None:
    """The forward pass whose batch is nearest to that of the training row."""
    return min(passes, key=lambda p: (abs(np.log(p.batch_size / row.batch_size)), p.row_id), default=None)


def load_extra_rows(
    datasets: Path,
    corpus: Corpus,
    all_rows: Sequence[MeasurementRow],
    *,
    cache: Path | None = None,
    on_row: Callable[[int, int], None] = lambda done, total: None,
) -> ExtraRows:
    """Choose and encode them, or take the arrays from ``cache``; ``on_row`` is told how many are encoded."""
    rows = choose_extra_rows(corpus, all_rows)
    if not rows:
        return ExtraRows((), None)
    path = cache / f"extra-{encoding_digest(datasets, list(rows))}.npz" if cache else None
    if path and path.exists():
        return ExtraRows(rows, FlatRows.load(path))
    graphs = load_graphs(datasets)
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        on_row(done, len(rows))

    flat = FlatRows.from_arrays(encode_rows(rows, graphs.__getitem__, on_row=count))
    if path:
        flat.save(path)
    return ExtraRows(rows, flat)
