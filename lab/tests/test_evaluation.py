"""What a trained model is asked in its own job: by formulas, and through the command."""

import json
import lzma
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import command
from little_corpus import SMALL, text
from tisa.transformer import LanguageModel, TransformerConfig, load
from tisa_lab.evaluation.asked import Asked
from tisa_lab.evaluation.blimp import Paradigm, log_probabilities, preferred, read, tokens_of
from tisa_lab.evaluation.copying import PASSAGE, copied, made
from tisa_lab.evaluation.evaluating import Evaluation
from tisa_lab.extrapolation.measuring import measured
from tisa_lab.extrapolation.windows import long_documents
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.corpus import CorpusNames, StreamedCorpus, head
from tisa_lab.pretrain.text import Bytes, Source
from tisa_lab.probes.recall import SYMBOLS

VOCABULARY = Bytes.vocabulary


def model_of(**values):
    sizes = dict(vocab_size=260, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                 max_position_embeddings=64, position="t5")  # fmt: skip
    model = LanguageModel(TransformerConfig(**sizes | values)).eval().double()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.3)
    return model


def likelihood(model, tokens):
    """Return log Π p(token | before it), or one hidden token after the other, as the papers do."""
    special, total = VOCABULARY.specials, 0.0
    for place, token in enumerate(tokens):
        if model.config.is_causal:
            ids = [special.begin, *tokens[:place]]
            logits = model(torch.tensor([ids]))[0, -1]
        else:
            hidden = [*tokens[:place], special.mask, *tokens[place + 1 :]]
            logits = model(torch.tensor([[special.begin, *hidden, special.end]]))[0, place + 1]
        total += float((logits.exp() / logits.exp().sum()).log()[token])
    return total


@pytest.mark.parametrize("is_causal", [True, False])
def test_sentences_are_scored_as_one_by_one(is_causal):
    model = model_of(is_causal=is_causal)
    pairs = [[[97, 98, 99], [97, 99]], [[100], [101]], [[5, 6, 7], [7, 6, 5, 4]]]
    scores = log_probabilities(model, [s for pair in pairs for s in pair], VOCABULARY)
    with torch.no_grad():
        expected = [likelihood(model, s) for pair in pairs for s in pair]
    # Logits are taken in float32.
    assert scores == pytest.approx(expected, rel=1e-5)
    blimp = {"b": Paradigm("x", pairs[:1]), "a": Paradigm("y", pairs[1:]),
             "c": Paradigm("x", [pairs[2][::-1]])}  # fmt: skip
    found = preferred(model, blimp, VOCABULARY, pairs=9)
    right = [one > other for one, other in zip(expected[::2], expected[1::2], strict=True)]
    assert found["paradigms"] == {
        "b": right[0], "a": (right[1] + right[2]) / 2, "c": not right[2]
    }  # fmt: skip
    assert found["phenomena"] == {
        "x": (right[0] + (not right[2])) / 2, "y": (right[1] + right[2]) / 2
    }  # fmt: skip
    assert found["right"] == pytest.approx(np.mean(list(found["paradigms"].values())))
    assert found["pairs"] == 4
    # The same one of two pairs in every model.
    assert preferred(model, blimp, VOCABULARY, pairs=1)["paradigms"]["a"] == right[1]


def test_a_file_of_tokens_is_the_file_of_sentences(tmp_path):
    sentences = {"one": {"term": "x", "field": "f", "pairs": [["ab", "ba"], ["abc", "é"]]}}
    whole, cut = tmp_path / "blimp.json", tmp_path / "tokens.json.xz"
    whole.write_text(json.dumps(sentences))
    cut.write_bytes(lzma.compress(json.dumps(tokens_of(sentences, Bytes())).encode()))
    found = read(whole, VOCABULARY, Bytes)
    assert found == {"one": Paradigm("x", [[[97, 98], [98, 97]], [[97, 98, 99], [195, 169]]])}
    assert found == read(cut, VOCABULARY, lambda: pytest.fail("needs no tokenizer"))
    other = replace(VOCABULARY, name="mine", fingerprint="else")
    with pytest.raises(ValueError, match=r"tokens of 'mine' \(else\), got those of bytes"):
        read(cut, other, Bytes)
    for content in ("[1]", '{"one": {"term": "x", "pairs": []}}', "{"):
        whole.write_text(content)
        with pytest.raises(ValueError, match="blimp: expected a JSON file"):
            read(whole, VOCABULARY, Bytes)


