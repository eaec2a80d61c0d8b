"""The GPU kernels of scoring functions, interpreted on a CPU: scores, every gradient, bands."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tisa
from test_scoring import EXTREMES, STRANGE, drawn

pytest.importorskip("triton", reason="interprets Triton's kernels")
from tisa.ops import triton as backend
from tisa.scoring.triton import launches

pytestmark = pytest.mark.skipif(
    not backend.interpreted(), reason="with a GPU the kernels are compiled: test_gpu_scoring.py"
)

HEADS = 3
EVERY = {
    "tisa": lambda: tisa.TISA(HEADS, 4),
    "tisa-v2": lambda: tisa.TISAv2(HEADS, 3, shortest_view=16, longest_view=64),
    "tisa-v2-agnostic": lambda: tisa.TISAv2(HEADS, 3, num_agnostic_heads=1),
    "t5": lambda: tisa.T5Buckets(HEADS),
    "t5-causal": lambda: tisa.T5Buckets(HEADS, 16, bidirectional=False),
    "kerple-log": lambda: tisa.KerpleLog(HEADS),
    "kerple-power": lambda: tisa.KerplePower(HEADS),
    "near-far": lambda: tisa.NearFar(HEADS, 2),
}


def functions(name, count=2):
    made = [EVERY[name]() for _ in range(count)]
    for function in made:
        for parameter in function.parameters():
            torch.nn.init.normal_(parameter, 0.3, 0.8)
    return made


def results(vectors, alike):
    torch.manual_seed(5)
    loss = sum((torch.randn(v.shape, dtype=torch.float64).to(v.dtype) * v).sum() for v in vectors)
    return [*vectors, *torch.autograd.grad(loss, [p for f in alike for p in f.parameters()])]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("queries", "keys", "start"),
    [(1, 1, None), (9, 30, None), (40, 7, 5), (30, 30, torch.tensor(3))],
    ids=str,
)
def test_scores_and_gradients(name, dtype, queries, keys, start, monkeypatch):
    monkeypatch.setattr(launches, "BLOCK", 16)
    torch.manual_seed(0)
    alike = functions(name)
    exact = [f.double() for f in copy.deepcopy(alike)]
    told = {"query_start": start}
    wanted = results([f(queries, keys, **told) for f in exact], exact)
    alike = [f.to(dtype) for f in alike]
    assert all(map(launches.takes, alike))
    found = results(launches.scores(alike, queries, keys, start), alike)
    eager = results([f(queries, keys, **told) for f in alike], alike)
    for got, want, plain in zip(found, wanted, eager, strict=True):
        assert got.dtype == dtype
        # At most twice the error of the module itself, or rounding of the largest number.
        allowed = 2 * (plain.double() - want).abs().max()
        allowed += 8 * torch.finfo(dtype).eps * want.abs().max().clamp_min(8.0)
        assert (got.double() - want).abs().max() <= allowed


def test_the_same_in_every_run(monkeypatch):
    monkeypatch.setattr(launches, "BLOCK", 16)
    alike = functions("near-far")
    first, second = (results(launches.scores(alike, 30, 40, None), alike) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_no_offsets_at_all():
    alike = functions("tisa")
    vectors = launches.scores(alike, 0, 0, None)
    assert [v.shape for v in vectors] == [(HEADS, 0)] * 2
    assert (results(vectors, alike)[-1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernels", [1, 3])
def test_bands(dtype, kernels):
    generator = torch.Generator().manual_seed(0)
    alike = [tisa.TISA(HEADS, kernels) for _ in range(4)]
    for number, function in enumerate(alike):
        if number:
            drawn(function, generator, EXTREMES[number % 2 :] + STRANGE * (number == 3))
    for found, function in zip(launches.bands(alike, dtype), alike, strict=True):
        expected = function.band(dtype).long()
        # A root may be rounded to the other side of a whole number.
        off = (found.long() - expected).abs()
        assert (off <= 1 + expected.abs() * 1e-5).all()


def test_what_the_kernels_do_not_know():
    class Own(tisa.TISA):
        pass

    assert not launches.takes(Own(HEADS))
    assert not launches.takes(tisa.TISA(HEADS, 0))
    assert not launches.takes(tisa.ALiBi(HEADS))
    for kerple in (tisa.KerpleLog, tisa.KerplePower):
        assert not launches.takes(kerple(HEADS, variant="author"))
    assert launches.takes(tisa.TISA(HEADS))


COMPILE = """
import torch, tisa
from cross_compile import compiled
from tisa.scoring.triton import functions, launches
for make in map(vars(tisa).get, launches.KINDS):
    fixed = launches._fixed(make(12), 4095, False)
    numbers, out = torch.empty(600, device="meta"), torch.empty(12, 4095, device="meta")
    table = torch.empty(92, dtype=torch.int32, device="meta") if make is tisa.T5Buckets else None
    call = dict(numbers=numbers, table=table, start=None, heads=12, span=4095, first=-2047)
    back = dict(gradient=out, sums=torch.empty(4, 600, device="meta"), total=600)
    for kernel, more in ((functions.scores_kernel, dict(scores=out)),
                         (functions.gradients_kernel, back)):
        _, report = compiled(kernel, call | more | dict(FIXED=fixed), {capability})
        assert report["spilled"] == 0, (make, report)
        print(report)
"""


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_for_gpus_that_are_not_here(capability):
    root = Path(__file__).parent.parent
    answer = subprocess.run(
        [sys.executable, "-c", COMPILE.replace("{capability}", str(capability))],
        capture_output=True, text=True, cwd=root, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"} |
        {"PYTHONPATH": f"{root}:{root / 'tests/ops'}"},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert answer.stdout.count("registers") == 12
