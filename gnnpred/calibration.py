"""Corrections of a checkpoint to a user's own machine, from a handful of measured runs.

The network's answer for a device is multiplied by ``exp(f(x))``, where ``f`` is a Gaussian process over
log(measured / predicted) with three parts: a bias of the device, smaller ones of the precision class and the phase, and
a smooth part over what the step is made of, so that networks that look alike share what is learned. The prior holds
every part near zero: few runs move the answer little. On a GPU that training has seen, the bias is tiny unless the runs
speak for a machine that differs from the corpus (evidence against odds). Runs that disagree with all others lose weight
(Student's t). Every device has its own process; devices without runs are left alone.

What is stored (``calibration.json``) are the runs themselves and the prior: fitting takes a millisecond and is done
again at load.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from gnnpred.errors import GnnpredError
from gnnpred.features import CATEGORIES
from gnnpred.graph_summary import SUMMARY_FEATURE_NAMES

CALIBRATION_FILE = "calibration.json"
MAX_RUNS_PER_DEVICE = 1000  # fitting is cubic in it
_FORMAT = 1
_MAX_LOG_RATIO = 50.0
_INTERVAL_SHARE = 0.9
_NORMAL_Q95 = 1.645  # half-width of a normal 90 % interval, in standard deviations

# Features of the smooth part with the distance over which the correction fades, in the feature's own unit.
# Shares are shares of roofline time.
_LENGTH_SCALES: dict[str, float] = {
    "log_host_to_gpu": 2.0,
    "log_batch": 3.0,
    "nhwc": 1.0,
    "torch_compile": 1.0,
    "mean_is_depthwise": 0.3,
    **{f"share_{category}": 0.3 for category in CATEGORIES},
}
CALIBRATION_FEATURES: tuple[str, ...] = tuple(_LENGTH_SCALES)
_FEATURE_IDX = [SUMMARY_FEATURE_NAMES.index(name) for name in CALIBRATION_FEATURES]
_HALF_IDX = [SUMMARY_FEATURE_NAMES.index(f"precision_{p}") for p in ("fp16", "bf16", "mixed", "mixed-bf16")]
_INFERENCE_IDX = SUMMARY_FEATURE_NAMES.index("phase_inference")
_SCALES = np.array(list(_LENGTH_SCALES.values()))


@dataclass(frozen=True, kw_only=True)
class CalibrationPrior:
    """Standard deviations of log(measured / predicted), by where they come from.

    Chosen on held-out rows of the corpus (docs/calibration.md).
    """

    known_bias: float = 0.03  # of a device that training has seen, on a machine like those of the corpus
    other_machine_bias: float = 0.25  # of one whose host or software differ from them
    other_machine_odds: float = 0.1  # of the latter before any run is seen
    unseen_bias: float = 0.5  # of a device that training has not seen
    precision_class: float = 0.3  # of half against full precision, as a share of the bias
    phase: float = 0.5  # of inference against training, as a share of the bias
    similar: float = 0.25  # shared by steps that look alike
    known_noise: float = 0.3  # of one run, on a device that training has seen
    unseen_noise: float = 0.15  # and on one that it has not: what the runs say there is news
    degrees_of_freedom: float = 4.0  # of Student's t: how fast a run that disagrees loses weight
    interval_runs: float = 15.0  # runs whose residuals weigh as much as the checkpoint's own interval


@dataclass(frozen=True, kw_only=True)
class CalibrationRun:
    """One measured run as calibration sees it."""

    device: str
    is_known_device: bool  # training has seen the device
    is_half: bool
    is_inference: bool
    features: tuple[float, ...]  # in the order of CALIBRATION_FEATURES
    log_ratio: float  # log(measured / predicted) of the compute time
    group: str = ""  # runs of one model share it: they are left out together
    interval_log: tuple[float, float] = (0.0, 0.0)  # the checkpoint's own 90 % interval for a seen device

    @classmethod
    def of_summary(
        cls,
        summary: np.ndarray,
        *,
        device: str,
        is_known_device: bool,
        interval_log: tuple[float, float],
        log_ratio: float = 0.0,
        group: str = "",
    ) -> "CalibrationRun":
        """From a graph's summary (:func:`gnnpred.graph_summary.summarise_graphs`), (len(SUMMARY_FEATURE_NAMES),)."""
        return cls(
            device=device,
            is_known_device=is_known_device,
            is_half=bool(summary[_HALF_IDX].max() > 0.5),
            is_inference=bool(summary[_INFERENCE_IDX] > 0.5),
            # rounded, so that a stored run is the same as a fresh one
            features=tuple(round(float(value), 5) for value in summary[_FEATURE_IDX]),
            log_ratio=log_ratio,
            group=group,
            interval_log=(float(interval_log[0]), float(interval_log[1])),
        )


