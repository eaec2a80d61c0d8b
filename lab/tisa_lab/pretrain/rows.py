"""A chunk of documents cut into rows of equal length: what is drawn, shuffled and dealt out.

A row holds pieces of documents, each with its special tokens; a token sees its own piece only. A
document that is longer than a row goes on in the next. In a masked language model a piece is
[begin] … [end], in a causal one [begin] …, with [end] where the document ends. What is left of a
row when no token fits any more is padding, a piece of its own.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tisa_lab.pretrain.corpus import Chunk
from tisa_lab.pretrain.keyed import shuffled
from tisa_lab.pretrain.tokenizers import Specials

Objective = Literal["mlm", "causal"]


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
