"""Rows of a task as a model reads them, and which of them make a batch.

Batches are of similar length, hardly any of it padding (`Padder`), or without any (`Packer`): the
rows of a batch one after another, as one. Every classification head of the models named in
`PACKABLE` reads the first token alone. So the encoder gives the first tokens of the packed rows as
if they were rows of one token, and the head needs no change.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from tisa.hf import families
from tisa.hf.core import call_of
from tisa.shapes import Int, Tensor
from tisa_lab.glue.cell import Cell
from tisa_lab.glue.tasks import Data, Example, Task, read

# Batches whose rows are sorted together: enough for even lengths, few enough for chance.
POOL = 50
# The label of a row that counts for nothing, as PyTorch's losses have it.
IGNORED = -100
# Known to hand what they are called with down to their attention, and to read the first token.
PACKABLE = (
    "albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta",
)  # fmt: skip
# One tokenized row: input_ids, token_type_ids where there are some, and the label.
Row = dict[str, Any]


class TaskRows(NamedTuple):
    """A task's rows for training and for each dev set, tokenized, and how many there are."""

    train: list[Row]
    dev: dict[str, list[Row]]
    counts: dict[str, int]


def rows_of(
    data: Data, task: Task, tokenizer: Any, length: int, train_rows: int | None
) -> TaskRows:
    """Return all rows tokenized, for training the first `train_rows`; longer texts are cut."""
    train = tokenized(data.train[:train_rows], task, tokenizer, length)
    # By length, so that dev batches have no padding to speak of; no metric asks for the order.
    dev = {
        suffix: sorted(tokenized(rows, task, tokenizer, length), key=length_of)
        for suffix, rows in data.dev.items()
    }
    counts = {
        "train": len(train),
        **{f"dev{suffix}": len(rows) for suffix, rows in dev.items()},
        **({"left_out": data.left_out} if data.left_out else {}),
    }
    return TaskRows(train, dev, counts)


def tokenized(examples: list[Example], task: Task, tokenizer: Any, length: int) -> list[Row]:
    """Return each example's tokens and label; longer texts are cut."""
    texts = [list(part) for part in zip(*(e.texts for e in examples), strict=True)]
    encoded = tokenizer(*texts, truncation=True, max_length=length)
    kept = [name for name in ("input_ids", "token_type_ids") if name in encoded]
    return [
        {
            **{name: encoded[name][i] for name in kept},
            "labels": example.label if task.is_regression else int(example.label),
        }
        for i, example in enumerate(examples)
    ]


def length_of(row: Row) -> int:
    """Return how many tokens a row has."""
    return len(row["input_ids"])


class ByLength(torch.utils.data.Sampler[int]):
    """Rows in an order in which each `batch_size` of them have similar lengths.

    Rows are shuffled, sorted by length within pools of 50 batches, cut into batches, and the
    batches shuffled. Every row comes once; the one batch that is not full comes last, so that
    cutting the order into batches finds those made here. Each pass draws another order, all of
    them determined by the seed.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
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


def check_packable(model_type: str) -> None:
    """Refuse a model whose rows cannot be packed."""
    if model_type.removeprefix("tisa-") not in PACKABLE:
        raise ValueError(
            f'batches must be "padded" for a {model_type}; "packed" is for {", ".join(PACKABLE)}'
        )


class Packer:
    """Makes a packed batch of tokenized rows; the model must have been through `read_packed`."""

    def __init__(self, model: Any) -> None:
        table = families.position_table(model)
        # RoBERTa counts positions from 2 on.
        self.first_position = 0 if table is None else table.first_row
        # In (b) nothing reads positions.
        self.has_positions = table is not None and model.config.tisa["positions"] == "keep"
        self.has_types = getattr(model.config, "type_vocab_size", 0) > 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the inputs of the model; `tisa_packed` says where rows end, known on this side."""
        lengths = [len(row["input_ids"]) for row in rows]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        batch: dict[str, Any] = {
            "input_ids": _joined([row["input_ids"] for row in rows]),
            "labels": torch.tensor([row["labels"] for row in rows]),
            "tisa_packed": (ends, max(lengths)),
        }
        if self.has_types:
            blank = [row.get("token_type_ids", [0] * len(row["input_ids"])) for row in rows]
            batch["token_type_ids"] = _joined(blank)
        if self.has_positions:
            places = [range(self.first_position, self.first_position + n) for n in lengths]
            batch["position_ids"] = _joined([list(place) for place in places])
        return batch


def _joined(parts: list[list[int]]) -> Tensor:
    return torch.tensor([[x for part in parts for x in part]])


def read_packed(model: Any) -> None:
    """Let a converted model read packed batches; padded ones it reads as before."""
    check_packable(model.config.model_type)
    body = model.base_model
    encoder = body.encoder if hasattr(body, "encoder") else body.transformer
    # A second hook would look for first tokens among the first tokens.
    if _first_tokens not in encoder._forward_hooks.values():
        encoder.register_forward_hook(_first_tokens, with_kwargs=True)


def _first_tokens(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    packed = call_of(kwargs).packed
    if packed is not None:
        hidden = output["last_hidden_state"]
        output["last_hidden_state"] = hidden[0, packed[0][:-1].long()].unsqueeze(1)
    return output


@dataclass(frozen=True)
class Placed:
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
    train: Placed
    dev: dict[str, Placed]
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
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if tokenizer.padding_side != "right":
        raise ValueError(
            f"model: the tokenizer of {model} pads on the left, and cells trained side by side "
            "must not be moved by each other's padding; take another executor"
        )
    train, dev, counts = rows_of(data, task, tokenizer, length, train_rows)
    every = {token for rows in (train, *dev.values()) for row in rows for token in row["input_ids"]}
    tokens = torch.tensor(sorted(every | {tokenizer.pad_token_id or 0}), device=device)
    return Prepared(
        tokenizer=tokenizer,
        train_rows=train,
        train=_on_device(train, task, tokenizer, device),
        dev={suffix: _on_device(rows, task, tokenizer, device) for suffix, rows in dev.items()},
        tokens=tokens,
        fingerprint=data.fingerprint(),
        counts=counts,
    )


def _on_device(rows: list[Row], task: Task, tokenizer: Any, device: torch.device) -> Placed:
    def padded(name: str, padding: int) -> Tensor:
        parts = [torch.tensor(row[name]) for row in rows]
        made = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=padding)
        return made.to(device)

    lengths = torch.tensor([length_of(row) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return Placed(
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

    def __init__(self, cells: Sequence[Cell], rows: Placed) -> None:
        self.rows = rows
        self.batch_size = cells[0].recipe.batch_size
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


def by_tokens(rows: Placed, room: int) -> Iterator[tuple[Tensor, int, bool]]:
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
