"""A corpus as tokens, some documents at a time: straight from the text, or prepared once.

A chunk is some millions of tokens of whole documents. It is what is shuffled, and what a run that
goes on begins to read at: its place is the number of documents before it. A prepared corpus is two
files, tokens and the ends of documents, read where they lie.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tisa import store
from tisa_lab.pretrain.text import (
    Source,
    Split,
    Tokenizer,
    Vocabulary,
    check,
    documents,
    tokenizer_of,
)
from tisa_lab.record import code

AGAIN = "prepare it again"
TOKENS, ENDS, ABOUT, TOKENIZER = "tokens.bin", "documents.npy", "corpus.json", "tokenizer"
FORMAT, KIND = 2, "prepared corpus"
# The format that had no manifest: no other is taken without one.
UNSEALED = 1
STREAMED_CHUNK, PREPARED_CHUNK = 2**22, 2**25


@dataclass(frozen=True)
class Place:
    """Where a chunk begins: its number since the start of the run, the epoch, the document."""

    chunk: int = 0
    epoch: int = 0
    document: int = 0


@dataclass(frozen=True)
class Chunk:
    """Tokens of whole documents, the end of each, where they begin and where the next ones do."""

    tokens: npt.NDArray[np.unsignedinteger]
    ends: npt.NDArray[np.int64]
    place: Place
    next: Place


@runtime_checkable
class Corpus(Protocol):
    """Documents as tokens, over and over."""

    vocabulary: Vocabulary
    fingerprint: str

    @property
    def sha256(self) -> str:
        """The SHA-256 of all of it."""
        ...

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """Return the chunks from that place on; after the last document comes the first again."""
        ...


class StreamedCorpus:
    """Text that is cut into tokens as it is read."""

    def __init__(
        self, source: Source, tokenizer: Tokenizer, *, chunk_tokens: int = STREAMED_CHUNK
    ) -> None:
        check(source)
        self.source, self.tokenizer, self.chunk_tokens = source, tokenizer, chunk_tokens
        self.vocabulary = tokenizer.vocabulary
        about = asdict(source) | {"files": [Path(name).name for name in source.files]}
        self.fingerprint = _fingerprint(
            [about, self.vocabulary.fingerprint, chunk_tokens], map(Path, source.files)
        )

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of all files: a second for two GB."""
        return _sums(map(Path, self.source.files))

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """Return the chunks from that place on."""
        while True:
            before = place
            for some in self._of_an_epoch(place.document):
                tokens, ends = joined(some, self.vocabulary.size)
                after = Place(place.chunk + 1, place.epoch, place.document + len(some))
                yield Chunk(tokens, ends, place, after)
                place = after
            if before.document == 0 and place == before:
                raise ValueError(f"corpus: expected documents with text, got none in {self.source}")
            place = Place(place.chunk, place.epoch + 1, 0)

    def _of_an_epoch(self, skip: int) -> Iterator[list[list[int]]]:
        held: list[list[int]] = []
        count = 0
        for texts in _some(documents(self.source, skip=skip)):
            # Cut where it is full, not at the end of 64: a run that goes on begins elsewhere.
            for tokens in self.tokenizer.encode(texts):
                held.append(tokens)
                count += len(tokens)
                if count >= self.chunk_tokens:
                    yield held
                    held, count = [], 0
        if held:
            yield held


