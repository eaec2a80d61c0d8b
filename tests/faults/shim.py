"""What makes the k-th write, fsync, rename or read below a folder fail, and notes all of them.

`Native` loads `shim.c` with LD_PRELOAD, so that writers count that are not Python's: safetensors,
PyTorch, NumPy, Pillow. `Patched` replaces Python's own functions, and needs no compiler.
"""

import builtins
import ctypes
import errno
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("write", "fsync", "rename", "read")
LOADED = "TISA_FAULTS_SHIM"


@dataclass(frozen=True)
class Fault:
    """What fails: the k-th call of a kind, alone or with all after it, wholly or by half."""

    name: str
    kind: str
    error: int
    sticky: bool = False
    half: bool = False


FAULTS = (
    Fault("write: no room from there on", "write", errno.ENOSPC, sticky=True),
    Fault("write: I/O error", "write", errno.EIO),
    Fault("write: half of it", "write", 0, half=True),
    Fault("fsync: I/O error", "fsync", errno.EIO),
    Fault("rename: I/O error", "rename", errno.EIO),
    Fault("read: I/O error", "read", errno.EIO),
    Fault("read: half of it", "read", 0, half=True),
)


class Native:
    """The shim in C, in a process that was started with it.

    Its counts are those of the process that has made it, and of what that forks from then on.
    """

    def __init__(self) -> None:
        self._c = ctypes.CDLL(os.environ[LOADED])
        self._c.faults_apart()

    def arm(self, folder: Path, fault: Fault | None = None, k: int = 0, log: int = -1) -> None:
        """Count from now on, let the k-th call fail, and note everything in the file `log`."""
        kind = -1 if fault is None else KINDS.index(fault.kind)
        error, sticky, half = (fault.error, fault.sticky, fault.half) if fault else (0, 0, 0)
        where = os.fsencode(folder.resolve())
        self._c.faults_arm(where, kind, ctypes.c_long(k), error, int(sticky), int(half), log)

    def disarm(self) -> None:
        """Let everything pass."""
        self._c.faults_disarm()

    def counts(self) -> dict[str, int]:
        """Return how many calls of each kind there were."""
        return {kind: self._c.faults_count(n) for n, kind in enumerate(KINDS)}

    def fired(self) -> int:
        """Return how many calls failed."""
        return int(self._c.faults_fired())


def compiler() -> str | None:
    """Return a C compiler, None where there is none, or where the system is not Linux."""
    return shutil.which("cc") or shutil.which("gcc") if sys.platform == "linux" else None


def begin_again_with_shim(words: Sequence[str]) -> None:
    """Start this program again, with the shim loaded; return where it is."""
    if LOADED in os.environ:
        return
    made = Path(tempfile.mkdtemp(prefix="tisa-faults-")) / "shim.so"
    source = Path(__file__).with_name("shim.c")
    found = compiler()
    if found is None:
        raise FileNotFoundError("the shim needs Linux and a C compiler: install gcc")
    subprocess.run([found, "-O2", "-fPIC", "-shared", "-o", made, source, "-ldl"], check=True)
    more = {LOADED: str(made), "LD_PRELOAD": str(made), "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, *words], os.environ | more)


class Patched:
    """Python's own writers and readers, replaced in this process until `disarm`."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def arm(self, folder: Path, fault: Fault | None = None, k: int = 0) -> None:
        """Count from now on, and let the k-th call fail."""
        self.folder, self.fault, self.k = f"{folder.resolve()}/", fault, k
        self._count, self._fired = dict.fromkeys(KINDS, 0), 0
        shim, opened = self, io.open

        class Raw(io.FileIO):
            def write(self, content):
                half = shim._judged("write")
                return super().write(memoryview(content)[: len(content) // 2 if half else None])

            def readinto(self, buffer):
                half = shim._judged("read")
                return super().readinto(memoryview(buffer)[: len(buffer) // 2 if half else None])

            def readall(self):
                if shim._judged("read"):
                    return super().read(4) + super().readall()
                return super().readall()

        def open_(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
            if isinstance(file, int) or not shim._is_below(file):
                return opened(file, mode, buffering, encoding, errors, newline, **more)
            raw = Raw(file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            kind = io.BufferedReader if raw.readable() else io.BufferedWriter
            buffered = kind(raw)
            return (
                buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)
            )

        self._patch(io, "open", open_)
        self._patch(builtins, "open", open_)
        for name, kind in (("write", "write"), ("fsync", "fsync"), ("read", "read")):
            self._patch(os, name, self._of_file(getattr(os, name), kind))
        for name in ("replace", "rename"):
            self._patch(os, name, self._of_names(getattr(os, name)))

    def disarm(self) -> None:
        """Put back what was there."""
        while self._before:
            setattr(*self._before.pop())

    def counts(self) -> dict[str, int]:
        """Return how many calls of each kind there were."""
        return dict(self._count)

    def fired(self) -> int:
        """Return how many calls failed."""
        return self._fired

    def _patch(self, place, name, new):
        self._before.append((place, name, getattr(place, name)))
        setattr(place, name, new)

    def _is_below(self, path):
        return os.path.abspath(os.fsdecode(path)).startswith(self.folder)

    def _of_file(self, real, kind):
        def call(file, *given):
            where = os.path.realpath(f"/proc/self/fd/{file}")
            if not f"{where}/".startswith(self.folder):
                return real(file, *given)
            if kind == "fsync":
                # Only counted: hundreds of them would wait for the disk.
                return self._judged(kind) or None
            if not self._judged(kind):
                return real(file, *given)
            size = given[0] if isinstance(given[0], int) else len(given[0])
            half = max(1, size // 2)
            return real(file, half if isinstance(given[0], int) else given[0][:half])

        return call

    def _of_names(self, real):
        def call(one, other):
            if self._is_below(one):
                self._judged("rename")
            real(one, other)

        return call

    def _judged(self, kind):
        """Raise where this call is to fail; return whether it is to be done by half."""
        self._count[kind] += 1
        number, fault = self._count[kind], self.fault
        if fault is None or fault.kind != kind:
            return False
        if number != self.k and not (fault.sticky and number > self.k):
            return False
        self._fired += 1
        if fault.half:
            return True
        raise OSError(fault.error, os.strerror(fault.error))
