"""Tables and figures from the records of `tisa pretrain` runs.

    python3 runs/pretrain_report.py gate FOLDER
    python3 runs/pretrain_report.py report FOLDER --out FOLDER

FOLDER has a folder for each run, as runs/pretrain_grid.py leaves them (or its archive, unpacked),
or is the file records.jsonl that `report` writes.
"""

import argparse
from pathlib import Path

from tisa.experiments.pretrain.summary import (
    gate,
    groups_of,
    lines_of,
    markdown,
    read_records,
    tables_over_time,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["gate", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    records = read_records(arguments.folder)
    groups = groups_of(records)
    text = markdown(groups)
    if arguments.what == "gate":
        found = gate(groups)
        text += (
            f"\nnone − absolute: {found['difference']:+.4f}, spread over seeds "
            f"{found['spread']:.4f}: {found['ratio']:.1f} times: "
            f"{'passed' if found['passed'] else 'NOT passed'} (5 wanted)\n"
        )
    else:
        text += "\n" + tables_over_time(groups)
        if arguments.out is not None:
            from tisa.experiments.pretrain.figures import write_figures

            write_figures(groups, arguments.folder, arguments.out)
            (arguments.out / "tables.md").write_text(text)
            (arguments.out / "records.jsonl").write_text(lines_of(records))
    print(text)


if __name__ == "__main__":
    main()
