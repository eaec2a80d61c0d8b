"""What all figures share: fonts and colours, axes, maps and their ranges."""

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tisa.analysis.colours import INK, PALE, PAPER
from tisa.shapes import Tensor

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "axes.titlecolor": INK,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "image.interpolation": "nearest",
}


def axes_grid(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, Any]:
    """Return a figure and its axes."""
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    ratios: dict[str, Any] = {
        k: options.pop(k) for k in ("height_ratios", "width_ratios") if k in options
    }
    return figure, figure.subplots(rows, columns, gridspec_kw=ratios or None, **options)


def draw_map(
    ax: Axes, matrix: Tensor, colours: Any, low: float, high: float, *, extent: int | None = None
) -> Any:
    """Draw the matrix; with `extent`, ticks count that many positions."""
    # Ticks count positions also where one square stands for several.
    place = None if extent is None else (-0.5, extent - 0.5, extent - 0.5, -0.5)
    aspect: Any = "equal" if matrix.shape[0] == matrix.shape[1] else "auto"
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax.imshow(matrix.numpy(), cmap=colours, vmin=low, vmax=high, extent=place, aspect=aspect)


def bounds(matrix: Tensor) -> tuple[float, float]:
    """Return the range that all but one entry in a hundred lie in: outliers would hide the rest."""
    low, high = torch.quantile(_some(matrix), torch.tensor([0.005, 0.995])).tolist()
    return low, high if high > low else low + 1e-9


def limit_of(matrix: Tensor) -> float:
    """Return the largest absolute entry but for one in two hundred."""
    return max(float(torch.quantile(_some(matrix).abs(), 0.995)), 1e-12)


def _some(matrix: Tensor) -> Tensor:
    """Return at most a million entries, evenly taken: `quantile` takes no more than 16 million."""
    flat = matrix.float().reshape(-1)
    return flat[:: max(1, len(flat) // 2**20)]


def title_above(figure: Figure, text: str) -> None:
    """Put a title over the whole figure."""
    figure.suptitle(text, fontsize=10, x=0.01, ha="left", fontweight="bold")


def legend_below(figure: Figure, ax: Axes, columns: int) -> None:
    """Put the axes' legend under the whole figure."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=columns, fontsize=8)
