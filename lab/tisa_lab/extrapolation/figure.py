"""Perplexity against length, one line for each method, the training length marked."""

import math
from typing import Any

from tisa_lab.extrapolation.tables import by_method, mean_loss


def figure(record: dict[str, Any]) -> Any:
    """Return the figure: without overlap, sliding, and by position in the longest window.

    Only panels that have something to show: `--modes` may have asked for less.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            'figures are drawn with matplotlib, which is not installed; run: pip install "tisa-lab"'
        ) from missing
    read = {
        mode: any(
            mean_loss(rows) is not None
            for lengths in by_method(record, mode).values()
            for rows in lengths.values()
        )
        for mode in ("whole", "sliding")
    }
    panels = [mode for mode in read if read[mode]]
    count = max(1, len(panels) + read["whole"])
    made = Figure(figsize=(1.5 + 4 * count, 4.6), layout="constrained")
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
        for name, lengths in by_method(record, mode).items():
            points = [(length, mean_loss(rows)) for length, rows in sorted(lengths.items())]
            drawn = [
                (length, math.exp(min(loss, 30))) for length, loss in points if loss is not None
            ]
            if drawn:
                best = min(best, *(value for _, value in drawn))
                axis.plot(*zip(*drawn, strict=True), marker="o", markersize=3.5, linewidth=1.4,
                          color=colours[name], label=name)  # fmt: skip
        axis.set_title(titles[mode], fontsize=10)
        axis.set_xlabel("tokens in a window")
    if read["whole"]:
        _by_position(axes[-1], record, colours)
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


def _by_position(axis: Any, record: dict[str, Any], colours: dict[str, Any]) -> None:
    """Draw the loss at each place of the longest window that a method reads."""
    for name, lengths in by_method(record, "whole").items():
        read = [length for length, rows in lengths.items() if mean_loss(rows) is not None]
        if not read:
            continue
        rows = lengths[max(read)]
        points = []
        for number, (start, end, _, _) in enumerate(rows[0]["by_position"]):
            total = sum(row["by_position"][number][2] for row in rows) / len(rows)
            points.append(((max(start, 1) * end) ** 0.5, math.exp(min(total, 30))))
        axis.plot(*zip(*points, strict=True), linewidth=1.4, color=colours[name])
    axis.set_title("by position in the longest window", fontsize=10)
    axis.set_xlabel("position of the token")
