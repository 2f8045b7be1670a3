"""Error figures that every report of gnnpred uses, so that they mean the same everywhere."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gnnpred.errors import GnnpredError


@dataclass(frozen=True)
class ErrorSummary:
    """Relative errors of predicted against measured times, in per cent of the measured time."""

    n: int
    mape_pct: float  # mean of |predicted / measured - 1|
    median_pct: float
    p90_pct: float
    bias_pct: float  # mean of predicted / measured - 1: positive = predicts too slow

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise_errors(predicted_ms: np.ndarray, measured_ms: np.ndarray) -> ErrorSummary:
    """Summary over rows; both arrays (n,), n >= 1, measured above 0."""
    if not len(measured_ms):
        raise GnnpredError("no rows to score")
    error_pct = (np.asarray(predicted_ms, float) / np.asarray(measured_ms, float) - 1) * 100
    size = np.abs(error_pct)
    return ErrorSummary(
        n=len(size),
        mape_pct=float(size.mean()),
        median_pct=float(np.median(size)),
        p90_pct=float(np.percentile(size, 90)),
        bias_pct=float(error_pct.mean()),
    )
