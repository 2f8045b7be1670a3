"""Ray as the engine: a local instance with two CPU lanes and stand-in workers."""

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from gnnpred.collect.ray_engine import RayEngine
from gnnpred.errors import GnnpredError, UsageError
from tests.unit.collect.test_runner import ROOT, WORKER, content, log, recipe_of, run, table  # noqa: F401

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")


def run_on_ray(recipe, out, *, num_cpus=2, **options):
    return run(recipe, out, make_engine=lambda workers: RayEngine(num_cpus=num_cpus, command=WORKER), **options)


def test_two_ray_workers_give_the_rows_of_one_without(tmp_path):
    recipe = recipe_of("good", "crash", "hang", "oom", "nan", "other", batches=(1, 2), time_limit_s=2.0)
    run(recipe, tmp_path / "plain")
    report = run_on_ray(recipe, tmp_path / "ray")
    assert report.by_status == {"ok": 4, "crash": 2, "timeout": 2, "oom": 2, "nan": 2}
    assert content(tmp_path / "ray") == content(tmp_path / "plain")
