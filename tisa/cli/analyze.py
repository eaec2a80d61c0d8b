"""`tisa analyze`: what models know about position, as a table, figures, numbers and a page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tisa.cli.options import KeywordsOf

if TYPE_CHECKING:
    from rich.table import Table

    from tisa.analysis import Analysis


def command(
    models: list[str],
    /,
    *,
    out: Path = Path("report"),
    text: Path | None = None,
    scores: Path | None = None,
    as_json: bool = False,
    **options: Annotated[Any, KeywordsOf("tisa.analysis.whole:analyze", without=("progress",))],
) -> None:
    """Show what pretrained models know about position.

    Reads weights only, unless --text is given. Local files never touch the network.

        tisa analyze path/to/bert --out report

        tisa analyze bert-v1 bert-v2 --text wiki.txt --json

    Args:
        models: Folders, weight files beside their config.json, or names on the hub.
        out: Folder for index.html, numbers.json and the figures.
        text: Run the models on this text: what attention does with distance.
        scores: CSV with the columns model and score: Toeplitzness against it.
        as_json: Print all numbers as JSON instead of a table.
        **options: As `tisa.analysis.analyze` has them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from tisa.analysis.report import check_folder, numbers_of_all, write_report
    from tisa.analysis.scores import read_scores
    from tisa.analysis.text import read_text
    from tisa.analysis.whole import analyze
    from tisa.store import alone

    check_folder(out)
    given = read_text(text) if text is not None else None
    column = read_scores(scores, models) if scores is not None else None
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with alone(out), Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(step: str) -> None:
            bar.update(task, advance=1, description=step)

        found = []
        for number, model in enumerate(models, 1):
            label = f"{number}/{len(models)} " if len(models) > 1 else ""
            found.append(
                analyze(
                    model, text=given, **options,
                    progress=lambda step, label=label: tell(label + step),  # type: ignore[misc]
                )
            )  # fmt: skip
        write_report(found, out, scores=column, settings=options, progress=tell)
    if as_json:
        numbers = numbers_of_all(found, settings=options, scores=column)
        print(json.dumps(numbers, ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    console.print(_table(found))
    for one in found:
        if one.curves:
            count = len(one.curves)
            sets = "1 learned curve" if count == 1 else f"{count} learned curves"
            console.print(f"{one.name}: {sets} per head", highlight=False)
    console.print(f"Page, figures and numbers: {out / 'index.html'}", highlight=False)


def _table(found: Sequence["Analysis"]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tisa.analysis.toeplitz import written

    table = Table(
        title="Toeplitz R² of P, beside what chance gives", title_justify="left", box=SIMPLE_HEAD
    )
    table.add_column("model", overflow="fold")
    for name in ("R²", "chance", "off diag.", "chance", "as read", "heads", "dims"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        if one.model is None or one.spectrum is None:
            table.add_row(one.name, *["–"] * 7)
            continue
        whole, read, heads = one.invariance["table"], one.invariance["as_read"], one.heads[0]
        numbers = (whole.r2, whole.null.whole, whole.off_diagonal, whole.null.off_diagonal, read.r2)
        table.add_row(
            one.name,
            *map(written, numbers),
            f"{sum(heads.sensitive)}/{len(heads.sensitive)}",
            f"{one.spectrum.dimensions()}/{one.model.positions.shape[1]}",
        )
    table.caption = (
        "heads: position-sensitive ones of the first layer; dims: for 90 % of the table's variance"
    )
    table.caption_justify = "left"
    return table
