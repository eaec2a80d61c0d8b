"""A record of `tisa-lab extrapolate` as tables, a figure and files; several records as one."""

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from tisa.packages import needed
from tisa_lab.record import write_record

TITLES = {"whole": "Without overlap", "sliding": "Sliding windows"}


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record, its tables, its figure and the page of all of them into a folder."""
    from tisa_lab.extrapolation.page import page_of

    texts = {"extrapolation.md": markdown(record), "index.html": page_of(record)}
    write_record(record, out, "extrapolation", texts, figure(record), indent=None)


def together(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of several that read the same windows, its runs by method and seed."""
    for name in ("trained_at", "objective", "stride", "documents", "tokens"):
        found = [record[name] for record in records]
        if any(value != found[0] for value in found):
            raise ValueError(f"{name} must be the same in all records, got {found}")
    # A length that was not asked for would look like one that a method cannot read.
    asked = [sorted({(r["length"], r["mode"]) for r in _rows(record)}) for record in records]
    if any(windows != asked[0] for windows in asked):
        raise ValueError(f"lengths and modes must be the same in all records, got {asked}")
    runs = sorted(
        (run for record in records for run in record["runs"]),
        key=lambda run: (run["label"], run["seed"]),
    )
    named = [(run["label"], run["seed"]) for run in runs]
    for one, following in pairwise(named):
        if one == following:
            raise ValueError(f"{one[0]}, seed {one[1]}, is in two of the records; leave one out")
    # One that was joined before has several already.
    places = [r["surroundings"] for r in records]
    flat = [one for some in places for one in (some if isinstance(some, list) else [some])]
    return records[0] | {"runs": runs, "surroundings": flat}


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for run in record["runs"] for row in run["rows"]]


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


def points(record: dict[str, Any], mode: str) -> dict[str, list[tuple[float, float]]]:
    """Return method → length and perplexity, where it could be read."""
    found = {}
    for name, lengths in by_method(record, mode).items():
        losses = [(float(length), mean_loss(rows)) for length, rows in sorted(lengths.items())]
        found[name] = [(n, math.exp(min(loss, 30))) for n, loss in losses if loss is not None]
    return {name: each for name, each in found.items() if each}


def points_by_position(record: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return method → place and perplexity there, in the longest window that the method reads."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, read in points(record, "whole").items():
        rows = by_method(record, "whole")[name][int(read[-1][0])]
        found[name] = []
        for i, (start, end, _, _) in enumerate(rows[0]["by_position"]):
            loss = statistics.fmean(row["by_position"][i][2] for row in rows)
            found[name].append(((max(start, 1) * end) ** 0.5, math.exp(min(loss, 30))))
    return found


def table(record: dict[str, Any], mode: str) -> list[list[str]]:
    """Return perplexities with their ratio to the training length, header first; may be empty."""
    rows = by_method(record, mode)
    lengths = sorted({length for method in rows.values() for length in method})
    if not lengths:
        return []
    trained = record["trained_at"]
    heads = [f"{length:,}" + (" (trained)" if length == trained else "") for length in lengths]
    cells = [["method", *heads, "longest ÷ trained"]]
    for name, method in rows.items():
        first = mean_loss(method.get(trained, []))
        last = mean_loss(method.get(lengths[-1], []))
        ratio = "–" if first is None or last is None else shown(math.exp(last - first))
        cells.append([name, *(_cell(method.get(length, [])) for length in lengths), ratio])
    return cells


def refused(record: dict[str, Any]) -> list[str]:
    """Return what could not be read, and why."""
    return sorted(
        {
            f"{run['label']} at {row['length']:,}: {row['refused']}"
            for run in record["runs"]
            for row in run["rows"]
            if "refused" in row
        }
    )


def markdown(record: dict[str, Any]) -> str:
    """Return both modes as tables."""
    lines = []
    for mode, title in TITLES.items():
        cells = table(record, mode)
        if cells:
            first, *rest = ["| " + " | ".join(row) + " |" for row in cells]
            lines += [f"## {title}: perplexity", "", first, "|---" * len(cells[0]) + "|", *rest, ""]
    return "\n".join([*lines, *(f"- {line}" for line in refused(record))]) + "\n"


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


def figure(record: dict[str, Any]) -> Any:
    """Return the figure: without overlap, sliding, and by position in the longest window.

    Only panels that have something to show: not all modes may have been measured.
    """
    figures = needed("matplotlib.figure", "figures", "tisa-lab")
    read = {mode: points(record, mode) for mode in TITLES}
    panels = [mode for mode in read if read[mode]]
    count = max(1, len(panels) + bool(read["whole"]))
    made = figures.Figure(figsize=(1.5 + 4 * count, 4.6), layout="constrained")
    axes = made.subplots(1, count, squeeze=False)[0]
    names = sorted({run["label"] for run in record["runs"]})
    from matplotlib import colormaps

    # tab20 is pairs of a dark colour and a light one: the dark ones first.
    colours = {
        name: colormaps["tab20"](2 * number % 20 + number // 10 % 2)
        for number, name in enumerate(names)
    }
    trained = record["trained_at"]
    best = math.inf
    titles = {
        "whole": "windows without overlap",
        "sliding": f"sliding windows (stride {record['stride']})",
    }
    for axis, mode in zip(axes, panels, strict=False):
        for name, drawn in read[mode].items():
            best = min(best, *(value for _, value in drawn))
            axis.plot(*zip(*drawn, strict=True), marker="o", markersize=3.5, linewidth=1.4,
                      color=colours[name], label=name)  # fmt: skip
        axis.set_title(titles[mode], fontsize=10)
        axis.set_xlabel("tokens in a window")
    if read["whole"]:
        for name, drawn in points_by_position(record).items():
            axes[-1].plot(*zip(*drawn, strict=True), linewidth=1.4, color=colours[name])
        axes[-1].set_title("by position in the longest window", fontsize=10)
        axes[-1].set_xlabel("position of the token")
    for axis in axes:
        axis.axvline(trained, color="0.4", linewidth=0.9, linestyle="--")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        if math.isfinite(best):
            # A method that breaks down leaves the frame: it would press all others into one line.
            low, high = axis.get_ylim()
            axis.set_ylim(max(low, best / 1.5), min(high, best * 5))
        axis.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
        for which in ("major", "minor"):
            getattr(axis.yaxis, f"set_{which}_formatter")(lambda value, place: f"{value:g}")
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("perplexity")
    axes[0].text(trained, 0.99, " trained", transform=axes[0].get_xaxis_transform(), fontsize=8,
                 va="top", color="0.3")  # fmt: skip
    named: dict[str, Any] = {}
    for axis in axes[: len(panels)]:
        named |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    # From top to bottom as the lines end.
    ordered = sorted(named, key=lambda name: -named[name].get_ydata()[-1])
    made.legend([named[name] for name in ordered], ordered, loc="outside right center", fontsize=8)
    return made
