"""A record of `tisa-lab long` as tables, a figure and files."""

from pathlib import Path
from typing import Any

from tisa.packages import needed
from tisa_lab import tables
from tisa_lab.long.readings import FOLD, ONE, SEVERAL, reference_of
from tisa_lab.record import write_record

TITLES = {
    "passkey": "Passkey", "needle": "Needle", "article": "Article, asked with a sentence of it",
    "article, last eighth": "Article, asked with a sentence of its last eighth",
    "article, removed": "Article, asked with a sentence that was taken out of it",
}  # fmt: skip


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record, its tables and its figure into a folder."""
    write_record(record, out, "long", {"long.md": markdown(record)}, figure(record), indent=None)


def markdown(record: dict[str, Any]) -> str:
    """Return a table for each model, task and kind of vectors."""
    lines = []
    for one in record["models"]:
        lines += [f"# {one['model']}, made for {one['limit']:,} tokens", ""]
        for task in _in_order(record, "task"):
            for kind in (ONE, SEVERAL):
                cells = table(record, one["model"], task, kind)
                if len(cells) > 1:
                    about = f"{TITLES[task]}: {kind} of each document"
                    lines += [f"## {about}", "", tables.markdown(cells[0], cells[1:]), ""]
    reference = " or ".join(
        reference_of(kind, record["config"]["chunk"]) for kind in (ONE, SEVERAL)
    )
    return "\n".join([*lines, (
        "Per cent of the queries that find their document first; in brackets by how many points "
        f"that is more than {reference}, with a 95 % interval (pairs of answers to the same "
        "query, drawn by document). – where a way is not another one's at that length."
    ), ""])  # fmt: skip


def table(record: dict[str, Any], model: str, task: str, kind: str) -> list[list[str]]:
    """Return the cells, header first."""
    some = [
        row for row in record["rows"]
        if (row["model"], row["task"], row["kind"]) == (model, task, kind)
    ]  # fmt: skip
    lengths = sorted({row["length"] for row in some})
    found = {(row["row"], row["length"]): row for row in some}
    cells = [["", *(f"{length:,} tokens" for length in lengths)]]
    for name in dict.fromkeys(row["row"] for row in some):
        cells.append([name, *(cell(found.get((name, length))) for length in lengths)])
    return cells


def cell(row: dict[str, Any] | None) -> str:
    """Return an accuracy, and its difference to the reference."""
    if row is None:
        return "–"
    told = f"{100 * row['accuracy']:.0f}"
    if "against" not in row:
        return told
    difference, low, high = (100 * row["against"][name] for name in ("difference", "low", "high"))
    return f"{told} ({difference:+.0f}: {low:+.0f} … {high:+.0f})".replace("-", "−")


def figure(record: dict[str, Any]) -> Any:
    """Return the figure: accuracy by length, a panel for each task, one vector above several."""
    figures = needed("matplotlib.figure", "figures", "tisa-lab")
    from matplotlib import colormaps

    tasks, models = _in_order(record, "task"), [one["model"] for one in record["models"]]
    kinds = [(model, kind) for model in models for kind in (ONE, SEVERAL)]
    made = figures.Figure(
        figsize=(2.5 * len(tasks) + 3.4, 2.6 * len(kinds) + 0.4), layout="constrained"
    )
    axes = made.subplots(len(kinds), len(tasks), squeeze=False, sharex=True, sharey=True)
    limits = {one["model"]: one["limit"] for one in record["models"]}
    for line, (model, kind) in zip(axes, kinds, strict=True):
        names = [
            name for name in _in_order(record, "row", model=model, kind=kind)
            if not name.endswith("scaled")
        ]  # fmt: skip
        for axis, task in zip(line, tasks, strict=True):
            for number, name in enumerate(names):
                points = sorted(
                    (row["length"], 100 * row["accuracy"]) for row in record["rows"]
                    if (row["model"], row["task"], row["row"]) == (model, task, name)
                )  # fmt: skip
                if points:
                    is_ours = name.split(", ")[-1] in (*record["config"]["converted"], FOLD)
                    axis.plot(
                        *zip(*points, strict=True), label=name, marker="o", markersize=3.5,
                        linewidth=1.8 if is_ours else 1.1,
                        color=colormaps["tab10"](number % 10) if number else "black",
                        linestyle="-" if is_ours else "--",
                    )  # fmt: skip
            axis.axvline(limits[model], color="0.4", linewidth=0.9, linestyle=":")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
            axis.grid(alpha=0.25, linewidth=0.5)
            axis.tick_params(labelsize=8)
        line[0].set_ylabel(f"{model}\n{kind}: % found first", fontsize=8)
        line[-1].legend(
            *line[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.02, 0.5),
            fontsize=7, frameon=False,
        )  # fmt: skip
    for axis, task in zip(axes[0], tasks, strict=True):
        axis.set_title(task, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("tokens", fontsize=8)
    axes[0][0].set_ylim(-2, 103)
    return made


def _in_order(record: dict[str, Any], name: str, **of: str) -> list[str]:
    rows = (row for row in record["rows"] if all(row[key] == of[key] for key in of))
    return list(dict.fromkeys(row[name] for row in rows))
