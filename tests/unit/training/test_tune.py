"""What a trial is compared on, and when it is pruned."""

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("optuna")

import optuna

from gnnpred.errors import UsageError
from gnnpred.training.experiments import Member, RecipeSettings, load_encoded_corpus, partners_of, row_weights
from gnnpred.training.loop import TrainSettings, predict_rows
from gnnpred.training.model import ModelSettings
from gnnpred.training.networks import fit_fold
from gnnpred.training.search_space import Parameter, SearchSpace, Stage
from gnnpred.training.tuning import objective as objectives
from gnnpred.training.tuning.interrupts import InterruptDelay
from gnnpred.training.tuning.objective import Objective, inner_folds, outer_fold, stage_settings, suggest
from gnnpred.training.tuning.pruning import BestShare
from gnnpred.training.tuning.storage import MAX_RETRIES, open_storage, retry
from gnnpred.training.tuning.study import Search, SeededByTrial, run_one_trial, run_trials
from tests.helpers.tiny_corpus import FAMILIES, write_tiny_corpus

pytestmark = pytest.mark.train
RECIPE = RecipeSettings(
    tree_weight=0.3,
    train=TrainSettings(
        epochs=2, graphs_per_batch=8, op_rows_per_batch=4, model=ModelSettings(width=8, message_width=4, num_layers=1)
    ),
)
FULL = Stage(rows=1.0, epochs=1.0)
SPACE = SearchSpace(
    parameters=(Parameter(name="train.learning_rate", kind="float", low=1e-3, high=1e-2, log=True),),
    test_fold=1, seed=0, startup_trials=2, stages=(Stage(rows=0.5, epochs=0.5, keep=0.5), FULL),
)  # fmt: skip

SEARCH = Search(
    recipe=RECIPE, space=SPACE, objectives=("error",), datasets=Path(), work=Path(), storage="sqlite://", study_name="s"
)


def silent(what, done, total):
    pass


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return load_encoded_corpus(write_tiny_corpus(folder), RECIPE, folder / "work", 1, silent, with_blind=False)


def test_no_inner_fold_sees_a_row_of_the_families_set_aside(corpus):
    aside = corpus.fold_of("family") == SPACE.test_fold
    folds = inner_folds(corpus, SPACE.test_fold)
    assert len(folds) == len(FAMILIES) - 1
    for fold in folds:
        assert not aside[fold.train_idx].any()
        assert not aside[fold.test_idx].any()
        assert not set(fold.train_idx) & set(fold.test_idx)
    outer = outer_fold(corpus, SPACE.test_fold)
    assert aside[outer.test_idx].all()
    assert not aside[outer.train_idx].any()


def test_a_fold_without_rows_cannot_be_set_aside(corpus):
    with pytest.raises(UsageError, match="test_fold = 7 has no rows"):
        inner_folds(corpus, 7)


def objective_on_defaults(corpus) -> tuple[float, dict]:
    study = optuna.create_study()
    study.enqueue_trial(SPACE.defaults(RECIPE))
    study.optimize(Objective(corpus, RECIPE, SPACE, silent), n_trials=1)
    return study.best_value, study.trials[0].user_attrs["fold_errors_pct"]


def test_times_of_the_families_set_aside_do_not_move_a_trial(corpus, tmp_path):
    (aside,) = {row.family for row in corpus.rows if corpus.splits["family"].fold_of(row) == SPACE.test_fold}
    (seen,) = {row.family for row in corpus.rows if corpus.splits["family"].fold_of(row) == SPACE.test_fold + 1}
    values = {}
    for family in (aside, seen):
        folder = write_tiny_corpus(tmp_path / family, slower_family=family, factor=3.0)
        changed = load_encoded_corpus(folder, RECIPE, tmp_path / family / "w", 1, silent, with_blind=False)
        values[family], _ = objective_on_defaults(changed)
    value, _ = objective_on_defaults(corpus)
    assert values[aside] == value
    assert values[seen] != value  # the check can fail


def test_the_trial_of_the_defaults_trains_the_networks_of_the_recipe(corpus):
    value, by_fold = objective_on_defaults(corpus)
    weights, partner_idx = row_weights(corpus, RECIPE), partners_of(corpus.rows)
    objective = Objective(corpus, RECIPE, SPACE, silent)
    expected = []
    for fold in objective.folds:
        model = fit_fold(corpus, fold, RECIPE, Member(0), weights=weights, partner_idx=partner_idx)
        gnn_ms = predict_rows(model, corpus.aware, fold.test_idx, specs_known=np.ones(len(fold.test_idx)))
        trees_ms = objective._trees(fold)
        predicted_ms = np.exp(0.7 * np.log(gnn_ms) + 0.3 * np.log(trees_ms))
        expected.append(np.mean(np.abs(predicted_ms / corpus.target_ms[fold.test_idx] - 1)) * 100)
    assert list(by_fold.values()) == pytest.approx(expected, rel=1e-5)
    assert value == pytest.approx(np.mean(expected), rel=1e-5)


def test_stages_take_shares_of_rows_and_epochs():
    drawn = RecipeSettings(train=TrainSettings(epochs=10, rows_per_epoch=1000))
    stage = stage_settings(drawn, Stage(rows=0.3, epochs=0.25)).train
    assert (stage.rows_per_epoch, stage.epochs) == (300, 2)
    assert stage_settings(drawn, FULL) == drawn
    assert stage_settings(RECIPE, Stage(rows=0.3, epochs=0.5)).train.rows_per_epoch == 0  # all, of fewer rows


