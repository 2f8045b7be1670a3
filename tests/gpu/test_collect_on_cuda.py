"""Measuring on a real GPU: CUDA events, every precision, and a configuration that does not fit."""

from dataclasses import asdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gnnpred.collect.recipe import Configuration, MeasureSettings  # noqa: E402
from gnnpred.collect.runner import unsupported_reason  # noqa: E402
from gnnpred.collect.worker import run_task  # noqa: E402
from gnnpred.job import Precision  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.models,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS = Path(__file__).parents[1] / "unit" / "collect" / "small_modules.py"


def reply_to(function, **options):
    configuration = Configuration(model=f"{MODELS}:{function}", **{"batch_size": 4, **options})
    settings = asdict(MeasureSettings(steps=10))
    return run_task({"task": "measure", "configuration": asdict(configuration), "settings": settings, "device": "cuda"})


@pytest.mark.parametrize("precision", list(Precision))
def test_events_and_the_wall_clock_agree_in_every_precision(precision):
    reply = reply_to("cnn", precision=precision)
    manifest = run_task({"task": "probe", "device": "cuda", "models": []})["result"]["manifest"]
    if reason := unsupported_reason(Configuration(model="x:cnn", batch_size=4, precision=precision), manifest):
        pytest.skip(reason)
    assert reply["status"] == "ok", reply
    result = reply["result"]
    assert result["clock"] == "cuda events"
    assert result["wall_clock_ms"] == pytest.approx(result["step_time_ms"], rel=0.5)
    assert result["manifest"]["compute_capability"] > 0


def test_what_does_not_fit_is_out_of_memory():
    assert reply_to("greedy")["status"] == "oom"
