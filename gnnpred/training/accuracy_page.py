"""docs/ACCURACY.md, made from the error table alone, as the README's figures are: the two cannot disagree."""

import os
from pathlib import Path
from typing import Any

from gnnpred.files import replaced_when_done
from gnnpred.training.evaluate import format_rows
from gnnpred.training.goals import goal_lines
from gnnpred.training.plots import PLOTTED_TRACKS
from gnnpred.training.ranges import WARNING_TEXTS
from gnnpred.training.readme_section import SECTION_BEGIN, SHORT_TITLES, readme_section, with_readme_section
from gnnpred.training.report import PREDICTORS, TITLES, contrast_lines, ordered_precisions
from gnnpred.training.worst_rows import MAX_CHANCE, MIN_LIFT, WORST_SHARE

HELD_OUT = {
    "architecture": "Every variant of a network (by its ops and weight shapes, whatever the input size and number of "
    "classes) is held out whole, in five folds; other variants of its family are in training.",
    "family": "Every building block is held out whole, in five folds: all ResNet-like networks together, all BERT-like "
    "ones together and so on.",
    "device": "Every GPU with 60 rows or more is held out alone, whole-step and single-kernel rows both, with its "
    "specification hidden from the networks (the trees read it), as for a user's unknown GPU.",
    "neusight": "The test GPUs of NeuSight (Lee et al., ASPLOS 2025) are held out together with twins: A100 80 GB "
    "(PCIe, SXM), H100 (PCIe, SXM) and L4, whole-step and single-kernel rows both. Scored on NeuSight's own "
    "forward+backward points.",
    "random": "Single rows, whatever else of their network is in training: siblings and near repeats leak.",
}
NOT_SHOWN = {
    "architecture": "how a wholly new kind of network does (that is the family track), nor a new GPU, nor both new at "
    "once.",
    "family": "new hardware. The recipe's settings were compared on these very folds, which flatters this track a "
    "little. The total is what the largest source weighs in it: read the tables by source and GPU as well.",
    "device": "a new generation, where a sibling chip is in training, nor a new model: the same models are in training "
    "on other GPUs.",
    "neusight": "a new model: BERT, GPT-2 and OPT are in training on other GPUs. NeuSight's authors report 7.1 % on "
    "all 23 points.",
    "random": "anything that a user will see; it is here to be compared with others that report a random split.",
}


def write_accuracy_pages(table: dict[str, Any], *, docs: Path, readme: Path | None, plots: Path) -> None:
    """Write the page, and the marked section of ``readme`` where the file has one; ``plots`` holds the PNG files."""
    docs.parent.mkdir(parents=True, exist_ok=True)
    # without a marked section the page alone is written, so check first and leave nothing half done
    text = None
    if readme and readme.is_file():
        text = readme.read_text(encoding="utf-8")
        if SECTION_BEGIN in text:
            text = with_readme_section(text, readme_section(table), where=str(readme))
    with replaced_when_done(docs) as partial:
        prefix = Path(os.path.relpath(plots.resolve(), docs.parent.resolve())).as_posix()
        partial.write_text(accuracy_page(table, plots=prefix), encoding="utf-8")
    if text is not None and readme:
        with replaced_when_done(readme) as partial:
            partial.write_text(text, encoding="utf-8")


def _networks_line(table: dict[str, Any]) -> list[str]:
    """How many networks a fold has where the checkpoint ships more: more of them err a little less."""
    networks = table.get("networks", {})
    fewer = sorted({count for track, count in networks.items() if track != "shipped"})
    if not fewer or fewer == [networks["shipped"]]:
        return []
    return [
        f"- The checkpoint has {networks['shipped']} networks, a held-out group {' or '.join(map(str, fewer))}: the "
        "figures are of those, so of slightly less than what ships."
    ]


