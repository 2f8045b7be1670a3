"""The goals set for the tracks, beside what was reached: met, missed, or not measured and why."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

GOAL_PRECISIONS = ("fp32", "tf32", "fp16", "mixed", "bf16")
MIN_GOAL_ROWS = 20  # fewer rows decide nothing


@dataclass(frozen=True)
class Goal:
    """One line: what was asked for, what came out. ``is_met`` None: not measured, or on too few rows."""

    what: str
    asked: str
    reached: str
    is_met: bool | None


def goal_lines(table: dict[str, Any]) -> list[str]:
    """Markdown table of all goals."""
    lines = ["| goal | asked | reached | |", "|---|---|---|---|"]
    verdicts = {True: "met", False: "**missed**", None: "not decided"}
    lines += [f"| {g.what} | {g.asked} | {g.reached} | {verdicts[g.is_met]} |" for g in goals(table)]
    return lines


def goals(table: dict[str, Any]) -> Iterator[Goal]:
    """The goals of the accuracy tracks that held-out rows of the corpus can decide, and those that they cannot."""
    tracks = table["tracks"]
    for track, max_mape, max_median in (("architecture", 8, 4.5), ("family", 11, 7)):
        if track not in tracks:
            continue
        by_precision = tracks[track]["by_precision"][tracks[track]["shipped"]]
        for precision in GOAL_PRECISIONS:
            yield _summary_goal(
                f"unseen {track}, {precision}", by_precision.get(precision), mape_pct=max_mape, median_pct=max_median
            )
    for track in ("architecture", "family"):
        for name, which in (
            ("", ""),
            ("_timed_alone", ", timed on one GPU"),
            ("_derived", ", compute of sharded runs on several GPUs"),
        ):
            summary = tracks.get(track, {}).get(f"language_models_half_a100_h100{name}")
            if summary:
                yield _summary_goal(
                    f"unseen {track}, language models, half precisions, A100 and H100{which}", summary, mape_pct=10
                )
    if "family" in tracks:
        entry = tracks["family"]
        yield _summary_goal(
            "unseen family, RTX 3090 mixed (timm)", entry.get("timm_rtx3090_mixed"), mape_pct=7, p90_pct=15
        )
    if "median_over_recent_nvidia_of_mape_pct" in tracks.get("device", {}):
        value = tracks["device"]["median_over_recent_nvidia_of_mape_pct"]
        what = f"unseen GPU, NVIDIA from Volta on ({tracks['device']['num_recent_nvidia']} GPUs)"
        yield Goal(what, "median of MAPE <= 12", f"{value:.1f}", value <= 12)
    for track, limit in (("architecture", 4.5), ("family", 6)):
        ratio = tracks.get(track, {}).get("precision_ratio", {"n": 0})
        if ratio["n"]:
            yield Goal(
                f"half-to-full ratio, unseen {track}",
                f"median error <= {limit}",
                f"{ratio['median_pct']:.1f} (n = {ratio['n']:,})",
                ratio["median_pct"] <= limit,
            )
    for track, title in (("family", "unseen family"), ("device", "unseen GPU")):
        if "coverage" in tracks.get(track, {}):
            share = tracks[track]["coverage"]["all"]["share"]
            yield Goal(f"90 % interval coverage, {title}", "87-93 %", f"{share:.1%}", 0.87 <= share <= 0.93)
    if table.get("kernels"):
        mapes = [summary["mape_pct"] for summary in table["kernels"]["by_kind"].values()]
        reached = f"{sum(mape <= 12 for mape in mapes)} of {len(mapes)} kinds; median of them {np.median(mapes):.1f}"
        yield Goal("operator level, unseen GPU", "MAPE <= 12 per op kind", reached, max(mapes) <= 12)
    yield _neusight_goal(tracks.get("neusight", {}).get("points"))
    # of vTrain the public data hold timings of its collectives alone, no step
    yield Goal("vTrain's 1,440 single-node rows", "<= 10", "not measured: the data hold none", None)
    yield _calibration_goal(table.get("calibration"))
    yield _inference_goal(table.get("measured_inference"))


def _neusight_goal(points: dict[str, Any] | None) -> Goal:
    what, asked = "NeuSight's 23 training points, their three GPUs out of training", "MAPE <= 7"
    if not points:
        return Goal(what, asked, "not measured here: the track was not run", None)
    own, plain = points["summaries"]["all"], points["summaries"].get("plain")
    reached = f"MAPE {own['mape_pct']:.1f} on the {own['n']} of {points['asked']} whose network is public"
    if plain and plain["n"] < own["n"]:
        reached += f"; {plain['mape_pct']:.1f} on the {plain['n']} without memory allocation in the forward pass"
    return Goal(what, asked, reached, own["mape_pct"] <= 7)


def _calibration_goal(calibration: dict[str, Any] | None) -> Goal:
    what, asked = "calibration with 20 runs on an unseen GPU", "mean MAPE of machines at least halved"
    found = (calibration or {}).get("by_num_runs", {}).get("20")
    if not found:
        return Goal(what, asked, "not measured here: no machine with enough rows", None)
    # the constants of calibration were chosen on the other machines
    own = found.get("reported") or found["all"]
    reached = (
        f"{own['mean_before_pct']:.1f} -> {own['mean_after_pct']:.1f} over {own['num_machines']} machines; halved on "
        f"{own['num_halved']} of them (all {found['all']['num_machines']}: {found['all']['mean_before_pct']:.1f} -> "
        f"{found['all']['mean_after_pct']:.1f})"
    )
    return Goal(what, asked, reached, own["mean_after_pct"] <= own["mean_before_pct"] / 2)


def _inference_goal(inference: dict[str, Any] | None) -> Goal:
    what, asked = "unseen family with one measured inference (timm, NCHW)", "MAPE <= 6"
    if not inference:
        return Goal(what, asked, "not measured here: no forward passes of the same software", None)
    own = inference["all"]
    reached = f"MAPE {own['before']['mape_pct']:.1f} -> {own['after']['mape_pct']:.1f} (n = {own['after']['n']:,})"
    if "reported" in inference:
        reported = inference["reported"]["after"]
        reached += f"; {reported['mape_pct']:.1f} on families that had no part in choosing its constants"
    if own["after"]["n"] < MIN_GOAL_ROWS:
        return Goal(what, asked, reached + ", too few rows", None)
    return Goal(what, asked, reached, own["after"]["mape_pct"] <= 6)


def _summary_goal(what: str, summary: dict[str, Any] | None, **limits: float) -> Goal:
    names = {"mape_pct": "MAPE", "median_pct": "median", "p90_pct": "p90"}
    asked = ", ".join(f"{names[key]} <= {limit:g}" for key, limit in limits.items())
    if summary is None:
        return Goal(what, asked, "no rows", None)
    reached = ", ".join(f"{names[key]} {summary[key]:.1f}" for key in limits) + f" (n = {summary['n']:,})"
    if summary["n"] < MIN_GOAL_ROWS:
        return Goal(what, asked, reached + ", too few rows", None)
    return Goal(what, asked, reached, all(summary[key] <= limit for key, limit in limits.items()))
