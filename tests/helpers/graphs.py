"""Small canonical graphs."""

from gnnpred.graph import DType, Op, OpGraph, Role, TensorSpec


def tiny_cnn(batch_size: int = 8) -> OpGraph:
    """conv 3->16 (3x3, 32x32 images), relu, global average, linear 16->10."""
    fp32 = DType.FP32
    tensors = (
        TensorSpec((batch_size, 3, 32, 32), fp32, Role.INPUT, (0,), name="image"),
        TensorSpec((16, 3, 3, 3), fp32, Role.PARAMETER, name="conv.weight"),
        TensorSpec((batch_size, 16, 32, 32), fp32, Role.ACTIVATION, (0,), name="conv.out"),
        TensorSpec((batch_size, 16, 32, 32), fp32, Role.ACTIVATION, (0,), name="relu.out"),
        TensorSpec((batch_size, 16), fp32, Role.ACTIVATION, (0,), name="pool.out"),
        TensorSpec((10, 16), fp32, Role.PARAMETER, name="fc.weight"),
        TensorSpec((batch_size, 10), fp32, Role.ACTIVATION, (0,), name="logits"),
    )
    convolution = {"kernel": (3, 3), "stride": (1, 1), "dilation": (1, 1), "padding": (1, 1), "groups": 1}
    ops = (
        Op("conv", (0, 1), (2,), convolution, name="conv"),
        Op("relu", (2,), (3,), name="relu"),
        Op("reduce_mean", (3,), (4,), {"axes": (2, 3)}, name="pool"),
        Op("linear", (4, 5), (6,), name="fc"),
    )
    return OpGraph(tensors, ops, (0,), (6,), batch_size, name="tiny_cnn")
