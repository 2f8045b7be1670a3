"""A corpus of a few small networks in five families, encoded in a moment."""

from dataclasses import replace
from pathlib import Path

from gnnpred.corpus.operators import OperatorRow, write_operator_rows
from gnnpred.corpus.splits import write_splits
from gnnpred.corpus.store import GRAPHS_FILE, MEASUREMENTS_FILE, encode_graph, write_graphs, write_rows
from gnnpred.job import ActivationRule, Precision
from tests.helpers.corpus import make_graph, make_row

FAMILIES = ("ant", "bee", "cat", "dog", "elk")


def write_tiny_corpus(folder: Path, *, slower_family: str = "", factor: float = 1.0) -> Path:
    """60 rows of five families, one in each fold; the times of one family may be multiplied."""
    folder.mkdir(parents=True, exist_ok=True)
    graphs, rows = [], []
    for f, family in enumerate(FAMILIES):
        graph_id = f"g{f}"
        graphs.append(encode_graph(replace(make_graph(8 + 8 * f, kernel=3), name=family)) | {"id": graph_id})
        for precision in (Precision.FP32, Precision.MIXED):
            rule = ActivationRule.AUTOCAST
            for batch_size in (8, 32, 128):
                for d, device in enumerate(("RTX3090", "V100-SXM2-16GB")):
                    time_ms = (0.4 + 1e-3 * (f + 1) * batch_size) * (1 + 0.3 * d)
                    time_ms *= factor if family == slower_family else 1
                    row_id = f"{family}-{precision}-{batch_size}-{d}"
                    rows.append(
                        make_row(
                            row_id=row_id, graph_id=graph_id, model=family, family=family, architecture=family,
                            device=device, precision=precision, activation_rule=rule, batch_size=batch_size,
                            step_time_ms=time_ms,
                        )
                    )  # fmt: skip
    write_rows(folder / MEASUREMENTS_FILE, rows)
    write_graphs(folder / GRAPHS_FILE, graphs)
    write_splits(folder / "splits", rows)
    kernels = [
        OperatorRow("s", "RTX3090", "linear", "fwd", "fp32", (1, 256, 256 * n, 256), 20.0 * n) for n in (1, 2, 4, 8)
    ]
    write_operator_rows(kernels, folder / "operators.csv.gz")
    return folder
