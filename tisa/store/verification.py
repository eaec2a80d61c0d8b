"""Any folder: what is in it, whether it is as it was written, and what it was made from.

What the store wrote says by itself what it is: a manifest, a seal in a JSON object, in a line, in
front of bytes, in a header of tensors. Of other files the form is checked. Nothing is unpickled,
and links to folders are not followed.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tisa.store.files import LEFT
from tisa.store.seals import (
    MANIFEST,
    SEALED,
    SUM,
    Damaged,
    Lines,
    damages_of,
    manifest_of,
    opened,
    read_bytes,
)
from tisa.store.tensor_files import check_tensors

State = Literal["whole", "no checksum", "damaged", "left over"]
# What a repair does with an item; nothing where it is "".
Repair = Literal["", "set aside", "take out", "remove", "bring back"]
ASIDE = ".damaged"
AGAIN = "make it again"
# What one goes on from: there is another one where one is lost.
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Item:
    """One thing that was found: a folder with a manifest, or a file.

    `damages` says which file, which bytes, and what is wrong with them.
    """

    path: Path
    kind: str
    state: State
    damages: tuple[str, ...] = ()
    made_from: Mapping[str, Any] = field(default_factory=dict)
    repair: Repair = ""


def verified(place: str | Path) -> list[Item]:
    """Return what is in a folder, or what a file is."""
    place = Path(place).absolute()
    beside = [p for p in sorted(place.parent.glob(f".{place.name}.*")) if LEFT.fullmatch(p.name)]
    if not place.exists():
        kept = [path for path in beside if path.suffix == ".before" and path.is_dir()]
        if kept:
            told = f"is missing; as it was before, it lies in {kept[-1].name}"
            return [Item(place, "folder", "damaged", (told,), repair="bring back")]
        raise FileNotFoundError(f"{place} is not there; name a folder or a file")
    if place.is_dir():
        found = list(_in_folder(place, frozenset()))
    else:
        item = _file(place)
        found = [] if item is None else [item]
    if not found:
        raise ValueError(
            f"{place} holds nothing that this package writes, and no model; name another"
        )
    left = [Item(path, "unfinished", "left over", repair="remove") for path in beside]
    return [_with_repair(item, found) for item in found] + left


def _in_folder(folder: Path, covered: frozenset[Path]) -> Iterator[Item]:
    item = _sealed_folder(folder)
    if item is not None:
        yield item
        if item.state == "whole" or item.made_from:
            manifest = manifest_of(folder)
            assert manifest is not None
            covered |= {folder / name for name in manifest.files}
    unproved: list[Item] = []
    for path in sorted(folder.iterdir()):
        if LEFT.fullmatch(path.name):
            yield Item(path, "unfinished", "left over", repair="remove")
        elif path.name.endswith(ASIDE):
            continue
        elif path.is_dir():
            if not path.is_symlink():
                yield from _in_folder(path, covered)
        elif path not in covered and (path.name != MANIFEST or item is None):
            found = _file(path)
            if found is not None and found.state == "no checksum":
                unproved.append(found)
            elif found is not None:
                yield found
    if unproved:
        yield _unproved(folder, unproved, has_manifest=item is not None)


def _unproved(folder: Path, items: list[Item], *, has_manifest: bool) -> Item:
    """Return files without a checksum as one item; where there must be one, it is damaged."""
    kinds = {item.kind for item in items}
    is_model = "tensors" in kinds and (folder / "config.json").is_file()
    kind = "model" if is_model else "1 file" if len(items) == 1 else f"{len(items)} files"
    lacking = [item.path.name for item in items if item.made_from.get("format", 1) != 1]
    if lacking and not has_manifest:
        told = f"{MANIFEST} is missing, and nothing proves {lacking[0]}"
        return Item(folder, kind, "damaged", (told,))
    return Item(folder, kind, "no checksum")


def _sealed_folder(folder: Path) -> Item | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = manifest_of(folder)
        assert manifest is not None
        if SEALED not in json.loads(path.read_bytes()):
            return None
    except (OSError, ValueError) as wrong:
        if b'"kind"' not in path.read_bytes() and SEALED.encode() not in path.read_bytes():
            return None
        return Item(folder, "folder", "damaged", (_whole_file(path, wrong),))
    outside = [name for name in manifest.files if _is_outside(name)]
    damages = (
        tuple(f"{MANIFEST} names {name!r}, outside of the folder" for name in outside)
        or tuple(damages_of(folder, manifest))
    )  # fmt: skip
    told = _scalars(manifest.identity)
    return Item(folder, manifest.kind, "damaged" if damages else "whole", damages, told)


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts


def _file(path: Path) -> Item | None:
    """Return what a file is; None where nothing is known of it."""
    if path.suffix == ".jsonl":
        return _lines(path)
    if path.suffix == ".safetensors":
        try:
            about = check_tensors(path, remedy=AGAIN)
        except (OSError, Damaged) as wrong:
            return Item(path, "tensors", "damaged", (f"{path.name}: {_reason(wrong)}",))
        if about is None:
            return Item(path, "tensors", "no checksum")
        return Item(path, "tensors", "whole", (), _scalars(about))
    with path.open("rb") as file:
        head = file.read(4096)
    if path.suffix == ".json":
        return _json(path)
    # Bytes behind a line of JSON, as `write_sealed` writes them.
    if f'"{SEALED}"'.encode() in head or f'"{SUM}"'.encode() in head:
        return _sealed_bytes(path)
    return None


def _json(path: Path) -> Item:
    kind = path.stem
    try:
        values = json.loads(path.read_bytes().decode())
        if not isinstance(values, dict):
            return Item(path, kind, "no checksum")
        own = opened(values, path.name, remedy=AGAIN)
    except (OSError, ValueError) as wrong:
        return Item(path, kind, "damaged", (_whole_file(path, wrong),))
    if SEALED not in values:
        number = own.get("format")
        made = {"format": number} if isinstance(number, int) else {}
        return Item(path, kind, "no checksum", (), made)
    damages = tuple(_named(path.parent, own.get("files")))
    told = _scalars(own.get("identity", own))
    return Item(path, str(own.get("kind", kind)), "damaged" if damages else "whole", damages, told)


def _named(folder: Path, files: Any) -> Iterator[str]:
    """Yield what is wrong with files whose SHA-256 a sealed JSON object gives."""
    for name, told in files.items() if isinstance(files, dict) else ():
        if not re.fullmatch(r"[0-9a-f]{64}", str(told)):
            continue
        path = folder / name
        if _is_outside(name) or not path.is_file():
            yield f"{name} is missing"
            continue
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != told:
                yield f"{name} is damaged, bytes 0 to {path.stat().st_size - 1:,}"


def _lines(path: Path) -> Item:
    records, sealed, damages = 0, True, []
    start = 0
    for line in Lines(path).each():
        records, start = records + 1, line.end
        try:
            line.record()
            sealed &= SUM.encode() in line.text
        except ValueError as wrong:
            number = line.where.rpartition(" ")[2]
            place = f"bytes {line.end - len(line.text) - 1:,} to {line.end - 1:,}"
            damages.append(f"{path.name}, line {number}, {place}: {_reason(wrong)}")
    size = path.stat().st_size
    if path.read_bytes()[start:].strip():
        damages.append(f"{path.name}, bytes {start:,} to {size - 1:,}: a line without an end")
    state: State = "damaged" if damages else "whole" if sealed else "no checksum"
    repair: Repair = "take out" if damages else ""
    return Item(path, "records", state, tuple(damages), {"records": records}, repair)


def _sealed_bytes(path: Path) -> Item:
    try:
        about, _ = read_bytes(path, remedy=AGAIN)
    except (OSError, Damaged) as wrong:
        return Item(path, "sealed file", "damaged", (_whole_file(path, wrong),))
    told = _scalars(about.get("identity", about))
    return Item(path, str(about.get("kind", "sealed file")), "whole", (), told)


def _with_repair(item: Item, found: list[Item]) -> Item:
    """Return an item with what can be done about it, others being as they are.

    What is set aside is made again by the command that wrote it, or the checkpoint before it is
    gone on from; where neither is so, nothing is done.
    """
    if item.state != "damaged" or item.repair:
        return item
    folder = item.path.parent
    whole = [one.path for one in found if one.state == "whole" and one.kind.endswith(CHECKPOINT)]
    if item.path.is_dir():
        again = any(path.parent == folder for path in whole)
    elif item.path.suffix == ".json":
        # A run's: written anew by the run, which goes on from its checkpoint.
        again = any(folder in path.parents for path in whole)
    elif item.path.suffix == ".safetensors":
        # With a seal of its own it was kept to save time.
        again = b'"tisa"' in item.path.read_bytes()[: 2**16]
    else:
        again = item.path.with_name(f"{item.path.name}.before") in whole
    return replace(item, repair="set aside") if again else item


def _whole_file(path: Path, wrong: Exception) -> str:
    last = max(0, path.stat().st_size - 1)
    return f"{path.name}, bytes 0 to {last:,}: {_reason(wrong)}"


def _reason(wrong: Exception) -> str:
    """Return what is wrong, without the place before it and the remedy after it."""
    said = str(wrong).rpartition("; ")[0] or str(wrong)
    return re.sub(r"^\S*(, line \d+)?: ", "", said) if isinstance(wrong, Damaged) else said


def _scalars(values: Any, before: str = "") -> dict[str, Any]:
    """Return the numbers and words of an identity by their names; of an inner one `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict) and not before:
            found |= _scalars(value, f"{name}.")
        elif value is None or isinstance(value, str | int | float):
            found[f"{before}{name}"] = value
    return found
