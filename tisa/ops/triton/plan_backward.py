"""Tensors in, a plan out: which kernels a backward pass launches; only what is needed."""

from dataclasses import replace
from typing import NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.ops.triton.arguments import Counts, Returned, Strided, Written
from tisa.ops.triton.backward_key import key_kernel
from tisa.ops.triton.backward_query import query_kernel
from tisa.ops.triton.configs import SMALL, Tiles
from tisa.ops.triton.plan import Launch, compiled_as
from tisa.ops.triton.problem import (
    Problem,
    batched,
    describable,
    descriptor,
    row_descriptor,
    statistics_of,
    statistics_shape,
    strided,
    strided_keys,
)
from tisa.ops.triton.scores import entry_kernel
from tisa.ops.triton.small import small_kernel

# Entries of the score vector whose gradient one program writes.
ENTRIES = 32
# Of a large GPU. Kernels whose programs take many tiles, one after the other, have so many programs
# (or a small multiple).
MULTIPROCESSORS = 132
# Heads with a wide band take longer than others: with several times as many programs as run at
# once, whoever is done takes the next. Each has sums of its own in memory: not for more numbers,
# and for few there is nothing to gain.
TURNS, NUMBERS = 4, range(2**11, 2**14 + 1)


# Which of the gradients are wanted, in the order of `Gradients`.
Needs = tuple[bool, bool, bool, bool, bool]


