"""From text to batches: what is read, cut, packed, masked; and what is refused."""

import itertools
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from little_corpus import text
from tisa import store
from tisa_lab.pretrain.batches import (
    ALONE,
    BEGINNING,
    NO_LABEL,
    Rows,
    Share,
    masked,
    shuffled,
    steps,
    uniform,
)
from tisa_lab.pretrain.config import Phase
from tisa_lab.pretrain.corpus import Place, PreparedCorpus, StreamedCorpus, prepare
from tisa_lab.pretrain.text import Bytes, Source, check, documents, prepared, tokenizer_of

DOCUMENTS = ["first document\nof two lines", "second", "third é"]


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(text())
    return path


def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    pytest.importorskip("pyarrow", reason="comes with tisa-lab")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    body = "\n\n\n".join(DOCUMENTS) + "\n\n"
    (tmp_path / "a.txt").write_text(body)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(body.encode()))
    parquet.write_table(pa.table({"text": [*DOCUMENTS, "", None]}), tmp_path / "a.parquet")
    for name in ("a.txt", "a.txt.xz", "a.parquet"):
        source = Source((str(tmp_path / name),))
        assert list(documents(source)) == DOCUMENTS
        assert list(documents(source, skip=2)) == DOCUMENTS[2:]
    assert len(list(documents(Source((str(tmp_path / "a.txt"),), split="line")))) == 4
    assert len(list(documents(Source((str(tmp_path / "a.txt"),), split="file")))) == 1


def test_a_dataset_is_streamed(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="comes with tisa-lab")
    (tmp_path / "x.json").write_text("".join(json.dumps({"body": d}) + "\n" for d in DOCUMENTS))
    asked = {}

    def load(name, config, *, split, streaming):
        asked.update(name=name, config=config, split=split, streaming=streaming)
        loaded = datasets.load_dataset.__wrapped__
        return loaded("json", data_files=str(tmp_path / "x.json"), split=split, streaming=True)

    load.__wrapped__ = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    # It would ask the network to count the download.
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    source = Source(dataset="some/name:en:train", text_column="body")
    assert list(documents(source)) == DOCUMENTS
    assert list(documents(source, skip=1)) == DOCUMENTS[1:]
    assert asked == {"name": "some/name", "config": "en", "split": "train", "streaming": True}
    with pytest.raises(ValueError, match="expected a column 'text', got body"):
        check(Source(dataset="some/name"))


def test_what_is_no_corpus_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes("Sätze".encode("latin-1"))
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "torn.txt.xz").write_bytes(lzma.compress(b"x" * 9999)[:-20])
    (tmp_path / "false.txt.xz").write_text("no xz")
    (tmp_path / "false.parquet").write_text("no parquet")
    (tmp_path / "picture.png").write_text("")
    for name, message in {
        "none.txt": "got none",
        "empty.txt": "got an empty file",
        "latin.txt": "UTF-8, got b'\\\\xe4' after byte 1",
        "binary.txt": "NUL byte",
        "torn.txt.xz": "whole .xz file",
        "false.txt.xz": "whole .xz file",
        "false.parquet": "expected a Parquet file",
        "picture.png": "ends in .txt, .txt.xz or .parquet",
        ".": "got a folder",
    }.items():
        with pytest.raises((ValueError, OSError), match=message):
            check(Source((str(tmp_path / name),)))


def test_a_parquet_file_without_the_column(tmp_path):
    pytest.importorskip("pyarrow", reason="comes with tisa-lab")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"body": ["x"], "number": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="expected a column 'text', got body, number"):
        check(Source((str(tmp_path / "a.parquet"),)))
    with pytest.raises(ValueError, match="expected text in column 'number', got int64"):
        check(Source((str(tmp_path / "a.parquet"),), text_column="number"))


def sentencepiece_file(tmp_path):
    sp = pytest.importorskip("sentencepiece", reason="comes with tisa-lab")
    (tmp_path / "s.txt").write_text("the 1, 12, 3,4 cats and the well-known dog\n" * 50)
    sp.SentencePieceTrainer.train(
        input=str(tmp_path / "s.txt"), model_prefix=str(tmp_path / "s"), vocab_size=40,
        pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, control_symbols=["[CLS]", "[SEP]"],
        user_defined_symbols=["[MASK]"], minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return tmp_path / "s.model"


def test_tokenizers_come_back_from_their_folder(tmp_path):
    from tiny_tokenizer import saved_tokenizer

    names = ["bytes", str(sentencepiece_file(tmp_path)), str(saved_tokenizer(tmp_path / "hf"))]
    prints = set()
    for number, name in enumerate(names):
        first = tokenizer_of(name)
        first.save(tmp_path / str(number))
        again = tokenizer_of(str(tmp_path / str(number)))
        assert again.vocabulary.fingerprint == first.vocabulary.fingerprint
        assert again.encode(["the cat", ""]) == first.encode(["the cat", ""])
        assert max(first.encode(["the cats and 12, dogs"])[0]) < first.vocabulary.size
        special = first.vocabulary.specials
        assert special.mask is not None
        assert special.mask not in first.encode(["the cat"])[0]
        prints.add(first.vocabulary.fingerprint)
    assert len(prints) == 3


def test_albert_text_is_prepared_as_albert_does_it():
    assert prepared("  Über  ``Ｘ''\nno\tmore ") == 'uber "x" no more'


def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "x.model").write_text("no model")
    for name, message in {
        str(tmp_path / "none.model"): "got none",
        str(tmp_path / "x.model"): "SentencePiece model",
        str(tmp_path / "folder"): "expected bytes, a SentencePiece file",
    }.items():
        with pytest.raises((ValueError, OSError), match=message):
            tokenizer_of(name)


