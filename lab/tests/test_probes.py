"""The tasks say what they are; the race tells methods apart; its record becomes a table."""

import json

import pytest
import torch

import command
from tisa_lab.probes.race import ProbeConfig, run_race
from tisa_lab.probes.report import markdown
from tisa_lab.probes.tasks import (
    BAR,
    BLANK,
    LETTERS,
    NO_ANSWER,
    OFFSET,
    ONE,
    OTHER,
    TASKS,
)


def made(task, length=20):
    tokens, answers = TASKS[task](12, length, torch.Generator().manual_seed(0))
    return tokens.tolist(), answers.tolist()


def test_find():
    for row, answers in zip(*made("find"), strict=True):
        assert answers[:OFFSET] == [NO_ANSWER] * OFFSET
        assert answers[OFFSET:] == row[:-OFFSET]


@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
@pytest.mark.parametrize("length", [8, 21])
def test_what_stands_behind_the_bar(task, length):
    for row, answers in zip(*made(task, length), strict=True):
        bar = row.index(BAR)
        letters = row[:bar]
        assert max(letters) < LETTERS
        assert row[bar + 1 :] == [BLANK] * len(letters)
        assert answers[: bar + 1] == [NO_ANSWER] * (bar + 1)
        wanted = {"copy": letters, "reverse": letters[::-1], "sort": sorted(letters)}[task]
        assert answers[bar + 1 :] == wanted


def test_order():
    seen = set()
    for row, answers in zip(*made("order"), strict=True):
        one, other = row.index(ONE), row.index(OTHER)
        assert answers[one] == answers[other] == int(one < other)
        assert sum(a != NO_ANSWER for a in answers) == 2
        seen.add(answers[one])
    assert seen == {0, 1}


def test_the_race_tells_methods_apart_and_its_record_is_a_table():
    small = ProbeConfig(length=16, factors=(1, 4), steps=100, hidden_size=32, asked=32,
                        learning_rate=5e-3, scores_learning_rate=5e-2)  # fmt: skip
    record = run_race(small, ("none", "tisa"), ("find",))
    found = {row["method"]: row["accuracy"] for row in record["rows"]}
    assert found["tisa"]["1"] > 0.8
    assert found["tisa"]["4"] > 0.8
    assert found["none"]["1"] < 0.4
    short = ProbeConfig(**vars(small) | {"steps": 2})
    rows = [run_race(short, ("absolute",), ("find",))["rows"][0] for _ in range(2)]
    assert rows[0]["accuracy"] == rows[1]["accuracy"]
    assert rows[0]["accuracy"]["4"] is None
    table = markdown(record | {"rows": record["rows"] + rows[:1]})
    assert "### 64 tokens: 4 × the training length" in table
    assert "| absolute | – |" in table


@pytest.mark.unchecked
def test_the_command(tmp_path, monkeypatch):
    # As where the locale is not UTF-8: files are, all the same.
    monkeypatch.setattr("io.text_encoding", lambda encoding, level=2: encoding or "ascii")
    # A name given twice is run once.
    arguments = ["probes", "--methods", "none,absolute,none", "--tasks", "find,order,find",
                 "--steps", "2", "--length", "12", "--out", str(tmp_path / "new")]  # fmt: skip
    shown = command.lab(arguments)
    assert shown.exit_code == 0, shown.exception
    record = json.loads((tmp_path / "new" / "probes.json").read_text(encoding="utf-8"))
    assert len(record["rows"]) == 4
    assert (tmp_path / "new" / "probes.md").read_text(encoding="utf-8") == markdown(record)
    assert (tmp_path / "new" / "probes.png").stat().st_size > 10_000
    for wrong, message in (
        (["--methods", "lemon"], "--methods must be among none, "),
        (["--methods", "none,fox"], "--methods must be of encoders, which are compared here, got"),
        (["--tasks", "guess"], "--tasks: expected some of find"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--length", "11"], "--length must be at least 12"),
    ):
        shown = command.lab(["probes", *wrong])
        assert message in shown.stderr