def finished(*errors_pct: float) -> optuna.Study:
    stages = (Stage(rows=0.1, epochs=0.1, keep=0.25), Stage(rows=0.5, epochs=0.5, keep=0.75), FULL)
    study = optuna.create_study(pruner=BestShare(num_folds=2, stages=stages, startup_trials=4))
    for error_pct in errors_pct:
        study.add_trial(
            optuna.trial.create_trial(value=error_pct, intermediate_values=dict.fromkeys(range(4), error_pct))
        )
    return study


@pytest.mark.parametrize(
    ("step", "error_pct", "is_pruned"),
    [
        (0, 25.0, False),  # within a stage only the worst quarter goes
        (0, 39.0, True),
        (1, 25.0, True),  # at its end all but the best quarter go
        (1, 15.0, False),
        (3, 25.0, False),  # the next stage keeps three quarters
        (3, 35.0, True),
    ],
)
def test_pruning_within_and_at_the_end_of_a_stage(step, error_pct, is_pruned):
    trial = finished(10.0, 20.0, 30.0, 40.0).ask()
    trial.report(error_pct, step)
    assert trial.should_prune() is is_pruned


def test_nothing_is_pruned_before_there_is_something_to_compare_with():
    trial = finished(10.0, 20.0, 30.0).ask()
    trial.report(1000.0, 1)
    assert not trial.should_prune()


def test_a_diverged_network_prunes_its_trial(corpus, monkeypatch):
    def diverging(*arguments, on_epoch, **options):
        on_epoch(0, float("nan"))

    monkeypatch.setattr(objectives, "fit_fold", diverging)
    study = optuna.create_study()
    study.optimize(Objective(corpus, RECIPE, SPACE, silent), n_trials=1)
    assert study.trials[0].state is optuna.trial.TrialState.PRUNED
    assert study.trials[0].user_attrs["diverged"]


def test_trials_of_one_number_are_drawn_alike_and_of_two_are_not():
    def drawn(first: int) -> list[float]:
        study = optuna.create_study(sampler=SeededByTrial(0, 8))
        for _ in range(first):
            study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))
        return [study.ask().suggest_float("x", 0.0, 1.0) for _ in range(2)]

    assert drawn(0) == drawn(0)
    assert drawn(0)[1] == drawn(1)[0]  # started again after one trial: goes on as it would have
    assert drawn(0)[0] != drawn(0)[1]


def test_a_trial_whose_worker_died_is_queued_again_but_not_for_ever():
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.25}, user_attrs={"is_default": True})
    for attempt in range(MAX_RETRIES + 1):
        trial = study.ask()
        assert trial.suggest_float("x", 0.0, 1.0) == 0.25, attempt
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        retry(study, study.trials[trial.number])
    assert study.trials[-1].state is optuna.trial.TrialState.FAIL
    assert study.trials[-1].user_attrs["is_default"]


def test_an_interrupted_trial_is_queued_again():
    study = optuna.create_study()
    study.enqueue_trial(SPACE.defaults(RECIPE))

    class Interrupted:
        folds = (1, 2)

        def __call__(self, trial):
            suggest(trial, SPACE.parameters)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trials(study, Interrupted(), SEARCH, 3, silent)
    failed, queued = study.trials
    assert failed.state is optuna.trial.TrialState.FAIL
    assert queued.state is optuna.trial.TrialState.WAITING
    trial = study.ask()
    assert suggest(trial, SPACE.parameters) == SPACE.defaults(RECIPE)


class Complete:
    """An objective that any trial meets."""

    folds = (1, 2)

    def __call__(self, trial):
        suggest(trial, SPACE.parameters)
        return 1.0


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal; a shell starts what runs in its background deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", ["sqlite:///", "journal:"])
@pytest.mark.parametrize(
    ("method", "states"),
    [
        ("infer_relative_search_space", ["COMPLETE", "FAIL"]),  # while it is drawn: there is nothing to run again
        ("after_trial", ["COMPLETE", "COMPLETE"]),  # while its end is written
    ],
)
def test_an_interrupt_at_any_moment_leaves_no_trial_running(tmp_path, monkeypatch, kind, method, states):
    search = replace(SEARCH, storage=f"{kind}{tmp_path / 'study'}")
    sampler = SeededByTrial(0, 1)
    study = optuna.create_study(storage=open_storage(search.storage), study_name="s", sampler=sampler)
    run_trials(study, Complete(), search, 1, silent)
    whole = getattr(sampler, method)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return whole(*arguments)

    monkeypatch.setattr(sampler, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_one_trial(study, Complete(), search, worker="w")
    assert [trial.state.name for trial in study.trials] == states
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_is_not_held_back():
    with InterruptDelay():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        held = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.__self__.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_trial_that_others_have_given_up_ends_and_the_next_one_runs():
    study = optuna.create_study()

    class Suspended:
        folds = (1, 2)

        def __call__(self, trial):
            suggest(trial, SPACE.parameters)
            if trial.number == 0:  # another worker saw no sign of this one for too long
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            return 1.0

    run_trials(study, Suspended(), SEARCH, 1, silent)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


def test_an_error_of_the_objective_is_not_taken_for_a_trial_given_up():
    class Wrong:
        folds = (1, 2)

        def __call__(self, trial):
            raise ValueError("of our own")

    with pytest.raises(ValueError, match="of our own"):
        run_one_trial(optuna.create_study(), Wrong(), SEARCH)
