"""Five tasks about places: an input of any length in, the answer at some of its places out.

- find: which letter stands `OFFSET` places before me?
- copy: letters, a bar, blanks: the letters again, in the blanks.
- reverse: the same, from the last to the first.
- sort: the same, in the order of the alphabet.
- order: of two marked letters, is it the first mark that comes first? Asked at both marks.
"""

from collections.abc import Callable

import torch

from tisa.shapes import Int, Tensor

NO_ANSWER = -100
LETTERS, OFFSET = 16, 5
BAR, BLANK, ONE, OTHER = range(LETTERS, LETTERS + 4)
VOCABULARY = LETTERS + 4

Made = tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]


def find(batch: int, length: int, generator: torch.Generator) -> Made:
    """Return letters, and at each place the letter `OFFSET` places before it."""
    letters = _letters(batch, length, generator)
    answers = torch.full_like(letters, NO_ANSWER)
    answers[:, OFFSET:] = letters[:, :-OFFSET]
    return letters, answers


def copy(batch: int, length: int, generator: torch.Generator) -> Made:
    """Return letters, a bar and blanks, and in the blanks the letters."""
    return _behind_the_bar(batch, length, generator, lambda letters: letters)


def reverse(batch: int, length: int, generator: torch.Generator) -> Made:
    """Return letters, a bar and blanks, and in the blanks the letters from the last on."""
    return _behind_the_bar(batch, length, generator, lambda letters: letters.flip(1))


def sort(batch: int, length: int, generator: torch.Generator) -> Made:
    """Return letters, a bar and blanks, and in the blanks the letters in alphabetical order."""
    return _behind_the_bar(batch, length, generator, lambda letters: letters.sort(1).values)


def order(batch: int, length: int, generator: torch.Generator) -> Made:
    """Return letters with two marks among them, and at the marks 1 if the first comes first."""
    letters = _letters(batch, length, generator)
    places = torch.rand(batch, length, generator=generator).topk(2, dim=1).indices
    rows = torch.arange(batch)
    letters[rows, places[:, 0]] = ONE
    letters[rows, places[:, 1]] = OTHER
    answers = torch.full_like(letters, NO_ANSWER)
    said = (places[:, 0] < places[:, 1]).long()
    answers[rows, places[:, 0]] = said
    answers[rows, places[:, 1]] = said
    return letters, answers


TASKS: dict[str, Callable[[int, int, torch.Generator], Made]] = {
    "find": find,
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
    "order": order,
}


def _letters(batch: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(LETTERS, (batch, length), generator=generator)


def _behind_the_bar(
    batch: int, length: int, generator: torch.Generator, answer: Callable[[Tensor], Tensor]
) -> Made:
    count = (length - 1) // 2
    letters = _letters(batch, count, generator)
    tokens = torch.full((batch, 2 * count + 1), BLANK)
    tokens[:, :count] = letters
    tokens[:, count] = BAR
    answers = torch.full_like(tokens, NO_ANSWER)
    answers[:, count + 1 :] = answer(letters)
    return tokens, answers
