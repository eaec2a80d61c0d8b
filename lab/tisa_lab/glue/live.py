"""A sweep as one sees it: what runs, what is done, the time left."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tisa_lab.glue.cell import Cell
from tisa_lab.glue.plan import seconds_for
from tisa_lab.glue.record import Record
from tisa_lab.glue.tasks import task_named
from tisa_lab.sweep import Records

# Cells that run and have a line of their own.
SHOWN = 8


class LiveView:
    """A view in a terminal that changes in place; in a file, a line for each finished cell."""

    def __init__(self, records: Records[Record], workers: int, console: Console) -> None:
        self.records = records
        self.workers = workers
        self.console = console
        self._cells: Sequence[Cell] = ()
        self._done: set[str] = set()
        self._running: dict[Cell, float] = {}
        self._records: list[Record] = []
        self._step: tuple[int, int] | None = None
        self._note = ""
        self._live = Live(
            get_renderable=self.picture, console=console, refresh_per_second=2, transient=True
        )

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def begin(self, cells: Sequence[Cell], done: set[str]) -> None:
        """Take note of all cells."""
        self._cells = cells
        self._done = done & {cell.key for cell in cells}
        self._records = self.records.all()
        self.console.print(f"{len(cells)} cells, {len(self._done)} of them done before")

    def started(self, cell: Cell) -> None:
        """Show a cell among those that run."""
        self._running[cell] = time.monotonic()
        self._note = ""

    def finished(self, cell: Cell, outcome: Record | Exception) -> None:
        """Say what came of a cell."""
        self._running.pop(cell, None)
        self._step = None
        if isinstance(outcome, Record):
            self._done = self._done | {cell.key}
            self._records.append(outcome)
            name = task_named(cell.task).main_metric
            said = f"{name} {outcome.metrics[name]:.1f}, {spoken(outcome.seconds['total'])}"
            line = Text(f"{len(self._done)}/{len(self._cells)} {cell.label}: {said}")
        else:
            line = Text(f"failed: {cell.label}: {outcome}", style="red")
        # Never broken in two: in a file it is a line for each cell, to be searched.
        self.console.print(line, soft_wrap=True)

    def elsewhere(self, cells: Sequence[Cell], done: set[str]) -> None:
        """Say that the rest is run by other processes."""
        self._done = done & {cell.key for cell in self._cells}
        if cells and not self._note:
            self._note = f"{len(cells)} cells are run by other processes; waiting for them"
            self.console.print(self._note)

    def step(self, done: int, steps: int) -> None:
        """Show how far the one cell is that runs in this process."""
        self._step = (done, steps)

    def picture(self) -> Any:
        """Return what is shown now."""
        table = Table(box=None, show_header=False, padding=(0, 2))
        for cell, since in list(self._running.items())[:SHOWN]:
            at = "" if self._step is None else f"step {self._step[0]:,} of {self._step[1]:,}"
            table.add_row("runs", cell.label, spoken(time.monotonic() - since), at)
        if len(self._running) > SHOWN:
            table.add_row("", f"and {len(self._running) - SHOWN} beside them", "", "")
        left = [c for c in self._cells if c.key not in self._done]
        seconds = seconds_for(left, self._records)
        told = "" if seconds is None else f", about {spoken(seconds / self.workers)} left"
        bar = ProgressBar(total=max(1, len(self._cells)), completed=len(self._done), width=40)
        return Group(table, bar, f"{len(self._done)} of {len(self._cells)} cells done{told}")


def spoken(seconds: float) -> str:
    """Return a time as people say it."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
