"""Table 3, from cells to their records: what it will cost, where cells are run, how it goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from tisa.hf import families
from tisa_lab import executors
from tisa_lab.executors import Executor, InProcess, Leading, follow, is_leader
from tisa_lab.glue.batches import check_packable, tokenized
from tisa_lab.glue.cell import Cell, Record
from tisa_lab.glue.starts import check_head, config_named
from tisa_lab.glue.tasks import Data, read, task_named
from tisa_lab.glue.training import Progress, Runner, make_start, started_as
from tisa_lab.sweep import Records, Shown, run_sweep
from tisa_lab.view import Silent, spoken

# Rows whose tokens are counted to estimate those of all.
SAMPLE = 256


@dataclass(frozen=True)
class Place(executors.Place):
    """Where cells are run.

    Args:
        executor: in-process: one after another; pool: several processes on this machine; stacked:
            many cells side by side as one batched model; ray: on a cluster.
        stack: cells side by side, at most.
        data_dir: folder of official GLUE files; by default the hub.
        device: cpu or cuda; by default a GPU where there is one.
    """

    executor: Literal["in-process", "pool", "stacked", "ray"] = "in-process"  # type: ignore[assignment]
    stack: int = 32
    data_dir: Path | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stack < 1:
            raise ValueError(f"stack must be 1 or more, got {self.stack}")
        if started_as() > 1 and self.executor != "in-process":
            raise ValueError(
                f"executor must be in-process where {started_as()} processes (torchrun, accelerate "
                f"launch) run each cell together, got {self.executor!r}"
            )

    def runner(self, out: Path) -> Runner:
        """Return what runs a cell, with the starts of that folder."""
        return Runner(self.data_dir, self.device, out / "starts")

    def check(self, cells: Sequence[Cell]) -> None:
        """Refuse cells that cannot be run there."""
        if self.executor == "stacked":
            from tisa_lab.glue.stacked import check_stackable

            check_stackable(list(dict.fromkeys(cell.model for cell in cells)))
            if any(cell.recipe.batches == "packed" for cell in cells):
                raise ValueError('batches must be padded where executor is "stacked", got packed')

    def stacks(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Return which cells are trained side by side, where the executor is stacked."""
        from tisa_lab.glue.stacked import stacks

        return stacks(cells, self.stack)

    def open(self, runner: Runner, progress: Progress) -> Executor:
        """Return the executor; it tells the progress of what is run in this process."""
        elsewhere = self.elsewhere(runner, use_gpu=self.device != "cpu", folder=runner.starts)
        if elsewhere is not None:
            return elsewhere
        seen = replace(runner, progress=progress)
        if self.executor == "stacked":
            from tisa_lab.glue.stacked import Stacked

            return Stacked(seen, self.stack)
        return Leading(seen) if started_as() > 1 else InProcess(seen)


def run_cells(
    cells: Sequence[Cell], out: Path, place: Place, view: Silent
) -> list[tuple[Cell, Exception]]:
    """Run every cell that the folder has no record of; return those that failed, with the reason.

    Of several processes that were started for each cell all but the first only follow.
    """
    place.check(cells)
    records = Records(out, Record)
    runner = place.runner(out)

    def left(cells: Sequence[Any]) -> float | None:
        seconds = seconds_for(cells, records.all())
        return None if seconds is None else seconds / place.side_by_side

    with view:
        executor = place.open(
            runner, lambda done, steps: view.inside(f"step {done:,} of {steps:,}")
        )
        shown = Shown(view, "cells", _said, left)
        together = place.stacks if place.executor == "stacked" else None
        return run_sweep(cells, records, executor, shown, together)


def is_following(place: Place, out: Path, *, does_run: bool) -> bool:
    """Return whether another process leads; this one has then done its share of all cells."""
    runner = place.runner(out)
    if started_as() == 1 or is_leader(runner.place):
        return False
    if does_run:
        follow(runner)
    return True


