"""A checksum inside what it is of: in a JSON object, in front of bytes, and of tensors.

A seal is two fields, so that a flipped bit in the name of one leaves the other: where one of them
stands, both must. What was written before there were seals has neither, and is read as it is.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tisa.store.files import write_bytes, write_text

# The version of everything that this package writes with a checksum.
SEALED, SUM, FORMAT = "sealed", "sha256", 1


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
        values = json.loads(Path(path).read_bytes().decode())
    except ValueError as wrong:
        raise Damaged(f"{path}: no JSON ({wrong}); {remedy}") from None
    if not isinstance(values, dict):
        raise Damaged(f"{path}: no JSON object; {remedy}")
    return opened(values, str(path), remedy=remedy)


def write_sealed(path: str | Path, about: Mapping[str, Any], content: bytes) -> None:
    """Write bytes behind one line of JSON that says what they are, and has their checksum."""
    told = {**about, "size": len(content), "content": hashlib.sha256(content).hexdigest()}
    write_bytes(path, json.dumps(sealed(told)).encode() + b"\n" + content)


def read_bytes(path: str | Path, *, remedy: str) -> tuple[dict[str, Any], bytes]:
    """Return what `write_sealed` was given; of a file without a seal an empty dict, and all."""
    whole = Path(path).read_bytes()
    if whole[:1] != b"{" and SEALED.encode() not in whole[:4096]:
        return {}, whole
    first, _, content = whole.partition(b"\n")
    damaged = Damaged(f"{path}: not as it was written, its checksum is another one; {remedy}")
    try:
        about = opened(json.loads(first), str(path), remedy=remedy)
        told = about.pop("size"), about.pop("content")
    except (ValueError, KeyError):
        raise damaged from None
    if told != (len(content), hashlib.sha256(content).hexdigest()):
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