def accuracy_page(table: dict[str, Any], *, plots: str) -> str:
    """The whole page; ``plots`` is the folder of the PNG files as seen from it."""
    corpus = table["corpus"]
    lines = [
        "# How accurate gnnpred is",
        "",
        f"Written by `gnnpred evaluate --report` for the recipe `{table['name']}`. Errors are of predicted "
        "against measured step time, in per cent of the measured; bias is the mean of predicted / measured - 1 "
        "(positive: predicts too slow).",
        "",
        "## What was measured, and how",
        "",
        f"- {corpus['rows']:,} rows: single-GPU training and forward+backward steps of {corpus['architectures']:,} "
        f"architectures of {corpus['families']} families on {corpus['devices']} GPUs, from {corpus['sources']} public "
        "sources ([datasets](../datasets/README.md)). Repeats, superseded rows and rows that their source flags are "
        "left out, and so is WaveGlow, part of whose work is not in its graph. "
        f"{corpus.get('derived_rows', 0):,} of the rows are one GPU's share of sharded training, less an estimate of "
        "communication.",
        f"- Training adds {corpus['inference_rows']:,} inference rows and {corpus['operator_rows']:,} timed kernels, "
        "which are not scored here. Inference rows are held out with their group, kernels with their GPU.",
        "- Every row is predicted by networks, trees and constants that were fitted without its group. What ships is a "
        "weighted geometric mean of networks and boosted trees. Trees alone and a fitted roofline are the baselines.",
        *_networks_line(table),
        "- Nothing here shows what several GPUs add to a step, or hosts slower than those of the sources.",
        "",
    ]
    for track in ("architecture", "family", "device", "neusight", "random"):
        if track in HELD_OUT and track in table["tracks"]:
            lines.append(f"- **{SHORT_TITLES[track]}**: {HELD_OUT[track]}")
    lines += ["", "## All tracks", "", *_all_tracks(table)]
    lines += ["", "## Goals and what was reached", "", *goal_lines(table)]
    for track in ("architecture", "family", "device"):
        if track in table["tracks"]:
            lines += ["", *_track_section(track, table["tracks"][track], plots=plots)]
    if table["tracks"].get("neusight", {}).get("points"):
        lines += ["", *_neusight_section(table["tracks"]["neusight"]["points"])]
    if table.get("calibration") or table.get("measured_inference"):
        lines += ["", *_measurements_section(table.get("calibration"), table.get("measured_inference"))]
    if table.get("kernels"):
        lines += ["", *_kernel_section(table["kernels"])]
    if "random" in table["tracks"]:
        entry = table["tracks"]["random"]
        own = entry["overall"][entry["shipped"]]
        lines += ["", "## Random rows", "", f"MAPE {own['mape_pct']:.1f} %, median {own['median_pct']:.1f} %."]
        lines.append(f"**Does not show** {NOT_SHOWN['random']}")
    if "contrast" in table:
        lines += ["", *contrast_lines(table["contrast"]), ""]
        lines.append(
            "The precision-blind networks are the same network, trained alike, for which every row reads as fp32: one "
            "per fold, so compare them with the single network. **Does not show** what other authors' predictors would "
            "do on these rows, nor bf16 beyond the few rows above."
        )
    lines += ["", *_noise_section(table)]
    return "\n".join(lines) + "\n"


def _all_tracks(table: dict[str, Any]) -> list[str]:
    rows = []
    for track, entry in table["tracks"].items():
        for predictor, summary in entry["overall"].items():
            rows.append((f"{TITLES[track]}: {PREDICTORS[predictor]}", summary))
    return format_rows(rows, first="track, predictor").splitlines()


