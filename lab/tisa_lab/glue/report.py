"""The numbers of Table 3 as Markdown, LaTeX, CSV, plain data and a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tisa.packages import needed
from tisa_lab import tables
from tisa_lab.glue.cell import FOLDED, ZEROED, Record, Variant
from tisa_lab.glue.numbers import Difference, Entry, Part
from tisa_lab.glue.tasks import task_named

MISSING = "missing"
CAPTION = {"a": "with position embeddings", "b": "without position embeddings"}
METRIC_NAMES = {
    "accuracy": "accuracy", "f1": "F1", "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
}  # fmt: skip


def rows(part: Part) -> list[tuple[str, list[str]]]:
    """Return each row of a table: its name, and a text for each task."""
    found = [
        (variant.label, [_entry(part.entry(variant, task)) for task in part.tasks])
        for variant in part.rows
    ]
    gains = [part.gain(task) for task in part.tasks]
    if any(gain is not None for gain in gains):
        found.append(
            ("Δ (its S)", [MISSING if g is None else f"{_signed(g.difference)} ({g.variant.label})"
                           for g in gains])
        )  # fmt: skip
        found.append(("Δ%", [MISSING if g is None else f"{g.percent:.1f}" for g in gains]))
    if part.letter == "a":
        return found
    found.append(("lost by removing positions", [_loss(part, task) for task in part.tasks]))
    others = [variant for variant in part.variants if variant != part.baseline]
    folded = [variant for variant in others if variant.fold and variant.num_kernels > 0]
    for told, base, some in (("", ZEROED, others), (" from folded on", FOLDED, folded)):
        for variant in some:
            shares = [_share(part, variant, task, base) for task in part.tasks]
            found.append((f"given back{told}: {variant.label}", shares))
    return found


def markdown(parts: Sequence[Part], records: Sequence[Record]) -> str:
    """Return all tables as Markdown, with what their numbers mean and where they were made."""
    pieces = ["# Table 3: GLUE with and without TISA"]
    for part in parts:
        pieces += [f"## {_title(part)}", tables.markdown(*_table(part))]
    return "\n\n".join([*pieces, _explained(parts), _made(records)]) + "\n"


def latex(parts: Sequence[Part]) -> str:
    """Return all tables as LaTeX (with booktabs)."""
    made = [tables.latex(*_table(part), _title(part)) for part in parts]
    return "\n".join(["% needs \\usepackage{booktabs}", *made]) + "\n"


def table_csv(parts: Sequence[Part]) -> str:
    """Return every cell in a line of its own; a missing one has 0 seeds and empty fields."""
    return tables.comma_separated(
        [{k: v for k, v in cell.items() if k != "scores"} for cell in table_data(parts)]
    )


def table_data(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return every cell as plain data; a missing one has no scores, and None for its numbers."""
    found = []
    for part in parts:
        for task in part.tasks:
            for variant in part.rows:
                entry = part.entry(variant, task)
                above = part.difference(variant, task)
                share = part.given_back(variant, task) if part.letter == "b" else None
                cell = {
                    "model": part.model,
                    "part": part.letter,
                    "task": task,
                    "metric": task_named(task).main_metric,
                    "variant": variant.label,
                    "seeds": len(entry.scores),
                    "median": entry.median if entry.scores else None,
                    "min": entry.low if entry.scores else None,
                    "max": entry.high if entry.scores else None,
                    **_numbers("difference", "difference", above),
                    **_numbers("given_back_percent", "given_back", share),
                    "scores": entry.scores,
                }
                found.append(cell)
    return found


def _numbers(name: str, prefix: str, found: Difference | None) -> dict[str, float | None]:
    low, high = (found and found.interval) or (None, None)
    value = None if found is None else found.value
    return {name: value, f"{prefix}_low": low, f"{prefix}_high": high}


def _table(part: Part) -> tuple[list[str], list[list[str]]]:
    header = ["", *(task_named(task).title for task in part.tasks)]
    return header, [[name, *texts] for name, texts in rows(part)]


def _title(part: Part) -> str:
    return f"({part.letter}) {Path(part.model).name}, {CAPTION[part.letter]}"


