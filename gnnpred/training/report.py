"""The error table in words: for the terminal and for the checkpoint's README."""

from pathlib import Path
from typing import Any

from gnnpred.files import replaced_when_done
from gnnpred.training.evaluate import TARGET_PRECISIONS, format_rows

TITLES = {
    "architecture": "Unseen architecture (a new variant of a known family)",
    "family": "Unseen family",
    "device": "Unseen GPU (leave one out)",
    "random": "Random rows (leaks between siblings and repeats; for reference only)",
    "blind": "Without precision in features and peaks, unseen family",
    "blind_fp32": "Without precision, trained on fp32 and tf32 rows alone, unseen family",
}
PREDICTORS = {
    "ensemble": "GNN and trees together (what ships)",
    "gnn": "GNN alone",
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
                rows += [(f"{PREDICTORS[predictor]}, {p}", by_precision[p]) for p in _ordered(by_precision)]
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
            lines += [format_rows(entry["by_device_and_precision"].items(), first="GPU and precision"), ""]
    if "precision_blind" in table:
        blind = table["precision_blind"]
        lines += ["", f"## What ignoring precision costs ({blind['rows']})", ""]
        names = {
            "aware": "GNN alone",
            "blind": "GNN without precision",
            "fp32_trained": "GNN without precision, trained on fp32/tf32",
        }
        lines.append(format_rows([(names[k], blind[k]) for k in names if k in blind], first="predictor"))
    lines += ["", "## Noise floor: repeats of one configuration differ by", ""]
    lines += [f"- {what}: {figure}" for what, figure in table["noise_floor"].items()]
    return lines


def _ordered(by_precision: dict[str, Any]) -> list[str]:
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
