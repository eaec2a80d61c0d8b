"""Documents cut into windows of some length: every token counts once, whatever the length.

A window has the special tokens that a piece had in training, which take one of its places in a
causal model and two in an encoder. Without overlap a token sees its own window only. Sliding
windows move by `stride`; a causal model is asked for the last `stride` tokens of each, which see at
least length − stride − 1 tokens, an encoder for the middle ones.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Mode = Literal["whole", "sliding"]


@dataclass(frozen=True)
class Window:
    """Tokens `start` … `stop` − 1 of a document, of which `first` … `last` − 1 count."""

    document: int
    start: int
    stop: int
    first: int
    last: int


def windows_of(
    lengths: list[int], length: int, mode: Mode, *, stride: int, is_causal: bool
) -> list[Window]:
    """Return the windows of documents of those lengths, each of `length` places at most."""
    inside = text_in(length, is_causal=is_causal)
    found = []
    for number, total in enumerate(lengths):
        if mode == "whole" or total <= inside:
            for start in range(0, total, inside):
                stop = min(total, start + inside)
                found.append(Window(number, start, stop, start, stop))
            continue
        # No stride beyond the window, where tokens would be left out.
        step = min(stride, inside)
        ahead = 0 if is_causal else (inside - step) // 2
        done = 0
        for start in range(0, total, step):
            stop = min(total, start + inside)
            last = total if stop == total else stop - ahead
            found.append(Window(number, start, stop, done, last))
            done = last
            if stop == total:
                break
    return found


def text_in(length: int, *, is_causal: bool) -> int:
    """Return how many tokens of text a window of that length holds."""
    inside = length - (1 if is_causal else 2)
    if inside < 1:
        raise ValueError(f"length must be at least 3, got {length}")
    return inside


def long_documents(
    documents: list[npt.NDArray[np.unsignedinteger]],
    longest: int,
    max_tokens: int | None,
    *,
    is_causal: bool,
) -> list[npt.NDArray[np.unsignedinteger]]:
    """Return the documents that fill the longest window, until there are enough tokens.

    Each is cut to a multiple of that window's text, so that all of its tokens count at any length.
    """
    inside, found, count = text_in(longest, is_causal=is_causal), [], 0
    for document in documents:
        if len(document) < inside:
            continue
        whole = document[: len(document) // inside * inside]
        found.append(whole)
        count += len(whole)
        if max_tokens is not None and count >= max_tokens:
            break
    if not found:
        most = max((len(document) for document in documents), default=0)
        raise ValueError(
            f"lengths: expected a document of at least {inside:,} tokens for the longest window, "
            f"got {most:,} in the longest of {len(documents):,}; ask for shorter lengths"
        )
    return found
