"""A record of `tisa-lab extrapolate` as files; several records as one."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from tisa_lab.extrapolation.figure import figure
from tisa_lab.extrapolation.tables import markdown


def write(record: dict[str, Any], out: Path) -> None:
    """Write the record, its tables and its figure into a folder."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    (out / "extrapolation.json").write_text(text, encoding="utf-8")
    (out / "extrapolation.md").write_text(markdown(record), encoding="utf-8")
    figure(record).savefig(out / "extrapolation.png", dpi=130)


def together(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of several that read the same windows, its runs by method and seed."""
    for name in ("trained_at", "objective", "stride", "documents", "tokens"):
        found = [record[name] for record in records]
        if any(value != found[0] for value in found):
            raise ValueError(f"{name} must be the same in all records, got {found}")
    # A length that was not asked for would look like one that a method cannot read.
    asked = [sorted({(r["length"], r["mode"]) for r in _rows(record)}) for record in records]
    if any(windows != asked[0] for windows in asked):
        raise ValueError(f"lengths and modes must be the same in all records, got {asked}")
    runs = sorted(
        (run for record in records for run in record["runs"]),
        key=lambda run: (run["label"], run["seed"]),
    )
    named = [(run["label"], run["seed"]) for run in runs]
    for one, following in pairwise(named):
        if one == following:
            raise ValueError(f"{one[0]}, seed {one[1]}, is in two of the records; leave one out")
    # One that was joined before has several already.
    places = [r["surroundings"] for r in records]
    flat = [one for some in places for one in (some if isinstance(some, list) else [some])]
    return records[0] | {"runs": runs, "surroundings": flat}


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for run in record["runs"] for row in run["rows"]]
