"""The gradient of the score vector: dT[d] = Σ dS[i, i + d], over the sequences of the batch.

Where dS of a tile is at hand (`backward.query_kernel`, `small.small_kernel`), the tile is summed
along its diagonals and added to sums in memory that are the program's own: no atomics, so one
order. A program works through many tiles of one head; a kernel of its own, here, adds up what the
programs have.

Tiles are BLOCK × BLOCK, and number D of a row stands at distance D · BLOCK. Its diagonals reach to
both sides of that: distances D · BLOCK + c and (D − 1) · BLOCK + c, c from 0 to BLOCK − 1. So a
program's sums are slots of BLOCK distances, and a tile adds to two of them.

Tiles wholly outside the band are not summed along diagonals: they give all they have to the band's
edge. What is above the band is what is missing to 0: each row of dS sums to 0 (or, if the
log-sum-exp has a gradient too, to that; then both sides are summed).
"""

import triton
import triton.language as tl

from tisa.attention.triton.tiles import CHANGING, band_distances, band_ends, visible_distances


@triton.jit
def _floor(x, BLOCK: tl.constexpr):
    return tl.where(x >= 0, x // BLOCK, -((BLOCK - 1 - x) // BLOCK))


@triton.jit
def diagonals(low, high, near, far, queries, keys, BLOCK: tl.constexpr):
    """Return the first diagonal of tiles that reaches into the band, and how many there are."""
    first = tl.maximum(_floor(low + 1, BLOCK), _floor(near, BLOCK))
    first = tl.maximum(first, 1 - tl.cdiv(queries, BLOCK))
    last = tl.minimum(_floor(high + BLOCK - 2, BLOCK), _floor(far + BLOCK - 1, BLOCK))
    last = tl.minimum(last, tl.cdiv(keys, BLOCK) - 1)
    return first, tl.maximum(last - first + 1, 0)


@triton.jit
def diagonal_sums(tile, BLOCK: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr):
    """Return the sums along a tile's diagonals: of distances below its first entry's, and the rest.

    Each is PARTS × BLOCK numbers, PARTS for every diagonal: one for each thread, which adds up the
    rows i = PARTS · g + part of one diagonal by itself. EXACT: the first is not had by difference,
    which costs it the digits that the second has more.
    """
    LOW: tl.constexpr = 32 // PARTS if PARTS < 32 else 1
    THREADS: tl.constexpr = PARTS * BLOCK
    ROWS: tl.constexpr = BLOCK // PARTS
    # In this order neither writing it (8 rows × 8 columns by a warp) nor reading it along the
    # diagonals (LOW columns × PARTS rows) meets a bank of the shared memory much more than once.
    flat = tl.reshape(tile, [ROWS, PARTS, BLOCK // LOW, LOW])
    flat = tl.reshape(tl.permute(flat, [0, 2, 1, 3]), [BLOCK * BLOCK])
    thread = tl.arange(0, THREADS)[None, :]
    part = thread // LOW % PARTS
    reach = tl.arange(0, ROWS)[:, None] * PARTS + part
    reach += thread // (LOW * PARTS) * LOW + thread % LOW
    j = reach % BLOCK
    index = tl.arange(0, ROWS)[:, None] * (PARTS * BLOCK)
    index += j // LOW * (LOW * PARTS) + part * LOW + j % LOW
    turned = tl.gather(flat, tl.reshape(index, [BLOCK * BLOCK]), 0)
    turned = tl.reshape(turned, [ROWS, THREADS])
    rest = tl.sum(tl.where(reach < BLOCK, turned, 0.0), 0)
    if EXACT:
        below = tl.sum(tl.where(reach >= BLOCK, turned, 0.0), 0)
    else:
        below = tl.sum(turned, 0) - rest
    return below, rest


@triton.jit
def add_diagonal_sums(
    tile, sums, diagonal, BLOCK: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr
):
    """Add a tile's diagonals to a program's sums; return their sum in parts.

    `diagonal` counts from the first one that is summed.
    """
    THREADS: tl.constexpr = PARTS * BLOCK
    below, rest = diagonal_sums(tile, BLOCK, PARTS, EXACT)
    slot = sums + diagonal * THREADS + tl.arange(0, THREADS)
    tl.store(slot, tl.load(slot) + below)
    tl.store(slot + THREADS, tl.load(slot + THREADS) + rest)
    return below + rest


@triton.jit
def clear(sums, count, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Set a program's sums to 0."""
    THREADS: tl.constexpr = PARTS * BLOCK
    for slot in tl.range(0, count + 1):
        tl.store(sums + slot * THREADS + tl.arange(0, THREADS), tl.zeros([THREADS], tl.float32))


@triton.jit
def _added_up(
    sums, d, first, count, programs, slots,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the sum of all programs' sums for each distance."""
    LOW: tl.constexpr = 32 // PARTS if PARTS < 32 else 1
    slot = _floor(d, BLOCK) - first + 1
    c = d - _floor(d, BLOCK) * BLOCK
    there = (slot >= 0) & (slot <= count) & (count > 0)
    spot = slot * (BLOCK * PARTS) + c // LOW * (LOW * PARTS) + c % LOW
    total = tl.zeros_like(d).to(tl.float32)
    # Many at a time, so that their loads are under way together.
    ahead = tl.arange(0, AHEAD)[:, None]
    for begin in tl.range(0, programs * PARTS, AHEAD):
        number = begin + ahead
        row = (number // PARTS).to(tl.int64) * slots * (BLOCK * PARTS) + number % PARTS * LOW
        read = there[None, :] & (number < programs * PARTS)
        total += tl.sum(tl.load(sums + row + spot[None, :], mask=read, other=0.0), 0)
    return total


@triton.jit
def _sum_of_sides(sides, programs):
    total = tl.zeros([128], tl.float32)
    for begin in tl.range(0, programs, 128):
        number = begin + tl.arange(0, 128)
        total += tl.load(sides + number * 2, mask=number < programs, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=CHANGING)
def entry_kernel(
    sums, sides, scores, band, start_pointer, grad_scores,
    heads, programs, slots, queries, keys, start, left, right, shift, span,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, ENTRIES: tl.constexpr, ONE_TILE: tl.constexpr,
    BOTH_SIDES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ENTRIES entries of a head's score vector.

    `sides` holds for each program what lies below the band and, with BOTH_SIDES, above it;
    otherwise what was summed along diagonals. ONE_TILE: a sequence is one tile (small.py).
    """
    blocks = tl.cdiv(span, ENTRIES)
    head = tl.program_id(0) // blocks
    if start_pointer is not None:
        start = tl.load(start_pointer).to(tl.int32)
    near, far = visible_distances(start, left, right)
    one, other = band_ends(band, head)
    low, high = band_distances(scores, band, one, other, start, shift, span)
    if ONE_TILE:
        first, count = 0, 1
    else:
        first, count = diagonals(low, high, near, far, queries, keys, BLOCK)
    sums += (head * programs).to(tl.int64) * slots * (BLOCK * PARTS)
    lowest = (tl.program_id(0) % blocks) * ENTRIES - shift
    d = lowest + tl.arange(0, ENTRIES)
    total = _added_up(sums, d, first, count, programs, slots, BLOCK, PARTS, 4096 // ENTRIES)
    if band is not None:
        if sides is not None:
            sides += head * programs * 2
        if (low >= lowest) & (low < lowest + ENTRIES):
            beyond = low - 1 - tl.arange(0, 2 * BLOCK)
            held = tl.sum(
                _added_up(sums, beyond, first, count, programs, slots, BLOCK, PARTS, 2048 // BLOCK),
                0,
            )
            if sides is not None:
                held += _sum_of_sides(sides, programs)
            total += tl.where(d == low, held, 0.0)
        if (high >= lowest) & (high < lowest + ENTRIES):
            beyond = high + 1 + tl.arange(0, 2 * BLOCK)
            held = tl.sum(
                _added_up(sums, beyond, first, count, programs, slots, BLOCK, PARTS, 2048 // BLOCK),
                0,
            )
            if sides is not None:
                above = _sum_of_sides(sides + 1, programs)
                if not BOTH_SIDES:
                    above = -(above + _sum_of_sides(sides, programs))
                held += above
            total += tl.where(d == high, held, 0.0)
    total = tl.where((d >= low) & (d <= high), total, 0.0)
    entry = d + shift
    tl.store(grad_scores + head.to(tl.int64) * span + entry, total, mask=entry < span)
