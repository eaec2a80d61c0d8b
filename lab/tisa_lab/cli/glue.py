"""`tisa-lab glue`: the paper's Table 3, cell by cell."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from tisa.cli.options import KeywordsOf
from tisa.store import check_new_folder
from tisa_lab.glue.cell import Cell, Record, grid
from tisa_lab.glue.table3 import Line, Place, is_following, make_starts, plan, run_cells
from tisa_lab.glue.tasks import Recipe, task_named
from tisa_lab.sweep import Records
from tisa_lab.view import spoken, view_for

# A recipe in which only what is given replaces the task's own.
Changes: Any = make_dataclass(
    "Changes",
    [(field.name, field.type | None, None) for field in fields(Recipe)],  # type: ignore[operator]
    frozen=True,
    namespace={"__doc__": Recipe.__doc__},
)
UNCHANGED = Changes()
HERE = Place()


def command(
    model: tuple[str, ...],
    /,
    *,
    out: Path,
    tasks: tuple[str, ...] = ("sst-2", "mnli", "qqp", "sts-b", "cola", "mrpc", "qnli", "rte"),
    rows: str = "",
    seeds: int = 5,
    seed: int = 0,
    recipe: Changes = UNCHANGED,
    place: Place = HERE,
    only_starts: bool = False,
    as_json: bool = False,
    dry_run: bool = False,
    **variants: Annotated[Any, KeywordsOf("tisa_lab.glue.cell:grid")],
) -> None:
    """Fine-tune a model on GLUE with and without TISA: the cells of Table 3.

    Writes a line to OUT/records.jsonl for each finished run. Interrupt it, kill it, start it again,
    start it twice: every cell is run once. `tisa-lab report OUT` makes the table. The recipe of
    each task is ALBERT's own, but for what is given here.

    Examples: `tisa-lab glue albert-base-v2 --out table3`,
    `tisa-lab glue MODEL --tasks cola,rte --data-dir glue --seeds 3 --epochs 3 --out few --dry-run`

    Args:
        model: Folder or name on the hub; several with commas.
        out: Folder of the records; what is in it is not repeated.
        tasks: Tasks, with commas between them.
        rows: Rows of the table by name, with ; between, instead of all combinations.
        seeds: How many seeds, from the first on.
        seed: The first of the seeds.
        recipe: What replaces the tasks' own recipes.
        place: Where cells are run.
        **variants: Of which combinations the table's rows are made.
        only_starts: Fit what cells start from, and train nothing.
        as_json: Print the records of these cells (or the plan) as JSON.
        dry_run: Print what would be run, and its cost.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    cells = grid(
        # A shell that completes a folder's name adds a slash: the same model, and the same cells.
        [name.rstrip("/") or name for name in model],
        tasks,
        rows=[row for row in rows.split(";") if row.strip()],
        seeds=range(seed, seed + seeds),
        **variants,
        **{name: value for name, value in asdict(recipe).items() if value is not None},
    )
    if is_following(place, out, does_run=not (dry_run or only_starts)):
        return
    check_new_folder(out, own=("records.jsonl", "claims", "starts"))
    records = Records(out, Record)
    # Reads data and models: what is wrong with them is said before hours are spent.
    place.check(cells)
    lines = plan(cells, records.all(), place.data_dir)
    if dry_run and as_json:
        print(json.dumps([asdict(line) for line in lines]))
    elif dry_run:
        _print_plan(lines, place.side_by_side)
        if place.executor == "stacked":
            _print_stacks(place.stacks([c for c in cells if c.key not in records.done()]))
    elif only_starts and as_json:
        made = make_starts(cells, out, place, view_for().say)
        print(json.dumps(made, ensure_ascii=False))
    elif only_starts:
        make_starts(cells, out, place, print)
    else:
        _run(cells, records, place, as_json)


def _run(cells: list[Cell], records: Records[Record], place: Place, as_json: bool) -> None:
    failed = run_cells(cells, records.folder, place, view_for())
    if as_json:
        keys = {cell.key for cell in cells}
        made = [record.to_dict() for record in records.all() if record.key in keys]
        print(json.dumps(made, ensure_ascii=False))
    else:
        print(f"{len(cells) - len(failed)} of {len(cells)} cells are in {records.path}")
    if failed:
        raise SystemExit(1)


def _print_plan(lines: list[Line], workers: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("model", "task", "cells", "done", "training rows", "steps left", "tokens left",
                 "operations", "time"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("model", "task") else "right")
    for line in lines:
        table.add_row(
            Path(line.model).name,
            task_named(line.task).title,
            str(line.cells),
            str(line.done),
            f"{line.rows:,}",
            f"{line.steps:,}",
            f"{line.tokens / 1e6:,.2f} M",
            f"{line.flops / 1e15:,.3g} PFLOP",
            "?" if line.seconds is None else spoken(line.seconds / workers),
        )
    Console().print(table)
    left = sum(line.cells - line.done for line in lines)
    total = sum(line.flops for line in lines) / 1e15
    print(f"{left} cells to run, {total:,.3g} PFLOP (6 for each parameter and token).")
    seconds = [line.seconds for line in lines]
    if None in seconds:
        print("Times are known after the first finished run in the folder.")
    elif left:
        told = spoken(sum(filter(None, seconds)) / workers)
        print(f"About {told}, from the runs in the folder.")


def _print_stacks(made: Sequence[list[Cell]]) -> None:
    print(f"{len(made)} stacks:")
    for stack in made:
        seeds = sorted({cell.seed for cell in stack})
        print(
            f"  {Path(stack[0].model).name} {task_named(stack[0].task).title}: {len(stack)} cells, "
            f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        )
