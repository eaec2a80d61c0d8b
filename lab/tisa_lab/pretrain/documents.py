"""Documents of a corpus, one after the other: text files, compressed or not, Parquet, the hub.

Nothing is read before it is asked for, and nothing is kept: a corpus may be larger than memory.
What is wrong with a file is said with its name, and `check` says it before any training.
"""

import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tisa.packages import needed

Split = Literal["blank", "line", "file"]


@dataclass(frozen=True)
class Source:
    """Where documents come from: files, or a dataset on the hub as NAME, NAME:CONFIG or
    NAME:CONFIG:SPLIT.

    `split` says what ends a document in a text file: a blank line, every line, or only the end of
    the file. `text_column` is the column of a Parquet file or a dataset.
    """

    files: tuple[str, ...] = ()
    dataset: str | None = None
    split: Split = "blank"
    text_column: str = "text"

    def __post_init__(self) -> None:
        if bool(self.files) == (self.dataset is not None):
            raise ValueError(
                "corpus: expected files or a dataset on the hub, and not both, got "
                f"{len(self.files)} files and {self.dataset!r}"
            )
        if self.split not in ("blank", "line", "file"):
            raise ValueError(f'split must be "blank", "line" or "file", got {self.split!r}')


def documents(source: Source, *, skip: int = 0) -> Iterator[str]:
    """Return the documents from number `skip` on; those without any text are left out."""
    if source.dataset is not None:
        return _from_hub(source, skip)
    found = (text for name in source.files for text in _from_file(Path(name), source))
    return islice(found, skip, None)


def check(source: Source) -> None:
    """Refuse a corpus that is missing, empty or no text, after a look at each file's beginning."""
    for name in source.files:
        if next(_from_file(Path(name), source), None) is None:
            raise ValueError(f"{name}: expected documents, got an empty file")
    if source.dataset is not None and next(_from_hub(source, 0), None) is None:
        raise ValueError(f"{source.dataset}: expected documents, got an empty dataset")


def _from_file(path: Path, source: Source) -> Iterator[str]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a .txt, .txt.xz or .parquet file, got none")
    if path.is_dir():
        raise IsADirectoryError(
            f"{path}: expected a .txt, .txt.xz or .parquet file, got a folder; name its files"
        )
    if path.name.endswith(".parquet"):
        return _from_parquet(path, source.text_column)
    if path.name.endswith(".xz"):
        return _from_lines(path, lzma.open(path, "rb"), source.split)
    if path.suffix == ".txt":
        return _from_lines(path, open(path, "rb"), source.split)
    raise ValueError(f"{path}: expected a name that ends in .txt, .txt.xz or .parquet")


def _from_lines(path: Path, file: Any, split: Split) -> Iterator[str]:
    with file:
        held: list[str] = []
        for line in _decoded(path, file):
            if split == "line" or (split == "blank" and not line.strip()):
                held.append(line)
                yield from _nonempty(held)
                held = []
            else:
                held.append(line)
        yield from _nonempty(held)


def _nonempty(lines: list[str]) -> Iterator[str]:
    text = "".join(lines).strip()
    if text:
        yield text


def _decoded(path: Path, file: Iterable[bytes]) -> Iterator[str]:
    read = 0
    try:
        for line in file:
            if b"\0" in line:
                raise ValueError(f"{path}: expected text, got a NUL byte after byte {read:,}")
            yield line.decode("utf-8-sig" if read == 0 else "utf-8")
            read += len(line)
    except UnicodeDecodeError as wrong:
        raise ValueError(
            f"{path}: expected text in UTF-8, got {wrong.object[wrong.start : wrong.end]!r} after "
            f"byte {read + wrong.start:,}; convert it with iconv"
        ) from None
    except (lzma.LZMAError, EOFError) as wrong:
        raise ValueError(f"{path}: expected a whole .xz file, got {wrong}") from None


def _from_parquet(path: Path, column: str) -> Iterator[str]:
    pyarrow = needed("pyarrow", f"{path}", "tisa-lab")
    parquet = needed("pyarrow.parquet", f"{path}", "tisa-lab")
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as wrong:
        raise ValueError(f"{path}: expected a Parquet file, got {wrong}") from None
    with file:
        there = file.schema_arrow.names
        if column not in there:
            raise ValueError(
                f"{path}: expected a column {column!r}, got {', '.join(there)}; "
                "name one as text_column"
            )
        kind = file.schema_arrow.field(column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ValueError(f"{path}: expected text in column {column!r}, got {kind}")
        for batch in file.iter_batches(columns=[column], batch_size=256):
            for text in batch.column(0).to_pylist():
                if text and text.strip():
                    yield text.strip()


def _from_hub(source: Source, skip: int) -> Iterator[str]:
    datasets = needed("datasets", "a dataset on the hub", "tisa-lab")
    assert source.dataset is not None
    name, config, split = [*source.dataset.split(":"), "", ""][:3]
    try:
        stream = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as wrong:
        # Its errors are of many kinds: no network, no such name, a script, no such split.
        raise ValueError(f"dataset {source.dataset!r} cannot be read: {wrong}") from wrong
    rows = iter(stream)
    kept = 0
    for row in rows:
        if source.text_column not in row:
            raise ValueError(
                f"dataset {source.dataset!r}: expected a column {source.text_column!r}, got "
                f"{', '.join(row)}; name one as text_column"
            )
        text = (row[source.text_column] or "").strip()
        if text:
            kept += 1
            if kept > skip:
                yield text
