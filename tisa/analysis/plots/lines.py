"""Figures that are lines and bars: R² beside chance, curves and kernels, spectrum, text."""

import math
from collections.abc import Sequence

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from tisa.analysis.colours import BLUE, GREEN, INK, LINES, ORANGE, PALE, SEQUENTIAL
from tisa.analysis.correlation import correlation_interval
from tisa.analysis.plots.style import STYLE, axes_grid, legend_below, title_above
from tisa.analysis.toeplitz import written
from tisa.fitting import Kernels
from tisa.shapes import Float, Int, Tensor


def toeplitz_bars(
    labels: Sequence[str],
    r2: Sequence[float],
    intervals: Sequence[tuple[float, float]],
    nulls: Sequence[float],
    *,
    title: str = "",
) -> Figure:
    """Return R² of each label with its interval, and a mark at what chance gives."""
    with rc_context(STYLE):
        figure, ax = axes_grid(1, 1, (6.4, 0.9 + 0.42 * len(labels)))
        places = range(len(labels))
        ax.barh(places, r2, color=BLUE, height=0.56, alpha=0.85)
        for place, value, (low, high), null in zip(places, r2, intervals, nulls, strict=True):
            if not math.isnan(low):
                ax.plot([low, high], [place, place], color=INK, lw=1.4, solid_capstyle="butt")
            ax.plot([null, null], [place - 0.36, place + 0.36], color=ORANGE, lw=2.6)
            behind = null if math.isnan(value) else max(value, high)
            ax.text(behind + 0.015, place, written(value), va="center", fontsize=8)
        ax.set(yticks=list(places), yticklabels=labels)
        ax.set(xlim=(0, 1.1), xlabel="Toeplitz R² (orange: chance alone)")
        ax.invert_yaxis()
        title_above(figure, title or "How much of P is a function of the offset")
    return figure


def score_scatter(
    toeplitzness: Sequence[float],
    scores: Sequence[float],
    labels: Sequence[str],
    *,
    score_name: str = "score",
    intervals: Sequence[tuple[float, float]] | None = None,
) -> Figure:
    """Return Toeplitzness against a score, with correlation and its interval (Fig 2)."""
    found = correlation_interval(torch.tensor(toeplitzness), torch.tensor(scores))
    said = (
        "Correlation {:.2f}, 95 % interval {:.2f} … {:.2f}".format(*found)
        if found is not None
        else "Correlation not defined: all have the same value"
    )
    with rc_context(STYLE):
        figure, ax = axes_grid(1, 1, (5.4, 4.2))
        for index, (x, y, label) in enumerate(zip(toeplitzness, scores, labels, strict=True)):
            colour = LINES[index % len(LINES)]
            if intervals is not None:
                ax.plot(intervals[index], [y, y], color=colour, lw=1, alpha=0.6)
            ax.plot(x, y, "o", color=colour, ms=7)
            ax.annotate(label, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8)
        ax.margins(0.18)
        ax.set(xlabel="Toeplitz R² of P", ylabel=score_name)
        ax.set_title(f"{said} ({len(scores)} models)")
    return figure


def offset_rows(
    values: Float[Tensor, "heads rows positions"],
    rows: Sequence[int],
    curves: Float[Tensor, "heads span"],
    offsets: Int[Tensor, " span"],
    heads: Sequence[int],
    *,
    reach: int = 64,
) -> Figure:
    """Return rows of F̂_P drawn against the offset, and their mean: one line where invariant.

    `rows` are the queries' positions, `heads` the numbers to write above the panels.
    """
    positions = values.shape[-1]
    with rc_context(STYLE):
        figure, axes = axes_grid(1, len(heads), (0.6 + 2.9 * len(heads), 3.2), squeeze=False)
        for ax, of_rows, curve, head in zip(axes[0], values, curves, heads, strict=True):
            for colour, row, line in zip(LINES, rows, of_rows, strict=False):
                first, last = max(0, row - reach), min(positions, row + reach + 1)
                seen = line[first:last]
                places = list(range(first - row, last - row))
                above = (seen - seen.nanmean()).tolist()
                ax.plot(places, above, color=colour, lw=0.9, label=f"query {row}")
            near = offsets.abs() <= reach
            k, mean = offsets[near].tolist(), (curve[near] - curve[near].mean()).tolist()
            ax.plot(k, mean, color=INK, lw=2, alpha=0.75, label="mean diagonal")
            ends = -reach, min(reach, int(offsets[-1]))
            ax.set(title=f"head {head + 1}", xlabel="offset k = key − query", xlim=ends)
            ax.axvline(0, color=PALE, lw=0.6)
        axes[0][0].set_ylabel("logits, row mean taken off")
        legend_below(figure, axes[0][0], len(rows) + 1)
    return figure


