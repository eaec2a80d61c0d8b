"""What can be made good of a damaged folder: done whole or not at all, and nothing is invented.

Whatever is damaged is kept beside its place, with `.damaged` at the end of its name.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tisa.store.files import flush, locked, only_writer, told, write_bytes
from tisa.store.seals import Damaged, Lines
from tisa.store.verification import ASIDE, Item, verified


def repaired(place: str | Path) -> list[str]:
    """Return what was done about a folder; it is refused while somebody writes there."""
    place = Path(place).absolute()
    with told(place), _alone(place):
        return [done for item in verified(place) for done in _repair(item)]


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold every lock of a folder: its own, the one beside it, and those of single jobs."""
    with ExitStack() as held:
        beside = place.with_name(f".{place.name}.lock")
        held.enter_context(only_writer(beside, place, kept=False))
        if place.is_dir():
            held.enter_context(only_writer(place / ".lock", place, kept=False))
            # A lock is a file without content; that of a file of lines is held line by line.
            for path in sorted(place.rglob("*")):
                own = path == place / ".lock" or path.name.endswith(".jsonl.lock")
                if own or not path.is_file() or path.stat().st_size:
                    continue
                if not held.enter_context(locked(path, wait=False)):
                    raise BlockingIOError(
                        f"{place}: another process writes there (it holds {path.name}); wait for "
                        "its end"
                    )
        yield


def _repair(item: Item) -> Sequence[str]:
    path = item.path
    if item.repair == "set aside":
        # A disk that did not answer once has damaged nothing.
        if all(again.state != "damaged" for again in verified(path)):
            return []
        return [f"set aside as {_set_aside(path).name}: {path}"]
    if item.repair == "take out":
        return _take_out(path)
    if item.repair == "bring back":
        kept = max(path.parent.glob(f".{path.name}.*.before"))
        os.replace(kept, path)
        flush(path.parent)
        return [f"brought back as it was before: {path}"]
    if item.repair == "remove" and path.exists() and not (_is_alive(path) or _is_needed(path)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        flush(path.parent)
        return [f"removed, unfinished: {path}"]
    return []


def _set_aside(path: Path) -> Path:
    """Return the new name of what is damaged: one that nobody has."""
    number, aside = 1, path.with_name(path.name + ASIDE)
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}-{number}{ASIDE}")
    os.replace(path, aside)
    flush(path.parent)
    return aside


def _take_out(path: Path) -> list[str]:
    """Take lines that are damaged out of a file of records, so that they are made again."""
    kept, out, end = [], [], 0
    with locked(path.with_name(f".{path.name}.lock")):
        for line in Lines(path).each():
            end = line.end
            try:
                line.record()
                kept.append(line.text)
            except Damaged:
                out.append(line.text)
        torn = path.read_bytes()[end:]
        if torn.strip():
            out.append(torn)
        aside = path.with_name(path.name + ASIDE)
        before = aside.read_bytes() if aside.is_file() else b""
        taken = b"".join(line + b"\n" for line in out)
        # First what is taken out, then what is left: a kill in between loses no line, and the next
        # repair finds it there.
        if not before.endswith(taken):
            write_bytes(aside, before + taken)
        write_bytes(path, b"".join(line + b"\n" for line in kept))
    count = "1 line" if len(out) == 1 else f"{len(out)} lines"
    return [f"{count} taken out, into {aside.name}: {path}"]


def _is_alive(path: Path) -> bool:
    """Return whether the process that a file's unfinished name tells of still runs here."""
    number = path.name.removesuffix(".unfinished").rpartition(".")[2]
    if not number.isdigit() or path.is_dir():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _is_needed(path: Path) -> bool:
    """Return whether it is what a folder was before, and nothing has that folder's name now."""
    if path.suffix != ".before":
        return False
    name = path.name.removeprefix(".").removesuffix(".before")
    places = (path.with_name(name), path.with_name(name.rpartition(".")[0] or name))
    return not any(place.exists() for place in places)
