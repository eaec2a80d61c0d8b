"""A prototype, never timed: the backward pass of five products, in plans.

`attention(query, key, value, scores, band)` runs the present forward kernel and, backwards, those
of five_kernels.py. For (batch, heads, length, dim), lengths multiples of 128, no mask.
"""

from dataclasses import dataclass

import torch
import triton
from five_kernels import band_kernel, finish_kernel, five_kernel
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.ops.triton import interpreted, plan, plan_backward
from tisa.ops.triton.arguments import Counts
from tisa.ops.triton.configs import Tiles
from tisa.ops.triton.plan import Launch, compiled_as
from tisa.ops.triton.plan_backward import Gradients, Upstream
from tisa.ops.triton.problem import (
    Inputs,
    Problem,
    descriptor,
    row_descriptor,
    statistics_shape,
    strided,
)
from tisa.ops.triton.scores import entry_kernel

# Tiles of the five products' kernel, queries × keys; the benchmark tries others.
FIVE = {64: Tiles(32, 128, 4, 3), 128: Tiles(64, 64, 8, 2)}
BAND = {64: Tiles(64, 64, 4, 2, resident=2), 128: Tiles(64, 64, 4, 2, resident=2)}
# Programs of a head that run at the same time; no more than a GPU's multiprocessors.
TOGETHER = 64


@dataclass(frozen=True)
class Turns:
    """Who begins where: groups of programs, tiles of queries between two of them."""

    group: int
    stride: int


