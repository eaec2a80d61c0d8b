"""Durable files: what is written is there whole or not at all, and on the disk.

Everything in this repository that must survive a kill, a full disk or a power cut is written here:
into a place beside its own, flushed, and renamed. `Lines` is a file that many processes append to.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def write_bytes(path: str | Path, content: bytes) -> None:
    """Give the file this content: a reader meets the old one or the new one, never a part."""
    with new_file(path) as unfinished:
        unfinished.write_bytes(content)


def write_text(path: str | Path, text: str) -> None:
    """Give the file this text, in UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield a place to write a file at; what is there at the end gets the name `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        _flush(unfinished)
        os.replace(unfinished, path)
        _flush(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it gets the name `path`, whole.

    An empty folder of that name gives way to it; one with something in it does so if `replace`.
    """
    path = Path(path).absolute()
    check_new_folder(path, replace=replace)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(
        tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".unfinished", dir=path.parent)
    )
    try:
        # Readable like any other folder, unlike one of `mkdtemp`.
        unfinished.chmod(0o777 & ~_umask())
        yield unfinished
        finish_folder(unfinished, path, replace=replace)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_new_folder(path: str | Path, *, replace: bool = False, own: Sequence[str] = ()) -> None:
    """Refuse a place at which `new_folder` would have to remove what somebody wrote.

    A folder in which one of the files `own` lies is the caller's, and may be written again.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; name a new folder")
    written = any((path / name).exists() for name in own)
    if path.is_dir() and any(path.iterdir()) and not (replace or written):
        raise FileExistsError(f"{path} is there already, and not empty; name a new folder")


def finish_folder(unfinished: Path, path: Path, *, replace: bool = False) -> None:
    """Give a written folder its name, all of it on the disk first."""
    for part in (*unfinished.rglob("*"), unfinished):
        _flush(part)
    if replace:
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_dir():
        path.rmdir()
    os.replace(unfinished, path)
    _flush(path.parent)


@contextmanager
def locked(path: str | Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of that file; yield whether it was had. The system lets go of a dead process's.

    Without `wait` a lock that somebody else has is not waited for, and False is yielded.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


class Lines:
    """A file of lines that many processes append to, and may be killed while they do.

    What a killed process left of a line is removed before the next one is written, and not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, *lines: str) -> None:
        """Add lines, all of them or none; they are on the disk when this returns."""
        content = "".join(f"{line}\n" for line in lines).encode()
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
            _flush(self.path.parent)

    def read(self, start: int = 0) -> tuple[list[str], int]:
        """Return the whole lines from a place on, and the place where the next one begins."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            return [], start
        end = content.rfind(b"\n") + 1
        return [line.decode() for line in content[:end].split(b"\n") if line.strip()], start + end


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


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows flushes no folders
        return
    file = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
