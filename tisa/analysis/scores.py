"""A column of scores that the user supplies, to hold Toeplitzness against (Fig 2)."""

import csv
from pathlib import Path


def read_scores(path: Path) -> dict[str, float]:
    """Return the score of each model from a CSV file with the columns model and score."""
    scores = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if not {"model", "score"} <= set(reader.fieldnames or ()):
            raise ValueError(
                f"--scores: expected the columns model and score in {path}, "
                f"got {', '.join(reader.fieldnames or ()) or 'an empty file'}"
            )
        for row in reader:
            try:
                scores[row["model"]] = float(row["score"])
            except (TypeError, ValueError):
                raise ValueError(
                    f"--scores: expected a number for {row['model']!r} in {path}, "
                    f"got {row['score']!r}"
                ) from None
    return scores
