"""The networks of the held-out experiments: trained fold by fold, kept as safetensors, asked together."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done
from gnnpred.training.data import FlatRows
from gnnpred.training.experiments import Corpus, Fold, Member, RecipeSettings, partners_of, row_weights
from gnnpred.training.loop import predict_rows, train_model
from gnnpred.training.model import StepTimeGNN


def train_folds(
    corpus: Corpus,
    jobs: list[tuple[Fold, Member]],
    settings: RecipeSettings,
    folder: Path,
    *,
    num_workers: int = 2,
    on_done: Callable[[Fold, Member], None] = lambda fold, member: None,
) -> None:
    """Train every (fold, member) whose file is not there yet; a killed run continues where it stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [(fold, member) for fold, member in jobs if not (folder / fold.file_name(member)).exists()]
    for fold, member in jobs:
        if (folder / fold.file_name(member)).exists():
            on_done(fold, member)
    _SHARED.update(corpus=corpus, settings=settings, folder=folder, weights=row_weights(corpus, settings))
    _SHARED["partner_idx"] = partners_of(corpus.rows)
    if num_workers <= 1:
        for fold, member in waiting:
            _train_one(fold, member)
            on_done(fold, member)
        return
    # fork shares the corpus arrays with the workers instead of copying them
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        futures = {pool.submit(_train_one, fold, member): (fold, member) for fold, member in waiting}
        for future in as_completed(futures):
            future.result()
            on_done(*futures[future])


_SHARED: dict = {}


def _train_one(fold: Fold, member: Member) -> None:
    import torch

    torch.set_num_threads(1)
    model = fit_fold(
        _SHARED["corpus"], fold, _SHARED["settings"], member, weights=_SHARED["weights"],
        partner_idx=_SHARED["partner_idx"],
    )  # fmt: skip
    save_weights(model, _SHARED["folder"] / fold.file_name(member))


def fit_fold(
    corpus: Corpus,
    fold: Fold,
    settings: RecipeSettings,
    member: Member,
    *,
    weights: np.ndarray,
    partner_idx: np.ndarray,
    on_epoch: Callable[[int, float], None] | None = None,
) -> StepTimeGNN:
    """Train one network on what a fold may see; ``weights`` and ``partner_idx`` have one value per corpus row."""
    return train_model(
        corpus.blind if fold.is_blind else corpus.aware,
        corpus.target_ms,
        fold.train_idx,
        weights,
        settings.train_of(member),
        seed=member.seed,
        partner_idx=None if fold.is_blind else partner_idx,
        operators=corpus.operators,
        operator_idx=np.flatnonzero(~np.isin(corpus.operator_devices, fold.hidden_devices)),
        on_epoch=on_epoch,
    )


def save_weights(model: StepTimeGNN, path: Path) -> None:
    """safetensors, through a temporary file."""
    from safetensors.torch import save_file

    with replaced_when_done(path) as partial:
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, partial)


def load_networks(
    folder: Path, fold: Fold, settings: RecipeSettings, members: Sequence[Member] | None = None
) -> list[StepTimeGNN]:
    """The kept networks of a fold, by default all of its track's, in the order of ``members``."""
    from safetensors.torch import load_file

    models = []
    for member in settings.members_of(fold.track) if members is None else members:
        path = folder / fold.file_name(member)
        if not path.exists():
            raise GnnpredError(f"{path} is missing: run `gnnpred evaluate --retrain` to train this fold")
        model = StepTimeGNN(settings.train_of(member).model)
        model.load_state_dict(load_file(path))
        models.append(model.eval())
    return models


def blend_networks(values: Sequence[np.ndarray], shares: np.ndarray) -> np.ndarray:
    """(n,) geometric mean of the networks' answers, m arrays (n,), by their shares (m,)."""
    return np.exp(np.tensordot(shares, np.log(values), 1))


def predict_fold(
    corpus: Corpus,
    fold: Fold,
    settings: RecipeSettings,
    folder: Path,
    *,
    members: Sequence[Member] | None = None,
    others: tuple[FlatRows, np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """(num_test,) ms: geometric mean of the fold's networks, by default all of them, on its test rows.

    ``others`` are rows beside the corpus to predict instead: all of them, the chosen positions (e,), GPUs (e,).
    """
    rows = corpus.blind if fold.is_blind else corpus.aware
    row_idx, devices = fold.test_idx, corpus.devices[fold.test_idx]
    if others:
        rows, row_idx, devices = others
    known = np.isin(devices, corpus.devices[fold.train_idx]).astype(np.float32)
    members = settings.members_of(fold.track) if members is None else members
    models = load_networks(folder, fold, settings, members)
    answers = [predict_rows(model, rows, row_idx, specs_known=known) for model in models]
    return blend_networks(answers, settings.shares_of(members))