class PreparedCorpus:
    """A folder that `prepare` wrote."""

    def __init__(self, folder: Path, *, chunk_tokens: int = PREPARED_CHUNK) -> None:
        try:
            about = store.read_json(folder / ABOUT, remedy=AGAIN)
            self.vocabulary = Vocabulary.from_dict(about["vocabulary"])
            dtype, tokens = np.dtype(about["dtype"]), int(about["tokens"])
            manifest = store.check_folder(folder, KIND, remedy=AGAIN)
            if manifest is None and about["format"] != UNSEALED:
                raise store.Damaged(f"{folder}: its {store.MANIFEST} is missing; {AGAIN}")
            self.ends: npt.NDArray[np.int64] = np.load(folder / ENDS)
        except store.Damaged:
            raise
        except (OSError, ValueError, KeyError, TypeError) as wrong:
            raise ValueError(
                f"{folder}: expected a corpus that `tisa-lab pretrain` has prepared, got {wrong!r}"
                f"; {AGAIN}, or name another folder"
            ) from None
        size = os.path.getsize(folder / TOKENS)
        whole = size == tokens * dtype.itemsize and self.ends.size and self.ends[-1] == tokens
        if about["format"] not in (UNSEALED, FORMAT) or not whole:
            raise ValueError(
                f"{folder}: expected {tokens:,} tokens in format {FORMAT} or below, got {size:,} "
                f"bytes in format {about['format']}; {AGAIN}"
            )
        self.folder, self.chunk_tokens = folder, chunk_tokens
        self.fingerprint = _fingerprint([about, chunk_tokens], [folder / TOKENS])
        parts = [folder / TOKENS, folder / ENDS]
        self.sha256 = (
            _sums(parts)
            if manifest is None
            else _joined_sums(manifest.files[path.name]["sha256"] for path in parts)
        )
        self.tokens: npt.NDArray[np.unsignedinteger] = np.memmap(
            folder / TOKENS, dtype, "r", shape=(tokens,)
        )

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """Return the chunks from that place on."""
        while True:
            while place.document < len(self.ends):
                first = place.document
                start = int(self.ends[first - 1]) if first else 0
                full = int(np.searchsorted(self.ends, start + self.chunk_tokens)) + 1
                last = min(full, len(self.ends))
                after = Place(place.chunk + 1, place.epoch, last)
                ends = self.ends[first:last] - start
                yield Chunk(self.tokens[start : start + int(ends[-1])], ends, place, after)
                place = after
            place = Place(place.chunk, place.epoch + 1, 0)


def _fingerprint(about: Any, files: Iterable[Path]) -> str:
    """Return the same for the same description and files, wherever they lie.

    A file is its size and its ends: what runs of before are known by. `sha256` is of all of it.
    """
    found = hashlib.sha256(json.dumps(about).encode())
    for path in files:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            found.update(str(size).encode())
            for place in (0, max(0, size - 2**16)):
                file.seek(place)
                found.update(file.read(2**16))
    return found.hexdigest()[:16]


