"""What calibrating to a few runs, and correcting by one timed forward pass, gain on held-out rows of the corpus.

    python benchmarks/calibration_study.py runs --folds trainers/base-folds --work build
    python benchmarks/calibration_study.py inference --folds trainers/base-folds --work build

Needs the train extra and the networks of the folds (`gnnpred evaluate --retrain`). Every row is predicted by networks
and trees that saw nothing of its group (GPU, family or architecture). Constants were chosen on one half of the groups
("chosen on"); the other half ("reported") had no part in it. docs/calibration.md holds the figures.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from gnnpred.calibration import Calibration, CalibrationPrior, CalibrationRun  # noqa: E402
from gnnpred.checkpoint import blend  # noqa: E402
from gnnpred.corpus.store import MeasurementRow, load_graphs, load_rows  # noqa: E402
from gnnpred.inference_correction import CORRECTION_POWER  # noqa: E402
from gnnpred.training.calibration_scores import draws_of, is_reported, machines_of  # noqa: E402
from gnnpred.training.data import FlatRows  # noqa: E402
from gnnpred.training.experiments import Corpus, Fold, RecipeSettings, folds_of, load_corpus  # noqa: E402
from gnnpred.training.loop import predict_rows  # noqa: E402
from gnnpred.training.networks import blend_networks, load_networks  # noqa: E402
from gnnpred.training.recipe import find_recipe, load_recipe  # noqa: E402
from gnnpred.training.rows import encode_rows  # noqa: E402
from gnnpred.training.trees import fit_trees, roofline_of, summed_features  # noqa: E402

RUN_COUNTS = (5, 10, 20, 50)
NUM_DRAWS, MAX_TEST_ROWS = 10, 60
POWERS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


# -- held-out predictions ----------------------------------------------------------------------------


def fold_predictor(
    corpus: Corpus, fold: Fold, settings: RecipeSettings, folder: Path
) -> Callable[[FlatRows, np.ndarray, np.ndarray], np.ndarray]:
    """Networks and trees of one fold as the checkpoint would combine them: (rows, row_idx, known) -> ms."""
    features, roofline = summed_features(corpus.aware), roofline_of(corpus.aware)
    trees = fit_trees(features, np.log(corpus.target_ms / roofline), fold.train_idx)
    networks, shares = load_networks(folder, fold, settings), settings.shares_of(settings.members_of(fold.track))

    def predict(rows: FlatRows, row_idx: np.ndarray, known: np.ndarray) -> np.ndarray:
        answers = [predict_rows(network, rows, row_idx, specs_known=known) for network in networks]
        own = features if rows is corpus.aware else summed_features(rows)
        base = roofline if rows is corpus.aware else roofline_of(rows)
        trees_ms = np.exp(trees.predict(own[row_idx])) * base[row_idx]
        return blend(blend_networks(answers, shares), trees_ms, settings.tree_weight)

    return predict


def held_out_predictions(
    corpus: Corpus,
    track: str,
    settings: RecipeSettings,
    folder: Path,
    work: Path,
    extra: tuple[list[MeasurementRow], FlatRows] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) ms of every corpus row and (m,) ms of the extra rows by the networks of their own fold; nan where none.

    Kept in ``work``: the second call takes no time.
    """
    path = work / f"held-out-{track}{'-extra' if extra else ''}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as stored:
            return stored["rows"], stored["extra"]
    rows_ms = np.full(len(corpus.rows), np.nan)
    extra_ms = np.full(len(extra[0]) if extra else 0, np.nan)
    extra_fold = np.array([corpus.splits[track].fold_of(row) for row in extra[0]]) if extra else None
    for number, fold in enumerate(folds_of(corpus, track)):
        predict = fold_predictor(corpus, fold, settings, folder)
        known = np.full(len(fold.test_idx), 0.0 if fold.held_out_device else 1.0, np.float32)
        rows_ms[fold.test_idx] = predict(corpus.aware, fold.test_idx, known)
        if extra:
            own = np.flatnonzero(extra_fold == number)
            extra_ms[own] = predict(extra[1], own, np.ones(len(own), np.float32))
        print(f"{track} {fold.name}", file=sys.stderr, flush=True)
    np.savez(path, rows=rows_ms, extra=extra_ms)
    return rows_ms, extra_ms


# -- a few runs --------------------------------------------------------------------------------------


