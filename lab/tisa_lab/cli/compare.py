"""`tisa-lab compare`: a method of one's own beside the others, on one page."""

import json
import sys
from pathlib import Path

from tisa_lab.compare.settings import CompareConfig
from tisa_lab.probes.race import RACERS

CONFIG = CompareConfig()


def command(
    methods: list[str],
    /,
    *,
    others: tuple[str, ...] = RACERS,
    config: CompareConfig = CONFIG,
    out: Path = Path("compare"),
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Compare methods of your own with the others: criteria, tasks, pretraining, length, speed.

    One file in, one page out; no data is needed. Some minutes on two cores. Finished language
    models are kept: the same command goes on from there.

    Examples: `tisa-lab compare my_file.py:Mine`,
    `tisa-lab compare my_file.py:Mine --others none,rotary,tisa --steps 2000 --out page`

    Args:
        methods: Position methods, by name or as my_file.py:Class.
        others: What they are compared with.
        config: Sizes.
        out: Folder for index.html, compare.json, .md and .png, and the language models.
        device: cpu or cuda; by default a GPU where there is one.
        as_json: Print the record instead of the table.
    """
    from tisa.packages import needed
    from tisa.store import own_folder
    from tisa_lab.compare.comparing import RUNS, compared
    from tisa_lab.compare.page import markdown, write
    from tisa_lab.record import command_line

    # Before the minutes of measuring, not after them.
    needed("matplotlib", "figures", "tisa-lab")
    with own_folder(out, own=("compare.json", RUNS)):
        record = compared(
            tuple(methods), out, others=others, config=config, device=device,
            command=command_line(), progress=_tell,
        )  # fmt: skip
        write(record, out)
    print(json.dumps(record, ensure_ascii=False) if as_json else markdown(record), end="")
    print(f"The page: {(out / 'index.html').resolve()}", file=sys.stderr)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
