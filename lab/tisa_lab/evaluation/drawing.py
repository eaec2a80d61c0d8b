"""The figure of a grid: left, loss against rate; right, recall from far against perplexity."""

import math
import statistics
from typing import Any

from tisa.packages import needed
from tisa_lab.evaluation.rates import Curve

# Above so many times the best perplexity a model is broken, whatever the number.
HIGHEST = 4.0


def figure(curves: list[Curve]) -> Any:
    """Return the figure; without the right half where no record has recall."""
    figures = needed("matplotlib.figure", "figures", "tisa-lab")
    far = {curve.label: point for curve in curves if (point := _far(curve)) is not None}
    made = figures.Figure(figsize=(11.5 if far else 7.2, 4.6), layout="constrained")
    axes = made.subplots(1, 2 if far else 1, squeeze=False)[0]
    colours = _colours(len(curves))
    best = min(curve.perplexity(curve.best) for curve in curves)
    for curve, (colour, style) in zip(curves, colours, strict=True):
        points = [(rate, curve.perplexity(rate)) for rate in curve.rates]
        drawn = [(x, y) for x, y in points if math.isfinite(y)]
        axes[0].plot(*zip(*drawn, strict=True), color=colour, linestyle=style, linewidth=1.4,
                     marker="o", markersize=3.2, label=curve.label)  # fmt: skip
        for rate in curve.rates:
            seeds = [math.exp(loss) for loss in curve.losses(rate) if math.isfinite(loss)]
            axes[0].plot([rate] * len(seeds), seeds, color=colour, linewidth=0.8)
    axes[0].set_xscale("log", base=2)
    axes[0].set_yscale("log")
    axes[0].set_ylim(best / 1.05, best * HIGHEST)
    rates = sorted({rate for curve in curves for rate in curve.rates})
    axes[0].set_xticks(rates, [f"{rate:g}" for rate in rates])
    for which in ("major", "minor"):
        getattr(axes[0].yaxis, f"set_{which}_formatter")(lambda value, place: f"{value:g}")
    axes[0].set_xlabel("learning rate")
    axes[0].set_ylabel("validation perplexity")
    if far:
        shown = [pair for pair in zip(curves, colours, strict=True) if pair[0].label in far]
        for number, (curve, (colour, _)) in enumerate(shown):
            x, y, _ = far[curve.label]
            axes[1].plot(x, 100 * y, marker="o", markersize=6, color=colour)
            # Neighbours above and below, so that their names do not meet.
            axes[1].annotate(curve.label, (x, 100 * y), xytext=(4, -10 if number % 2 else 4),
                             fontsize=7, textcoords="offset points")  # fmt: skip
        (factor,) = {point[2] for point in far.values()}
        axes[1].set_xlabel("validation perplexity at the best rate")
        axes[1].set_ylabel(f"recall at {factor} × the training length, % right")
        axes[1].set_ylim(-3, 107)
    for axis in axes:
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.tick_params(labelsize=8)
    made.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return made


def _far(curve: Curve) -> tuple[float, float, str] | None:
    """Return perplexity, recall from the farthest and how far that is; None without recall."""
    rows = [row["accuracy"] for one in curve.answers("recall") for row in one
            if row["task"] == "recall"]  # fmt: skip
    if not rows:
        return None
    factor = max(rows[0], key=int)
    some = [accuracy[factor] for accuracy in rows if accuracy[factor] is not None]
    if not some or not math.isfinite(curve.perplexity(curve.best)):
        return None
    return curve.perplexity(curve.best), statistics.fmean(some), factor


def _colours(count: int) -> list[tuple[Any, str]]:
    from matplotlib import colormaps

    return [(colormaps["tab10"](number % 10), "-" if number < 10 else "--")
            for number in range(count)]  # fmt: skip
