"""The prototype of a backward pass of five products, interpreted: against float64."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import tisa
from tisa.ops import triton as backend

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="with a GPU: compare.py checks")
PROTOTYPES = Path(__file__).parents[2] / "benchmarks/prototypes"


@pytest.fixture(autouse=True)
def prototypes(monkeypatch):
    monkeypatch.syspath_prepend(PROTOTYPES)


BANDS = {"band": [[-70, 30], [5, 130]], "no band": None, "no scores": None}


@pytest.mark.parametrize(
    "name", ["band", *(pytest.param(n, marks=pytest.mark.full) for n in ("no band", "no scores"))]
)
def test_gradients(name):
    import five_products

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 256, 16, generator=generator).half() for _ in range(4)]
    *qkv, grad = inputs
    vector = None if name == "no scores" else torch.randn(2, 511, generator=generator)
    band = None if BANDS[name] is None else torch.tensor(BANDS[name], dtype=torch.int32)
    found = []
    for dtype in (torch.float16, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        if vector is not None:
            score = torch.float32 if dtype == torch.float16 else dtype
            leaves.append(vector.to(score).requires_grad_())
        if dtype == torch.float16:
            out = five_products.attention(*leaves, *([] if vector is None else [band]))
        else:
            out = tisa.attention(*leaves, band=band, backend="reference")
        found.append([out, *torch.autograd.grad(out, leaves, grad.to(dtype))])
    for number, (got, want) in enumerate(zip(*found, strict=True)):
        error = (got.double() - want).detach().abs().max()
        assert error <= 4e-3 * want.detach().abs().max(), number


@pytest.mark.parametrize(
    "sizes", [(64, 256, 64), (4, 16, 64), (256, 1024, 64), (3, 4, 64), (5, 3, 2)]
)
def test_turns_can_be_kept(sizes):
    """Programs that all take their tiles in order, each waiting for its number, come to an end.

    And nobody has to wait while they keep pace: whoever adds before has done so a step ago.
    """
    import five_products

    count, steps, together = sizes
    turns = five_products.turns_of(count, steps, together)
    place = {}
    for tile in range(count):
        before = tile // turns.group * turns.group
        members = min(turns.group, count - before)
        for step in range(steps):
            row = (step + turns.stride * (tile - before)) % steps
            # five_kernels.rank_of, in Python.
            first, number = min(row // turns.stride, members - 1), tile - before
            rank = first - number if number <= first else first + members - number
            place[row, before + rank] = (before, step)
    assert len(place) == count * steps
    for row in range(steps):
        order = [place[row, n] for n in range(count)]
        assert all(a[0] < b[0] or (a[0] == b[0] and a[1] < b[1]) for a, b in pairwise(order))
