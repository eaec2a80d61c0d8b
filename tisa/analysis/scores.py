"""A column of scores that the user supplies, to hold Toeplitzness against (Fig 2)."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from tisa.weights import name_of


def read_scores(path: Path, models: Sequence[str]) -> dict[str, float]:
    """Return the scores of models, by their names, from a CSV file with columns model and score.

    A model may be called there by its name in the figures or as it was given.
    """
    names = [name_of(model) for model in models]
    scores: dict[str, float] = {}
    for given, score in _rows(path):
        found = {
            name
            for model, name in zip(models, names, strict=True)
            if given == name or Path(given) == Path(model)
        }
        if not found:
            raise ValueError(
                f"scores: {given!r} in {path} is none of the models given, which are "
                f"{', '.join(names)}; write its name so, or take its line out"
            )
        name = found.pop()
        if names.count(name) > 1:
            raise ValueError(
                f"scores: two of the models are called {name!r}; rename the folder of one"
            )
        if name in scores:
            raise ValueError(f"scores: expected one score of {name!r} in {path}, got two")
        scores[name] = score
    if len(scores) < 2:
        raise ValueError(
            f"scores: expected scores of at least two of the models in {path}, got {len(scores)}"
        )
    return scores


def _rows(path: Path) -> list[tuple[str, float]]:
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if not {"model", "score"} <= set(reader.fieldnames or ()):
            raise ValueError(
                f"scores: expected the columns model and score in {path}, "
                f"got {', '.join(reader.fieldnames or ()) or 'an empty file'}"
            )
        for row in reader:
            try:
                score = float(row["score"])
            except (TypeError, ValueError):
                score = math.nan
            if not math.isfinite(score):
                raise ValueError(
                    f"scores: expected a number for {row['model']!r} in {path}, "
                    f"got {row['score']!r}"
                )
            rows.append(((row["model"] or "").strip(), score))
    return rows