class Copier(torch.nn.Module):
    """Says what followed the token's last appearance, 20 nats above all others."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))
        self.position = SimpleNamespace(max_length=200)
        self.transformer = self._hidden
        self._hidden.__func__.position = self.position

    def _hidden(self, ids):
        logits = torch.zeros(*ids.shape, 5000)
        for row, tokens in zip(logits, ids.tolist(), strict=True):
            for place, token in enumerate(tokens):
                before = [i for i in range(place) if tokens[i] == token]
                if before:
                    row[place, tokens[before[-1] + 1]] = 20.0
        return logits

    def head(self, hidden):
        return hidden


@pytest.mark.unchecked
def test_who_copies_is_right_and_gains():
    every = torch.randperm(5000).numpy()
    again, other = made(every, 70, 3, VOCABULARY)
    assert again.shape == other.shape == (3, 70)
    assert (again[:, 0] == VOCABULARY.specials.begin).all()
    passage = slice(1, 1 + PASSAGE)
    assert torch.equal(again[:, passage], again[:, -PASSAGE:])
    assert not torch.equal(other[:, passage], other[:, -PASSAGE:])
    assert torch.equal(again[:, 1 + PASSAGE :], other[:, 1 + PASSAGE :])
    rows = copied(Copier(), [every[:900], every[900:]], VOCABULARY, [70, 200, 400], inputs=2)
    for row in rows[:2]:
        # A token may be drawn twice into one passage, or stand in the text between.
        assert row["right"] > 0.9
        # Without the first time all tokens are alike to it, or one of the text is expected.
        assert row["gain"] > 0.9 * math.log(5000)
    assert rows[2] == {"length": 400, "refused": "positions end at 200"}
    # Of a model by hand: the share of the largest logits, and the loss without the first time.
    model = model_of(is_causal=True)
    (row,) = copied(model, [every[:250] % 256], VOCABULARY, [9], inputs=5)
    pair, losses = made(every[:250] % 256, 9, 5, VOCABULARY), []
    for ids in pair:
        with torch.no_grad():
            logits = model(ids)[:, 5:8].float()
        probable = logits.softmax(-1).gather(-1, ids[:, 6:, None]).log()
        losses.append(-float(probable.mean()))
        if ids is pair[0]:
            assert row["right"] == float((logits.argmax(-1) == ids[:, 6:]).double().mean())
    assert row["gain"] == pytest.approx(losses[1] - losses[0], abs=1e-6)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "train.txt").write_text(text())
    (tmp_path / "valid.txt").write_text("\n\n".join(["abcdefghijklmnop" * 9] * 3))
    sentences = {"one": {"term": "x", "field": "f", "pairs": [["abc", "cba"]] * 3}}
    (tmp_path / "blimp.json").write_text(json.dumps(sentences))
    return tmp_path


def words(files, *more):
    return ["pretrain", "--data", files / "train.txt", "--valid", files / "valid.txt", *SMALL,
            "--steps", "2", "--objective", "causal", *more]  # fmt: skip


ASKED = ["--evaluate", "blimp,windows,recall", "--factors", "1,4", "--read-tokens", "99",
         "--recall-length", "24", "--recall-steps", "1"]  # fmt: skip


@pytest.mark.unchecked
def test_a_grid_asks_each_model_and_keeps_what_it_said(files):
    out = files / "grid"
    more = [*ASKED, "--blimp", files / "blimp.json", "--position", "absolute,rotary"]
    line = [str(word) for word in words(files, *more, "--out", out)]
    first = command.lab(line)
    assert first.exit_code == 0, first.stderr
    assert "; blimp " in first.stderr
    assert "FAILED" not in first.stderr
    kept = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    found = {one["config"]["position"]: one["evaluated"] for one in kept}
    assert kept[0]["evaluate"]["blimp_pairs"] == 1000
    for name, answers in found.items():
        assert set(answers) == {"blimp", "windows", "copying", "recall", "seconds"}
        assert answers["blimp"]["right"] in (0.0, 1.0)
        assert set(answers["seconds"]) == set(answers) - {"seconds"}
        assert [row["length"] for row in answers["copying"]] == [32, 128]
        ends = {row["task"]: row["accuracy"]["4"] for row in answers["recall"]}
        assert list(ends) == ["recall", "passkey"]
        # Absolute positions end; what is beyond is told, and does not end the run.
        assert all((end is None) == (name == "absolute") for end in ends.values())
    assert "refused" in found["absolute"]["windows"][1]
    assert len(found["absolute"]["windows"]) == 2
    own, read_as = found["rotary"]["windows"][:2], found["rotary"]["windows"][2:]
    assert {row["reading"] for row in read_as} == {
        "rotary scaling=yarn original_length=32 factor=4.0"
    }
    # The numbers are those of the model that lies there.
    (folder,) = out.glob("rotary*")
    corpus = StreamedCorpus(Source((str(files / "valid.txt"),)), Bytes())
    documents = long_documents(head(corpus, 9999), 128, 99, is_causal=True)
    again = measured(load(folder / "model").eval(), documents, VOCABULARY, [32, 128], stride=32,
                     modes=("sliding",))  # fmt: skip
    assert [row["loss"] for row in own] == pytest.approx([row["loss"] for row in again], rel=1e-5)
    # Finished is finished; without an evaluation it is what was asked for too.
    for same in (line, [str(word) for word in words(files, *more[-2:], "--out", out)]):
        assert "2 runs, 2 of them done before" in command.lab(same).stderr
    # One that was not asked is not taken for one that was, nor for one that was asked less.
    plain = [str(word) for word in words(files, "--out", files / "plain", "--position", "none")]
    assert command.lab(plain).exit_code == 0
    refused = command.lab([*plain, "--evaluate", "windows", "--factors", "1,4"])
    assert "holds another run (no evaluation)" in refused.stderr
    assert "another evaluate" in command.lab([*line, "--read-tokens", "7"]).stderr


def test_what_cannot_be_asked_is_said_before_training(files, monkeypatch):
    monkeypatch.chdir(files)
    for more, said in (
        (["--evaluate", "lemon"], "--evaluate must be some of blimp, windows, recall, got lemon"),
        (["--evaluate", "blimp"], "--blimp must be its file where evaluate has blimp"),
        (["--evaluate", "blimp", "--blimp", "no.json"], "no.json"),
        (["--evaluate", "recall", "--recall-length", "9"], "--recall-length must be at least 24"),
        (["--evaluate", "windows", "--factors", "2"], "--factors must be 1 and whole numbers"),
        (["--evaluate", "windows", "--factors", "1,99"], "expected a document of at least 3,167"),
        (["--evaluate", "windows", "--reading", "lemon"], "--reading must be among"),
        (["--evaluate", "recall", "--objective", "mlm"], "recall is asked of decoders"),
    ):
        refused = command.lab([str(w) for w in words(files, "--out", files / "new", *more)])
        assert refused.exit_code == 2, more
        assert said in refused.stderr, refused.stderr
        assert not (files / "new").exists()
    with pytest.raises(ValueError, match="windows and recall need held-out documents"):
        Asked(("windows",)).check(has_valid=False, objective="causal", longest=512)


def test_a_part_that_fails_does_not_lose_the_run(files, monkeypatch):
    def broken(*arguments, **options):
        raise torch.OutOfMemoryError("no memory\nmore")

    monkeypatch.setattr("tisa_lab.evaluation.evaluating.copied", broken)

    def learned(model, recipe, device):
        assert (model.config.position, model.config.windows) == (config.position, (None, 8))
        assert (model.config.hidden_size, model.config.vocab_size) == (recipe.hidden_size, SYMBOLS)
        return [{"task": "recall", "seed": recipe.seed}]

    monkeypatch.setattr("tisa_lab.evaluation.evaluating.learned", learned)
    monkeypatch.setattr(Evaluation, "_documents", lambda *a: [])
    config = PretrainConfig(objective="causal", position="rotary:base=50+none", window="none+8",
                            hidden_size=16, num_attention_heads=2, seed=3)  # fmt: skip
    asked = Evaluation(Asked(("recall",)), CorpusNames())
    model = LanguageModel(config.transformer(260))
    valid = StreamedCorpus(Source((str(files / "valid.txt"),)), Bytes())
    found = asked(model, config, valid, VOCABULARY, bf16=False)
    assert found.pop("seconds").keys() == found.keys()
    assert found == {"copying": {"failed": "no memory"}, "recall": [{"task": "recall", "seed": 3}]}
