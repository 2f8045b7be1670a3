"""The README's accuracy figures, made from the error table between two marker comments."""

from collections.abc import Iterator
from typing import Any

from gnnpred.errors import GnnpredError
from gnnpred.training.report import PREDICTORS, ordered_precisions

SECTION_BEGIN = "<!-- accuracy figures: written by `gnnpred evaluate --report`, not by hand -->"
SECTION_END = "<!-- end of accuracy figures -->"

SHORT_TITLES = {
    "architecture": "unseen architecture",
    "family": "unseen family",
    "device": "unseen GPU",
    "neusight": "NeuSight's test GPUs",
    "random": "random",
}


def with_readme_section(text: str, section: str, *, where: str = "README.md") -> str:
    """``text`` with what stands between the two marker comments replaced; GnnpredError without both, in order."""
    begin, end = text.find(SECTION_BEGIN), text.find(SECTION_END)
    if begin < 0 or end < begin:
        raise GnnpredError(f"{where} lacks the comments {SECTION_BEGIN!r} and {SECTION_END!r}, in this order")
    return text[: begin + len(SECTION_BEGIN)] + "\n" + section + "\n" + text[end:]


def section_of(text: str) -> str:
    """What stands between the two marker comments."""
    return text.split(SECTION_BEGIN + "\n")[1].split("\n" + SECTION_END)[0]


def readme_section(table: dict[str, Any]) -> str:
    """The README's figures: a table of the group tracks and one sentence for each other figure."""
    tracks = {name: table["tracks"][name] for name in ("architecture", "family", "device") if name in table["tracks"]}
    corpus = table["corpus"]
    lines = [
        f"Errors on held-out rows, in per cent: {corpus['rows']:,} measured training and forward+backward steps of "
        f"{corpus['architectures']:,} architectures ({corpus['families']} families) on {corpus['devices']} GPU types, "
        f"from {corpus['sources']} public sources. Every row is predicted by networks and trees that saw nothing of "
        "its group.",
        "",
        "| rows | " + " | ".join(f"{SHORT_TITLES[t]}: n, MAPE / median / p90 / bias" for t in tracks) + " |",
        "|---|" + "---:|" * len(tracks),
    ]
    shipped = {track: entry["overall"][entry["shipped"]] for track, entry in tracks.items()}
    lines.append("| all | " + " | ".join(_figures(s) for s in shipped.values()) + " |")
    precisions = list(
        dict.fromkeys(p for e in tracks.values() for p in ordered_precisions(e["by_precision"][e["shipped"]]))
    )
    for precision in precisions:
        found = (entry["by_precision"][entry["shipped"]].get(precision) for entry in tracks.values())
        lines.append(f"| {precision} | " + " | ".join(_figures(s) for s in found) + " |")
    for predictor in ("gnn", "trees", "roofline"):
        found = (entry["overall"].get(predictor) for entry in tracks.values())
        lines.append(f"| {PREDICTORS[predictor]}, all | " + " | ".join(_figures(s) for s in found) + " |")
    lines.append("")
    for track, entry in tracks.items():
        lines.append("- " + " ".join(_sentences(track, entry)))
    if "contrast" in table:
        lines.append("- " + _contrast_sentence(table["contrast"]))
    noise = table["measured_noise"]["repeats_by_source"]
    if noise:
        repeats = ", ".join(f"{s['median_pct']:.1f} % ({source})" for source, s in list(noise.items())[:4])
        lines.append(f"- Noise floor: repeats of one configuration in one source differ by a median of {repeats}.")
    return "\n".join(lines)


def _figures(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "-"
    return (
        f"{summary['n']:,}: {summary['mape_pct']:.1f} / {summary['median_pct']:.1f} / {summary['p90_pct']:.0f} / "
        f"{summary['bias_pct']:+.1f}"
    )


def _sentences(track: str, entry: dict[str, Any]) -> Iterator[str]:
    title = SHORT_TITLES[track].capitalize().replace("gpu", "GPU")
    parts = []
    if "median_over_devices_of_mape_pct" in entry:
        parts.append(
            f"the median over {entry['num_devices']} GPUs of their MAPE is "
            f"{entry['median_over_devices_of_mape_pct']:.1f} %"
        )
    ratio = entry.get("precision_ratio", {"n": 0})
    if ratio["n"]:
        parts.append(
            f"the ratio of full to half precision time is off by a median of {ratio['median_pct']:.1f} % "
            f"(n = {ratio['n']:,}; always saying 1: {ratio['ratio_one_median_pct']:.1f} %)"
        )
    if "coverage" in entry:
        parts.append(f"the 90 % interval holds {entry['coverage']['all']['share']:.0%} of the measured times")
    yield f"{title}: " + "; ".join(parts) + "."


def _with_worst(summary: dict[str, Any]) -> str:
    return f"{summary['mape_pct']:.1f} % (worst {summary['worst_pct']:+.0f} %)"


def _contrast_sentence(contrast: dict[str, Any]) -> str:
    text = ""
    variation = contrast["variation"].get("without_fp64")
    if variation:
        text = (
            f"Precision alone changes a step by a factor of {variation['all']['median']:.2f} (median of "
            f"{variation['all']['n']:,} configurations measured in several; p90 {variation['all']['p90']:.2f}). "
        )
    repeated = contrast["repeated_configurations"]
    errors = {name: by_group["half"] for name, by_group in repeated.items() if "half" in by_group}
    if {"gnn", "blind", "blind_fp32", "blind_oracle"} <= set(errors):
        own = errors.get("gnn_one", errors["gnn"])
        text += (
            f"On their {own['n']:,} half-precision rows (families unseen) one network alone errs by "
            f"{_with_worst(own)}, one without precision by {_with_worst(errors['blind'])}, one without it that learnt "
            f"from fp32 and tf32 runs alone by {_with_worst(errors['blind_fp32'])}; knowing each configuration's "
            f"measured mean but not the precision would err by {errors['blind_oracle']['mape_pct']:.1f} %."
        )
    return text.strip()
