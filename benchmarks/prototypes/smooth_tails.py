"""A prototype, never timed: `tisa.attention` with parabolas in place of smooth tails, in plans.

`attention(query, key, value, scores, band)` for (batch, heads, length, dim), lengths multiples of
64, with the band of `scoring.parabola_support(eps, REACH)`. `held` is what the kernels compute, in
plain PyTorch: the score matrix in which tiles outside of the band are parabolas; its autograd is
the exact adjoint.
"""

from functools import cache
from typing import Any

import torch
import triton
from smooth_kernels import (
    GROUP,
    REACH,
    SPREAD,
    STEP,
    UNIT,
    entry_kernel,
    forward_kernel,
    key_kernel,
    query_kernel,
    table_kernel,
)
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.offsets import to_matrix
from tisa.ops.triton import plan_backward
from tisa.ops.triton.arguments import Counts, Returned, Written
from tisa.ops.triton.configs import Tiles
from tisa.ops.triton.plan import Launch, compiled_as
from tisa.ops.triton.problem import (
    Inputs,
    Problem,
    descriptor,
    row_descriptor,
    statistics_of,
    statistics_shape,
    strided,
)
from tisa.scoring import parabolas

assert parabolas.spread(REACH.value) == SPREAD.value
# Tiles of the kernels, by width; the benchmark tries others.
FORWARD = {64: Tiles(64, 128, 4, 2), 128: Tiles(128, 64, 4, 2)}
KEY = {64: Tiles(64, 64, 4, 3, maxnreg=168), 128: Tiles(64, 64, 4, 2)}
# One loop in the key kernel of 64 wide heads, or one over the plain tiles and one over the others.
ONE_LOOP = True
QUERY = {64: Tiles(64, 64, 4, 3, maxnreg=168, resident=3), 128: Tiles(64, 64, 4, 2, resident=2)}


def band_for(scoring: Any, dtype: torch.dtype) -> Tensor | None:
    """Return the band outside which parabolas stand for a scoring function."""
    return scoring.parabola_support(torch.finfo(dtype).eps / 16, REACH.value)


