"""What a sweep will do and cost, before it is done."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from tisa_lab.glue.cell import Cell
from tisa_lab.glue.packing import check_packable
from tisa_lab.glue.reading import Data, read
from tisa_lab.glue.record import Record
from tisa_lab.glue.tasks import task_named
from tisa_lab.glue.training import Runner, check_head, tokenized, total_steps

# Rows whose tokens are counted to estimate those of all.
SAMPLE = 256


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


def plan(cells: Sequence[Cell], records: Sequence[Record], runner: Runner) -> list[Line]:
    """Return a line for each model and task; a task or a model that is not there is an error."""
    finished = {record.cell.key for record in records}
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.task), []).append(cell)
    data = {task: read(task_named(task), runner.data_dir) for _, task in groups}
    made = []
    for (model, task), group in groups.items():
        left = [cell for cell in group if cell.key not in finished]
        rows = len(data[task].train)
        length, parameters = _sizes(group[0], data[task])
        steps = [total_steps(cell, min(rows, cell.train_rows or rows)) for cell in left]
        tokens = sum(n * cell.batch_size * length for n, cell in zip(steps, left, strict=True))
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
    for cell, own in zip(cells, steps or [cell.steps for cell in cells], strict=True):
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
    config = transformers.AutoConfig.from_pretrained(cell.model)
    check_head(cell.model, config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cell.model)
    if cell.batches == "packed":
        check_packable(config.model_type)
    every = max(1, len(data.train) // SAMPLE)
    rows = tokenized(data.train[::every], task, tokenizer, cell.max_length)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    embedded = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    # ALBERT passes through one layer many times, and each pass costs.
    passes = getattr(config, "num_hidden_layers", 1) if config.model_type == "albert" else 1
    parameters = sum(p.numel() for p in model.parameters()) - embedded
    return sum(len(row["input_ids"]) for row in rows) / len(rows), passes * parameters
