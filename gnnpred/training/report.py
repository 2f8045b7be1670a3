"""The error table in words: for the terminal and for the checkpoint's README."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnnpred.files import replaced_when_done
from gnnpred.training.evaluate import TARGET_PRECISIONS, format_rows

TITLES = {
    "architecture": "Unseen architecture (a new variant of a known family)",
    "family": "Unseen family",
    "device": "Unseen GPU (leave one out)",
    "neusight": "NeuSight's training points, its test GPUs held out together",
    "random": "Random rows (leaks between siblings and repeats; for reference only)",
    "blind": "Without precision in features and peaks, unseen family",
    "blind_fp32": "Without precision, trained on fp32 and tf32 rows alone, unseen family",
}
PREDICTORS = {
    "ensemble": "networks and trees together (what ships)",
    "gnn": "networks alone",
    "gnn_one": "GNN alone, one network",
    "trees": "boosted trees on summed features",
    "roofline": "roofline x constant per GPU and precision",
}


def report_lines(table: dict[str, Any]) -> list[str]:
    """Markdown lines of all tables."""
    lines: list[str] = []
    for track, entry in table["tracks"].items():
        lines += ["", f"## {TITLES[track]}", ""]
        rows = []
        for predictor, summary in entry["overall"].items():
            rows.append((f"**{PREDICTORS[predictor]}**, all", summary))
            by_precision = entry["by_precision"][predictor]
            if predictor == next(iter(entry["overall"])):
                rows += [(f"{PREDICTORS[predictor]}, {p}", by_precision[p]) for p in ordered_precisions(by_precision)]
        lines += [format_rows(rows, first="predictor, rows"), ""]
        if "timm_rtx3090_mixed" in entry:
            lines += [format_rows([("timm, RTX 3090, mixed", entry["timm_rtx3090_mixed"])], first="rows"), ""]
        if entry.get("precision_ratio", {}).get("n"):
            ratio = entry["precision_ratio"]
            lines.append(
                f"Ratio of fp32 (or tf32) to half time, same configuration, n = {ratio['n']}: median error "
                f"{ratio['median_pct']:.1f} %, MAPE {ratio['mape_pct']:.1f} % (always saying 1: "
                f"{ratio['ratio_one_median_pct']:.1f} %, {ratio['ratio_one_mape_pct']:.1f} %)."
            )
        if "interval_coverage" in entry:
            lines.append(f"90 % interval, calibrated on the other folds: covers {entry['interval_coverage']:.1%}.")
        if "median_over_devices_of_mape_pct" in entry:
            lines.append(
                f"Median over {entry['num_devices']} GPUs of their MAPE: "
                f"{entry['median_over_devices_of_mape_pct']:.1f} %."
            )
        if track in ("family", "architecture", "device"):
            lines += ["", format_rows(entry["by_device"].items(), first="GPU"), ""]
        if track in ("family", "architecture"):
            lines += [format_rows(entry["by_source"].items(), first="source"), ""]
            lines += [format_rows(entry["by_family"].items(), first="family"), ""]
            lines += [format_rows(entry["by_device_and_precision"].items(), first="GPU and precision"), ""]
    if "contrast" in table:
        lines += ["", *contrast_lines(table["contrast"])]
    lines += ["", "## Noise floor: repeats of one configuration differ by", ""]
    lines += [f"- {what}: {figure}" for what, figure in table["noise_floor"].items()]
    return lines


CONTRAST_PREDICTORS = {
    "ensemble": "networks and trees together (what ships)",
    "gnn": "networks alone",
    "gnn_one": "GNN alone, one network",
    "blind": "GNN without precision",
    "blind_fp32": "GNN without precision, trained on fp32 and tf32 rows alone",
    "blind_oracle": "knows each configuration's measured mean, not its precision",
}
CONTRAST_GROUPS = {"all": "all precisions", "half": "all half precisions"}


def contrast_lines(contrast: dict[str, Any]) -> list[str]:
    """Markdown lines: what precision does to measured step time, and to a predictor that does not know it."""
    lines = [
        f"## What precision does, and what ignoring it costs ({contrast['held_out']}, n = {contrast['rows']:,})",
        "",
        "Slowest over fastest measured step of one configuration (same source, model, GPU, batch, software, layout), "
        "over the precisions that it was measured in:",
        "",
        "| GPUs, precisions | configurations | median | p90 | max |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, title in (("without_fp64", "fp32, tf32, fp16, mixed, bf16"), ("with_fp64", "with fp64")):
        found = contrast["variation"].get(name)
        if not found:
            continue
        rows = [(f"**all, {title}**", found["all"])]
        if name == "without_fp64":
            rows += list(found["by_device_class"].items())
        lines += [f"| {t} | {s['n']:,} | {s['median']:.2f} | {s['p90']:.2f} | {s['max']:.2f} |" for t, s in rows]
    plain = contrast["variation"].get("without_fp64")
    if plain:
        largest = plain["largest"]
        times = ", ".join(f"{p} {ms:.4g} ms" for p, ms in largest["measured_ms"].items())
        lines += ["", f"Largest: {largest['model']} on {largest['device']}, batch {largest['batch_size']}: {times}."]
        if plain["half_slower_share"] is not None:
            lines.append(
                f"In {plain['half_slower_share']:.0%} of the full-to-half pairs the half precision is the slower."
            )
    groups = list(contrast["errors"]["gnn"])
    for group in groups:
        rows = [(name, by_group[group]) for name, by_group in contrast["errors"].items() if group in by_group]
        lines += ["", f"**{CONTRAST_GROUPS.get(group, group)}**", "", *_contrast_table(rows)]
    repeated = contrast["repeated_configurations"]
    if repeated:
        lines += [
            "",
            "Configurations measured in two precisions or more, fp64 aside. There precision alone tells rows apart; "
            "elsewhere a setup that ran one precision only gives it away even to a predictor that is not told.",
        ]
        for group, title in (("all", "all"), ("full", "fp32 and tf32"), ("half", "half precisions")):
            rows = [(name, by_group[group]) for name, by_group in repeated.items() if group in by_group]
            lines += ["", f"**Such configurations, {title}**", "", *_contrast_table(rows)]
    ratios = {name: ratio for name, ratio in contrast["ratio"].items() if ratio["n"]}
    if ratios:
        lines += ["", "Error of the ratio of full to half time:", ""]
        lines += ["| predictor | pairs | MAPE | median |", "|---|---:|---:|---:|"]
        lines += [
            f"| {CONTRAST_PREDICTORS[name]} | {r['n']:,} | {r['mape_pct']:.1f} | {r['median_pct']:.1f} |"
            for name, r in ratios.items()
        ]
        first = next(iter(ratios.values()))
        lines.append(
            f"| always 1 | {first['n']:,} | {first['ratio_one_mape_pct']:.1f} | {first['ratio_one_median_pct']:.1f} |"
        )
    return lines


def _contrast_table(rows: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    lines = [
        "| predictor | n | MAPE | median | p90 | bias | worst | worst row |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, s in rows:
        worst = s["worst_row"]
        lines.append(
            f"| {CONTRAST_PREDICTORS[name]} | {s['n']:,} | {s['mape_pct']:.1f} | {s['median_pct']:.1f} "
            f"| {s['p90_pct']:.1f} | {s['bias_pct']:+.1f} | {s['worst_pct']:+.0f} "
            f"| {worst['model']}, {worst['device']} {worst['precision']} |"
        )
    return lines


def ordered_precisions(by_precision: dict[str, Any]) -> list[str]:
    return [p for p in TARGET_PRECISIONS if p in by_precision] + [p for p in by_precision if p not in TARGET_PRECISIONS]


def write_report(folder: Path, table: dict[str, Any], *, name: str) -> Path:
    """README.md of the checkpoint folder."""
    head = [
        f"# Checkpoint `{name}`: errors on held-out rows",
        "",
        "Relative error of the predicted against the measured step time, in per cent; bias is the mean of predicted / "
        "measured - 1 (positive: predicts too slow). All single-GPU training and forward+backward rows that are "
        "neither repeats, nor superseded, nor flagged by their source; every row is predicted by networks that saw "
        "nothing of its group. Made by `gnnpred evaluate`.",
        "",
    ]
    for track in ("architecture", "family", "device"):
        if track in table["tracks"]:
            head.append(f"![{TITLES[track]}](parity-{track}.png)")
    path = folder / "README.md"
    with replaced_when_done(path) as partial:
        partial.write_text("\n".join(head + report_lines(table)) + "\n", encoding="utf-8")
    return path
