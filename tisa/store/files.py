"""A file or a folder, whole or not at all: written beside its place, flushed, and renamed.

One process at a time: the system lets go of a lock when its process ends.
"""

import ctypes
import errno
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

# Of what a disk answers; whoever meets one of these is told what to do about it.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)
# How libraries say the same that write files by themselves: safetensors, PyTorch, NumPy.
NATIVE = re.compile(
    r"os error (\d+)|StreamWriter failed|write failed|unexpected pos|iostream error"
    r"|requested and \d+ written"
)
# In a folder that somebody writes into, and who that is.
LOCK, HOLDER = ".lock", ".held-by"
# What a killed process leaves of a file or a folder.
LEFT = re.compile(r"\..+\.(unfinished|before)")
# Places that are held, and the thread that does; a forked process holds nothing.
_MINE: set[tuple[Path, int, int]] = set()


class Refused(OSError):  # noqa: N818
    """A disk did not do what was asked of it; says which file it was and what to do."""

    def __str__(self) -> str:
        return str(self.strerror)


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
    with told(path):
        make_folder(path.parent)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        try:
            yield unfinished
            flush(unfinished)
            os.replace(unfinished, path)
            flush(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it gets the name `path`, whole.

    An empty folder of that name gives way to it; one with something in it does so if `replace`.
    Until then other processes that want to write there are refused.
    """
    path = Path(path).absolute()
    check_new_folder(path, replace=replace)
    with told(path), alone(path):
        unfinished = Path(
            tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".unfinished", dir=path.parent)
        )
        try:
            # Readable like any other folder, unlike one of `mkdtemp`.
            unfinished.chmod(0o777 & ~umask())
            yield unfinished
            check_new_folder(path, replace=replace)
            finish_folder(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def renewed(
    path: str | Path, *, mark: str, first: Sequence[str] = (), stale: Sequence[str] = ()
) -> Iterator[Path]:
    """Yield where to write a folder anew: beside its name, which it then gets in one step.

    A folder of that name in which the file `mark` lies gives way. What the new one has no file of
    is carried over: files `first` before anything is written, others afterwards, none that match
    `stale`. Somebody else's folder, a mounted one and the working directory are written in place.
    """
    path = Path(path).resolve()
    fixed = path.is_dir() and (os.path.ismount(path) or Path.cwd().is_relative_to(path))
    if fixed or not (is_unused(path) or (path / mark).is_file()):
        with alone(path):
            yield path
        return
    with new_folder(path, replace=True) as fresh:
        _carry_over(path, fresh, [path / name for name in first])
        yield fresh
        _carry_over(path, fresh, [
            part for part in path.rglob("*")
            if part.parent != path or not any(part.match(name) for name in stale)
        ])  # fmt: skip


def _carry_over(path: Path, fresh: Path, parts: Sequence[Path]) -> None:
    for part in parts:
        here = fresh / part.relative_to(path)
        if not part.is_file() or here.exists() or part.name.endswith((LOCK, LOCK + HOLDER)):
            continue
        here.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Nobody writes to it any more under its old name; it may be large.
            os.link(part, here, follow_symlinks=False)
        except OSError:
            shutil.copy2(part, here, follow_symlinks=False)


@contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """Keep other processes from making a folder of that name; the lock lies beside it.

    Inside of it `new_folder` makes that folder: what is asked for again is had.
    """
    path = Path(path).absolute()
    mine = path, os.getpid(), threading.get_ident()
    if mine in _MINE:
        yield
        return
    make_folder(path.parent)
    with only_writer(path.with_name(f".{path.name}{LOCK}"), path, kept=False):
        _MINE.add(mine)
        try:
            yield
        finally:
            _MINE.discard(mine)


@contextmanager
def own_folder(path: str | Path | None, *, own: Sequence[str]) -> Iterator[None]:
    """Keep other processes out of a folder that files are written into, made where it is not there.

    A folder of somebody else's is refused (`check_new_folder`). Of None nothing is done.
    """
    if path is None:
        yield
        return
    path = Path(path).absolute()
    check_new_folder(path, own=own)
    with told(path):
        make_folder(path)
    try:
        with only_writer(path / LOCK, path, kept=False):
            yield
    finally:
        # What was not written leaves no empty folder.
        with suppress(OSError):
            path.rmdir()


def check_new_folder(path: str | Path, *, replace: bool = False, own: Sequence[str] = ()) -> None:
    """Refuse a place at which `new_folder` would have to remove what somebody wrote.

    A folder in which one of the files `own` lies is the caller's, and may be written again.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; name a new folder")
    written = any((path / name).exists() for name in own)
    if not (replace or written or is_unused(path)):
        raise FileExistsError(f"{path} is there already, and not empty; name a new folder")


def is_unused(path: Path) -> bool:
    """Return whether a folder is not there, or holds but locks and what a killed process left."""
    return not path.is_dir() or all(
        part.name.endswith((LOCK, LOCK + HOLDER))
        or LEFT.fullmatch(part.name)
        or (part.is_dir() and not part.is_symlink() and is_unused(part))
        for part in path.iterdir()
    )


def finish_folder(unfinished: Path, path: Path) -> None:
    """Give a written folder its name, all of it on the disk first; what was there gives way.

    On Linux both change their names at once, so that there is always one of the name. Elsewhere a
    kill between two renames leaves the old one beside its place, which `tisa verify` brings back.
    """
    for part in (*unfinished.rglob("*"), unfinished):
        flush(part)
    before = unfinished.with_suffix(".before")
    at_once = path.is_dir() and exchanged(unfinished, path)
    try:
        if not at_once:
            if path.is_dir():
                os.replace(path, before)
            os.replace(unfinished, path)
        flush(path.parent)
    except OSError:
        # What is said not to be written is not there, and what was there before is.
        if at_once:
            exchanged(unfinished, path)
        elif not unfinished.is_dir():
            os.replace(path, unfinished)
        if before.is_dir():
            os.replace(before, path)
        raise
    shutil.rmtree(unfinished if at_once else before, ignore_errors=True)


def exchanged(one: Path, other: Path) -> bool:
    """Let two names change places in one step; return whether the system can."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return int(rename(here, os.fsencode(one), here, os.fsencode(other), both)) == 0


def make_folder(path: str | Path) -> None:
    """Make a folder and those above it, on the disk when this returns."""
    path = Path(path)
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows flushes no folders
        return
    file = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def umask() -> int:
    """Return the rights that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def told(path: Path, *, reading: bool = False, whole: bool = True) -> Iterator[None]:
    """Say of a disk's refusal what was being written, or read, and what to do.

    Not `whole`: something of what is written may be left.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as wrong:
        number = getattr(wrong, "errno", None)
        if number is None and (native := NATIVE.search(str(wrong))):
            number = int(native[1] or errno.EIO)
        if number not in DISK:
            raise
        raise _refusal(path, number, reading, whole) from wrong


def _refusal(path: Path, number: int, reading: bool, whole: bool) -> Refused:
    why = os.strerror(number)
    if reading:
        told = f"could not be read ({why}); look after its disk and its rights, and start again"
    else:
        left = ", and nothing of it is left" if whole else ""
        told = (
            f"could not be written ({why}){left}; make room or name another place, and start again"
        )
    return Refused(number, f"{path}: {told}")


@contextmanager
def locked(path: str | Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of that file; yield whether it was had.

    Without `wait` a lock that somebody else has is not waited for, and False is yielded.
    """
    path = Path(path)
    make_folder(path.parent)
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


@contextmanager
def only_writer(
    lock: Path, place: Path, *, patience: float = 0.0, kept: bool = True
) -> Iterator[None]:
    """Keep other processes from writing at a place; say who does where one does already.

    Args:
        lock: the file that is locked; the holder's name stands beside it.
        place: what is written, for the message.
        patience: seconds to wait for the other one's end.
        kept: leave the lock's file there afterwards.
    """
    end = time.monotonic() + patience
    holder = lock.with_name(f"{lock.name}{HOLDER}")
    while True:
        with locked(lock, wait=False) as had:
            if had:
                try:
                    with told(place):
                        holder.write_text(f"process {os.getpid()} on {platform.node()}")
                    yield
                finally:
                    if not kept:
                        # While it is still held: whoever opens the name now makes a new file.
                        for path in (holder, lock):
                            with suppress(OSError):
                                path.unlink()
                return
        if time.monotonic() > end:
            who = "another process"
            with suppress(OSError):
                who = holder.read_text(encoding="utf-8") or who
            raise BlockingIOError(
                f"{place}: {who} writes there; wait for its end, or name another folder"
            )
        time.sleep(0.2)
