"""The record as a figure: a grid of marks and numbers, coloured where the paper says otherwise."""

from typing import Any

from tisa.packages import needed
from tisa_lab.criteria.paper import CRITERIA
from tisa_lab.criteria.report import mark, shown

# Distinguishable without colour vision: blue, orange, grey.
AGREES, DIFFERS, UNCLAIMED = "#d4e6f4", "#f6b26b", "#eeeeee"


def figure_of(record: dict[str, Any]) -> Any:
    """Return a matplotlib Figure of the table."""
    rows = record["rows"]
    figures = needed("matplotlib.figure", "figures", "tisa-lab")
    drawn = figures.Figure(figsize=(13.5, 1.4 + 0.42 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    for y, row in enumerate(rows):
        for x, criterion in enumerate(CRITERIA):
            cell = row["cells"][criterion]
            unclaimed = cell["paper"] is None
            differs = not unclaimed and cell["mark"] != cell["paper"]
            colour = UNCLAIMED if unclaimed else DIFFERS if differs else AGREES
            axes.fill((x, x + 1, x + 1, x), (y, y, y + 1, y + 1), color=colour, ec="white", lw=2)
            axes.text(x + 0.06, y + 0.52, mark(cell["mark"]), va="center", size=13, weight="bold")
            axes.text(x + 0.2, y + 0.52, shown(criterion, cell), va="center", size=9)
            if differs:
                axes.text(
                    x + 0.97, y + 0.52, f"paper {mark(cell['paper'])}", va="center", ha="right",
                    size=8,
                )  # fmt: skip
    axes.set_xlim(0, len(CRITERIA))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([x + 0.5 for x in range(len(CRITERIA))], CRITERIA)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [row["row"] for row in rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    total = record["agreement"]
    axes.set_title(
        f"Table 1 measured: {total['agree']} of {total['of']} marks agree with the paper "
        "(blue); orange differ; grey are not in it",
        size=11,
    )
    return drawn
