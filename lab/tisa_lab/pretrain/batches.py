"""What a model is given in a step: documents cut into rows, masked, packed, made ready ahead.

A row holds pieces of documents, each with its special tokens; a token sees its own piece only. A
document that is longer than a row goes on in the next. In a masked language model a piece is
[begin] … [end], in a causal one [begin] …, with [end] where the document ends. What is left of a
row when no token fits any more is padding, a piece of its own.

Which rows are in a step, and what is masked in each, depends on the seed and on the row alone, so
that one process sees in a step what two or more see together, and a run that goes on sees what it
would have seen.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset

from tisa.shapes import Int, Int32, Tensor
from tisa_lab.pretrain.config import Objective, Phase, Recipe
from tisa_lab.pretrain.corpus import Chunk, Corpus, Place, head
from tisa_lab.pretrain.text import Specials, Vocabulary

NO_LABEL = -100
# Not the seed of the run: all runs are compared on the same masks.
VALIDATION_SEED = 20210601
# Random numbers that depend on nothing but their key: the same in every process, in any order. A
# counter goes through the finaliser of splitmix64.
Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64] | Words


def mixed(words: Words) -> Words:
    """Return splitmix64's finaliser of each word."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def key_of(*numbers: int | Numbers) -> Words:
    """Return one word for a sequence of numbers; where some are arrays, one for each entry."""
    word = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        if isinstance(number, int):
            number = np.array([number & (2**64 - 1)], dtype=np.uint64)
        word = mixed(word ^ mixed(number.astype(np.uint64)))
    return word


