"""`tisa-lab compare`: a method of one's own beside the others, on one page."""

import json
import sys
from pathlib import Path

from tisa_lab.compare.settings import CompareConfig
from tisa_lab.executors import Place
from tisa_lab.pretrain.corpus import CorpusNames

CONFIG, NAMES, HERE = CompareConfig(), CorpusNames(), Place()


def command(
    methods: list[str],
    /,
    *,
    config: CompareConfig = CONFIG,
    names: CorpusNames = NAMES,
    valid: str | None = None,
    place: Place = HERE,
    out: Path = Path("compare"),
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Compare methods of your own with others: criteria, tasks, recall, pretraining, length, speed.

    One file in, one page out; no data is needed. Some minutes on two cores. On a GPU `--size large`
    takes all methods of the package, longer training, and a text of yours with --data and --valid.
    Finished models are kept: the same command goes on from there.

    Examples: `tisa-lab compare my_file.py:Mine`,
    `tisa-lab compare my_file.py:Mine --others none,rotary,tisa --steps 2000 --out page`,
    `tisa-lab compare my_file.py:Mine --size large --executor pool --workers 6 --out large`

    Args:
        methods: Position methods, by name or as my_file.py:Class.
        config: Sizes.
        names: The text of the language models; by default one that is made up.
        valid: Held-out documents of that text, some of them as long as it is read at.
        place: Where models are trained.
        out: Folder for index.html, compare.json, .md and .png, and the models.
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
            tuple(methods), out, config=config, names=names, valid=valid, place=place,
            device=device, command=command_line(), progress=_tell,
        )  # fmt: skip
        write(record, out)
    print(json.dumps(record, ensure_ascii=False) if as_json else markdown(record), end="")
    print(f"The page: {(out / 'index.html').resolve()}", file=sys.stderr)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
