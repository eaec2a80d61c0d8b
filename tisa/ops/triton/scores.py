"""The gradient of the score vector: dT[d] = Σ dS[i, i + d], over the sequences of the batch.

Where dS of a tile is at hand (backward_query.py, small.py), the tile is summed along its diagonals
and added to sums in memory that are the program's own: no atomics, so one order. A program works
through many tiles of one head; a kernel of its own, here, adds up what the programs have.

Tiles are BLOCK × BLOCK, and number D of a row stands at distance D · BLOCK. Its diagonals reach to
both sides of that, from (D − 1) · BLOCK to (D + 1) · BLOCK − 1. A program's sums are slots of
BLOCK / 2 distances; a tile adds to four of them.

Tiles wholly outside the band are not summed along diagonals: they give all they have to the band's
edge. What is above the band is what is missing to 0: each row of dS sums to 0 (or, if the
log-sum-exp has a gradient too, to that; then both sides are summed).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tisa.ops.triton import tiles
from tisa.ops.triton.arguments import CHANGING


class Diagonals(NamedTuple):
    """The diagonals of tiles that reach into the band: the first, and the first after them."""

    first: Any
    end: Any


@triton.jit
def _floor(x, BLOCK: tl.constexpr):
    return tl.where(x >= 0, x // BLOCK, -((BLOCK - 1 - x) // BLOCK))


@triton.jit
def diagonals(band, frame, BLOCK: tl.constexpr):
    """Return the diagonals of tiles that reach into the band."""
    first = tl.maximum(_floor(band.low + 1, BLOCK), _floor(frame.near, BLOCK))
    first = tl.maximum(first, 1 - tl.cdiv(frame.queries, BLOCK))
    last = tl.minimum(_floor(band.high + BLOCK - 2, BLOCK), _floor(frame.far + BLOCK - 1, BLOCK))
    last = tl.minimum(last, tl.cdiv(frame.keys, BLOCK) - 1)
    return Diagonals(first, tl.maximum(last + 1, first))


@triton.jit
def numbers_of_sums(frame, BLOCK: tl.constexpr):
    """Return how many numbers the sums of one program take at most: `plan_backward._numbers`."""
    return (tl.cdiv(frame.queries, BLOCK) + tl.cdiv(frame.keys, BLOCK)) * BLOCK


@triton.jit
def distances(slot, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Return the distance that each number of a slot belongs to; slot 0 starts at distance 0."""
    thread = tl.arange(0, PARTS * BLOCK // 2)
    return slot * (BLOCK // 2) + thread // (PARTS * PARTS) * PARTS + thread % PARTS


@triton.jit
def diagonal_sums(tile, zero, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Return the sums along a tile's diagonals as four slots, the lowest distances first.

    A slot has PARTS numbers for each of BLOCK / 2 distances: one for each thread, which adds up the
    rows i = PARTS · row + part of a diagonal by itself. `zero` is 0; in a loop, one that the
    compiler cannot see through: otherwise it computes all indices before the loop and keeps them in
    registers, of which there are too few.
    """
    HALF: tl.constexpr = BLOCK // 2
    ROWS: tl.constexpr = BLOCK // PARTS
    # The columns of the diagonals that start at column c (below BLOCK / 2) and at c + BLOCK / 2 are
    # the same in the two halves of the tile, changing sides: one index for both.
    left, right = tl.split(tl.permute(tl.reshape(tile, [BLOCK, 2, HALF]), [0, 2, 1]))
    row = tl.arange(0, ROWS)[:, None]
    part = tl.arange(0, PARTS * HALF)[None, :] // PARTS % PARTS
    reach = part + distances(0, BLOCK, PARTS)[None, :]
    turn = (row + reach // PARTS + zero) & (HALF // PARTS - 1)
    index = row * (PARTS * HALF) + turn * (PARTS * PARTS) + (part * PARTS + reach % PARTS)
    x = _gathered(left, index, BLOCK, PARTS)
    y = _gathered(right, index, BLOCK, PARTS)
    # How often the diagonal that starts at c has changed sides, up to this row: 0, 1 or 2 times.
    reach += row * PARTS
    none = reach < HALF
    once = reach < BLOCK
    return (
        tl.sum(tl.where(once, 0.0, x), 0),
        tl.sum(tl.where(none, 0.0, tl.where(once, x, y)), 0),
        tl.sum(tl.where(none, x, tl.where(once, y, 0.0)), 0),
        tl.sum(tl.where(none, y, 0.0), 0),
    )


@triton.jit
def _gathered(half, index, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Return half a tile read along the diagonals: rows × threads."""
    ROWS: tl.constexpr = BLOCK // PARTS
    # In squares of PARTS × PARTS: so neither writing it (by a warp, 8 rows × 8 columns) nor reading
    # it along the diagonals meets a bank of the shared memory more than once.
    flat = tl.reshape(half, [ROWS, PARTS, ROWS // 2, PARTS])
    flat = tl.reshape(tl.permute(flat, [0, 2, 1, 3]), [BLOCK * BLOCK // 2])
    turned = tl.gather(flat, tl.reshape(index, [BLOCK * BLOCK // 2]), 0)
    return tl.reshape(turned, [ROWS, PARTS * BLOCK // 2])


@triton.jit
def all_parts(x, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Return a slot with the sum of its parts in each of them."""
    parts = tl.reshape(x, [BLOCK // 2 // PARTS, PARTS, PARTS])
    parts = tl.broadcast_to(tl.sum(parts, 1)[:, None, :], parts.shape)
    return tl.reshape(parts, [PARTS * BLOCK // 2])


@triton.jit
def clear(sums, inside, BLOCK: tl.constexpr):
    """Set a program's sums to 0."""
    for slot in tl.range(0, inside.end - inside.first + 1):
        tl.store(sums + slot * BLOCK + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))


@triton.jit
def outside(sums, inside, band, BLOCK: tl.constexpr):
    """Return what a program has summed of distances below the band, and above it.

    Those are in the four slots at either end.
    """
    number = tl.arange(0, 2 * BLOCK)
    total = (inside.end - inside.first + 1) * BLOCK
    d = (inside.first - 1) * BLOCK + number
    there = (d < band.low) & (number < total)
    below = tl.load(sums + number, mask=there, other=0.0)
    number = total - 1 - number
    d = (inside.first - 1) * BLOCK + number
    above = tl.load(sums + number, mask=(d > band.high) & (number >= 0), other=0.0)
    return tl.sum(below, 0), tl.sum(above, 0)


@triton.jit
def _sums_of_one_tile(sums, low, high, programs, BLOCK: tl.constexpr):
    """Return what all programs have summed from distance `low` to `high`; each has one tile."""
    number = tl.arange(0, 2 * BLOCK)[None, :]
    d = number - BLOCK
    program = tl.arange(0, 16)[:, None]
    total = tl.zeros([16, 2 * BLOCK], tl.float32)
    for begin in tl.range(0, programs, 16):
        read = (d >= low) & (d <= high) & (begin + program < programs)
        total += tl.load(sums + (begin + program) * (2 * BLOCK) + number, mask=read, other=0.0)
    return tl.sum(tl.sum(total, 0), 0)


@triton.jit
def _sum_of_sides(sides, programs):
    total = tl.zeros([128], tl.float32)
    for begin in tl.range(0, programs, 128):
        number = begin + tl.arange(0, 128)
        total += tl.load(sides + number * 2, mask=number < programs, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=CHANGING)
def entry_kernel(
    sums, sides, grad_scores, rules, programs, queries, keys, start,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr, ONE_TILE: tl.constexpr, BOTH_SIDES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ENTRIES entries of a head's score vector.

    `sides` holds for each program what lies below the band and, with BOTH_SIDES, above it;
    otherwise in it. ONE_TILE: a sequence is one tile (small.py), and there are no `sides`.
    """
    AHEAD: tl.constexpr = 2048 // ENTRIES
    frame = tiles.frame_of(rules, queries, keys, start)
    blocks = tl.cdiv(frame.span, ENTRIES)
    head = tl.program_id(0) // blocks
    lowest = (tl.program_id(0) % blocks) * ENTRIES - frame.shift
    d = lowest + tl.arange(0, ENTRIES)
    band = tiles.band_of(rules, tiles.band_ends(rules, head), frame)
    total = tl.zeros([ENTRIES], tl.float32)
    if (lowest <= band.high) & (lowest + ENTRIES > band.low):
        inside = Diagonals(0, 1)
        if not ONE_TILE:
            inside = diagonals(band, frame, BLOCK)
        several = inside.end - inside.first
        c = d - (inside.first - 1) * BLOCK
        there = (c >= 0) & (c < (several + 1) * BLOCK) & (several > 0)
        there = there & (d >= band.low) & (d <= band.high)
        each = numbers_of_sums(frame, BLOCK)
        sums += (head * programs).to(tl.int64) * each
        # Many programs at a time, so that their loads are under way together.
        ahead = tl.arange(0, AHEAD)[:, None]
        for begin in tl.range(0, programs, AHEAD):
            row = (begin + ahead).to(tl.int64) * each
            read = there[None, :] & (begin + ahead < programs)
            total += tl.sum(tl.load(sums + row + c[None, :], mask=read, other=0.0), 0)
        if rules.band is not None:
            if (band.low >= lowest) & (band.low < lowest + ENTRIES):
                if ONE_TILE:
                    held = _sums_of_one_tile(sums, -BLOCK, band.low - 1, programs, BLOCK)
                else:
                    held = _sum_of_sides(sides + head * programs * 2, programs)
                total += tl.where(d == band.low, held, 0.0)
            if (band.high >= lowest) & (band.high < lowest + ENTRIES):
                if ONE_TILE:
                    held = _sums_of_one_tile(sums, band.high + 1, BLOCK, programs, BLOCK)
                else:
                    held = _sum_of_sides(sides + head * programs * 2 + 1, programs)
                    if not BOTH_SIDES:
                        held = -(held + _sum_of_sides(sides + head * programs * 2, programs))
                total += tl.where(d == band.high, held, 0.0)
    entry = d + frame.shift
    places = grad_scores + head.to(tl.int64) * frame.span + entry
    tl.store(places, total, mask=entry < frame.span)
