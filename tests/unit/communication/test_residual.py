"""The basis functions of the learned correction."""

import pytest

from gnnpred.communication.residual import MAX_LOG_FACTOR, SIZE_KNOTS, block_length, hat_weights, log_factor, terms

CASE = {
    "kind": "all_reduce", "fabric": "nvlink3", "is_switched": True, "num_bytes": 2.0**21,
    "regime": 2.0, "ranks": 16, "dtype": "", "nccl_version": "",
}  # fmt: skip


@pytest.mark.parametrize("value", [-3.0, 8.0, 8.5, 21.0, 34.0, 50.0])
def test_hats_sum_to_one_and_interpolate(value):
    weights = hat_weights(value, SIZE_KNOTS)
    assert sum(weight for _, weight in weights) == pytest.approx(1)
    inside = min(max(value, SIZE_KNOTS[0]), SIZE_KNOTS[-1])
    assert sum(SIZE_KNOTS[index] * weight for index, weight in weights) == pytest.approx(inside)


def test_every_term_lies_in_its_block():
    for block, index, _ in terms(**{**CASE, "dtype": "int8", "nccl_version": "2.29.2"}):
        assert 0 <= index < block_length(block)


def test_a_mesh_has_no_curve_over_ranks():
    assert any(block.startswith("ranks") for block, _, _ in terms(**CASE))
    assert not any(block.startswith("ranks") for block, _, _ in terms(**{**CASE, "is_switched": False}))


def test_only_int8_and_known_versions_add_their_terms():
    plain = {block for block, _, _ in terms(**CASE)}
    assert {block for block, _, _ in terms(**{**CASE, "dtype": "bf16", "nccl_version": "unknown"})} == plain
    assert {block for block, _, _ in terms(**{**CASE, "dtype": "int8"})} - plain == {"int8 all_reduce"}
    assert {block for block, _, _ in terms(**{**CASE, "nccl_version": "2.4.8"})} == plain
    newer = terms(**{**CASE, "nccl_version": "2.32"})
    assert ("nccl nvlink3 all_reduce", 0, 1.0) in newer


def test_unknown_blocks_correct_nothing_and_large_ones_are_cut():
    found = terms(**CASE)
    assert log_factor({}, found) == 0
    assert log_factor({"fabric nvlink3 all_reduce": [0.1] * len(SIZE_KNOTS)}, found) == pytest.approx(0.1)
    assert log_factor({"fabric nvlink3 all_reduce": [9.0] * len(SIZE_KNOTS)}, found) == MAX_LOG_FACTOR
