"""Cells trained side by side: each equal to its single run, failing alone, killed and resumed."""

import json
import random
import time
from itertools import pairwise

import pytest
import torch
import transformers

import command
from little_glue import changed, make_data, make_model
from test_glue_sweep import CELLS, Silent, check, forked, made_up
from tisa_lab.glue import stacked
from tisa_lab.glue.cell import Cell, Record, grid
from tisa_lab.glue.stacked import Stacked, check_stackable, run_stack, stacks
from tisa_lab.glue.training import Runner, run
from tisa_lab.sweep import Records, run_sweep

# What the loss may differ from a single run's, in float32; metrics are in percent.
BUDGET = 1e-5
METRIC_BUDGET = 0.02
# More than two epochs, the last batch of each not full.
SMALL = dict(steps=7, batch_size=10, learning_rate=1e-2, evaluations=2, calibration_rows=8)
BARE = dict(num_kernels=0, init="zero")
REPLACE = dict(positions="replace")
FITTED = dict(num_kernels=2, positions="replace", fold=True, init="fit")
VARIANTS = {
    "cola": [BARE, FITTED, dict(FITTED, frozen=True, seed=1), dict(num_kernels=3, seed=1)],
    "rte": [dict(num_kernels=3), dict(BARE, **REPLACE), dict(num_kernels=1, seed=1, **REPLACE)],
    "sts-b": [
        dict(BARE, fold=True, **REPLACE), dict(num_kernels=3, init="zero"), dict(BARE, seed=1),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("models") / "bert"))


def assert_same(found, wanted):
    """The numbers of two records of one cell, within the budget."""
    mine, single = found.numbers(), wanted.numbers()
    for one, other in zip(mine.pop("evaluations"), single.pop("evaluations"), strict=True):
        assert list(one) == list(other)
        for name in one:
            budget = BUDGET * max(1, other["loss"]) if name == "loss" else METRIC_BUDGET
            assert one[name] == pytest.approx(other[name], abs=budget), name
    del mine["metrics"], single["metrics"]
    assert mine == single


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=pytest.mark.full) if t == "rte" else t for t in VARIANTS]
)
def test_each_cell_of_a_stack_is_its_single_run(data_dir, model, task, tmp_path):
    """With and without positions, S from 0 to 3, folded, fitted, frozen, of two seeds."""
    cells = [Cell.of(model, task, **variant, **SMALL) for variant in VARIANTS[task]]
    seen = []
    found = run_stack(cells, Runner(data_dir, None, tmp_path, progress=lambda *at: seen.append(at)))
    assert seen == [(step, 7) for step in range(7)]
    for record, cell in zip(found, cells, strict=True):
        assert isinstance(record, Record), record
        assert record.cell == cell
        assert record.surroundings["stacked"] == len(cells)
        assert_same(record, run(cell, data_dir=data_dir, starts=tmp_path))
    # Which could have failed: cells differ by far more than the budget.
    losses = sorted(record.metrics["loss"] for record in found)
    assert min(b - a for a, b in pairwise(losses)) > 2 * BUDGET
    for record in found:
        first, last = (at["loss"] for at in record.evaluations)
        assert abs(first - last) > 2 * BUDGET


def test_a_cell_that_fails_fails_alone(data_dir, model, monkeypatch):
    """One becomes NaN, one cannot be converted; the others' numbers do not change by a bit."""
    cells = [
        Cell.of(model, "rte", **BARE, **SMALL, seed=seed, positions=positions)
        for seed in (0, 1)
        for positions in ("keep", "replace")
    ]
    whole = run_stack(cells, Runner(data_dir))
    make = stacked.start_of

    def start_of(cell, *args):
        if cell == cells[3]:
            raise ValueError("a lemon")
        made = make(cell, *args)
        if cell == cells[1]:
            with torch.no_grad():
                made.bert.encoder.layer[1].output.dense.weight[0, 0] = float("nan")
        return made

    monkeypatch.setattr(stacked, "start_of", start_of)
    found = run_stack(cells, Runner(data_dir))
    assert isinstance(found[1], ArithmeticError)
    assert "the loss is nan; lower learning_rate (0.01)" in str(found[1])
    assert str(found[3]) == "ValueError: a lemon"
    for number in (0, 2):
        assert found[number].numbers() == whole[number].numbers()


