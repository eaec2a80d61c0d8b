"""Cells on a Ray cluster: one that is made up (always), a real one with a killed worker (full)."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from little_glue import make_data, make_model
from tisa_lab import sweep
from tisa_lab.executors import OnRay
from tisa_lab.glue.cell import Record, grid
from tisa_lab.sweep import Records


class RayError(Exception):
    pass


class RayTaskError(RayError):
    cause = ImportError("no tisa here")


class MadeUp:
    """What the executor asks of Ray, in this process; workers are lost as `chance` has it."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, losses):
        self.losses = list(losses)
        self.given = {}
        self.options_seen = []

    def init(self, **options):
        self.options_seen.append(options)

    def cluster_resources(self):
        return {"GPU": 1.0}

    def remote(self, **options):
        self.options_seen.append(options)

        def decorated(function):
            def remote(*arguments):
                reference = object()
                self.given[reference] = lambda: function(*arguments)
                return reference

            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))

        return decorated

    def wait(self, references, num_returns, timeout):
        return references[:num_returns], references[num_returns:]

    def get(self, reference):
        call = self.given.pop(reference)
        loss = self.losses.pop(0) if self.losses else None
        if loss is not None:
            raise loss
        return call()

    def cancel(self, reference, force):
        self.given.pop(reference)

    def shutdown(self):
        self.options_seen.append("shut down")


class Silent:
    def begin(self, *told):
        pass

    started = finished = elsewhere = begin


CELLS = grid(["m"], ["cola"], seeds=range(2), init=("fit",), positions=("replace",))


def made_up(cell, folder):
    Path(folder, f"{cell.variant.num_kernels}.safetensors").write_bytes(b"fitted")
    value = {"matthews": random.Random(cell.key).random()}
    return Record(cell, value, [{"step": 1.0, **value}], 1, 1, {"total": 0.01}, 1, {"all": 1}, "d",
                  {"train": 1}, {"device": "cpu"})  # fmt: skip


def swept(folder, monkeypatch, losses=()):
    ray = MadeUp(losses)
    monkeypatch.setitem(sys.modules, "ray", ray)
    place = OnRay(made_up, None, 3, folder=folder / "starts")
    return ray, sweep.run_sweep(CELLS, Records(folder, Record), place, Silent())


def test_a_lost_worker_costs_its_cell_another_try_and_no_more(tmp_path, monkeypatch):
    ray, failed = swept(tmp_path, monkeypatch, [None, RayError("a node died"), RayError("again")])
    assert failed == []
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert sorted(keys) == sorted(cell.key for cell in CELLS)
    assert ray.options_seen[0]["num_cpus"] == 3
    assert ray.options_seen[1] == {"num_cpus": 1, "num_gpus": 1 / 3, "max_retries": 0}
    assert ray.options_seen[-1] == "shut down"
    # What cells start from came back with the records.
    made = {p.name for p in (tmp_path / "starts").iterdir()}
    assert made == {f"{s}.safetensors" for s in (0, 1, 3, 5)}


def test_a_worker_that_is_always_lost_fails_its_cell_alone(tmp_path, monkeypatch):
    cell = CELLS[0]
    monkeypatch.setattr(sweep, "TRIES", 1)
    _, failed = swept(tmp_path, monkeypatch, [RayError("memory\nand more")])
    assert [(c, str(e)) for c, e in failed] == [(cell, "RayError: memory")]
    _, failed = swept(tmp_path, monkeypatch, [RayTaskError()])
    assert "no tisa here" in str(failed[0][1])
    _, failed = swept(tmp_path, monkeypatch)
    assert failed == []
    assert len(Records(tmp_path, Record).all()) == len(CELLS)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"tisa-lab\[cluster\]"):
        OnRay(made_up, None, 1)


def workers():
    """Return the processes of Ray that run a cell now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(b"ray::tisa "):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.full
def test_a_real_cluster_gives_the_same_numbers_and_survives_a_killed_worker(tmp_path):
    """Two workers on this machine, one killed in the middle of its run."""
    make_data(tmp_path / "glue")
    make_model(tmp_path / "bert")
    command = [
        sys.executable, "-c",
        "import torch; torch.set_num_threads(1); from tisa_lab.cli import main; main()", "glue",
        "bert", "--data-dir", "glue", "--tasks", "cola,rte,sts-b", "--positions", "replace",
        "--kernels", "0,2", "--init", "fit", "--fold", "yes", "--seeds", "2", "--steps", "60",
        "--batch-size", "8", "--evaluations", "1",
    ]  # fmt: skip
    root = str(Path(__file__).parents[2])
    settings = dict(cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{root}:{root}/lab"})
    subprocess.run([*command, "--out", "here"], check=True, **settings)
    process = subprocess.Popen(
        [*command, "--out", "there", "--executor", "ray", "--workers", "2"], **settings
    )
    try:
        # After the first finished cell: workers have imported everything, and are at work.
        while process.poll() is None and not Records(tmp_path / "there", Record).all():
            time.sleep(0.05)
        while process.poll() is None and not (busy := workers()):
            time.sleep(0.01)
        assert process.poll() is None
        os.kill(busy[0], signal.SIGKILL)
        assert process.wait(300) == 0
    finally:
        process.kill()
    here, there = (Records(tmp_path / name, Record).all() for name in ("here", "there"))
    assert len(there) == len({r.cell for r in there}) == 12
    assert {r.cell: r.numbers() for r in there} == {r.cell: r.numbers() for r in here}
    assert {p.name for p in (tmp_path / "there" / "starts").glob("*.safetensors")} == {
        p.name for p in (tmp_path / "here" / "starts").glob("*.safetensors")
    }