def held(scores: Tensor, band: Tensor, queries: int, keys: int) -> Tensor:
    """Return the score matrix that the kernels use: parabolas in the tiles outside of the band."""
    exact = to_matrix(scores, queries, keys)
    heads, group, reach = scores.shape[0], GROUP.value, REACH.value
    # Entry of the middle for group g, from the last one down.
    middles = torch.arange(scores.shape[-1] - 1 - reach, reach - 1, -group, device=scores.device)
    nodes = (
        scores[:, middles - SPREAD.value],
        scores[:, middles],
        scores[:, middles + SPREAD.value],
    )
    a, b, c = parabolas.coefficients(*nodes, reach)
    i, j = torch.arange(queries, device=scores.device), torch.arange(keys, device=scores.device)
    j0 = j // STEP.value * STEP.value
    g = (i[:, None] - j0[None, :] + keys - STEP.value) // group
    t = (j - j0 - STEP.value // 2)[None, :] - (i % group - group // 2)[:, None]
    smooth = a[:, g] + b[:, g] * t + c[:, g] * t * t
    d = j0[None, :] - (i // STEP.value * STEP.value)[:, None]
    start = keys - queries
    low, high = (e.view(heads, 1, 1) + start for e in band.long().unbind(-1))
    plain = (d + STEP.value - 1 <= low) | (d - STEP.value + 1 >= high)
    return torch.where(plain, smooth, exact)


def width_of(problem: Problem) -> int:
    """Return the width of the wider of queries and values, padded."""
    return max(problem.dim, problem.value_dim)


@cache
def basis(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what rows of the table are multiplied with: 128 keys × 16; see `table_kernel`."""
    half = STEP.value // 2
    x = torch.arange(-half, half)
    high = x * x // 4 * 4
    constant = torch.full_like(x, UNIT.value)
    of = torch.stack([constant] * 3 + [x, x, high, x * x - high, high], dim=1)
    both = torch.block_diag(of.float(), of.float())
    return both.to(dtype).to(device)


class Plan:
    """The launches of one call; tensors may lie on "meta"."""

    def __init__(self, query, key, value, scores, band, *, causal: bool, scale: float) -> None:
        queries, keys = query.shape[2], key.shape[2]
        assert queries % STEP.value == keys % STEP.value == 0, "multiples of 64"
        assert query.shape[1] == key.shape[1]
        assert scores.is_contiguous()
        assert scale > 0
        self.problem = Problem(Inputs(
            query, key, value, scores, None, band, None, None, None, None, 0, keys - queries, None,
            0 if causal else None, scale, 0.0,
        ))  # fmt: skip
        self.rows = queries + keys - STEP.value
        self.table = query.new_empty(query.shape[1], self.rows, 16)
        small = query.element_size() == 4
        width = width_of(self.problem)
        self.one_loop = ONE_LOOP and width == 64
        wide = 128 if width > 64 else 64
        self.forward_tiles = Tiles(64, 64, 4, 1) if small else FORWARD[wide]
        if keys % 128 or (causal and wide == 64):
            self.forward_tiles = Tiles(64, 64, 4, 2)
        self.key_tiles = Tiles(64, 64, 4, 1) if small else KEY[wide]
        self.query_tiles = Tiles(64, 64, 4, 1, resident=1) if small else QUERY[wide]

    def read_table(self, rows: int) -> TensorDescriptor:
        """Return the table's descriptor."""
        shape = list(self.table.shape)
        return TensorDescriptor(self.table, shape, [shape[1] * 16, 16, 1], [1, rows, 16])

    def read_basis(self, rows: int) -> TensorDescriptor:
        """Return the descriptor of what the table's rows are multiplied with."""
        query = self.problem.query
        tensor = basis(query.dtype, query.device)
        return TensorDescriptor(tensor, [128, 16], [16, 1], [rows, 16])

    def forward(self, output: Tensor, statistics: Tensor) -> list[Launch]:
        """Return what fills table, output and statistics."""
        problem, tiles = self.problem, self.forward_tiles
        scale = problem.inputs.scale
        table = dict(
            vector=problem.inputs.scores, table=self.table, factor=1 / scale,
            queries=problem.queries, keys=problem.keys, ROWS=128, num_warps=4,
        )  # fmt: skip
        count = problem.count(tiles.block_m)
        arguments = dict(
            query=problem.read("query", tiles.block_m),
            key=problem.read("key", tiles.block_n),
            value=problem.read("value", tiles.block_n),
            table=self.read_table(tiles.block_m),
            basis=self.read_basis(tiles.block_n),
            rules=problem.rules._replace(scale=scale * problem.unit),
            output=strided(output),
            statistics=statistics_of(statistics),
            counts=Counts(problem.heads, count),
            **problem.lengths,
            FIXED=problem.fixed(
                tiles.block_m, tiles.block_n, BACKWARDS=problem.inputs.right is not None
            ),
            **compiled_as(problem, tiles),
        )
        programs = count * problem.sequences * problem.heads
        return [
            Launch(table_kernel, problem.heads * triton.cdiv(self.rows, 128), table),
            Launch(forward_kernel, programs, arguments),
        ]

    def programs(self) -> int:
        """Return how many programs share a head's tiles in the query kernel."""
        items = self.problem.sequences * self.problem.count(64)
        most = max(
            1, plan_backward.MULTIPROCESSORS * self.query_tiles.resident // self.problem.heads
        )
        return triton.cdiv(items, triton.cdiv(items, most))

    def sizes(self) -> tuple[int, int, int]:
        """Return the numbers of delta, of the diagonals' sums and of the moments."""
        problem = self.problem
        _, rows, places = statistics_shape(problem.query, None)
        programs = problem.heads * self.programs()
        sums = (problem.count(64) + problem.count(64, keys=True)) * 64
        moments = self.rows // GROUP.value * 8
        return rows * places, programs * sums, programs * moments

    def backward(self, grad, output, statistics, gradients, scratch) -> list[Launch]:
        """Return what fills the gradients of query, key, value and scores; after `forward`."""
        problem, tiles = self.problem, self.query_tiles
        delta, sums, moments = scratch.split(self.sizes())
        delta = delta.view(statistics.shape[1:])
        grad_query, grad_key, grad_value, grad_scores = gradients
        kept = statistics_of(statistics)
        query = dict(
            query=strided(problem.query), key=problem.read("key", 64),
            value=problem.read("value", 64), table=self.read_table(64),
            basis=self.read_basis(64), rules=problem.rules,
            returned=Returned(strided(output), strided(grad), kept),
            written=Written(delta, strided(grad_query), sums, None), moments=moments,
            counts=Counts(problem.heads, problem.count(64)), sequences=problem.sequences,
            programs=self.programs(), **problem.lengths,
            FIXED=problem.fixed(
                64, 64, BACKWARDS=problem.inputs.right is not None, PARTS=tiles.parts
            ),
            **compiled_as(problem, tiles),
        )  # fmt: skip
        small = problem.query.element_size() == 4
        count, two = problem.count(64, keys=True), statistics.shape[0] == 2
        key = dict(
            query=problem.read("query", 64), key=problem.read("key", 64),
            value=problem.read("value", 64), table=self.read_table(64),
            basis=self.read_basis(64), grad_output=descriptor(grad, 64, problem.value_dim),
            rules=problem.rules,
            statistics=row_descriptor(statistics[0], 64),
            shares=row_descriptor(statistics[1], 64) if two else None,
            delta=row_descriptor(delta, 64), grad_key=strided(grad_key),
            grad_value=strided(grad_value), counts=Counts(problem.key_heads, count),
            **problem.lengths,
            FIXED=problem.fixed(64, 64, KEYS_FIRST=True, ONE_LOOP=self.one_loop or small),
            **compiled_as(problem, self.key_tiles),
        )  # fmt: skip
        entries = dict(
            sums=sums, moments=moments, grad_scores=grad_scores, rules=problem.rules,
            programs=self.programs(), **problem.lengths, BLOCK=64, ENTRIES=32, num_warps=4,
        )  # fmt: skip
        span = problem.queries + problem.keys - 1
        return [
            Launch(query_kernel, problem.heads * self.programs(), query),
            Launch(key_kernel, count * problem.sequences * problem.heads, key),
            Launch(entry_kernel, problem.heads * triton.cdiv(span, 32), entries),
        ]


def launched(launches: list[Launch]) -> None:
    """Launch them in order."""
    for kernel, programs, arguments in launches:
        kernel[(programs,)](**arguments)


class Attention(torch.autograd.Function):
    """Attention with smooth tails."""

    @staticmethod
    def forward(ctx, query, key, value, scores, band, causal, scale):
        """Return the output."""
        plan = Plan(query, key, value, scores, band, causal=causal, scale=scale)
        output = torch.empty_like(query)
        shape = statistics_shape(query, None)
        statistics = torch.empty(shape, dtype=torch.float32, device=query.device)
        launched(plan.forward(output, statistics))
        ctx.plan, ctx.kept = plan, (query, key, value, scores, output, statistics)
        return output

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of query, key, value and scores."""
        query, key, value, scores, output, statistics = ctx.kept
        gradients = [torch.empty_like(x) for x in (query, key, value, scores)]
        scratch = torch.empty(sum(ctx.plan.sizes()), dtype=torch.float32, device=query.device)
        launched(ctx.plan.backward(grad.contiguous(), output, statistics, gradients, scratch))
        return *gradients, None, None, None


def attention(query, key, value, scores, band, *, causal: bool = False) -> Tensor:
    """Return attention with the scores of the vector, its tails outside of the band parabolas."""
    return Attention.apply(query, key, value, scores, band, causal, query.shape[-1] ** -0.5)
