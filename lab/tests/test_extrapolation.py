"""Windows that count every token once; losses that are those of reading token by token."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import command
from little_corpus import text
from tisa.transformer import LanguageModel, TransformerConfig
from tisa_lab.extrapolation.measuring import measured, position_bins
from tisa_lab.extrapolation.readings import readings_of
from tisa_lab.extrapolation.report import figure, markdown, together, write
from tisa_lab.extrapolation.report import shown as perplexity
from tisa_lab.extrapolation.windows import long_documents, windows_of
from tisa_lab.pretrain.config import Length, PretrainConfig, RunSettings
from tisa_lab.pretrain.corpus import StreamedCorpus
from tisa_lab.pretrain.report import label_of
from tisa_lab.pretrain.text import Bytes, Source
from tisa_lab.pretrain.training import run


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("mode", ["whole", "sliding"])
@pytest.mark.parametrize("length", [3, 8, 17, 64])
def test_every_token_counts_once(mode, is_causal, length):
    sizes = [1, 7, 63, 62, 100]
    count = [np.zeros(size, int) for size in sizes]
    for window in windows_of(sizes, length, mode, stride=5, is_causal=is_causal):
        assert window.start <= window.first < window.last <= window.stop
        assert window.stop - window.start + (1 if is_causal else 2) <= length
        count[window.document][window.first : window.last] += 1
        full = min(length - 1, sizes[window.document])
        if mode == "sliding" and is_causal and window.start > 0 and length > 6:
            # What is asked for sees all but the stride of a full window.
            assert window.first - window.start >= min(full, window.stop - window.start) - 5
    assert all((c == 1).all() for c in count)


def model_of(**values):
    torch.manual_seed(1)
    sizes = dict(vocab_size=260, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                 max_position_embeddings=16)  # fmt: skip
    model = LanguageModel(TransformerConfig(**sizes | values)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.3)
    return model


def test_losses_are_those_of_reading_each_window_alone():
    model = model_of(is_causal=True, position="tisa")
    documents = [np.arange(30, dtype=np.uint16) % 26 + 97, np.arange(60, dtype=np.uint16) % 7 + 97]
    begin = Bytes.vocabulary.specials.begin
    for row in measured(model, documents, Bytes.vocabulary, [16, 31], stride=4, batch_tokens=64):
        total, count = 0.0, 0
        cut = windows_of([30, 60], row["length"], row["mode"], stride=4, is_causal=True)
        for window in cut:
            tokens = documents[window.document][window.start : window.stop].astype(int)
            ids = torch.tensor([[begin, *tokens]])
            with torch.no_grad():
                losses = cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none")
            some = losses[window.first - window.start : window.last - window.start]
            total, count = total + float(some.double().sum()), count + len(some)
        assert row["tokens"] == count == 90
        assert row["loss"] == pytest.approx(total / count, rel=1e-5)
        assert sum(part[3] for part in row["by_position"]) == 90
        mean = sum(part[2] * part[3] for part in row["by_position"]) / 90
        assert mean == pytest.approx(row["loss"])


def test_masked_models_are_asked_for_the_same_tokens_at_every_length():
    documents = [np.arange(200, dtype=np.uint16) % 26 + 97]
    rows = measured(model_of(), documents, Bytes.vocabulary, [8, 32], stride=4)
    assert len({row["tokens"] for row in rows}) == 1
    assert 10 < rows[0]["tokens"] < 60


def test_a_table_that_ends_is_told_and_not_an_error():
    documents = [np.arange(200, dtype=np.uint16) % 26 + 97]
    rows = measured(
        model_of(position="absolute", is_causal=True), documents, Bytes.vocabulary, [16, 32]
    )
    assert ["loss" in row for row in rows] == [True, True, False, False]
    assert "at most 16 tokens" in rows[-1]["refused"]


def record_of(rows, label="tisa", seed=0, **more):
    run_ = {"label": label, "folder": f"{label}-{seed}", "seed": seed, "rows": rows}
    return {"kind": "extrapolation", "trained_at": 16, "objective": "causal", "stride": 256,
            "documents": 1, "tokens": 200, "runs": [run_], "surroundings": {}} | more  # fmt: skip


def test_a_model_that_breaks_down_past_its_length_is_told(tmp_path):
    documents = [np.arange(200, dtype=np.uint16) % 26 + 97]
    model, said = model_of(position="tisa", is_causal=True), []
    rows = measured(model, documents, Bytes.vocabulary, [16])
    model.transformer.blocks[0].attention.output.bias.data.fill_(torch.nan)
    rows += measured(model, documents, Bytes.vocabulary, [32], progress=said.append)
    assert said == ["whole 32: perplexity nan", "sliding 32: perplexity nan"]
    assert [row["loss"] is None for row in rows] == [False, False, True, True]
    write(record_of(rows), tmp_path)
    # Python alone would read NaN.
    json.loads((tmp_path / "extrapolation.json").read_text(), parse_constant=pytest.fail)
    assert "| nan | – |" in (tmp_path / "extrapolation.md").read_text()
    assert [len(axis.lines) for axis in figure(record_of(rows)).axes] == [2, 2, 2]


def test_records_of_the_same_windows_are_joined():
    def rows(loss):
        return [{"length": 16, "mode": "whole", "loss": loss, "by_position": [[0, 16, loss, 9]]}]

    first, second = record_of(rows(1.0), seed=1), record_of(rows(1.2), seed=0)
    other = record_of(rows(1.5), label="rotary")
    joined = together([first, other, second])
    assert [(r["label"], r["seed"]) for r in joined["runs"]] == [
        ("rotary", 0), ("tisa", 0), ("tisa", 1),
    ]  # fmt: skip
    assert "| tisa | 3.00 (2.72–3.32) | 1.00 |" in markdown(joined)
    with pytest.raises(ValueError, match="tisa, seed 1, is in two of the records; leave one out"):
        together([first, first])
    with pytest.raises(ValueError, match=r"tokens must be the same in all records, got \[200, 7\]"):
        together([first, record_of(rows(1.0), tokens=7)])
    more = record_of([*rows(1.0), {"length": 32, "mode": "whole", "loss": 2.0}])
    with pytest.raises(ValueError, match="lengths and modes must be the same in all records"):
        together([first, more])
    again = together([together([first, other]), second])
    assert again["runs"] == joined["runs"]
    assert again["surroundings"] == [{}, {}, {}]


def test_documents_that_are_too_short():
    with pytest.raises(ValueError, match="at least 63 tokens for the longest window, got 5"):
        long_documents([np.zeros(5, np.uint16)], 64, None, is_causal=True)
    found = long_documents([np.zeros(140, np.uint16)] * 3, 64, 130, is_causal=True)
    assert [len(document) for document in found] == [126, 126]


def test_bins_end_with_the_length():
    for length in (3, 16, 17, 512, 8192):
        edges = position_bins(length)
        assert edges[0] == 0
        assert edges[-1] >= length
        assert (np.diff(edges) > 0).all()


def test_the_command_reads_finished_runs(tmp_path):
    (tmp_path / "corpus.txt").write_text(text(longest=200))
    corpus = StreamedCorpus(Source((str(tmp_path / "corpus.txt"),)), Bytes())

    def train(name, position, **more):
        config = PretrainConfig(**dict(
            objective="causal", position=position, hidden_size=16, num_hidden_layers=1,
            num_attention_heads=2, embedding_size=8, lengths=(Length(32),), batch_tokens=256,
            steps=2,
        ) | more)  # fmt: skip
        run(config, corpus, tmp_path / name, settings=RunSettings(device="cpu"),
            save_tokenizer=Bytes().save)  # fmt: skip

    for name in ("tisa", "absolute"):
        train(name, name)
    shown = command.lab(
            ["extrapolate", str(tmp_path / "tisa"), str(tmp_path / "absolute"), "--data",
         str(tmp_path / "corpus.txt"), "--lengths", "32,128", "--stride", "16", "--out",
         str(tmp_path / "far"), "--device", "cpu", "--modes", "whole,sliding,whole"],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.exception
    record = json.loads((tmp_path / "far" / "extrapolation.json").read_text())
    assert record["trained_at"] == 32
    assert [len(r["rows"]) for r in record["runs"]] == [4, 4]
    table = (tmp_path / "far" / "extrapolation.md").read_text()
    assert table == markdown(record)
    assert "| absolute | 2" in table
    # A second seed with losses that are larger by 1: the range is told.
    twice = copy.deepcopy(record)
    twice["runs"].append(copy.deepcopy(twice["runs"][0]) | {"seed": 1})
    for row in twice["runs"][-1]["rows"]:
        row["loss"] += 1.0
    best = record["runs"][0]["rows"][0]["loss"]
    low, mean, high = (perplexity(np.exp(best + more)) for more in (0.0, 0.5, 1.0))
    assert f"| tisa | {mean} ({low}–{high}) |" in markdown(twice)
    assert "32 (trained)" in table
    assert (tmp_path / "far" / "extrapolation.png").stat().st_size > 20_000
    # One line in each panel for each method that reads the length, and one for the training length.
    assert [len(axis.lines) for axis in figure(record).axes] == [3, 3, 3]
    # Asked for one mode, no panel is empty; by position is of windows without overlap.
    for mode, titles in (
        ("whole", ["windows without overlap", "by position in the longest window"]),
        ("sliding", ["sliding windows (stride 16)"]),
    ):
        one = copy.deepcopy(record)
        for run_ in one["runs"]:
            run_["rows"] = [row for row in run_["rows"] if row["mode"] == mode]
        drawn = figure(one)
        assert [axis.get_title() for axis in drawn.axes] == titles
        assert [len(axis.lines) for axis in drawn.axes] == [3] * len(titles)
        # Named from top to bottom as the lines end.
        ends = {line.get_label(): line.get_ydata()[-1] for line in drawn.axes[0].lines[:2]}
        named = [text.get_text() for text in drawn.legends[0].get_texts()]
        assert sorted(named) == ["absolute", "tisa"]
        assert named == sorted(named, key=lambda name: -ends[name])
        # Nothing could be read at all: an empty frame, and no error.
        for run_ in one["runs"]:
            run_["rows"] = [{"length": 32, "mode": mode, "refused": "why"}]
        assert len(figure(one).axes) == 1
    # A row more for each reading; of scores, which have no such options, none.
    train("rotary", "rotary")
    train("mixed", "rotary+none", window="8+none", num_hidden_layers=2)
    shown = command.lab(
        ["extrapolate", *(str(tmp_path / name) for name in ("tisa", "rotary", "mixed")), "--data",
         str(tmp_path / "corpus.txt"), "--lengths", "32,128", "--modes", "whole", "--device", "cpu",
         "--reading", "rotary:scaling=yarn,rotary:scaling=linear:factor=2"],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.stderr
    rows = [line.split(" | ")[0].removeprefix("| ") for line in shown.stdout.splitlines()[4:9]]
    assert rows == [
        "tisa", "rotary", "rotary scaling=yarn original_length=32 factor=4.0",
        "rotary scaling=linear factor=2 original_length=32", "rotary+none window=8+none",
    ]  # fmt: skip
    # What would be taken for seeds of one method is refused.
    train("longer", "tisa", lengths=(Length(64),))
    train("more", "tisa", steps=3)
    for other, message in (
        ("longer", "trained at one length, got 32, 64"),
        ("more", "same method and seed"),
    ):
        shown = command.lab(
            ["extrapolate", str(tmp_path / "tisa"), str(tmp_path / other), "--data",
             str(tmp_path / "corpus.txt"), "--lengths", "32", "--device", "cpu"],
        )  # fmt: skip
        assert message in shown.stderr


def trained(position, **options):
    config = {"position": position, "position_options": options, "seed": 0, "lengths": [[16, 1.0]]}
    values = dict(position=position, position_options=options, num_hidden_layers=3)
    return model_of(**values, is_causal=True), config, "bytes"


def test_readings_are_the_same_weights_with_other_options():
    loaded = [trained("rotary", base=500.0), trained("tisa")]
    asked = ("rotary:scaling=yarn", "rotary:scaling=dynamic_ntk", "rotary:p=0.5")
    found = readings_of([Path("one"), Path("two")], loaded, asked, 16, 64)
    assert [(folder.name, label_of(config)) for folder, _, config in found] == [
        ("one", "rotary base=500.0"),
        ("one", "rotary base=500.0 scaling=yarn original_length=16 factor=4.0"),
        ("one", "rotary base=500.0 scaling=dynamic_ntk original_length=16"),
        ("one", "rotary base=500.0 p=0.5"),
        ("two", "tisa"),
    ]
    ids = torch.randint(0, 260, (1, 40))
    with torch.no_grad():
        trained_, yarn, ntk, some = (model(ids) for _, model, _ in found[:4])
        assert torch.equal(trained_[:, :16], found[2][1](ids[:, :16]))
    for other in (yarn, ntk, some):
        assert (trained_ - other).abs().max() > 1e-3
    mixed = trained("rotary:base=500+none+rotary")
    mixed[1]["position"] = mixed[0].config.position
    _, (_, model, config) = readings_of([Path("one")], [mixed], asked[:1], 16, 64)
    scaled = 'scaling="yarn":original_length=16:factor=4.0'
    assert label_of(config) == f"rotary:base=500:{scaled}+none+rotary:{scaled}"
    with torch.no_grad():
        assert (model(ids) - mixed[0](ids)).abs().max() > 1e-3
    for given, error in (
        ("alibi", r"expected a method of the runs \(rotary, tisa\), got 'alibi'"),
        ("rotary:base=500.0", "got rotary base=500.0 twice"),
        ("tisa:num_kernels=2", "tisa:num_kernels=2 must have the weights that the run was trained"),
    ):
        with pytest.raises(ValueError, match=f"reading.*{error}"):
            readings_of([Path("one"), Path("two")], loaded, (given,), 16, 64)


@pytest.mark.unchecked
def test_mistakes(tmp_path):
    (tmp_path / "corpus.txt").write_text(text())
    for arguments, message in (
        (["--lengths", "a"], "--lengths: expected whole numbers"),
        (["--modes", "none"], "--modes: expected whole or sliding"),
        (["--stride", "0"], "--stride must be at least 1"),
        ([], "expected the folder of a finished"),
    ):
        shown = command.lab(
            ["extrapolate", str(tmp_path), "--data", str(tmp_path / "corpus.txt"), *arguments],
        )
        assert shown.exit_code != 0
        assert message in shown.stderr
