"""The answers of the race as Markdown: a table for each length, methods down, tasks across."""

from typing import Any


def markdown(record: dict[str, Any]) -> str:
    """Return the accuracies; – where a method has no places for a length."""
    rows, config = record["rows"], record["config"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["method"], row["task"]): row["accuracy"] for row in rows}
    lines = []
    for factor in config["factors"]:
        length = factor * config["length"]
        told = "the training length" if factor == 1 else f"{factor} × the training length"
        lines += [f"### {length} tokens: {told}", ""]
        lines += ["| method | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
        for method in methods:
            cells = [shown(found[method, task][str(factor)]) for task in tasks]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def shown(accuracy: float | None) -> str:
    """Return a share as per cent."""
    return "–" if accuracy is None else f"{100 * accuracy:.1f}"
