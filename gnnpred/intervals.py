"""The 90 % interval of a prediction: a small model of how large errors are, and quantiles of errors measured in it.

Bounds of log(measured / predicted) are ``quantiles * exp(intercept + coefficients . features)``. The features are all
known before anything is measured: how far networks and trees are apart, how launch-bound the step is, its precision,
and how much training has seen of the GPU and of GPUs like it. Fitted by :mod:`gnnpred.training.intervals` on rows
of held-out groups, for GPUs that training has seen and for those that it has not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnpred.errors import GnnpredError
from gnnpred.graph_summary import SUMMARY_FEATURE_NAMES
from gnnpred.known_devices import Novelty

KNOWN_DEVICE, UNSEEN_DEVICE = "known_device", "unseen_device"
INTERVAL_FEATURES = (
    "disagreement", "host_share", "is_half", "is_tf32", "is_fp64", "device_distance", "few_generation_rows",
    "few_device_rows",
)  # fmt: skip
_MAX_DISAGREEMENT = 1.5
_MAX_LOG_BOUND = 3.0  # a factor of 20: wider says nothing
_HOST_TO_GPU = SUMMARY_FEATURE_NAMES.index("log_host_to_gpu")
_HALF = [SUMMARY_FEATURE_NAMES.index(f"precision_{p}") for p in ("fp16", "mixed", "bf16", "mixed-bf16")]
_TF32, _FP64 = (SUMMARY_FEATURE_NAMES.index(f"precision_{p}") for p in ("tf32", "fp64"))


def interval_features(summary: np.ndarray, log_disagreement: np.ndarray, novelty: Sequence[Novelty]) -> np.ndarray:
    """(B, len(INTERVAL_FEATURES)) of B predictions.

    summary (B, len(SUMMARY_FEATURE_NAMES)); log_disagreement (B,) is log(networks' / trees' time), 0 without trees.
    """
    summary = np.asarray(summary, float)
    return np.column_stack(
        [
            np.minimum(np.abs(log_disagreement), _MAX_DISAGREEMENT),
            1 / (1 + np.exp(-summary[:, _HOST_TO_GPU])),  # of host and GPU time together
            summary[:, _HALF].max(1),
            summary[:, _TF32],
            summary[:, _FP64],
            [n.distance for n in novelty],
            [n.few_generation_rows for n in novelty],
            [n.few_device_rows for n in novelty],
        ]
    )


@dataclass(frozen=True)
class IntervalModel:
    """Bounds of one regime. Without coefficients every prediction has the same interval."""

    intercept: float
    coefficients: Mapping[str, float]  # of INTERVAL_FEATURES; one that is not named counts 0
    quantiles: tuple[float, float]  # 5 % and 95 %, of log(measured / predicted) / scale

    def log_scale(self, features: np.ndarray) -> np.ndarray:
        """(B,) from (B, len(INTERVAL_FEATURES))."""
        weights = np.array([self.coefficients.get(name, 0.0) for name in INTERVAL_FEATURES])
        return self.intercept + features @ weights

    def bounds(self, features: np.ndarray) -> np.ndarray:
        """(B, 2) lower and upper bound of log(measured / predicted)."""
        scale = np.exp(np.clip(self.log_scale(features), -20, 20))
        return np.clip(np.outer(scale, self.quantiles), -_MAX_LOG_BOUND, _MAX_LOG_BOUND)

    @classmethod
    def constant(cls, low: float, high: float) -> "IntervalModel":
        """The same bounds for every prediction."""
        return cls(0.0, {}, (low, high))

    @classmethod
    def uncalibrated(cls) -> "IntervalModel":
        """The widest there is, for a checkpoint whose errors nobody has measured."""
        return cls.constant(-_MAX_LOG_BOUND, _MAX_LOG_BOUND)

    def as_dict(self) -> dict[str, Any]:
        return {
            "intercept": round(self.intercept, 5),
            "coefficients": {name: round(value, 5) for name, value in self.coefficients.items()},
            "quantiles": [round(value, 5) for value in self.quantiles],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, where: str) -> "IntervalModel":
        """Inverse of :meth:`as_dict`; raises GnnpredError for anything that is not one. ``where`` names the file."""
        try:
            low, high = (float(value) for value in content["quantiles"])
            model = cls(
                float(content["intercept"]),
                {str(name): float(value) for name, value in content["coefficients"].items()},
                (low, high),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GnnpredError(f"{where}: not an interval: {type(error).__name__} {error}") from error
        values = (model.intercept, *model.coefficients.values(), low, high)
        if not np.isfinite(values).all() or low > high:
            raise GnnpredError(f"{where}: an interval needs finite numbers, the lower quantile first")
        if unknown := sorted(set(model.coefficients) - set(INTERVAL_FEATURES)):
            raise GnnpredError(f"{where}: an interval has no feature {unknown[0]!r}")
        return model


def interval_models(content: Mapping[str, Any], *, where: str) -> dict[str, IntervalModel]:
    """The models by regime from JSON; GPUs that training has seen are always among them."""
    if not isinstance(content, Mapping) or KNOWN_DEVICE not in content:
        raise GnnpredError(f"{where}: no 90 % interval for {KNOWN_DEVICE}: made by another gnnpred, train it again")
    return {str(name): IntervalModel.from_dict(entry, where=where) for name, entry in content.items()}