def kernel_curves(
    curves: Float[Tensor, "heads span"],
    offsets: Int[Tensor, " span"],
    kernels: Kernels,
    constants: Float[Tensor, " heads"],
    *,
    r2: Sequence[float],
    title: str = "",
    reach: int = 64,
) -> Figure:
    """Return f(k) of every head, its fit, and each kernel of the fit by itself."""
    count = curves.shape[0]
    columns = min(4, count)
    rows = -(-count // columns)
    near = offsets.abs() <= reach
    k = offsets[near].tolist()
    # A decoder's curve ends at 0.
    first, last = k[0], k[-1]
    fine = torch.linspace(first, last, 4 * (last - first) + 1, dtype=torch.float64)
    u = fine - kernels.offset.double().unsqueeze(-1)
    each = kernels.amplitude.double().unsqueeze(-1) * torch.exp(
        -kernels.sharpness.double().abs().unsqueeze(-1) * u**2
    )
    xs = fine.tolist()
    with rc_context(STYLE):
        figure, axes = axes_grid(
            rows, columns, (2.7 * columns + 0.3, 2.0 * rows + 0.6), squeeze=False, sharex=True
        )
        for head, ax in enumerate(axes.flat):
            if head >= count:
                ax.set_axis_off()
                continue
            base = float(constants[head])
            for kernel in each[head]:
                ax.fill_between(xs, base, (base + kernel).tolist(), color=GREEN, alpha=0.22, lw=0)
            ax.plot(k, curves[head][near].tolist(), color=BLUE, lw=1.5, label="f(k)")
            summed, dashes = (base + each[head].sum(0)).tolist(), (0, (4, 1.5))
            ax.plot(xs, summed, color=ORANGE, lw=1.1, ls=dashes, label="kernels, summed")
            ax.axvline(0, color=PALE, lw=0.5)
            ax.set_title(f"head {head + 1}   R² {r2[head]:.2f}", fontsize=8)
            ax.set_xlim(first, last)
        for ax in axes[-1]:
            ax.set_xlabel("offset k")
        size = kernels.amplitude.shape[1]
        title_above(figure, title or f"f(k) of every head and its {size} kernels")
        legend_below(figure, axes[0][0], 2)
    return figure


def kernel_errors(r2: Float[Tensor, "sizes heads"], *, title: str = "") -> Figure:
    """Return the share of each head's curve that S kernels leave unexplained, as S grows."""
    with rc_context(STYLE):
        figure, ax = axes_grid(1, 1, (5.4, 3.6))
        left = (1 - r2).clamp_min(1e-5)
        ax.plot(left.tolist(), color=BLUE, lw=0.9, alpha=0.5)
        median = left.median(1).values.tolist()
        ax.plot(median, color=ORANGE, lw=2.4, marker="o", ms=5, label="median head")
        ax.set(xlabel="kernels S", ylabel="1 − R²", yscale="log", xticks=range(r2.shape[0]))
        ax.set_title(title or "What S kernels leave of each head's curve")
        ax.legend()
    return figure


def spectrum(
    variance: Float[Tensor, " components"],
    trajectories: Float[Tensor, "positions shown"],
    frequencies: Sequence[float],
    *,
    title: str = "",
) -> Figure:
    """Return the PCA spectrum, components along the positions, and pairs against each other."""
    pairs = min(3, trajectories.shape[1] // 2)
    n = trajectories.shape[0]
    with rc_context(STYLE):
        figure, axes = axes_grid(2, 1 + pairs, (2.8 * (1 + pairs), 5.0), squeeze=False)
        share = variance.cumsum(0)
        reached = int((share < 0.9).sum()) + 1 if variance.any() else 0
        axes[0][0].plot(range(1, len(share) + 1), share.tolist(), color=BLUE, lw=1.6)
        axes[0][0].plot([1, reached, reached], [0.9, 0.9, 0], color=ORANGE, lw=1, ls=":")
        axes[0][0].set(title=f"90 % in {reached} of {len(share)}", ylim=(0, 1.02))
        axes[0][0].set(xlabel="components", ylabel="variance explained")
        axes[1][0].bar(range(1, min(24, len(variance)) + 1), variance[:24].tolist(), color=BLUE)
        axes[1][0].set(xlabel="component", ylabel="share")
        for pair in range(pairs):
            above, below = axes[0][1 + pair], axes[1][1 + pair]
            # Fast ones would be a solid band.
            shown = n if frequencies[2 * pair] < 20 else max(32, n // 8)
            for number, colour in ((2 * pair, BLUE), (2 * pair + 1, ORANGE)):
                period = n / max(1.0, frequencies[number])
                told = f"{number + 1}: period {period:.3g}"
                above.plot(trajectories[:shown, number].tolist(), color=colour, lw=0.8, label=told)
            above.set(xlabel="position", title=f"components {2 * pair + 1}, {2 * pair + 2}")
            above.legend(fontsize=7, loc="upper right", handlelength=1)
            # More points are a cloud, and megabytes of SVG.
            some = trajectories[:: -(-n // 2048), 2 * pair : 2 * pair + 2]
            x, y = some.T.tolist()
            below.plot(x, y, color=PALE, lw=0.4)
            below.scatter(x, y, c=range(len(x)), cmap=SEQUENTIAL, s=5, linewidths=0)
            below.set(xlabel=f"component {2 * pair + 1}", ylabel=f"component {2 * pair + 2}")
            below.set_aspect("equal", "datalim")
        components = "Principal components of E_P (dark: first position, bright: last)"
        title_above(figure, title or components)
    return figure


def learned_curves(
    scores: Float[Tensor, "heads span"],
    offsets: Int[Tensor, " span"],
    *,
    title: str = "",
    reach: int = 128,
    label: str = "score f(k)",
) -> Figure:
    """Return f(k) of all heads in one frame."""
    near = offsets.abs() <= reach
    k = offsets[near].tolist()
    with rc_context(STYLE):
        figure, ax = axes_grid(1, 1, (6.6, 3.6))
        for head, row in enumerate(scores):
            style = "-" if head < len(LINES) else "--"
            colour = LINES[head % len(LINES)]
            ax.plot(k, row[near].tolist(), style, lw=1.1, color=colour, label=f"head {head + 1}")
        ax.axvline(0, color=PALE, lw=0.5)
        ax.set(xlabel="offset k = key − query", ylabel=label, xlim=(k[0], k[-1]))
        ax.set_title(title or "Learned scores of every head")
        if len(scores) <= 16:
            legend_below(figure, ax, min(8, len(scores)))
    return figure


def logit_terms(
    shares: Float[Tensor, "heads terms"], names: Sequence[str], *, title: str = ""
) -> Figure:
    """Return what each head's logits are made of: words, positions, and words with positions."""
    with rc_context(STYLE):
        figure, ax = axes_grid(1, 1, (7.2, 1.4 + 0.26 * len(shares)))
        start = torch.zeros(len(shares))
        heads = list(range(1, len(shares) + 1))
        for colour, name, part in zip(LINES, names, shares.T, strict=False):
            label = name.replace("-", " × ") if "-" in name else f"key's {name} alone"
            ax.barh(
                heads, part.tolist(), left=start.tolist(), color=colour, height=0.74, label=label
            )
            start = start + part
        ax.set(xlim=(0, 1), xlabel="share of the variance of the logits", ylabel="head")
        ax.set_yticks(heads)
        ax.invert_yaxis()
        ax.set_title(title or "What the first layer's logits are made of (query × key)")
        legend_below(figure, ax, 3)
    return figure
