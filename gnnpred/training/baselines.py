"""The roofline baseline of every table: physics times a fitted constant."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np


def fit_roofline_constants(
    roofline: np.ndarray, target_ms: np.ndarray, groups: Sequence[tuple[str, str]], train_idx: np.ndarray
) -> dict[tuple[str, str], float]:
    """Median of measured / roofline per (device, precision), per precision (device "") and over all ("", "")."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for i in train_idx:
        device, precision = groups[i]
        ratio = float(target_ms[i] / roofline[i])
        for key in ((device, precision), ("", precision), ("", "")):
            ratios[key].append(ratio)
    return {key: float(np.median(values)) for key, values in ratios.items()}


def predict_roofline(
    roofline: np.ndarray, groups: Sequence[tuple[str, str]], constants: dict[tuple[str, str], float], idx: np.ndarray
) -> np.ndarray:
    """Roofline times the constant of the row's device and precision, else of its precision, else of all."""
    predicted = np.empty(len(idx))
    for out, i in enumerate(idx):
        device, precision = groups[i]
        constant = constants.get((device, precision)) or constants.get(("", precision)) or constants[("", "")]
        predicted[out] = roofline[i] * constant
    return predicted
