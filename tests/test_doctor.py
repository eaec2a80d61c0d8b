import importlib
import json

import pytest
import torch

import command
from tisa import doctor
from tisa.ops import chunked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_what_works_everywhere_works(dtype, backend):
    assert doctor.tried("cpu", dtype, backend).works


def test_a_backend_that_refuses_says_why(monkeypatch):
    monkeypatch.setattr(chunked, "refuses", lambda call: "it rains")
    trial = doctor.tried("cpu", torch.float32, "chunked")
    assert not trial.works
    assert "it rains" in trial.reason


def test_a_backend_with_wrong_numbers_does_not_work(monkeypatch):
    right = chunked.attend

    def wrong(call):
        output, lse = right(call)
        return output * 1.5, lse

    monkeypatch.setattr(chunked, "attend", wrong)
    trial = doctor.tried("cpu", torch.float32, "chunked")
    assert (trial.works, trial.reason) == (False, "gives other numbers than float64")


def test_the_command_prints_everything(monkeypatch):
    monkeypatch.setattr(doctor, "BACKENDS", ("reference", "chunked"))
    shown = command.tisa_(["doctor"])
    assert shown.exit_code == 0, shown.output
    for word in ("torch", "launches", "cpu", "reference", "chunked", "float32"):
        assert word in shown.output
    found = json.loads(command.tisa_(["doctor", "--json"]).output)
    assert found["versions"]["torch"] == torch.__version__
    assert {trial["backend"] for trial in found["backends"]} == {"reference", "chunked"}


def test_launches_that_go_the_long_way_are_told(monkeypatch):
    launching = pytest.importorskip("tisa.ops.triton.launching", reason="needs Triton")
    native = importlib.import_module("tisa.ops.triton.native")
    assert doctor.launches() == "no GPU, or no Triton"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.launches() == f"remembered; in C++: {native.state}"
    monkeypatch.setattr(launching, "long_way", ["it rains"])
    assert doctor.launches() == f"the long way: it rains; in C++: {native.state}"