def turns_of(tiles_of_keys: int, steps: int, together: int) -> Turns:
    """Return the groups and the stride for a head."""
    group = min(tiles_of_keys, together, steps)
    return Turns(group, steps // group)


class Plan:
    """The launches of one backward pass; tensors may lie on "meta"."""

    def __init__(self, query, key, value, scores, band, scale: float) -> None:
        queries, keys = query.shape[2], key.shape[2]
        self.problem = problem = Problem(Inputs(
            query, key, value, scores, None, band, None, None, None, None, 0, keys - queries, None,
            None, scale, 0.0,
        ))  # fmt: skip
        wide = 128 if max(problem.dim, problem.value_dim) > 64 else 64
        self.tiles, self.band_tiles = FIVE[wide], BAND[wide]
        assert queries % 128 == keys % 128 == 0, "multiples of 128"
        assert query.shape[1] == key.shape[1]
        self.interpreted = interpreted() and not query.is_meta
        count, steps = problem.count(self.tiles.block_n, keys=True), queries // self.tiles.block_m
        self.turns = turns_of(count, steps, TOGETHER)
        if self.interpreted:
            self.turns = Turns(count, 0)

    def forward(self, output: Tensor, statistics: Tensor) -> list[Launch]:
        """Return the present forward pass."""
        return plan.forward(self.problem, output, statistics)

    def programs(self) -> int:
        """Return how many programs share a head in the band's kernel."""
        items = self.problem.sequences * self.problem.count(64)
        most = plan_backward.MULTIPROCESSORS * self.band_tiles.resident // self.problem.heads
        return triton.cdiv(items, triton.cdiv(items, max(1, most)))

    def new_turns(self) -> Tensor:
        """Return the counters, all 0: they have to be so before each run."""
        problem = self.problem
        steps = problem.queries // self.tiles.block_m
        numbers = problem.sequences * problem.heads * steps + 2
        return torch.zeros(numbers, dtype=torch.int32, device=problem.query.device)

    def new_partial(self) -> Tensor:
        """Return the query's gradient, width × queries, all 0."""
        problem = self.problem
        shape = (problem.sequences, problem.heads, problem.dim, problem.queries)
        return torch.zeros(shape, dtype=torch.float32, device=problem.query.device)

    def backward(self, grad, output, statistics, gradients, partial, turns) -> list[Launch]:
        """Return what fills the gradients; with those of the scores None, three kernels."""
        problem, tiles = self.problem, self.tiles
        grad_query, grad_key, grad_value, grad_scores = gradients
        units, count = problem.sequences * problem.heads, problem.count(tiles.block_n, keys=True)
        new = problem.query.new_empty
        delta = new(statistics.shape[1:], dtype=torch.float32)
        upstream = Upstream(grad, None, output, statistics)
        nothing = new(0, dtype=torch.float32)
        # The present kernel, which without gradients computes delta alone.
        alone = Gradients(None, grad_key, grad_value, None)
        delta_of = plan_backward._query(problem, upstream, delta, alone, nothing, nothing)
        sides = None
        if grad_scores is not None:
            # For the band's programs, then for each tile of keys.
            banded = self.programs() * problem.heads
            # (`joined` adds the latter to the former).
            sides = new((banded + units * count) * 2, dtype=torch.float32)
        rows, width = tiles.block_m, problem.dim

        def of_partial(columns: int) -> TensorDescriptor:
            shape = list(partial.shape)
            return TensorDescriptor(partial, shape, list(partial.stride()), [1, 1, width, columns])

        five = dict(
            query=problem.read("query", rows), key=problem.read("key", tiles.block_n),
            value=problem.read("value", tiles.block_n),
            grad_output=descriptor(grad, rows, problem.value_dim), partial=of_partial(rows),
            rules=problem.rules, statistics=row_descriptor(statistics[0], rows),
            delta=row_descriptor(delta, rows), grad_key=strided(grad_key),
            grad_value=strided(grad_value), turns=turns,
            sides=None if sides is None else sides[banded * 2 :],
            counts=Counts(problem.heads, count), group=self.turns.group, stride=self.turns.stride,
            **problem.lengths, FIXED=problem.fixed(rows, tiles.block_n, KEYS_FIRST=True),
            INTERPRETED=self.interpreted, **compiled_as(problem, tiles),
        )  # fmt: skip
        finish = dict(
            partial=of_partial(64), grad_query=strided(grad_query),
            counts=Counts(problem.heads, problem.count(64)), scale=problem.inputs.scale,
            queries=problem.queries, FIXED=problem.fixed(64, 64), num_warps=4,
        )  # fmt: skip
        launches = [
            delta_of,
            Launch(five_kernel, units * count, five),
            Launch(finish_kernel, units * problem.count(64), finish),
        ]
        if grad_scores is None:
            return launches
        band, programs = self.band_tiles, self.programs()
        each = (problem.count(64) + problem.count(64, keys=True)) * 64
        sums = new(problem.heads * programs * each, dtype=torch.float32)
        banded_arguments = dict(
            query=problem.read("query", 64), key=problem.read("key", 64),
            value=problem.read("value", 64),
            grad_output=descriptor(grad, 64, problem.value_dim), rules=problem.rules,
            statistics=row_descriptor(statistics[0], 64), delta=row_descriptor(delta, 64),
            sums=sums, sides=sides, counts=Counts(problem.heads, problem.count(64)),
            sequences=problem.sequences, programs=programs, **problem.lengths,
            FIXED=problem.fixed(64, 64, PARTS=band.parts), **compiled_as(problem, band),
        )  # fmt: skip
        span = problem.queries + problem.keys - 1
        entries = dict(
            sums=sums, sides=sides, grad_scores=grad_scores, rules=problem.rules,
            programs=programs, **problem.lengths, BLOCK=64, ENTRIES=32, ONE_TILE=False,
            BOTH_SIDES=True, num_warps=4,
        )  # fmt: skip
        self.sides = sides.split([banded * 2, units * count * 2])
        return [
            *launches,
            Launch(band_kernel, problem.heads * programs, banded_arguments),
            Launch(entry_kernel, problem.heads * triton.cdiv(span, 32), entries),
        ]

    def joined(self) -> None:
        """Add what lies beside the band, of the tiles of keys, to the first programs' sums."""
        banded, tiles = (x.view(self.problem.heads, -1, 2) for x in self.sides)
        banded[:, 0] += tiles.sum(1)

    def run_backward(self, grad, output, statistics, gradients) -> None:
        """Fill the gradients."""
        launches = self.backward(
            grad, output, statistics, gradients, self.new_partial(), self.new_turns()
        )
        for kernel, programs, arguments in launches:
            if kernel is entry_kernel:
                self.joined()
            kernel[(programs,)](**arguments)


class Attention(torch.autograd.Function):
    """The present attention with the other backward pass; scores may be None."""

    @staticmethod
    def forward(ctx, query, key, value, scores, band):
        """Return the output."""
        plan = Plan(query, key, value, scores, band, query.shape[-1] ** -0.5)
        output = torch.empty_like(query)
        shape = statistics_shape(query, None)
        statistics = torch.empty(shape, dtype=torch.float32, device=query.device)
        for kernel, programs, arguments in plan.forward(output, statistics):
            kernel[(programs,)](**arguments)
        ctx.plan, ctx.kept = plan, (query, key, value, scores, output, statistics)
        return output

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of query, key, value and scores."""
        *inputs, output, statistics = ctx.kept
        gradients = [None if x is None else torch.empty_like(x) for x in inputs]
        ctx.plan.run_backward(grad.contiguous(), output, statistics, gradients)
        return *gradients, None


def attention(query, key, value, scores=None, band=None) -> Tensor:
    """Return attention with the scores of the vector, constant outside of the band."""
    return Attention.apply(query, key, value, scores, band)