class Gradients(NamedTuple):
    """What the backward pass fills; None is not wanted.

    Key and value come together, and with that of the keys' scores.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    scores: Tensor | None
    key_scores: Tensor | None = None


class Upstream(NamedTuple):
    """What the backward pass is given besides the inputs."""

    grad_output: Tensor
    grad_statistics: Tensor | None
    output: Tensor
    statistics: Tensor


def scratch_numbers(problem: Problem, wanted: Needs) -> int:
    """Return how many float32 numbers the backward pass needs for itself."""
    return sum(_scratch(problem, wanted))


def _scratch(problem: Problem, wanted: Needs) -> tuple[int, int, int]:
    """Return the sizes of delta, the sums of diagonals, and the sums beside the band."""
    query, key, _, scores, _ = wanted
    if problem.small and query and key:
        small = _small_tiles(problem)
        programs = problem.heads * _small_programs(problem) if scores else 0
        return 0, programs * 2 * small.block_m, 0
    _, rows, places = statistics_shape(problem.inputs.query, problem.inputs.cu_seqlens)
    sums = sides = 0
    if scores:
        programs = problem.heads * _query_programs(problem, True)
        sums, sides = programs * _numbers(problem), programs * 2
    return rows * places, sums, sides


def backward(
    problem: Problem,
    upstream: Upstream,
    gradients: Gradients,
    scratch: Tensor,
    *,
    whole: bool = True,
) -> list[Launch]:
    """Return what fills the gradients that are wanted, and nothing else.

    Not `whole`: a row of dS has more keys than these, so nothing is known of its sum.
    """
    if problem.packed:
        upstream = upstream._replace(
            grad_output=batched(upstream.grad_output), output=batched(upstream.output)
        )
        query, key, value = (None if g is None else batched(g) for g in gradients[:3])
        of_keys = gradients.key_scores
        gradients = Gradients(
            query, key, value, gradients.scores, None if of_keys is None else of_keys.t()[None]
        )
    wanted = tuple(g is not None for g in gradients)
    delta, sums, sides = scratch.split(_scratch(problem, wanted))  # type: ignore[arg-type]
    if problem.small and gradients.query is not None and gradients.key is not None:
        return _small(problem, upstream, gradients, sums, whole)
    delta = delta.view(upstream.statistics.shape[1:])
    launches = [_query(problem, upstream, delta, gradients, sums, sides, whole)]
    if gradients.key is not None and gradients.value is not None:
        launches.append(
            _key(problem, upstream, delta, gradients.key, gradients.value, gradients.key_scores)
        )
    if gradients.scores is not None:
        launches.append(
            _entries(
                problem, problem.tiles.trained.block_m, sums, sides, gradients.scores,
                _query_programs(problem, True), both_sides=_both_sides(problem, upstream),
            )
        )  # fmt: skip
    return launches


def _query(
    problem: Problem,
    upstream: Upstream,
    delta: Tensor,
    gradients: Gradients,
    sums: Tensor,
    sides: Tensor,
    whole: bool,
) -> Launch:
    trained = gradients.scores is not None
    tiles = _query_tiles(problem, trained)
    programs = _query_programs(problem, trained)
    arguments = dict(
        query=strided(problem.query),
        key=problem.read("key", tiles.block_n),
        value=problem.read("value", tiles.block_n),
        key_scores=strided_keys(problem.key_scores),
        rules=problem.rules,
        returned=Returned(
            strided(upstream.output),
            strided(upstream.grad_output),
            statistics_of(upstream.statistics, upstream.grad_statistics),
        ),
        written=Written(
            delta,
            None if gradients.query is None else strided(gradients.query),
            sums if trained else None,
            sides if trained and problem.inputs.band is not None else None,
        ),
        counts=Counts(problem.heads, problem.count(tiles.block_m)),
        sequences=problem.sequences,
        programs=programs,
        **problem.lengths,
        FIXED=problem.fixed(
            tiles.block_m,
            tiles.block_n,
            RAGGED=problem.ragged(tiles.block_n),
            BACKWARDS=problem.inputs.right is not None,
            BOTH_SIDES=_both_sides(problem, upstream),
            PARTS=tiles.parts,
            EXACT=whole and problem.half and gradients.key_scores is not None,
        ),
        **compiled_as(problem, tiles),
    )
    return Launch(query_kernel, problem.heads * programs, arguments)


def _query_tiles(problem: Problem, trained: bool) -> Tiles:
    if not trained:
        return problem.tiles.query
    tiles, mask = problem.tiles.trained, problem.inputs.mask
    if mask is not None and mask.shape[2] > 1:
        # A dense mask does not fit the registers of three programs.
        return replace(tiles, maxnreg=None, resident=min(tiles.resident, 2))
    return tiles


def _query_programs(problem: Problem, trained: bool) -> int:
    """Return how many programs share the tiles of a head."""
    items = problem.sequences * problem.count(problem.tiles.query.block_m)
    if not trained:
        return items
    at_once = MULTIPROCESSORS * _query_tiles(problem, trained).resident
    uneven = problem.inputs.band is not None and _numbers(problem) in NUMBERS
    most = max(1, at_once * (TURNS if uneven else 1) // problem.heads)
    return triton.cdiv(items, triton.cdiv(items, most))


def _numbers(problem: Problem) -> int:
    """Return how many numbers a program of the query kernel may sum: `scores.numbers_of_sums`."""
    block = problem.tiles.query.block_m
    return (problem.count(block) + problem.count(block, keys=True)) * block


def _key(
    problem: Problem,
    upstream: Upstream,
    delta: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_key_scores: Tensor | None = None,
) -> Launch:
    tiles, mask = problem.tiles.key, problem.inputs.mask
    # A dense mask takes the registers that one loop saves.
    dense = mask is not None and mask.shape[2] > 1
    one_loop = problem.tiles.one_key_loop and problem.inputs.scores is not None and not dense
    if not one_loop:
        tiles = replace(tiles, maxnreg=None)
    count = problem.count(tiles.block_n, keys=True)
    arguments = dict(
        query=problem.read("query", tiles.block_m),
        key=problem.read("key", tiles.block_n),
        value=problem.read("value", tiles.block_n),
        key_scores=strided_keys(problem.key_scores),
        grad_output=descriptor(upstream.grad_output, tiles.block_m, problem.value_dim),
        rules=problem.rules,
        **_rows(upstream.statistics, delta, tiles.block_m),
        grad_key=strided(grad_key),
        grad_value=strided(grad_value),
        grad_key_scores=strided_keys(grad_key_scores),
        counts=Counts(problem.key_heads, count),
        **problem.lengths,
        FIXED=problem.fixed(tiles.block_m, tiles.block_n, KEYS_FIRST=True, ONE_LOOP=one_loop),
        **compiled_as(problem, tiles),
    )
    return Launch(key_kernel, count * problem.sequences * problem.key_heads, arguments)


def _entries(
    problem: Problem,
    block: int,
    sums: Tensor,
    sides: Tensor | None,
    grad_scores: Tensor,
    programs: int,
    *,
    both_sides: bool = False,
) -> Launch:
    """Return what adds up the programs' sums; without `sides` a sequence is one tile."""
    arguments = dict(
        sums=sums,
        sides=None if problem.inputs.band is None else sides,
        grad_scores=grad_scores,
        # What it does not look at would only make it another kernel.
        rules=problem.rules._replace(mask=None, dropout=None),
        programs=programs,
        **problem.lengths,
        BLOCK=block,
        ENTRIES=ENTRIES,
        ONE_TILE=sides is None,
        BOTH_SIDES=both_sides,
    )
    span = problem.queries + problem.keys - 1
    return Launch(entry_kernel, problem.heads * triton.cdiv(span, ENTRIES), arguments)


