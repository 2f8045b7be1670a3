"""Predict how long one training iteration takes, from an ONNX file, on a laptop.

    from gnnpred import JobSpec, Precision, find_device, predict

    job = JobSpec(device=find_device("A100-SXM4-80GB"), precision=Precision.MIXED, batch_size=256, gpus=8)
    prediction = predict("resnet50.onnx", job)
    print(prediction.step_time_ms, prediction.interval_90_ms, prediction.breakdown_ms)

Names are loaded at first use, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnpred.calibration_runs import calibrate
    from gnnpred.checkpoint import Checkpoint, load_checkpoint
    from gnnpred.errors import GnnpredError, UsageError
    from gnnpred.graph import OpGraph
    from gnnpred.hardware import DeviceSpec, find_device, list_devices, load_device_file
    from gnnpred.inference_correction import MeasuredInference
    from gnnpred.job import ActivationRule, JobSpec, Phase, Precision
    from gnnpred.prediction import OpPrediction, Prediction
    from gnnpred.predictor import Predictor, predict, read_canonical

__version__ = "0.1.0"

__all__ = [
    "ActivationRule",
    "Checkpoint",
    "DeviceSpec",
    "GnnpredError",
    "JobSpec",
    "MeasuredInference",
    "OpGraph",
    "OpPrediction",
    "Phase",
    "Precision",
    "Prediction",
    "Predictor",
    "UsageError",
    "__version__",
    "calibrate",
    "find_device",
    "list_devices",
    "load_checkpoint",
    "load_device_file",
    "predict",
    "read_canonical",
]

_MODULE_BY_NAME = {
    "Checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "GnnpredError": "errors",
    "UsageError": "errors",
    "OpGraph": "graph",
    "DeviceSpec": "hardware",
    "find_device": "hardware",
    "list_devices": "hardware",
    "load_device_file": "hardware",
    "MeasuredInference": "inference_correction",
    "ActivationRule": "job",
    "JobSpec": "job",
    "Phase": "job",
    "Precision": "job",
    "OpPrediction": "prediction",
    "Prediction": "prediction",
    "Predictor": "predictor",
    "predict": "predictor",
    "read_canonical": "predictor",
    "calibrate": "calibration_runs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
