"""A grid of runs: finished once, in pieces, whatever diverges, fails or is stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import command
from little_corpus import ROOT, SMALL, environment, text, tisa
from tisa_lab.pretrain.config import Grid, Length, PretrainConfig
from tisa_lab.pretrain.grid import Run

METHODS = ["--position", "none,tisa:layers=first", "--learning-rate", "0.01,0.02", "--steps", "3"]
KEYS = ["none-0.01-0", "tisa-layers=first-0.01-0", "none-0.02-0", "tisa-layers=first-0.02-0"]


@pytest.fixture
def corpus_file(tmp_path):
    (tmp_path / "corpus.txt").write_text(text())
    return tmp_path / "corpus.txt"


def grid(corpus_file, out, *more):
    words = ["pretrain", "--data", corpus_file, "--valid", corpus_file, "--out", out, *SMALL, *more]
    return [str(word) for word in words]


def keys_of(out):
    lines = (out / "records.jsonl").read_text().splitlines()
    return [(json.loads(line)["config"]["position"], json.loads(line)) for line in lines]


def test_a_seed_is_a_whole_table_before_the_next():
    made = Grid(
        position=("none", "sinusoidal:scale=0.028", "nope"), learning_rate=(1e-3, 2e-3), seeds=2,
        seed=3, lengths=(Length(128, 0.9), Length(512, 0.1)),
    )  # fmt: skip
    configs = made.configs()
    assert [c.seed for c in configs] == 4 * [3] + 4 * [4]
    # A synonym is the same method, and no run of its own.
    assert {c.position for c in configs} == {"none", "sinusoidal"}
    assert configs[1].position_options == {"scale": 0.028}
    assert len({Run(c).key for c in configs}) == 8
    assert Run(configs[1]).key == "sinusoidal-scale=0.028-128-512-0.001-3"
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        Grid(seeds=0)
    with pytest.raises(ValueError, match="name:option=value, got 'tisa:first'"):
        Grid(position=("tisa:first",)).configs()


def test_a_method_and_a_window_for_each_layer():
    (config,) = Grid(position=("rotary:base=160000+nope",), window="none+64").configs()
    made = config.transformer(16)
    assert made.position == config.position == "rotary:base=160000+none"
    assert made.windows == (None, 64, None, 64)
    assert Run(config).key == "rotary-base=160000+none-window=none+64-0.001-0"
    assert PretrainConfig.from_dict(config.to_dict()) == config
    # What is known of runs from before there were windows is what it was.
    assert "window" not in PretrainConfig().to_dict()
    for given in ("a", "1+", "-1"):
        with pytest.raises(ValueError, match="window must be whole numbers, or none, with"):
            Grid(window=given)
    with pytest.raises(ValueError, match=r"must stand with its methods.*got base for all of them"):
        Grid(position=("rotary+none",), position_options={"base": 5.0}).configs()


def test_a_grid_is_finished_once_and_its_lines_are_enough_to_go_on(corpus_file, tmp_path):
    out = tmp_path / "grid"
    planned = command.lab(grid(corpus_file, out, *METHODS, "--dry-run"))
    assert planned.stdout.splitlines()[-4:] == [f"run {key}" for key in KEYS]
    assert not out.exists()
    first = command.lab(grid(corpus_file, out, *METHODS, "--json"))
    assert first.exit_code == 0, first.stderr
    assert "4 runs, 0 of them done before" in first.stderr
    assert "4/4 tisa layers=first, rate 0.02, seed 0: validation loss" in first.stderr
    assert sorted(p.name for p in out.iterdir() if (p / "record.json").is_file()) == sorted(KEYS)
    assert len(json.loads(first.stdout)) == 4
    assert "validation loss" in (out / KEYS[0] / "log.txt").read_text()
    # Elsewhere, where nothing is left but the lines: the others are not trained again.
    new = tmp_path / "elsewhere"
    new.mkdir()
    lines = (out / "records.jsonl").read_text().splitlines()
    (new / "records.jsonl").write_text("\n".join(lines[1:]) + "\n")
    again = command.lab(grid(corpus_file, new, *METHODS))
    assert again.exit_code == 0, again.stderr
    assert "4 runs, 3 of them done before" in again.stderr
    assert [p.name for p in new.iterdir() if (p / "record.json").is_file()] == [KEYS[0]]
    one, other = (json.loads(line) for line in (lines[0], keys_line(new, 3)))
    assert one["evaluations"] == other["evaluations"]
    # Other options under the same names are refused, by the folders and by the lines.
    for folder, said in ((out, "holds another run"), (new, "has another run of")):
        refused = command.lab(grid(corpus_file, folder, *METHODS[:-1], "4"))
        assert refused.exit_code == 2
        assert said in refused.stderr or folder == new
        assert "steps: 3 there, 4 asked for" in refused.stderr


def keys_line(out, number):
    return (out / "records.jsonl").read_text().splitlines()[number]


def test_a_loss_that_is_no_number_is_a_result(corpus_file, tmp_path):
    more = ["--position", "none,absolute", "--learning-rate", "1e30", "--steps", "20"]
    found = command.lab(grid(corpus_file, tmp_path / "grid", *more))
    assert found.exit_code == 0, found.stderr
    assert "diverged: no number at step" in found.stderr
    kept = [json.loads(keys_line(tmp_path / "grid", number)) for number in range(2)]
    assert all(1 <= record["diverged"]["step"] < 20 for record in kept)
    assert "4 runs" not in command.lab(grid(corpus_file, tmp_path / "grid", *more)).stderr
    # Alone it is one too, and the command says so with its exit code.
    alone = grid(corpus_file, tmp_path / "one", *more[2:])
    first = command.lab(alone)
    assert first.exit_code == 1
    assert "the loss is nan at step" in first.stderr or "the loss is inf at" in first.stderr
    assert not (tmp_path / "one" / "model").exists()
    assert "finished before" in command.lab(alone).stderr


def test_a_method_that_is_none_is_told_before_anything_is_trained(corpus_file, tmp_path):
    found = command.lab(grid(corpus_file, tmp_path / "grid", "--position", "none,lemon"))
    assert found.exit_code == 2
    assert "--position must be among none, sinusoidal" in found.stderr
    assert "got 'lemon'" in found.stderr
    assert not (tmp_path / "grid").exists()


def test_out_of_time_it_keeps_what_is_there_and_goes_on(corpus_file, tmp_path):
    out = tmp_path / "grid"
    words = grid(corpus_file, out, "--position", "none,tisa", "--steps", "6")
    stopped = command.lab([*words, "--max-seconds", "0.01"])
    assert stopped.exit_code == 0, stopped.stderr
    assert not (out / "records.jsonl").exists()
    done = command.lab([*words, "--max-seconds", "500"])
    assert done.exit_code == 0, done.stderr
    assert "2/2 tisa, rate 0.01, seed 0: validation loss" in done.stderr


@pytest.mark.full
def test_a_pool_finishes_what_a_stopped_one_has_begun(corpus_file, tmp_path):
    more = ["--position", "none,tisa", "--steps", "150", "--checkpoint-every", "1000"]
    pool = ["--executor", "pool", "--workers", "2"]
    whole = tisa(*grid(corpus_file, tmp_path / "whole", *more))
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "pool"
    job = subprocess.Popen(
        [sys.executable, "-m", "tisa_lab.cli", *grid(corpus_file, out, *more, *pool)],
        cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + 200
    logs = [out / f"{name}-0.01-0" / "log.txt" for name in ("none", "tisa")]
    while not all(log.exists() and "step 10 " in log.read_text() for log in logs):
        assert time.monotonic() < end
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGINT)
    _, said = job.communicate(timeout=200)
    assert job.returncode == 130, said
    assert said.count("stopped: ") == 2
    assert len(list(out.glob("*/checkpoints/step-*"))) == 2
    again = tisa(*grid(corpus_file, out, *more, *pool))
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("validation loss") == 2
    for log in logs:
        assert "goes on from" in log.read_text()
        name = log.parent.name
        one, two = (np.load(at / name / "losses.npy") for at in (tmp_path / "whole", out))
        assert np.array_equal(one, two)


@pytest.mark.full
def test_a_grid_on_ray(corpus_file, tmp_path):
    pytest.importorskip("ray", reason="comes with tisa-lab[cluster]")
    out = tmp_path / "grid"
    more = ["--position", "none,tisa", "--steps", "3", "--executor", "ray", "--workers", "2"]
    found = tisa(*grid(corpus_file, out, *more))
    assert found.returncode == 0, found.stderr
    assert len((out / "records.jsonl").read_text().splitlines()) == 2
