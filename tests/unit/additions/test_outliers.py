"""Rows far from their prediction or from their siblings are found, and a whole device's factor is none of it."""

import pytest

from gnnpred.additions.architectures import KnownArchitectures
from gnnpred.additions.collection import read_collection
from gnnpred.additions.outliers import marks_of
from gnnpred.additions.rows import corpus_of
from gnnpred.hardware import device_of_fields
from gnnpred.job import JobSpec
from gnnpred.predictor import Predictor
from tests.helpers.onnx_files import save
from tests.helpers.roofline import RooflineCheckpoint
from tests.helpers.written_collections import CPU_DEVICE, CPU_NAME, mlp, write_collection

CPU = device_of_fields(CPU_DEVICE, where="test")
RECIPE = """
[[sweep]]
models = ["mine:one", "mine:two"]
batch_sizes = [4, 8, 16, 32]
"""


@pytest.fixture
def predictor():
    return Predictor(RooflineCheckpoint())


@pytest.fixture
def roofline_ms(predictor, tmp_path):
    """Configuration -> the roofline's time of it."""
    files = {name: save(mlp(64 * (1 + i)), tmp_path, f"{i}.onnx") for i, name in enumerate(("mine:one", "mine:two"))}

    def ms(each) -> float:
        job = JobSpec(device=CPU, precision=each.precision, batch_size=each.batch_size, framework_version="2.9.0")
        return predictor.predict(files[each.model], job).step_time_ms

    return ms


def marks_by_configuration(folder, predictor):
    found = corpus_of(read_collection(folder), "c", devices={CPU_NAME: CPU}, known=KnownArchitectures([], {}))
    compared = marks_of(found.rows, predictor)
    assert compared.num_not_predicted == 0
    rows = {each.row.row_id: each.row for each in found.rows}
    return {(rows[i].model, rows[i].batch_size): list(each) for i, each in compared.marks.items()}


def test_a_device_that_is_slower_as_a_whole_has_no_outlier(tmp_path, predictor, roofline_ms):
    folder = write_collection(tmp_path / "runs", recipe=RECIPE, time_ms=lambda each: 7 * roofline_ms(each))
    assert marks_by_configuration(folder, predictor) == {}


def test_one_row_off_by_four_is_found_twice_with_what_was_expected(tmp_path, predictor, roofline_ms):
    def ms(each):
        is_odd = (each.model, each.batch_size) == ("mine:two", 16)
        return roofline_ms(each) * (28 if is_odd else 7)

    marks = marks_by_configuration(write_collection(tmp_path / "runs", recipe=RECIPE, time_ms=ms), predictor)
    assert list(marks) == [("mine:two", 16)]
    kinds = {mark.kind: mark for mark in marks["mine:two", 16]}
    assert set(kinds) == {"prediction", "siblings"}
    for mark in kinds.values():
        assert "4.0 times slower" in mark.detail
        assert mark.expected_ms == pytest.approx(ms_of_row(roofline_ms), rel=1e-3)


def ms_of_row(roofline_ms) -> float:
    from gnnpred.collect.recipe import Configuration

    return 7 * roofline_ms(Configuration(model="mine:two", batch_size=16))


def test_half_again_as_slow_is_inside_twice_the_interval(tmp_path, predictor, roofline_ms):
    folder = write_collection(
        tmp_path / "runs", recipe=RECIPE, time_ms=lambda each: roofline_ms(each) * (1.5 if each.batch_size == 4 else 1)
    )
    assert marks_by_configuration(folder, predictor) == {}


@pytest.mark.parametrize(
    ("warning", "kinds"),
    [
        ("unsteady: steps took 8 to 14 ms", ["unsteady"]),
        ("still speeding up after 60 warm-up steps; throttled: power cap", ["unsteady", "throttled"]),
        ("operators not timed: the driver forbids it", []),
    ],
)
def test_what_collect_warned_of_is_a_mark_where_it_is_about_the_time(tmp_path, predictor, roofline_ms, warning, kinds):
    folder = write_collection(
        tmp_path / "runs", recipe=RECIPE, time_ms=roofline_ms,
        warning=lambda each: warning if (each.model, each.batch_size) == ("mine:one", 4) else "",
    )  # fmt: skip
    marks = marks_by_configuration(folder, predictor)
    assert [mark.kind for mark in marks.get(("mine:one", 4), [])] == kinds
    assert not set(marks) - {("mine:one", 4)}
