"""Several processes train what one trains; one of them lost is told, and the run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import command
from little_corpus import ROOT, SMALL, environment, text, tisa
from tisa.transformer import load


# In which files of the package a function is called; bodies of modules and classes, which an import
# runs, are no part of what one follows.
@pytest.fixture
def corpus_file(tmp_path):
    (tmp_path / "corpus.txt").write_text(text())
    return tmp_path / "corpus.txt"


def arguments(corpus_file, out, *more):
    return [
        "pretrain", "--data", corpus_file, "--valid", corpus_file, "--out", out, *SMALL,
        "--steps", 50, "--valid-tokens", 600, *more,
    ]  # fmt: skip


def losses_of(out):
    return np.load(out / "losses.npy")


def test_two_processes_give_the_loss_curve_of_one(corpus_file, tmp_path):
    alone = command.lab([str(a) for a in arguments(corpus_file, tmp_path / "one")])
    assert alone.exit_code == 0, alone.exception
    both = tisa(*arguments(corpus_file, tmp_path / "two"), processes=2)
    assert both.returncode == 0, both.stderr
    one, two = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert one.shape == (50,)
    assert one[-1] < one[0] - 0.5
    np.testing.assert_allclose(one, two, atol=1e-5, rtol=0)
    # A validation loss from both processes' halves, printed by one of them.
    assert both.stderr.count("validation loss") == 2


def workers_of(launcher):
    """Return the processes that a launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_killed_rank_ends_the_job_which_goes_on(corpus_file, tmp_path):
    more = ["--checkpoint-every", 10, "--steps", 60]
    whole = tisa(*arguments(corpus_file, tmp_path / "whole", *more), processes=2)
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "killed"
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
         "tisa_lab.cli", *map(str, arguments(corpus_file, out, *more))],
        cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + 300
    while not list(out.glob("checkpoints/step-*")):
        assert time.monotonic() < end
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.02)
    os.kill(workers_of(job.pid)[1], signal.SIGKILL)
    _, said = job.communicate(timeout=300)
    assert job.returncode != 0
    assert "Signal 9 (SIGKILL)" in said
    assert not (out / "record.json").exists()
    again = tisa(*arguments(corpus_file, out, *more), processes=2)
    assert again.returncode == 0, again.stderr
    assert "goes on from" in again.stderr
    assert np.array_equal(losses_of(tmp_path / "whole"), losses_of(out))
    # A job of two goes on as one, to rounding.
    single = tmp_path / "single"
    stopped = tisa(*arguments(corpus_file, single, *more, "--max-seconds", "0.01"), processes=2)
    assert stopped.returncode == 0, stopped.stderr
    assert "the same command goes on" in stopped.stderr
    alone = tisa(*arguments(corpus_file, single, *more))
    assert alone.returncode == 0, alone.stderr
    np.testing.assert_allclose(losses_of(single), losses_of(out), atol=1e-5, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("position", ["tisa", "absolute"])
def test_fsdp2_trains_the_same_and_goes_on(corpus_file, tmp_path, position):
    import fsdp_process

    alone = fsdp_process.main(str(corpus_file), tmp_path / "one", position, fsdp=False)
    both = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         fsdp_process.__file__, corpus_file, tmp_path / "two", position],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert both.returncode == 0, both.stderr
    assert list((tmp_path / "two" / "checkpoints").glob("*/pytorch_model_fsdp_0/__1_0.distcp"))
    one, two = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    np.testing.assert_allclose(one, two, atol=1e-5, rtol=0)
    again = json.loads((tmp_path / "two" / "record.json").read_text())
    assert again["evaluations"][-1]["loss"] == pytest.approx(
        alone["evaluations"][-1]["loss"], abs=1e-5
    )
    assert load(tmp_path / "two" / "model").config.position == position
