"""The study: its sampler, its first trial, whom it admits, and trials until there are enough."""

import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import json_digest
from gnnpred.training.experiments import Progress, RecipeSettings, corpus_rows, encoding_digest
from gnnpred.training.recipe import values_of
from gnnpred.training.search_space import SearchSpace
from gnnpred.training.tuning.costs import ERROR
from gnnpred.training.tuning.interrupts import InterruptDelay
from gnnpred.training.tuning.objective import Objective
from gnnpred.training.tuning.pruning import FINISHED, BestShare
from gnnpred.training.tuning.storage import fail_stale, journal_path, open_storage, retry, shown_storage, signed

WORKER = "worker"  # user attribute of a trial that one of several workers of a command runs: its name


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a study searches, from which corpus, and where it is kept."""

    recipe: RecipeSettings
    space: SearchSpace
    objectives: tuple[str, ...]
    datasets: Path
    work: Path
    storage: str
    study_name: str

    def digests(self) -> dict[str, str]:
        """What makes trials comparable; reads the corpus."""
        rows, _ = corpus_rows(self.datasets, self.recipe)
        return {
            "recipe": json_digest(values_of(self.recipe)),
            "search space": self.space.digest,
            "corpus": encoding_digest(self.datasets, rows),
        }


class SeededByTrial(optuna.samplers.BaseSampler):
    """TPE whose seed is the study's plus the trial's number.

    Workers of one study draw different trials then, and one that is killed and started again draws what it would have.
    """

    def __init__(self, seed: int, startup_trials: int) -> None:
        self._seed, self._startup_trials = seed, startup_trials
        self._sampler = self._seeded(0)

    def _seeded(self, number: int) -> optuna.samplers.TPESampler:
        return optuna.samplers.TPESampler(
            seed=self._seed + number, n_startup_trials=self._startup_trials, multivariate=True, constant_liar=True
        )

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._sampler = self._seeded(trial.number)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, distribution: Any) -> Any:
        return self._sampler.sample_independent(study, trial, param_name, distribution)


def open_study(search: Search, digests: dict[str, str]) -> optuna.Study:
    """Create a study, with the recipe's own values as its first trial, or join one of the same search."""
    study = optuna.create_study(
        storage=open_storage(search.storage), study_name=search.study_name, load_if_exists=True,
        directions=["minimize"] * len(search.objectives), sampler=_sampler_of(search.space),
    )  # fmt: skip
    _check(study, search, digests)
    if not study.trials:
        defaults = search.space.defaults(search.recipe)
        study.enqueue_trial(defaults, user_attrs={"is_default": True}, skip_if_exists=True)
    return study


def join_study(search: Search, digests: dict[str, str]) -> optuna.Study:
    """A study that there is, as a worker sees it; raises GnnpredError where its storage holds none."""
    try:
        study = optuna.load_study(
            storage=open_storage(search.storage), study_name=search.study_name, sampler=_sampler_of(search.space)
        )
    except KeyError as error:
        raise GnnpredError(
            f"a worker on {socket.gethostname()} finds no study {search.study_name!r} in the storage "
            f"{shown_storage(search.storage)}: the file must be on a file system that all workers share"
        ) from error
    _check(study, search, digests)
    return study


def _sampler_of(space: SearchSpace) -> SeededByTrial:
    return SeededByTrial(space.seed, space.startup_trials)


def _check(study: optuna.Study, search: Search, digests: dict[str, str]) -> None:
    """Mark a new study as one of this search; raises UsageError for one of another."""
    name = study.study_name
    for what, digest in digests.items():
        known = study.user_attrs.get(f"gnnpred {what}")
        if known is None and study.trials:
            raise UsageError(f"study {name!r} holds trials that gnnpred tune did not make: choose another --study")
        if known is None:
            study.set_user_attr(f"gnnpred {what}", digest)
        elif known != digest:
            raise UsageError(
                f"study {name!r} is of another {what}: its trials cannot be compared with new ones, choose another "
                "--study"
            )
    _check_objectives(study, search.objectives)


def _check_objectives(study: optuna.Study, objectives: tuple[str, ...]) -> None:
    """A study of the error alone carries no mark: studies from before there were others go on."""
    wanted, mark = ",".join(objectives), "gnnpred objectives"
    if mark not in study.user_attrs and objectives != (ERROR,) and len(study.directions) == len(objectives):
        study.set_user_attr(mark, wanted)
    known = study.user_attrs.get(mark, ERROR)
    if known != wanted:
        raise UsageError(
            f"study {study.study_name!r} is of the objectives {known}: give --objectives {known}, or choose another "
            "--study"
        )


def run_trials(
    study: optuna.Study,
    objective: Objective,
    search: Search,
    trials: int,
    on_progress: Progress,
    on_change: Callable[[], None] = lambda: None,
) -> None:
    """Run trials here until the study, with those of other workers, has ``trials`` finished ones.

    ``on_change`` is called after each.
    """
    while True:
        finished = num_finished(study)
        on_progress("trials", min(finished, trials), trials)
        on_change()
        if finished >= trials:
            return
        run_one_trial(study, objective, search)


def run_one_trial(study: optuna.Study, objective: Objective, search: Search, *, worker: str = "") -> None:
    """Draw a trial, or take a queued one, and run it; ``worker`` signs it.

    A trial that others have given up meanwhile (this process was suspended, or cut off from the storage) ends there.
    An interrupt queues it again; while a trial is drawn and while its end is written interrupts wait.
    """
    space = search.space
    study.pruner = BestShare(len(objective.folds), space.stages, space.startup_trials)
    is_journal = journal_path(search.storage) is not None
    given_up = False

    def run(trial: Trial) -> Any:
        nonlocal given_up
        if worker:
            trial.set_user_attr(WORKER, worker)
        try:
            delay.end()
            with signed(trial) if is_journal else nullcontext():
                values = objective(trial)
        except KeyboardInterrupt:
            retry(study, study.trials[trial.number])
            raise
        except UpdateFinishedTrialError:
            given_up = True
            raise
        finally:
            delay.begin()
        given_up = study.get_trials(deepcopy=False)[trial.number].state.is_finished()
        if given_up:
            raise UpdateFinishedTrialError
        return values

    if is_journal:
        fail_stale(study)
    try:
        with InterruptDelay() as delay:
            study.optimize(run, n_trials=1)
    except (ValueError, UpdateFinishedTrialError):
        if not given_up:
            raise


def num_finished(study: optuna.Study) -> int:
    return len(study.get_trials(deepcopy=False, states=FINISHED))
