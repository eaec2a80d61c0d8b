"""What the laboratory wrote before the tree was rebuilt (commit 77fd3f8) is gone on with."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import command
from little_corpus import SMALL, text
from little_glue import make_data, make_model

BEFORE = Path(__file__).parents[2] / "tests" / "before"


@pytest.fixture
def glue(tmp_path, monkeypatch):
    """A sweep of then, finished: its records and what its cells started from."""
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path / "glue")
    make_model(tmp_path / "model")
    shutil.copytree(BEFORE / "glue", tmp_path / "table3")
    return [
        "glue", "model", "--tasks", "cola", "--kernels", "0,2", "--positions", "replace",
        "--init", "reference,fit", "--fold", "yes,no", "--seeds", "1", "--steps", "2",
        "--batch-size", "8", "--evaluations", "1", "--data-dir", "glue", "--out", "table3",
    ]  # fmt: skip


def test_a_finished_sweep_has_nothing_left_to_run(glue):
    shown = command.lab([*glue, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "0 cells to run" in shown.stdout


def test_what_cells_start_from_is_found(glue, tmp_path):
    (tmp_path / "table3" / "records.jsonl").unlink()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "table3" / "starts").iterdir()}
    shown = command.lab([*glue, "--only-starts"])
    assert shown.exit_code == 0, shown.output
    kept = (tmp_path / "table3" / "starts").glob("*.safetensors")
    assert {p: p.stat().st_mtime_ns for p in kept} == before


def test_a_report_of_old_records(glue):
    shown = command.lab(["report", "table3", "--json"])
    assert shown.exit_code == 0, shown.output
    assert "cola" in shown.stdout.lower()


def test_a_pretraining_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    """Killed after step 2 of 4 then; finished now, it is the model that was finished then."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(text())
    shutil.copytree(BEFORE / "pretrain", "run")
    shutil.rmtree("run/model")
    for name in ("record.json", "losses.npy"):
        (Path("run") / name).unlink()
    more = ["--steps", "4", "--checkpoint-every", "2", "--data", "corpus.txt", "--out", "run"]
    shown = command.lab(["pretrain", *SMALL, *more])
    assert shown.exit_code == 0, shown.output
    losses = np.load("run/losses.npy"), np.load(BEFORE / "pretrain" / "losses.npy")
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=1e-4)
    now, then = (
        load_file(p / "model/model.safetensors") for p in (Path("run"), BEFORE / "pretrain")
    )
    assert now.keys() == then.keys()
    for name, value in then.items():
        torch.testing.assert_close(now[name], value, rtol=1e-3, atol=1e-4)
    assert json.loads(Path("run/record.json").read_text())["config"]["seed"] == 0
