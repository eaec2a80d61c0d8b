"""`tisa criteria`: the paper's Table 1, measured."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    methods: Annotated[
        str | None, typer.Option(help="Methods, with commas between them; by default all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for criteria.md, criteria.json and criteria.png.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random parameters and contents.")] = 0,
    device: Annotated[str, typer.Option(help="Where to measure; the numbers are float64.")] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record instead of the table.")
    ] = False,
) -> None:
    """Measure the six criteria of Table 1 for every position method.

    Prints each mark with the paper's beside it and the number behind it, and says where they
    differ and why. About a minute on two cores.

    Examples: `tisa criteria`, `tisa criteria --methods tisa,rotary --out table1`
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tisa.experiments.criteria.paper import CRITERIA
    from tisa.experiments.criteria.settings import Settings
    from tisa.experiments.criteria.table import ordered, run

    names = ordered(None if methods is None else [m.strip() for m in methods.split(",")])
    shown = " ".join(["tisa", *sys.argv[1:]])
    columns = (TextColumn("{task.description:46}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    # On standard error: what is piped on is the result alone.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(names) * len(CRITERIA), completed=-1)
        record = run(
            Settings(seed=seed, device=device),
            names,
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
            print(f"written to {out}: criteria.md, criteria.json, criteria.png")


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record as JSON, Markdown and a figure into a folder."""
    from tisa.experiments.criteria.figure import figure
    from tisa.experiments.criteria.report import markdown

    drawn = figure(record)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (out / "criteria.json").write_text(text)
    (out / "criteria.md").write_text(markdown(record))
    drawn.savefig(out / "criteria.png", dpi=130)


def _print_table(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tisa.experiments.criteria.paper import CRITERIA
    from tisa.experiments.criteria.report import disagreements, mark, shown, threshold

    console = Console(highlight=False, soft_wrap=False)
    table = Table(caption="measured mark, the paper's in brackets, the number behind the first")
    table.add_column("method")
    for criterion in CRITERIA:
        table.add_column(f"{criterion}\n[dim]{threshold(criterion, record['settings'])}[/dim]")
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
    total = record["agreement"]
    console.print(f"{total['agree']} of {total['of']} marks agree with the paper's.")
    for row, criterion, cell in disagreements(record):
        console.print(
            f"- {row}, {criterion}: measured {mark(cell['mark'])}, paper {mark(cell['paper'])}: "
            f"{cell['evidence']}", soft_wrap=True,
        )  # fmt: skip
