"""Errors of a step on several GPUs, end to end, on held-out models: the tracks of the communication head.

Compute is the measured step on one GPU, or (where the networks of the folds are at hand) the prediction by the fold
that has not seen the model's family; constants of the step are fitted without the family (sharded runs: without the
model size). Everything is read from ``datasets/``.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnpred.communication_fit.gradient_profile import profiles_of
from gnnpred.communication_fit.pairs import Pair
from gnnpred.communication_fit.sharded import (
    ShardedPairs,
    fit_sharded,
    match_sharded,
    predict_sharded,
    run_arrays,
    sharded_rows,
    step_ms,
    without_overhead,
)
from gnnpred.communication_fit.step_model import (
    fit_constants,
    held_out_constants,
    pair_arrays,
    pair_weights,
    predict_held_out,
)
from gnnpred.communication_fit.steps import step_pairs
from gnnpred.corpus.store import MeasurementRow, load_graphs, load_multi_gpu_rows, load_rows
from gnnpred.errors import GnnpredError
from gnnpred.files import replaced_when_done
from gnnpred.graph import DType

RESULT_FILE = "communication.json"
GPU_COUNTS = (2, 4, 8)
TORCH = "torch-ddp"
_MARKS = ("<!-- tracks of the communication head -->", "<!-- end of the tracks -->")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Compute:
    """Held-out predictions of steps on one GPU in ms, by row id, and how many rows they come from."""

    by_family: Mapping[str, float]
    by_architecture: Mapping[str, float]


def communication_table(
    datasets: Path,
    *,
    compute: Compute | None = None,
    layouts: Sequence[tuple[MeasurementRow, float]] = (),
    on_progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Every track as ``{"name", "ask", "errors": {...}}``; ``layouts`` are rows with their predicted step in ms.

    Raises GnnpredError where the corpus has no runs on several GPUs.
    """
    on_progress("communication tracks", 0, 3)
    pairs, irregular = step_pairs(datasets)
    if not pairs:
        raise GnnpredError(f"{datasets} has no runs on several GPUs: build the corpus with 'gnnpred dataset build'")
    learned = held_out_constants(pairs)
    on_progress("communication tracks", 1, 3)
    scored = _ScoredPairs(pairs, predict_held_out(pairs, learned))
    tracks = {
        "weak_scaling": _weak_scaling(scored),
        "one_node": _one_node(scored),
        "dlperf_nodes": _dlperf(scored),
        "precision_effect": _precision_effect(scored),
        "sia": _sia(scored),
    }
    if compute is not None:
        tracks |= _with_predicted_compute(pairs, learned, compute.by_family)
    tracks["irregular"] = _irregular(pairs, irregular)
    on_progress("communication tracks", 2, 3)
    tracks |= _sharded(datasets, compute)
    if layouts:
        tracks["layouts"] = _layouts(layouts)
    on_progress("communication tracks", 3, 3)
    return {"tracks": tracks, "pairs": len(pairs), "families": sorted({pair.family for pair in pairs})}


# -- data parallelism --------------------------------------------------------------------------------
class _ScoredPairs:
    """Pairs with a prediction, as arrays."""

    def __init__(self, pairs: Sequence[Pair], predicted_ms: np.ndarray) -> None:
        self.pairs = list(pairs)
        self.predicted_ms = predicted_ms
        self.single_ms = np.array([pair.single_ms for pair in pairs])
        self.multi_ms = np.array([pair.multi_ms for pair in pairs])
        self.gpus = np.array([pair.fabric.gpus for pair in pairs])
        self.nodes = np.array([pair.row.nodes for pair in pairs])
        self.group = np.array([pair.group for pair in pairs])
        self.site = np.array([pair.site for pair in pairs])
        self.family = np.array([pair.family for pair in pairs])
        self.device = np.array([pair.row.device for pair in pairs])
        self.precision = np.array([str(pair.row.precision) for pair in pairs])
        self.is_full = np.array([pair.is_full for pair in pairs])

    @property
    def is_bench(self) -> np.ndarray:
        """Not of a scheduler's grid."""
        return self.site != "sia"

    def median_efficiency(self) -> np.ndarray:
        """(n,) ms: the efficiency that other families reach at the median, by software, GPUs and kind of precision."""
        predicted = self.single_ms.copy()
        efficiency = self.single_ms / self.multi_ms
        keys = [*zip(self.group, self.gpus, self.is_full, strict=True)]
        positions = defaultdict(list)
        for i, key in enumerate(keys):
            positions[key].append(i)
        for own in positions.values():
            for i in own:
                others = [j for j in own if self.family[j] != self.family[i]]
                if others:
                    predicted[i] = self.single_ms[i] / np.median(efficiency[others])
        return predicted


