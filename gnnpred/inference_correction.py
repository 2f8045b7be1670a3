"""A measured forward pass of the same model, GPU and software corrects the prediction of its training step.

What the network gets wrong about a model it gets wrong in the forward pass as well: the training step is multiplied
by (measured / predicted forward time) to a power. Figures and how they were chosen: docs/calibration.md.
"""

from dataclasses import dataclass, replace

import numpy as np

from gnnpred.errors import UsageError
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.prediction import InferenceCorrection, Prediction

# Power of measured / predicted: below 1, since a forward pass has errors of its own. A pass in another precision says
# little (correlation of the errors 0.2 to 0.3 instead of 0.7).
CORRECTION_POWER = 0.5
OTHER_PRECISION_POWER = 0.2
# What is left of the interval's width, in log, once a forward pass in the job's precision has corrected the step.
INTERVAL_SHRINK = 0.8
_MAX_MEASURED_MS = 1e7
# Beyond this factor between measurement and prediction the measurement is probably another quantity.
_IMPLAUSIBLE_FACTOR = 3.0


@dataclass(frozen=True, kw_only=True)
class MeasuredInference:
    """One timed forward pass in evaluation mode, on one GPU of the job, with the job's software."""

    ms: float
    batch_size: int | None = None  # None: the job's batch per GPU
    precision: Precision | None = None  # None: the job's precision

    def __post_init__(self) -> None:
        if not 0 < self.ms < _MAX_MEASURED_MS:  # also refuses nan
            raise UsageError(f"the measured inference time must be above 0 ms and below 1e7 ms, got {self.ms:g}")
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"the measured batch must be at least 1, got {self.batch_size}")


def inference_job(job: JobSpec, measured: MeasuredInference) -> JobSpec:
    """The job of the forward pass that was measured; raises UsageError where ``job`` is one itself."""
    if job.phase is Phase.INFERENCE:
        raise UsageError("a measured inference time corrects a training step: the phase must not be inference")
    return replace(
        job.on_one_gpu(),
        phase=Phase.INFERENCE,
        optimizer="none",
        batch_size=measured.batch_size or job.batch_size,
        precision=measured.precision or job.precision,
        host_copy=False,
        data_loader=False,
    )


def correct_by_inference(
    measured: MeasuredInference, forward: Prediction, job: JobSpec
) -> tuple[InferenceCorrection, list[str]]:
    """The factor for the compute time of ``job``, and what to warn of. ``forward`` is the predicted pass."""
    same_precision = forward.job.precision is job.precision
    power = CORRECTION_POWER if same_precision else OTHER_PRECISION_POWER
    ratio = measured.ms / forward.step_time_ms
    applied = InferenceCorrection(
        measured_ms=measured.ms,
        predicted_ms=forward.step_time_ms,
        batch_size=forward.job.batch_size or 1,
        precision=str(forward.job.precision),
        power=power,
        factor=ratio**power,
    )
    notes = []
    if not same_precision:
        notes.append(
            f"the measured inference ran in {applied.precision}, the job runs in {job.precision}: it corrects little; "
            "time it in the job's precision"
        )
    if not 1 / _IMPLAUSIBLE_FACTOR <= ratio <= _IMPLAUSIBLE_FACTOR:
        notes.append(
            f"the measured inference takes {ratio:.2g} times the predicted {forward.step_time_ms:.4g} ms (batch "
            f"{applied.batch_size}, {applied.precision}): check that it is one forward pass, in ms, after a warm-up"
        )
    return applied, notes


def step_interval_factors(factors: tuple[float, float], applied: InferenceCorrection) -> tuple[float, float]:
    """The 90 % interval, as multiples of the prediction, after the correction."""
    if applied.power < CORRECTION_POWER:
        return factors
    low, high = (float(np.exp(INTERVAL_SHRINK * np.log(factor))) for factor in factors)
    return low, high
