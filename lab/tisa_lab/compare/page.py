"""The record as a page, as Markdown and as a figure. The page's sentences: page.html."""

from pathlib import Path
from typing import Any

from tisa.pages import page
from tisa_lab.criteria.report import shown as shown_mark
from tisa_lab.extrapolation.report import figure
from tisa_lab.probes.report import shown as share
from tisa_lab.record import write_record


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record, its page, its table and its figure into a folder."""
    texts = {"compare.md": markdown(record), "index.html": page_of(record)}
    write_record(record, out, "compare", texts, figure(record["past"]))


def header(record: dict[str, Any]) -> list[str]:
    """Return the names of the table's columns."""
    length, far = record["config"]["length"], 4 * record["config"]["probe_length"]
    return [
        "method", "marks of 6", f"right, {record['config']['probe_length']} tokens",
        f"right, {far}", *(f"perplexity, {factor * length}" for factor in (1, 2, 4)), "time",
    ]  # fmt: skip


def cells(record: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows, the lowest perplexity first."""
    return [
        [
            row["method"], "–" if row["marks"] is None else str(row["marks"]),
            share(row["right"]), share(row["right_far"]),
            *("–" if one is None else f"{one:.3f}" for one in row["perplexity"]),
            f"{record['speed'][row['method']]:.2f}",
        ]
        for row in record["rows"]
    ]  # fmt: skip


def markdown(record: dict[str, Any]) -> str:
    """Return the table."""
    names = header(record)
    lines = [
        f"| {' | '.join(names)} |",
        "|---" * len(names) + "|",
        *(f"| {' | '.join(row)} |" for row in cells(record)),
    ]
    return "\n".join(lines) + "\n"


def page_of(record: dict[str, Any]) -> str:
    """Return the page."""
    return page(
        "tisa_lab.compare/page.html",
        record=record,
        header=header(record),
        cells=cells(record),
        shown=shown_mark,
        share=share,
        tasks=list(dict.fromkeys(row["task"] for row in record["tasks"])),
    )
