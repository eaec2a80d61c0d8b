"""What proves that something is as it was written: of JSON, bytes, tensors, lines, folders.

A seal is two fields, so that a flipped bit in the name of one leaves the other: where one of them
stands, both must. What was written before there were seals has neither, and is read as it is.

A file of records has one a line, each with a seal; many processes append to it. A folder has a
manifest: what it is, what it was made from, SHA-256 and size of every file, and cheaper checksums
of blocks, which tell which bytes of a file are others.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tisa.store.files import flush, locked, make_folder, new_file, told, write_bytes, write_text

# The version of everything that this package writes with a checksum.
SEALED, SUM, FORMAT = "sealed", "sha256", 1
LINE_REMEDY = "remove that line, and run again what it stood for"
MANIFEST = "manifest.json"
BLOCK = 2**20
# In the identity of a run: told, and not compared, since a change of the code ends no run.
CODE = "code"
FOLDER_REMEDY = "take a copy that is whole, or make it again"


class Damaged(ValueError):  # noqa: N818
    """Something is not as it was written: a disk, a copy or a hand has changed it."""


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with a seal."""
    own = {k: v for k, v in values.items() if k not in (SEALED, SUM)} | {SEALED: FORMAT}
    return own | {SUM: _digest(own)}


def opened(values: Mapping[str, Any], where: str, *, remedy: str) -> dict[str, Any]:
    """Return the values without their seal; where it is broken, `where` is said to be damaged."""
    own = dict(values)
    told, form = own.pop(SUM, None), own.get(SEALED)
    if told is None and form is None:
        return own
    if told is not None and form is not None and form != FORMAT and told == _digest(own):
        raise ValueError(
            f"{where}: written in format {form}, this package reads up to {FORMAT}; upgrade tisa"
        )
    if form != FORMAT or told != _digest(own):
        raise Damaged(f"{where}: not as it was written, its checksum is another one; {remedy}")
    del own[SEALED]
    return own


