"""A file of records, one a line, that many processes append to and may be killed while they do."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tisa.store.files import flush, make_folder
from tisa.store.locks import locked
from tisa.store.seals import Damaged, opened, sealed

REMEDY = "remove that line, and run again what it stood for"


class Lines:
    """JSON objects, one a line, each with a checksum of its own.

    What a killed process left of a line is removed before the next one is written, and not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, *records: dict[str, Any]) -> None:
        """Add records, all of them or none; they are on the disk when this returns."""
        content = "".join(f"{line(record)}\n" for record in records).encode()
        make_folder(self.path.parent)
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                end = _without_torn_line(file)
                try:
                    _write(file, content)
                    os.fsync(file)
                except OSError:
                    os.ftruncate(file, end)
                    raise
            finally:
                os.close(file)
            flush(self.path.parent)

    def read(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the records from a place on, and the place where the next one begins."""
        lines = list(self.each(start))
        return [line.record() for line in lines], lines[-1].end if lines else start

    def each(self, start: int = 0) -> Iterator["Line"]:
        """Yield the whole lines from a place on."""
        try:
            with self.path.open("rb") as file:
                before, content = file.read(start), file.read()
        except FileNotFoundError:
            return
        number = before.count(b"\n")
        # Not `splitlines`, which also cuts at other characters.
        for text in content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]:
            number, start = number + 1, start + len(text) + 1
            if text.strip():
                yield Line(text, f"{self.path}, line {number}", start)


class Line(NamedTuple):
    """A line as it stands in a file, the words for its place, and where the next one begins."""

    text: bytes
    where: str
    end: int

    def record(self) -> dict[str, Any]:
        """Return what it says, its checksum being right."""
        try:
            values = json.loads(self.text.decode())
        except ValueError as wrong:
            raise Damaged(f"{self.where}: no JSON ({wrong}); {REMEDY}") from None
        if not isinstance(values, dict):
            raise Damaged(f"{self.where}: no record, but {self.text[:60]!r}; {REMEDY}")
        return opened(values, self.where, remedy=REMEDY)


def line(record: dict[str, Any]) -> str:
    """Return a record as a line, sealed."""
    return json.dumps(sealed(record), ensure_ascii=False)


def _without_torn_line(file: int) -> int:
    """Remove what a killed process left of its line; return where the next one begins."""
    size = end = os.lseek(file, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        os.lseek(file, start, os.SEEK_SET)
        place = os.read(file, end - start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end != size:
        os.ftruncate(file, end)
    return end


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]
