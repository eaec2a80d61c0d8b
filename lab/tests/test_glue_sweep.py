"""A sweep that is killed, resumed, run twice at once: every cell exactly once."""

import errno
import io
import json
import multiprocessing
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import command
import tisa.store
from little_glue import make_data, make_model
from tisa.cli.program import MISTAKES
from tisa.store.seals import line
from tisa_lab import cli
from tisa_lab.executors import InProcess, Lost, Pool
from tisa_lab.glue.cell import Record, grid
from tisa_lab.glue.table3 import plan
from tisa_lab.sweep import Records, Shown, run_sweep
from tisa_lab.view import Lines


class Silent:
    def begin(self, cells, done):
        pass

    def started(self, cell):
        pass

    def finished(self, cell, outcome):
        pass

    def elsewhere(self, cells, done):
        pass


CELLS = grid(["m"], ["cola", "rte"], seeds=range(4))


def made_up(cell):
    """A record as of a finished run, its numbers determined by the cell."""
    chance = random.Random(cell.key)
    metrics = {"matthews" if cell.task == "cola" else "accuracy": chance.random()}
    return Record(
        cell, metrics, [{"step": 1.0, **metrics}], 1, 1, {"total": 0.01}, 1, {"all": 1}, "d",
        {"train": 1}, {"device": "cpu"},
    )  # fmt: skip


def slow(cell):
    time.sleep(0.02)
    return made_up(cell)


def sweep_all(folder, work=made_up):
    return run_sweep(CELLS, Records(folder, Record), InProcess(work), Silent())