def _track_section(track: str, entry: dict[str, Any], *, plots: str) -> list[str]:
    shipped = entry["by_precision"][entry["shipped"]]
    lines = [f"## {TITLES[track]}", ""]
    if track in PLOTTED_TRACKS:
        lines += [f"![Predicted against measured time, {PLOTTED_TRACKS[track]}]({plots}/parity-{track}.png)", ""]
    rows = [("all", entry["overall"][entry["shipped"]])] + [(p, shipped[p]) for p in ordered_precisions(shipped)]
    lines += [*format_rows(rows, first="precision").splitlines(), ""]
    for key, first in (
        ("by_device", "GPU"), ("by_device_and_precision", "GPU and precision"), ("by_family", "family"),
        ("by_source", "source"), ("by_fold", "fold"),
    ):  # fmt: skip
        if entry.get(key) and not (track == "device" and key == "by_fold"):
            lines += [f"### {SHORT_TITLES[track].capitalize()} by {first}".replace("gpu", "GPU"), ""]
            lines += [*format_rows(entry[key].items(), first=first).splitlines(), ""]
    ratio = entry.get("precision_ratio", {"n": 0})
    if ratio["n"]:
        lines += [
            f"Ratio of fp32 (or tf32) to half time of one configuration, n = {ratio['n']:,}: median error "
            f"{ratio['median_pct']:.1f} %, MAPE {ratio['mape_pct']:.1f} % (always saying 1: "
            f"{ratio['ratio_one_median_pct']:.1f} %, {ratio['ratio_one_mape_pct']:.1f} %).",
            "",
        ]
    if "coverage" in entry:
        lines += _coverage_section(track, entry)
    if entry.get("range_warning"):
        warnings = entry["range_warning"]
        names = {"warned": "rows with a warning", "not_warned": "rows without"}
        rows = [(text, warnings[name]) for name, text in names.items() if name in warnings]
        rows += [(WARNING_TEXTS[name], summary) for name, summary in warnings.get("by_reason", {}).items()]
        lines += [f"### {SHORT_TITLES[track].capitalize()}: warnings".replace("gpu", "GPU"), ""]
        lines += [
            "`predict` warns of what it has not seen the like of. Here each row is held against the training rows of "
            "its own fold; that the GPU itself is unseen is not counted. A row may have several reasons.",
            "",
            *format_rows(rows, first="rows").splitlines(),
            "",
        ]
    if entry.get("worst_rows"):
        lines += _worst_section(track, entry)
    lines.append(f"**Does not show** {NOT_SHOWN[track]}")
    return lines


def _coverage_section(track: str, entry: dict[str, Any]) -> list[str]:
    coverage = entry["coverage"]
    lines = [
        f"### {SHORT_TITLES[track].capitalize()}: 90 % interval".replace("gpu", "GPU"),
        "",
        f"Calibrated on the other folds, it holds {coverage['all']['share']:.1%} of the measured times. Its bounds are "
        f"{coverage['median_low_factor']:.2f} and {coverage['median_high_factor']:.2f} times the prediction (medians).",
    ]
    if "evenness" in coverage:
        own, flat = coverage["evenness"], coverage["evenness_of_one_interval"]
        scope = "for all rows" if track == "device" else "per precision"
        lines.append(
            "It widens with what is known to make errors larger. "
            f"{own['num_badly_covered']} of {own['num_devices']} GPUs "
            f"(20 rows or more) are covered less than 80 %, the worst {own['lowest_share']:.0%}; mean width "
            f"{own['mean_log_width']:.2f} in log. One interval {scope} would hold {flat['share']:.1%}, leave "
            f"{flat['num_badly_covered']} GPUs below 80 % (worst {flat['lowest_share']:.0%}) and be "
            f"{flat['mean_log_width']:.2f} wide."
        )
    if "coverage_by_family_intervals" in entry:
        share = entry["coverage_by_family_intervals"]["share"]
        lines.append(f"The intervals that ship are calibrated on unseen families; they hold {share:.1%} here.")
    lines += ["", "| rows | n | held |", "|---|---:|---:|"]
    for key, word in (("by_precision", ""), ("by_source", "source "), ("by_device", ""), ("by_fold", "fold ")):
        if track == "device" and key == "by_fold":  # a fold is a GPU
            continue
        lines += [f"| {word}{name} | {s['n']:,} | {s['share']:.0%} |" for name, s in coverage.get(key, {}).items()]
    lines += [
        "",
        "**Does not show** the coverage on one user's machine: rows of one source err together, as the table says.",
        "",
    ]
    return lines


