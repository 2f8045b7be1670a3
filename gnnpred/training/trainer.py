"""What the commands train and evaluate run: corpus, networks, checkpoint, error table."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gnnpred.corpus.splits import load_split
from gnnpred.corpus.store import load_rows
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.features import GLOBAL_FEATURE_NAMES, KIND_IDX, GraphArrays
from gnnpred.files import json_digest, replaced_when_done
from gnnpred.intervals import KNOWN_DEVICE, UNSEEN_DEVICE, IntervalModel, interval_models
from gnnpred.training.accuracy_page import write_accuracy_pages
from gnnpred.training.error_table import results_table
from gnnpred.training.evaluate import TRACKS, TrackResult, require_networks, run_track
from gnnpred.training.experiments import (
    Corpus,
    Fold,
    Member,
    Progress,
    RecipeSettings,
    corpus_rows,
    encoding_digest,
    folds_of,
    load_encoded_corpus,
)
from gnnpred.training.extra_rows import NEUSIGHT, load_extra_rows
from gnnpred.training.intervals import MIN_FOLDS, MIN_QUANTILE_ROWS, fit_intervals
from gnnpred.training.kernel_errors import kernel_table
from gnnpred.training.networks import load_networks, train_folds
from gnnpred.training.plots import write_parity_plots
from gnnpred.training.ranges import training_ranges
from gnnpred.training.release import write_checkpoint
from gnnpred.training.report import write_report
from gnnpred.training.trees import fit_trees, roofline_of, summed_features

# What most timed rows of one-step training ran; a user who knows better says so.
DEFAULT_FRAMEWORK_VERSION = "2.1"
ERRORS_FILE = "errors.json"
INTERVALS_FILE = "intervals.json"
_MIN_GOLDEN_NODES = 15
EXTRA_TRACKS = ("family", NEUSIGHT)  # also score rows beside the corpus


def _silent(what: str, done: int, total: int) -> None:
    pass


def _jobs(folds: Sequence[Fold], settings: RecipeSettings) -> list[tuple[Fold, Member]]:
    track = folds[0].track if folds else ""
    return [(fold, member) for member in settings.members_of(track) for fold in folds]


def _train(
    corpus: Corpus, jobs: list[tuple[Fold, Member]], settings: RecipeSettings, folder: Path, workers: int, what: str,
    on_progress: Progress,
) -> None:  # fmt: skip
    done = 0
    on_progress(what, 0, len(jobs))

    def count(fold: Fold, member: Member) -> None:
        nonlocal done
        done += 1
        on_progress(what, done, len(jobs))

    train_folds(corpus, jobs, settings, folder, num_workers=workers, on_done=count)


def train_checkpoint(
    name: str,
    settings: RecipeSettings,
    *,
    datasets: Path,
    out: Path,
    work: Path,
    num_workers: int = 2,
    on_progress: Progress = _silent,
) -> None:
    """Train the ensemble on all rows and write the checkpoint folder.

    Intervals are those that ``evaluate`` calibrated on held-out groups (``intervals.json`` in ``out``); without
    them the checkpoint cannot say how sure it is, so evaluation comes first. A corpus too small for that, such as one
    short collection, gets the widest interval, and ``predict`` says so.
    """
    intervals = _intervals_for(name, settings, datasets=datasets, out=out)
    started = time.time()
    corpus = load_encoded_corpus(datasets, settings, work, num_workers, on_progress, with_blind=False)
    (fold,) = folds_of(corpus, "final")
    # finished networks are taken again for equal settings and an equal corpus alone
    folder = work / f"{name}-{_settings_digest(settings)}-{encoding_digest(datasets, list(corpus.rows))[:8]}"
    _train(corpus, _jobs([fold], settings), settings, folder, num_workers, "networks", on_progress)
    members = load_networks(folder, fold, settings)
    on_progress("boosted trees", 0, 1)
    log_ratio = np.log(corpus.target_ms / roofline_of(corpus.aware))
    trees = fit_trees(summed_features(corpus.aware), log_ratio, fold.train_idx)
    on_progress("boosted trees", 1, 1)
    training = ~corpus.is_inference
    ranges = training_ranges(corpus, np.flatnonzero(training))
    for feature in GLOBAL_FEATURE_NAMES:
        if feature.startswith("precision_"):
            column = corpus.aware.globals[:, GLOBAL_FEATURE_NAMES.index(feature)]
            ranges[feature] = (float(column.min()), float(column.max()))
    kinds = {kind for kind, i in KIND_IDX.items() if np.any(corpus.aware.kind_idx == i)}
    own_devices = {row.device: row.own_device for row in corpus.rows if row.own_device}
    write_checkpoint(
        out,
        name=name,
        members=members,
        shares=settings.shares_of(settings.members_of(fold.track)),
        trees=trees,
        tree_weight=settings.tree_weight,
        golden=_golden(corpus),
        known_kinds=sorted(kinds),
        device_rows={name: int((corpus.devices[training] == name).sum()) for name in sorted(set(corpus.devices))},
        global_ranges=ranges,
        intervals=intervals or {KNOWN_DEVICE: IntervalModel.uncalibrated().as_dict()},
        default_framework_version=DEFAULT_FRAMEWORK_VERSION,
        details={
            "training_rows": int(training.sum()),
            "inference_rows": int(corpus.is_inference.sum()),
            "operator_rows": len(corpus.operator_rows),
            "graphs": len({row.graph_id for row in corpus.rows}),
            "has_calibrated_intervals": intervals is not None,
            "own_devices": [asdict(device) for device in own_devices.values()],
            "settings": asdict(settings),
            "training_minutes": round((time.time() - started) / 60, 1),
        },
    )


def _intervals_for(name: str, settings: RecipeSettings, *, datasets: Path, out: Path) -> dict[str, Any] | None:
    """The calibrated intervals, checked before minutes are spent on training; None where none can be had."""
    path = out / INTERVALS_FILE
    if path.is_file():
        intervals = json.loads(path.read_text(encoding="utf-8"))
        interval_models(intervals, where=str(path))
        return intervals
    rows, _ = corpus_rows(datasets, settings)
    steps = [row for row in rows if row.phase != "inference"]
    families = load_split(datasets / "splits" / "family.json")
    if len(steps) < MIN_QUANTILE_ROWS or len({families.fold_of(row) for row in steps}) < MIN_FOLDS:
        return None
    raise GnnpredError(
        f"{path} is missing: run `gnnpred evaluate --recipe {name} --retrain --datasets {datasets} --out {out}` first, "
        "which calibrates the intervals on held-out groups"
    )


def _settings_digest(settings: RecipeSettings) -> str:
    return json_digest(asdict(settings), 10)


def _golden(corpus: Corpus) -> dict[str, tuple[GraphArrays, bool]]:
    """Small examples: the row with the fewest nodes of fp32 and of mixed (a corpus without either: of its first
    precision), specification known and hidden."""
    sizes = np.diff(corpus.aware.node_start)
    is_step = ~corpus.is_inference & (sizes >= min(_MIN_GOLDEN_NODES, sizes.max()))
    usual = ("fp32", "mixed") if np.isin(corpus.precisions[is_step], ("fp32", "mixed")).any() else corpus.precisions[:1]
    golden = {}
    for precision, known in (*((precision, True) for precision in usual), (usual[0], False)):
        candidates = np.flatnonzero((corpus.precisions == precision) & is_step)
        if len(candidates):
            row = int(candidates[np.argmin(sizes[candidates])])
            golden[f"{corpus.rows[row].model} {precision}{'' if known else ', unseen device'}"] = (
                corpus.aware.arrays_of(row),
                known,
            )
    return golden


def evaluate_recipe(
    name: str,
    settings: RecipeSettings,
    *,
    datasets: Path,
    folds: Path,
    out: Path,
    work: Path,
    tracks: Sequence[str] | None = None,
    retrain: bool = False,
    docs: Path | None = None,
    readme: Path | None = None,
    num_workers: int = 2,
    on_progress: Progress = _silent,
) -> dict[str, Any]:
    """Score the kept fold networks (trained first where ``retrain``) and write table, intervals, report and plots.

    ``docs`` is the accuracy page to write as well, ``readme`` the file whose marked section quotes it.
    """
    for track in tracks or ():
        if track not in TRACKS:
            raise UsageError(f"unknown track {track!r}: choose among {', '.join(TRACKS)}")
    if docs and tracks is not None and "family" not in tracks:
        raise UsageError("the accuracy page needs the family track: leave --track out, or add --track family")
    if not retrain:
        require_networks(datasets, tracks or TRACKS, settings, folds)
    with_blind = any(track.startswith("blind") for track in tracks or TRACKS)
    corpus = load_encoded_corpus(datasets, settings, work, num_workers, on_progress, with_blind=with_blind)
    if retrain:
        began = _started_file(folds, settings).stat().st_mtime
        for file in folds.glob("*.safetensors"):
            is_asked = tracks is None or any(file.name.startswith(f"{track}-") for track in tracks)
            if is_asked and file.stat().st_mtime < began:  # newer ones are this retraining's, killed and resumed
                file.unlink()
        for track in tracks or TRACKS:
            jobs = _jobs(list(folds_of(corpus, track)), settings)
            _train(corpus, jobs, settings, folds, num_workers, f"networks, {track}", on_progress)
        _started_file(folds, settings).unlink(missing_ok=True)
    all_rows = load_rows(datasets)
    extra = None
    if any(track in EXTRA_TRACKS for track in tracks or TRACKS):
        extra = load_extra_rows(
            datasets, corpus, all_rows, cache=work / "encoded",
            on_row=lambda done, total: on_progress("forward passes encoded", done, total),
        )  # fmt: skip
    results: dict[str, TrackResult] = {}
    for track in tracks or TRACKS:
        fold_list = list(folds_of(corpus, track))
        if not fold_list:  # the corpus has no row of it
            continue
        done = 0
        on_progress(f"scoring, {track}", 0, len(fold_list))

        def count(fold: Fold, track: str = track, total: int = len(fold_list)) -> None:
            nonlocal done
            done += 1
            on_progress(f"scoring, {track}", done, total)

        results[track] = run_track(
            corpus, track, settings, folds, with_baselines=not track.startswith("blind"),
            extra=extra if track in EXTRA_TRACKS else None, on_fold=count,
        )  # fmt: skip
    table = results_table(results, corpus, name=name, all_rows=all_rows, extra=extra)
    num_networks = {track: len(settings.members_of(track)) for track in ("final", *results)}
    table["networks"] = {"shipped": num_networks.pop("final"), **num_networks}
    if "device" in results and corpus.operators:
        table["kernels"] = kernel_table(corpus, list(folds_of(corpus, "device")), settings, folds)
    if tracks is None or "family" in results:
        out.mkdir(parents=True, exist_ok=True)
        _write_json(out / ERRORS_FILE, table)
        intervals = {KNOWN_DEVICE: fit_intervals(results["family"], corpus).as_dict()}
        if "device" in results:
            intervals[UNSEEN_DEVICE] = fit_intervals(results["device"], corpus).as_dict()
        _write_json(out / INTERVALS_FILE, intervals)
        write_report(out, table, name=name)
        write_parity_plots(out, results, corpus)
        if docs:
            write_accuracy_pages(table, docs=docs, readme=readme, plots=out)
    return table


def _started_file(folds: Path, settings: RecipeSettings) -> Path:
    """Marks when a retraining began: networks newer than it are finished work."""
    folds.mkdir(parents=True, exist_ok=True)
    path = folds / f".retraining-{_settings_digest(settings)}"
    if not path.exists():
        path.touch()
    return path


def _write_json(path: Path, content: Any) -> None:
    with replaced_when_done(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
