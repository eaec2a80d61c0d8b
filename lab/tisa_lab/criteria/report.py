"""The record as Markdown and as a page: the table, where it differs and why, sensitivity."""

from pathlib import Path
from typing import Any

from tisa.pages import page
from tisa_lab.criteria.measurement import RULES
from tisa_lab.criteria.paper import CRITERIA
from tisa_lab.record import write_record


def mark(found: bool | None) -> str:
    """Return ✓, ✗, or nothing where the paper has no mark."""
    return "" if found is None else "✓" if found else "✗"


def shown(criterion: str, cell: dict[str, Any]) -> str:
    """Return the number behind a mark, short enough for a table."""
    number = cell["number"]
    if number is None:
        return "–"
    if criterion == "inductive":
        return "refuted" if cell["refuted"] else f"{number:.2g}"
    if criterion == "data-driven":
        return f"{number:,.0f}"
    if criterion == "parameter efficient":
        return f"{100 * number:.2g} %" + (", grows" if cell["refuted"] else "")
    if criterion == "translation invariant":
        return f"{number:.0e}"
    if criterion == "parallelizable":
        return f"n^{number:.2f}"
    return f"{100 * number:.3g} %"


def disagreements(record: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return row, criterion and cell of every mark that differs from the paper's."""
    return [
        (row["row"], criterion, cell)
        for row in record["rows"]
        for criterion, cell in row["cells"].items()
        if cell["paper"] is not None and cell["mark"] != cell["paper"]
    ]


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record as JSON, Markdown, a figure and a page into a folder."""
    from tisa_lab.criteria.figure import figure_of

    texts = {"criteria.md": markdown(record), "index.html": page_of(record)}
    write_record(record, out, "criteria", texts, figure_of(record))


def page_of(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    claimed = {
        c: sum(row["cells"][c]["paper"] is not None for row in record["rows"]) for c in CRITERIA
    }
    return page(
        "tisa_lab.criteria/page.html",
        record=record,
        claimed=claimed,
        thresholds={c: threshold(c, record["settings"]) for c in CRITERIA},
        differences=disagreements(record),
        shown=shown,
        mark=mark,
    )


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report."""
    total = record["agreement"]
    lines = [
        "# Table 1, measured",
        "",
        f"{record['date']}, commit {record['commit']}, torch {record['torch']}, "
        f"{record['device']}, one thread, {record['seconds']} s ({record['cpu_seconds']} s CPU), "
        f"seed {record['settings']['seed']}: `{record['command']}`",
        "",
        f"**{total['agree']} of {total['of']} marks agree with the paper's.** Each cell has the "
        "measured mark, the paper's in brackets, and the number behind the measured one. Cells "
        "that differ are bold. Rows in italics are not in the paper's table.",
        "",
        "| method | " + " | ".join(CRITERIA) + " |",
        "|---" * (len(CRITERIA) + 1) + "|",
        *(_table_row(row) for row in record["rows"]),
        "| threshold | " + " | ".join(threshold(c, record["settings"]) for c in CRITERIA) + " |",
        "| agree | " + " | ".join(str(total["by criterion"][c]) for c in CRITERIA) + " |",
        "",
        "## Where they differ",
        "",
        *(
            f"- **{row}, {criterion}**: measured {mark(cell['mark'])}, paper "
            f"{mark(cell['paper'])}. {_sentence(cell['evidence'])}"
            for row, criterion, cell in disagreements(record)
        ),
        "",
        "## Sensitivity to the thresholds",
        "",
        "How many marks of a criterion agree with the paper under other thresholds, and which "
        "measured marks change against those above.",
        "",
        "| criterion | threshold | agree | changed |",
        "|---|---|---|---|",
        *(
            f"| {tried['criterion']} | {tried['threshold']:g}{' (used)' if tried['used'] else ''} "
            f"| {tried['agree']} of {tried['of']} | {', '.join(tried['changed'])} |"
            for tried in record["sensitivity"]
        ),
        "",
        *_variations(record["variations"]),
        "## What was seen",
        "",
    ]
    for row in record["rows"]:
        lines += [f"**{row['row']}** (`{row['method']}`)", ""]
        lines += [
            f"- {criterion} {mark(cell['mark'])}: {cell['evidence']}"
            for criterion, cell in row["cells"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def _table_row(row: dict[str, Any]) -> str:
    cells = []
    for criterion, cell in row["cells"].items():
        paper = "" if cell["paper"] is None else f" ({mark(cell['paper'])})"
        text = f"{mark(cell['mark'])}{paper} {shown(criterion, cell)}"
        differs = cell["paper"] is not None and cell["mark"] != cell["paper"]
        cells.append(f"**{text}**" if differs else text)
    listed = any(cell["paper"] is not None for cell in row["cells"].values())
    return f"| {row['row'] if listed else '*' + row['row'] + '*'} | " + " | ".join(cells) + " |"


def threshold(criterion: str, settings: dict[str, Any]) -> str:
    """Return from where on a number earns a ✓, in words."""
    rule = RULES[criterion]
    value = settings[rule.threshold]
    text = f"{100 * value:g} %" if criterion == "parameter efficient" else f"{value:g}"
    return f"{rule.number} {rule.side} {text}"


def _variations(found: dict[str, Any]) -> list[str]:
    if not found:
        return []
    lines = ["## Sensitivity to random numbers and sizes", ""]
    for label, variation in found.items():
        changed = ", ".join(variation["changed"]) or "no mark changes"
        lines.append(f"- {label}: {changed}")
    return [*lines, ""]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
