"""`tisa-lab long`: what a converted encoder finds in long texts, beside pieces of them."""

import json
from pathlib import Path

from tisa_lab.long.settings import LongConfig
from tisa_lab.pretrain.text import Split

CONFIG = LongConfig()


def command(
    models: list[str],
    /,
    *,
    data: list[str],
    split: Split = "blank",
    text_column: str = "text",
    config: LongConfig = CONFIG,
    out: Path = Path("long"),
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Look for passkeys, needles and articles in ever longer texts: cut, in pieces, at once.

    Every way of reading answers the same queries. Ranks are kept query by query, and the same
    command goes on from there. Some minutes on two cores.

    Examples: `tisa-lab long minilm --data valid.txt`,
    `tisa-lab long minilm --data valid.txt --lengths 512,8192 --documents 295 --tasks passkey`,
    `tisa-lab long minilm --data valid.txt --converted replace,extend,my-converted --out far`

    Args:
        models: Folders or hub names of encoders whose vectors are means of hidden states.
        data: Files of articles (.txt, .txt.xz, .parquet; repeat it).
        split: What ends an article in a text file: a blank line, any line, the file.
        text_column: Of Parquet files.
        config: Sizes.
        out: Folder for records.jsonl, long.json, .md and .png.
        device: By default a GPU where there is one.
        as_json: Print the record instead of the tables.
    """
    from tisa.packages import needed
    from tisa.store import own_folder
    from tisa_lab.long.measuring import compared
    from tisa_lab.long.report import markdown, write
    from tisa_lab.pretrain.text import Source, check
    from tisa_lab.record import command_line
    from tisa_lab.view import view_for

    # Before the minutes of reading, not after them.
    needed("matplotlib", "figures", "tisa-lab")
    source = Source(tuple(data), split=split, text_column=text_column)
    check(source)
    with own_folder(out, own=("long.json", "records.jsonl")):
        with view_for() as view:
            record = compared(
                models, out, source=source, config=config, device=device,
                command=command_line(), view=view,
            )  # fmt: skip
        write(record, out)
    print(json.dumps(record, ensure_ascii=False) if as_json else markdown(record), end="")
