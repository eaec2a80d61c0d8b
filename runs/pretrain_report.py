"""Tables and figures from the records of `tisa-lab pretrain` and `tisa-lab extrapolate` runs.

    python3 runs/pretrain_report.py gate FOLDER
    python3 runs/pretrain_report.py report FOLDER --out FOLDER
    python3 runs/pretrain_report.py far FILE FILE … --out FOLDER

FOLDER has a folder for each run, as a grid of `tisa-lab pretrain` leaves them, and its
records.jsonl; or it is such a file of records. `far` joins what `tisa-lab extrapolate` wrote
about the same windows, files extrapolation.json.
"""

import argparse
import json
from pathlib import Path

from tisa_lab.extrapolation.report import markdown as far_tables
from tisa_lab.extrapolation.report import together, write
from tisa_lab.pretrain.report import (
    gate,
    groups_of,
    lines_of,
    markdown,
    read_records,
    tables_over_time,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["gate", "report", "far"])
    parser.add_argument("of", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "far":
        print(far(arguments.of, arguments.out))
        return
    if len(arguments.of) > 1:
        parser.error(f"{arguments.what} takes one folder, got {len(arguments.of)}")
    print(pretrained(arguments.what, arguments.of[0], arguments.out))


def far(files: list[Path], out: Path | None) -> str:
    """Return the tables of all files as one."""
    record = together([json.loads(file.read_text()) for file in files])
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write(record, out)
    return far_tables(record)


def pretrained(what: str, folder: Path, out: Path | None) -> str:
    """Return the tables of a folder's runs."""
    records = read_records(folder)
    groups = groups_of(records)
    text = markdown(groups)
    if what == "gate":
        found = gate(groups)
        return text + (
            f"\nnone − absolute: {found['difference']:+.4f}, spread over seeds "
            f"{found['spread']:.4f}: {found['ratio']:.1f} times: "
            f"{'passed' if found['passed'] else 'NOT passed'} (5 wanted)\n"
        )
    text += "\n" + tables_over_time(groups)
    if out is not None:
        from tisa_lab.pretrain.report import write_figures

        write_figures(groups, folder, out)
        (out / "tables.md").write_text(text)
        (out / "records.jsonl").write_text(lines_of(records))
    return text


if __name__ == "__main__":
    main()
