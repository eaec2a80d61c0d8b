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

from tisa.experiments.pretrain.corpus import Corpus, Place
from tisa.experiments.pretrain.keyed import uniform, words
from tisa.experiments.pretrain.rows import Objective, Row, Rows
from tisa.experiments.pretrain.tokenizers import Vocabulary
from tisa.shapes import Int, Int32, Tensor

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
    """Return rows, each with its key, as one packed batch."""
    ends = [0]
    tokens, places, labels = [], [], []
    for row, key in made:
        at = ends[-1]
        if objective == "mlm":
            chosen, wanted, shown = masked(row.tokens, mask_share, vocabulary, *key)
        else:
            chosen, wanted, shown = following(row)
        tokens.append(shown)
        places.append(chosen + at)
        labels.append(wanted)
        ends.extend(end + at for end in row.ends)
    # As many pieces as a multiple of twice the rows, the last ones empty: a compiled model sees few
    # different shapes.
    some = 2 * len(made)
    count = -(-(len(ends) - 1) // some) * some
    ends.extend([ends[-1]] * (count + 1 - len(ends)))
    return Batch(
        torch.from_numpy(np.concatenate(tokens)),
        torch.tensor(ends, dtype=torch.int32),
        torch.from_numpy(np.concatenate(places)),
        torch.from_numpy(np.concatenate(labels)),
    )


def masked(
    tokens: npt.NDArray[np.int64], share: float, vocabulary: Vocabulary, *key: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return places, labels and what is shown, as BERT does it.

    A share of the places, never a special token; of ten, eight are shown as [mask], one as a random
    token, one as it is.
    """
    special = vocabulary.specials
    assert special.mask is not None
    count = max(1, round(share * len(tokens)))
    drawn = uniform(len(tokens), *key, 1)
    ordinary = (tokens != special.begin) & (tokens != special.end) & (tokens != special.pad)
    drawn[~ordinary] = 2.0
    chosen = np.sort(np.argpartition(drawn, count - 1)[:count])
    labels = np.where(ordinary[chosen], tokens[chosen], NO_LABEL)
    fate = uniform(count, *key, 2)
    other = (words(count, *key, 3) % np.uint64(vocabulary.size)).astype(np.int64)
    new = np.where(fate < 0.8, special.mask, np.where(fate < 0.9, other, tokens[chosen]))
    shown = tokens.copy()
    shown[chosen] = np.where(labels == NO_LABEL, tokens[chosen], new)
    return chosen.astype(np.int64), labels, shown


def following(
    row: Row,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return every place, the token after it in its own piece, and the tokens as they are."""
    tokens = row.tokens
    labels = np.append(tokens[1:], NO_LABEL)
    labels[np.array(row.ends) - 1] = NO_LABEL
    labels[row.filled :] = NO_LABEL
    return np.arange(len(tokens)), labels, tokens


def squared_lengths(row: Row) -> int:
    """Return Σ (length of a piece)², which attention's work is proportional to."""
    return int((np.diff(np.array([0, *row.ends])) ** 2).sum())
