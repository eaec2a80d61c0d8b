"""What a disk holds after a power cut: of all that was done, what was flushed, or what was not.

A file's content is on the disk once it was flushed, a name once the folder it stands in was. All
else may be there or not. `after` gives three of these disks, which are the ends of what may be.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Union

# Only what was flushed; every name, of contents only what was flushed; everything, as after a kill.
LOSSES = ("all that was not flushed", "contents that were not flushed", "nothing but the process")


class Step(NamedTuple):
    """One call, as the shim has noted it."""

    what: str
    path: str
    other: str
    place: int
    content: bytes


def steps(log: bytes) -> Iterator[Step]:
    """Yield what was done, in its order."""
    at = 0
    while at < len(log):
        end = log.index(b"\n", at)
        what, path, other, place, count = log[at:end].decode().split("\t")
        size = int(count) if what == "write" else 0
        at = end + 1 + size
        yield Step(what, path, other, int(place), log[end + 1 : at])


@dataclass
class File:
    """A content as processes see it, and as it is on the disk."""

    content: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass
class Folder:
    """Names as processes see them, and as they are on the disk."""

    names: dict[str, Union[File, "Folder"]] = field(default_factory=dict)
    flushed: dict[str, Union[File, "Folder"]] = field(default_factory=dict)


class Disk:
    """A folder whose content at the beginning is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.root = _read(folder)

    def do(self, step: Step) -> None:
        """Do what was done."""
        if step.what == "fsync":
            found = self._at(step.path)
            if isinstance(found, File):
                found.flushed = bytes(found.content)
            else:
                found.flushed = dict(found.names)
        elif step.what == "rename":
            self._put(step.other, self._take(step.path))
        elif step.what == "link":
            self._put(step.other, self._at(step.path))
        elif step.what == "exchange":
            one, other = self._take(step.path), self._take(step.other)
            self._put(step.path, other)
            self._put(step.other, one)
        elif step.what == "remove":
            self._take(step.path)
        elif step.what in ("folder", "create"):
            self._put(step.path, Folder() if step.what == "folder" else File())
        else:
            file = self._at(step.path)
            assert isinstance(file, File), step
            if step.what == "truncate":
                file.content = bytearray()
            elif step.what == "cut":
                del file.content[step.place :]
            else:
                end = step.place + len(step.content)
                file.content.extend(bytes(max(0, end - len(file.content))))
                file.content[step.place : end] = step.content

    def after(self, loss: str) -> dict[str, bytes | None]:
        """Return what is there after a power cut now: contents by path, None for a folder."""
        return dict(_left(self.root, LOSSES.index(loss), ""))

    def _at(self, path: str) -> File | Folder:
        found: File | Folder = self.root
        for part in Path(path).parts:
            assert isinstance(found, Folder), path
            found = found.names[part]
        return found

    def _names(self, path: str) -> tuple[dict[str, File | Folder], str]:
        parent = self._at(str(Path(path).parent))
        assert isinstance(parent, Folder), path
        return parent.names, Path(path).name

    def _take(self, path: str) -> File | Folder:
        names, name = self._names(path)
        return names.pop(name)

    def _put(self, path: str, what: File | Folder) -> None:
        names, name = self._names(path)
        names[name] = what


def digest(tree: dict[str, bytes | None]) -> str:
    """Return what is the same of two equal trees."""
    found = hashlib.sha256()
    for path in sorted(tree):
        content = tree[path]
        found.update(f"{path} {-1 if content is None else len(content)}\n".encode())
        found.update(content or b"")
    return found.hexdigest()


def read(folder: Path) -> dict[str, bytes | None]:
    """Return the tree of a folder."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def write(tree: dict[str, bytes | None], folder: Path) -> None:
    """Write a tree into a folder that is not there."""
    folder.mkdir(parents=True)
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def _read(path: Path) -> Folder:
    made = Folder()
    for part in path.iterdir():
        if part.is_dir():
            made.names[part.name] = _read(part)
        else:
            content = part.read_bytes()
            made.names[part.name] = File(bytearray(content), content)
    made.flushed = dict(made.names)
    return made


def _left(folder: Folder, loss: int, before: str) -> Iterator[tuple[str, bytes | None]]:
    for name, what in (folder.names if loss else folder.flushed).items():
        path = f"{before}{name}"
        if isinstance(what, Folder):
            yield path, None
            yield from _left(what, loss, f"{path}/")
        else:
            yield path, bytes(what.content) if loss == 2 else what.flushed
