"""Memory per GPU under sharding, tensor and pipeline parallelism: by hand where weights dominate."""

import pytest

from gnnpred.hardware import find_device
from gnnpred.job import JobSpec, Phase, Precision
from gnnpred.memory import estimate_memory_gib
from gnnpred.passes.step import lower_forward
from gnnpred.passes.tensor_parallel import split_products
from gnnpred.units import GIB
from tests.helpers.transformers import small_transformer

A100 = find_device("A100-SXM4-80GB")
# two tokens: activations are nothing beside the weights
GRAPH = small_transformer(8, heads=8, width=512, tokens=2, vocabulary=5000)
WEIGHTS_GIB = GRAPH.num_parameters * 4 / GIB


def _gib(graph=GRAPH, **options):
    options = {"precision": Precision.FP32, "optimizer": "adam", "batch_size": 1, **options}
    job = JobSpec(device=A100, **options)
    share = split_products(lower_forward(graph, batch_size=None, precision=job.precision), job.tensor_parallel)
    return estimate_memory_gib(share.graph, job, whole_ops=share.repeated_ops)


def test_weights_gradients_and_states_are_sharded_by_strategy():
    # weights + gradients + two moments
    assert _gib(gpus=8) == pytest.approx(4 * WEIGHTS_GIB, rel=0.02)
    assert _gib(gpus=8, strategy="zero1") == pytest.approx((2 + 2 / 8) * WEIGHTS_GIB, rel=0.02)
    assert _gib(gpus=8, strategy="zero2") == pytest.approx((1 + 3 / 8) * WEIGHTS_GIB, rel=0.02)
    full = _gib(gpus=8, strategy="fsdp")
    assert 4 / 8 * WEIGHTS_GIB < full < (4 / 8 + 3 / 8) * WEIGHTS_GIB  # and three times one of eight layers
    assert _gib(gpus=16, nodes=2, strategy="fsdp", shard_group=8) == pytest.approx(full)


def test_tensor_parallelism_divides_the_weights():
    assert _gib(gpus=8, tensor_parallel=8) == pytest.approx(_gib() / 8, rel=0.05)


def test_a_stage_has_its_layers_and_the_larger_end():
    vocabulary = 5000 * 512 * 4 / GIB  # embedding; the output layer has as much
    expected = 4 * ((WEIGHTS_GIB - 2 * vocabulary) / 4 + vocabulary)
    assert _gib(gpus=4, pipeline_parallel=4, microbatches=8) == pytest.approx(expected, rel=0.03)


def test_activations_of_a_pipeline_are_those_in_flight():
    graph = small_transformer(8, heads=8, width=64, tokens=512, vocabulary=200)
    one = _gib(graph, optimizer="none", phase=Phase.FORWARD_BACKWARD)
    few = _gib(graph, gpus=4, pipeline_parallel=4, microbatches=2)
    many = _gib(graph, gpus=4, pipeline_parallel=4, microbatches=64)
    assert few < many
    assert many == pytest.approx(_gib(graph, gpus=4, pipeline_parallel=4, microbatches=4))
    assert many == pytest.approx(one, rel=0.2)  # four micro-batches of a quarter of the layers
    assert _gib(graph, gpus=4, pipeline_parallel=4, microbatches=8, interleave=2) > many


def test_checkpointing_and_sequence_parallelism_keep_less():
    graph = small_transformer(8, heads=8, width=64, tokens=512, vocabulary=200)
    assert _gib(graph, activation_checkpointing="full") < 0.5 * _gib(graph)
    assert _gib(graph, gpus=8, tensor_parallel=8, sequence_parallel=True) < _gib(graph, gpus=8, tensor_parallel=8)


def test_each_gpu_has_its_share_of_the_experts():
    graph = small_transformer(4, heads=8, width=256, tokens=8, vocabulary=200, experts=8)
    assert _gib(graph, gpus=8, expert_parallel=8) < 0.4 * _gib(graph, gpus=8)
