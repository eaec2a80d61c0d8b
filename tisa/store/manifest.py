"""A folder's manifest: what it is, what it was made from, the SHA-256 and size of every file.

Checksums of blocks, cheaper ones, are kept beside it: they tell which bytes of a file are others.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tisa.store.files import make_folder, write_bytes
from tisa.store.locks import only_writer
from tisa.store.seals import Damaged, read_json, write_json

MANIFEST = "manifest.json"
BLOCK = 2**20
REMEDY = "take a copy that is whole, or make it again"


@dataclass(frozen=True)
class Manifest:
    """What stands in a folder's manifest."""

    kind: str
    identity: dict[str, Any]
    # By name: size, sha256, and the CRC-32 of each block.
    files: dict[str, dict[str, Any]]


def seal_folder(
    folder: Path, kind: str, identity: Mapping[str, Any], names: Iterable[str] | None = None
) -> None:
    """Write the manifest of a folder: of these files, or of all in it that are not hidden."""
    names = sorted(_names(folder) if names is None else names)
    # Hashing lets go of Python's lock: blocks on one core, the whole on another.
    with ThreadPoolExecutor(2) as pool:
        sums = pool.map(lambda name: _sum(folder / name), names)
        blocks = pool.map(lambda name: _blocks(folder / name), names)
        files = {
            name: {"size": (folder / name).stat().st_size, "sha256": whole, "blocks": parts}
            for name, whole, parts in zip(names, sums, blocks, strict=True)
        }
    write_json(folder / MANIFEST, {"kind": kind, "identity": dict(identity), "files": files})


def write_files(
    folder: str | Path, kind: str, identity: Mapping[str, Any], contents: Mapping[str, bytes]
) -> None:
    """Write files into a folder, which may have others, and a manifest of them, as its only writer.

    Until the manifest is there, the one of before says that the folder is not whole.
    """
    folder = Path(folder)
    make_folder(folder)
    with only_writer(folder / ".lock", folder, kept=False):
        for name, content in contents.items():
            write_bytes(folder / name, content)
        seal_folder(folder, kind, identity, contents)


def manifest_of(folder: Path) -> Manifest | None:
    """Return a folder's manifest; None where it has none, as before there were any."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    values = read_json(path, remedy=REMEDY)
    try:
        return Manifest(values["kind"], values["identity"], values["files"])
    except KeyError as lacking:
        raise Damaged(f"{path}: lacks {lacking}; {REMEDY}") from None


def check_folder(
    folder: Path, kind: str, *, identity: Mapping[str, Any] | None = None, remedy: str = REMEDY
) -> Manifest | None:
    """Return the manifest of a folder that is whole and what it is taken for; else refuse it.

    None where it has no manifest, as before there were any.
    """
    found = manifest_of(folder)
    if found is None:
        return None
    if found.kind != kind:
        raise Damaged(f"{folder}: expected a {kind}, got a {found.kind}; {remedy}")
    if identity is not None and found.identity != dict(identity):
        other = [
            k for k in {**found.identity, **identity} if found.identity.get(k) != identity.get(k)
        ]
        raise Damaged(f"{folder}: is of another run (other {', '.join(sorted(other))}); {remedy}")
    damages = list(damages_of(folder, found))
    if damages:
        more = f" and {len(damages) - 1} more" if len(damages) > 1 else ""
        raise Damaged(f"{folder}: {damages[0]}{more}; {remedy}")
    return found


def damages_of(folder: Path, manifest: Manifest) -> Iterable[str]:
    """Yield, of each file that is not as it was written, which it is and which bytes are others."""
    with ThreadPoolExecutor(2) as pool:
        paths = [folder / name for name in manifest.files]
        sums = list(pool.map(lambda path: _sum(path) if path.is_file() else None, paths))
    for (name, told), path, found in zip(manifest.files.items(), paths, sums, strict=True):
        if found is None:
            yield f"{name} is missing"
        elif path.stat().st_size != told["size"]:
            yield f"{name} has {path.stat().st_size:,} bytes and not {told['size']:,}"
        elif found != told["sha256"]:
            yield f"{name} is damaged, {_where(told['blocks'], _blocks(path), told['size'])}"


def _where(told: list[int], found: list[int], size: int) -> str:
    wrong = [n for n, (one, other) in enumerate(zip(told, found, strict=True)) if one != other]
    if not wrong:
        return "bytes unknown"
    return f"bytes {wrong[0] * BLOCK:,} to {min(size, (wrong[-1] + 1) * BLOCK) - 1:,}"


def _names(folder: Path) -> Iterable[str]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and name.as_posix() != MANIFEST:
            yield name.as_posix()


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blocks(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]