def _errors(measured_ms: np.ndarray, predicted_ms: np.ndarray) -> dict[str, float]:
    error = 100 * (predicted_ms / measured_ms - 1)
    return {
        "n": len(error),
        "mape_pct": round(float(np.abs(error).mean()), 1),
        "median_pct": round(float(np.median(np.abs(error))), 1),
        "p90_pct": round(float(np.quantile(np.abs(error), 0.9)), 1),
        "bias_pct": round(float(error.mean()), 1),
    }


def _points(scored: _ScoredPairs, chosen: np.ndarray, predicted_ms: np.ndarray) -> dict[str, float]:
    """Error of weak-scaling efficiency in points."""
    measured = scored.single_ms[chosen] / scored.multi_ms[chosen]
    error = 100 * (scored.single_ms[chosen] / predicted_ms[chosen] - measured)
    return {
        "n": int(chosen.sum()),
        "mean_points": round(float(np.abs(error).mean()), 1),
        "median_points": round(float(np.median(np.abs(error))), 1),
        "p90_points": round(float(np.quantile(np.abs(error), 0.9)), 1),
        "bias_points": round(float(error.mean()), 1),
    }


def _with_baselines(scored: _ScoredPairs, chosen: np.ndarray) -> dict[str, Any]:
    measured = scored.multi_ms[chosen]
    return {
        **_errors(measured, scored.predicted_ms[chosen]),
        "no_overhead_mape_pct": _errors(measured, scored.single_ms[chosen])["mape_pct"],
        "median_efficiency_mape_pct": _errors(measured, scored.median_efficiency()[chosen])["mape_pct"],
    }


def _weak_scaling(scored: _ScoredPairs) -> dict[str, Any]:
    own = (scored.group == TORCH) & scored.is_bench & (scored.nodes == 1)
    median_ms = scored.median_efficiency()
    rows = {}
    for count in GPU_COUNTS:
        for precision in ("fp32", "tf32", "mixed"):
            chosen = own & (scored.gpus == count) & (scored.precision == precision)
            if chosen.sum() < 5:
                continue
            rows[f"{count} GPUs, {precision}"] = {
                **_points(scored, chosen, scored.predicted_ms),
                "no_overhead_points": _points(scored, chosen, scored.single_ms)["mean_points"],
                "median_efficiency_points": _points(scored, chosen, median_ms)["mean_points"],
            }
    return {"ask": "mean error of efficiency <= 4 points", "rows": rows}


def _one_node(scored: _ScoredPairs) -> dict[str, Any]:
    own = scored.is_bench & (scored.nodes == 1) & (scored.gpus == 8)
    rows = {"all software": _with_baselines(scored, own)}
    for group in sorted(set(scored.group[own].tolist())):
        rows[group] = _with_baselines(scored, own & (scored.group == group))
    torch = own & (scored.group == TORCH)
    for values, names in ((scored.precision, "precision"), (scored.device, "GPU"), (scored.family, "family")):
        for name in sorted(set(values[torch].tolist())):
            chosen = torch & (values == name)
            if chosen.sum() >= 5:
                rows[f"{TORCH}, {names} {name}"] = _with_baselines(scored, chosen)
    return {"ask": "MAPE <= 10 %", "compute": "measured", "rows": rows}


def _dlperf(scored: _ScoredPairs) -> dict[str, Any]:
    own = np.array([site.startswith("dlperf") for site in scored.site.tolist()]) & (scored.nodes > 1)
    rows = {}
    for name, chosen in (("fp32", own & scored.is_full), ("mixed", own & ~scored.is_full)):
        rows[name] = _with_baselines(scored, chosen)
        for group in sorted(set(scored.group[chosen].tolist())):
            rows[f"{name}, {group}"] = _with_baselines(scored, chosen & (scored.group == group))
    return {"ask": "MAPE <= 12 %", "compute": "measured", "rows": rows}


def _sia(scored: _ScoredPairs) -> dict[str, Any]:
    own = ~scored.is_bench
    rows = {}
    for name, chosen in (("one node", own & (scored.nodes == 1)), ("several nodes", own & (scored.nodes > 1))):
        if chosen.any():
            rows[name] = _with_baselines(scored, chosen)
    return {"ask": "", "compute": "measured", "rows": rows}


