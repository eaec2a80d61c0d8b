"""What is looked for: documents of one length, queries, and which document each query means.

Passkey and needle are after Zhu et al., "LongEmbed" (EMNLP 2024): every document has the same
length, and a sentence or two at some place, which the query asks for. A needle shares its words
with other needles. An article is asked for with one of its own sentences.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from tisa_lab.long.settings import LongConfig, Task
from tisa_lab.long.texts import Sentence, Texts, cut

FIRST = (
    "Ada", "Ben", "Cora", "Dan", "Edna", "Felix", "Gita", "Hugo", "Ines", "Jonas", "Kira", "Luis",
    "Mona", "Nils", "Olga", "Paul", "Rosa", "Sven", "Tara", "Udo",
)  # fmt: skip
LAST = (
    "Abbott", "Baker", "Carver", "Dalton", "Ellis", "Foster", "Grant", "Harper", "Irving", "Jordan",
    "Keller", "Lambert", "Mercer", "Norton", "Osborn", "Parker", "Quincy", "Reeves", "Sutton",
    "Turner",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey")
THINGS = (
    "bicycle", "umbrella", "violin", "kettle", "lantern", "suitcase", "telescope", "ladder",
    "basket", "clock",
)  # fmt: skip
SPOTS = (
    "under the old bridge", "behind the bakery", "in the third drawer", "on top of the wardrobe",
    "beside the lighthouse", "in the cellar of the museum", "near the railway station",
    "at the end of the pier", "inside the clock tower", "next to the fountain",
)  # fmt: skip
FILLER = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.",
    "There and back again.",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Documents of one length, queries, and the number of the document that each query means.

    `places` says where in its document a query's answer begins, in tokens; −1 where it is left out.
    """

    task: Task
    haystack: str
    seed: int
    length: int
    documents: tuple[tuple[int, ...], ...]
    queries: tuple[str, ...]
    wanted: tuple[int, ...]
    places: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """Return a short SHA-256 of all of it."""
        told = json.dumps([self.documents, self.queries, self.wanted, self.places])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def named(self) -> dict[str, Any]:
        """Return what a record says of it."""
        return {
            "task": self.task, "haystack": self.haystack, "seed": self.seed, "length": self.length,
        }  # fmt: skip


def asked_of(
    config: LongConfig, texts: Texts, tokenizer: Any, length: int, room: int
) -> list[Asked]:
    """Return every task at a length that leaves room for so many tokens of text."""
    found = []
    for seed in config.seeds:
        for task in config.asked:
            # A place of its own in the random numbers, whatever else is asked.
            drawn = random.Random(f"{seed} {task} {length}")
            if task in ("passkey", "needle"):
                for haystack in config.haystacks:
                    found.append(
                        _hidden(task, haystack, seed, length, room, config, texts, tokenizer, drawn)
                    )
            elif task == "article, removed":
                found.append(_removed(seed, length, room, texts, drawn))
            else:
                found.append(_articles(task, seed, length, room, config.queries, texts, drawn))
    return [one for one in found if one.queries]


def _articles(
    task: Task, seed: int, length: int, room: int, queries: int, texts: Texts, drawn: random.Random
) -> Asked:
    """Return articles and sentences of theirs, from any place or from the last eighth."""
    asked, wanted, places = [], [], []
    for number, article in enumerate(texts.articles):
        found = _within(article, room)
        if task == "article, last eighth":
            found = [(p, s) for p, s in found if p + len(s.ids) / 2 >= room * 7 / 8]
        for place, sentence in sorted(drawn.sample(found, min(queries, len(found)))):
            asked.append(sentence.text)
            wanted.append(number)
            places.append(place)
    documents = tuple(_ids(article)[:room] for article in texts.articles)
    return Asked(task, "", seed, length, documents, tuple(asked), tuple(wanted), tuple(places))


def _removed(seed: int, length: int, room: int, texts: Texts, drawn: random.Random) -> Asked:
    """Return articles without one sentence each, which asks for the rest."""
    documents, asked, wanted = [], [], []
    for number, article in enumerate(texts.articles):
        found = _within(article, room)
        if found:
            place, sentence = drawn.choice(found)
            ids = _ids(article)
            documents.append((ids[:place] + ids[place + len(sentence.ids) :])[:room])
            asked.append(sentence.text)
            wanted.append(number)
        else:
            documents.append(_ids(article)[:room])
    return Asked(
        "article, removed", "", seed, length, tuple(documents), tuple(asked), tuple(wanted),
        (-1,) * len(asked),
    )  # fmt: skip


def _hidden(
    task: Task, haystack: str, seed: int, length: int, room: int, config: LongConfig,
    texts: Texts, tokenizer: Any, drawn: random.Random,
) -> Asked:  # fmt: skip
    """Return noise with a passkey or a needle in each, between two of its sentences."""
    noise = list(texts.noise) if haystack == "articles" else cut(FILLER, tokenizer)
    names = [f"{a} {b}" for a, b in product(FIRST, LAST)]
    drawn.shuffle(names)
    documents, asked, wanted, places = [], [], [], []
    for number in range(config.documents):
        # More documents than names share them, with a number.
        name = names[number % len(names)] + " Junior" * (number // len(names))
        if task == "passkey":
            key = drawn.randrange(10_000, 100_000)
            hidden = f"{name}'s pass key is {key}. Remember it. {key} is the pass key for {name}."
            query = f"What is the pass key for {name}?"
        else:
            thing = f"{drawn.choice(COLOURS)} {drawn.choice(THINGS)}"
            hidden = f"The {thing} of {name} lies {drawn.choice(SPOTS)}."
            query = f"Where does the {thing} of {name} lie?"
        # As it stands after a space.
        (needle,) = cut(["x", hidden], tokenizer)[1:]
        before = _noise(noise, room - len(needle.ids), drawn)
        place = drawn.choice(_seams(before, room - len(needle.ids)))
        ids = _ids(before)[: room - len(needle.ids)]
        documents.append(ids[:place] + needle.ids + ids[place:])
        asked.append(query)
        wanted.append(number)
        places.append(place)
    return Asked(
        task, haystack, seed, length, tuple(documents), tuple(asked), tuple(wanted), tuple(places)
    )


def _noise(noise: Sequence[Sentence], tokens: int, drawn: random.Random) -> list[Sentence]:
    """Return sentences from some place on, and again from the first, until they are enough."""
    at, total, found = drawn.randrange(len(noise)), 0, []
    while total < tokens:
        found.append(noise[at % len(noise)])
        total += len(found[-1].ids)
        at += 1
    return found


def _seams(sentences: Sequence[Sentence], tokens: int) -> list[int]:
    """Return the places between sentences, the beginning and the end among them."""
    seams, at = [0], 0
    for sentence in sentences:
        at += len(sentence.ids)
        seams.append(min(at, tokens))
    return sorted(set(seams))


def _within(article: Sequence[Sentence], room: int) -> list[tuple[int, Sentence]]:
    """Return the sentences that may be asked for and are whole within so many tokens."""
    found, at = [], 0
    for sentence in article:
        if at + len(sentence.ids) <= room and sentence.askable:
            found.append((at, sentence))
        at += len(sentence.ids)
    return found


def _ids(sentences: Sequence[Sentence]) -> tuple[int, ...]:
    return tuple(token for sentence in sentences for token in sentence.ids)
