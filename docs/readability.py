"""Print how hard the pages are to read: how long the sentences are, and which words lack a noun.

    python docs/readability.py                        # the README and the pages, without the log
    python docs/readability.py --show docs/glue.md    # that page's sentences that are counted

Read are paragraphs and list items. Left out are code, tables, formulas on lines of their own,
headings and pictures. A sentence ends at a full stop, question or exclamation mark before a capital
letter, or where its paragraph ends; a code span and a link's text are words.

A sentence lacks a noun in two cases. One of `PRONOUNS` stands in it before anything that can be a
noun, and every word can that is not in `FUNCTION`. Or one of `POINTING` stands in it without a noun
that follows: "those of", "this is", "the other.". These are rules of thumb. They know no grammar,
and pass a pronoun that has two nouns before it.
"""

import argparse
import re
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# Written by programs, or a diary.
LEFT_OUT = {"families.md", "licences.md", "log.md", "reference.md"}
LONG = 25

PRONOUNS = {"it", "its", "they", "them", "their"}
POINTING = [phrase.split() for phrase in (
    "this", "these", "those", "that of", "the other", "the others", "the former", "the latter",
    "the rest", "such", "so many",
)]  # fmt: skip
IDIOM = ["one", "after"]
FUNCTION = set(re.findall(r"\w+", """
a an the and or but nor so yet for if when where while who whom whose which what that than then
there here how why as because since until unless though although after before once of to in on at
by with from into over under beside behind between beyond past without within through about up out
off is are was were be been being am do does did has have had can could may might must shall should
will would not no never nothing none all any each every both either neither some many much more most
less least few only also even too very just again still now already away alone elsewhere otherwise
else instead i you we he she it its they them their this these those my your our his her one two
"""))  # fmt: skip
# Verbs that show that the phrase before them stood alone.
VERBS = set(re.findall(r"\w+", """
go goes take takes took make makes made give gives say says know knows need needs come comes came
mean means get gets keep keeps run runs stand stands leave leaves see sees find finds show shows
hold holds differ differs written read given taken left
"""))  # fmt: skip


class Figures(NamedTuple):
    """Words per sentence, and the shares of sentences that are long or lack a noun."""

    sentences: int
    median: float
    ninth_decile: float
    long: float
    lacking: float


def sentences(page: str) -> list[str]:
    """Return the sentences of a page's paragraphs and list items."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|\$\$.*?\$\$", "\n", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines, item = [], False
    for line in text.splitlines():
        item = bool(re.match(r" *([-*]|\d+\.) ", line)) or (item and bool(line.strip()))
        code = line.startswith("    ") and not item
        lines.append("" if code or line.lstrip().startswith(("|", "#", ">")) else line)
    text = re.sub(r"\n *([-*]|\d+\.) ", "\n\n", "\n" + "\n".join(lines))
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = re.sub(r"\*(\S[^*]*\S|\S)\*", r"\1", " ".join(paragraph.split()))
        found += re.split(r"(?<=[.?!])[\"”)*]* (?=[(\"“`*]*[A-Z0-9`])", flat)
    return [sentence for sentence in found if len(words(sentence)) > 1]


def words(sentence: str) -> list[str]:
    """Return the words, numbers and code spans, each as one."""
    return re.findall(r"`[^`]*`|[^\W_][\w'’.,/-]*[^\W_]|[^\W_]", sentence)


def lacking(sentence: str) -> list[str]:
    """Return the words of a sentence that lack a noun, by the rules at the head of this file."""
    # A sign stands as a word here, which ends a phrase.
    parts = [p.lower() for p in re.findall(r"`[^`]*`|[^\W_][\w'’-]*|[^\w\s]", sentence)] + ["."]
    found, noun = [], False
    for place, part in enumerate(parts):
        if part in PRONOUNS and not noun:
            found.append(part)
        for phrase in POINTING:
            follows = parts[min(place + len(phrase), len(parts) - 1)]
            alone = follows in FUNCTION | VERBS or not re.match(r"[\w`]", follows)
            # "Such as" and "such a" have their noun, "one after the other" needs none.
            idle = follows in ("as", "a", "an") or parts[max(place - 2, 0) : place] == IDIOM
            if parts[place : place + len(phrase)] == phrase and alone and not idle:
                found.append(" ".join(phrase))
        noun = noun or (part not in FUNCTION and bool(re.match(r"[\w`]", part)))
    return found


def figures(text: list[str]) -> Figures:
    """Return the figures of some sentences."""
    lengths = [len(words(sentence)) for sentence in text]
    decile = quantiles(lengths, n=10, method="inclusive")[8] if len(lengths) > 1 else lengths[0]
    return Figures(
        len(text),
        median(lengths),
        decile,
        sum(n > LONG for n in lengths) / len(text),
        sum(bool(lacking(sentence)) for sentence in text) / len(text),
    )


def pages() -> list[Path]:
    """Return the README and the pages that somebody wrote, guides and tutorials last."""
    docs = ROOT / "docs"
    written = sorted(p for p in docs.glob("*.md") if p.name not in LEFT_OUT)
    guides, tutorials = (sorted((docs / name).glob("*.md")) for name in ("howto", "tutorials"))
    return [ROOT / "README.md", *written, *guides, *tutorials]


def table(read: dict[str, list[str]]) -> str:
    """Return the figures of each page and of all as Markdown."""
    lines = [
        "| page | sentences | words, median | words, 90 % | above 25 words | a noun is lacking |",
        "|---" * 6 + "|",
    ]
    for name, text in {**read, "all": list(chain(*read.values()))}.items():
        count, middle, decile, long, without = figures(text)
        lines.append(f"| {name} | {count} | {middle:g} | {decile:g} | {long:.0%} | {without:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", type=Path, metavar="PAGE")
    shown = parser.parse_args().show
    if shown:
        for sentence in sentences(shown.read_text("utf-8")):
            marks = lacking(sentence)
            if marks or len(words(sentence)) > LONG:
                print(len(words(sentence)), ", ".join(marks), "|", sentence)
    else:
        print(
            table(
                {p.relative_to(ROOT).as_posix(): sentences(p.read_text("utf-8")) for p in pages()}
            )
        )
