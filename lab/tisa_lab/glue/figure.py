"""The numbers of Table 3 as a figure: every seed a dot, every median a line."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tisa_lab.glue.summary import Part
from tisa_lab.glue.tasks import task_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(parts: Sequence[Part]) -> "Figure":
    """Return a panel for each part and task: dots are seeds, bars medians, a cross is missing."""
    from matplotlib.figure import Figure

    columns = max(len(part.tasks) for part in parts)
    deepest = max(len(part.variants) for part in parts)
    height = (0.9 + 0.24 * deepest) * len(parts)
    made = Figure(figsize=(2.6 + 1.9 * columns, max(2.4, height)), layout="constrained")
    panels = made.subplots(len(parts), columns, squeeze=False)
    for line, part in zip(panels, parts, strict=True):
        names = list(dict.fromkeys([part.baseline, *(c.variant for c in part.variants)]))
        for place, panel in enumerate(line):
            if place >= len(part.tasks):
                panel.axis("off")
                continue
            task = part.tasks[place]
            _panel(panel, part, task, names)
            panel.set_yticks(range(len(names)), names if place == 0 else [""] * len(names))
            panel.set_title(task_named(task).title, fontsize=9)
        line[0].set_ylabel(f"({part.letter}) {Path(part.model).name}", fontsize=8)
    made.suptitle("dev score × 100: dots are seeds, bars medians; dashed: with its positions",
                  fontsize=8)  # fmt: skip
    return made


def _panel(panel: "object", part: Part, task: str, names: list[str]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(panel, Axes)
    for height, name in enumerate(names):
        entry = part.entry(name, task)
        if not entry.scores:
            panel.text(0.5, height, "missing", transform=panel.get_yaxis_transform(), fontsize=6,
                       ha="center", va="center", color="0.5")  # fmt: skip
            continue
        values = list(entry.scores.values())
        panel.plot(values, [height] * len(values), "o", ms=3, alpha=0.6, color="tab:blue")
        panel.plot([entry.median], [height], "|", ms=11, mew=2, color="black")
    original = part.original.get(task)
    if part.letter == "b" and original is not None and original.scores:
        panel.axvline(original.median, color="0.4", ls="--", lw=0.8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.tick_params(labelsize=7)
    panel.grid(axis="x", lw=0.3)
