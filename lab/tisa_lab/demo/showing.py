"""Numbers and drawings of the page: values in, HTML out; a number names its place in the JSON."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

# How a number is written; `data-key` beside it says which one of demo.json it is.
FORMS: dict[str, Callable[[Any], str]] = {
    "count": lambda v: f"{v:,}",
    "two": lambda v: f"{v:.2f}",
    "three": lambda v: f"{v:.3f}",
    "share": lambda v: f"{100 * v:.0f} %",
    "tenth": lambda v: f"{100 * v:.1f} %",
    "seconds": lambda v: f"{v:.0f} s",
    "text": str,
}
LINES = ("grey", "gold", "green", "pink", "sky", "blue", "orange")


def value_at(demo: Any, key: str) -> Any:
    """Return the value at a key such as "removed.zeroed.closeness" or "race.rows.3.seconds"."""
    for part in key.split("."):
        demo = demo[int(part)] if isinstance(demo, list) else demo[part]
    return demo


def number(demo: Any, key: str, form: str, tag: str = "span") -> str:
    """Return one number of the JSON as it stands on the page."""
    value = value_at(demo, key)
    text = "–" if value is None else FORMS[form](value)
    if form != "text":
        text = text.replace("-", "−")
    return f'<{tag} data-key="{escape(key)}">{escape(text)}</{tag}>'


def bars(demo: Any, name: str, rows: Sequence[tuple[str, str, str]], chance: float | None) -> str:
    """Return a bar for each (kind, label, key of a share); a broken line where chance is."""
    made = []
    for kind, label, key in rows:
        width = max(0.0, min(100.0, 100 * value_at(demo, key)))
        mark = ""
        if chance is not None:
            mark = f'<span class="chance" style="left:{100 * chance:g}%"></span>'
        form = "three" if chance is None else "tenth"
        made.append(
            f'<div class="bar {kind}"><span>{escape(label)}</span><span class="track">'
            f'<span class="fill" style="width:{width:.2f}%"></span>{mark}</span>'
            f'<span class="n">{number(demo, key, form)}</span></div>'
        )
    return f'<div class="bars" role="group" aria-label="{escape(name)}">{"".join(made)}</div>'


def map_card(png: str, shows: str, caption: str) -> str:
    """Return a map with its caption."""
    return (
        f'<figure class="card"><img alt="{escape(shows)}" src="data:image/png;base64,{png}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def tile(head: dict[str, Any], cares: bool) -> str:
    """Return a head's curve as a small picture that can be chosen."""
    values = head["values"]
    low, high = min(0.0, *values), max(0.0, *values)
    height = max(high - low, 1e-3)
    step = 64 / (len(values) - 1)
    points = " ".join(
        f"{'L' if i else 'M'}{i * step:.1f} {31 - 28 * (v - low) / height:.1f}"
        for i, v in enumerate(values)
    )
    label = f"layer {head['layer']}, head {head['head']}, largest at {head['peak']:+d}"
    return (
        f'<button type="button" class="head{"" if cares else " still"}" aria-pressed="false" '
        f'aria-label="{label}"><svg viewBox="0 0 64 34" aria-hidden="true"><line class="axis" '
        f'x1="32" x2="32" y1="0" y2="34"/><path class="curve" d="{points}"/></svg></button>'
    )


def race_chart(race: dict[str, Any], task: str) -> str:
    """Return right answers against length, a line for each method."""
    rows = [row for row in race["rows"] if row["task"] == task]
    lengths = race["lengths"]
    width, height, left, bottom = 460, 260, 52, 34
    places = [left + i * (width - left - 20) / (len(lengths) - 1) for i in range(len(lengths))]
    drawn = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _up(share, height, bottom)
        drawn.append(f'<line class="axis" x1="{left}" x2="{width - 12}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for x, length in zip(places, lengths, strict=True):
        drawn.append(f'<text x="{x}" y="{height - 14}" text-anchor="middle">{length}</text>')
    for colour, row in zip(LINES, rows, strict=False):
        points = [
            (x, _up(share, height, bottom))
            for x, share in zip(places, row["accuracy"].values(), strict=True)
            if share is not None
        ]
        path = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
        drawn.append(
            f'<path d="{path}" fill="none" stroke="var(--{colour})" stroke-width="2.2"/>'
            + "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="var(--{colour})"/>'
                for x, y in points
            )
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="right answers in {task} '
        f'against tokens">{"".join(drawn)}</svg>'
    )


def _up(share: float, height: int, bottom: int) -> float:
    return round(10 + (1 - share) * (height - bottom - 10), 1)


def legend(names: Sequence[str]) -> str:
    """Return which colour is which name."""
    return '<div class="legend">' + "".join(
        f'<span><i style="background:var(--{colour})"></i>{escape(name)}</span>'
        for colour, name in zip(LINES, names, strict=False)
    ) + "</div>"  # fmt: skip
