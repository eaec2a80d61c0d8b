"""One process at a time: locks that the system lets go of when their process ends."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(path: str | Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of that file; yield whether it was had.

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
    holder = lock.with_name(f"{lock.name}.held-by")
    while True:
        with locked(lock, wait=False) as had:
            if had:
                holder.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
                try:
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
