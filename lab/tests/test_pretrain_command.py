"""The command before it begins: what it refuses, and what it finds in a prepared folder."""

import json
import shutil

import pytest
import torch

from little_corpus import SMALL, text
from tisa_lab.pretrain.config import Length, PretrainConfig, RunSettings
from tisa_lab.pretrain.corpus import StreamedCorpus
from tisa_lab.pretrain.model import check_settings, micro_batches
from tisa_lab.pretrain.text import Bytes, Source

SIZES = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, embedding_size=8,
    lengths=(Length(32),), batch_tokens=128, learning_rate=1e-2, steps=10,
)  # fmt: skip
SETTINGS = RunSettings(device="cpu")


def test_a_tracker_that_is_not_installed_is_told_before_accelerate_is_there(monkeypatch):
    from accelerate import tracking
    from accelerate.state import PartialState

    # As in a process that begins.
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(ValueError, match="mlflow, wandb cannot be used here; install"):
        check_settings(RunSettings(report_to=("wandb", "mlflow")))
    with pytest.raises(ValueError, match=r"expected some of all, .*, got nothing"):
        check_settings(RunSettings(report_to=("nothing",)))


def test_fewer_documents_than_processes(tmp_path):
    (tmp_path / "corpus.txt").write_text("one document alone " * 40)
    corpus = StreamedCorpus(Source((str(tmp_path / "corpus.txt"),)), Bytes())
    config = PretrainConfig(**SIZES)
    assert micro_batches(config, corpus, SETTINGS, 1) == 1
    with pytest.raises(ValueError, match=r"as many documents as processes \(2\), got 1"):
        micro_batches(config, corpus, SETTINGS, 2)
    (tmp_path / "more.txt").write_text(text())
    more = StreamedCorpus(Source((str(tmp_path / "more.txt"),)), Bytes())
    # Chunks of a document each: the others count too.
    chunks = StreamedCorpus(Source((str(tmp_path / "more.txt"),)), Bytes(), chunk_tokens=1)
    assert micro_batches(config, chunks, SETTINGS, 4) == 1
    with pytest.raises(ValueError, match="for 3 processes alike, got 4 rows"):
        micro_batches(config, more, SETTINGS, 3)


def command(*arguments):
    import command

    shown = command.lab(["pretrain", *map(str, arguments)])
    return shown, "" if shown.exception is None else str(shown.exception)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "none.txt"], "none.txt: expected a .txt"),
        (["--data", "CORPUS", "--position", "tusa"], "did you mean"),
        (["--data", "CORPUS", "--position-options", "5"], "expected an object in JSON"),
        (["--data", "CORPUS", "--position-options", '{"kernels": 2}'], "must be among"),
        (["--data", "CORPUS", "--batch-tokens", "250"], "multiple of every length"),
        (["--data", "CORPUS", "--micro-tokens", "48"], "expected a multiple of 32"),
        (["--data", "CORPUS", "--micro-tokens", "0"], "micro_tokens must be at least 1"),
        (["--data", "CORPUS", "--micro-tokens", "-32"], "micro_tokens must be at least 1"),
        (["--data", "CORPUS", "--max-seconds", "0"], "max_seconds must be more than 0"),
        (["--data", "CORPUS", "--lengths", "a:b"], "expected numbers as in 128:0.9"),
        (["--data", "CORPUS", "--lengths", "32:0.5,64:0.4"], "add up to 1"),
        (["--data", "CORPUS", "--batch-tokens", "3200000"], "rows of 32 tokens of one step"),
        (["--data", "CORPUS", "--objective", "both"], "--objective"),
        (["--data", "CORPUS", "--dataset", "x"], "and not both"),
        (["--data", "CORPUS", "--valid", "none.txt"], "none.txt: expected"),
        (["--data", "CORPUS", "--device", "cuda"], "device must be one that this machine has"),
        (["--data", "CORPUS", "--report-to", "nothing"], "nothing"),
        (["--data", "CORPUS", "--scores-learning-rate", "-1"], "must be at least 0, got -1"),
        (["--data", "CORPUS", "--weight-decay", "-0.1"], "weight_decay must be at least 0"),
        (["--data", "CORPUS", "--hidden-size", "15"], "multiple of num_attention_heads"),
        ([], "expected files, a prepared folder or a dataset"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(tmp_path, arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "corpus.txt").write_text(text())
    given = [str(tmp_path / "corpus.txt") if a == "CORPUS" else a for a in arguments]
    for more in ([], ["--dry-run"]):
        shown, said = command(*SMALL, "--out", tmp_path / "run", *given, *more)
        assert shown.exit_code != 0
        assert message in said
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    with pytest.raises(ValueError, match="out: expected"):
        raise command(*SMALL, "--data", tmp_path / "corpus.txt")[0].exception


@pytest.mark.unchecked
def test_prepared_corpora_know_their_tokenizer(tmp_path):
    from tiny_tokenizer import saved_tokenizer

    (tmp_path / "corpus.txt").write_text(text())
    hf, blind = saved_tokenizer(tmp_path / "hf"), saved_tokenizer(tmp_path / "blind", mask=None)
    for name in ("hf", "blind"):
        shown, said = command(
            "--data", tmp_path / "corpus.txt", "--tokenizer", tmp_path / name,
            "--prepare", tmp_path / f"{name}-tokens",
        )  # fmt: skip
        assert shown.exit_code == 0, said
    small = SMALL[2:]
    for arguments, message in (
        (["--tokenizer", "bytes", "--data", tmp_path / "hf-tokens"], "was prepared with"),
        (["--data", tmp_path / "hf-tokens", "--valid", tmp_path / "blind-tokens"], "validation"),
        (["--data", tmp_path / "blind-tokens"], "needs a mask token"),
        (["--data", tmp_path], "expected a file, or a folder"),
        (["--tokenizer", hf, "--data", tmp_path / "hf-tokens", "--prepare", hf], "new folder"),
    ):
        shown, said = command(*small, *arguments, "--out", tmp_path / "run")
        assert message in said
    shown, said = command(
        *small, "--data", tmp_path / "hf-tokens", "--valid", tmp_path / "corpus.txt", "--steps", 2,
        "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert shown.exit_code == 0, said
    record = json.loads(shown.stdout.splitlines()[-1])
    assert record["tokens"] == 512
    # Text is cut with the tokenizer of the prepared corpus.
    assert record["evaluations"][-1]["loss"] > 0
    # The tokenizer lies beside the model.
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").mask_token == "[MASK]"
    again = [*small, "--data", blind.with_name("hf-tokens"), "--dry-run"]
    shown, said = command(*again, "--out", tmp_path / "new")
    assert "parameters and 60 of the position method" in shown.stdout
    assert "seed: 0 there, 1" in command(*again, "--out", tmp_path / "run", "--seed", 1)[1]
    shutil.rmtree(tmp_path / "hf-tokens" / "tokenizer")
    assert "tokenizer/tokenizer.json is missing" in command(*again, "--out", tmp_path / "new")[1]