def words(count: int, *key: int | Numbers) -> Words:
    """Return that many random words for a key; where it has arrays, a row for each entry."""
    with np.errstate(over="ignore"):
        drawn = mixed(
            key_of(*key)[:, None]
            + np.arange(count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        )
    return drawn[0] if all(isinstance(number, int) for number in key) else drawn


def uniform(count: int, *key: int | Numbers) -> npt.NDArray[np.float64]:
    """Return that many numbers in [0, 1)."""
    return (words(count, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(count: int, *key: int) -> npt.NDArray[np.int64]:
    """Return the numbers 0 … count − 1 in a random order."""
    return np.argsort(words(count, *key), kind="stable")


@dataclass(frozen=True)
class Row:
    """Tokens of one row, the end of every piece in it, and where its padding begins."""

    tokens: npt.NDArray[np.int64]
    ends: list[int]
    filled: int


class Rows:
    """The rows of a chunk in their own order; `order` is the shuffled one."""

    def __init__(
        self, chunk: Chunk, length: int, objective: Objective, specials: Specials, seed: int
    ) -> None:
        self.chunk, self.length = chunk, length
        self.objective, self.specials = objective, specials
        # For each row, (start, stop, has an end token) of its pieces.
        self.pieces: list[list[tuple[int, int, bool]]] = []
        self._cut()
        self.order = shuffled(len(self.pieces), seed, chunk.place.chunk)

    def _cut(self) -> None:
        smallest = 3 if self.objective == "mlm" else 2
        row: list[tuple[int, int, bool]] = []
        room, start = self.length, 0
        for end in self.chunk.ends.tolist():
            while start < end:
                left = end - start
                if self.objective == "mlm":
                    take, closes = min(left, room - 2), True
                else:
                    # A document that leaves no room for its end goes without.
                    take, closes = min(left, room - 1), left + 2 <= room
                row.append((start, start + take, closes))
                start += take
                room -= take + 1 + closes
                if room < smallest:
                    self.pieces.append(row)
                    row, room = [], self.length
        if row:
            self.pieces.append(row)

    def __len__(self) -> int:
        return len(self.pieces)

    def row(self, number: int) -> Row:
        """Return one row by its number before shuffling."""
        tokens = np.full(self.length, self.specials.pad, dtype=np.int64)
        ends: list[int] = []
        at = 0
        for start, stop, closes in self.pieces[number]:
            tokens[at] = self.specials.begin
            at += 1
            tokens[at : at + stop - start] = self.chunk.tokens[start:stop]
            at += stop - start
            if closes:
                tokens[at] = self.specials.end
                at += 1
            ends.append(at)
        if at < self.length:
            ends.append(self.length)
        return Row(tokens, ends, at)


@dataclass(frozen=True)
class Batch:
    """Packed tokens, the ends of their pieces after a leading 0, and what is to be predicted.

    `positions` are the places of the labelled tokens in the packed batch, as many for each row;
    where a row has fewer, a label is `NO_LABEL`. In a causal model every token is a place.
    """

    input_ids: Int[Tensor, " total"]
    cu_seqlens: Int32[Tensor, " ends"]
    positions: Int[Tensor, " places"]
    labels: Int[Tensor, " places"]

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        parts = (self.input_ids, self.cu_seqlens, self.positions, self.labels)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))

    def pinned(self) -> "Batch":
        """Return the batch in memory that a GPU can copy from while it computes."""
        parts = (self.input_ids, self.cu_seqlens, self.positions, self.labels)
        return Batch(*(part.pin_memory() for part in parts))


@dataclass(frozen=True)
class Reading:
    """Where reading stands: the chunk's place, and how many of its rows are used."""

    place: Place = field(default_factory=Place)
    used: int = 0


@dataclass(frozen=True)
class Step:
    """One process's share of a step: micro-batches, labels in them, Σ (length of a piece)²."""

    batches: list[Batch]
    labels: int
    squares: int
    after: Reading


@dataclass(frozen=True)
class Share:
    """Which part of every step a process takes, and in how many micro-batches."""

    rank: int = 0
    processes: int = 1
    micro: int = 1


BEGINNING, ALONE = Reading(), Share()


def steps(
    corpus: Corpus,
    phases: list[Phase],
    *,
    batch_tokens: int,
    objective: Objective,
    mask_share: float,
    seed: int,
    start: int = 0,
    reading: Reading = BEGINNING,
    share: Share = ALONE,
) -> Iterator[Step]:
    """Return one process's share of each step from `start` on; `reading` is where that begins."""
    for phase in phases:
        if start >= phase.end:
            continue
        if start == phase.first and reading.used:
            # Rows of another length: the chunk that was being read is left for the next.
            first = next(corpus.chunks(reading.place))
            reading = Reading(first.next)
        rows_in_step = batch_tokens // phase.length
        each = rows_in_step // (share.processes * share.micro)
        taken = _rows(corpus, phase.length, objective, seed, reading)
        for _ in range(start, phase.end):
            in_step = [next(taken) for _ in range(rows_in_step)]
            reading = in_step[-1][2]
            mine = in_step[share.rank * each * share.micro :][: each * share.micro]
            made = [
                (rows.row(number), (seed, rows.chunk.place.chunk, number))
                for rows, number, _ in mine
            ]
            batches, labels, squares = [], 0, 0
            for first_row in range(0, len(made), each):
                some = made[first_row : first_row + each]
                batches.append(batch_of(some, objective, mask_share, corpus.vocabulary))
                labels += int((batches[-1].labels != NO_LABEL).sum())
                squares += sum(squared_lengths(row) for row, _ in some)
            yield Step(batches, labels, squares, reading)
        start = phase.end


def _rows(
    corpus: Corpus, length: int, objective: Objective, seed: int, reading: Reading
) -> Iterator[tuple[Rows, int, Reading]]:
    """Return the rows in their shuffled order with the reading after each."""
    used = reading.used
    for chunk in corpus.chunks(reading.place):
        rows = Rows(chunk, length, objective, corpus.vocabulary.specials, seed)
        for count, number in enumerate(rows.order[used:].tolist(), used + 1):
            after = Reading(chunk.place, count)
            yield rows, number, after
        used = 0


def batch_of(
    made: Sequence[tuple[Row, tuple[int, ...]]],
    objective: Objective,
    mask_share: float,
    vocabulary: Vocabulary,
) -> Batch:
    """Return rows of one length, each with its key, as one packed batch."""
    rows = np.stack([row.tokens for row, _ in made])
    if objective == "mlm":
        keys = np.array([key for _, key in made]).T
        chosen, labels, rows = masked(rows, mask_share, vocabulary, *keys)
        places = chosen + np.arange(len(made))[:, None] * rows.shape[1]
    else:
        labels = following(rows, [row for row, _ in made])
        places = np.arange(rows.size)
    starts = range(0, rows.size, rows.shape[1])
    ends = [0, *(end + at for at, (row, _) in zip(starts, made, strict=True) for end in row.ends)]
    # As many pieces as a multiple of twice the rows, the last ones empty: a compiled model sees few
    # different shapes.
    some = 2 * len(made)
    count = -(-(len(ends) - 1) // some) * some
    ends.extend([ends[-1]] * (count + 1 - len(ends)))
    return Batch(
        torch.from_numpy(rows.ravel()),
        torch.tensor(ends, dtype=torch.int32),
        torch.from_numpy(places.ravel()),
        torch.from_numpy(labels.ravel()),
    )


def masked(
    rows: npt.NDArray[np.int64], share: float, vocabulary: Vocabulary, *key: int | Numbers
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return places, labels and what is shown of each row, as BERT does it.

    A share of the places, never a special token; of ten, eight are shown as [mask], one as a random
    token, one as it is. The key has a number for each row where it is to be drawn for itself.
    """
    special = vocabulary.specials
    assert special.mask is not None
    count = max(1, round(share * rows.shape[1]))
    ordinary = (rows != special.begin) & (rows != special.end) & (rows != special.pad)
    drawn = np.where(ordinary, uniform(rows.shape[1], *key, 1), 2.0)
    chosen = np.sort(np.argpartition(drawn, count - 1, axis=1)[:, :count], axis=1)
    tokens = np.take_along_axis(rows, chosen, 1)
    may = np.take_along_axis(ordinary, chosen, 1)
    fate = uniform(count, *key, 2)
    other = (words(count, *key, 3) % np.uint64(vocabulary.size)).astype(np.int64)
    new = np.where(fate < 0.8, special.mask, np.where(fate < 0.9, other, tokens))
    shown = rows.copy()
    np.put_along_axis(shown, chosen, np.where(may, new, tokens), 1)
    return chosen, np.where(may, tokens, NO_LABEL), shown


def following(rows: npt.NDArray[np.int64], made: Sequence[Row]) -> npt.NDArray[np.int64]:
    """Return for every place the token after it in its own piece."""
    labels = np.full_like(rows, NO_LABEL)
    labels[:, :-1] = rows[:, 1:]
    for label, row in zip(labels, made, strict=True):
        label[np.array(row.ends) - 1] = NO_LABEL
        label[row.filled :] = NO_LABEL
    return labels


def squared_lengths(row: Row) -> int:
    """Return Σ (length of a piece)², which attention's work is proportional to."""
    return int((np.diff(np.array([0, *row.ends])) ** 2).sum())


def validation_batches(
    corpus: Corpus, config: Recipe, tokens: int, *, rows: int, rank: int, processes: int
) -> list[Batch]:
    """Return one process's batches of the first documents, as many for each process."""
    some = head(corpus, tokens)
    ends = np.cumsum([len(document) for document in some], dtype=np.int64)
    chunk = Chunk(np.concatenate(some), ends, Place(), Place())
    cut = Rows(chunk, config.longest, config.objective, corpus.vocabulary.specials, VALIDATION_SEED)
    made = [(cut.row(number), (VALIDATION_SEED, number)) for number in range(len(cut))]
    groups = [made[first : first + rows] for first in range(0, len(made), rows)]
    count = -(-len(groups) // processes)
    mine = groups[rank::processes]
    batches = [
        batch_of(group, config.objective, config.mask_share, corpus.vocabulary) for group in mine
    ]
    while len(batches) < count:
        # Every process takes part in every forward pass, with nothing to predict if need be.
        last = batch_of(groups[0], config.objective, config.mask_share, corpus.vocabulary)
        batches.append(
            Batch(last.input_ids, last.cu_seqlens, last.positions,
                  torch.full_like(last.labels, NO_LABEL))
        )  # fmt: skip
    return batches


class _Steps(IterableDataset):
    def __init__(self, make: Callable[[], Iterator[Step]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Step]:
        return self.make()


def _deaf(worker: int) -> None:
    """Leave signals that reach a whole process group (torchrun, scancel, Ctrl-C) to the trainer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def ahead(make: Callable[[], Iterator[Step]], *, in_a_process: bool) -> Iterator[Step]:
    """Return the steps, made in a process of their own where the model runs on a GPU."""
    if not in_a_process:
        return make()
    loader: Any = DataLoader(
        _Steps(make),
        batch_size=None,
        num_workers=1,
        prefetch_factor=16,
        multiprocessing_context="fork",
        worker_init_fn=_deaf,
    )
    return iter(loader)
