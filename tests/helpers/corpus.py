"""A measurement row and a small stored graph for tests of the corpus."""

from gnnpred.corpus.store import MeasurementRow
from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec
from gnnpred.job import ActivationRule, Phase, Precision


def make_row(**changes) -> MeasurementRow:
    fields = {
        "row_id": "abc", "source_id": "some-source", "source": "owner/name@1:file", "model": "resnet18",
        "graph_id": "g",
        "architecture": "a", "family": "resnet", "phase": Phase.TRAIN, "framework": "pytorch",
        "framework_version": "1.12",
        "cuda": "11.3", "device": "RTX3090", "precision": Precision.MIXED, "activation_rule": ActivationRule.AUTOCAST,
        "tf32_matmul": False, "memory_format": "nhwc", "compiler": "eager", "batch_size": 32, "input": "3x224x224",
        "optimizer": "sgd", "grad_accum": 1, "host_copy": True, "data_loader": False, "input_gradient": False, "os": "",
        "step_time_ms": 12.5, "superseded": False, "suspect": False, "unstable": False, "few_iterations": False,
        "duplicate_of": "", "excluded_reason": "", "used_for_training": True, "note": "a; note, with \"quotes\"",
    }  # fmt: skip
    return MeasurementRow(**fields | changes)


def make_graph(image: int = 8, classes: int = 10, *, kernel: int = 3) -> OpGraph:
    tensors = (
        TensorSpec((1, 3, image, image), DType.FP32, Role.INPUT, (0,)),
        TensorSpec((4, 3, kernel, kernel), DType.FP32, Role.PARAMETER),
        TensorSpec((1, 4, image, image), DType.FP32, Role.ACTIVATION, (0,)),
        TensorSpec((), DType.FP32, Role.CONSTANT, (), 0.125),
        TensorSpec((1, 4, image, image), DType.FP32, Role.ACTIVATION, (0,)),
        TensorSpec((1, 4), DType.FP32, Role.ACTIVATION, (0,)),
        TensorSpec((classes, 4), DType.FP32, Role.PARAMETER),
        TensorSpec((1, classes), DType.FP32, Role.ACTIVATION, (0,)),
    )
    conv = {"kernel": (kernel, kernel), "stride": (1, 1), "dilation": (1, 1), "padding": (1, 1), "groups": 1}
    ops = (
        Op("conv", (0, 1), (2,), conv), Op("mul", (2, 3), (4,)), Op("reduce_mean", (4,), (5,), {"axes": (2, 3)}),
        Op("linear", (5, 6), (7,)),
    )  # fmt: skip
    return OpGraph(tensors, ops, inputs=(0,), outputs=(7,), batch_size=1, name="small")
