"""Which rows make a batch, and the batch of them: of similar length, hardly any of it padding."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

# Batches whose rows are sorted together: enough for even lengths, few enough for chance.
POOL = 50
# The label of a row that counts for nothing, as PyTorch's losses have it.
IGNORED = -100


class ByLength(torch.utils.data.Sampler[int]):
    """Rows in an order in which each `batch_size` of them have similar lengths.

    Rows are shuffled, sorted by length within pools of 50 batches, cut into batches, and the
    batches shuffled. Every row comes once; the one batch that is not full comes last, so that
    cutting the order into batches finds those made here. Each pass draws another order, all of
    them determined by the seed.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.lengths), generator=self.generator)
        full = len(order) // self.batch_size * self.batch_size
        pools = [
            pool[self.lengths[pool].argsort(stable=True)]
            for pool in order[:full].split(POOL * self.batch_size)
        ]
        batches = torch.cat(pools).view(-1, self.batch_size)
        shuffled = batches[torch.randperm(len(batches), generator=self.generator)]
        yield from [*shuffled.flatten().tolist(), *order[full:].tolist()]


class Share(torch.utils.data.Sampler[list[int]]):
    """One process's part of every batch, in so many pieces; together they have each row once.

    Where a batch has too few rows for all, a process is given one that counts for nothing: by its
    number less the number of all rows (`Marked`).
    """

    def __init__(self, order: ByLength, rank: int, processes: int, pieces: int) -> None:
        self.order = order
        self.rank = rank
        self.processes = processes
        self.pieces = pieces

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.order.batch_size) * self.pieces

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.order)
        for start in range(0, len(rows), self.order.batch_size):
            batch = rows[start : start + self.order.batch_size]
            for piece in range(self.pieces):
                own = batch[piece * self.processes + self.rank :: self.processes * self.pieces]
                yield own or [batch[0] - len(rows)]


class Marked(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows by their number; by a negative one, a row whose label is ignored."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[number]
        return row if number >= 0 else {**row, "labels": type(row["labels"])(IGNORED)}


class Padder:
    """Makes a batch of tokenized rows, padded to the longest, as the tokenizer would."""

    def __init__(self, tokenizer: Any) -> None:
        self.pad = {
            "input_ids": tokenizer.pad_token_id or 0,
            "token_type_ids": tokenizer.pad_token_type_id,
        }
        self.left = tokenizer.padding_side == "left"

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return input_ids, attention_mask, token_type_ids where there are some, and labels."""
        lengths = [len(row["input_ids"]) for row in rows]
        longest = max(lengths)
        names = [name for name in self.pad if name in rows[0]]
        made = {name: np.full((len(rows), longest), self.pad[name]) for name in names}
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            place = slice(longest - length, None) if self.left else slice(length)
            mask[i, place] = 1
            for name in names:
                made[name][i, place] = row[name]
        return {
            **{name: torch.from_numpy(made[name]) for name in names},
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }
