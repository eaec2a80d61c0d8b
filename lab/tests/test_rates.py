"""Loss against rate: what is best, how wide, what is said of it; and the figure and the command."""

import json
import math

import pytest

import command
from tisa_lab.evaluation.drawing import figure
from tisa_lab.evaluation.rates import curves_of, gate
from tisa_lab.evaluation.report import by_rate, page
from tisa_lab.pretrain.config import PretrainConfig


def record(method, rate, perplexity, seed=0, *, date="2026-11-20", **more):
    config = PretrainConfig(position=method, learning_rate=rate, seed=seed, objective="causal")
    loss = None if perplexity is None else math.log(perplexity)
    found = {
        "kind": "pretrain", "config": config.to_dict(), "tokenizer": "t", "precision": "bf16",
        "validation": ["v", 9], "surroundings": {"date": date}, "speed": {}, "corpus": date,
        "evaluations": [{"step": 1, "loss": loss}], "parameters": {"positional": 0},
    }  # fmt: skip
    return found | ({"diverged": {"step": 3}} if perplexity is None else {}) | more


def test_the_best_rate_is_that_of_the_seeds_all_rates_have():
    records = [record("tisa", 1e-3, 100.0), record("tisa", 2e-3, 101.0),
               record("tisa", 2e-3, 50.0, seed=1), record("tisa", 4e-3, None)]  # fmt: skip
    (curve,) = curves_of(records)
    assert curve.best == 1e-3
    assert curve.spread is None
    assert curve.perplexity(2e-3) == pytest.approx(math.sqrt(101 * 50))
    assert curve.perplexity(4e-3) == math.inf
    # Of a run that is there twice the later one counts.
    (curve,) = curves_of([*records, record("tisa", 2e-3, 98.0)])
    assert curve.best == 2e-3
    assert curve.spread == pytest.approx(math.log(98 / 50))


def test_a_range_ends_between_rates_where_the_line_passes_the_limit():
    values = {5e-4: 140.0, 1e-3: 110.0, 2e-3: 100.0, 4e-3: 104.0, 8e-3: None}
    (curve,) = curves_of([record("t5", rate, value) for rate, value in values.items()])
    low, high, open_ended = curve.within(0.05)
    # From 1e-3 to 2e-3 the logarithm falls from log 110 to log 100.
    share = (math.log(110) - math.log(105)) / (math.log(110) - math.log(100))
    assert low == pytest.approx(1e-3 * 2**share)
    assert (high, open_ended) == (pytest.approx(4e-3), False)
    low, _, open_ended = curve.within(0.5)
    assert (low, open_ended) == (pytest.approx(5e-4), True)
    assert curve.within(0.001)[0] == pytest.approx(2e-3, rel=0.01)


def test_what_ran_with_other_defaults_is_called_so():
    records = [record("kerple-log", 1e-3, 9.0, date="2026-11-18"), record("kerple-log", 1e-3, 8.0),
               record("t5", 1e-3, 7.0, date="2026-11-18")]  # fmt: skip
    assert [c.label for c in curves_of(records)] == ["t5", "kerple-log", "kerple-log layers=each"]
    other = record("t5", 2e-3, 7.0)
    other["config"]["steps"] = 7
    with pytest.raises(ValueError, match="2 recipes: steps 1000, 7"):
        curves_of([*records, other])
    summed = [record("t5", rate, 7.0, corpus_sha256=str(rate)) for rate in (1, 2)]
    with pytest.raises(ValueError, match="on one corpus, got 1, 2"):
        curves_of(summed)


