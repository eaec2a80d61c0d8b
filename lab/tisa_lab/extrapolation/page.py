"""The page of a record: a chart and a table for each way of reading. Its sentences: page.html."""

from typing import Any

from tisa.pages import page
from tisa_lab.extrapolation.report import TITLES, points, points_by_position, refused, table


def page_of(record: dict[str, Any]) -> str:
    """Return the page: a chart and a table for each way of reading."""
    names = sorted({run["label"] for run in record["runs"]})
    panels = {mode: (title, "tokens", points(record, mode)) for mode, title in TITLES.items()}
    panels["by-position"] = (
        "By position in the longest window", "position", points_by_position(record),
    )  # fmt: skip
    charts = {
        name: _chart(*panel, record["trained_at"]) for name, panel in panels.items() if panel[2]
    }
    places = record["surroundings"]
    return page(
        "tisa_lab.extrapolation/page.html",
        data={"names": names, "charts": charts},
        record=record,
        tables={mode: cells for mode in TITLES if (cells := table(record, mode))},
        titles=TITLES,
        refused=refused(record),
        places=places if isinstance(places, list) else [places],
    )


def _chart(title: str, axis: str, lines: dict[str, Any], trained: int) -> dict[str, Any]:
    xs = sorted({x for line in lines.values() for x, _ in line})
    best = min(y for line in lines.values() for _, y in line)
    most = max(y for line in lines.values() for _, y in line)
    # A method that breaks down leaves the frame: it would press all others into one line.
    high = min(most * 1.05, best * 5)
    every = [x for n in range(1, 40) if xs[0] <= (x := float(2**n)) <= xs[-1]]
    return {
        "title": title, "width": 980 if axis == "position" else 470, "height": 330,
        "x": [xs[0], max(xs[-1], trained)], "y": [best / 1.05, high], "xLog": True, "yLog": True,
        "xTicks": xs if axis == "tokens" else every[:: 1 + len(every) // 8], "xName": axis,
        "yTicks": [v * 10**p for p in range(-1, 9) for v in (1, 1.5, 2, 3, 5, 7)
                   if best / 1.05 <= v * 10**p <= high],
        "yName": "perplexity", "mark": trained, "dots": axis == "tokens",
        "label": f"{title}: perplexity against {axis}, a line for each method",
        "lines": [
            {"name": name, "xs": [x for x, _ in line], "ys": [y for _, y in line]}
            for name, line in lines.items()
        ],
    }  # fmt: skip
