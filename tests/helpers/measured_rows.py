"""A small corpus of invented measurements, to test what is computed from held-out predictions."""

from collections.abc import Sequence

import numpy as np

from gnnpred.corpus.splits import Split
from gnnpred.corpus.store import MeasurementRow
from gnnpred.costs import op_costs
from gnnpred.features import encode, graph_structure
from gnnpred.job import ActivationRule, Phase, Precision
from gnnpred.passes.step import complete_step, lower_forward
from tests.helpers.graphs import tiny_cnn


def measurement(**changes) -> MeasurementRow:
    """A row of ordinary values with some changed."""
    values = {
        "row_id": "r", "source_id": "lab-1", "source": "", "model": "net", "graph_id": "g", "architecture": "net",
        "family": "net", "phase": Phase.TRAIN, "framework": "pytorch", "framework_version": "2.1", "cuda": "",
        "device": "RTX3090", "precision": Precision.FP32, "activation_rule": ActivationRule.AUTOCAST,
        "tf32_matmul": True, "memory_format": "nchw", "compiler": "eager", "batch_size": 8, "input": "224",
        "optimizer": "sgd", "grad_accum": 1, "host_copy": False, "data_loader": False, "input_gradient": False,
        "os": "", "step_time_ms": 10.0, "superseded": False, "suspect": False, "unstable": False,
        "few_iterations": False, "duplicate_of": "", "excluded_reason": "", "used_for_training": True, "note": "",
    }  # fmt: skip
    return MeasurementRow(**(values | changes))


def corpus_of(rows: Sequence[MeasurementRow], *, fold_by_family: dict[str, int], with_blind: bool = False):
    """A Corpus of these rows, all with the tiny CNN as their graph; families are also the architectures' folds."""
    from gnnpred.training.data import FlatRows
    from gnnpred.training.experiments import Corpus
    from gnnpred.training.loop import OperatorRows

    structures = {}
    arrays = []
    for row in rows:
        job = row.job()
        key = (job.batch_size, job.precision)
        if key not in structures:
            lowered = lower_forward(tiny_cnn(), batch_size=job.batch_size, precision=job.precision)
            full = complete_step(lowered, phase=Phase.TRAIN, optimizer="sgd")
            structures[key] = graph_structure(full, op_costs(full))
        arrays.append(encode(structures[key], job))
    flat = FlatRows.from_arrays(arrays)
    splits = {name: Split(name, fold_by_family) for name in ("family", "architecture")}
    return Corpus(
        rows=tuple(rows),
        aware=flat,
        blind=flat if with_blind else None,
        operators=OperatorRows(flat, np.ones((len(rows), 5), np.float32), np.ones(len(rows))),
        operator_rows=(),
        splits=splits | {"random": Split("random", {})},
    )


def track_result(corpus, track: str, predicted_ms: dict[str, np.ndarray]):
    """A TrackResult over the folds of ``track``; predictions are given per corpus row."""
    from gnnpred.training.evaluate import TrackResult
    from gnnpred.training.experiments import folds_of

    folds = list(folds_of(corpus, track))
    row_idx = np.concatenate([fold.test_idx for fold in folds])
    return TrackResult(
        track=track,
        row_idx=row_idx,
        fold=np.concatenate([np.full(len(fold.test_idx), i) for i, fold in enumerate(folds)]),
        predicted_ms={name: np.asarray(values, float)[row_idx] for name, values in predicted_ms.items()},
    )
