"""Tensors in, a plan out: which kernels a backward pass launches; only what is needed."""

from dataclasses import replace
from typing import NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tisa.ops.triton.backward_key import key_kernel
from tisa.ops.triton.backward_query import query_kernel
from tisa.ops.triton.configs import SMALL, Tiles
from tisa.ops.triton.plan import Launch, compiled_as, strides
from tisa.ops.triton.problem import (
    Problem,
    batched,
    describable,
    descriptor,
    row_descriptor,
    statistics_shape,
)
from tisa.ops.triton.scores import entry_kernel
from tisa.ops.triton.small import small_kernel

# Entries of the score vector whose gradient one program writes.
ENTRIES = 32
# Of a large GPU. Kernels whose programs take many tiles, one after the other, have so many programs
# (or a small multiple).
MULTIPROCESSORS = 132


class Gradients(NamedTuple):
    """What the backward pass fills; None is not wanted. Key and value come together."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    scores: Tensor | None


class Upstream(NamedTuple):
    """What the backward pass is given besides the inputs."""

    grad_output: Tensor
    grad_statistics: Tensor | None
    output: Tensor
    statistics: Tensor


def scratch_numbers(problem: Problem, wanted: tuple[bool, bool, bool, bool]) -> int:
    """Return how many float32 numbers the backward pass needs for itself."""
    return sum(_scratch(problem, wanted))


def _scratch(problem: Problem, wanted: tuple[bool, bool, bool, bool]) -> tuple[int, int, int]:
    """Return the sizes of delta, the sums of diagonals, and the sums beside the band."""
    query, key, _, scores = wanted
    if problem.small and query and key:
        small = _small_tiles(problem)
        programs = problem.heads * _small_programs(problem) if scores else 0
        return 0, programs * 2 * small.block_m, 0
    _, rows, places = statistics_shape(problem.inputs.query, problem.inputs.cu_seqlens)
    sums = sides = 0
    if scores:
        tiles, programs = problem.tiles.trained, problem.heads * _query_programs(problem, True)
        sums = programs * _slots(problem) * tiles.block_m // 2
        sides = programs * 2
    return rows * places, sums, sides


def backward(
    problem: Problem, upstream: Upstream, gradients: Gradients, scratch: Tensor
) -> list[Launch]:
    """Return what fills the gradients that are wanted, and nothing else."""
    if problem.packed:
        upstream = upstream._replace(
            grad_output=batched(upstream.grad_output), output=batched(upstream.output)
        )
        query, key, value = (None if g is None else batched(g) for g in gradients[:3])
        gradients = Gradients(query, key, value, gradients.scores)
    wanted = tuple(g is not None for g in gradients)
    delta, sums, sides = scratch.split(_scratch(problem, wanted))  # type: ignore[arg-type]
    if problem.small and gradients.query is not None and gradients.key is not None:
        return _small(problem, upstream, gradients, sums)
    delta = delta.view(upstream.statistics.shape[1:])
    launches = [_query(problem, upstream, delta, gradients, sums, sides)]
    if gradients.key is not None and gradients.value is not None:
        launches.append(_key(problem, upstream, delta, gradients.key, gradients.value))
    if gradients.scores is not None:
        launches.append(
            _entries(
                problem, problem.tiles.trained, sums, sides, gradients.scores,
                _query_programs(problem, True), _slots(problem),
                both_sides=_both_sides(problem, upstream),
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
) -> Launch:
    statistics, trained = upstream.statistics, gradients.scores is not None
    tiles = _query_tiles(problem, trained)
    programs = _query_programs(problem, trained)
    arguments = dict(
        query=problem.query,
        **strides("query", problem.query),
        key=problem.read("key", tiles.block_n),
        value=problem.read("value", tiles.block_n),
        output=upstream.output,
        **strides("output", upstream.output),
        grad_output=upstream.grad_output,
        **strides("upstream", upstream.grad_output),
        grad_statistics=upstream.grad_statistics,
        statistics=statistics,
        statistics_row=statistics.shape[2],
        statistics_size=statistics[0].numel(),
        delta=delta,
        grad_query=gradients.query,
        **strides("grad", gradients.query),
        sums=sums if trained else None,
        sides=sides if trained and problem.inputs.band is not None else None,
        heads=problem.heads,
        sequences=problem.sequences,
        tiles=problem.count(tiles.block_m),
        programs=programs,
        slots=_slots(problem),
        scale=problem.inputs.scale,
        BLOCK=tiles.block_m,
        WIDTH=problem.width,
        VALUE_WIDTH=problem.value_width,
        RAGGED=problem.ragged(tiles.block_n),
        BACKWARDS=problem.inputs.right is not None,
        BOTH_SIDES=_both_sides(problem, upstream),
        PARTS=tiles.parts,
        **problem.common,
        **problem.arithmetic,
        **compiled_as(tiles),
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
    most = max(1, MULTIPROCESSORS * _query_tiles(problem, trained).resident // problem.heads)
    return triton.cdiv(items, triton.cdiv(items, most))


def _slots(problem: Problem) -> int:
    """Return how many slots of the query kernel's BLOCK / 2 distances a program may need."""
    block = problem.tiles.query.block_m
    return 2 * (problem.count(block) + problem.count(block, keys=True))


