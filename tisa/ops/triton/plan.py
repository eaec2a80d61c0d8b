"""Tensors in, a plan out: which kernels a forward pass launches, and with what.

Outputs are written through pointers, because a tile may reach into the next sequence.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tisa.ops.triton.arguments import Counts
from tisa.ops.triton.configs import Tiles
from tisa.ops.triton.decode import decode_kernel, merge_kernel
from tisa.ops.triton.forward import forward_kernel
from tisa.ops.triton.problem import Problem, batched, statistics_of, strided, strided_keys

# Programs that a decoding step is cut into, keys that one of them reads at a time and at least.
DECODE_PROGRAMS, DECODE_KEYS, SHORTEST_PART = 528, 128, 256


class Launch(NamedTuple):
    """One kernel with its arguments."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]


def compiled_as(problem: Problem, tiles: Tiles) -> dict[str, int]:
    """Return what the compiler is told."""
    chosen = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if not problem.half:
        # A product and a sum rounded as one in one kernel, and one by one in the next, are two
        # logits, and e to their power two weights.
        chosen["enable_fp_fusion"] = False
    if tiles.maxnreg is not None and torch.version.hip is None:
        chosen["maxnreg"] = tiles.maxnreg
    return chosen


def forward(problem: Problem, output: Tensor, statistics: Tensor) -> list[Launch]:
    """Return what fills the output and the statistics of each query."""
    tiles, scale = _forward_tiles(problem), problem.inputs.scale
    unit = problem.unit if problem.key_scores is None else 1.0
    count = problem.count(tiles.block_m)
    arguments = dict(
        query=problem.read("query", tiles.block_m),
        key=problem.read("key", tiles.block_n),
        value=problem.read("value", tiles.block_n),
        key_scores=strided_keys(problem.key_scores),
        rules=problem.rules._replace(scale=abs(scale) * unit),
        output=strided(batched(output) if problem.packed else output),
        statistics=statistics_of(statistics),
        counts=Counts(problem.heads, count),
        **problem.lengths,
        FIXED=problem.fixed(
            tiles.block_m,
            tiles.block_n,
            RAGGED=problem.ragged(tiles.block_n),
            BACKWARDS=problem.inputs.right is not None,
            NEGATIVE=scale < 0,
        ),
        **compiled_as(problem, tiles),
    )
    return [Launch(forward_kernel, count * problem.sequences * problem.heads, arguments)]


def _forward_tiles(problem: Problem) -> Tiles:
    tiles, mask = problem.tiles.forward, problem.inputs.mask
    dense = mask is not None and mask.shape[2] > 1
    tuned = problem.half and problem.copy_engine and tiles.block_m == tiles.block_n == 64
    if problem.key_scores is None or dense or not tuned:
        return tiles
    # For a fourth program on a multiprocessor; a few bytes are spilled.
    return replace(tiles, maxnreg=128)


def _parts(problem: Problem) -> tuple[int, int, int]:
    """Return the rows of a decoding tile, the keys in a part, and the number of parts."""
    rows = max(16, triton.next_power_of_2(problem.queries * problem.group))
    units = problem.sequences * problem.key_heads
    parts = max(1, min(DECODE_PROGRAMS // units, problem.keys // SHORTEST_PART, 128))
    part = triton.cdiv(triton.cdiv(problem.keys, parts), DECODE_KEYS) * DECODE_KEYS
    return rows, part, triton.cdiv(problem.keys, part)


def decode_numbers(problem: Problem) -> int:
    """Return how many float32 numbers decoding needs for itself; 0 where it is not decoding."""
    if not problem.decodes:
        return 0
    rows, _, parts = _parts(problem)
    return problem.sequences * problem.key_heads * parts * rows * (problem.value_dim + 2)


def decode(problem: Problem, output: Tensor, statistics: Tensor, scratch: Tensor) -> list[Launch]:
    """Return what fills both for inference with few queries; past the last nothing is written."""
    rows, part, parts = _parts(problem)
    units = problem.sequences * problem.key_heads
    block = DECODE_KEYS if max(problem.dim, problem.value_dim) <= 128 else DECODE_KEYS // 2
    totals, weights = scratch.split(
        [units * parts * rows * problem.value_dim, units * parts * rows * 2]
    )
    fixed = problem.fixed(rows, block)
    parted = dict(
        query=strided(problem.query),
        key=problem.read("key", block),
        value=problem.read("value", block),
        key_scores=strided_keys(problem.key_scores),
        rules=problem.rules._replace(scale=problem.inputs.scale * problem.unit),
        totals=totals,
        weights=weights,
        key_heads=problem.key_heads,
        parts=parts,
        part=part,
        **problem.lengths,
        FIXED=fixed,
        num_warps=4,
        num_stages=3 if problem.half else 1,
    )
    merged = dict(
        totals=totals,
        weights=weights,
        output=strided(output),
        statistics=statistics_of(statistics),
        heads=problem.heads,
        parts=parts,
        queries=problem.queries,
        PARTS=triton.next_power_of_2(parts),
        FIXED=fixed,
        num_warps=4,
    )
    return [
        Launch(decode_kernel, units * parts, parted),
        Launch(merge_kernel, problem.sequences * problem.heads * problem.queries, merged),
    ]
