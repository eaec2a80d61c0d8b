"""One file of somebody's in, one page out."""

import json
import re
from itertools import pairwise

import pytest

import command
from own_methods import FUNCTION, forget
from tisa_lab.compare.page import cells, header, markdown
from tisa_lab.compare.text import made_up

FEW = ["--probe-steps", "2", "--probe-length", "12", "--tasks", "find", "--steps", "3", "--length",
       "32", "--batch-tokens", "256", "--hidden-size", "16", "--num-attention-heads", "2",
       "--num-hidden-layers", "1", "--speed-length", "32", "--speed-rounds", "1",
       "--search-steps", "1", "--device", "cpu"]  # fmt: skip


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
    assert done.stdout == markdown(record) == (out / "compare.md").read_text()
    page = (out / "index.html").read_text()
    assert "fox is for decoders, so it has no marks" in page
    assert f'<tr class="ours"><td>{mine}</td>' in page
    for row in cells(record):
        assert len(row) == len(header(record))
        assert "".join(f"<td>{cell}</td>" for cell in row) in page
    assert (out / "compare.png").stat().st_size > 5000
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)


@pytest.mark.unchecked
def test_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (["lemon"], "METHODS must be among none"),
        (["none", "--tasks", "guess"], "--tasks must be some of find"),
        (["none", "--steps", "0"], "--steps must be at least 1"),
        (["mine.py:Mine"], "the class Mine in the file mine.py, which is not there"),
    ):
        done = command.lab(["compare", *words])
        assert done.exit_code == 2
        assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_text_is_the_same_for_a_seed_and_a_sentence_begins_with_the_last_person():
    text = made_up(3, 5, 0)
    assert text == made_up(3, 5, 0) != made_up(3, 5, 1)
    for document in text.strip().split("\n\n"):
        told = [sentence.strip(" .").split() for sentence in document.split(".") if sentence]
        assert len([sentence for sentence in told if sentence]) == 5
        for one, following in pairwise(told):
            assert not following or following[0] == one[-1]