def test_the_gate_is_told_in_words():
    none = [record("none", 1e-3, math.exp(2.0 + 0.1 * n), seed=n) for n in range(2)]
    assert "cannot be said" in gate(curves_of(none))
    one = [record("absolute", 1e-3, math.exp(1.0))]
    assert "worse" not in gate(curves_of(none + one))
    assert "cannot be decided" in gate(curves_of(none + one))
    for losses, word, ratio, verdict in (
        ((1.0, 1.1), "better", 10.0, "is passed"),
        ((1.8, 1.9), "better", 2.0, "is not passed"),
        ((3.0, 3.1), "worse", 10.0, "is not passed"),
    ):
        two = [record("absolute", 1e-3, math.exp(x), seed=n) for n, x in enumerate(losses)]
        told = gate(curves_of(none + two))
        assert f"`absolute` is {word} by" in told
        assert f"{ratio:.1f} times the spread over seeds: the gate (5) {verdict}" in told


def answers(right, far):
    recall = {"1": 0.9, "16": far}
    return {
        "blimp": {"right": right, "phenomena": {"a_b": right, "c": 0.5}},
        "windows": [{"length": 512, "loss": math.log(50.0)}, {"length": 1024, "refused": "ends"},
                    {"length": 512, "loss": math.log(60.0), "reading": "rotary scaling=yarn"}],
        "recall": [{"task": task, "accuracy": recall} for task in ("recall", "passkey")],
        "copying": [{"length": 512, "right": 0.25, "gain": -0.5}, {"length": 1024, "refused": "-"}],
    }  # fmt: skip


def test_tables_figure_and_command(tmp_path):
    records = [
        record("rotary", 1e-3, 100.0, evaluated=answers(0.6, 0.3)),
        record("rotary", 1e-3, 100.0, seed=1, evaluated=answers(0.7, 0.5)),
        record("rotary", 2e-3, 150.0, evaluated=answers(0.1, 0.0)),
        record("absolute", 1e-3, 120.0, evaluated=answers(0.5, None)),
        record("none", 2e-3, 130.0, evaluated={"recall": {"failed": "no memory"}}),
    ]
    curves = curves_of(records)
    assert by_rate(curves) == (
        ["perplexity", "0.001", "0.002"],
        [["rotary", "**100.0, 100.0**", "150.0"], ["absolute", "**120.0**", "–"],
         ["none", "–", "**130.0**"]],
    )  # fmt: skip
    text = page(curves)
    for line in (
        "| rotary | 100.0 | 0.001 | 2 (0.0 %) | ≥ 1.0 (1.0e-3 … 1.0e-3) | ≥ 1.2 (1.0e-3 … ",
        "| rotary | 65.0 | 65 | 50 |",
        "| rotary scaling=yarn | 60.00 | – |",
        "| rotary | 50.00 | – |",
        "| rotary | 90 | 40 | 90 | 40 |",
        "| absolute | 90 | – | 90 | – |",
        "| rotary | 25.0 (-0.50) | – |",
        "- none, rate 0.002, seed 0, recall: no memory",
    ):
        assert line in text, line
    drawn = figure(curves)
    left, right = drawn.axes
    assert len(left.get_legend_handles_labels()[1]) == 3
    # Of absolute positions there is no recall so far away, of none no answer at all.
    assert [line.get_xydata().tolist() for line in right.lines] == [[[pytest.approx(100), 40.0]]]
    bare = [{k: v for k, v in one.items() if k != "evaluated"} for one in records]
    assert len(figure(curves_of(bare)).axes) == 1
    lines = "".join(json.dumps(one) + "\n" for one in records)
    for number, some in enumerate((lines, lines.splitlines()[0] + "\n")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "records.jsonl").write_text(some)
    words = ["report", str(tmp_path / "0"), str(tmp_path / "1")]
    found = json.loads(command.lab([*words, "--json"]).stdout)
    assert found["runs"] == 6
    assert [curve["method"] for curve in found["curves"]] == ["rotary", "absolute", "none"]
    shown = command.lab([*words, "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.stderr
    assert (tmp_path / "out" / "rates.md").read_text() == text
    assert (tmp_path / "out" / "rates.png").stat().st_size > 5000
    glue = tmp_path / "2"
    glue.mkdir()
    (glue / "records.jsonl").write_text('{"cell": {}}\n')
    assert "got both" in command.lab([*words, str(glue)]).stderr
