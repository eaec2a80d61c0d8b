"""`tisa-lab criteria`: the paper's Table 1, measured."""

import json
from pathlib import Path
from typing import Any


def command(
    *,
    methods: tuple[str, ...] | None = None,
    out: Path | None = None,
    seed: int = 0,
    variations: bool = False,
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Measure the six criteria of Table 1 for every position method.

    Prints each mark with the paper's beside it and the number behind it, and says where they
    differ and why. About a minute on two cores.

    Examples: `tisa-lab criteria`, `tisa-lab criteria --methods tisa,rotary --out table1`

    Args:
        methods: Methods, by name or as my_file.py:Class, with commas between them; by default all.
        out: Folder for index.html, criteria.md, .json and .png.
        seed: Of the random parameters and contents.
        variations: Again with other random numbers and sizes.
        device: cpu or cuda; by default a GPU where there is one. The numbers are float64.
        as_json: Print the record instead of the table.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tisa.packages import needed
    from tisa.store import own_folder
    from tisa_lab.criteria.paper import CRITERIA
    from tisa_lab.criteria.report import write
    from tisa_lab.criteria.sensitivity import variations as others
    from tisa_lab.criteria.settings import Settings
    from tisa_lab.criteria.table import ordered, run
    from tisa_lab.record import command_line

    if out is not None:
        # Before the minute of measuring, not after it.
        needed("matplotlib.figure", "figures", "tisa-lab")
    settings = Settings(seed=seed, device=device)
    names = ordered(methods)
    shown = command_line()
    columns = (TextColumn("{task.description:46}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with own_folder(out, own=("criteria.json",)):
        # On standard error: what is piped on is the result alone.
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            rounds = 1 + len(others(settings)) if variations else 1
            task = bar.add_task("", total=rounds * len(names) * len(CRITERIA), completed=-1)
            record = run(
                settings,
                names,
                varied=variations,
                command=shown,
                progress=lambda method, criterion: bar.update(
                    task, advance=1, description=f"{method}: {criterion}"
                ),
            )
        if out is not None:
            write(record, out)
    if as_json:
        print(json.dumps(record, indent=1, ensure_ascii=False))
    else:
        _print_table(record)
        if out is not None:
            print(f"written to {out}: index.html, criteria.md, criteria.json, criteria.png")


def _print_table(record: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from tisa_lab.criteria.paper import CRITERIA
    from tisa_lab.criteria.report import disagreements, mark, shown, threshold

    console = Console(highlight=False)
    caption = "measured mark, the paper's in brackets, the number behind the first"
    table = Table(caption=caption, box=SIMPLE, padding=(0, 1, 0, 0))
    for header in ("method", *CRITERIA):
        table.add_column(header, overflow="fold")
    for row in record["rows"]:
        cells = []
        for criterion in CRITERIA:
            cell = row["cells"][criterion]
            paper = "" if cell["paper"] is None else f" ({mark(cell['paper'])})"
            text = f"{mark(cell['mark'])}{paper} {shown(criterion, cell)}"
            differs = cell["paper"] is not None and cell["mark"] != cell["paper"]
            cells.append(f"[bold yellow]{text}[/]" if differs else text)
        table.add_row(row["row"], *cells)
    console.print(table)
    for criterion in CRITERIA:
        console.print(f"{criterion} ✓: {threshold(criterion, record['settings'])}")
    total = record["agreement"]
    console.print(f"{total['agree']} of {total['of']} marks agree with the paper's.")
    for row, criterion, cell in disagreements(record):
        console.print(
            f"- {row}, {criterion}: measured {mark(cell['mark'])}, paper {mark(cell['paper'])}: "
            f"{cell['evidence']}", soft_wrap=True,
        )  # fmt: skip
    for label, variation in record["variations"].items():
        changed = ", ".join(variation["changed"]) or "no mark changes"
        console.print(f"{label}: {changed}", soft_wrap=True)