def _key(
    problem: Problem, upstream: Upstream, delta: Tensor, grad_key: Tensor, grad_value: Tensor
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
        grad_output=descriptor(upstream.grad_output, tiles.block_m, problem.value_dim),
        **_rows(upstream.statistics, delta, tiles.block_m),
        grad_key=grad_key,
        grad_value=grad_value,
        **strides("grad_key", grad_key),
        **strides("grad_value", grad_value),
        key_heads=problem.key_heads,
        tiles=count,
        scale=problem.inputs.scale,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        WIDTH=problem.width,
        VALUE_WIDTH=problem.value_width,
        ONE_LOOP=one_loop,
        **problem.common,
        **problem.arithmetic,
        **compiled_as(tiles),
    )
    return Launch(key_kernel, count * problem.sequences * problem.key_heads, arguments)


def _entries(
    problem: Problem,
    tiles: Tiles,
    sums: Tensor,
    sides: Tensor | None,
    grad_scores: Tensor,
    programs: int,
    slots: int,
    *,
    one_tile: bool = False,
    both_sides: bool = False,
) -> Launch:
    places = problem.places
    arguments = dict(
        sums=sums,
        sides=None if problem.inputs.band is None else sides,
        grad_scores=grad_scores,
        heads=problem.heads,
        programs=programs,
        slots=slots,
        BLOCK=tiles.block_m,
        ENTRIES=ENTRIES,
        ONE_TILE=one_tile,
        BOTH_SIDES=both_sides,
        **places,
    )
    return Launch(entry_kernel, problem.heads * triton.cdiv(places["span"], ENTRIES), arguments)


def _small(
    problem: Problem, upstream: Upstream, gradients: Gradients, sums: Tensor
) -> list[Launch]:
    tiles, programs = _small_tiles(problem), _small_programs(problem)
    block, scores = tiles.block_m, gradients.scores
    grad_query, grad_key, grad_value = gradients[:3]
    assert grad_query is not None
    assert grad_key is not None
    assert grad_value is not None
    whole = not problem.packed and all(map(describable, (grad_query, grad_key, grad_value)))

    def written(tensor: Tensor, rows: int, width: int) -> Tensor | TensorDescriptor:
        return descriptor(tensor, rows, width) if whole else tensor

    arguments = dict(
        query=problem.read("query", block),
        key=problem.read("key", block),
        value=problem.read("value", block),
        output=descriptor(upstream.output, block, problem.value_dim),
        grad_output=descriptor(upstream.grad_output, block, problem.value_dim),
        grad_statistics=upstream.grad_statistics,
        statistics=upstream.statistics,
        statistics_row=upstream.statistics.shape[2],
        grad_query=written(grad_query, block, problem.dim),
        grad_key=written(grad_key, block, problem.dim),
        grad_value=written(grad_value, block, problem.value_dim),
        **strides("grad_query", grad_query),
        **strides("grad_key", grad_key),
        **strides("grad_value", grad_value),
        sums=None if scores is None else sums,
        heads=problem.heads,
        sequences=problem.sequences,
        programs=programs,
        scale=problem.inputs.scale,
        BLOCK=block,
        PARTS=tiles.parts,
        WIDTH=problem.width,
        VALUE_WIDTH=problem.value_width,
        RAGGED=problem.ragged(block),
        WHOLE=whole,
        **problem.common,
        **compiled_as(tiles),
    )
    launches = [Launch(small_kernel, problem.heads * programs, arguments)]
    if scores is not None:
        launches.append(_entries(problem, tiles, sums, None, scores, programs, 4, one_tile=True))
    return launches


def _small_tiles(problem: Problem) -> Tiles:
    return SMALL[64 if max(problem.queries, problem.keys) <= 64 else 128]


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
        "log_weights": row_descriptor(statistics[1], rows) if two else None,
        "delta": row_descriptor(delta, rows),
    }
