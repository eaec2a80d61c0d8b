"""Documents as sentences of tokens; which articles are looked for, and which are noise."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# A heading, as in the text dumps of Wikipedia.
HEADING = re.compile(r"^\s*=.*=\s*$")
END = re.compile(r"(?<=[.!?])[\"”)]*\s+(?=[\"“(]?[A-Z0-9])")
# Words of a sentence that may be asked for.
ASKED = range(8, 61)
# Longer articles than this many of their length are not all cut into tokens.
ENOUGH = 1.25
# Articles that passkeys and needles lie in, and that scores are fitted to.
NOISE, FITTED = 12, 24


@dataclass(frozen=True)
class Sentence:
    """A sentence, and its tokens without special ones."""

    text: str
    ids: tuple[int, ...]

    @property
    def askable(self) -> bool:
        """Return whether it is neither a fragment nor a list."""
        return len(self.text.split()) in ASKED


@dataclass(frozen=True)
class Texts:
    """Articles that are looked for, articles that are noise, text that scores are fitted to."""

    articles: tuple[tuple[Sentence, ...], ...]
    noise: tuple[Sentence, ...]
    calibration: tuple[str, ...]


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a document without its headings."""
    lines = (line.strip() for line in text.splitlines() if not HEADING.match(line))
    return [sentence for line in lines if line for sentence in END.split(line) if sentence.strip()]


def cut(sentences: Iterable[str], tokenizer: Any) -> list[Sentence]:
    """Return sentences with their tokens; those after the first as they stand after a space."""
    texts = list(sentences)
    if not texts:
        return []
    given = [texts[0], *(f" {text}" for text in texts[1:])]
    # Not all at once: a tokenizer that knows a limit would warn of it.
    ids = tokenizer(given, add_special_tokens=False, truncation=False)["input_ids"]
    return [
        Sentence(text, tuple(found)) for text, found in zip(texts, ids, strict=True) if len(found)
    ]


def texts_of(documents: Iterable[str], tokenizer: Any, *, count: int, longest: int) -> Texts:
    """Return so many articles that fill the longest length, in their order; others are the rest.

    No text serves two ends: what is too short to be looked for is fitted to, and noise comes next.
    """
    articles: list[tuple[Sentence, ...]] = []
    noise: list[Sentence] = []
    fitted: list[str] = []
    noisy, most = 0, 0
    for document in documents:
        words = len(document.split())
        # A word has at least about one token, and no language here has four.
        if words * 4 < longest or len(articles) == count:
            if noisy < NOISE and words > 200 and len(fitted) >= FITTED:
                noise += cut(sentences_of(document), tokenizer)
                noisy += 1
            elif len(fitted) < FITTED:
                fitted.append(" ".join(sentences_of(document)))
            if len(articles) == count and noisy == NOISE:
                break
            continue
        sentences = first(cut(sentences_of(document), tokenizer), round(ENOUGH * longest))
        total = sum(len(sentence.ids) for sentence in sentences)
        most = max(most, total)
        # What one sentence leaves out, the following ones fill.
        if total >= longest + max(len(sentence.ids) for sentence in sentences):
            articles.append(tuple(sentences))
        elif len(fitted) < FITTED:
            fitted.append(" ".join(sentences_of(document)))
    if len(articles) < count or noisy == 0 or not fitted:
        raise ValueError(
            f"data: expected {count} articles of {longest:,} tokens and {NOISE + FITTED} "
            f"others, got {len(articles)} and {noisy + len(fitted)}, the longest of {most:,} "
            "tokens; give more text, fewer documents or shorter lengths"
        )
    return Texts(tuple(articles), tuple(noise), tuple(fitted))


def first(sentences: Sequence[Sentence], tokens: int) -> list[Sentence]:
    """Return the first sentences that have so many tokens together, or all."""
    found, total = [], 0
    for sentence in sentences:
        if total >= tokens:
            break
        found.append(sentence)
        total += len(sentence.ids)
    return found
