"""`tisa-lab report`: the records of `tisa-lab glue` as Table 3."""

import json
from pathlib import Path
from typing import Literal

from tisa.store import CODE, own_folder, write_files
from tisa_lab.glue.cell import Record
from tisa_lab.glue.numbers import summary
from tisa_lab.glue.report import figure, latex, markdown, table_csv, table_data
from tisa_lab.record import code, picture
from tisa_lab.sweep import Records


def command(
    folders: list[Path],
    /,
    *,
    out: Path | None = None,
    score: Literal["last", "best"] = "last",
    as_json: bool = False,
) -> None:
    """Print Table 3 (a) and (b) from finished runs, and write it as Markdown, LaTeX, CSV, a figure.

    Medians, spread and number of seeds of every cell; Δ with its interval and its S; the share of
    the loss from removing positions that each row gives back. Missing cells are shown as missing.

    Examples: `tisa-lab report table3`, `tisa-lab report table3 --out docs/table3`,
    `tisa-lab report table3 --json`

    Args:
        folders: Folders of `tisa-lab glue`, or their records.jsonl.
        out: Folder for table3.md, .tex, .csv and .png.
        score: last: of each run the last evaluation; best: the best one.
        as_json: Print every cell as JSON instead of the table.
    """
    # Beside the records too.
    with own_folder(out, own=("table3.md", "records.jsonl")):
        records = []
        for folder in folders:
            store = Records(folder.parent if folder.name == "records.jsonl" else folder, Record)
            if not store.path.is_file():
                raise FileNotFoundError(
                    f"{folder}: no records.jsonl in it; `tisa-lab glue` writes one"
                )
            records += store.all()
        parts = summary(records, score=score)
        text = markdown(parts, records)
        if out is not None:
            files: dict[str, str | bytes] = {
                "table3.md": text,
                "table3.tex": latex(parts),
                "table3.csv": table_csv(parts),
                "table3.png": picture(figure(parts), dpi=150),
            }
            identity = {"records": len(records), "score": score, CODE: code()}
            write_files(out, "Table 3", identity, files)
    if as_json:
        found = {"runs": len(records), "score": score, "cells": table_data(parts)}
        print(json.dumps(found, ensure_ascii=False))
        return
    print(text)
    if out is not None:
        print(f"written to {out}: table3.md, table3.tex, table3.csv, table3.png")
