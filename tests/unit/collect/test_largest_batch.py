"""The search doubles, bisects, and keeps to its bounds; on a CPU a limit stands in for memory that ends."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from gnnpred.collect.largest_batch import find_largest_batch, next_smaller
from gnnpred.collect.recipe import Configuration, MeasureSettings


def search(capacity, *, limit=4096, max_s=1e9, s_per_sample=0.0):
    now = [0.0]
    tried = []

    def fits(batch_size):
        tried.append(batch_size)
        now[0] += s_per_sample * batch_size
        return batch_size <= capacity

    return find_largest_batch(fits, limit=limit, max_s=max_s, clock=lambda: now[0]), tried


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 17, 63, 64, 71, 100, 255, 256, 1000, 3001])
def test_what_is_found_fits_and_lies_within_a_tenth_of_what_fits_at_most(capacity):
    found, tried = search(capacity)
    assert found.batch_size <= capacity < found.batch_size + max(0.1 * found.batch_size, 8 if capacity >= 64 else 1) + 1
    assert found.batch_size in tried
    assert found.num_tries == len(tried) <= 2 + 2 * capacity.bit_length()
    assert found.ended_early == ""


def test_powers_of_two_come_first_and_large_batches_are_multiples_of_eight():
    found, tried = search(300)
    assert tried[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert all(batch % 8 == 0 for batch in tried[10:])
    assert found.batch_size % 8 == 0


def test_nothing_fits():
    found, tried = search(0)
    assert (found.batch_size, tried) == (0, [1])


def test_the_limit_and_the_time_end_the_search():
    found, tried = search(10_000, limit=100)
    assert (found.batch_size, found.ended_early, tried[-1]) == (100, "at the limit of 100", 100)
    found, tried = search(10_000, max_s=10.0, s_per_sample=0.1)
    # 2 + 4 + ... + 32 samples took 6.2 s; 64 more would end beyond 10 s
    assert (found.batch_size, found.ended_early) == (32, "after 10 s")
    assert tried[-1] == 32


def test_a_slow_first_try_is_no_measure_of_the_others():
    now = [0.0]

    def fits(batch_size):
        now[0] += 30.0 if batch_size == 1 else 0.01
        return batch_size <= 20

    assert find_largest_batch(fits, limit=64, max_s=10.0, clock=lambda: now[0]).batch_size == 20


def test_an_error_that_is_not_of_memory_is_raised():
    def fits(batch_size):
        raise ValueError("a broken model")

    with pytest.raises(ValueError, match="a broken model"):
        find_largest_batch(fits, limit=8, max_s=1.0)


# ------------------------------------------------------------------------- on this CPU

MODELS = Path(__file__).with_name("small_modules.py")
ROOT = MODELS.parents[3]


def test_a_batch_that_does_not_fit_again_gives_way_to_smaller_ones(monkeypatch):
    pytest.importorskip("torch")
    from gnnpred.collect import measure as measuring

    tried = []

    def measured(configuration, settings, device):
        tried.append(configuration.batch_size)
        if configuration.batch_size > 14:
            raise MemoryError("out of memory")
        return {"warning": ""}

    monkeypatch.setattr(measuring, "_measured", measured)
    configuration = Configuration(model="timm:resnet18", batch_size=None)
    result, batch_size = measuring._measured_largest(configuration, MeasureSettings(), "cpu", 16)
    assert (result, batch_size, tried) == ({"warning": ""}, 14, [16, 14])
    with pytest.raises(MemoryError):
        measuring._measured_largest(configuration, MeasureSettings(), "cpu", 1024)
    assert tried[2:] == [1024, 920, 824, 736]


def test_smaller_batches_are_ten_per_cent_apart_and_round():
    assert [next_smaller(n) for n in (1, 2, 3, 10, 64, 72, 100, 1024)] == [0, 1, 2, 9, 57, 64, 88, 920]


PROGRAM = """
import json, resource, sys
from gnnpred.collect.worker import run_task
reply = run_task(json.loads(sys.argv[1]))
print(json.dumps({**reply, "limits": resource.getrlimit(resource.RLIMIT_DATA)}))
"""


def reply_to(function, **settings):
    """Of a process of its own, as collect runs it: memory that other tests freed would count as this one's."""
    task = {
        "task": "measure",
        "configuration": asdict(Configuration(model=f"{MODELS}:{function}", batch_size=None)),
        "settings": asdict(MeasureSettings(steps=3, max_warmup_steps=3, max_warmup_s=0.1, **settings)),
        "device": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(task)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.models
def test_the_cpu_stops_at_the_memory_that_it_is_given():
    pytest.importorskip("torch")
    resource = pytest.importorskip("resource")
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux limits a process's data")
    # every sample takes 8 MiB at least twice: the layer's output and its gradient. Threads, whose number is not the
    # test's to say, take of the memory too: a few samples' worth.
    reply = reply_to("wide", largest_batch_memory_gib=1.0, largest_batch_s=1e6)
    assert reply["status"] == "ok", reply
    result = reply["result"]
    assert 24 <= result["batch_size"] <= 64
    assert result["num_batch_tries"] >= 4
    assert result["input"] == "8"
    assert tuple(reply["limits"]) == resource.getrlimit(resource.RLIMIT_DATA)


@pytest.mark.models
def test_a_search_that_meets_its_limit_says_so_and_one_that_fits_nothing_is_out_of_memory():
    pytest.importorskip("torch")
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux limits a process's data")
    reply = reply_to("mlp", largest_batch_limit=4)
    assert reply["status"] == "ok", reply
    assert reply["result"]["batch_size"] == 4
    assert "the search for the largest batch ended at the limit of 4" in reply["result"]["warning"]
    assert reply_to("greedy")["status"] == "oom"


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("could not create a memory object"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ValueError("a broken model"), False),
    ],
)
def test_every_librarys_way_to_run_out_of_memory_is_known(error, is_memory):
    pytest.importorskip("torch")
    from gnnpred.collect.memory_limit import is_out_of_memory

    wrapped = RuntimeError("the model cannot be built")
    wrapped.__cause__ = error
    assert is_out_of_memory(error) is is_out_of_memory(wrapped) is is_memory
