"""Where cells are run: in this process, or in several beside it; `stacked.py` and `on_ray.py` too.

An executor is given cells while it has room for more, and asked for what is finished.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tisa_lab.glue.cell import Cell
from tisa_lab.glue.record import Record
from tisa_lab.glue.trainer import Progress
from tisa_lab.glue.training import check_device, run


@dataclass(frozen=True)
class Settings:
    """What is the same for all cells and no part of what they measure."""

    data_dir: str | Path | None = None
    device: str | None = None
    # Folder of what cells start from (`starts.py`); None keeps nothing.
    starts: str | Path | None = None

    def __post_init__(self) -> None:
        check_device(self.device)


class Lost(Exception):  # noqa: N818
    """A cell's process ended in the middle of it; it may go well the next time."""


# A cell, and its record or the reason why there is none.
Finished = tuple[Cell, Record | Exception]


@runtime_checkable
class Executor(Protocol):
    """What a sweep needs of the place where cells are run."""

    def free(self) -> int:
        """Return how many more cells it would take now."""

    def submit(self, cell: Cell) -> None:
        """Take a cell."""

    def collect(self) -> list[Finished]:
        """Return what is finished since the last call; wait a moment where nothing is."""

    def close(self) -> None:
        """Stop; what is not finished is lost."""


class InProcess:
    """One cell after another, here."""

    def __init__(self, settings: Settings, progress: Progress | None = None) -> None:
        self.settings = settings
        self.progress = progress
        self._next: Cell | None = None

    def free(self) -> int:
        """Return 1, or 0 where a cell waits to be run."""
        return int(self._next is None)

    def submit(self, cell: Cell) -> None:
        """Take a cell, to be run when results are asked for."""
        self._next = cell

    def collect(self) -> list[Finished]:
        """Run the cell that waits."""
        if self._next is None:
            time.sleep(0.2)
            return []
        cell, self._next = self._next, None
        return [(cell, outcome(cell, self.settings, self.progress))]

    def close(self) -> None:
        """Do nothing: nothing runs between two calls."""


class Pool:
    """Several processes side by side on this machine; they end with the one that started them."""

    def __init__(self, settings: Settings, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers: expected at least 1, got {workers}")
        self.settings = settings
        self.workers = workers
        self._running: dict[Future[Record | Exception], Cell] = {}
        self._started: ProcessPoolExecutor | None = None

    def free(self) -> int:
        """Return how many processes have nothing to do."""
        return self.workers - len(self._running)

    def submit(self, cell: Cell) -> None:
        """Give a cell to a process that has nothing to do."""
        if self._started is None:
            import torch

            # Threads as here: sums in another order would be other numbers.
            self._started = ProcessPoolExecutor(
                self.workers,
                multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(os.getpid(), torch.get_num_threads()),
            )
        with _deaf_to_ctrl_c():
            self._running[self._started.submit(outcome, cell, self.settings, None)] = cell

    def collect(self) -> list[Finished]:
        """Return the cells that have ended; those of a process that was lost are tried again."""
        if not self._running:
            time.sleep(0.2)
            return []
        ended, _ = wait(self._running, timeout=0.5, return_when=FIRST_COMPLETED)
        finished: list[Finished] = []
        lost: list[Cell] = []
        for future in ended:
            cell = self._running.pop(future)
            try:
                finished.append((cell, future.result()))
            except BrokenProcessPool as broken:
                lost.append(cell)
                finished.append((cell, Lost(str(broken))))
        if lost:
            # One process was killed (by the system, for memory?), and took the pool with it.
            finished += [
                (cell, Lost("another process was lost")) for cell in self._running.values()
            ]
            self._running.clear()
            self.close()
        return finished

    def close(self) -> None:
        """End the processes."""
        if self._started is not None:
            started, self._started = self._started, None
            processes = list((started._processes or {}).values())
            started.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()


def outcome(cell: Cell, settings: Settings, progress: Progress | None) -> Record | Exception:
    """Return the record of a cell that is run here and now, or what is wrong."""
    try:
        return run(
            cell, data_dir=settings.data_dir, device=settings.device, progress=progress,
            starts=settings.starts,
        )  # fmt: skip
    except Exception as wrong:
        # A message travels between processes; an exception of another package may not.
        return RuntimeError(f"{type(wrong).__name__}: {wrong}")


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: they are ended by the one that started them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays ignored in a process that is started meanwhile.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(parent: int, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