@dataclass(frozen=True)
class Correction:
    """What calibration does to one prediction."""

    factor: float  # multiplies the compute time
    interval_log: tuple[float, float]  # 90 % interval of log(measured / corrected prediction)
    num_runs: int  # on the device
    num_groups: int  # models among them


class DeviceCalibration:
    """The fitted process of one device."""

    def __init__(self, runs: Sequence[CalibrationRun], prior: CalibrationPrior) -> None:
        self.runs = tuple(runs)
        self.prior = prior
        self._traits = _Traits.of(self.runs)
        self._measured = np.array([run.log_ratio for run in self.runs])  # (n,)
        is_known = self.runs[0].is_known_device
        self._bias_sd = prior.other_machine_bias if is_known else prior.unseen_bias
        self._noise_var = (prior.known_noise if is_known else prior.unseen_noise) ** 2
        self.weights = self._robust_weights()  # (n,), 1 = trusted
        if is_known:
            other = self._log_evidence() + np.log(prior.other_machine_odds)
            self._bias_sd = prior.known_bias
            if other > self._log_evidence():
                self._bias_sd = prior.other_machine_bias
        self._inverse = np.linalg.inv(self._total_covariance(self.weights))
        self._coefficients = self._inverse @ self._measured

    def correct(self, run: CalibrationRun) -> Correction:
        """The correction of a prediction that looks like ``run`` (its log_ratio is not read)."""
        traits = _Traits.of([run])
        mean = float((self._covariance(traits, self._traits) @ self._coefficients)[0])
        return Correction(
            factor=float(np.exp(mean)),
            interval_log=self._interval(traits, run.interval_log),
            num_runs=len(self.runs),
            num_groups=len({r.group for r in self.runs}),
        )

    @cached_property
    def left_out_residuals(self) -> np.ndarray:
        """(n,) log(measured / corrected) of every run, corrected by the runs of all other models.

        Block formula of leave-group-out: with A the inverse covariance, A[g,g]^-1 (A y)[g].
        """
        groups = np.array([run.group for run in self.runs])
        residuals = np.zeros(len(groups))
        for group in np.unique(groups):
            own = np.flatnonzero(groups == group)
            residuals[own] = np.linalg.solve(self._inverse[np.ix_(own, own)], self._coefficients[own])
        return residuals

    def _covariance(self, a: "_Traits", b: "_Traits", *, with_similar: bool = True) -> np.ndarray:
        """(len(a), len(b)) prior covariance; without the part of similar steps where asked."""
        prior = self.prior
        covariance = self._bias_sd**2 * (
            1.0
            + prior.precision_class**2 * (a.is_half[:, None] == b.is_half)
            + prior.phase**2 * (a.is_inference[:, None] == b.is_inference)
        )
        if with_similar:
            squares = ((a.scaled[:, None] - b.scaled) ** 2).sum(2)
            covariance = covariance + prior.similar**2 * np.exp(-0.5 * squares)
        return covariance

    def _total_covariance(self, weights: np.ndarray) -> np.ndarray:
        """(n, n) covariance of the measured ratios: prior and noise."""
        return self._covariance(self._traits, self._traits) + np.diag(self._noise_var / weights)

    def _log_evidence(self) -> float:
        """Log density of the measured ratios under the current bias, up to a constant."""
        covariance = self._total_covariance(self.weights)
        _, log_determinant = np.linalg.slogdet(covariance)
        return -0.5 * float(self._measured @ np.linalg.solve(covariance, self._measured) + log_determinant)

    def _robust_weights(self) -> np.ndarray:
        """Student's t weights of the runs from their standardised leave-one-out residuals, iterated."""
        weights = np.ones(len(self.runs))
        freedom = self.prior.degrees_of_freedom
        if len(self.runs) < 3:  # which of two runs is the odd one, nobody can tell
            return weights
        for _ in range(10):
            inverse = np.linalg.inv(self._total_covariance(weights))
            # leave-one-out residual and variance: (A y)_i / A_ii and 1 / A_ii, the latter without the run's own
            # inflated noise, so that a discarded run can come back
            residual = (inverse @ self._measured) / np.diag(inverse)
            variance = 1 / np.diag(inverse) - self._noise_var / weights + self._noise_var
            weights = np.minimum(1.0, (freedom + 1) / (freedom + residual**2 / variance))
        return weights

    def _interval(self, traits: "_Traits", shipped: tuple[float, float]) -> tuple[float, float]:
        """The checkpoint's interval, widened by what the device's biases may still be, blended with the residuals."""
        cross = self._covariance(traits, self._traits, with_similar=False)
        own = self._covariance(traits, traits, with_similar=False)
        variance = max(float((own - cross @ self._inverse @ cross.T)[0, 0]), 0.0)
        unsure = _NORMAL_Q95**2 * variance
        low, high = (np.sqrt(side**2 + unsure) for side in (min(shipped[0], 0.0), max(shipped[1], 0.0)))
        num_groups = len({run.group for run in self.runs})
        if num_groups < 2:
            return -float(low), float(high)
        residuals = np.sort(np.abs(self.left_out_residuals))
        count = len(residuals)
        rank = min(int(np.ceil(_INTERVAL_SHARE * (count + 1))), count)  # split-conformal quantile
        measured = residuals[rank - 1]
        weight = count / (count + self.prior.interval_runs)
        low, high = (float((1 - weight) * side + weight * measured) for side in (low, high))
        return -low, high


