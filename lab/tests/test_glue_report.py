"""Records in, Table 3 out: every number checked by hand."""

import csv
import dataclasses
import io
import json
import re

import pytest

import command
from little_glue import changed
from tisa_lab.glue.cell import BASELINE, FOLDED, ZEROED, Cell, Record, Variant
from tisa_lab.glue.numbers import Entry, difference, summary
from tisa_lab.glue.report import latex, markdown, rows, table_csv
from tisa_lab.glue.tasks import task_named
from tisa_lab.sweep import Records


def record(task, scores, *, data="d", **variant):
    made = []
    for seed, value in enumerate(scores):
        cell = Cell.of("m/tiny", task, seed=seed, **variant, **vars(task_named(task).recipe))
        name = "matthews" if task == "cola" else "accuracy"
        evaluations = [{"step": 1.0, name: value + 3}, {"step": 2.0, name: value}]
        where = dict.fromkeys(("commit", "device", "torch", "transformers", "date"), "x")
        made.append(
            Record(cell, {name: value}, evaluations, 2, 9, {"total": 36.0}, 1, {"all": 1}, data,
                   {"train": 1}, where)
        )  # fmt: skip
    return made


STOCK = dict(num_kernels=0, init="zero")
GONE = dict(num_kernels=0, init="zero", positions="replace")
RECORDS = [
    *record("cola", [30.0, 32.0, 31.0], **STOCK),
    *record("cola", [31.0, 33.0, 35.0], num_kernels=3),
    *record("cola", [30.0, 30.0, 30.0], num_kernels=5),
    *record("cola", [10.0, 11.0, 12.0], **GONE),
    *record("cola", [15.0, 16.0, 17.0], **GONE, fold=True),
    *record("cola", [12.0, 13.0, 10.0], num_kernels=5, positions="replace"),
    *record("cola", [26.0, 27.0, 29.0], num_kernels=5, positions="replace", init="fit", fold=True),
    *record("rte", [60.0], **STOCK),
    *record("rte", [61.0, 63.0], **GONE),
    *record("rte", [59.0], **GONE, fold=True),
]


def test_the_numbers():
    a, b = summary(RECORDS)
    assert a.tasks == ("cola", "rte")
    assert (a.entry(BASELINE, "cola").median, a.entry(BASELINE, "cola").low) == (31.0, 30.0)
    gain = a.gain("cola")
    assert (gain.variant.label, gain.difference.value) == ("S = 3", 2.0)
    assert gain.percent == pytest.approx(100 * 2 / 69)
    low, high = gain.difference.interval
    assert -4 <= low <= 2 <= high <= 4
    assert b.loss("cola").value == 20.0
    assert b.loss_is_clear("cola")
    fitted = Variant.named("folded, S = 5, fitted")
    assert b.given_back(Variant.named("zeroed, S = 5"), "cola").value == pytest.approx(5.0)
    share = b.given_back(fitted, "cola")
    assert share.value == pytest.approx(100 * 16 / 20)
    assert share.interval[0] < share.value < share.interval[1]
    assert b.given_back(fitted, "cola", FOLDED).value == pytest.approx(100 * 11 / 15)
    # Removing positions lost nothing on RTE: there is no share of it.
    assert b.given_back(ZEROED, "rte") is None
    assert not b.loss_is_clear("rte")
    assert a.gain("rte") is None
    best, _ = summary(RECORDS, score="best")
    assert best.entry(BASELINE, "cola").median == 34.0


def test_the_interval_is_of_pairs():
    """A gain that every seed shows is certain, however far the seeds lie apart."""
    below = Entry({0: 10.0, 1: 50.0, 2: 90.0})
    above = Entry({seed: value + 1 for seed, value in below.scores.items()})
    found = difference(above, below)
    assert found.interval == pytest.approx((1.0, 1.0))
    assert difference(above, Entry({7: 1.0})).interval is None
    assert difference(above, Entry({})) is None


