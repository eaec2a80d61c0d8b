"""A safetensors file, looked at without loading a tensor: its form, and the seal in its header."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from tisa.store.seals import SEALED, Damaged, opened

# Bytes of a number, and PyTorch's word for its type.
TYPES = {
    "BOOL": (1, "bool"), "U8": (1, "uint8"), "I8": (1, "int8"), "I16": (2, "int16"),
    "F16": (2, "float16"), "BF16": (2, "bfloat16"), "I32": (4, "int32"), "F32": (4, "float32"),
    "F64": (8, "float64"), "I64": (8, "int64"),
}  # fmt: skip


def check_tensors(path: Path, *, remedy: str) -> dict[str, Any] | None:
    """Return what a sealed file of tensors says of itself, None where it has no seal.

    The header and the tensors' sizes must be those of the file, and a seal that of the tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise Damaged(f"bytes 0 to 7: the header is said to have {length:,} bytes; {remedy}")
        start = 8 + length
        try:
            header = json.loads(file.read(length).decode())
            metadata = header.pop("__metadata__", {})
            tensors = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
            end = 0
            for name, about in tensors:
                first, end_here = about["data_offsets"]
                width = TYPES.get(about["dtype"], (None,))[0]
                # A type that is not known here is not measured.
                wrong = width is not None and end_here - first != width * math.prod(about["shape"])
                if first != end or wrong:
                    raise ValueError(f"{name} has other sizes than its place")
                end = end_here
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            told = f"bytes 8 to {start - 1:,}: no header of tensors ({wrong})"
            raise Damaged(f"{told}; {remedy}") from None
        if start + end != size:
            raise Damaged(f"has {size:,} bytes and not {start + end:,}; {remedy}")
        if "tisa" not in metadata:
            if SEALED in str(metadata):
                raise Damaged(f"bytes 8 to {start - 1:,}: a seal without its name; {remedy}")
            return None
        try:
            about = opened(json.loads(metadata["tisa"]), f"bytes 8 to {start - 1:,}", remedy=remedy)
        except json.JSONDecodeError as wrong:
            raise Damaged(f"bytes 8 to {start - 1:,}: no JSON ({wrong}); {remedy}") from None
        told = about.pop("tensors", None)
        if told is None:
            return None
        found = hashlib.sha256()
        for name, value in sorted(header.items()):
            shape, dtype = tuple(value["shape"]), TYPES.get(value["dtype"], (0, "unknown"))[1]
            found.update(f"{name} torch.{dtype} {shape}\n".encode())
            file.seek(start + value["data_offsets"][0])
            found.update(file.read(value["data_offsets"][1] - value["data_offsets"][0]))
    if found.hexdigest() != told:
        raise Damaged(f"bytes 8 to {size - 1:,}: not as they were written; {remedy}")
    return about
