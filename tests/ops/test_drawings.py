"""The drawings of docs/attention.md show what the kernels do."""

import runpy
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="asks the kernels' own code")
import triton.language as tl  # noqa: E402

from tisa.ops.triton.tiles import ranges  # noqa: E402


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(Path(__file__).parents[2] / "runs/kernel_drawings.py"))


@triton.jit
def ends_of_ranges(found, position, length, far, low, high, BLOCK: tl.constexpr):
    first, a, b, c, d, last = ranges(position, length, -(2**29), far, low, high, BLOCK, BLOCK)
    tl.store(found, first)
    tl.store(found + 1, a)
    tl.store(found + 2, b)
    tl.store(found + 3, c)
    tl.store(found + 4, d)
    tl.store(found + 5, last)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "band"), [(1000, (-90, 130)), (256, (-64, 63)), (130, (3, 3))])
def test_the_drawn_tiles_are_those_of_the_kernels(script, causal, length, band):
    skipped, below, gathered, above, edge = range(5)
    for row, drawn in enumerate(script["kinds"](length, 64, band, causal=causal)):
        found = torch.zeros(6, dtype=torch.int32)
        far = 0 if causal else 2**29
        ends_of_ranges[(1,)](found, row * 64, length, far, *band, BLOCK=64)
        first, a, b, c, d, last = found.tolist()
        allowed = [{skipped}] * len(drawn)
        # What lies between b and c is gathered, and what is hidden of it is hidden, in one.
        spans = (
            (first, a, {edge}), (a, b, {below}), (b, c, {gathered, edge}), (c, d, {above}),
            (d, last, {edge}),
        )  # fmt: skip
        for start, end, kinds in spans:
            allowed[start:end] = [kinds] * (end - start)
        assert all(kind in kinds for kind, kinds in zip(drawn, allowed, strict=True)), row


@pytest.mark.parametrize(("tiles", "programs"), [(16, 4), (7, 3)])
def test_the_drawn_order_takes_every_row_once_and_is_fair(script, tiles, programs):
    turns = script["turns"](tiles, programs)
    assert len(set(turns)) == tiles
    work = [sum(row + 1 for row, (p, _) in enumerate(turns) if p == n) for n in range(programs)]
    assert max(work) - min(work) <= programs