def write_json(path: str | Path, values: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write a JSON object with a seal, whole or not at all."""
    text = json.dumps(sealed(values), indent=indent, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_json(path: str | Path, *, remedy: str) -> dict[str, Any]:
    """Return the JSON object of a file, its seal checked where it has one."""
    try:
        with told(Path(path), reading=True):
            values = json.loads(Path(path).read_bytes().decode())
    except ValueError as wrong:
        raise Damaged(f"{path}: no JSON ({wrong}); {remedy}") from None
    if not isinstance(values, dict):
        raise Damaged(f"{path}: no JSON object; {remedy}")
    return opened(values, str(path), remedy=remedy)


def write_sealed(path: str | Path, about: Mapping[str, Any], content: bytes) -> None:
    """Write bytes behind one line of JSON that says what they are, and has their checksum."""
    values = {**about, "size": len(content), "content": hashlib.sha256(content).hexdigest()}
    with new_file(path) as unfinished, unfinished.open("wb") as file:
        file.write(json.dumps(sealed(values)).encode() + b"\n")
        file.write(content)


def read_bytes(path: str | Path, *, remedy: str) -> tuple[dict[str, Any], bytes]:
    """Return what `write_sealed` was given; of a file without a seal an empty dict, and all."""
    with told(Path(path), reading=True), Path(path).open("rb") as file:
        first = file.readline()
        if first[:1] != b"{" and SEALED.encode() not in first[:4096]:
            return {}, first + file.read()
        content = file.read()
    damaged = Damaged(f"{path}: not as it was written, its checksum is another one; {remedy}")
    try:
        about = opened(json.loads(first), str(path), remedy=remedy)
        size, digest = about.pop("size"), about.pop("content")
    except (ValueError, KeyError):
        raise damaged from None
    if (size, digest) != (len(content), hashlib.sha256(content).hexdigest()):
        raise damaged
    return about, content


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors by name, dtype, shape and bytes, wherever they lie."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


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
                # First: after it whatever fails can be taken back.
                flush(self.path.parent)
                end = _without_torn_line(file, self.path)
                try:
                    _write(file, content)
                    os.fsync(file)
                except OSError:
                    os.ftruncate(file, end)
                    raise
            finally:
                os.close(file)

    def read(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the records from a place on, and the place where the next one begins."""
        lines = list(self.each(start))
        return [line.record() for line in lines], lines[-1].end if lines else start

    def each(self, start: int = 0) -> Iterator["Line"]:
        """Yield the whole lines from a place on."""
        try:
            with told(self.path, reading=True), self.path.open("rb") as file:
                before, content = file.read(start), file.read()
        except FileNotFoundError:
            return
        number = before.count(b"\n")
        # Not `splitlines`, which also cuts at other characters.
        *whole, torn = content.split(b"\n")
        for text in [*whole, torn] if _has_lost_its_end(torn) else whole:
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
            raise Damaged(f"{self.where}: no JSON ({wrong}); {LINE_REMEDY}") from None
        if not isinstance(values, dict):
            raise Damaged(f"{self.where}: no record, but {self.text[:60]!r}; {LINE_REMEDY}")
        return opened(values, self.where, remedy=LINE_REMEDY)


def line(record: dict[str, Any]) -> str:
    """Return a record as a line, sealed."""
    return json.dumps(sealed(record), ensure_ascii=False)


def _has_lost_its_end(torn: bytes) -> bool:
    """Return whether it is a whole record with another byte where its line ended.

    What a killed process leaves of a line is less than a record, or a record and nothing more.
    """
    try:
        values = json.loads(torn[:-1])
        return SUM in values and bool(opened(values, "", remedy=""))
    except (ValueError, TypeError):
        return False


def _without_torn_line(file: int, path: Path) -> int:
    """Remove what a killed process left of its line; return where the next one begins."""
    # Of the system one may get less than one asks for: whole lines would be taken for torn ones.
    with open(file, "rb", closefd=False) as lines:
        size = end = lines.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            lines.seek(start)
            place = lines.read(end - start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        lines.seek(end)
        if _has_lost_its_end(lines.read()):
            raise Damaged(f"{path}: its last line ends with another byte; {LINE_REMEDY}")
    if end != size:
        os.ftruncate(file, end)
    return end


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


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
    """Write the manifest of a folder: of these files, or of all in it that are not hidden.

    They are on the disk first, as the folder's own name is: libraries leave that to the system.
    """
    names = sorted(_names(folder) if names is None else names)
    for name in names:
        flush(folder / name)
    for part in {(folder / name).parent for name in names} | {folder.absolute().parent}:
        flush(part)
    # Hashing lets go of Python's lock: two files at a time.
    with ThreadPoolExecutor(2) as pool:
        files = dict(zip(names, pool.map(lambda name: _sums(folder / name), names), strict=True))
    write_json(folder / MANIFEST, {"kind": kind, "identity": dict(identity), "files": files})


def write_files(
    folder: Path, kind: str, identity: Mapping[str, Any], files: Mapping[str, str | bytes]
) -> None:
    """Write files into a folder, each whole, and the manifest of them last.

    A kill in between leaves a manifest to which the files do not fit, which `tisa verify` says.
    """
    for name, content in files.items():
        write_bytes(folder / name, content.encode() if isinstance(content, str) else content)
    seal_folder(folder, kind, identity, files)


def manifest_of(folder: Path) -> Manifest | None:
    """Return a folder's manifest; None where it has none, as before there were any."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    values = read_json(path, remedy=FOLDER_REMEDY)
    try:
        return Manifest(values["kind"], values["identity"], values["files"])
    except KeyError as lacking:
        raise Damaged(f"{path}: lacks {lacking}; {FOLDER_REMEDY}") from None


def check_folder(
    folder: Path,
    kind: str,
    *,
    identity: Mapping[str, Any] | None = None,
    remedy: str = FOLDER_REMEDY,
) -> Manifest | None:
    """Return the manifest of a folder that is whole and what it is taken for; else refuse it.

    None where it has no manifest, as before there were any.
    """
    found = manifest_of(folder)
    if found is None:
        return None
    if found.kind != kind:
        raise Damaged(f"{folder}: expected a {kind}, got a {found.kind}; {remedy}")
    if identity is not None:
        # What an earlier version did not know of a run is not compared.
        names = found.identity.keys() - {CODE}
        other = sorted(k for k in names if found.identity[k] != identity.get(k))
        if other:
            raise Damaged(f"{folder}: is of another run (other {', '.join(other)}); {remedy}")
    damages = list(damages_of(folder, found))
    if damages:
        more = f" and {len(damages) - 1} more" if len(damages) > 1 else ""
        raise Damaged(f"{folder}: {damages[0]}{more}; {remedy}")
    return found


def damages_of(folder: Path, manifest: Manifest) -> Iterable[str]:
    """Yield, of each file that is not as it was written, which it is and which bytes are others."""
    names = list(manifest.files)
    with ThreadPoolExecutor(2) as pool:
        for name, wrong in zip(
            names, pool.map(lambda n: _damage(folder / n, manifest.files[n]), names), strict=True
        ):
            if wrong:
                yield f"{name} {wrong}"


def _damage(path: Path, told: Mapping[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != told["size"]:
            return f"has {size:,} bytes and not {told['size']:,}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == told["sha256"]:
                return ""
        return f"is damaged, {_where(told['blocks'], _sums(path)['blocks'], told['size'])}"
    except FileNotFoundError:
        return "is missing"
    except OSError as wrong:
        return f"could not be read ({wrong.strerror})"


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


def _sums(path: Path) -> dict[str, Any]:
    """Return size, SHA-256 and the checksum of each block, in one pass."""
    whole, blocks, size = hashlib.sha256(), list[int](), 0
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := _fill(file, block):
            whole.update(block[:count])
            blocks.append(zlib.crc32(block[:count]))
            size += count
    return {"size": size, "sha256": whole.hexdigest(), "blocks": blocks}


def _fill(file: Any, block: memoryview) -> int:
    """Return how many bytes were read: a whole block but at the end, whatever one read gives."""
    count = 0
    while count < len(block) and (more := file.readinto(block[count:])):
        count += more
    return count
