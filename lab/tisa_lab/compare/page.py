"""The record as a page, as Markdown and as a figure. The page's sentences: page.html."""

from pathlib import Path
from typing import Any

from tisa.pages import page
from tisa_lab.criteria.report import shown as shown_mark
from tisa_lab.extrapolation.report import figure
from tisa_lab.probes.recall import PAIRS, RECALLS
from tisa_lab.probes.report import shown as share
from tisa_lab.record import write_record


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record, its page, its table and its figure into a folder."""
    texts = {"compare.md": markdown(record), "index.html": page_of(record)}
    write_record(record, out, "compare", texts, figure(record["past"]))


def header(record: dict[str, Any]) -> list[str]:
    """Return the names of the table's columns."""
    config, far = record["config"], 4 * record["config"]["probe_length"]
    near, *_, farthest = recall_lengths(record)
    return [
        "method", "marks of 6", f"right, {config['probe_length']} tokens", f"right, {far}",
        f"recall, {near} tokens", f"recall, {farthest:,}",
        *(f"perplexity, {factor * config['length']:,}" for factor in config["factors"]), "time",
    ]  # fmt: skip


def recall_lengths(record: dict[str, Any]) -> list[int]:
    """Return the lengths at which recall was asked."""
    factors = record["recall"][0]["accuracy"]
    return [int(factor) * record["config"]["recall_length"] for factor in factors]


def cells(record: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows, the lowest perplexity first."""
    return [
        [
            row["method"], "–" if row["marks"] is None else str(row["marks"]),
            share(row["right"]), share(row["right_far"]),
            share(row["recall"][0]), share(row["recall"][-1]),
            *("–" if one is None else f"{one:.3f}" for one in row["perplexity"]),
            f"{record['speed'][row['method']]:.2f}",
        ]
        for row in record["rows"]
    ]  # fmt: skip


def recall_table(record: dict[str, Any], task: str) -> list[list[str]]:
    """Return the right answers of a task by length, header first."""
    head = ["method", *(f"{length:,} tokens" for length in recall_lengths(record))]
    rows = [
        [row["method"], *(share(one) for one in row["accuracy"].values())]
        for row in record["recall"]
        if row["task"] == task
    ]
    return [head, *rows]


def charts(record: dict[str, Any]) -> dict[str, Any]:
    """Return a chart for each task of recall, with a line for each method."""
    lengths = recall_lengths(record)
    return {
        task: {
            "title": task, "width": 470, "height": 330, "x": [lengths[0] / 1.1, lengths[-1] * 1.1],
            "y": [0, 1], "xLog": True, "xTicks": lengths, "xName": "tokens",
            "yTicks": [0, 0.25, 0.5, 0.75, 1], "yName": "right answers", "percent": True,
            "mark": lengths[0], "label": f"{task}: right answers against tokens, by method",
            "lines": [
                {"name": row["method"], "xs": lengths, "ys": list(row["accuracy"].values())}
                for row in record["recall"] if row["task"] == task
            ],
        }
        for task in RECALLS
    }  # fmt: skip


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
        data={"names": [row["method"] for row in record["rows"]], "charts": charts(record)},
        pairs=PAIRS,
        recalls={task: recall_table(record, task) for task in RECALLS},
    )