def _unreadable(path):
    raise ValueError("Failed to read all data for array")


def test_prepared_and_streamed_have_the_same_documents(corpus_file, tmp_path, monkeypatch):
    source = Source((str(corpus_file),))
    made = prepare(source, Bytes(), tmp_path / "prepared")
    again = PreparedCorpus(tmp_path / "prepared", chunk_tokens=200)
    streamed = StreamedCorpus(source, Bytes(), chunk_tokens=200)
    pairs = itertools.islice(zip(again.chunks(Place()), streamed.chunks(Place()), strict=True), 14)
    for one, other in pairs:
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.ends, other.ends)
        assert (one.place, one.next) == (other.place, other.next)
    assert one.place.epoch > 0
    # From the middle on it is the same.
    third, fourth = itertools.islice(streamed.chunks(Place()), 2, 4)
    assert np.array_equal(next(streamed.chunks(third.next)).tokens, fourth.tokens)
    assert made.vocabulary == Bytes.vocabulary
    with pytest.raises(FileExistsError):
        prepare(source, Bytes(), tmp_path / "prepared")
    with monkeypatch.context() as broken:
        broken.setattr(np, "load", _unreadable)
        with pytest.raises(ValueError, match=r"Failed to read all data.*prepare it again"):
            PreparedCorpus(tmp_path / "prepared")
    (tmp_path / "prepared" / "tokens.bin").write_bytes(b"xx")
    with pytest.raises(ValueError, match="prepare it again"):
        PreparedCorpus(tmp_path / "prepared")


@pytest.mark.parametrize("objective", ["mlm", "causal"])
@pytest.mark.parametrize("length", [4, 5, 16, 64])
def test_rows_hold_every_token_once_and_nothing_twice(corpus_file, objective, length):
    corpus = StreamedCorpus(Source((str(corpus_file),)), Bytes(), chunk_tokens=10**6)
    chunk = next(corpus.chunks(Place()))
    special = Bytes.vocabulary.specials
    rows = Rows(chunk, length, objective, special, seed=0)
    assert sorted(rows.order) == list(range(len(rows)))
    found, closed = [], 0
    for number in range(len(rows)):
        row = rows.row(number)
        assert row.ends[-1] == len(row.tokens) == length
        if number < len(rows) - 1:
            assert length - row.filled < 3
        for start, end in itertools.pairwise([0, *row.ends]):
            piece = row.tokens[start:end]
            if start >= row.filled:
                assert (piece == special.pad).all()
                continue
            assert piece[0] == special.begin
            inner = piece[1:]
            if inner[-1] == special.end:
                closed += 1
                inner = inner[:-1]
            else:
                assert objective == "causal"
            assert (inner < 256).all()
            assert inner.size
            found.extend(inner)
    assert np.array_equal(found, chunk.tokens)
    if objective == "mlm":
        assert closed == sum(len(pieces) for pieces in rows.pieces)


def test_masks_are_those_of_bert_and_depend_on_their_key_alone():
    tokens = np.arange(4096) % 256
    tokens[::64] = Bytes.vocabulary.specials.begin
    places, labels, shown = (x[0] for x in masked(tokens[None], 0.15, Bytes.vocabulary, 1, 2, 3))
    assert len(places) == round(0.15 * 4096)
    assert np.array_equal(labels, tokens[places])
    assert not (tokens[places] == Bytes.vocabulary.specials.begin).any()
    untouched = np.ones(len(tokens), bool)
    untouched[places] = False
    assert np.array_equal(shown[untouched], tokens[untouched])
    assert (shown[places] == Bytes.vocabulary.specials.mask).mean() == pytest.approx(0.8, abs=0.05)
    assert (shown[places] == labels).mean() == pytest.approx(0.1, abs=0.04)
    # Beside another row, with a key of its own.
    both = masked(np.stack([tokens, tokens]), 0.15, Bytes.vocabulary, 1, 2, np.array([4, 3]))
    for one, two in zip((places, labels, shown), both, strict=True):
        assert np.array_equal(one, two[1])
        assert not np.array_equal(one, two[0])


