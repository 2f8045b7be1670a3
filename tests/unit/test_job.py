"""Layouts and strategies that cannot be: one clear line each."""

import pytest

from gnnpred.errors import UsageError
from gnnpred.hardware import find_device
from gnnpred.job import JobSpec, Precision

A100 = find_device("A100-SXM4-80GB")


def _job(**options):
    return JobSpec(device=A100, batch_size=4, **options)


def test_sizes_multiply():
    job = _job(gpus=64, nodes=8, tensor_parallel=4, pipeline_parallel=2, microbatches=8)
    assert (job.data_parallel, job.num_microbatches, job.gpus_per_node) == (8, 8, 8)
    assert (job.shard_size, job.is_plain) == (1, False)
    assert _job(gpus=64, nodes=8, strategy="fsdp").shard_size == 64
    assert _job(gpus=64, nodes=8, strategy="zero3", shard_group=8).shard_size == 8
    assert _job(gpus=8).is_plain
    assert not _job(grad_accum=2).is_plain


def test_the_same_job_on_one_gpu():
    job = _job(gpus=64, nodes=8, tensor_parallel=4, sequence_parallel=True, pipeline_parallel=2, microbatches=8)
    assert job.on_one_gpu() == _job()
    assert _job(gpus=64, nodes=8, strategy="fsdp", shard_group=8).on_one_gpu() == _job()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 8, "tensor_parallel": 3}, "does not divide into --tp 3 x --pp 1"),
        ({"gpus": 8, "tensor_parallel": 4, "pipeline_parallel": 4, "microbatches": 4}, "multiple of 16"),
        ({"gpus": 8, "tensor_parallel": 0}, "--tp must be at least 1"),
        ({"gpus": 8, "expert_parallel": 3}, "--ep 3 does not divide the 8 data-parallel ranks"),
        ({"gpus": 8, "strategy": "fsdp", "shard_group": 3}, "--shard-group 3 does not divide"),
        ({"gpus": 8, "shard_group": 4}, "--strategy ddp shards nothing"),
        ({"gpus": 8, "pipeline_parallel": 4}, "--pp 4 needs --microbatches"),
        ({"gpus": 8, "interleave": 2}, "give --pp too"),
        ({"gpus": 8, "pipeline_parallel": 4, "microbatches": 6, "interleave": 2}, "multiple of --pp 4"),
        ({"gpus": 8, "microbatches": 4, "grad_accum": 2}, "leave out --grad-accum 2"),
        ({"gpus": 8, "sequence_parallel": True}, "give --tp too"),
        ({"grad_accum": 10**6}, "micro-batches per step"),
        ({"gpus": 8, "strategy": "dp", "tensor_parallel": 2}, "excludes --tp"),
        ({"gpus": 8, "strategy": "dp", "pipeline_parallel": 2, "microbatches": 2}, "excludes --pp"),
        ({"gpus": 8, "nodes": 2, "strategy": "dp"}, "one node"),
        ({"gpus": 8, "strategy": "fsdp", "precision": Precision.FP64}, "excludes fp64"),
        ({"gpus": 8, "strategy": "zero1", "optimizer": "lamb"}, "excludes lamb"),
        ({"gpus": 8, "strategy": "fsdp", "pipeline_parallel": 2, "microbatches": 2}, "use zero1 or ddp"),
    ],
)
def test_what_cannot_be_is_one_clear_line(options, message):
    with pytest.raises(UsageError, match=message) as error:
        _job(**options)
    assert "\n" not in str(error.value)
