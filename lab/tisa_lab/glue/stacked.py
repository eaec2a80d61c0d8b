"""An executor that trains many cells side by side on one device, and which cells go together."""

import logging
import math
import time
from collections.abc import Sequence

import torch
import transformers

from tisa_lab.executors import Finished, outcome
from tisa_lab.glue.cell import Cell
from tisa_lab.glue.side_by_side import kind_of, run_stack
from tisa_lab.glue.stack import reason_against_stacking
from tisa_lab.glue.training import Runner


class Stacked:
    """Stacks of cells, one after another, in this process."""

    def __init__(self, runner: Runner, size: int = 32) -> None:
        if size < 1:
            raise ValueError(f"stack must be 1 or more, got {size}")
        self.runner = runner
        self.size = size
        self._waiting: list[Cell] = []

    def free(self) -> int:
        """Return the size of a stack, or 0 where cells wait to be run."""
        return 0 if self._waiting else self.size

    def submit(self, cell: Cell) -> None:
        """Take a cell, to be run when results are asked for."""
        self._waiting.append(cell)

    def collect(self) -> list[Finished]:
        """Run a stack of the cells that wait."""
        if not self._waiting:
            time.sleep(0.2)
            return []
        together, *others = stacks(self._waiting, self.size)
        self._waiting = [cell for stack in others for cell in stack]
        return self._run(together)

    def close(self) -> None:
        """Do nothing: nothing runs between two calls."""

    def _run(self, cells: list[Cell]) -> list[Finished]:
        try:
            outcomes = run_stack(
                cells,
                data_dir=self.runner.data_dir,
                device=self.runner.device,
                progress=self.runner.progress,
                starts=self.runner.starts,
            )
            return list(zip(cells, outcomes, strict=True))
        except torch.OutOfMemoryError:
            logging.getLogger(__name__).warning(
                "%s and %d more: out of memory; again, half of them at a time",
                cells[0].label, len(cells) - 1,
            )  # fmt: skip
        except Exception as wrong:
            told = RuntimeError(f"{type(wrong).__name__}: {wrong}")
            return [(cell, told) for cell in cells]
        # Outside of the handler, whose traceback holds on to the tensors.
        torch.cuda.empty_cache()
        if len(cells) == 1:
            # Alone it can be run with a part of its batch at a time.
            return [(cells[0], outcome(self.runner, cells[0]))]
        half = len(cells) // 2
        return self._run(cells[:half]) + self._run(cells[half:])


def stacks(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    """Return the cells in stacks of at most `size`: what is trained side by side.

    A stack has cells of one kind: they may differ in their positions, their kernels and their
    seed. Cells of one seed share their batches, and those of several are padded to the longest of
    them; so seeds are kept whole, several to a stack where they fit. Stacks come in the order of
    their first cells: a grid is completed seed by seed.
    """
    place = {cell: number for number, cell in enumerate(cells)}
    kinds: dict[object, dict[int, list[Cell]]] = {}
    for cell in cells:
        kinds.setdefault(kind_of(cell), {}).setdefault(cell.seed, []).append(cell)
    made: list[list[Cell]] = []
    for seeds in kinds.values():
        stack: list[Cell] = []
        for alike in seeds.values():
            if stack and len(stack) + len(alike) > size:
                made.append(stack)
                stack = []
            if len(alike) > size:
                each = math.ceil(len(alike) / math.ceil(len(alike) / size))
                made += [alike[i : i + each] for i in range(0, len(alike), each)]
            else:
                stack = stack + alike
        if stack:
            made.append(stack)
    return sorted(made, key=lambda stack: place[stack[0]])


def check_stackable(models: Sequence[str]) -> None:
    """Refuse models that cannot be stacked."""
    for model in models:
        reason = reason_against_stacking(transformers.AutoConfig.from_pretrained(model))
        if reason is not None:
            raise ValueError(
                f"model: cells of {model} cannot be trained side by side: {reason}; take another "
                "executor (in-process, pool)"
            )
