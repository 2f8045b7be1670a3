"""README, docs/ACCURACY.md and the checkpoint's README say what checkpoints/base/errors.json says."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

from gnnpred.training.accuracy_page import accuracy_page
from gnnpred.training.readme_section import readme_section, section_of
from gnnpred.training.report import report_lines

pytestmark = pytest.mark.train
ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = ROOT / "checkpoints" / "base"
AGAIN = "run `gnnpred evaluate --report`"


@pytest.fixture(scope="module")
def table():
    content = json.loads((CHECKPOINT / "errors.json").read_text(encoding="utf-8"))
    if "corpus" not in content:
        pytest.skip(f"errors.json is of an evaluation before the accuracy page: {AGAIN}")
    return content


def test_the_readme_quotes_the_error_table(table):
    assert section_of((ROOT / "README.md").read_text(encoding="utf-8")) == readme_section(table), AGAIN


def test_the_accuracy_page_is_made_from_the_error_table(table):
    page = (ROOT / "docs" / "ACCURACY.md").read_text(encoding="utf-8")
    assert page == accuracy_page(table, plots="../checkpoints/base"), AGAIN


def test_the_checkpoints_own_readme_is_made_from_the_error_table(table):
    text = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    assert text.endswith("\n".join(report_lines(table)) + "\n"), AGAIN


def test_the_plots_that_the_page_shows_are_there(table):
    for track in ("architecture", "family", "device"):
        assert (CHECKPOINT / f"parity-{track}.png").stat().st_size > 10_000
