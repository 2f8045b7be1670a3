"""A checkpoint that answers with the plain roofline: for tests of everything around the network."""

from dataclasses import dataclass

import numpy as np

from gnnpred.checkpoint import ComputeTimes
from gnnpred.graph import DType


@dataclass(frozen=True)
class RooflineCard:
    name: str = "roofline"
    default_framework_version: str = "2.4"
    devices: tuple[str, ...] = ()


class RooflineCheckpoint:
    """max(flops / peak, bytes / bandwidth) per op; interval 0.8 to 1.3 of the prediction."""

    card = RooflineCard()

    def __init__(self) -> None:
        self.num_calls = 0

    def predict(self, graph, costs, job, *, structure=None):
        self.num_calls += 1
        device = job.device
        op_ms = np.array(
            [
                max(
                    cost.flops / (device.peak_tflops(op.compute_dtype or DType.FP32) * 1e9),
                    cost.bytes_moved / (device.mem_bandwidth_gb_s * 1e6),
                )
                for op, cost in zip(graph.ops, costs, strict=True)
            ]
        )
        return ComputeTimes(op_ms=op_ms, compute_ms=float(op_ms.sum()), interval_factors=(0.8, 1.3), warnings=())