def make_starts(
    cells: Sequence[Cell], out: Path, place: Place, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Fit what cells start from, and train nothing; return what is known of each start."""
    runner = place.runner(out)
    assert runner.starts is not None
    wanted = dict.fromkeys(
        replace(cell, variant=cell.variant.unfrozen(), seed=0)
        for cell in cells
        if cell.variant.init == "fit"
    )
    made = []
    for number, cell in enumerate(wanted, start=1):
        about = make_start(cell, runner.starts, data_dir=place.data_dir, device=place.device)
        assert about is not None
        made.append({"task": cell.task, **about})
        say(
            f"{number}/{len(wanted)} {cell.task} {about['start']}: {about['key']}, cosine to the "
            f"original {about['cosine']:.4f}, fitted in {about['seconds']:.1f} s"
        )
    say(f"{len(wanted)} starts are in {runner.starts}")
    return made


@dataclass(frozen=True)
class Line:
    """The cells of one model and task: how many, and what those cost that are left.

    `flops` counts six operations for each parameter and trained token (attention and evaluation
    aside). `seconds` is from runs in the same folder, None where there are none to tell.
    """

    model: str
    task: str
    cells: int
    done: int
    rows: int
    steps: int
    tokens: float
    flops: float
    seconds: float | None


def plan(
    cells: Sequence[Cell], records: Sequence[Record], data_dir: str | Path | None = None
) -> list[Line]:
    """Return a line for each model and task; a task or a model that is not there is an error."""
    finished = {record.key for record in records}
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.task), []).append(cell)
    data = {task: read(task_named(task), data_dir) for _, task in groups}
    made = []
    for (model, task), group in groups.items():
        left = [cell for cell in group if cell.key not in finished]
        rows = len(data[task].train)
        length, parameters = _sizes(group[0], data[task])
        steps = [
            cell.recipe.total_steps(min(rows, cell.recipe.train_rows or rows)) for cell in left
        ]
        tokens = sum(
            n * cell.recipe.batch_size * length for n, cell in zip(steps, left, strict=True)
        )
        line = Line(
            model=model,
            task=task,
            cells=len(group),
            done=len(group) - len(left),
            rows=rows,
            steps=sum(steps),
            tokens=tokens,
            flops=6 * parameters * tokens,
            seconds=seconds_for(left, records, steps),
        )
        made.append(line)
    return made


def seconds_for(
    cells: Sequence[Cell], records: Sequence[Record], steps: Sequence[int | None] | None = None
) -> float | None:
    """Return how long cells will take one after another, from runs like them; None without any.

    Like them are runs of the same model and task; without those any run counts, by its steps.
    `steps` are those of the cells where they are known: `epochs` alone does not tell them.
    """
    total = 0.0
    for cell, own in zip(cells, steps or [cell.recipe.steps for cell in cells], strict=True):
        known = [r for r in records if (r.cell.model, r.cell.task) == (cell.model, cell.task)]
        known = known or list(records)
        if not known:
            return None
        times = [r.seconds["total"] for r in known]
        if own:
            times = [time * own / r.steps for time, r in zip(times, known, strict=True)]
        total += sum(times) / len(times)
    return total


def _sizes(cell: Cell, data: Data) -> tuple[float, int]:
    """Return the mean tokens of a row, and the parameters of the model without its embeddings."""
    task = task_named(cell.task)
    config = config_named(cell.model)
    check_head(cell.model, config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cell.model, trust_remote_code=False)
    if cell.recipe.batches == "packed":
        check_packable(config.model_type)
    every = max(1, len(data.train) // SAMPLE)
    rows = tokenized(data.train[::every], task, tokenizer, cell.recipe.max_length)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    embedded = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    body = sum(p.numel() for p in model.parameters()) - embedded
    # Each of ALBERT's passes through its one layer costs.
    return sum(len(row["input_ids"]) for row in rows) / len(rows), families.passes(model) * body


def _said(record: Record) -> str:
    name = task_named(record.cell.task).main_metric
    return f"{name} {record.metrics[name]:.1f}, {spoken(record.seconds['total'])}"
