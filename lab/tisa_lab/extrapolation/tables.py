"""The loss past the training length as Markdown: a line for each method, columns for lengths."""

import math
import statistics
from typing import Any


def by_method(record: dict[str, Any], mode: str) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Return method → length → the rows of its seeds."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in record["runs"]:
        lengths = found.setdefault(run["label"], {})
        for row in run["rows"]:
            if row["mode"] == mode:
                lengths.setdefault(row["length"], []).append(row)
    return found


def mean_loss(rows: list[dict[str, Any]]) -> float | None:
    """Return the mean loss over seeds, None where a run was refused or has no number."""
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    return statistics.fmean(losses) if len(losses) == len(rows) and losses else None


def markdown(record: dict[str, Any]) -> str:
    """Return both modes as tables, perplexities with their ratio to the training length."""
    lines = []
    for mode, title in (("whole", "Without overlap"), ("sliding", "Sliding windows")):
        rows = by_method(record, mode)
        lengths = sorted({length for method in rows.values() for length in method})
        if not lengths:
            continue
        trained = record["trained_at"]
        lines += [f"## {title}: perplexity", ""]
        heads = [f"{length:,}" + (" (trained)" if length == trained else "") for length in lengths]
        lines += ["| method | " + " | ".join(heads) + " | longest ÷ trained |"]
        lines += ["|---" * (len(lengths) + 2) + "|"]
        for name, method in rows.items():
            cells = [_cell(method.get(length, [])) for length in lengths]
            first = mean_loss(method.get(trained, []))
            last = mean_loss(method.get(lengths[-1], []))
            ratio = "–" if first is None or last is None else shown(math.exp(last - first))
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {ratio} |")
        lines.append("")
    refused = {
        f"- {run['label']} at {row['length']:,}: {row['refused']}"
        for run in record["runs"]
        for row in run["rows"]
        if "refused" in row
    }
    return "\n".join([*lines, *sorted(refused)]) + "\n"


def _cell(rows: list[dict[str, Any]]) -> str:
    """Return the perplexity of the mean loss; of several seeds also the best and the worst."""
    mean = mean_loss(rows)
    if mean is None:
        return "nan" if any("loss" in row for row in rows) else "–"
    each = [shown(math.exp(min(row["loss"], 700))) for row in sorted(rows, key=lambda r: r["loss"])]
    return shown(math.exp(min(mean, 700))) + (f" ({each[0]}–{each[-1]})" if len(each) > 1 else "")


def shown(value: float) -> str:
    """Return a perplexity or a ratio with three or four digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"
