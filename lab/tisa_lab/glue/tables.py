"""The numbers of Table 3 as Markdown, LaTeX, CSV and plain data."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tisa_lab.glue.record import Record
from tisa_lab.glue.summary import Difference, Entry, Part
from tisa_lab.glue.tasks import task_named

MISSING = "missing"
CAPTION = {
    "a": "with position embeddings",
    "b": "without position embeddings",
}
METRIC_NAMES = {
    "accuracy": "accuracy", "f1": "F1", "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
}  # fmt: skip
# A model may have any name that a folder can have.
TEX = str.maketrans({
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "%_&#${}"}, "Δ": r"$\Delta$", "–": "--",
})  # fmt: skip


def rows(part: Part) -> list[tuple[str, list[str]]]:
    """Return each row of a table: its name, and a text for each task."""
    names = [cell.variant for cell in part.variants]
    if part.baseline not in names:
        names.insert(0, part.baseline)
    found = [(name, [_entry(part.entry(name, task)) for task in part.tasks]) for name in names]
    gains = [part.gain(task) for task in part.tasks]
    if any(gain is not None for gain in gains):
        found.append(
            ("Δ (its S)", [MISSING if g is None else f"{_signed(g.difference)} ({g.variant})"
                           for g in gains])
        )  # fmt: skip
        found.append(("Δ%", [MISSING if g is None else f"{g.percent:.1f}" for g in gains]))
    if part.letter == "a":
        return found
    found.append(("lost by removing positions", [_loss(part, task) for task in part.tasks]))
    for cell in part.variants:
        if cell.variant != part.baseline:
            shares = [_share(part, cell.variant, task) for task in part.tasks]
            found.append((f"given back: {cell.variant}", shares))
    for cell in part.variants:
        if cell.fold and cell.num_kernels > 0:
            shares = [_share(part, cell.variant, task, "folded") for task in part.tasks]
            found.append((f"given back from folded on: {cell.variant}", shares))
    return found


def markdown(parts: Sequence[Part], records: Sequence[Record]) -> str:
    """Return all tables as Markdown, with what their numbers mean and where they were made."""
    lines = ["# Table 3: GLUE with and without TISA", ""]
    for part in parts:
        lines += [f"## ({part.letter}) {Path(part.model).name}, {CAPTION[part.letter]}", ""]
        lines.append("| | " + " | ".join(task_named(t).title for t in part.tasks) + " |")
        lines.append("|---" * (len(part.tasks) + 1) + "|")
        lines += [f"| {name} | " + " | ".join(texts) + " |" for name, texts in rows(part)]
        lines.append("")
    return "\n".join([*lines, _explained(parts), "", _made(records), ""])


def latex(parts: Sequence[Part]) -> str:
    """Return all tables as LaTeX (with booktabs)."""
    made = ["% needs \\usepackage{booktabs}"]
    for part in parts:
        title = f"({part.letter}) {Path(part.model).name}, {CAPTION[part.letter]}"
        made += [
            r"\begin{table*}", r"\centering\small", rf"\caption{{{_tex(title)}}}",
            r"\begin{tabular}{l" + "c" * len(part.tasks) + "}", r"\toprule",
            " & ".join(["", *(task_named(t).title for t in part.tasks)]) + r" \\", r"\midrule",
            *(" & ".join(map(_tex, [name, *texts])) + r" \\" for name, texts in rows(part)),
            r"\bottomrule", r"\end{tabular}", r"\end{table*}",
        ]  # fmt: skip
    return "\n".join(made) + "\n"


def table_csv(parts: Sequence[Part]) -> str:
    """Return every cell in a line of its own; a missing one has 0 seeds and empty fields."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, cell in enumerate(table_data(parts)):
        del cell["scores"]
        if number == 0:
            writer.writerow(cell)
        writer.writerow([_plain(value) for value in cell.values()])
    return text.getvalue()


def table_data(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return every cell as plain data; a missing one has no scores, and None for its numbers."""
    found = []
    for part in parts:
        for task in part.tasks:
            for name in dict.fromkeys([part.baseline, *(c.variant for c in part.variants)]):
                entry = part.entry(name, task)
                above = part.difference(name, task)
                share = part.given_back(name, task) if part.letter == "b" else None
                found.append(
                    {
                        "model": part.model,
                        "part": part.letter,
                        "task": task,
                        "metric": task_named(task).main_metric,
                        "variant": name,
                        "seeds": len(entry.scores),
                        "median": entry.median if entry.scores else None,
                        "min": entry.low if entry.scores else None,
                        "max": entry.high if entry.scores else None,
                        **_numbers("difference", "difference", above),
                        **_numbers("given_back_percent", "given_back", share),
                        "scores": entry.scores,
                    }
                )
    return found


def _numbers(name: str, prefix: str, found: Difference | None) -> dict[str, float | None]:
    low, high = (found and found.interval) or (None, None)
    value = None if found is None else found.value
    return {name: value, f"{prefix}_low": low, f"{prefix}_high": high}


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else str(value)


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


def _share(part: Part, variant: str, task: str, base: str | None = None) -> str:
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


def _tex(text: str) -> str:
    return text.translate(TEX)