def test_the_tables_say_what_is_missing_and_how_many_seeds():
    parts = summary(RECORDS)
    a, b = (dict(rows(part)) for part in parts)
    assert a["baseline"] == ["31.0 [30.0–32.0] (n = 3)", "60.0 (n = 1)"]
    assert a["S = 3"][1] == "missing"
    assert a["Δ (its S)"][0].startswith("+2.0 [")
    assert a["Δ (its S)"][0].endswith("(S = 3)")
    assert a["Δ%"] == ["2.9", "missing"]
    assert b["lost by removing positions"][0].startswith("+20.0 [")
    assert b["lost by removing positions"][1] == "-2.0 *"
    share, missing = b["given back: folded, S = 5, fitted"]
    assert re.fullmatch(r"80 % \[\d+, \d+\]", share)
    assert missing == "missing"
    assert b["given back from folded on: folded, S = 5, fitted"][0].startswith("73 % [")
    # Nothing lost, so nothing to give back; one seed, so a loss that may be chance.
    assert b["given back: folded"][0].startswith("25 %")
    assert b["given back: folded"][1] == "–"
    text = markdown(parts, RECORDS)
    assert "25 runs, 0.25 hours" in text
    assert "Matthews correlation" in text
    assert latex(parts).count(r"\begin{tabular}") == 2
    assert r"80 \%" in latex(parts)
    lines = list(csv.DictReader(io.StringIO(table_csv(parts))))
    missing = [r for r in lines if r["variant"] == "S = 3" and r["task"] == "rte"]
    assert [(r["seeds"], r["median"]) for r in missing] == [("0", "")]
    (row,) = [r for r in lines if r["variant"] == "folded, S = 5, fitted" and r["task"] == "cola"]
    assert (row["seeds"], row["median"], row["given_back_percent"]) == ("3", "27.0000", "80.0000")


def test_any_name_of_a_model_is_latex():
    named = dataclasses.replace(RECORDS[0].cell, model=r"m/a_b^c~1$\{x}")
    made = latex(summary([dataclasses.replace(RECORDS[0], cell=named)]))
    assert r"a\_b\textasciicircum{}c\textasciitilde{}1\$\textbackslash{}\{x\}, with" in made


def test_what_cannot_stand_in_one_table_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        summary([])
    with pytest.raises(ValueError, match=rf"there twice \(key {RECORDS[0].cell.key}\).*one of the"):
        summary([RECORDS[0], RECORDS[0]])
    other = changed(RECORDS[0].cell, learning_rate=1.0, seed=7)
    with pytest.raises(ValueError, match=r"CoLA differ in learning_rate 1e-05 and 1\.0"):
        summary([*RECORDS, dataclasses.replace(RECORDS[0], cell=other)])
    seed = dataclasses.replace(RECORDS[0].cell, seed=7)
    with pytest.raises(ValueError, match="differ in data d and e"):
        summary([*RECORDS, dataclasses.replace(RECORDS[0], cell=seed, data="e")])


def test_the_command(tmp_path):
    for one in RECORDS:
        Records(tmp_path / "runs", Record).append(one)
    answer = command.lab(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.exception
    assert (tmp_path / "out" / "table3.md").read_text() in answer.stdout
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {
        ".md",
        ".tex",
        ".csv",
        ".png",
        ".json",
    }
    assert (tmp_path / "out" / "table3.png").stat().st_size > 10_000
    answer = command.lab(["report", str(tmp_path / "runs"), "--json"])
    found = json.loads(answer.stdout)
    assert found["runs"] == len(RECORDS)
    with (tmp_path / "out" / "table3.csv").open() as file:
        for line, cell in zip(csv.DictReader(file), found["cells"], strict=True):
            assert int(line["seeds"]) == cell["seeds"] == len(cell["scores"])
            assert line["median"] == ("" if cell["median"] is None else f"{cell['median']:.4f}")
            assert (line["given_back_low"] == "") == (cell["given_back_low"] is None)
    for wrong in (b"{bad}\n", b"\xff\n"):
        (tmp_path / "records.jsonl").write_bytes(wrong)
        both = ["report", str(tmp_path / "runs"), str(tmp_path)]
        answer = command.lab(both)
        assert str(answer.exception).startswith(f"{tmp_path / 'records.jsonl'}, line 1: ")
    (tmp_path / "records.jsonl").unlink()
    answer = command.lab(["report", str(tmp_path)])
    assert "no records.jsonl in it" in str(answer.exception)
