"""Studies of several objectives: costs, what a trial is compared with, what such a study admits."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("optuna")

import optuna

from gnnpred.errors import UsageError
from gnnpred.training.experiments import RecipeSettings, load_encoded_corpus
from gnnpred.training.loop import TrainSettings
from gnnpred.training.model import ModelSettings, StepTimeGNN
from gnnpred.training.search_space import Parameter, SearchSpace, Stage
from gnnpred.training.trees import export_trees
from gnnpred.training.tuning import costs, objective
from gnnpred.training.tuning.costs import CostMeter, Costs, latency_ratio, networks_digest, parse_objectives
from gnnpred.training.tuning.objective import Objective
from gnnpred.training.tuning.pruning import BestShare, is_hopeless, report, step_errors
from gnnpred.training.tuning.results import write_results
from gnnpred.training.tuning.study import Search, join_study, open_study
from tests.helpers.tiny_corpus import write_tiny_corpus

pytestmark = pytest.mark.train
MODEL = ModelSettings(width=8, message_width=4, num_layers=1)
RECIPE = RecipeSettings(train=TrainSettings(epochs=2, graphs_per_batch=8, op_rows_per_batch=4, model=MODEL))
SPACE = SearchSpace(
    parameters=(Parameter(name="train.model.width", kind="int", low=8, high=32, step=8),),
    test_fold=1, seed=0, startup_trials=2, stages=(Stage(rows=1.0, epochs=1.0),),
)  # fmt: skip
ALL = ("error", "latency", "size")


def silent(what, done, total):
    pass


def with_model(**values) -> RecipeSettings:
    return replace(RECIPE, train=replace(RECIPE.train, model=replace(MODEL, **values)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return load_encoded_corpus(write_tiny_corpus(folder), RECIPE, folder / "work", 1, silent, with_blind=False)


@pytest.fixture(scope="module")
def trees(corpus):
    goal = Objective(corpus, RECIPE, SPACE, silent)
    return goal._fit_trees(goal.folds[0])


def test_lists_of_objectives():
    assert parse_objectives("error") == ("error",)
    assert parse_objectives("size, error") == ("error", "size")
    for text, said in (
        ("error,speed", "unknown objective 'speed'"),
        ("error,error", "twice"),
        ("size", "must be among"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_objectives(text)


def test_equal_networks_are_known_by_what_they_compute_when_they_predict():
    assert networks_digest(with_model(dropout=0.4, hidden_dropout=0.1)) == networks_digest(RECIPE)
    for other in (with_model(width=16), with_model(pooled_scale=True), replace(RECIPE, per_op_seeds=1)):
        assert networks_digest(other) != networks_digest(RECIPE)


def test_the_latency_is_the_median_ratio_of_neighbouring_calls(monkeypatch):
    clock = 0.0
    slow = iter([10.0] * 20 + [1.0] * 1000)  # a busy spell that slows both

    def call_of(seconds):
        def call():
            nonlocal clock
            clock += seconds * factor()

        return call

    def factor():
        return next(slow) if clock < 1e3 else 1.0

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock)
    assert latency_ratio(call_of(3.0), call_of(2.0)) == pytest.approx(1.5)


def test_the_recipe_itself_is_the_unit_and_known_networks_are_not_timed_again(corpus, trees, monkeypatch):
    def never(*arguments):
        raise AssertionError("timed")

    monkeypatch.setattr(costs, "export_onnx", never)
    meter = CostMeter(corpus, RECIPE, trees)
    assert meter.costs_of(RECIPE, {}).latency_ratio == 1.0
    wider = with_model(width=16)
    assert meter.costs_of(wider).latency_ratio is None  # no objective: not timed either
    assert meter.costs_of(wider, {networks_digest(wider): 1.25}).latency_ratio == 1.25
    assert meter.costs_of(wider, {networks_digest(wider): 9.0}).latency_ratio == 1.25  # the first figure stays
    with pytest.raises(AssertionError, match="timed"):
        meter.costs_of(with_model(width=24), {})


def test_the_size_is_that_of_all_networks_and_the_trees(corpus, trees):
    one = sum(weight.numel() for weight in StepTimeGNN(MODEL).parameters()) * 4
    without_messages = sum(weight.numel() for weight in StepTimeGNN(replace(MODEL, num_layers=0)).parameters()) * 4
    ensemble = replace(RECIPE, fold_seeds=2, per_op_seeds=1)
    measured = CostMeter(corpus, RECIPE, trees).costs_of(ensemble)
    assert measured.size_bytes == 2 * one + without_messages + len(export_trees(trees))


def test_an_exported_ensemble_is_timed_in_the_runtime(corpus, trees):
    ratio = CostMeter(corpus, RECIPE, trees).costs_of(replace(RECIPE, fold_seeds=2), {}).latency_ratio
    assert 0.3 < ratio < 30  # twice the networks: about 1.5, whatever else the machine does


def fake_costs(monkeypatch, ratio_by_width: dict[int, float]):
    class Meter:
        def __init__(self, corpus, recipe, trees):
            pass

        def costs_of(self, settings, known_ratios=None):
            width = settings.train.model.width
            ratio = None if known_ratios is None else ratio_by_width[width]
            return Costs(latency_ratio=ratio, size_bytes=1000 * width, networks=str(width))

    monkeypatch.setattr(objective, "CostMeter", Meter)


def test_a_trial_has_a_value_per_objective_and_keeps_its_errors_by_step(corpus, monkeypatch):
    fake_costs(monkeypatch, {8: 1.0, 16: 1.5})
    study = optuna.create_study(directions=["minimize"] * 3, pruner=BestShare(4, SPACE.stages, 2))
    study.enqueue_trial({"train.model.width": 16})
    study.optimize(Objective(corpus, RECIPE, SPACE, silent, ALL), n_trials=1)
    (trial,) = study.trials
    by_fold = trial.user_attrs["fold_errors_pct"].values()
    assert trial.values == pytest.approx([sum(by_fold) / 4, 1.5, 16000])
    assert list(step_errors(trial)) == [0, 1, 2, 3]
    assert step_errors(trial)[3] == trial.values[0]


def test_the_size_alone_needs_no_timing(corpus, monkeypatch):
    fake_costs(monkeypatch, {})
    study = optuna.create_study(directions=["minimize"] * 2, pruner=BestShare(4, SPACE.stages, 2))
    study.enqueue_trial({"train.model.width": 24})
    study.optimize(Objective(corpus, RECIPE, SPACE, silent, ("error", "size")), n_trials=1)
    assert study.trials[0].values[1] == 24000
    assert "latency_ratio" not in study.trials[0].user_attrs


def finished(study: optuna.Study, error_pct: float, ratio: float, size: int) -> None:
    attributes = {"latency_ratio": ratio, "size_bytes": size, "step_errors_pct": {"0": error_pct}}
    study.add_trial(optuna.trial.create_trial(values=[error_pct, ratio, size], user_attrs=attributes))


@pytest.mark.parametrize(
    ("error_pct", "ratio", "size", "hopeless"),
    [
        (35.0, 2.0, 200, True),  # worse than most, and dearer than all
        (25.0, 2.0, 200, False),  # within a stage the worst quarter goes
        (35.0, 0.5, 200, False),  # quicker than all: nothing to compare with
        (35.0, 2.0, 50, False),
        (35.0, 1.0, 100, True),  # equal cost compares
    ],
)
def test_a_trial_is_compared_with_those_that_cost_no_more(error_pct, ratio, size, hopeless):
    study = optuna.create_study(directions=["minimize"] * 3, pruner=BestShare(2, SPACE.stages, 4))
    for other in (10.0, 20.0, 30.0, 34.0):
        finished(study, other, 1.0, 100)
    finished(study, 5.0, 3.0, 300)  # dearer than the trial: does not count
    trial = study.ask()
    trial.set_user_attr("latency_ratio", ratio)
    trial.set_user_attr("size_bytes", size)
    report(trial, error_pct, 0)
    assert is_hopeless(trial) is hopeless


def search_in(folder: Path, objectives=("error",)) -> Search:
    return Search(
        recipe=RECIPE, space=SPACE, objectives=objectives, datasets=folder, work=folder,
        storage=f"sqlite:///{folder / 'study.db'}", study_name="s",
    )  # fmt: skip


DIGESTS = {"recipe": "r", "search space": "s", "corpus": "c"}


def test_a_study_of_the_error_alone_carries_no_mark_of_its_objectives(tmp_path):
    study = open_study(search_in(tmp_path), DIGESTS)
    assert study.user_attrs == {f"gnnpred {what}": digest for what, digest in DIGESTS.items()}
    assert join_study(search_in(tmp_path), DIGESTS).study_name == "s"


@pytest.mark.parametrize(("first", "then"), [(("error",), ALL), (ALL, ("error",)), (ALL, ("error", "size"))])
def test_a_study_of_other_objectives_is_refused(tmp_path, first, then):
    open_study(search_in(tmp_path, first), DIGESTS)
    with pytest.raises(UsageError, match=f"is of the objectives {','.join(first)}: give --objectives"):
        open_study(search_in(tmp_path, then), DIGESTS)


def test_recipes_of_the_front_and_no_others_are_written(tmp_path):
    study = open_study(search_in(tmp_path, ALL), DIGESTS)

    def add(error_pct, ratio, size, width):
        distribution = optuna.distributions.IntDistribution(8, 32, step=8)
        attributes = {"latency_ratio": ratio, "size_bytes": size, "step_errors_pct": {"0": error_pct}}
        study.add_trial(
            optuna.trial.create_trial(
                values=[error_pct, ratio, size], user_attrs=attributes, params={"train.model.width": width},
                distributions={"train.model.width": distribution},
            )
        )  # fmt: skip

    add(20.0, 1.0, 100, 8)  # trial 1; trial 0 waits
    add(15.0, 1.2, 120, 16)
    out = tmp_path / "out"
    result = write_results(study, search_in(tmp_path, ALL), out=out, storage="here")
    assert [trial.number for trial in result.front] == [2, 1]
    assert sorted(path.name for path in (out / "pareto").iterdir()) == ["1.toml", "2.toml"]
    add(14.0, 0.9, 90, 24)  # better in everything
    result = write_results(study, search_in(tmp_path, ALL), out=out, storage="here")
    assert [trial.number for trial in result.front] == [result.best.number] == [3]
    assert [path.name for path in (out / "pareto").iterdir()] == ["3.toml"]
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert result.as_dict()["front"][0] == {
        "trial": 3, "error_pct": 14.0, "latency_ratio": 0.9, "size_bytes": 90, "params": {"train.model.width": 24},
    }  # fmt: skip
