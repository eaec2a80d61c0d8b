"""Figures that are maps: the table itself, P, its Toeplitz fit, all heads on one page."""

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from tisa.analysis.colours import LINES, SEQUENTIAL, diverging_map
from tisa.analysis.heads import block_means
from tisa.analysis.plots.style import STYLE, axes_grid, bounds, draw_map, limit_of, title_above
from tisa.analysis.toeplitz import written
from tisa.shapes import Float, Int, Tensor

# Rows of a table in its picture: of longer tables each is the mean of some.
LARGEST = 2048


def embedding_table(
    table: Float[Tensor, "positions width"], *, rows: Sequence[int] = (), title: str = ""
) -> Figure:
    """Return E_P as it is, positions × dimensions, and the rows that were picked as lines.

    The picture that shows that a table cannot be read.
    """
    rows = rows or tuple(
        dict.fromkeys(min(r, len(table) - 1) for r in (1, 2, 100, len(table) // 2))
    )
    with rc_context(STYLE):
        figure, (above, below) = axes_grid(2, 1, (7.4, 6.2), height_ratios=[3, 1.4])
        limit = limit_of(table)
        shown = block_means(table, LARGEST)
        image = draw_map(above, shown, diverging_map(), -limit, limit)
        if len(shown) < len(table):
            image.set_extent((-0.5, table.shape[1] - 0.5, len(table) - 0.5, -0.5))
            above.set_aspect("auto")
        figure.colorbar(image, ax=above, label="value", pad=0.01, fraction=0.05)
        above.set(title=title or "E_P, the table itself", xlabel="dimension", ylabel="position")
        for colour, row in zip(LINES * len(rows), rows, strict=False):
            above.axhline(row, color=colour, lw=0.8)
            below.plot(table[row].tolist(), color=colour, lw=0.7, label=f"position {row}")
        below.set(title="Some of its rows", xlabel="dimension", ylabel="value")
        below.set_xlim(0, table.shape[1] - 1)
        below.legend(ncol=len(rows), fontsize=8, loc="upper right", bbox_to_anchor=(1, 1.3))
    return figure


def gram_map(
    matrix: Float[Tensor, "rows columns"], *, title: str = "", positions: int | None = None
) -> Figure:
    """Return the heat map of P = E_P E_Pᵀ, brighter is larger (Figs 1 and 4)."""
    with rc_context(STYLE):
        figure, ax = axes_grid(1, 1, (5.4, 4.6))
        low, high = bounds(matrix)
        image = draw_map(ax, matrix, SEQUENTIAL, low, high, extent=positions)
        figure.colorbar(image, ax=ax, pad=0.02, fraction=0.046, label="inner product")
        ax.set(title=title or "P = E_P E_Pᵀ", xlabel="position", ylabel="position")
    return figure


def gram_maps(
    matrices: Sequence[Float[Tensor, "rows columns"]],
    titles: Sequence[str],
    *,
    positions: Sequence[int] | None = None,
) -> Figure:
    """Return several P side by side, each in its own range (Fig 5: v1 and v2, before and after)."""
    count = len(matrices)
    with rc_context(STYLE):
        figure, axes = axes_grid(1, count, (0.6 + 3.6 * count, 4.6), squeeze=False)
        for index, (ax, matrix, title) in enumerate(zip(axes[0], matrices, titles, strict=True)):
            extent = positions[index] if positions else None
            draw_map(ax, matrix, SEQUENTIAL, *bounds(matrix), extent=extent)
            ax.set(title=title, xlabel="position")
        axes[0][0].set_ylabel("position")
    return figure


def toeplitz_parts(
    matrix: Float[Tensor, "rows columns"],
    fit: Float[Tensor, "rows columns"],
    *,
    r2: float,
    title: str = "",
) -> Figure:
    """Return P, its best Toeplitz fit, and what the fit leaves over, in one range of colours."""
    low, high = bounds(matrix)
    rest = matrix - fit
    limit = limit_of(rest)
    with rc_context(STYLE):
        figure, axes = axes_grid(1, 3, (10.6, 3.9))
        parts = (
            (matrix, f"{title}P", SEQUENTIAL, low, high),
            (fit, f"its Toeplitz fit: R² {written(r2)}", SEQUENTIAL, low, high),
            (rest, "what it leaves", diverging_map(), -limit, limit),
        )
        for ax, (values, name, colours, lowest, highest) in zip(axes, parts, strict=True):
            image = draw_map(ax, values, colours, lowest, highest)
            figure.colorbar(image, ax=ax, orientation="horizontal", pad=0.14, fraction=0.045)
            ax.set_title(name)
    return figure


def head_maps(
    maps: Float[Tensor, "heads rows columns"],
    *,
    r2: Sequence[float],
    sensitive: Sequence[bool],
    title: str = "",
    positions: int | None = None,
) -> Figure:
    """Return the positional attention F̂_P of all heads on one page (Fig 8).

    Every row has its mean taken off, which softmax does not see; each head has its own range.
    """
    count = maps.shape[0]
    columns = (
        next(c for c in (4, 5, 6, 3, 2, 1) if count % c == 0 or c == 1) if count > 4 else count
    )
    columns = 4 if columns == 1 and count > 4 else columns
    rows = -(-count // columns)
    with rc_context(STYLE):
        figure, axes = axes_grid(rows, columns, (2.35 * columns, 2.45 * rows + 0.5), squeeze=False)
        for head, ax in enumerate(axes.flat):
            if head >= count:
                ax.set_axis_off()
                continue
            shown = maps[head] - maps[head].mean(1, keepdim=True)
            limit = limit_of(shown)
            draw_map(ax, shown, diverging_map(), -limit, limit, extent=positions)
            ax.set_xticks([])
            ax.set_yticks([])
            mark = "●" if sensitive[head] else "○"
            ax.set_title(f"{mark} head {head + 1}   R² {written(r2[head], 2)}", fontsize=8)
            ax.set_xlabel(f"±{limit:.2g}", fontsize=7, labelpad=2)
        marks = "     ● position-sensitive   ○ position-blind"
        title_above(figure, (title or "F̂_P of every head") + marks)
    return figure


def grid_steps(
    fit: Float[Tensor, "down right"], *, r2: float, null: float, title: str = ""
) -> Figure:
    """Return the mean of P for each step on a two-dimensional grid (ViT)."""
    with rc_context(STYLE):
        figure, ax = axes_grid(1, 1, (5.2, 4.4))
        down, right = fit.shape[0] // 2, fit.shape[1] // 2
        low, high = bounds(fit)
        image = ax.imshow(
            fit.numpy(), cmap=SEQUENTIAL, vmin=low, vmax=high,
            extent=(-right - 0.5, right + 0.5, down + 0.5, -down - 0.5),
        )  # fmt: skip
        figure.colorbar(image, ax=ax, pad=0.02, fraction=0.046, label="mean inner product")
        ax.set(xlabel="columns to the right", ylabel="rows down")
        ax.set_title(title or f"P by step on the grid: R² {written(r2)} (chance {null:.3f})")
    return figure


def layers_by_offset(
    values: Float[Tensor, "layers span"],
    offsets: Int[Tensor, " span"],
    *,
    reach: int = 64,
    title: str = "",
    label: str = "logit above its row's mean",
) -> Figure:
    """Return one row of colours per layer, over the offset."""
    near = offsets.abs() <= reach
    shown = values[:, near].nan_to_num(0.0)
    with rc_context(STYLE):
        figure, ax = axes_grid(1, 1, (7.2, 1.3 + 0.24 * len(values)))
        limit = limit_of(shown)
        ends = int(offsets[near][0]) - 0.5, int(offsets[near][-1]) + 0.5
        image = ax.imshow(
            shown.numpy(), cmap=diverging_map(), vmin=-limit, vmax=limit, aspect="auto",
            extent=(*ends, len(values) + 0.5, 0.5),
        )  # fmt: skip
        figure.colorbar(image, ax=ax, pad=0.01, fraction=0.04, label=label)
        ax.set(xlabel="offset k = key − query", ylabel="layer")
        ax.set_title(title or "What attention does with distance, mean over heads")
    return figure
