"""A task's rows on a device, and which of them many cells are given in each step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers

from tisa.shapes import Int, Tensor
from tisa_lab.glue.batches import ByLength
from tisa_lab.glue.cell import Cell
from tisa_lab.glue.reading import read
from tisa_lab.glue.tasks import Task
from tisa_lab.glue.trainer import Row, length_of
from tisa_lab.glue.training import row_counts, tokenized


@dataclass(frozen=True)
class Rows:
    """Tokenized rows on a device, padded on the right; their lengths are also known here."""

    input_ids: Int[Tensor, "rows length"]
    token_type_ids: Int[Tensor, "rows length"] | None
    labels: Tensor
    lengths: Int[Tensor, " rows"]
    lengths_here: Int[Tensor, " rows"]

    def batch(
        self, index: Int[Tensor, "either batch"], longest: int, padded: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return what a stack is called with for these rows, and their labels."""
        given = {"input_ids": self.input_ids[:, :longest][index]}
        if self.token_type_ids is not None:
            given["token_type_ids"] = self.token_type_ids[:, :longest][index]
        if padded:
            places = torch.arange(longest, device=index.device)
            given["mask"] = places < self.lengths[index].unsqueeze(-1)
        return given, self.labels[index]


@dataclass(frozen=True)
class Prepared:
    """What all cells of one kind have in common."""

    tokenizer: Any
    train_rows: list[Row]
    train: Rows
    dev: dict[str, Rows]
    tokens: Int[Tensor, " tokens"]
    fingerprint: str
    counts: dict[str, int]


# A sweep goes from task to task and comes back with the next seeds.
@lru_cache(maxsize=8)
def prepared(
    model: str, task: Task, length: int, train_rows: int | None, data_dir: Any, device: torch.device
) -> Prepared:
    """Return the rows of a task, tokenized and on the device; those of the last calls are kept."""
    data = read(task, data_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    if tokenizer.padding_side != "right":
        raise ValueError(
            f"model: the tokenizer of {model} pads on the left, and cells trained side by side "
            "must not be moved by each other's padding; take another executor"
        )
    train = tokenized(data.train[:train_rows], task, tokenizer, length)
    # By length, so that there is no padding to speak of; no metric asks for the order.
    dev = {
        suffix: sorted(tokenized(rows, task, tokenizer, length), key=length_of)
        for suffix, rows in data.dev.items()
    }
    every = {token for rows in (train, *dev.values()) for row in rows for token in row["input_ids"]}
    tokens = torch.tensor(sorted(every | {tokenizer.pad_token_id or 0}), device=device)
    return Prepared(
        tokenizer=tokenizer,
        train_rows=train,
        train=_on_device(train, task, tokenizer, device),
        dev={suffix: _on_device(rows, task, tokenizer, device) for suffix, rows in dev.items()},
        tokens=tokens,
        fingerprint=data.fingerprint(),
        counts=row_counts(train, dev, data),
    )


def _on_device(rows: list[Row], task: Task, tokenizer: Any, device: torch.device) -> Rows:
    def padded(name: str, padding: int) -> Tensor:
        parts = [torch.tensor(row[name]) for row in rows]
        made = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=padding)
        return made.to(device)

    lengths = torch.tensor([length_of(row) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return Rows(
        input_ids=padded("input_ids", tokenizer.pad_token_id or 0),
        token_type_ids=(
            padded("token_type_ids", tokenizer.pad_token_type_id)
            if "token_type_ids" in rows[0]
            else None
        ),
        labels=(labels.float() if task.is_regression else labels).to(device),
        lengths=lengths.to(device),
        lengths_here=lengths,
    )


class Order:
    """The batches of every cell, as `training.run` would have them; cells of a seed share them."""

    def __init__(self, cells: Sequence[Cell], rows: Rows) -> None:
        self.rows = rows
        self.batch_size = cells[0].batch_size
        self.seeds = list(dict.fromkeys(cell.seed for cell in cells))
        self.samplers = [
            ByLength(rows.lengths_here.tolist(), self.batch_size, s) for s in self.seeds
        ]
        self.seed_of = torch.tensor([self.seeds.index(cell.seed) for cell in cells])
        self.tokens = torch.zeros(len(self.seeds), dtype=torch.long)

    def __iter__(self) -> Iterator[tuple[Tensor, int, bool]]:
        """Give for each step the rows of each cell, their longest and whether others are padded."""
        device = self.rows.labels.device
        seed_of = self.seed_of.to(device)
        while True:
            order = torch.tensor([list(sampler) for sampler in self.samplers])
            there = order.to(device)
            lengths = self.rows.lengths_here[order]
            for start in range(0, order.shape[1], self.batch_size):
                here = slice(start, start + self.batch_size)
                self.tokens += lengths[:, here].sum(1)
                index = there[:, here]
                longest = int(lengths[:, here].max())
                padded = int(lengths[:, here].min()) < longest
                yield (index if len(self.seeds) == 1 else index[seed_of]), longest, padded

    def tokens_of(self, number: int) -> int:
        """Return how many tokens a cell has been given."""
        return int(self.tokens[self.seed_of[number]])


def by_tokens(rows: Rows, room: int) -> Iterator[tuple[Tensor, int, bool]]:
    """Give the rows in their order, as many at a time as have `room` tokens with their padding."""
    lengths = rows.lengths_here.tolist()
    start = 0
    while start < len(lengths):
        end = start + 1
        # Sorted: the last one is the longest.
        while end < len(lengths) and (end + 1 - start) * lengths[end] <= room:
            end += 1
        index = torch.arange(start, end, device=rows.labels.device).unsqueeze(0)
        yield index, lengths[end - 1], lengths[start] < lengths[end - 1]
        start = end