def _entry(entry: Entry) -> str:
    if not entry.scores:
        return MISSING
    if len(entry.scores) == 1:
        return f"{entry.median:.1f} (n = 1)"
    return f"{entry.median:.1f} [{entry.low:.1f}–{entry.high:.1f}] (n = {len(entry.scores)})"


def _signed(found: Difference) -> str:
    text = f"{found.value:+.1f}"
    if found.interval is not None:
        text += f" [{found.interval[0]:+.1f}, {found.interval[1]:+.1f}]"
    return text


def _loss(part: Part, task: str) -> str:
    loss = part.loss(task)
    if loss is None:
        return MISSING
    return _signed(loss) + ("" if part.loss_is_clear(task) else " *")


def _share(part: Part, variant: Variant, task: str, base: Variant) -> str:
    share = part.given_back(variant, task, base)
    if share is None:
        loss = part.loss(task, base)
        there = loss is not None and part.entry(variant, task).scores
        return "–" if there else MISSING
    text = f"{share.value:.0f} %"
    if not part.loss_is_clear(task, base):
        return text + " *"
    if share.interval is None:
        return text
    return text + f" [{share.interval[0]:.0f}, {share.interval[1]:.0f}]"


def _explained(parts: Sequence[Part]) -> str:
    tasks = dict.fromkeys(task for part in parts for task in part.tasks)
    scored = "; ".join(
        f"{task_named(t).title}: {METRIC_NAMES[task_named(t).main_metric]}" for t in tasks
    )
    return (
        "Dev sets, × 100: median over seeds [least–largest] (n = number of seeds). "
        f"{scored}. Δ is the largest gain of a row with random kernels over the first row, with "
        "its S: picked on the dev set, so too high by as much as chance gives. Intervals are 95 % "
        "bootstraps over the seeds that all rows in question have; with five or fewer of them they "
        "are too narrow. "
        "Δ% = Δ/(100 − first row). Given back: (row − zeroed)/(baseline of (a) − zeroed), in "
        "medians; *from folded on* has the row `folded` in place of zeroed, and is the kernels' "
        "own part. * marks a loss that is not larger than the spread of either row: its share "
        "means nothing. – : nothing was lost."
    )


def _made(records: Sequence[Record]) -> str:
    def all_of(name: str) -> str:
        return ", ".join(sorted({str(r.surroundings.get(name, "unknown")) for r in records}))

    hours = sum(r.seconds["total"] for r in records) / 3600
    return (
        f"{len(records)} runs, {hours:.2f} hours; commit {all_of('commit')}; device "
        f"{all_of('device')}; torch {all_of('torch')}; transformers {all_of('transformers')}; "
        f"made {all_of('date')}."
    )


def figure(parts: Sequence[Part]) -> Any:
    """Return a panel for each part and task: dots are seeds, bars medians, a cross is missing."""
    matplotlib = needed("matplotlib.figure", "the figure of Table 3", "tisa-lab")
    columns = max(len(part.tasks) for part in parts)
    deepest = max(len(part.variants) for part in parts)
    height = (0.9 + 0.24 * deepest) * len(parts)
    made = matplotlib.Figure(figsize=(2.6 + 1.9 * columns, max(2.4, height)), layout="constrained")
    panels = made.subplots(len(parts), columns, squeeze=False)
    for line, part in zip(panels, parts, strict=True):
        names = [variant.label for variant in part.rows]
        for place, panel in enumerate(line):
            if place >= len(part.tasks):
                panel.axis("off")
                continue
            task = part.tasks[place]
            _panel(panel, part, task)
            panel.set_yticks(range(len(names)), names if place == 0 else [""] * len(names))
            panel.set_title(task_named(task).title, fontsize=9)
        line[0].set_ylabel(f"({part.letter}) {Path(part.model).name}", fontsize=8)
    made.suptitle("dev score × 100: dots are seeds, bars medians; dashed: with its positions",
                  fontsize=8)  # fmt: skip
    return made


def _panel(panel: Any, part: Part, task: str) -> None:
    for height, variant in enumerate(part.rows):
        entry = part.entry(variant, task)
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
    panel.set_ylim(len(part.rows) - 0.5, -0.5)
    panel.tick_params(labelsize=7)
    panel.grid(axis="x", lw=0.3)
