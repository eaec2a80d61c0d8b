"""Tensors in, a plan out: the launches that add keys which the window does not hide."""

from typing import NamedTuple

import triton
from torch import Tensor

from tisa.ops.triton.arguments import Counts, Returned
from tisa.ops.triton.configs import Tiles
from tisa.ops.triton.join import (
    Kind,
    Parts,
    join_kernel,
    of_key_kernel,
    of_score_kernel,
    part_kernel,
)
from tisa.ops.triton.plan import Launch, compiled_as
from tisa.ops.triton.plan_backward import Gradients, Upstream
from tisa.ops.triton.problem import Problem, batched, statistics_of, strided, strided_keys

# Entries of the score vector that are added to at a time.
ENTRIES = 1024


class Always(NamedTuple):
    """Places of keys in their sequence, (sequences, places), and what is known of them."""

    places: Tensor
    kind: Kind


def block(problem: Problem) -> int:
    """Return how many queries a program takes."""
    return 64 if max(problem.dim, problem.value_dim) <= 64 else 32


def forward(problem: Problem, always: Always, output: Tensor, statistics: Tensor) -> list[Launch]:
    """Return what adds the keys to an output and its statistics, in place."""
    size = block(problem)
    count = problem.count(size)
    arguments = dict(
        query=strided(problem.query),
        key=strided(problem.key),
        value=strided(problem.value),
        key_scores=strided_keys(problem.key_scores),
        rules=problem.rules,
        always=always.places,
        output=strided(batched(output) if problem.packed else output),
        statistics=statistics_of(statistics),
        counts=Counts(problem.heads, count),
        **problem.lengths,
        KIND=always.kind,
        FIXED=problem.fixed(size, size),
        **compiled_as(problem, _TILES),
    )
    return [Launch(join_kernel, count * problem.sequences * problem.heads, arguments)]


_TILES = Tiles(64, 64, 4, 1)


def scratch_numbers(problem: Problem, count: int) -> tuple[int, int]:
    """Return how many float32 numbers the queries leave by query and by key."""
    rows = problem.sequences * problem.heads * count
    wide = problem.width + problem.value_width + 1
    return rows * problem.queries, rows * problem.count(block(problem)) * wide


def backward(
    problem: Problem, always: Always, upstream: Upstream, gradients: Gradients, scratch: Tensor
) -> list[Launch]:
    """Return what adds the keys' part to gradients that hold what the window shows, in place."""
    if problem.packed:
        upstream = upstream._replace(
            grad_output=batched(upstream.grad_output), output=batched(upstream.output)
        )
        query, key, value = (None if g is None else batched(g) for g in gradients[:3])
        of_keys = gradients.key_scores
        gradients = Gradients(
            query, key, value, gradients.scores, None if of_keys is None else of_keys.t()[None]
        )
    size = block(problem)
    tiles = problem.count(size)
    by_query, by_key = scratch.split(scratch_numbers(problem, always.kind.COUNT))
    keyed = gradients.key is not None and gradients.value is not None
    parts = Parts(by_query if gradients.scores is not None else None, by_key if keyed else None)
    common = dict(
        always=always.places, left=parts, counts=Counts(problem.heads, tiles),
        **problem.lengths, KIND=always.kind, FIXED=problem.fixed(size, size),
    )  # fmt: skip
    arguments = common | dict(
        query=strided(problem.query),
        key=strided(problem.key),
        value=strided(problem.value),
        key_scores=strided_keys(problem.key_scores),
        rules=problem.rules,
        returned=Returned(
            strided(upstream.output),
            strided(upstream.grad_output),
            statistics_of(upstream.statistics, upstream.grad_statistics),
        ),
        grad_query=None if gradients.query is None else strided(gradients.query),
        **compiled_as(problem, _TILES),
    )
    launches = [Launch(part_kernel, tiles * problem.sequences * problem.heads, arguments)]
    # What they do not look at would only make other kernels.
    common["rules"] = problem.rules._replace(mask=None, dropout=None)
    if gradients.key is not None and gradients.value is not None:
        written = dict(
            grad_key=strided(gradients.key),
            grad_value=strided(gradients.value),
            grad_key_scores=strided_keys(gradients.key_scores),
        )
        programs = problem.sequences * problem.key_heads
        launches.append(Launch(of_key_kernel, programs, common | written))
    if gradients.scores is not None:
        of_scores = dict(
            grad_scores=gradients.scores,
            sequences=problem.sequences,
            STEP=min(ENTRIES, triton.next_power_of_2(problem.queries + problem.keys)),
        )
        launches.append(Launch(of_score_kernel, problem.heads, common | of_scores))
    return launches
