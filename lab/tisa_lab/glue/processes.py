"""Several processes for each cell, as torchrun or accelerate started them: one leads, all train.

The leading process has the folder, the claims and the view; the others are told each cell, train
their share of its batches, and write nothing.
"""

import time
from typing import Any

import torch
from accelerate import PartialState

from tisa_lab.glue.cell import Cell
from tisa_lab.glue.executors import Finished, Settings
from tisa_lab.glue.trainer import Progress
from tisa_lab.glue.training import run

# What the others are told where there is nothing to do now: without it they would give up waiting.
WAIT = "wait"


def is_leader(settings: Settings) -> bool:
    """Join the others; return whether this process is the one that leads."""
    state = PartialState(cpu=settings.device == "cpu" or not torch.cuda.is_available())
    return state.is_main_process


class Leading:
    """One cell after another, in all processes; one that fails ends them all.

    Who fails alone leaves the others waiting for it, and they cannot be called back: so an error is
    not caught, the process ends, and what started it ends the others. Start it again to go on.
    """

    def __init__(self, settings: Settings, progress: Progress | None = None) -> None:
        self.settings = settings
        self.progress = progress
        self._next: Cell | None = None
        self._failed = False

    def free(self) -> int:
        """Return 1, or 0 where a cell waits to be run."""
        return int(self._next is None)

    def submit(self, cell: Cell) -> None:
        """Take a cell, to be run when results are asked for."""
        self._next = cell

    def collect(self) -> list[Finished]:
        """Run the cell that waits."""
        cell, self._next = self._next, None
        if cell is None:
            time.sleep(0.2)
            _told(WAIT)
            return []
        _told(cell)
        self._failed = True
        record = _run(cell, self.settings, self.progress)
        self._failed = False
        return [(cell, record)]

    def close(self) -> None:
        """Let the others go."""
        if not self._failed:
            _told(None)


def follow(settings: Settings) -> None:
    """Train what the leading process says, until there is no more."""
    while (cell := _told(None)) is not None:
        if cell != WAIT:
            _run(cell, settings, None)


def _run(cell: Cell, settings: Settings, progress: Progress | None) -> Any:
    return run(
        cell, data_dir=settings.data_dir, device=settings.device, progress=progress,
        starts=settings.starts,
    )  # fmt: skip


def _told(what: Any) -> Any:
    """Return what the leading process says."""
    said = [what]
    torch.distributed.broadcast_object_list(said, src=0)
    return said[0]