def test_a_row_of_special_tokens_has_nothing_to_predict():
    tokens = np.full(16, Bytes.vocabulary.specials.pad)
    places, labels, shown = (x[0] for x in masked(tokens[None], 0.15, Bytes.vocabulary, 0))
    assert len(places) == 2
    assert (labels == NO_LABEL).all()
    assert np.array_equal(shown, tokens)


def test_keyed_numbers_are_uniform():
    drawn = uniform(20000, 3, 4)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.histogram(drawn, 10, (0, 1))[0] / 2000 == pytest.approx(1, abs=0.1)
    assert sorted(shuffled(100, 5)) == list(range(100))
    assert not np.array_equal(shuffled(100, 5), shuffled(100, 6))


@pytest.mark.parametrize("objective", ["mlm", "causal"])
def test_shares_of_a_step_are_the_step(corpus_file, objective):
    corpus = StreamedCorpus(Source((str(corpus_file),)), Bytes(), chunk_tokens=400)
    phases = [Phase(0, 3, 16), Phase(3, 5, 32)]

    def read(share=ALONE, start=0, reading=BEGINNING):
        return list(
            steps(corpus, phases, batch_tokens=128, objective=objective, mask_share=0.15, seed=3,
                  start=start, reading=reading, share=share)
        )  # fmt: skip

    whole = read()
    assert [step.batches[0].input_ids.shape[0] for step in whole] == [128] * 5
    parts = [read(Share(rank, 2, 2)) for rank in range(2)]
    for number, step in enumerate(whole):
        of_ranks = [part[number] for part in parts]
        ids = torch.cat([b.input_ids for s in of_ranks for b in s.batches])
        labels = torch.cat([b.labels for s in of_ranks for b in s.batches])
        assert torch.equal(ids, step.batches[0].input_ids)
        assert torch.equal(labels, step.batches[0].labels)
        assert sum(s.labels for s in of_ranks) == step.labels == (labels != NO_LABEL).sum()
        assert sum(s.squares for s in of_ranks) == step.squares
        assert of_ranks[0].after == step.after
    # Interrupted after any step, also where rows of another length begin.
    for start in range(1, 5):
        rest = read(start=start, reading=whole[start - 1].after)
        assert len(rest) == 5 - start
        for one, other in zip(rest, whole[start:], strict=True):
            assert torch.equal(one.batches[0].input_ids, other.batches[0].input_ids)
            assert torch.equal(one.batches[0].positions, other.batches[0].positions)


def test_labels_of_a_causal_model_are_the_next_token_of_the_same_piece(corpus_file):
    corpus = StreamedCorpus(Source((str(corpus_file),)), Bytes())
    (step,) = steps(
        corpus, [Phase(0, 1, 64)], batch_tokens=256, objective="causal", mask_share=0.15, seed=0
    )
    (batch,) = step.batches
    ends = set(batch.cu_seqlens.tolist())
    assert (batch.cu_seqlens.shape[0] - 1) % 8 == 0
    for place, label in enumerate(batch.labels.tolist()):
        if place + 1 in ends:
            assert label == NO_LABEL
        elif label != NO_LABEL:
            assert label == batch.input_ids[place + 1]


def test_the_folder_of_this_file_is_no_corpus():
    with pytest.raises(IsADirectoryError):
        check(Source((str(Path(__file__).parent),)))


def _opens(folder):
    try:
        PreparedCorpus(folder)
    except ValueError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("sealed", [True, False])
def test_no_other_byte_of_the_format_skips_the_manifest(corpus_file, tmp_path, sealed):
    folder = tmp_path / "prepared"
    prepare(Source((str(corpus_file),)), Bytes(), folder)
    about = folder / "corpus.json"
    if not sealed:
        # As it was before it had a seal of its own.
        values = store.read_json(about, remedy="")
        about.write_text(json.dumps(values))
        manifest = store.manifest_of(folder)
        store.seal_folder(folder, manifest.kind, manifest.identity)
    whole = about.read_bytes()
    place = whole.index(b'"format": 2') + len(b'"format": ')
    assert _opens(folder) == ""
    for byte in set(range(256)) - {ord("2")}:
        about.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        refused = _opens(folder)
        assert refused, byte
        # And where the manifest is lost too.
        (folder / "manifest.json").rename(tmp_path / "elsewhere")
        alone = _opens(folder)
        (tmp_path / "elsewhere").rename(folder / "manifest.json")
        assert alone or (byte == ord("1") and not sealed), byte
