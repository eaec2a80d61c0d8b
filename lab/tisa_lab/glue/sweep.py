"""A grid in, every cell's record in a folder: whatever is killed, and however many take part."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tisa_lab.glue.cell import Cell
from tisa_lab.glue.executors import Executor, Lost
from tisa_lab.glue.record import Record
from tisa_lab.glue.store import Claim, Store

# A cell whose process is lost (killed for memory, say) is tried so often in one sweep.
TRIES = 3

Together = Callable[[Sequence[Cell]], list[list[Cell]]]


@runtime_checkable
class View(Protocol):
    """What wants to know how a sweep goes."""

    def begin(self, cells: Sequence[Cell], done: set[str]) -> None:
        """Hear which cells there are, and which of them are finished."""

    def started(self, cell: Cell) -> None:
        """Hear that a cell is run."""

    def finished(self, cell: Cell, outcome: Record | Exception) -> None:
        """Hear that it is finished, or failed."""

    def elsewhere(self, cells: Sequence[Cell], done: set[str]) -> None:
        """Hear which cells are left that other processes run, and what all have finished."""


def sweep(
    cells: Sequence[Cell],
    store: Store,
    executor: Executor,
    view: View,
    together: Together | None = None,
) -> list[tuple[Cell, Exception]]:
    """Run every cell that the folder has no record of; return those that failed, with the reason.

    Cells that another process has claimed are waited for, and run here if it dies. A cell that
    failed is not tried again in this sweep, but in the next one. `together` divides cells into
    groups; the executor is then given cells of one group at a time.
    """
    done = store.done()
    view.begin(cells, done)
    waiting = [cell for cell in cells if cell.key not in done]
    claims: dict[Cell, Claim] = {}
    tries: dict[Cell, int] = {}
    failed: list[tuple[Cell, Exception]] = []
    try:
        while waiting or claims:
            for cell in _claimed(waiting, claims, store, executor.free(), together):
                tries[cell] = tries.get(cell, 0) + 1
                view.started(cell)
                executor.submit(cell)
            if not claims:
                view.elsewhere(waiting, store.done())
            finished = executor.collect()
            # All at once: a full disk at the first would else be the end of the others too.
            store.append(*(found for _, found in finished if isinstance(found, Record)))
            for cell, outcome in finished:
                if isinstance(outcome, Lost) and tries[cell] < TRIES:
                    waiting.append(cell)
                elif not isinstance(outcome, Record):
                    failed.append((cell, outcome))
                view.finished(cell, outcome)
                claims.pop(cell).release()
            done = store.done()
            waiting = [cell for cell in waiting if cell.key not in done]
    finally:
        executor.close()
        for claim in claims.values():
            claim.release()
    return failed


def _claimed(
    waiting: list[Cell],
    claims: dict[Cell, Claim],
    store: Store,
    room: int,
    together: Together | None,
) -> list[Cell]:
    """Return as many cells as there is room for that are ours now; take them off the list."""
    taken: list[Cell] = []
    for group in [list(waiting)] if together is None else together(waiting):
        for cell in group:
            if len(taken) == room:
                break
            claim = store.claim(cell)
            if claim is not None:
                claims[cell] = claim
                taken.append(cell)
                waiting.remove(cell)
        if taken:
            break
    return taken