def _sums(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of files, one after the other."""
    sums = []
    for path in paths:
        with store.told(path, reading=True), path.open("rb") as file:
            sums.append(hashlib.file_digest(file, "sha256").hexdigest())
    return _joined_sums(sums)


def _joined_sums(sums: Iterable[str]) -> str:
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def joined(
    some: list[list[int]], vocabulary: int
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
    """Return documents end to end and where each of them ends."""
    dtype = np.uint16 if vocabulary <= 2**16 else np.uint32
    ends = np.cumsum([len(tokens) for tokens in some], dtype=np.int64)
    flat = np.fromiter((n for tokens in some for n in tokens), dtype=np.int64, count=int(ends[-1]))
    if flat.size and int(flat.max()) >= vocabulary:
        raise ValueError(
            f"tokenizer: expected numbers below its vocabulary of {vocabulary:,}, got {flat.max()}"
        )
    return flat.astype(dtype), ends


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> PreparedCorpus:
    """Return the corpus as a folder of tokens, written whole or not at all.

    Only documents of at least `min_tokens` and less than `max_tokens` tokens are taken.
    """
    check(source)
    with store.new_folder(folder) as unfinished:
        _write(source, tokenizer, unfinished, min_tokens, max_tokens, progress)
    return PreparedCorpus(folder)


def _write(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    min_tokens: int,
    max_tokens: int | None,
    progress: Callable[[int, int], None],
) -> None:
    vocabulary = tokenizer.vocabulary
    ends: list[int] = []
    with open(folder / TOKENS, "wb") as file:
        for texts in _some(documents(source)):
            lists = [
                tokens
                for tokens in tokenizer.encode(texts)
                if min_tokens <= len(tokens) and (max_tokens is None or len(tokens) < max_tokens)
            ]
            if not lists:
                continue
            flat, some = joined(lists, vocabulary.size)
            file.write(flat.tobytes())
            before = ends[-1] if ends else 0
            ends.extend(int(end) + before for end in some)
            progress(len(ends), ends[-1])
    if not ends:
        raise ValueError(f"corpus: expected documents, got none of {min_tokens} tokens or more")
    np.save(folder / ENDS, np.array(ends, dtype=np.int64))
    tokenizer.save(folder / TOKENIZER)
    about = {
        "format": FORMAT,
        "vocabulary": asdict(vocabulary),
        "dtype": flat.dtype.name,
        "tokens": ends[-1],
        "documents": len(ends),
        "files": [Path(name).name for name in source.files],
        "dataset": source.dataset,
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
    }
    store.write_json(folder / ABOUT, about)
    told = {name: about[name] for name in ("files", "dataset", "min_tokens", "max_tokens")}
    made_with = {"tokenizer": vocabulary.fingerprint, store.CODE: code()}
    store.seal_folder(folder, KIND, told | made_with)


def _some(texts: Iterable[str]) -> Iterator[list[str]]:
    """Return them 64 at a time, which a tokenizer does faster."""
    left = iter(texts)
    while some := list(islice(left, 64)):
        yield some


def head(corpus: Corpus, tokens: int) -> list[npt.NDArray[np.unsignedinteger]]:
    """Return the first documents, until they have that many tokens or the corpus ends."""
    found: list[npt.NDArray[np.unsignedinteger]] = []
    for chunk in corpus.chunks(Place()):
        if chunk.place.epoch:
            break
        starts = np.concatenate(([0], chunk.ends[:-1]))
        for start, end in zip(starts, chunk.ends, strict=True):
            found.append(chunk.tokens[start:end])
            tokens -= int(end - start)
            if tokens <= 0:
                return found
    return found


@dataclass(frozen=True)
class CorpusNames:
    """A corpus as a user names it.

    Args:
        data: Files (.txt, .txt.xz, .parquet; repeat it), or one prepared folder.
        dataset: Instead of files: NAME[:CONFIG[:SPLIT]] on the hub.
        tokenizer: By name: bytes, a SentencePiece file (*.model), or what transformers loads; a
            prepared folder has its own.
        split: What ends a document in a text file: a blank line, any line, the file.
        text_column: Of Parquet files and datasets.
    """

    data: list[str] = field(default_factory=list)
    dataset: str | None = None
    tokenizer: str | None = None
    split: Split = "blank"
    text_column: str = "text"

    def open(self) -> tuple[Corpus, Callable[[Path], None]]:
        """Return the corpus, and what writes its tokenizer into a folder."""
        folder = self._folder
        if folder is None:
            made = self._tokenizer()
            return StreamedCorpus(self._source(), made), made.save
        if not (folder / ABOUT).is_file():
            raise ValueError(
                f"{folder}: expected a file, or a folder that `tisa-lab pretrain` has prepared"
            )
        corpus = PreparedCorpus(folder)
        if not (folder / TOKENIZER).is_dir():
            raise ValueError(f"{folder}: expected its folder tokenizer, got none; prepare it again")
        if self.tokenizer is not None:
            asked = tokenizer_of(self.tokenizer).vocabulary
            if asked.fingerprint != corpus.vocabulary.fingerprint:
                raise ValueError(
                    f"{folder} was prepared with the tokenizer {corpus.vocabulary.name!r} "
                    f"({corpus.vocabulary.fingerprint}), got {self.tokenizer!r} "
                    f"({asked.fingerprint}); name no tokenizer, or prepare the corpus with it"
                )

        def copy(place: Path) -> None:
            shutil.copytree(folder / TOKENIZER, place, dirs_exist_ok=True)

        return corpus, copy

    def beside(self, name: str) -> Corpus:
        """Return another corpus, cut with the same tokenizer where it is text."""
        tokenizer = self.tokenizer if Path(name).is_dir() else self.tokenizer_name()
        return replace(self, data=[name], dataset=None, tokenizer=tokenizer).open()[0]

    def tokenizer_name(self) -> str | None:
        """Return the name of the tokenizer, a prepared folder's own among them."""
        folder = self._folder
        own = None if folder is None else str(folder / TOKENIZER)
        return self.tokenizer if self.tokenizer is not None else own

    def prepare(
        self, folder: Path, *, min_tokens: int = 0, max_tokens: int | None = None
    ) -> PreparedCorpus:
        """Return the corpus, cut into tokens in a new folder."""
        store.check_new_folder(folder)
        source, tokenizer = self._source(), self._tokenizer()
        return prepare(source, tokenizer, folder, min_tokens=min_tokens, max_tokens=max_tokens)

    @property
    def _folder(self) -> Path | None:
        alone = len(self.data) == 1 and self.dataset is None
        return Path(self.data[0]) if alone and Path(self.data[0]).is_dir() else None

    def _source(self) -> Source:
        if not self.data and self.dataset is None:
            raise ValueError("data: expected files, a prepared folder or a dataset, got nothing")
        return Source(tuple(self.data), self.dataset, self.split, self.text_column)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "tokenizer: expected bytes, a SentencePiece file (*.model), or a folder or name "
                "that transformers loads, got none"
            )
        return tokenizer_of(self.tokenizer)
