"""The answers of the race and of recall as tables, a figure and files: lengths, methods, tasks."""

from pathlib import Path
from typing import Any

from tisa.packages import needed
from tisa_lab.probes.recall import PAIRS
from tisa_lab.record import write_record

CHANCE = {"order": 1 / 2, "recall": 1 / PAIRS}


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record, its tables and its figure into a folder."""
    name = record["kind"]
    write_record(record, out, name, {f"{name}.md": markdown(record)}, figure(record))


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


def figure(record: dict[str, Any]) -> Any:
    """Return the figure."""
    figures = needed("matplotlib.figure", "figures", "tisa-lab")
    from matplotlib import colormaps

    rows, config = record["rows"], record["config"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    made = figures.Figure(figsize=(2.6 * len(tasks) + 1.6, 3.4), layout="constrained")
    axes = made.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    lengths = [factor * config["length"] for factor in config["factors"]]
    for axis, task in zip(axes, tasks, strict=True):
        for number, method in enumerate(methods):
            (row,) = [r for r in rows if (r["method"], r["task"]) == (method, task)]
            points = [
                (length, row["accuracy"][str(factor)])
                for length, factor in zip(lengths, config["factors"], strict=True)
                if row["accuracy"][str(factor)] is not None
            ]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.4,
                      color=colormaps["tab10"](number % 10),
                      linestyle="-" if number < 10 else "--", label=method)  # fmt: skip
        axis.axvline(config["length"], color="0.4", linewidth=0.9, linestyle="--")
        axis.axhline(CHANCE.get(task, 1 / 16), color="0.7", linewidth=0.9, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
        axis.set_title(task, fontsize=10)
        axis.set_xlabel("tokens", fontsize=9)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0].set_ylabel("right answers")
    axes[0].set_ylim(-0.02, 1.03)
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return made