def study_runs(arguments: argparse.Namespace, corpus: Corpus, settings: RecipeSettings) -> None:
    prior = replace(CalibrationPrior(), **dict(arguments.set))
    summary = summed_features(corpus.aware)
    architectures = np.array([row.architecture for row in corpus.rows])
    groups = machines_of(corpus)
    family_ms, _ = held_out_predictions(corpus, "family", settings, arguments.folds, arguments.work)
    low, high = np.nanquantile(np.log(corpus.target_ms / family_ms)[~corpus.is_inference], (0.05, 0.95))
    card_interval = (float(low), float(high))  # what a card holds comes from the family folds
    for track in arguments.track or ("family", "architecture", "device"):
        predicted, _ = held_out_predictions(corpus, track, settings, arguments.folds, arguments.work)
        usable = ~np.isnan(predicted) & ~corpus.is_inference
        is_known = track != "device"
        error = np.log(corpus.target_ms / predicted)
        runs = {
            i: CalibrationRun.of_summary(
                summary[i], device="it", is_known_device=is_known, interval_log=card_interval,
                log_ratio=float(error[i]), group=str(architectures[i]),
            )
            for i in np.flatnonzero(usable)
        }  # fmt: skip
        collected: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
        for draw in draws_of(
            groups, architectures, usable, seed=arguments.seed, run_counts=RUN_COUNTS, num_draws=NUM_DRAWS,
            max_test_rows=MAX_TEST_ROWS,
        ):  # fmt: skip
            fitted = Calibration(tuple(runs[i] for i in draw.calibration_idx), prior)
            corrections = [fitted.correct(runs[i]) for i in draw.test_idx]
            before = error[draw.test_idx]
            after = before - np.log([c.factor for c in corrections])
            bounds = np.array([c.interval_log for c in corrections])
            inside = (bounds[:, 0] <= after) & (after <= bounds[:, 1])
            wide = bounds[:, 1] - bounds[:, 0]
            collected[draw.group, draw.num_runs].append(np.stack([before, after, inside, wide], axis=1))
        results = {key: np.concatenate(parts) for key, parts in collected.items()}
        for title, chosen in (("chosen on", False), ("reported", True)):
            _print_runs(track, title, {k: v for k, v in results.items() if is_reported(k[0]) is chosen})
        if track == "device":
            _print_devices(results)


def _mape(log_error: np.ndarray) -> float:
    return float(np.abs(np.expm1(-log_error)).mean() * 100)


def _median(log_error: np.ndarray) -> float:
    return float(np.median(np.abs(np.expm1(-log_error))) * 100)