def _precision_effect(scored: _ScoredPairs) -> dict[str, Any]:
    """How much more (or less) precision gains on eight GPUs than on one."""
    groups: dict[tuple, dict[bool, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, pair in enumerate(scored.pairs):
        row = pair.row
        if pair.fabric.gpus == 8 and row.nodes == 1 and pair.site != "sia":
            origin = row.source_id if pair.site.startswith("lambda") else row.source
            key = (origin, row.model, row.device, row.framework_version, row.batch_size, row.input, row.grad_accum)
            groups[(pair.group, *key)][pair.is_full].append(i)
    found = []
    for key, by_kind in groups.items():
        for full in by_kind.get(True, ()):
            for half in by_kind.get(False, ()):
                found.append((key[0], full, half))
    rows = {}
    for name in ("all software", *sorted({group for group, _, _ in found})):
        own = [(full, half) for group, full, half in found if name in ("all software", group)]
        full, half = (np.array(part) for part in zip(*own, strict=True))
        on_one = scored.single_ms[full] / scored.single_ms[half]
        measured = scored.multi_ms[full] / scored.multi_ms[half] / on_one
        ours = scored.predicted_ms[full] / scored.predicted_ms[half] / on_one
        unchanged = _errors(measured, np.ones(len(measured)))
        rows[name] = {**_errors(measured, ours), "no_overhead_median_pct": unchanged["median_pct"]}
    return {"ask": "median error of the ratio <= 4 %", "rows": rows}


def _irregular(pairs: Sequence[Pair], irregular: Sequence[Pair]) -> dict[str, Any]:
    """Models that the fit leaves out, by constants that no pair of their family shaped."""
    everything = fit_constants(pair_arrays(pairs), pair_weights(pairs))
    predicted = predict_held_out(irregular, {pair.family: everything for pair in irregular})
    scored = _ScoredPairs(irregular, predicted)
    return {
        "ask": "",
        "compute": "measured",
        "rows": {"varying shapes, bound by host or input": _with_baselines(scored, np.ones(len(irregular), bool))},
    }


def _with_predicted_compute(pairs: Sequence[Pair], learned: Mapping, by_family: Mapping[str, float]) -> dict[str, Any]:
    """Tracks end to end: the step on one GPU is predicted by a network that has not seen the family."""
    known = [pair for pair in pairs if pair.single.row_id in by_family]
    if not known:
        return {}
    single_ms = np.array([by_family[pair.single.row_id] for pair in known])
    predicted = predict_held_out(known, learned, single_ms)
    scored = _ScoredPairs(known, predicted)
    own = scored.is_bench & (scored.nodes == 1) & (scored.gpus == 8)
    rows = {}
    selections = {"all software": own} | {
        group: own & (scored.group == group) for group in sorted(set(scored.group[own].tolist()))
    }
    for precision in sorted(set(scored.precision[own & (scored.group == TORCH)].tolist())):
        selections[f"{TORCH}, precision {precision}"] = own & (scored.group == TORCH) & (scored.precision == precision)
    for name, chosen in selections.items():
        if chosen.any():
            compute = _errors(scored.single_ms[chosen], single_ms[chosen])
            rows[name] = {
                **_errors(scored.multi_ms[chosen], predicted[chosen]),
                "one_gpu_mape_pct": compute["mape_pct"],
                "one_gpu_median_pct": compute["median_pct"],
            }
    return {"one_node_predicted": {"ask": "MAPE <= 10 %", "compute": "predicted, family unseen", "rows": rows}}


# -- sharded and model-parallel runs -------------------------------------------------------------------
def _sharded(datasets: Path, compute: Compute | None) -> dict[str, Any]:
    multi = load_multi_gpu_rows(datasets)
    rows = sharded_rows(multi)
    if not rows:
        return {}
    profiles = profiles_of([row.graph_id for row in rows], load_graphs(datasets))
    pairs = match_sharded(rows, profiles)
    sizes = pairs.groups()
    learned = {name: fit_sharded(pairs, sizes != name) for name in np.unique(sizes).tolist()}
    predicted, none = np.zeros(pairs.num_pairs), without_overhead(pairs)
    for name, constants in learned.items():
        predicted[sizes == name] = predict_sharded(pairs, constants)[sizes == name]
    measured, gpus = pairs.many.step_ms, np.array([row.gpus for row in pairs.many_rows])
    table = {}
    selections = {"all": np.ones(len(gpus), bool)}
    selections |= {f"{count} GPUs": gpus == count for count in sorted(set(gpus.tolist()))}
    selections |= {f"{name}": sizes == name for name in learned}
    for name, chosen in selections.items():
        table[name] = {
            **_errors(measured[chosen], predicted[chosen]),
            "no_overhead_mape_pct": _errors(measured[chosen], none[chosen])["mape_pct"],
        }
    tracks = {"sharded": {"ask": "MAPE <= 15 %", "compute": "measured on the fewest GPUs of the table", "rows": table}}
    if compute is not None:
        found = _sharded_end_to_end(load_rows(datasets), rows, profiles, learned, pairs, compute.by_architecture)
        if found:
            tracks["sharded_predicted"] = found
    return tracks


def _sharded_end_to_end(
    single: Sequence[MeasurementRow],
    rows: Sequence[MeasurementRow],
    profiles: Mapping,
    learned: Mapping[str, Mapping[str, float]],
    pairs: ShardedPairs,
    by_architecture: Mapping[str, float],
) -> dict[str, Any] | None:
    """Sharded steps from predicted compute of one micro-batch by a network that has not seen the size."""

    def key(row: MeasurementRow) -> tuple:
        return (row.graph_id, row.device, row.precision, row.checkpointing, row.framework_version)

    per_sample = {
        key(row): by_architecture[row.row_id] / row.batch_size
        for row in single
        if row.derived_from and row.row_id in by_architecture
    }
    known = [row for row in rows if key(row) in per_sample]
    if not known:
        return None
    everything = fit_sharded(pairs, np.ones(pairs.num_pairs, bool))
    predicted = np.zeros(len(known))
    for position, row in enumerate(known):
        runs = run_arrays([row], profiles)
        compute_ms = np.array([per_sample[key(row)] * row.batch_size])
        predicted[position] = step_ms(runs, compute_ms, learned.get(row.model, everything))[0]
    measured = np.array([row.step_time_ms for row in known])
    gpus = np.array([row.gpus for row in known])
    models = np.array([row.model for row in known])
    utilisation_ms = _median_utilisation(known, profiles)
    table = {}
    selections = {"all": np.ones(len(known), bool)}
    selections |= {name: models == name for name in sorted(set(models.tolist()))}
    selections |= {f"{count} GPUs": gpus == count for count in sorted(set(gpus.tolist()))}
    for name, chosen in selections.items():
        table[name] = {
            **_errors(measured[chosen], predicted[chosen]),
            "median_utilisation_mape_pct": _errors(measured[chosen], utilisation_ms[chosen])["mape_pct"],
        }
    return {"ask": "MAPE <= 15 %", "compute": "predicted, size unseen", "rows": table}


def _median_utilisation(rows: Sequence[MeasurementRow], profiles: Mapping) -> np.ndarray:
    """(n,) ms, the baseline: the share of the peak that other sizes reach on the same GPU at the median."""
    ideal_ms = np.zeros(len(rows))
    for position, row in enumerate(rows):
        profile = profiles[row.graph_id]
        again = 1 - profile.backward_share if row.checkpointing == "full" else 0.0
        peak = row.spec.peak_tflops(DType.BF16)  # 1 TFLOP/s = 1 GFLOP/ms
        ideal_ms[position] = row.grad_accum * row.batch_size * profile.work_gflop * (1 + again) / peak
    measured = np.array([row.step_time_ms for row in rows])
    keys = [(row.device, row.model) for row in rows]
    predicted = np.zeros(len(rows))
    for position, (device, model) in enumerate(keys):
        others = [j for j, (d, m) in enumerate(keys) if d == device and m != model]
        others = others or [j for j, (_, m) in enumerate(keys) if m != model]
        predicted[position] = ideal_ms[position] / np.median(ideal_ms[others] / measured[others])
    return predicted


def layout_rows(datasets: Path) -> list[MeasurementRow]:
    """Rows whose layout a job can name: tensor and pipeline parallel, and fully sharded under JAX."""
    return [
        row
        for row in load_multi_gpu_rows(datasets)
        if row.graph_id and row.context_parallel == 1
        and (row.has_layout or row.framework == "jax" or row.source_id.startswith("neusight"))
    ]  # fmt: skip


def _layouts(layouts: Sequence[tuple[MeasurementRow, float]]) -> dict[str, Any]:
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, predicted in layouts:
        source = row.source_id.split("-")[0]
        pair = (row.step_time_ms, predicted)
        if source != "neusight":
            groups["all but NeuSight"].append(pair)
        groups[source].append(pair)
        if source == "neusight":
            kind = "tensor" if row.tensor_parallel > 1 else "pipeline" if row.pipeline_parallel > 1 else "data"
            groups[f"{source}, {kind} parallel"].append(pair)
        else:
            groups[f"{source}, {row.model}, {row.device}"].append(pair)
    for framework, stack in (("pytorch", "NeMo"), ("jax", "MaxText and Paxml")):
        own = [(row, ms) for row, ms in layouts if row.source_id.startswith("dgxc") and row.framework == framework]
        if len({row.model for row, _ in own}) > 1:
            groups[f"dgxc, {stack}, as predicted"] = [(row.step_time_ms, ms) for row, ms in own]
            groups[f"dgxc, {stack}, times the median factor of its other models"] = _rescaled(own)
    rows = {name: _errors(*(np.array(part) for part in zip(*groups[name], strict=True))) for name in sorted(groups)}
    return {"ask": "MAPE <= 15 %, NeuSight <= 8 %", "compute": "predicted, network unseen", "rows": rows}


def _rescaled(layouts: Sequence[tuple[MeasurementRow, float]]) -> list[tuple[float, float]]:
    """What a user reaches who knows one factor of a fused software stack: learned on every model but the row's."""
    factor = {row.row_id: row.step_time_ms / ms for row, ms in layouts}
    found = []
    for row, ms in layouts:
        others = [factor[r.row_id] for r, _ in layouts if r.model != row.model]
        found.append((row.step_time_ms, ms * float(np.median(others))))
    return found


# -- the table in words ---------------------------------------------------------------------------------
_TITLES = {
    "weak_scaling": "Weak-scaling efficiency t(1)/t(n), PyTorch DDP, one node, unseen family",
    "one_node": "8 GPUs, one node, unseen family",
    "one_node_predicted": "8 GPUs, one node, unseen family, end to end",
    "dlperf_nodes": "DLPerf, 16 and 32 V100s, one 100 Gb port a node, unseen family",
    "precision_effect": "Precision effect on 8 GPUs against 1 (ratio of ratios), unseen family",
    "sia": "Sia's grids, thinned, unseen family",
    "irregular": "Left out of the fit",
    "sharded": "MPT under FSDP, from the run on the fewest GPUs, unseen size",
    "sharded_predicted": "MPT under FSDP, end to end, unseen size",
    "layouts": "Tensor, pipeline and fully sharded recipes",
}


def communication_lines(table: Mapping[str, Any]) -> list[str]:
    """Markdown: one table per track."""
    lines: list[str] = []
    for name, title in _TITLES.items():
        track = table["tracks"].get(name)
        if not track:
            continue
        details = [text for text in (track["ask"] and f"asked: {track['ask']}", track.get("compute", "") and
                                     f"compute {track['compute']}") if text]  # fmt: skip
        lines += [f"**{title}**" + (f" ({'; '.join(details)})" if details else ""), ""]
        columns = list(dict.fromkeys(column for row in track["rows"].values() for column in row))
        lines.append("| | " + " | ".join(_column_title(column) for column in columns) + " |")
        lines.append("|---|" + "---:|" * len(columns))
        for row_name, row in track["rows"].items():
            lines.append(f"| {row_name} | " + " | ".join(str(row.get(column, "")) for column in columns) + " |")
        lines.append("")
    return lines


def _column_title(column: str) -> str:
    return column.replace("_pct", " %").replace("_points", ", points").replace("_", " ").replace("mape", "MAPE")


def write_section(page: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the marks of a page; raises GnnpredError where they are missing."""
    text = page.read_text(encoding="utf-8")
    if any(mark not in text for mark in _MARKS):
        raise GnnpredError(f"{page} has no place for the tracks: it needs the lines {' and '.join(_MARKS)}")
    before, rest = text.split(_MARKS[0], 1)
    after = rest.split(_MARKS[1], 1)[1]
    content = "\n".join(lines).rstrip()
    with replaced_when_done(page) as partial:
        partial.write_text(f"{before}{_MARKS[0]}\n{content}\n{_MARKS[1]}{after}", encoding="utf-8")


def write_table(folder: Path, table: Mapping[str, Any]) -> Path:
    """Write the table beside the checkpoint's other errors."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULT_FILE
    with replaced_when_done(path) as partial:
        partial.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return path