def forked(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def check(folder):
    """Every cell once, no torn line, the numbers of an uninterrupted sweep."""
    content = (folder / "records.jsonl").read_bytes()
    assert content.endswith(b"\n")
    keys = [json.loads(line)["key"] for line in content.splitlines()]
    assert sorted(keys) == sorted(cell.key for cell in CELLS)
    found = {r.cell: r.metrics for r in Records(folder, Record).all()}
    assert found == {cell: made_up(cell).metrics for cell in CELLS}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_sweeps_lose_and_repeat_nothing(tmp_path):
    """Two at once on one folder, one of them killed again and again."""
    chance = random.Random(0)
    other = forked(sweep_all, tmp_path, slow)
    killed = 0
    for _ in range(6):
        victim = forked(sweep_all, tmp_path, slow)
        time.sleep(chance.uniform(0.02, 0.06))
        killed += victim.is_alive()
        victim.kill()
        victim.join()
    assert killed >= 3
    assert sweep_all(tmp_path, slow) == []
    other.join(30)
    assert other.exitcode == 0
    check(tmp_path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_in_the_middle_of_a_line(tmp_path, monkeypatch):
    def half(file, line):
        os.write(file, line[: len(line) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        Records(tmp_path, Record).append(made_up(CELLS[len(Records(tmp_path, Record).all())]))
        with monkeypatch.context() as torn:
            torn.setattr(tisa.store.seals, "_write", half)
            victim = forked(sweep_all, tmp_path)
            victim.join()
        assert victim.exitcode == -signal.SIGKILL
        assert not (tmp_path / "records.jsonl").read_bytes().endswith(b"\n")
        # Read as if the torn line were not there.
        assert Records(tmp_path, Record).all()[-1].cell in CELLS
    assert sweep_all(tmp_path) == []
    check(tmp_path)


def test_a_claim_is_held_by_one_and_let_go(tmp_path):
    first, second = Records(tmp_path, Record), Records(tmp_path, Record)
    claim = first.claim(CELLS[0])
    assert claim is not None
    assert second.claim(CELLS[0]) is None
    assert second.claim(CELLS[1]) is not None
    claim.close()
    again = second.claim(CELLS[0])
    assert again is not None
    second.append(made_up(CELLS[0]))
    again.close()
    assert first.claim(CELLS[0]) is None


def test_a_full_disk_keeps_the_run_and_the_file(tmp_path, monkeypatch):
    here = Records(tmp_path, Record)
    here.append(made_up(CELLS[0]))
    before = here.path.read_bytes()

    def full(file, line):
        os.write(file, line[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(tisa.store.seals, "_write", full)
        with pytest.raises(OSError, match=r"No space left on device; the finished run") as raised:
            here.append(made_up(CELLS[1]))
    assert here.path.read_bytes() == before
    (kept,) = re.findall(r"is kept in (\S+):", str(raised.value))
    here.path.write_bytes(before + Path(kept).read_bytes())
    Path(kept).unlink()
    assert [r.cell for r in here.all()] == CELLS[:2]


def test_a_full_disk_keeps_all_runs_that_ended_together(tmp_path, monkeypatch):
    """A stack ends with all of its cells at once."""

    class Stack(InProcess):
        def free(self):
            return 3

        def submit(self, cell):
            self.cells = [*getattr(self, "cells", []), cell]

        def collect(self):
            return [(cell, made_up(cell)) for cell in self.cells]

    def full(file, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tisa.store.seals, "_write", full)
    with pytest.raises(OSError, match="3 finished runs") as raised:
        run_sweep(CELLS, Records(tmp_path / "two words", Record), Stack(made_up), Silent())
    (kept, added) = re.findall(r"kept in (\S+): .* with `cat \1 >> (.*)`", str(raised.value))[0]
    assert added == f"'{tmp_path}/two words/records.jsonl'"
    lines = Path(kept).read_text(encoding="utf-8").splitlines(keepends=True)
    Path(kept).unlink()
    assert lines == [line(made_up(cell).to_dict()) + "\n" for cell in CELLS[:3]]


def test_in_a_file_every_cell_has_one_line(tmp_path):
    rows = ["folded, S = 5, fitted, distilled 30, frozen"]
    first, second = grid(["m"], ["rte"], rows=rows, seeds=range(2))
    said = io.StringIO()
    view = Shown(Lines(said), "cells", lambda record: "accuracy", lambda cells: None)
    view.begin([first, second], set())
    view.finished(first, made_up(first))
    view.finished(second, ValueError("a lemon"))
    told, failed = said.getvalue().splitlines()[1:]
    assert told.startswith(f"1/2 {first.label}: accuracy")
    assert failed == f"failed: {second.label}: a lemon; the same command tries it again"


def test_a_cell_that_fails_is_named_and_tried_again_next_time(tmp_path):
    def broken(cell):
        if cell == CELLS[3]:
            raise ValueError("a lemon")
        return made_up(cell)

    ((cell, reason),) = sweep_all(tmp_path, broken)
    assert cell == CELLS[3]
    assert "ValueError: a lemon" in str(reason)
    assert len(Records(tmp_path, Record).all()) == len(CELLS) - 1
    assert sweep_all(tmp_path) == []
    check(tmp_path)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A made-up GLUE, a tiny model and what is common to all commands."""
    folder = tmp_path_factory.mktemp("real")
    make_data(folder / "glue")
    model = make_model(folder / "bert")
    return [
        "glue", str(model), "--data-dir", str(folder / "glue"), "--kernels", "0,2", "--seeds", "1",
        "--steps", "2", "--batch-size", "8", "--evaluations", "1",
    ]  # fmt: skip


def numbers(folder):
    return {r.cell: r.numbers() for r in Records(folder, Record).all()}


def test_the_command_in_this_process_and_in_a_pool(real, tmp_path):
    """The same numbers from both; nothing is run again; the plan says so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tasks = [
            "--tasks", "cola,sts-b,cola", "--positions", "replace", "--fold", "yes",
            "--kernels", "2",
        ]  # fmt: skip
        shown = command.lab([*real, *tasks, "--out", str(tmp_path), "--dry-run"])
        assert shown.exit_code == 0, shown.exception
        assert "2 cells to run" in shown.stdout
        assert not (tmp_path / "records.jsonl").exists()
        alone = tmp_path / "alone"
        answer = command.lab([*real, *tasks, "--out", str(alone)])
        assert answer.exit_code == 0, answer.exception
        assert "2 of 2 cells are in" in answer.stdout
        pool = ["--executor", "pool", "--workers", "1"]
        side = tmp_path / "pool"
        answer = command.lab([*real, *tasks, "--out", str(side), *pool])
        assert answer.exit_code == 0, answer.exception
    finally:
        torch.set_num_threads(threads)
    assert len(numbers(alone)) == 2
    assert numbers(alone) == numbers(side)
    before = (alone / "records.jsonl").read_bytes()
    answer = command.lab([*real, *tasks, "--out", str(alone), "--json"])
    assert "2 of them done before" in answer.stderr
    assert json.loads(answer.stdout) == tisa.store.Lines(alone / "records.jsonl").read()[0]
    assert (alone / "records.jsonl").read_bytes() == before
    # Shells complete a folder's name with a slash.
    slashed = [f"{word}/" if word == real[1] else word for word in real]
    again = [*slashed, *tasks, "--out", str(alone), "--dry-run"]
    assert "0 cells to run" in command.lab(again).stdout
    plan = json.loads(command.lab([*again, "--json"]).stdout)
    assert [(line["cells"], line["done"]) for line in plan] == [(1, 1)] * 2


def test_the_time_of_a_plan_goes_by_steps_where_epochs_are_given(real):
    model, data_dir = real[1], real[3]
    (finished,) = grid([model], ["cola"], rows=["baseline"], seeds=[0])
    record = made_up(finished)
    # 24 rows, 8 at a time.
    (left,) = grid([model], ["rte"], rows=["baseline"], seeds=[0], epochs=4, batch_size=8)
    (line,) = plan([left], [record], data_dir)
    assert line.steps == 12
    assert line.seconds == pytest.approx(12 * record.seconds["total"] / record.steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "wnli"], "got 'wnli'"),
        (["--tasks", "qqp"], "no QQP/train.tsv"),
        (
            ["--positions", "gone"],
            "--positions: expected keep or replace with commas between them, got 'gone'",
        ),
        (["--kernels", "some"], "expected whole numbers with commas"),
        (["--fold", "maybe"], "expected yes or no with commas"),
        (["--executor", "oven"], "oven"),
        (["--batches", "boxed"], "boxed"),
        (
            ["--batches", "packed", "--executor", "stacked"],
            "batches must be padded where executor is",
        ),
        (["--address", "auto"], "address is for executor"),
        (["--executor", "stacked", "--stack", "0"], "stack must be 1 or more, got 0"),
        (["--executor", "pool", "--workers", "0"], "workers must be 1 or more, got 0"),
        (["--tasks", ","], "expected names with commas between them, got ','"),
        (["--seed", "-1"], "seed must be a number from 0 to 2**32 - 1, got -1"),
        (["--dropout", "2"], "dropout must be a share from 0 to below 1, got 2.0"),
        (["--learning-rate", "nan"], "learning_rate must be a number above 0, got nan"),
        (["--scores-learning-rate", "-1"], "scores_learning_rate must be 0 or more, got -1.0"),
        (["--steps", "2", "--epochs", "1"], "expected one of them, got both"),
        (["--init", "zero", "--frozen", "yes"], "leave no cells"),
        (["--device", "tpu"], "device must be one that this machine has, such as cpu, got 'tpu'"),
    ],
)
def test_mistakes_are_said_before_anything_is_run(real, tmp_path, options, message):
    answer = command.lab([*real, "--out", str(tmp_path / "new"), *options])
    assert isinstance(answer.exception, MISTAKES)
    assert message in str(answer.exception)
    assert not (tmp_path / "new").exists()


def as_a_program(arguments):
    torch.set_num_threads(1)
    cli.PROGRAM.call(arguments)


def heard(cell):
    return str(signal.getsignal(signal.SIGINT))


def test_ctrl_c_is_for_the_command_alone():
    """A terminal sends it to every process: those of a pool would each print where they were."""
    before = signal.getsignal(signal.SIGINT)
    pool = Pool(heard, 1)
    (cell,) = grid(["bert"], ["cola"], rows=["baseline"], seeds=[0])
    pool.submit(cell)
    assert signal.getsignal(signal.SIGINT) is before
    ended = []
    while not ended:
        ended = pool.collect()
    pool.close()
    assert ended[0][1] == str(signal.SIG_IGN)


def ended_by_the_system(cell):
    if cell == CELLS[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return str(os.getpid())


def test_a_killed_process_of_a_pool_loses_its_own_job_alone():
    pool = Pool(ended_by_the_system, 2)
    for cell in CELLS[:2]:
        pool.submit(cell)
    ended = {}
    while len(ended) < 2:
        ended |= dict(pool.collect())
    assert isinstance(ended[CELLS[0]], Lost)
    assert ended[CELLS[1]].isdecimal()
    # The process that is left goes on with the next one.
    pool.submit(CELLS[2])
    while not (after := pool.collect()):
        pass
    assert after == [(CELLS[2], ended[CELLS[1]])]
    pool.close()


@pytest.mark.full
@pytest.mark.parametrize(("executor", "kills"), [("in-process", 20), ("pool", 4), ("stacked", 6)])
def test_the_command_killed_at_random_moments(real, tmp_path, executor, kills):
    """Processes of their own, from a server that has imported everything already."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tisa_lab.cli.glue"])

    def begin(folder):
        options = ["--tasks", "cola,rte,sts-b", "--seeds", "3", "--executor", executor]
        process = server.Process(
            target=as_a_program, args=([*real, *options, "--out", str(folder)],)
        )
        process.start()
        return process

    started = time.monotonic()
    whole = begin(tmp_path / "whole")
    whole.join()
    assert whole.exitcode == 0
    seconds = time.monotonic() - started
    chance = random.Random(1)
    killed = tmp_path / "killed"
    interrupted = 0
    for _ in range(kills):
        victim = begin(killed)
        before = len(Records(killed, Record).all())
        # Half of them as soon as there is something to lose, the others at any moment.
        if chance.random() < 0.5:
            while victim.is_alive() and len(Records(killed, Record).all()) == before:
                time.sleep(0.005)
        else:
            victim.join(chance.uniform(0, seconds / 8))
        interrupted += victim.is_alive()
        victim.kill()
        victim.join()
    assert interrupted >= kills / 2
    last = begin(killed)
    last.join()
    assert last.exitcode == 0
    content = (killed / "records.jsonl").read_bytes()
    keys = [json.loads(line)["key"] for line in content.splitlines()]
    assert len(keys) == len(set(keys)) == 36
    found, wanted = numbers(killed), numbers(tmp_path / "whole")
    if executor == "stacked":
        # What is left of a stack is another stack, with other rounding.
        found = {cell: pytest.approx(one["metrics"], abs=1e-3) for cell, one in found.items()}
        wanted = {cell: one["metrics"] for cell, one in wanted.items()}
    assert found == wanted
