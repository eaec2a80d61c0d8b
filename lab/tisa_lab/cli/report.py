"""`tisa-lab report`: the records of `tisa-lab glue` as Table 3, those of grids as curves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tisa.store import CODE, own_folder, told, write_files
from tisa_lab.record import code

LINES = "records.jsonl"


def command(
    folders: list[Path],
    /,
    *,
    out: Path | None = None,
    score: Literal["last", "best"] = "last",
    as_json: bool = False,
) -> None:
    """Print what is finished as tables, and write them with a figure.

    Of `tisa-lab glue` Table 3 (a) and (b), as Markdown, LaTeX and CSV: medians, spread and number
    of seeds of every cell; Δ with its interval and its S; the share of the loss from removing
    positions that each row gives back. Missing cells are shown as missing.

    Of grids of `tisa-lab pretrain` each method's loss against the learning rate, its best rate, how
    wide the range around it is, and what the models answered where they were asked (--evaluate).
    Of a run that is in two folders the later one counts.

    Examples: `tisa-lab report table3`, `tisa-lab report table3 --out docs/table3`,
    `tisa-lab report table3 --json`, `tisa-lab report grid another --out rates`

    Args:
        folders: Folders of `tisa-lab glue` or of grids, or their records.jsonl.
        out: Folder for table3.md, .tex, .csv and .png, or rates.md and .png.
        score: Of GLUE. last: of each run the last evaluation; best: the best one.
        as_json: Print every cell, or every curve, as JSON instead of the table.
    """
    # Beside the records too.
    with own_folder(out, own=("table3.md", "rates.md", LINES)):
        kinds = {_is_of_grids(folder) for folder in folders}
        if len(kinds) > 1:
            raise ValueError(
                "folders must be of `tisa-lab glue` or of grids of `tisa-lab pretrain`, got both"
            )
        made = _grids(folders) if kinds.pop() else _glue(folders, score)
        if out is not None:
            files = made.files()
            write_files(out, made.name, {**made.identity, CODE: code()}, files)
    print(json.dumps(made.shown, ensure_ascii=False) if as_json else made.text)
    if out is not None and not as_json:
        print(f"written to {out}: {', '.join(files)}")


class Made(NamedTuple):
    """What is printed, as plain values and as a text; the files, and what they were made of."""

    shown: dict[str, Any]
    text: str
    name: str
    identity: dict[str, Any]
    files: Callable[[], dict[str, str | bytes]]


def _glue(folders: list[Path], score: Literal["last", "best"]) -> Made:
    from tisa_lab.glue.cell import Record
    from tisa_lab.glue.numbers import summary
    from tisa_lab.glue.report import figure, latex, markdown, table_csv, table_data
    from tisa_lab.record import picture
    from tisa_lab.sweep import Records

    records = []
    for folder in folders:
        records += Records(folder.parent if folder.name == LINES else folder, Record).all()
    parts = summary(records, score=score)
    text = markdown(parts, records)

    def files() -> dict[str, str | bytes]:
        return {
            "table3.md": text,
            "table3.tex": latex(parts),
            "table3.csv": table_csv(parts),
            "table3.png": picture(figure(parts), dpi=150),
        }

    shown = {"runs": len(records), "score": score, "cells": table_data(parts)}
    return Made(shown, text, "Table 3", {"records": len(records), "score": score}, files)


def _grids(folders: list[Path]) -> Made:
    from tisa_lab.evaluation.drawing import figure
    from tisa_lab.evaluation.rates import curves_of
    from tisa_lab.evaluation.report import data, page
    from tisa_lab.pretrain.report import read_records
    from tisa_lab.record import picture

    records = [record for folder in folders for record in read_records(folder)]
    curves = curves_of(records)

    def files() -> dict[str, str | bytes]:
        return {"rates.md": page(curves), "rates.png": picture(figure(curves), dpi=120)}

    shown = {"runs": len(records), "curves": data(curves)}
    return Made(shown, page(curves), "rates", {"records": len(records)}, files)


def _is_of_grids(folder: Path) -> bool:
    """Return whether a folder has records of pretraining; refuse one without any."""
    lines = folder if folder.name == LINES else folder / LINES
    if lines.is_file():
        with told(lines, reading=True), open(lines, "rb") as file:
            first = file.readline()
        try:
            return bool(json.loads(first).get("kind") == "pretrain")
        except (ValueError, AttributeError):
            # Torn or empty: whoever reads all of it says so.
            return False
    if any(folder.glob("*/record.json")):
        return True
    raise FileNotFoundError(
        f"{folder}: no {LINES} in it; `tisa-lab glue` and grids of `tisa-lab pretrain` write one"
    )