def test_a_stack_that_does_not_fit_is_halved(model, monkeypatch, caplog):
    cells = grid([model], ["cola"], seeds=(0, 1))
    tried = []

    def run_stack(cells, runner):
        tried.append(len(cells))
        if len(cells) > 4 or alone in cells:
            raise torch.OutOfMemoryError("no room")
        return [made_up(cell) for cell in cells]

    alone = stacks(cells, 16)[0][-1]
    monkeypatch.setattr(stacked, "run_stack", run_stack)
    monkeypatch.setattr(stacked, "outcome", lambda *given: RuntimeError("alone"))
    place = Stacked(Runner(), 16)
    for cell in cells:
        place.submit(cell)
    assert place.free() == 0
    found = place.collect()
    assert place.free() == 16
    assert [cell for cell, _ in found] == stacks(cells, 16)[0]
    # At last one is tried for itself, and then with a part of its batch at a time.
    assert tried == [16, 8, 4, 4, 8, 4, 4, 2, 2, 1, 1]
    assert str(dict(found)[alone]) == "alone"
    assert all(isinstance(record, Record) for cell, record in found if cell != alone)
    assert "out of memory; again, half of them at a time" in caplog.text


def test_what_goes_together(model):
    cells = grid([model], ["cola", "rte"], kernels=(0, 1, 3), seeds=range(5))
    made = stacks(cells, 12)
    assert sorted(c.key for stack in made for c in stack) == sorted(c.key for c in cells)
    assert [len(stack) for stack in made] == [12, 12, 12, 12, 6, 6]
    # Whole seeds of one task.
    assert all(len({c.task for c in stack}) == 1 for stack in made)
    assert [stack[0].task for stack in made] == 3 * ["cola", "rte"]
    assert [sorted({c.seed for c in stack}) for stack in made[::2]] == [[0, 1], [2, 3], [4]]
    # A seed that is too large is divided evenly.
    assert [len(stack) for stack in stacks(cells[:6], 5)] == [3, 3]
    assert len(stacks([cells[0], changed(cells[1], learning_rate=0.5)], 9)) == 2
    assert stacks([], 9) == []


def quick(monkeypatch):
    def run_stack(cells, runner):
        time.sleep(0.1)
        return [made_up(cell) for cell in cells]

    monkeypatch.setattr(stacked, "run_stack", run_stack)


def sweep_stacks(folder):
    def together(cells):
        return stacks(cells, 8)

    return run_sweep(CELLS, Records(folder, Record), Stacked(Runner(), 8), Silent(), together)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_sweeps_of_stacks_lose_and_repeat_nothing(tmp_path, monkeypatch):
    quick(monkeypatch)
    chance = random.Random(0)
    other = forked(sweep_stacks, tmp_path)
    killed = 0
    for _ in range(4):
        victim = forked(sweep_stacks, tmp_path)
        time.sleep(chance.uniform(0.02, 0.06))
        killed += victim.is_alive()
        victim.kill()
        victim.join()
    assert killed >= 2
    assert sweep_stacks(tmp_path) == []
    other.join(30)
    assert other.exitcode == 0
    check(tmp_path)


def test_the_command_stacked(data_dir, model, tmp_path):
    def call(*more):
        options = ["--tasks", "cola", "--kernels", "0,2", "--seeds", "2", "--steps", "2"]
        return command.lab(
            ["glue", model, "--data-dir", str(data_dir), "--out", str(tmp_path / "out"), *options,
             "--batch-size", "8", "--evaluations", "1", "--executor", "stacked", *more],
        )  # fmt: skip

    shown = call("--dry-run", "--stack", "5")
    assert shown.exit_code == 0, shown.exception
    assert "2 stacks:" in shown.stdout
    assert "bert CoLA: 4 cells, seed 1" in shown.stdout
    assert "1 stacks:" in call("--dry-run").stdout
    assert not (tmp_path / "out").exists()
    started = time.monotonic()
    answer = call()
    took = time.monotonic() - started
    assert answer.exit_code == 0, answer.exception
    path = tmp_path / "out" / "records.jsonl"
    first = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["surroundings"]["stacked"] for r in first] == 8 * [8]
    # What they took together is shared out, and is no more than all of it.
    seconds = [r["seconds"] for r in first]
    assert all(s["train"] + s["evaluate"] + s["convert"] <= s["total"] + 0.002 for s in seconds)
    assert sum(s["total"] for s in seconds) <= took
    # Three lines are lost; the rest is not run again, and those are as they were.
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:5]))
    before = path.read_bytes()
    assert call().exit_code == 0
    assert path.read_bytes().startswith(before)
    again = Records(tmp_path / "out", Record).all()
    assert len(again) == 8
    wanted = {r["key"]: r["metrics"] for r in first}
    for record in again:
        assert record.metrics == pytest.approx(wanted[record.cell.key], abs=BUDGET)


def test_a_model_that_cannot_be_stacked_is_refused(tmp_path, data_dir):
    make_model(tmp_path / "mpnet")
    transformers.MPNetConfig(
        vocab_size=69, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    ).save_pretrained(tmp_path / "mpnet")
    with pytest.raises(ValueError, match=r"it is a mpnet, and these are known.*take another exec"):
        check_stackable([str(tmp_path / "mpnet")])
