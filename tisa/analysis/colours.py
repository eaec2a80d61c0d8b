"""Colours of figures and page, chosen so that colour-blind readers tell them apart.

Two schemes of maps: `SEQUENTIAL` (viridis) for P, and a diverging one, blue over neutral to orange,
for what has a sign. Lines have the colours of Okabe and Ito.
"""

from typing import Any

SEQUENTIAL = "viridis"
DIVERGING = ("#08306b", "#2171b5", "#8fc1e3", "#f6f4ef", "#f5b26b", "#d9650b", "#7a2c00")
DIVERGING_DARK = ("#9fd0f5", "#3f8fd0", "#1c4a75", "#14171d", "#7a3d10", "#e07b1f", "#ffc894")
BLUE, ORANGE, GREEN, PINK, SKY, GOLD, RED = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#a50f15",
)  # fmt: skip
LINES = (BLUE, ORANGE, GREEN, PINK, GOLD, SKY, RED, "#555555")
INK, PALE, PAPER = "#22252b", "#8b8f98", "#ffffff"


def diverging_map(anchors: tuple[str, ...] = DIVERGING) -> Any:
    """Return the diverging scheme as a matplotlib colour map."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("blue-orange", list(anchors))


def lookup_table(colour_map: Any, entries: int = 256) -> bytes:
    """Return the map as entries × (red, green, blue), one byte each, for the page."""
    from matplotlib import colormaps

    chosen = colormaps[colour_map] if isinstance(colour_map, str) else colour_map
    colours = [chosen(i / (entries - 1))[:3] for i in range(entries)]
    return bytes(round(255 * part) for colour in colours for part in colour)