def _worst_section(track: str, entry: dict[str, Any]) -> list[str]:
    title = SHORT_TITLES[track]
    lines = [
        f"### The {len(entry['worst_rows'])} worst rows, {title}",
        "",
        f"Off by the largest factor, either way. A reason is a computed property of the row and of its training rows, "
        f"given only where it is at least {MIN_LIFT:g} times as frequent in the worst {WORST_SHARE:.0%} of the track "
        f"as in all of it, which chance would bring about in less than {MAX_CHANCE:.1%} of cases. It may still not be "
        "the cause.",
        "",
        "| model, batch | GPU, precision | source, software | measured ms | predicted ms | factor | reasons |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for row in entry["worst_rows"]:
        lines.append(
            f"| {row['model']}, {row['batch_size']} | {row['device']} {row['precision']} | {row['source']}, "
            f"{row['software']} | {row['measured_ms']:.4g} | {row['predicted_ms']:.4g} | {row['factor']:.1f} "
            f"| {'; '.join(row['reasons']) or 'no reason found'} |"
        )
    lines += [
        "",
        f"The reasons, checked on all rows of the track ({title}):",
        "",
        f"| reason | given | rows | % of all | % of the worst {WORST_SHARE:.0%} | MAPE with | MAPE without |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for reason in entry["reasons"]:
        without = reason["mape_without_pct"]
        cells = (
            reason["reason"], "yes" if reason["is_given"] else "no", f"{reason['n']:,}", f"{reason['share_pct']:.1f}",
            f"{reason['share_of_worst_pct']:.1f}", f"{reason['mape_with_pct']:.1f}",
            "-" if without is None else f"{without:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _neusight_section(points: dict[str, Any]) -> list[str]:
    names = {"all": "all", "plain": "without memory allocation in the forward pass"}
    rows = [(names.get(name, name), summary) for name, summary in points["summaries"].items()]
    lines = [
        f"## {TITLES['neusight']}",
        "",
        f"{points['summaries']['all']['n']} of the {points['asked']} points; the 4 others are Switch networks whose "
        "sizes are not given. NeuSight empties the allocator's cache before every iteration, so that the forward pass "
        "of its A100 points contains memory allocation and takes nearly as long as the backward pass. These points "
        "train no network of ours; they are scored because NeuSight's authors score them.",
        "",
        *format_rows(rows, first="points").splitlines(),
        "",
        "| model, batch | GPU | measured ms | predicted ms | error | |",
        "|---|---|---:|---:|---:|---|",
    ]
    lines += [
        f"| {p['model']}, {p['batch_size']} | {p['device']} | {p['measured_ms']:.4g} | {p['predicted_ms']:.4g} "
        f"| {p['predicted_ms'] / p['measured_ms'] - 1:+.1%} | {'with allocation' if p['is_inflated'] else ''} |"
        for p in points["points"]
    ]
    return [*lines, "", f"**Does not show** {NOT_SHOWN['neusight']}"]


def _measurements_section(calibration: dict[str, Any] | None, inference: dict[str, Any] | None) -> list[str]:
    lines = ["## With a user's own measurements", ""]
    if calibration:
        lines += [
            "`gnnpred calibrate` on an unseen GPU. A machine is a GPU in one source; runs of a random half of its "
            "architectures calibrate, rows of the other half test. Mean over machines. The constants of calibration "
            "were chosen on the machines that are not in the first line of each count.",
            "",
            "| runs | machines | mean MAPE before | after | median before | after | halved | worse by > 1 point | 90 % "
            "interval holds |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for count, halves in calibration["by_num_runs"].items():
            lines += [
                f"| {count} | {own['num_machines']}{' (all)' if name == 'all' else ''} | {own['mean_before_pct']:.1f} "
                f"| {own['mean_after_pct']:.1f} | {own['median_before_pct']:.1f} | {own['median_after_pct']:.1f} "
                f"| {own['num_halved']} | {own['num_worse']} | {own['coverage']:.0%} |"
                for name, own in halves.items()
            ]
        lines.append("")
    if inference:
        lines += [
            "`predict --measured-inference-ms` on unseen families: timm, NCHW, one forward pass of the same graph, "
            "GPU, precision and software corrects the training step.",
            "",
        ]
        rows, held = [], []
        for name, text in (("all", "all"), ("reported", "families that had no part in choosing its constants")):
            if name in inference:
                rows += [(f"{text}: {side}", inference[name][side]) for side in ("before", "after")]
                held.append(f"{inference[name]['coverage']:.0%}")
        lines += [*format_rows(rows, first="rows").splitlines(), ""]
        lines.append(f"The narrowed 90 % interval holds {' and '.join(held)} of them.")
    return lines


def _kernel_section(kernels: dict[str, Any]) -> list[str]:
    lines = [
        "## Single kernels on unseen GPUs",
        "",
        "The networks of each held-out GPU on that GPU's timed kernels, which they did not see either. Beside them, "
        "MAPE of what was fitted on the other GPUs' kernels alone: a constant (roofline time times the median ratio of "
        "the op kind), two parameters (efficiency and latency per op kind, direction, precision and source), boosted "
        "trees, and the geometric mean of networks and trees. Per-op times of a prediction come from the networks.",
        "",
        "| kernels | n | MAPE | median | p90 | bias | constant | two parameters | trees | with trees |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [
        (
            "**all**",
            {f"{n}_mape_pct": kernels[n]["mape_pct"] for n in _KERNEL_PARTNERS if n in kernels} | kernels["all"],
        )
    ]
    for key, word in (("by_kind", ""), ("by_precision", "precision "), ("by_device", "")):
        rows += [(f"{word}{name}", summary) for name, summary in kernels[key].items()]
    lines += [
        f"| {name} | {s['n']:,} | {s['mape_pct']:.1f} | {s['median_pct']:.1f} | {s['p90_pct']:.1f} "
        f"| {s['bias_pct']:+.1f} | {' | '.join(_kernel_partner(s, n) for n in _KERNEL_PARTNERS)} |"
        for name, s in rows
    ]
    return [
        *lines,
        "",
        "**Does not show** steps: there kernels share caches, launches and clocks. Trees of steps have no part in it.",
    ]


_KERNEL_PARTNERS = ("baseline", "two_parameter", "trees", "with_trees")


def _kernel_partner(summary: dict[str, Any], name: str) -> str:
    """MAPE of another predictor on the same kernels; tables written before it existed lack it."""
    value = summary.get(f"{name}_mape_pct")
    return "-" if value is None else f"{value:.1f}"


def _noise_section(table: dict[str, Any]) -> list[str]:
    noise = table["measured_noise"]
    lines = ["## Noise floor", "", "What the sources' own pages say of repeats of one configuration:", ""]
    lines += [f"- {what}: {figure}" for what, figure in table["noise_floor"].items()]
    if noise["repeats_by_source"]:
        lines += [
            "",
            "In this corpus, slowest over fastest repeat of one configuration and software, less 1, in per cent:",
        ]
        lines += ["", "| source | repeated configurations | median | p90 |", "|---|---:|---:|---:|"]
        lines += [
            f"| {source} | {s['n']:,} | {s['median_pct']:.1f} | {s['p90_pct']:.1f} |"
            for source, s in noise["repeats_by_source"].items()
        ]
    if "other_source" in noise:
        other = noise["other_source"]
        lines += [
            "",
            f"Rows that another source measured too (same architecture, GPU, precision, batch and input): "
            f"{other['n']:,}, apart by a median of {other['median_pct']:.1f} % (p90 {other['p90_pct']:.1f} %).",
        ]
    lines += [
        "",
        "**Does not show** how two machines of one type differ, beyond what two sources say.",
    ]
    return lines
