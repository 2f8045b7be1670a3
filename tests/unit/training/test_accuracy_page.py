"""The error table's tables by group, intervals, range warnings, worst rows and goals; the pages made from it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

from gnnpred.corpus.operators import OperatorRow
from gnnpred.errors import GnnpredError
from gnnpred.training.accuracy_page import accuracy_page, write_accuracy_pages
from gnnpred.training.error_table import results_table
from gnnpred.training.experiments import folds_of
from gnnpred.training.goals import goals
from gnnpred.training.intervals import (
    coverage_table,
    cross_conformal_bounds,
    features_of,
    fit_intervals,
)
from gnnpred.training.kernel_errors import efficiency_and_latency, kernel_table
from gnnpred.training.noise import noise_table, repeat_noise
from gnnpred.training.ranges import out_of_range, range_table
from gnnpred.training.readme_section import (
    SECTION_BEGIN,
    SECTION_END,
    readme_section,
    section_of,
    with_readme_section,
)
from gnnpred.training.report import report_lines
from gnnpred.training.worst_rows import chance_of, reasons_of, worst_rows_table
from tests.helpers.measured_rows import corpus_of, measurement, track_result

pytestmark = pytest.mark.train
ROOT = Path(__file__).resolve().parents[3]
MARKED = f"# x\n\n{SECTION_BEGIN}\nold\n{SECTION_END}\n\nrest\n"


NUM_ODD = 4


def _corpus(num_rows: int = 240):
    """Two families on two GPUs and two precisions, and four rows on a GPU that nothing else has."""
    rows = [
        measurement(
            row_id=f"r{i}", family="ab"[i % 2], architecture=f"net{i % 4}", device=("RTX3090", "T4")[i // 2 % 2],
            precision=("fp32", "mixed")[i // 4 % 2], batch_size=2 ** (3 + i // 8 % 4), step_time_ms=10.0 + i % 7,
            source_id=("lab-1", "firm")[i // 8 % 2], model=f"m{i // 8}",
        )
        for i in range(num_rows)
    ]  # fmt: skip
    rows += [
        measurement(row_id="odd", family="a", device="MI100", batch_size=4096, model="odd", step_time_ms=5.0 + i)
        for i in range(NUM_ODD)
    ]
    return corpus_of(rows, fold_by_family={"a": 0, "b": 1}, with_blind=True)


@pytest.fixture(scope="module")
def corpus():
    return _corpus()


def _results(corpus, worst_factor: float = 8.0):
    rng = np.random.default_rng(0)
    predicted = corpus.target_ms * np.exp(rng.normal(0, 0.1, len(corpus.rows)))
    predicted[-NUM_ODD:] *= worst_factor
    names = {"ensemble": predicted, "gnn": predicted * 1.1, "trees": predicted * 0.9, "roofline": predicted * 2}
    return {
        **{track: track_result(corpus, track, names) for track in ("architecture", "family", "device")},
        "blind": track_result(corpus, "blind", {"gnn": predicted * 1.5}),
        "blind_fp32": track_result(corpus, "blind_fp32", {"gnn": predicted * 2}),
    }


@pytest.fixture(scope="module")
def results(corpus):
    return _results(corpus)


@pytest.fixture(scope="module")
def table(results, corpus):
    # what a reader of errors.json sees
    figures = results_table(results, corpus, name="test", all_rows=corpus.rows)
    return json.loads(json.dumps(figures | {"kernels": _kernels(corpus)}))


def _kernels(corpus):
    """Kernels of two GPUs, predicted 1.1 times too slow on the held-out ones; the T4 takes twice its roofline."""
    operators = corpus.operators
    rows = [
        OperatorRow("lab", row.device, "gemm", "fwd", "bf16" if i % 3 else "fp16", (1,), 1.0)
        for i, row in enumerate(corpus.rows)
    ]
    first = operators.rows.node_start[:-1]  # a kernel is one node
    first_nodes = operators.rows.physics_ms[first]
    physics = first_nodes.sum(1).astype(float)
    is_t4 = np.array([row.device == "T4" for row in rows])
    timed = dataclasses.replace(
        operators,
        rows=dataclasses.replace(
            operators.rows,
            physics_ms=first_nodes,
            node_features=operators.rows.node_features[first],
            kind_idx=operators.rows.kind_idx[first],
        ),
        timed=np.ones_like(first_nodes),
        target_ms=physics * np.where(is_t4, 2, 1),
    )
    kernels = dataclasses.replace(corpus, operators=timed, operator_rows=tuple(rows))
    folds = list(folds_of(kernels, "device"))
    return kernel_table(kernels, folds, None, None, predict=lambda fold, idx: timed.target_ms[idx] * 1.1)


def test_kernels_of_held_out_gpus_are_scored_beside_physics_and_a_constant(corpus):
    found = _kernels(corpus)
    assert found["all"]["n"] == 240  # the GPU with four rows is never held out
    assert found["all"]["mape_pct"] == pytest.approx(10)
    # the others' median ratio: 1 for the T4, 2 for the RTX 3090 (120 T4 kernels against 4)
    assert found["by_device"]["T4"]["baseline_mape_pct"] == pytest.approx(50)
    assert found["by_device"]["RTX3090"]["baseline_mape_pct"] == pytest.approx(100)
    assert set(found["by_precision"]) == {"bf16", "fp16"}
    # a group of one ratio is fitted without error; the T4 has twice the others' ratio
    assert found["by_device"]["T4"]["two_parameter_mape_pct"] == pytest.approx(50, abs=5)
    assert found["by_device"]["T4"]["with_trees_mape_pct"] > 0


def test_efficiency_and_latency_are_found_under_outliers():
    physics = np.geomspace(0.01, 10, 60)
    measured = 1.5 * physics + 0.2
    measured[::10] *= 3
    assert efficiency_and_latency(physics, measured) == pytest.approx((1.5, 0.2), rel=0.05)


def test_latency_is_never_negative():
    physics = np.geomspace(0.01, 10, 60)
    a, b = efficiency_and_latency(physics, physics**1.2)
    assert a > 0
    assert b >= 0


def test_by_family_holds_each_family_once_and_adds_up(table):
    by_family = table["tracks"]["family"]["by_family"]
    assert {name: s["n"] for name, s in by_family.items()} == {"a": 124, "b": 120}
    assert sum(s["n"] for s in table["tracks"]["family"]["by_fold"].values()) == 244


def test_intervals_of_one_fold_come_from_the_other(corpus):
    # fold 0 is predicted without error, fold 1 is 2 times too slow: each interval is the other fold's point
    is_b = np.array([row.family == "b" for row in corpus.rows])
    result = track_result(corpus, "family", {"ensemble": corpus.target_ms * np.where(is_b, 2, 1)})
    bounds = cross_conformal_bounds(result, corpus)
    assert bounds[result.fold == 0] == pytest.approx(np.log(0.5))
    assert bounds[result.fold == 1] == pytest.approx(0)
    coverage = coverage_table(result, corpus, ["0", "1"])
    assert coverage["all"] == {"n": 244, "share": 0.0}
    assert coverage["by_fold"]["1"] == {"n": 120, "share": 0.0}


def test_coverage_is_counted_by_precision_source_and_fold(results, corpus):
    coverage = coverage_table(results["family"], corpus, ["0", "1"])
    for key in ("by_precision", "by_source", "by_fold"):
        shares = coverage[key].values()
        assert sum(s["n"] for s in shares) == 244
        assert sum(s["n"] * s["share"] for s in shares) == pytest.approx(244 * coverage["all"]["share"])
    assert 0.8 < coverage["all"]["share"] < 0.97
    assert coverage["median_low_factor"] < 1 < coverage["median_high_factor"]


def test_one_fold_has_nothing_to_calibrate_on(corpus):
    result = track_result(corpus, "family", {"ensemble": corpus.target_ms})
    single = type(result)("family", result.row_idx, np.zeros_like(result.fold), result.predicted_ms)
    with pytest.raises(GnnpredError, match="one fold"):
        cross_conformal_bounds(single, corpus)


def test_shipped_intervals_hold_the_middle_nine_tenths(results, corpus):
    model = fit_intervals(results["family"], corpus)
    low, high = model.bounds(features_of(results["family"], corpus)).T
    error = np.log(corpus.target_ms[results["family"].row_idx] / results["family"].shipped_ms)
    assert np.mean((error >= low) & (error <= high)) == pytest.approx(0.9, abs=0.01)


def test_a_batch_beyond_the_training_rows_is_out_of_range_and_scored_apart(results, corpus):
    folds = list(folds_of(corpus, "family"))
    flagged = np.concatenate([out_of_range(corpus, fold) for fold in folds])
    assert [corpus.rows[i].row_id for i in results["family"].row_idx[flagged]] == ["odd"] * NUM_ODD
    scores = range_table(results["family"], corpus, folds)
    assert scores["warned"]["n"] == NUM_ODD
    assert scores["warned"]["mape_pct"] > 300
    assert scores["not_warned"]["n"] == 240
    assert scores["not_warned"]["mape_pct"] < 15


def test_a_precision_without_training_rows_is_out_of_range():
    rows = [
        measurement(row_id=f"{family}{i}", family=family, precision="fp16" if family == "b" and i == 0 else "fp32")
        for family in "ab"
        for i in range(4)
    ]
    corpus = corpus_of(rows, fold_by_family={"a": 0, "b": 1})
    first, second = folds_of(corpus, "family")
    assert not out_of_range(corpus, first).any()
    assert out_of_range(corpus, second).tolist() == [True, False, False, False]


def test_the_worst_row_comes_first_with_reasons_that_it_has(results, corpus):
    noise = repeat_noise(corpus.rows, corpus.rows)
    found = worst_rows_table(results["family"], corpus, list(folds_of(corpus, "family")), noise)
    worst = found["worst_rows"][0]
    assert (worst["model"], worst["device"]) == ("odd", "MI100")
    assert worst["factor"] > 6
    assert len(found["worst_rows"]) == 20
    assert any("no GPU of this generation (0 training rows)" in reason for reason in worst["reasons"])
    factors = [row["factor"] for row in found["worst_rows"]]
    assert factors == sorted(factors, reverse=True)
    ordinary = [row for row in found["worst_rows"] if row["model"] != "odd"]
    assert not any("generation" in reason for row in ordinary for reason in row["reasons"])


def test_a_reason_that_all_rows_have_explains_none(results, corpus):
    # every row of an unseen family lacks siblings: true, and no explanation
    noise = repeat_noise(corpus.rows, corpus.rows)
    folds = list(folds_of(corpus, "family"))
    siblings = next(r for r in reasons_of(results["family"], corpus, folds, noise) if "few siblings" in r.text)
    assert siblings.applies.all()
    found = worst_rows_table(results["family"], corpus, folds, noise)
    assert not any("siblings" in reason for row in found["worst_rows"] for reason in row["reasons"])


def test_reasons_say_how_rows_with_them_do(results, corpus):
    noise = repeat_noise(corpus.rows, corpus.rows)
    found = worst_rows_table(results["family"], corpus, list(folds_of(corpus, "family")), noise)
    generation = next(r for r in found["reasons"] if "generation" in r["reason"])
    assert generation["n"] == NUM_ODD
    assert generation["mape_with_pct"] > 300 > generation["mape_without_pct"]
    assert generation["share_of_worst_pct"] == pytest.approx(100 * NUM_ODD / 12)  # of the worst 5 % of 244


def test_a_layout_that_runs_slow_kernels_is_found_per_sample():
    rows = [
        measurement(row_id="a", family="a", memory_format="nchw", batch_size=16, step_time_ms=16.0),
        measurement(row_id="b", family="a", memory_format="nhwc", batch_size=8, step_time_ms=24.0),
        measurement(row_id="c", family="b", memory_format="nhwc", model="alone"),
    ]
    corpus = corpus_of(rows, fold_by_family={"a": 0, "b": 1})
    result = track_result(corpus, "family", {"ensemble": corpus.target_ms})
    noise = repeat_noise(rows, rows)
    reasons = reasons_of(result, corpus, list(folds_of(corpus, "family")), noise)
    layout = next(reason for reason in reasons if "memory format: " in reason.text)
    assert layout.applies.tolist() == [False, True, False]
    assert layout.detail[1] == "3.0 times"


def test_errors_that_nothing_explains_get_no_reason(corpus):
    results = _results(corpus, worst_factor=1.0)
    noise = repeat_noise(corpus.rows, corpus.rows)
    found = worst_rows_table(results["family"], corpus, list(folds_of(corpus, "family")), noise)
    assert not any(reason["is_given"] for reason in found["reasons"])
    assert all(row["reasons"] == [] for row in found["worst_rows"])


def test_chance_is_the_hypergeometric_tail():
    # 2 marked of 4, 2 drawn: both marked in 1 of 6 draws, at least one in 5 of 6
    worst = np.array([True, True, False, False])
    assert chance_of(np.array([True, True, False, False]), worst) == pytest.approx(1 / 6)
    assert chance_of(np.array([True, False, True, False]), worst) == pytest.approx(5 / 6)
    assert chance_of(np.ones(4, bool), worst) == pytest.approx(1)


def test_noise_is_slowest_over_fastest_of_the_repeats_of_one_row():
    used = [
        measurement(row_id="a", step_time_ms=10.0),
        measurement(row_id="b", step_time_ms=20.0, source_id="other-2"),
        measurement(row_id="c", batch_size=64),
    ]
    repeats = [
        measurement(row_id="a2", duplicate_of="a", step_time_ms=12.0),
        measurement(row_id="a3", duplicate_of="a", step_time_ms=9.0),
        measurement(row_id="i", duplicate_of="c", step_time_ms=99.0, phase="inference"),
    ]
    noise = repeat_noise([*used, *repeats], used)
    assert noise.spread_pct_by_row == {"a": pytest.approx((12 / 9 - 1) * 100)}
    assert noise.other_source_ratio == {"a": 0.5, "b": 2.0}
    found = noise_table(noise, used)
    assert found["repeats_by_source"]["lab"]["n"] == 1
    assert found["other_source"] == {"n": 2, "median_pct": pytest.approx(100), "p90_pct": pytest.approx(100)}


def test_goals_are_met_missed_or_left_undecided(table):
    by_what = {goal.what: goal for goal in goals(table)}
    assert by_what["unseen family, mixed"].is_met is (
        table["tracks"]["family"]["by_precision"]["ensemble"]["mixed"]["mape_pct"] <= 11
    )
    assert by_what["unseen family, bf16"].reached == "no rows"
    assert by_what["unseen family, bf16"].is_met is None
    assert by_what["calibration with 20 runs on an unseen GPU"].is_met is None


def test_a_goal_on_a_handful_of_rows_is_not_decided(table):
    few = json.loads(json.dumps(table))
    few["tracks"]["family"]["by_precision"]["ensemble"]["mixed"]["n"] = 5
    goal = next(goal for goal in goals(few) if goal.what == "unseen family, mixed")
    assert goal.is_met is None
    assert "too few rows" in goal.reached


def test_the_page_has_every_section_and_links_the_plots(table):
    page = accuracy_page(table, plots="../checkpoints/base")
    for words in (
        "## All tracks", "## Goals and what was reached", "## Unseen family", "### Unseen family by GPU and precision",
        "### Unseen family by family", "### Unseen family by source", "### Unseen GPU: 90 % interval",
        "### Unseen family: warnings", "### The 20 worst rows, unseen family", "no reason found",
        "What precision does", "## Noise floor", "## Single kernels on unseen GPUs",
        "(../checkpoints/base/parity-family.png)",
    ):  # fmt: skip
        assert words in page, words
    assert page.count("**Does not show**") >= 6
    assert "nan" not in page


def test_the_terminal_report_holds_the_families_and_the_contrast(table):
    text = "\n".join(report_lines(table))
    assert "| family | n |" in text
    assert "GNN without precision" in text


def test_readme_and_page_quote_the_same_figures(table):
    entry = table["tracks"]["family"]["overall"]["ensemble"]
    figures = f"{entry['mape_pct']:.1f} / {entry['median_pct']:.1f} / {entry['p90_pct']:.0f}"
    assert figures in readme_section(table)
    assert f"| all | {entry['n']:,} | {entry['mape_pct']:.1f} | {entry['median_pct']:.1f} |" in accuracy_page(
        table, plots="."
    )


def test_writing_replaces_only_what_stands_between_the_markers(table, tmp_path):
    readme, docs = tmp_path / "README.md", tmp_path / "docs" / "ACCURACY.md"
    readme.write_text(MARKED, encoding="utf-8")
    write_accuracy_pages(table, docs=docs, readme=readme, plots=tmp_path / "plots")
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("# x\n\n")
    assert text.endswith(f"{SECTION_END}\n\nrest\n")
    assert section_of(text) == readme_section(table)
    assert "(../plots/parity-family.png)" in docs.read_text(encoding="utf-8")
    write_accuracy_pages(table, docs=docs, readme=readme, plots=tmp_path / "plots")
    assert readme.read_text(encoding="utf-8") == text


def test_a_readme_with_half_a_marker_is_an_error_and_nothing_is_written(table, tmp_path):
    readme, docs = tmp_path / "README.md", tmp_path / "ACCURACY.md"
    readme.write_text(f"x\n{SECTION_BEGIN}\n", encoding="utf-8")
    with pytest.raises(GnnpredError, match="lacks the comments"):
        write_accuracy_pages(table, docs=docs, readme=readme, plots=tmp_path)
    assert not docs.exists()
    with pytest.raises(GnnpredError, match="in this order"):
        with_readme_section(f"{SECTION_END}\n{SECTION_BEGIN}\n", "new")


def test_a_readme_without_markers_is_left_alone(table, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("mine\n", encoding="utf-8")
    write_accuracy_pages(table, docs=tmp_path / "A.md", readme=readme, plots=tmp_path)
    assert readme.read_text(encoding="utf-8") == "mine\n"
