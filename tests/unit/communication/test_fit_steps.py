"""The step fit: its vectorised walk is the product's timeline, and it finds constants that it should find."""

import numpy as np
import pytest

from gnnpred.communication.collectives import all_reduce_ms
from gnnpred.communication.fabrics import resolve_fabric
from gnnpred.communication.fit import pattern_search
from gnnpred.communication.fit_steps import (
    BACKWARD_SHARE,
    NUM_SEGMENTS,
    Pair,
    pair_arrays,
    predict_ms,
    synthetic_gradients,
)
from gnnpred.communication.timeline import bucket_time_ms, fill_buckets, local_part, overlap, step_constants
from gnnpred.hardware import find_device

RESNET = {"parameters_m": "25.6", "last_m": "0", "first_m": "2.0", "profile": "cnn"}
BERT = {"parameters_m": "110", "last_m": "24", "first_m": "0", "profile": "even"}


def _pair(model, single_ms, grad_accum=1, **cluster):
    buckets = tuple(fill_buckets(synthetic_gradients(model, 4.0)))
    fabric = resolve_fabric(**cluster)
    local = local_part(fabric)
    return Pair(
        family="test",
        model="test",
        framework="pytorch",
        gpu="test",
        precision="fp32",
        single_ms=single_ms,
        multi_ms=single_ms,
        grad_accum=grad_accum,
        buckets=buckets,
        local_ms=tuple(all_reduce_ms(b.num_bytes, local) if local else 0.0 for b in buckets),
        network_ms=tuple(all_reduce_ms(b.num_bytes, fabric) if fabric.inter else 0.0 for b in buckets),
        fabric=fabric,
    )


def test_the_vectorised_walk_equals_the_timeline():
    a100, v100, rtx = (find_device(name) for name in ("A100-SXM4-80GB", "V100-SXM2-16GB", "RTX3090"))
    pairs = [
        _pair(RESNET, 300.0, device=a100, gpus=8, nodes=1),
        _pair(RESNET, 20.0, device=rtx, gpus=8, nodes=1),
        _pair(BERT, 200.0, device=rtx, gpus=4, nodes=1),
        _pair(BERT, 200.0, device=v100, gpus=32, nodes=4, inter_node="ib100"),
        _pair(BERT, 800.0, 4, device=v100, gpus=4, nodes=4, inter_node="ib100"),
    ]
    constants = step_constants()
    expected = []
    for pair in pairs:
        backward_ms = BACKWARD_SHARE * pair.single_ms / pair.grad_accum
        bucket_ms = [bucket_time_ms(bucket.num_bytes, pair.fabric, constants) for bucket in pair.buckets]
        finish_ms = overlap(
            np.full(NUM_SEGMENTS, backward_ms / NUM_SEGMENTS), pair.buckets, bucket_ms, contention=constants.contention
        )
        expected.append(pair.single_ms + finish_ms - backward_ms + constants.sync_ms(pair.fabric.gpus))
    assert predict_ms(pair_arrays(pairs), constants) == pytest.approx(expected, rel=1e-9)


def test_the_profile_keeps_every_gradient():
    for model in (RESNET, BERT):
        total = sum(gradient.num_bytes for gradient in synthetic_gradients(model, 4.0))
        assert total == pytest.approx(4e6 * float(model["parameters_m"]))


def test_the_search_finds_a_minimum_off_the_axes():
    target = np.array([1.3, -0.7])

    def loss(point):
        skewed = point - target
        return abs(skewed.sum()) * 5 + abs(skewed[0] - skewed[1])

    found, value = pattern_search(loss, np.zeros(2), step=0.5, smallest_step=0.001)
    assert value < 0.02
    assert found == pytest.approx(target, abs=0.02)
