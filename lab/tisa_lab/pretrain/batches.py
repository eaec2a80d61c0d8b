"""What a model is given in a step: packed rows, labels, and where the next step begins.

Which rows are in a step, and what is masked in each, depends on the seed and on the row alone, so
that one process sees in a step what two or more see together, and a run that goes on sees what it
would have seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tisa.shapes import Int, Int32, Tensor
from tisa_lab.pretrain.corpus import Corpus, Place
from tisa_lab.pretrain.keyed import Numbers, uniform, words
from tisa_lab.pretrain.rows import Objective, Row, Rows
from tisa_lab.pretrain.tokenizers import Vocabulary

NO_LABEL = -100


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
class Phase:
    """Steps from `first` to before `end` on rows of one length."""

    first: int
    end: int
    length: int


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