@dataclass(frozen=True)
class _Traits:
    """What the covariance reads, as arrays over runs."""

    is_half: np.ndarray  # (n,) bool
    is_inference: np.ndarray  # (n,) bool
    scaled: np.ndarray  # (n, len(CALIBRATION_FEATURES))

    @classmethod
    def of(cls, runs: Sequence[CalibrationRun]) -> "_Traits":
        features = np.array([run.features for run in runs], float)
        return cls(
            is_half=np.array([run.is_half for run in runs]),
            is_inference=np.array([run.is_inference for run in runs]),
            scaled=features / _SCALES,
        )


@dataclass(frozen=True)
class Calibration:
    """Corrections by device, fitted to runs."""

    runs: tuple[CalibrationRun, ...]
    prior: CalibrationPrior = field(default_factory=CalibrationPrior)

    @cached_property
    def by_device(self) -> dict[str, DeviceCalibration]:
        """Device name -> its fitted process."""
        members: dict[str, list[CalibrationRun]] = {}
        for run in self.runs:
            members.setdefault(run.device, []).append(run)
        for device, own in members.items():
            if len(own) > MAX_RUNS_PER_DEVICE:
                raise GnnpredError(
                    f"{len(own)} calibration runs on {device}: at most {MAX_RUNS_PER_DEVICE} are taken; "
                    "with that many, train on them instead"
                )
        return {device: DeviceCalibration(own, self.prior) for device, own in members.items()}

    def correct(self, run: CalibrationRun) -> Correction | None:
        """The correction for a prediction; None for a device without runs, whose answer stays."""
        own = self.by_device.get(run.device)
        return own.correct(run) if own else None

    def updated(self, runs: Iterable[CalibrationRun]) -> "Calibration":
        """With the runs of some devices replaced; those of all others kept."""
        new = tuple(runs)
        renewed = {run.device for run in new}
        return Calibration((*(run for run in self.runs if run.device not in renewed), *new), self.prior)

    def to_json(self) -> bytes:
        """Content of calibration.json."""
        content = {
            "format": _FORMAT,
            "features": list(CALIBRATION_FEATURES),
            "prior": asdict(self.prior),
            "devices": {
                device: {"num_runs": len(own.runs), "num_models": len({run.group for run in own.runs})}
                for device, own in self.by_device.items()
            },
            "runs": [asdict(run) for run in self.runs],
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, content: Mapping[str, Any], *, where: str) -> "Calibration":
        """Inverse of :meth:`to_json`; raises GnnpredError for anything that is not one. ``where`` names the file."""
        try:
            if content["format"] != _FORMAT or content["features"] != list(CALIBRATION_FEATURES):
                raise GnnpredError(f"{where} is of another version of gnnpred: calibrate again")
            prior = CalibrationPrior(**{f.name: _positive(content["prior"][f.name]) for f in fields(CalibrationPrior)})
            runs = tuple(_run_of(entry) for entry in content["runs"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GnnpredError(f"{where} is not a calibration: {type(error).__name__} {error}") from error
        return cls(runs, prior)


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < 1e6:
        raise ValueError(f"{value!r} is not above 0")
    return number


def _finite(value: Any) -> float:
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _run_of(entry: Mapping[str, Any]) -> CalibrationRun:
    features = tuple(_finite(value) for value in entry["features"])
    low, high = entry["interval_log"]
    if len(features) != len(CALIBRATION_FEATURES):
        raise ValueError(f"{len(features)} features instead of {len(CALIBRATION_FEATURES)}")
    log_ratio = _finite(entry["log_ratio"])
    if abs(log_ratio) > _MAX_LOG_RATIO:
        raise ValueError(f"log_ratio {log_ratio} is out of range")
    return CalibrationRun(
        device=str(entry["device"]),
        is_known_device=bool(entry["is_known_device"]),
        is_half=bool(entry["is_half"]),
        is_inference=bool(entry["is_inference"]),
        features=features,
        log_ratio=log_ratio,
        group=str(entry["group"]),
        interval_log=(_finite(low), _finite(high)),
    )


def model_groups(keys: Sequence[Iterable[str]]) -> list[str]:
    """One group name per row: rows that share any key (a file, a model's name) fall into one group."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = key = parent[parent[key]]
        return key

    own_keys = [list(row) for row in keys]
    for row in own_keys:
        for key in row[1:]:
            parent[root(key)] = root(row[0])
    return [root(row[0]) for row in own_keys]


def fold_numbers(groups: Sequence[str], num_folds: int) -> np.ndarray:
    """(n,) int64 fold of each row; a group stays whole, the largest groups are dealt out first."""
    names, counts = np.unique(list(groups), return_counts=True)
    fold_of: dict[str, int] = {}
    sizes = np.zeros(min(num_folds, len(names)), int)
    for name, count in sorted(zip(names.tolist(), counts.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0])):
        fold_of[name] = int(sizes.argmin())
        sizes[fold_of[name]] += count
    return np.array([fold_of[group] for group in groups], np.int64)


def cross_validated(
    runs: Sequence[CalibrationRun], *, num_folds: int = 10, prior: CalibrationPrior | None = None
) -> list[Correction | None]:
    """The correction that each run would get from the runs of other models: k folds grouped by ``group``.

    None where no other run is on the device.
    """
    prior = prior or CalibrationPrior()
    fold = fold_numbers([run.group for run in runs], num_folds)
    corrections: list[Correction | None] = [None] * len(runs)
    for number in np.unique(fold):
        calibration = Calibration(tuple(run for run, f in zip(runs, fold, strict=True) if f != number), prior)
        for i in np.flatnonzero(fold == number):
            corrections[i] = calibration.correct(runs[i])
    return corrections
