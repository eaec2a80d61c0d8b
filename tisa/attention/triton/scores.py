"""The gradient of the score vector: dT[d] = Σ dS[i, i + d], over the sequences of the batch.

A program takes one diagonal of tiles. All its tiles have the same scores, and their gradients add
up entry by entry in registers; only at the end is that one tile summed along its own diagonals. A
second kernel adds up the programs' shares, in one order. Tiles are BLOCK_M queries × BLOCK_N keys,
BLOCK_M = BLOCK_N or twice that: diagonal number D starts at distance D · BLOCK_N.

Tiles wholly outside the band are not visited. What those below it give to the band's lower edge was
summed by `backward.query_kernel`, by the same rule of what is outside. What those above it give to
the upper edge is what is missing to 0: each row of dS sums to 0 (or, if the log-sum-exp has a
gradient too, to that; then both sides were summed).
"""

import triton
import triton.language as tl

from tisa.attention.triton.tiles import (
    CHANGING,
    LOG2E,
    add_mask,
    band_distances,
    band_ends,
    kept,
    place,
    score_window,
    spread,
    visible_distances,
)

# The fewest tiles that a program is given, about.
TILES = tl.constexpr(24)


@triton.jit
def _floor(x, BLOCK: tl.constexpr):
    return tl.where(x >= 0, x // BLOCK, -((BLOCK - 1 - x) // BLOCK))


@triton.jit
def _diagonals(
    low, high, near, far, queries, keys, sequences, programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the first diagonal of tiles to visit, how many there are, and the shares of each.

    A share has at least about TILES tiles: sums at its end cost as much as some tiles do.
    """
    rows = tl.cdiv(queries, BLOCK_M)
    columns = tl.cdiv(keys, BLOCK_N)
    first = tl.maximum(_floor(low + 1, BLOCK_N), _floor(near, BLOCK_N))
    first = tl.maximum(first, (1 - rows) * (BLOCK_M // BLOCK_N))
    last = tl.minimum(_floor(high + BLOCK_M - 2, BLOCK_N), _floor(far + BLOCK_M - 1, BLOCK_N))
    last = tl.minimum(last, columns - 1)
    count = tl.maximum(last - first + 1, 0)
    length = tl.minimum(rows, tl.cdiv(columns, BLOCK_M // BLOCK_N))
    wanted = tl.minimum(tl.cdiv(length * sequences * count, TILES), programs)
    shares = tl.maximum(wanted // tl.maximum(count, 1), 1)
    return first, count, shares


@triton.jit(do_not_specialize=CHANGING)
def diagonal_kernel(
    query, key, value, grad_output, scores, band, mask, seed, cu_seqlens, start_pointer,
    statistics, log_weights, delta, sums,
    mask_b, mask_h, mask_q, mask_k,
    heads, sequences, programs, slots, queries, keys, start, left, right, shift, span,
    scale, threshold, kept_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr, KEY_MASK: tl.constexpr, RAGGED: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sums along the diagonals of this program's share of a diagonal of tiles."""
    head = tl.program_id(0) // programs
    if start_pointer is not None:
        start = tl.load(start_pointer).to(tl.int32)
    near, far = visible_distances(start, left, right)
    one, other = band_ends(band, head)
    low, high = band_distances(scores, band, one, other, start, shift, span)
    first, count, shares = _diagonals(
        low, high, near, far, queries, keys, sequences, programs, BLOCK_M, BLOCK_N
    )
    scale2 = scale * LOG2E
    RATIO: tl.constexpr = BLOCK_M // BLOCK_N
    KINDS: tl.constexpr = RATIO + 1
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    for slot in tl.range(tl.program_id(0) % programs, count * shares, programs):
        diagonal = first + slot % count
        top = (tl.maximum(-diagonal, 0) + RATIO - 1) // RATIO
        bottom = _floor(tl.cdiv(keys, BLOCK_N) - 1 - diagonal, RATIO) + 1
        length = tl.maximum(tl.minimum(tl.cdiv(queries, BLOCK_M), bottom) - top, 0)
        share = tl.cdiv(length * sequences, shares)
        begin = (slot // count) * share
        end = tl.minimum(begin + share, length * sequences)
        distance = diagonal * BLOCK_N
        window = score_window(
            scores, head, distance, low, high, shift, span, BLOCK_M, BLOCK_N, False
        )
        added = spread(window, BLOCK_M, BLOCK_N, False)
        d = distance + j[None, :] - i[:, None]
        added = tl.where((d >= near) & (d <= far), added, -float("inf"))
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for number in tl.range(begin, end):
            _, _, batch, token, row, row_start, some_queries, some_keys, _ = place(
                (number // length) * heads + head, heads, cu_seqlens, None, start, queries, keys
            )
            i0 = tl.multiple_of((top + number % length) * BLOCK_M, BLOCK_M)
            j0 = tl.multiple_of(i0 + distance, BLOCK_N)
            q = tl.reshape(query.load([batch, head, token + i0, 0]), [BLOCK_M, DIM])
            k = tl.reshape(key.load([batch, head // GROUP, token + j0, 0]), [BLOCK_N, DIM])
            v = tl.reshape(value.load([batch, head // GROUP, token + j0, 0]), [BLOCK_N, VALUE_DIM])
            grad = tl.reshape(grad_output.load([batch, head, token + i0, 0]), [BLOCK_M, VALUE_DIM])
            norm = tl.reshape(statistics.load([row, row_start + i0]), [BLOCK_M])
            dot = tl.reshape(delta.load([row, row_start + i0]), [BLOCK_M])
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2 + added
            grad_p = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            if RAGGED:
                # Past the end stand other sequences, or zeros; neither may count.
                logits = tl.where((j0 + j < some_keys)[None, :], logits, -float("inf"))
                dot = tl.where(i0 + i < some_queries, dot, 0.0)
                norm = tl.where(i0 + i < some_queries, norm, float("inf"))
            if mask is not None:
                here = mask + batch.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h
                logits = add_mask(
                    logits, here, i0, j0, some_queries, some_keys, mask_q, mask_k,
                    BLOCK_M, BLOCK_N, False, KEY_MASK,
                )  # fmt: skip
            if SPLIT:
                log_weight = tl.reshape(log_weights.load([row, row_start + i0]), [BLOCK_M])
                if RAGGED:
                    log_weight = tl.where(i0 + i < some_queries, log_weight, 0.0)
                p = tl.exp2((logits - norm[:, None]) - log_weight[:, None])
            else:
                p = tl.exp2(logits - norm[:, None])
            if seed is not None:
                keep = kept(
                    seed, batch, head, token + i0, token + j0, threshold, BLOCK_M, BLOCK_N, False
                )
                grad_p = tl.where(keep, grad_p * kept_scale, 0.0)
            total += p * (grad_p - dot[:, None])
        place_of_sums = sums + (head * slots + slot).to(tl.int64) * (KINDS * BLOCK_N)
        store_diagonal_sums(total, place_of_sums, BLOCK_M, BLOCK_N)


@triton.jit
def store_diagonal_sums(tile, sums, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write the sums of a tile's diagonals: 0 … BLOCK_N − 1, then −BLOCK_N … −1, and so on."""
    j = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_M)[:, None] + j[None, :]
    # Row i turned by i: diagonals stand upright, wrapped around once every BLOCK_N.
    turned = tl.gather(tile, column % BLOCK_N, 1)
    for kind in tl.static_range(BLOCK_M // BLOCK_N + 1):
        part = tl.where(column // BLOCK_N == kind, turned, 0.0)
        tl.store(sums + kind * BLOCK_N + j, tl.sum(part, 0))


@triton.jit
def _sum_of_shares(
    sums, d, first, count, shares,
    BLOCK_N: tl.constexpr, KINDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return what the visited tiles give to each distance."""
    diagonal = _floor(d, BLOCK_N) - first
    inner = d - (diagonal + first) * BLOCK_N
    total = tl.zeros_like(d).to(tl.float32)
    # Some shares at a time, so that their loads are under way together.
    ahead = tl.arange(0, AHEAD)[:, None]
    for begin in tl.range(0, shares, AHEAD):
        there = begin + ahead < shares
        slot = (begin + ahead) * count + diagonal[None, :]
        for kind in tl.static_range(KINDS):
            on = (diagonal + kind >= 0) & (diagonal + kind < count)
            spot = ((slot + kind) * KINDS + kind) * BLOCK_N + inner[None, :]
            total += tl.sum(tl.load(sums + spot, mask=there & on[None, :], other=0.0), 0)
    return total


@triton.jit
def _sum_of_all(sums, numbers):
    total = tl.zeros([2048], tl.float32)
    for begin in tl.range(0, numbers, 2048):
        spot = begin + tl.arange(0, 2048)
        total += tl.load(sums + spot, mask=spot < numbers, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=CHANGING)
def entry_kernel(
    sums, sides, scores, band, start_pointer, grad_scores,
    heads, sequences, tiles, programs, slots, queries, keys, start, left, right, shift, span,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENTRIES: tl.constexpr,
    ONE_TILE: tl.constexpr, BOTH_SIDES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ENTRIES entries of a head's score vector.

    ONE_TILE: a sequence is one tile (small.py), cut into tiles BLOCK_N wide; all were visited.
    """
    KINDS: tl.constexpr = BLOCK_M // BLOCK_N + 1
    AHEAD: tl.constexpr = 1024 // BLOCK_M
    blocks = tl.cdiv(span, ENTRIES)
    head = tl.program_id(0) // blocks
    if start_pointer is not None:
        start = tl.load(start_pointer).to(tl.int32)
    near, far = visible_distances(start, left, right)
    one, other = band_ends(band, head)
    low, high = band_distances(scores, band, one, other, start, shift, span)
    if ONE_TILE:
        first, count, shares = 0, BLOCK_M // BLOCK_N, programs
    else:
        first, count, shares = _diagonals(
            low, high, near, far, queries, keys, sequences, programs, BLOCK_M, BLOCK_N
        )
    sums += (head * slots).to(tl.int64) * (KINDS * BLOCK_N)
    entry = (tl.program_id(0) % blocks) * ENTRIES + tl.arange(0, ENTRIES)
    d = entry - shift
    total = _sum_of_shares(sums, d, first, count, shares, BLOCK_N, KINDS, 2048 // ENTRIES)
    if band is not None:
        lowest = (tl.program_id(0) % blocks) * ENTRIES - shift
        if (low >= lowest) & (low < lowest + ENTRIES):
            beyond = low - 1 - tl.arange(0, 2 * BLOCK_M)
            held = tl.sum(
                _sum_of_shares(sums, beyond, first, count, shares, BLOCK_N, KINDS, AHEAD), 0
            )
            if sides is not None:
                held += _sum_of_sides(sides, head, heads, sequences, tiles)
            total += tl.where(d == low, held, 0.0)
        if (high >= lowest) & (high < lowest + ENTRIES):
            beyond = high + 1 + tl.arange(0, 2 * BLOCK_M)
            held = tl.sum(
                _sum_of_shares(sums, beyond, first, count, shares, BLOCK_N, KINDS, AHEAD), 0
            )
            if sides is not None:
                if BOTH_SIDES:
                    held += _sum_of_sides(sides + 1, head, heads, sequences, tiles)
                else:
                    held -= _sum_of_sides(sides, head, heads, sequences, tiles)
                    held -= _sum_of_all(sums, count * shares * (KINDS * BLOCK_N))
            total += tl.where(d == high, held, 0.0)
    total = tl.where((d >= low) & (d <= high), total, 0.0)
    tl.store(grad_scores + head.to(tl.int64) * span + entry, total, mask=entry < span)


@triton.jit
def _sum_of_sides(sides, head, heads, sequences, tiles):
    total = tl.zeros([256], tl.float32)
    for first in tl.range(0, sequences * tiles, 256):
        number = first + tl.arange(0, 256)
        place = (number // tiles * heads + head).to(tl.int64) * tiles + number % tiles
        total += tl.load(sides + place * 2, mask=number < sequences * tiles, other=0.0)
    return tl.sum(total, 0)
