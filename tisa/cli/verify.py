"""`tisa verify`: whether what was written is as it was written, and what can be repaired."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tisa.store.verification import Item

# Of what a thing was made from, so many words are shown; all of them are in the JSON.
SHOWN = 4


def command(
    folders: list[Path],
    /,
    *,
    repair: bool = False,
    as_json: bool = False,
) -> None:
    """Say of any run, record, corpus, checkpoint or model whether it is whole.

    Names what each thing is, what it was made from, and which bytes of which file are damaged. The
    exit code is 1 where something is, and was not repaired. Nothing is changed without --repair.

    Examples: `tisa verify run`, `tisa verify run corpus --json`, `tisa verify table3 --repair`

    Args:
        folders: Folders, or files, that were written by `tisa` or `tisa-lab`; or any model's.
        repair: Set aside what is damaged where it is made again, or the one before it is whole;
            remove what a killed process left.
        as_json: Print everything as JSON.
    """
    from tisa.store.repair import repaired
    from tisa.store.verification import verified

    done = [line for folder in folders for line in repaired(folder)] if repair else []
    found = [item for folder in folders for item in verified(folder)]
    damaged = [item for item in found if item.state == "damaged"]
    if as_json:
        print(json.dumps({"whole": not damaged, "repaired": done, "found": [*map(_told, found)]}))
    else:
        for line in (*done, *(_line(item) for item in found)):
            print(line)
        print(_advice(found))
    if damaged:
        raise SystemExit(1)


def _told(item: "Item") -> Mapping[str, Any]:
    return {**vars(item), "path": str(item.path), "damages": list(item.damages)}


def _line(item: "Item") -> str:
    about = [f"{name} {value}" for name, value in item.made_from.items() if value not in (None, "")]
    more = f", and {len(about) - SHOWN} more" if len(about) > SHOWN else ""
    made = f" ({', '.join(about[:SHOWN])}{more})" if about else ""
    wrong = "".join(f"\n             {damage}" for damage in item.damages)
    return f"{item.state:12} {item.path}: {item.kind}{made}{wrong}"


def _advice(found: list["Item"]) -> str:
    damaged = [item for item in found if item.state == "damaged"]
    if any(item.repair for item in damaged):
        return "Damaged; --repair makes good what can be, and the same command then goes on."
    if damaged:
        return "Damaged; take a copy that is whole, or make it again with the command that made it."
    if any(item.repair for item in found):
        return "Whole; --repair removes what a killed process left."
    if any(item.state == "no checksum" for item in found):
        return "Nothing is damaged; what has no checksum was checked for its form only."
    return "Whole."
