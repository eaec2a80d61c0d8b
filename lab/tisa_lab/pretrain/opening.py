"""A corpus from what a user names: files, a folder that was prepared, a dataset on the hub."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tisa_lab.pretrain.corpus import ABOUT, Corpus, Prepared, Streamed, prepare
from tisa_lab.pretrain.reading import Source
from tisa_lab.pretrain.tokenizers import Tokenizer, tokenizer_of


def opened(
    data: list[str], dataset: str | None, tokenizer: str | None, split: str, text_column: str
) -> tuple[Corpus, Callable[[Path], None]]:
    """Return the corpus, and what writes its tokenizer into a folder."""
    if len(data) == 1 and dataset is None and Path(data[0]).is_dir():
        folder = Path(data[0])
        if not (folder / ABOUT).is_file():
            raise ValueError(
                f"{folder}: expected a file, or a folder that `tisa-lab pretrain --prepare` wrote"
            )
        corpus = Prepared(folder)
        if not (folder / "tokenizer").is_dir():
            raise ValueError(f"{folder}: expected its folder tokenizer, got none; prepare it again")
        if tokenizer is not None:
            asked = tokenizer_of(tokenizer).vocabulary
            if asked.fingerprint != corpus.vocabulary.fingerprint:
                raise ValueError(
                    f"{folder} was prepared with the tokenizer {corpus.vocabulary.name!r} "
                    f"({corpus.vocabulary.fingerprint}), got {tokenizer!r} ({asked.fingerprint}); "
                    "leave --tokenizer out, or prepare the corpus with it"
                )

        def copy(place: Path) -> None:
            shutil.copytree(folder / "tokenizer", place, dirs_exist_ok=True)

        return corpus, copy
    made = _tokenizer(tokenizer)
    return Streamed(_source(data, dataset, split, text_column), made), made.save


def prepared_by(
    data: list[str],
    dataset: str | None,
    tokenizer: str | None,
    split: str,
    text_column: str,
    folder: Path,
    min_tokens: int = 0,
    max_tokens: int | None = None,
) -> Prepared:
    """Return the corpus, cut into tokens in a new folder."""
    if folder.exists():
        raise FileExistsError(f"--prepare: expected a new folder, got {folder}, which is there")
    source = _source(data, dataset, split, text_column)
    return prepare(
        source, _tokenizer(tokenizer), folder, min_tokens=min_tokens, max_tokens=max_tokens
    )


def _source(data: list[str], dataset: str | None, split: str, text_column: str) -> Source:
    if not data and dataset is None:
        raise ValueError("--data: expected files, a prepared folder or --dataset, got nothing")
    return Source(tuple(data), dataset, split, text_column)  # type: ignore[arg-type]


def _tokenizer(name: str | None) -> Tokenizer:
    if name is None:
        raise ValueError(
            "--tokenizer: expected bytes, a SentencePiece file (*.model), or a folder or name that "
            "transformers loads, got none"
        )
    return tokenizer_of(name)
