"""`tisa-lab extrapolate`: trained models read past their training length."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from tisa.cli.options import KeywordsOf


def command(
    runs: list[Path],
    /,
    *,
    out: Path | None = None,
    as_json: bool = False,
    **options: Annotated[
        Any, KeywordsOf("tisa_lab.extrapolation.measuring:extrapolated", ("command", "progress"))
    ],
) -> None:
    """Measure the loss by length and by position, past the training length too.

    On whole documents that fill the longest window; every token counts once at every length.

    Example: `tisa-lab extrapolate tisa alibi --data valid.txt --lengths 512,1024 --out far`,
    `tisa-lab extrapolate rotary --data valid.txt --reading rotary:scaling=yarn,rotary:p=0.75`

    Args:
        runs: Folders of finished `tisa-lab pretrain` runs.
        out: Folder for index.html, extrapolation.json, .md and .png.
        as_json: Print the record.
        **options: What is measured.
    """
    from tisa.packages import needed
    from tisa.store import own_folder
    from tisa_lab.extrapolation.measuring import extrapolated
    from tisa_lab.extrapolation.report import markdown, write
    from tisa_lab.record import command_line

    if out is not None:
        # Before the minutes of measuring, not after them.
        needed("matplotlib", "figures", "tisa-lab")
    with own_folder(out, own=("extrapolation.json",)):
        record = extrapolated(runs, command=command_line(), progress=_tell, **options)
        if out is not None:
            write(record, out)
    print(json.dumps(record, ensure_ascii=False, allow_nan=False) if as_json else markdown(record))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
