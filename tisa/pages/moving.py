"""A phrase that the reader drags through a sentence, and where its words look in two models.

The part stands alone, with its style and its script: a page of the kit has it, and any other page.
Without scripts it shows the phrase at two places.
"""

from typing import Any

from markupsafe import Markup

from tisa.pages.kit import page


def moving_phrase(found: dict[str, Any], *, model: str, before: int, after: int) -> Markup:
    """Return the part of a page.

    Args:
        found: `words` of a sentence, `phrase`, `layer`, `head`; `attention` of "table" and "tisa",
            for every place from after the first word on a row of shares for each word of the
            phrase; `mean`, the share that moves over all heads of the layer.
        model: its name.
        before: numbers in its position table.
        after: numbers in what took the table's place.
    """
    table = found["attention"]["table"]
    words = range(len(found["phrase"]))
    word = max(words, key=lambda w: sum(moved(table, at, w) for at in range(len(table))))
    far = max(range(len(table)), key=lambda at: moved(table, at, word))
    models = (
        ("table", "A position table", before),
        ("tisa", "TISA's curves", after),
    )
    return Markup(
        page(
            "tisa.pages/moving.html",
            data={key: found[key] for key in ("words", "phrase", "attention")} | {"word": word},
            found=found,
            name=model,
            models=models,
            word=word,
            far=far,
            moved=moved,
            top=max(x for a in found["attention"].values() for at in a for row in at for x in row),
            most={m: max(moved(a, at, word) for at in range(len(a)))
                  for m, a in found["attention"].items()},
        )
    )  # fmt: skip


def moved(attention: list[list[list[float]]], at: int, word: int) -> float:
    """Return which share of a word's attention is elsewhere than at the first place."""
    return sum(abs(x - y) for x, y in zip(attention[at][word], attention[0][word], strict=True)) / 2
