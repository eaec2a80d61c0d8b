"""One file of somebody's in, one page out."""

import json
import re
from itertools import pairwise

import pytest
import torch

import command
from own_methods import FUNCTION, forget
from page_numbers import NODE, other, scripts_tell, told, untraced
from tisa.positions import METHODS
from tisa_lab.compare import comparing
from tisa_lab.compare.page import cells, header, markdown, page_of
from tisa_lab.compare.reckoning import check_affordable
from tisa_lab.compare.settings import SIZES, CompareConfig
from tisa_lab.compare.text import made_up
from tisa_lab.executors import Place
from tisa_lab.pretrain.corpus import CorpusNames
from tisa_lab.pretrain.grid import Run
from tisa_lab.probes.recall import PAIRS

FEW = ["--recall-steps", "1", "--recall-factors", "1,2", "--probe-steps", "2", "--probe-length",
       "12", "--tasks", "find", "--steps", "3", "--length", "32", "--batch-tokens", "256",
       "--hidden-size", "16", "--num-attention-heads", "2", "--num-hidden-layers", "1",
       "--speed-length", "32", "--speed-rounds", "1", "--search-steps", "1",
       "--device", "cpu"]  # fmt: skip


def test_a_file_in_and_a_page_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root.py").write_text(FUNCTION)
    mine = "root.py:Root:start=0.1"
    words = ["compare", mine, "--others", "none,absolute,fox", *FEW, "--out", "page"]
    try:
        done = command.lab(words)
        assert done.exit_code == 0, (done.stderr, done.exception)
    finally:
        forget()
    out = tmp_path / "page"
    record = json.loads((out / "compare.json").read_text())
    assert record["methods"] == [mine]
    assert {row["method"] for row in record["rows"]} == {mine, "none", "absolute", "fox"}
    assert record["sources"][mine]["file"] == "root.py"
    rows = {row["method"]: row for row in record["rows"]}
    # No places past its length: told, and not left out.
    assert rows["absolute"]["perplexity"][1:] == [None, None]
    assert rows["absolute"]["right_far"] is None
    assert all(one > 1 for one in rows[mine]["perplexity"])
    # No encoder can have it: its language model is all there is.
    assert list(record["decoders"]) == ["fox"]
    assert rows["fox"]["marks"] is rows["fox"]["right"] is None
    assert all(one > 1 for one in rows["fox"]["perplexity"])
    assert record["speed"]["fox"] > 0
    assert record["speed"]["none"] == 1.0
    # Decoders alone are asked for values from far away, as all others.
    assert len(rows["fox"]["recall"]) == len(rows["fox"]["passkey"]) == 2
    assert rows["absolute"]["recall"][1:] == [None]
    assert done.stdout == markdown(record) == (out / "compare.md").read_text()
    page = (out / "index.html").read_text()
    assert "fox is for decoders, so it has no marks and no right answers" in page
    assert f'<tr class="ours"><td>{mine}</td>' in page
    charts = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["charts"]
    drawn = {line["name"]: line["ys"] for line in charts["recall"]["lines"]}
    assert drawn == {name: row["recall"] for name, row in rows.items()}
    assert len(charts["passkey"]["lines"]) == 4
    for row in cells(record):
        assert len(row) == len(header(record))
        assert "".join(f"<td>{cell}</td>" for cell in row) in page
    assert (out / "compare.png").stat().st_size > 5000
    # Every number in a sentence is the record's; the name of a method is none.
    named = json.loads(json.dumps(record).replace(mine, "mine"))
    told_twice = (told(page_of(one)) for one in (named, other(named)))
    literals = ["marks of 6", "SHA-256", f"recall has {PAIRS} pairs", f"right once in {PAIRS}"]
    assert untraced(*told_twice, literals) == [("3", "mine, beside 3 others")]
    if NODE is not None:
        assert "recall: right answers against tokens, by method" in scripts_tell(page, tmp_path)[0]
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)


@pytest.mark.unchecked
def test_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (["lemon"], "METHODS must be among none"),
        (["none", "--tasks", "guess"], "--tasks must be some of find"),
        (["none", "--steps", "0"], "--steps must be at least 1"),
        (["none", "--factors", "2"], "--factors must be 1 and whole numbers"),
        (["none", "--recall-factors", "1"], "--recall-factors must be 1 and whole numbers"),
        (
            ["none", "--valid", "x.txt"],
            "--valid must be given with a text to train on (data), got x.txt",
        ),
        (["none", "--data", "x.txt"], "--valid must be held-out documents of a text that is given"),
        (["mine.py:Mine"], "the class Mine in the file mine.py, which is not there"),
    ):
        done = command.lab(["compare", *words])
        assert done.exit_code == 2
        assert said in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.unchecked
def test_the_large_form_is_refused_without_a_gpu_unless_the_device_was_asked_for():
    cpu, told = torch.device("cpu"), []
    large = CompareConfig(size="large", hidden_size=16, num_attention_heads=2, length=32, steps=9)
    assert large.sizes().steps == 9
    assert large.sizes().probe_steps == SIZES["large"].probe_steps > SIZES["small"].probe_steps
    assert set(large.sizes().others) == set(METHODS)
    with pytest.raises(ValueError, match="its 3 language models alone would take about "):
        check_affordable(large, 3, cpu, asked=False, progress=told.append)
    assert told == []
    check_affordable(large, 3, cpu, asked=True, progress=told.append)
    assert len(told) == 1
    check_affordable(CompareConfig(), 3, cpu, asked=False, progress=told.append)
    check_affordable(large, 3, torch.device("cuda"), asked=False, progress=told.append)
    assert len(told) == 1
    with pytest.raises(ValueError, match="size must be small or large, got 'huge'"):
        CompareConfig(size="huge")


def test_a_language_model_that_failed_is_named_with_what_to_do(tmp_path, monkeypatch):
    config = CompareConfig(others=("none",), length=32, steps=1, factors=(1,), batch_tokens=32)
    text = comparing._Text(tmp_path, CorpusNames(), None, config.sizes(), 0)

    def broken(configs, *_, **__):
        return [(Run(one), OSError("no space left")) for one in configs]

    monkeypatch.setattr(comparing, "run_grid", broken)
    with pytest.raises(ValueError, match=r"none.* no space left; the same command tries it again"):
        comparing._language_models(("none",), tmp_path, text, config, Place(), "cpu", print)


def test_the_text_is_the_same_for_a_seed_and_a_sentence_begins_with_the_last_person():
    text = made_up(3, 5, 0)
    assert text == made_up(3, 5, 0) != made_up(3, 5, 1)
    for document in text.strip().split("\n\n"):
        told = [sentence.strip(" .").split() for sentence in document.split(".") if sentence]
        assert len([sentence for sentence in told if sentence]) == 5
        for one, following in pairwise(told):
            assert not following or following[0] == one[-1]
