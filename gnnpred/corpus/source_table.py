"""The table of sources in ``datasets/README.md``: rows read, usable, rebuilt and used, and why the rest is left out.

The build writes it between two marks, so that it stays true; the text around it is written by hand.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from gnnpred.corpus.store import MeasurementRow
from gnnpred.files import replaced_when_done
from gnnpred.job import Phase

BEGIN = "<!-- table of sources: written by gnnpred dataset build -->"
END = "<!-- end of the table of sources -->"
NOT_REBUILT = "rebuilt"  # a reason with this word is about us; any other reason is about the row itself
MAX_REASONS = 4


def source_name(row: MeasurementRow) -> str:
    """The published benchmark that a row belongs to: the first word of its source id."""
    return row.source_id.split("-")[0].rstrip("0123456789")


def is_usable(row: MeasurementRow) -> bool:
    """Whether the figure itself says enough to be learned from, be the model rebuilt or not."""
    return not row.excluded_reason or NOT_REBUILT in row.excluded_reason


def source_table(single: Iterable[MeasurementRow], multi: Iterable[MeasurementRow]) -> str:
    """Markdown: one line per source; reasons by falling number of rows."""
    by_source: dict[str, list[MeasurementRow]] = defaultdict(list)
    for row in (*single, *multi):
        by_source[source_name(row)].append(row)
    lines = [
        "| source | rows read | usable | rebuilt | one GPU: train, infer | several | used | left out, and why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    for name, rows in sorted(by_source.items(), key=lambda item: (-len(item[1]), item[0])):
        counts = _counts(rows)
        total.update(counts)
        lines.append(_line(name, counts, _reasons(rows)))
    if total["rows"]:
        share = 100 * total["rebuilt"] / max(total["usable"], 1)
        lines.append(_line("all", total, f"{share:.0f} % of the usable rows are rebuilt"))
    return "\n".join(lines)


def _counts(rows: list[MeasurementRow]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        if row.derived_from:  # the run it comes from is counted already
            counts["used"] += row.used_for_training
            continue
        counts["rows"] += 1
        counts["usable"] += is_usable(row)
        if row.graph_id:
            counts["rebuilt"] += 1
            kind = "several" if row.gpus > 1 else "infer" if row.phase is Phase.INFERENCE else "train"
            counts[kind] += 1
            counts["used"] += row.used_for_training and row.gpus == 1
    return counts


def _line(name: str, counts: Counter[str], text: str) -> str:
    n = {key: f"{counts[key]:,}" for key in ("rows", "usable", "rebuilt", "train", "infer", "several", "used")}
    return (
        f"| {name} | {n['rows']} | {n['usable']} | {n['rebuilt']} | {n['train']}, {n['infer']} | {n['several']} | "
        f"{n['used']} | {text} |"
    )


def _reasons(rows: list[MeasurementRow]) -> str:
    """``count reason`` of the rows without a graph; models of one reason are counted together."""
    models: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.excluded_reason:
            subject, colon, reason = row.excluded_reason.partition(": ")
            about_model = colon and (subject == row.model or subject == "cannot be rebuilt")
            models[reason if about_model else row.excluded_reason][row.model] += 1
    ordered = sorted(models.items(), key=lambda item: (-item[1].total(), item[0]))
    parts = []
    for reason, names in ordered[:MAX_REASONS]:
        listed = ", ".join(name for name, _ in names.most_common(3)) + (" ..." if len(names) > 3 else "")
        parts.append(f"{names.total():,} {reason}" + (f" ({listed})" if len(names) < len(rows) else ""))
    rest = sum(names.total() for _, names in ordered[MAX_REASONS:])
    text = "; ".join([*parts, *([f"{rest:,} for {len(ordered) - MAX_REASONS} other reasons"] if rest else [])])
    # one cell of a table, whatever a model or an exporter says
    return " ".join(text.split()).replace("|", "/").replace("<!--", "<!")


def write_source_table(path: Path, single: Iterable[MeasurementRow], multi: Iterable[MeasurementRow]) -> None:
    """Put the table between its marks in the page at ``path``; a page that has no marks, or is none, is left alone."""
    text = page_with_source_table(path, single, multi)
    if text is not None:
        with replaced_when_done(path) as partial:
            partial.write_text(text, encoding="utf-8")


def page_with_source_table(path: Path, single: Iterable[MeasurementRow], multi: Iterable[MeasurementRow]) -> str | None:
    """The page at ``path`` with the table between its marks; None where it has no marks, or is none."""
    if not path.is_file():
        return None
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n{source_table(single, multi)}\n{END}{after}" if begin and end else None