def _small(
    problem: Problem, upstream: Upstream, gradients: Gradients, sums: Tensor, whole: bool
) -> list[Launch]:
    tiles, programs = _small_tiles(problem), _small_programs(problem)
    block, scores = tiles.block_m, gradients.scores
    wanted = [g for g in gradients[:3] if g is not None]
    assert len(wanted) == 3
    stored = not problem.packed and all(map(describable, wanted))

    def written(tensor: Tensor, width: int) -> Strided | TensorDescriptor:
        return descriptor(tensor, block, width) if stored else strided(tensor)

    arguments = dict(
        query=problem.read("query", block),
        key=problem.read("key", block),
        value=problem.read("value", block),
        key_scores=strided_keys(problem.key_scores),
        output=descriptor(upstream.output, block, problem.value_dim),
        grad_output=descriptor(upstream.grad_output, block, problem.value_dim),
        rules=problem.rules,
        statistics=statistics_of(upstream.statistics, upstream.grad_statistics),
        grad_query=written(wanted[0], problem.dim),
        grad_key=written(wanted[1], problem.dim),
        grad_value=written(wanted[2], problem.value_dim),
        grad_key_scores=strided_keys(gradients.key_scores),
        sums=None if scores is None else sums,
        heads=problem.heads,
        sequences=problem.sequences,
        **problem.lengths,
        FIXED=problem.fixed(
            block,
            block,
            RAGGED=problem.ragged(block),
            PARTS=tiles.parts,
            WHOLE=stored,
            EXACT=whole and gradients.key_scores is not None,
        ),
        **compiled_as(problem, tiles),
    )
    launches = [Launch(small_kernel, problem.heads * programs, arguments)]
    if scores is not None:
        launches.append(_entries(problem, block, sums, None, scores, programs))
    return launches


def _small_tiles(problem: Problem) -> Tiles:
    tiles = SMALL[64 if max(problem.queries, problem.keys) <= 64 else 128]
    # Two tiles of numbers to add, on their way at once, do not fit into shared memory.
    mask = problem.inputs.mask
    heavy = mask is not None and mask.element_size() > 1
    return replace(tiles, num_stages=1) if heavy else tiles


def _small_programs(problem: Problem) -> int:
    return max(1, min(problem.sequences, MULTIPROCESSORS // problem.heads))


def _both_sides(problem: Problem, upstream: Upstream) -> bool:
    # What is above the band can be had from the sum of everything, which is 0 unless the
    # log-sum-exp has a gradient; but the difference has not all the digits of float32.
    return upstream.grad_statistics is not None or not problem.half


def _rows(statistics: Tensor, delta: Tensor, rows: int) -> dict[str, TensorDescriptor | None]:
    two = statistics.shape[0] == 2
    return {
        "statistics": row_descriptor(statistics[0], rows),
        "shares": row_descriptor(statistics[1], rows) if two else None,
        "delta": row_descriptor(delta, rows),
    }