def _print_runs(track: str, title: str, results: dict[tuple[str, int], np.ndarray]) -> None:
    print(f"\n{track}, groups {title}: mean over groups (GPU in a source)")
    print(
        "| runs | groups | MAPE before | after | median before | after | groups worse by > 1 point | coverage | width |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for count in RUN_COUNTS:
        own = [v for (_, k), v in results.items() if k == count]
        if own:
            worse = sum(_mape(v[:, 1]) > _mape(v[:, 0]) + 1 for v in own)
            print(
                f"| {count} | {len(own)} | {np.mean([_mape(v[:, 0]) for v in own]):.1f} "
                f"| {np.mean([_mape(v[:, 1]) for v in own]):.1f} | {np.mean([_median(v[:, 0]) for v in own]):.1f} "
                f"| {np.mean([_median(v[:, 1]) for v in own]):.1f} | {worse} "
                f"| {np.mean([v[:, 2].mean() for v in own]):.0%} | {np.mean([v[:, 3].mean() for v in own]):.2f} |"
            )


def _print_devices(results: dict[tuple[str, int], np.ndarray]) -> None:
    print("\nunseen GPU, by GPU and source: MAPE before -> after k runs")
    print("| GPU, source | before | " + " | ".join(str(k) for k in RUN_COUNTS) + " |")
    print("|---|---:|" + "---:|" * len(RUN_COUNTS))
    for group in sorted({group for group, _ in results}):
        own = {k: results[group, k] for k in RUN_COUNTS if (group, k) in results}
        before = _mape(next(iter(own.values()))[:, 0])
        cells = [f"{_mape(own[k][:, 1]):.1f}" if k in own else "" for k in RUN_COUNTS]
        print(f"| {group.replace('|', ', ')} | {before:.1f} | {' | '.join(cells)} |")
    for count in RUN_COUNTS:
        pairs = [(_mape(v[:, 0]), _mape(v[:, 1])) for (_, k), v in results.items() if k == count]
        if pairs:
            before, after = np.median(pairs, axis=0)
            halved = sum(a <= b / 2 for b, a in pairs)
            print(f"{count} runs: median over groups {before:.1f} -> {after:.1f}; halved in {halved} of {len(pairs)}")


# -- a measured forward pass -------------------------------------------------------------------------


def software_key(row: MeasurementRow) -> tuple:
    return (row.graph_id, row.device, row.framework_version, row.memory_format, row.compiler)


def inference_rows(corpus: Corpus, datasets: Path) -> list[MeasurementRow]:
    """Inference rows with the graph, GPU, layout and software of a training row, from any part of the corpus."""
    wanted = {
        software_key(row) for row, inference in zip(corpus.rows, corpus.is_inference, strict=True) if not inference
    }
    return [
        row
        for row in load_rows(datasets)
        if row.phase == "inference" and row.used_for_training and row.graph_id and row.compiler != "tensorrt"
        and software_key(row) in wanted
    ]  # fmt: skip


def study_inference(arguments: argparse.Namespace, corpus: Corpus, settings: RecipeSettings) -> None:
    rows = inference_rows(corpus, arguments.datasets)
    path = arguments.work / "inference-rows.npz"
    if path.exists():
        flat = FlatRows.load(path)
    else:
        graphs, done = load_graphs(arguments.datasets), [0]

        def count() -> None:
            done[0] += 1
            if done[0] % 500 == 0:
                print(f"encoded {done[0]} of {len(rows)}", file=sys.stderr, flush=True)

        flat = FlatRows.from_arrays(encode_rows(rows, graphs.__getitem__, on_row=count))
        flat.save(path)
    by_key: dict[tuple, list[int]] = defaultdict(list)
    for j, row in enumerate(rows):
        by_key[software_key(row)].append(j)
    for track in ("family", "architecture"):
        train_ms, forward_ms = held_out_predictions(
            corpus, track, settings, arguments.folds, arguments.work, (rows, flat)
        )
        pairs = []
        for i, row in enumerate(corpus.rows):
            if np.isnan(train_ms[i]) or corpus.is_inference[i]:
                continue
            candidates = [j for j in by_key.get(software_key(row), ()) if not np.isnan(forward_ms[j])]
            for j in candidates:
                pairs.append(
                    (
                        i, np.log(row.step_time_ms / train_ms[i]), np.log(rows[j].step_time_ms / forward_ms[j]),
                        rows[j].precision == row.precision, np.log(rows[j].batch_size / row.batch_size),
                        "fp64" not in (rows[j].precision, row.precision),
                    )
                )  # fmt: skip
        data = np.array(pairs, float)  # (pairs, 6)
        row_idx = data[:, 0].astype(int)
        step, forward = data[:, 1], data[:, 2]
        same_precision, batch_ratio, no_fp64 = data[:, 3] > 0, np.abs(data[:, 4]), data[:, 5] > 0
        family = np.array([corpus.rows[i].family for i in row_idx])
        reported = np.array([is_reported(name) for name in family])
        source = np.array([corpus.rows[i].source_id.split("-")[0] for i in row_idx])
        layout = np.array([corpus.rows[i].memory_format for i in row_idx])
        version = np.array([corpus.rows[i].framework_version for i in row_idx])
        selections = {
            "timm nchw": (source == "timm") & (layout == "nchw") & same_precision,
            "timm nchw, PyTorch 1.12": (source == "timm") & (layout == "nchw") & same_precision & (version == "1.12"),
            "timm nhwc": (source == "timm") & (layout == "nhwc") & same_precision,
            "not timm, same batch": (source != "timm") & same_precision & (batch_ratio < 0.01),
            "batch up to 4 times apart": same_precision & (batch_ratio > 0.01) & (batch_ratio < 1.4),
            "batch further apart": same_precision & (batch_ratio > 1.4),
            "other precision": ~same_precision & no_fp64,
            "all, same precision": same_precision,
        }
        print(f"\n{track}: MAPE / median by power; then p90 and the width of 90 % before -> after at CORRECTION_POWER")
        print("| rows | families | n | correlation | " + " | ".join(map(str, POWERS)) + " | p90 | width |")
        print("|---|---|---:|---:|" + "---:|" * (len(POWERS) + 2))
        for name, chosen in selections.items():
            for title, half in (("chosen on", ~reported), ("reported", reported)):
                own = chosen & half
                if own.sum() >= 20:
                    _print_powers(name, title, step[own], forward[own])


def _print_powers(name: str, title: str, step: np.ndarray, forward: np.ndarray) -> None:
    cells = [f"{_mape(step - power * forward):.1f} / {_median(step - power * forward):.1f}" for power in POWERS]
    after = step - CORRECTION_POWER * forward

    def p90(error: np.ndarray) -> float:
        return float(np.percentile(np.abs(np.expm1(-error)), 90) * 100)

    def width(error: np.ndarray) -> float:
        return float(np.diff(np.quantile(error, (0.05, 0.95)))[0])

    print(
        f"| {name} | {title} | {len(step)} | {np.corrcoef(step, forward)[0, 1]:.2f} | {' | '.join(cells)} "
        f"| {p90(step):.0f} -> {p90(after):.0f} | {width(step):.2f} -> {width(after):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("runs", "inference"))
    parser.add_argument("--folds", type=Path, default=ROOT / "trainers" / "base-folds", help="networks of the folds")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "calibration", help="kept predictions")
    parser.add_argument("--encoded", type=Path, default=ROOT / "build" / "encoded", help="encoded rows")
    parser.add_argument("--datasets", type=Path, default=ROOT / "datasets")
    parser.add_argument("--recipe", default="base")
    parser.add_argument("--track", action="append", help="only this track of `runs`; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", type=lambda text: (text.split("=")[0], float(text.split("=")[1])), action="append", default=[],
        metavar="FIELD=VALUE", help="another constant of CalibrationPrior, to try",
    )  # fmt: skip
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    settings = load_recipe(find_recipe(arguments.recipe))
    corpus = load_corpus(arguments.datasets, settings, with_blind=False, cache=arguments.encoded)
    {"runs": study_runs, "inference": study_inference}[arguments.study](arguments, corpus, settings)


if __name__ == "__main__":
    main()
