"""Text in, numbers out: the documents of a corpus, and the tokenizers that cut them.

Documents come one after the other from text files, compressed or not, from Parquet or the hub.
Nothing is read before it is asked for, and nothing is kept: a corpus may be larger than memory.
What is wrong with a file is said with its name, and `check` says it before any training.
Tokenizers are any of Hugging Face's, ALBERT's SentencePiece file, or plain bytes.
"""

import hashlib
import json
import lzma
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from tisa.packages import needed
from tisa.store import make_folder, told, write_text

FILE = "tokenizer.tisa.json"
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
        with told(path, reading=True):
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


@dataclass(frozen=True)
class Specials:
    """Tokens that stand for no text; `mask` is None where a tokenizer has none."""

    begin: int
    end: int
    pad: int
    mask: int | None


@dataclass(frozen=True)
class Vocabulary:
    """What has to be known of a tokenizer to train on its numbers, without the tokenizer.

    `fingerprint` is the same for two tokenizers that give the same numbers, and travels with
    everything that was made with one.
    """

    name: str
    size: int
    specials: Specials
    fingerprint: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Vocabulary":
        """Return the vocabulary that `dataclasses.asdict` made these values of."""
        return cls(**{**values, "specials": Specials(**values["specials"])})


@runtime_checkable
class Tokenizer(Protocol):
    """What a corpus and a run ask of a tokenizer."""

    vocabulary: Vocabulary

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special ones."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `tokenizer_of` needs to make it again."""
        ...


class Bytes:
    """The UTF-8 bytes of the text, and four special tokens after them."""

    vocabulary = Vocabulary("bytes", 260, Specials(257, 258, 256, 259), "bytes")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.encode()) for text in texts]

    def save(self, folder: Path) -> None:
        """Write its name."""
        _write(folder, {"kind": "bytes"})


class SentencePiece:
    """A SentencePiece model with ALBERT's special pieces, and text prepared as ALBERT does it.

    Lower case, no accents, straight quotes, and digits before a comma cut from it (ALBERT's
    published tokenizer). Transformers' rewriting of it in Rust cuts words at hyphens differently;
    this is the original.
    """

    def __init__(self, path: Path) -> None:
        sentencepiece = needed("sentencepiece", f"{path}", "tisa-lab")
        self.path = path
        with told(path, reading=True):
            content = path.read_bytes()
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as wrong:
            raise ValueError(f"{path}: expected a SentencePiece model, got {wrong}") from None
        names = {"begin": "[CLS]", "end": "[SEP]", "mask": "[MASK]", "pad": "<pad>"}
        found = {name: int(self.model.piece_to_id(piece)) for name, piece in names.items()}
        unknown = self.model.unk_id()
        missing_pieces = [names[name] for name, number in found.items() if number == unknown]
        if missing_pieces:
            raise ValueError(
                f"{path}: expected ALBERT's special pieces, got none for "
                f"{', '.join(missing_pieces)}; take a Hugging Face tokenizer instead"
            )
        self.vocabulary = Vocabulary(
            path.name,
            int(self.model.get_piece_size()),
            Specials(**found),
            "albert:" + hashlib.sha256(content).hexdigest()[:16],
        )
        self._recut = self._digits_before_commas()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the pieces of each text."""
        cut = self.model.encode([prepared(text) for text in texts])
        recut = self._recut
        return [
            [n for piece in pieces for n in recut.get(piece, (piece,))]
            if any(piece in recut for piece in set(pieces))
            else pieces
            for pieces in cut
        ]

    def save(self, folder: Path) -> None:
        """Copy the model's file."""
        make_folder(folder)
        if (folder / "spiece.model").resolve() != self.path.resolve():
            shutil.copyfile(self.path, folder / "spiece.model")
        _write(folder, {"kind": "sentencepiece"})

    def _digits_before_commas(self) -> dict[int, tuple[int, ...]]:
        """Return what ALBERT makes of pieces that end in a digit and a comma."""
        recut: dict[int, tuple[int, ...]] = {}
        for number in range(self.vocabulary.size):
            piece = self.model.id_to_piece(number)
            if len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit():
                parts = self.model.encode(piece[:-1].replace("▁", ""), out_type=str)
                if piece[0] != "▁" and parts[0][0] == "▁":
                    parts = parts[1:] if len(parts[0]) == 1 else [parts[0][1:], *parts[1:]]
                recut[number] = tuple(int(self.model.piece_to_id(p)) for p in (*parts, ","))
        return recut


def prepared(text: str) -> str:
    """Return the text as ALBERT's tokenizer sees it."""
    text = " ".join(text.split()).replace("``", '"').replace("''", '"')
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
        text = "".join(letter for letter in text if not unicodedata.combining(letter))
    return text.lower()


class HuggingFace:
    """Any tokenizer of transformers, from a folder or the hub.

    `begin` and `end` are its [CLS] and [SEP], or what it has instead of them; where it has one of
    the two only, that stands at both places. Without a padding token the end is taken.
    """

    def __init__(self, name: str) -> None:
        transformers = needed("transformers", f"tokenizer {name!r}", "tisa-lab")
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                name, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError) as wrong:
            raise ValueError(
                f"tokenizer {name!r}: expected bytes, a SentencePiece file (*.model), or a folder "
                f"or name on the hub that transformers can load, got: {wrong}"
            ) from None
        made = self.tokenizer
        # Documents are cut into rows here: its own limit does not matter.
        made.model_max_length = 10**9
        begin = _first(made.cls_token_id, made.bos_token_id, made.sep_token_id, made.eos_token_id)
        end = _first(made.sep_token_id, made.eos_token_id, made.cls_token_id, made.bos_token_id)
        if begin is None or end is None:
            raise ValueError(
                f"tokenizer {name!r}: expected a token that begins or ends a text (cls, sep, bos "
                "or eos), got none"
            )
        pad = _first(made.pad_token_id, end)
        assert pad is not None
        known = sorted(made.get_vocab().items(), key=lambda pair: pair[1])
        sample = made("Where does it stand? Über 1,024 Wörter — ok.", add_special_tokens=False)
        seen = json.dumps([known, sample["input_ids"]], ensure_ascii=False)
        self.vocabulary = Vocabulary(
            name,
            len(made),
            Specials(begin, end, pad, made.mask_token_id),
            "hf:" + hashlib.sha256(seen.encode()).hexdigest()[:16],
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        found = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return list(found["input_ids"])

    def save(self, folder: Path) -> None:
        """Write it as transformers does."""
        self.tokenizer.save_pretrained(folder)
        _write(folder, {"kind": "transformers"})


def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer of that name: bytes, a SentencePiece file, a folder, a hub name."""
    if name == "bytes":
        return Bytes()
    path = Path(name)
    if path.suffix == ".model":
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer {name!r}: expected a SentencePiece file, got none")
        return SentencePiece(path)
    if (path / FILE).is_file():
        kind = json.loads((path / FILE).read_text()).get("kind")
        if kind == "bytes":
            return Bytes()
        if kind == "sentencepiece":
            return SentencePiece(path / "spiece.model")
    return HuggingFace(name)


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)


def _write(folder: Path, values: dict[str, str]) -> None:
    write_text(folder / FILE, json.dumps(values) + "\n")
