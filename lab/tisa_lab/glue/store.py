"""A folder of records that many processes may write to, and be killed while they do.

`records.jsonl` has a line for each finished run. It is written under a lock and flushed to the
disk; what a killed process left of a line is removed before the next one. A cell that is being run
is claimed by a lock on a file of its own: the system lets go of it when the process ends, however
it ends.
"""

import fcntl
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tisa_lab.glue.cell import Cell
from tisa_lab.glue.record import Record, record_of


class Claim:
    """The right to run one cell, held until `release` or until the process ends."""

    def __init__(self, file: int) -> None:
        self._file = file

    def release(self) -> None:
        """Let others run the cell."""
        os.close(self._file)


class Store:
    """Records in a folder, one for each cell."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "records.jsonl"
        self._claims = self.folder / "claims"
        self._keys: set[str] = set()
        self._read = 0

    def records(self) -> list[Record]:
        """Return all records, in the order in which they were finished."""
        return self._records_in(self._bytes(0))

    def done(self) -> set[str]:
        """Return the keys of the cells that are finished."""
        # Whole lines never change, so that only what is new has to be read.
        content = self._bytes(self._read)
        end = content.rfind(b"\n") + 1
        self._keys |= {record.cell.key for record in self._records_in(content[:end])}
        self._read += end
        return set(self._keys)

    def claim(self, cell: Cell) -> Claim | None:
        """Return the claim to a cell, None where it is finished or another process has it."""
        self._claims.mkdir(parents=True, exist_ok=True)
        file = os.open(self._claims / cell.key, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        # Finished by another process after we looked last and before we had the lock?
        if cell.key in self.done():
            os.close(file)
            return None
        return Claim(file)

    def append(self, *records: Record) -> None:
        """Add records, all of them or nothing; they are on the disk when this returns.

        Where there is no room for them, they are kept among the system's temporary files, and the
        error says where.
        """
        if not records:
            return
        lines = "".join(record.line() for record in records).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked() as file:
                end = _without_torn_line(file)
                try:
                    _write(file, lines)
                    os.fsync(file)
                except OSError:
                    os.ftruncate(file, end)
                    raise
            _sync_folder(self.folder)
        except OSError as full:
            kept = _keep(lines)
            label = records[0].cell.label
            told = (
                f"the finished run ({label}) is"
                if len(records) == 1
                else f"{len(records)} finished runs ({label}, …) are"
            )
            raise OSError(
                full.errno,
                f"{self.path}: {full.strerror}; {told} kept in {kept}: make room, add what is in "
                f"it with `cat {kept} >> {shlex.quote(str(self.path))}`, and go on",
            ) from full

    @contextmanager
    def _locked(self) -> Iterator[int]:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _records_in(self, content: bytes) -> list[Record]:
        try:
            return [record_of(line) for line in _whole_lines(content)]
        except ValueError as wrong:
            # A report may be of several folders: which of them is it?
            raise ValueError(f"{self.path}: {wrong}; remove that line") from None

    def _bytes(self, start: int) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return b""


def _whole_lines(content: bytes) -> list[str]:
    """Return the lines that have an end: what stands after the last one is torn."""
    return [line.decode() for line in content.split(b"\n")[:-1] if line.strip()]


def _without_torn_line(file: int) -> int:
    """Remove what a killed process left of its line; return where the next one begins."""
    size = os.fstat(file).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        place = os.pread(file, end - start, start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end != size:
        os.ftruncate(file, end)
    return end


def _write(file: int, lines: bytes) -> None:
    while lines:
        lines = lines[os.write(file, lines) :]


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _keep(lines: bytes) -> str:
    file, path = tempfile.mkstemp(prefix="tisa-glue-", suffix=".jsonl")
    with os.fdopen(file, "wb") as kept:
        kept.write(lines)
        kept.flush()
        os.fsync(kept.fileno())
    return path
