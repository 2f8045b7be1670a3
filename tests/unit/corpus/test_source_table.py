"""The table of sources counts rows as the files hold them, and keeps the page around it."""

from gnnpred.corpus.source_table import BEGIN, END, source_table, write_source_table
from gnnpred.job import Phase
from tests.helpers.corpus import make_row


def _rows():
    left_out = {"graph_id": "", "architecture": "", "used_for_training": False}
    single = [
        make_row(source_id="ryu-a100", row_id="a"),
        make_row(source_id="ryu-v100", row_id="b", phase=Phase.INFERENCE, used_for_training=False),
        make_row(source_id="ryu-v100", row_id="c", model="x", excluded_reason="x: not rebuilt", **left_out),
        make_row(source_id="ryu-v100", row_id="d", excluded_reason="batch size or step time is missing", **left_out),
    ]
    return single, [make_row(source_id="ryu-a100", row_id="e", gpus=4)]


def test_a_row_derived_from_another_counts_as_used_alone():
    single, several = _rows()
    single.append(make_row(source_id="ryu-a100", row_id="e-compute", derived_from="e"))
    assert source_table(single, several).splitlines()[2].startswith("| ryu | 5 | 4 | 3 | 1, 1 | 1 | 2 |")


def test_a_source_counts_what_is_usable_rebuilt_and_used():
    lines = source_table(*_rows()).splitlines()
    assert lines[2].startswith("| ryu | 5 | 4 | 3 | 1, 1 | 1 | 1 |")
    assert "1 not rebuilt (x)" in lines[2]
    assert "1 batch size or step time is missing" in lines[2]
    assert lines[-1].startswith("| all | 5 | 4 | 3 |")
    assert "75 % of the usable rows" in lines[-1]


def test_the_table_is_written_between_its_marks_alone(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_source_table(page, *_rows())
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| ryu | 5 |" in text


def test_what_models_and_exporters_say_stays_in_its_cell(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    reason = f"not exported: failed\nat line 1 | {END}"
    rows = [make_row(source_id="collect-a", row_id="a", excluded_reason=reason, graph_id="", used_for_training=False)]
    write_source_table(page, rows, [])
    once = page.read_text()
    write_source_table(page, rows, [])
    assert page.read_text() == once
    assert once.endswith(f"{END}\nafter\n")
    assert once.count(END) == 1
    assert len(once.splitlines()) == 8  # two of the page, two marks, header, rule, one source, all


def test_a_page_without_marks_is_left_alone(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("by hand\n")
    write_source_table(page, *_rows())
    assert page.read_text() == "by hand\n"
