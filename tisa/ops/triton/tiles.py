"""What the kernels share: where a tile stands, what it adds to the logits, what it drops.

A tile is BLOCK_M queries × BLOCK_N keys. Distances are d = j − i of the indices themselves; the
offset is k = d − query_start and the entry of the score vector is d + shift. Two pairs of distances
matter: which are visible (`near`, `far`: d from near to far), and the band (`low`, `high`) outside
which the score is that of the band's edge.

So most tiles of a long sequence need nothing but one number added. Along a row of tiles there are

    first    a         b          c         d      last
      | edge | plain   | band     | plain   | edge |

edge: some entries are hidden; plain: one number, the score below (or above) the band; band: scores
from the vector. A kernel runs one loop over the plain tiles and one over the others, or one loop
with a branch where that needs fewer registers.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Packed sequences stand this much further apart in the statistics than their tokens do: rows of the
# last tile past the end have a place of their own, and each sequence starts at 16 bytes.
ROW_PADDING = tl.constexpr(132)
# Beyond every distance; sums of two of them still fit an int32.
FARTHEST = tl.constexpr(2**29)
# Integers that change from call to call; compiled for each value's properties, a kernel would be
# compiled anew again and again.
CHANGING = [
    "queries", "keys", "start", "left", "right", "shift", "span", "threshold", "sequences", "slots",
    "part", "parts", "programs",
]  # fmt: skip


@triton.jit
def place(unit, heads, cu_seqlens, start_pointer, start, queries, keys):
    """Return where one (sequence, head) lies and how long it is.

    sequence, head; the coordinates of its first row in (batch, heads, length, dim); the row of the
    statistics and the first place in it; lengths; query_start.
    """
    sequence = unit // heads
    head = unit % heads
    if cu_seqlens is not None:
        token = tl.load(cu_seqlens + sequence)
        queries = tl.load(cu_seqlens + sequence + 1) - token
        row_start = (token + 3) // 4 * 4 + sequence * ROW_PADDING
        row_start = tl.multiple_of(row_start, 4)
        none = sequence * 0
        return sequence, head, none, token, head, row_start, queries, queries, none
    if start_pointer is not None:
        start = tl.load(start_pointer).to(tl.int32)
    return sequence, head, sequence, 0, unit, 0, queries, keys, start


@triton.jit
def rows(
    pointer, batch, head, first, count, stride_b, stride_h, stride_n,
    BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return BLOCK rows of one head, zeros from row `count` on.

    For what a program reads once. Through a descriptor one such tile would be waited for before the
    next is asked for; these are under way together.
    """
    i = tl.arange(0, BLOCK)
    column = tl.arange(0, DIM)
    pointer += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    places = pointer + (first + i).to(tl.int64)[:, None] * stride_n + column[None, :]
    there = (i < count)[:, None]
    if WIDTH < DIM:
        there = there & (column < WIDTH)[None, :]
    return tl.load(places, mask=there, other=0.0)


@triton.jit
def visible_distances(start, left, right):
    """Return the lowest and highest visible distance."""
    near = -FARTHEST
    far = FARTHEST
    if left is not None:
        near = tl.maximum(start - left, -FARTHEST)
    if right is not None:
        far = tl.minimum(start + right, FARTHEST)
    return near, far


@triton.jit
def band_ends(band, head):
    """Return the ends of a head's band as they stand in memory.

    Kernels load them first of all and read them last: other loads run meanwhile.
    """
    one = 0
    other = 0
    if band is not None:
        one = tl.load(band + head * 2)
        other = tl.load(band + head * 2 + 1)
    return one, other


@triton.jit
def band_distances(scores, band, one, other, start, shift, span):
    """Return the distances at the band's ends, within the vector."""
    low = FARTHEST
    high = -FARTHEST
    if scores is not None:
        low = -shift
        high = span - 1 - shift
        if band is not None:
            # The band may stand anywhere: in int64, no sum overflows.
            at_low = tl.minimum(one, other).to(tl.int64) + start
            at_high = tl.maximum(one, other).to(tl.int64) + start
            new_low = tl.minimum(tl.maximum(at_low, low), high).to(tl.int32)
            high = tl.minimum(tl.maximum(at_high, low), high).to(tl.int32)
            low = new_low
    return low, high


@triton.jit
def edge_scores(scores, head, low, high, shift, span):
    """Return the scores below and above the band, in units of log 2."""
    below = 0.0
    above = 0.0
    if scores is not None:
        row = scores + head.to(tl.int64) * span + shift
        below = tl.load(row + low) * LOG2E
        above = tl.load(row + high) * LOG2E
    return below, above


@triton.jit
def ranges(
    position, length, near, far, low, high,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return (first, a, b, c, d, last) along a row of tiles, in tiles of STEP keys.

    For a column of tiles: change the signs of all distances, and with that their order.
    """
    bottom = position + BLOCK - 1
    last = tl.cdiv(tl.maximum(tl.minimum(length, bottom + far + 1), 0), STEP)
    first = tl.minimum(tl.maximum(position + near, 0) // STEP, last)
    d = tl.minimum(tl.maximum(tl.minimum(length, position + far + 1), 0) // STEP, last)
    a = tl.minimum(tl.cdiv(tl.maximum(bottom + near, 0), STEP), last)
    a = tl.maximum(a, first)
    b = tl.maximum(position + low + 1, 0) // STEP
    b = tl.maximum(tl.minimum(b, d), a)
    c = tl.cdiv(tl.maximum(bottom + high, 0), STEP)
    c = tl.maximum(tl.minimum(c, last), b)
    d = tl.maximum(d, c)
    return first, a, b, c, d, last


@triton.jit
def plain_tile(number, a, b, c):
    """Return the number-th plain tile."""
    return tl.where(number < b - a, a + number, c + number - (b - a))


@triton.jit
def other_tile(number, first, a, b, c, d):
    """Return the number-th tile that is not plain."""
    in_band = number - (a - first)
    after = in_band - (c - b)
    return tl.where(in_band < 0, first + number, tl.where(after < 0, b + in_band, d + after))


@triton.jit
def score_window(
    scores, head, distance, low, high, shift, span,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the scores, over log 2, that a tile is made of: one for each distance in it.

    `distance` is that of its first query and first key. Clamping to the band is what holds the
    scores constant outside.
    """
    WIDTH: tl.constexpr = 2 * max(BLOCK_M, BLOCK_N)
    if KEYS_FIRST:
        reach = distance + (BLOCK_N - 1) - tl.arange(0, WIDTH)
    else:
        reach = distance - (BLOCK_M - 1) + tl.arange(0, WIDTH)
    reach = tl.minimum(tl.maximum(reach, low), high)
    return tl.load(scores + head.to(tl.int64) * span + shift + reach) * LOG2E


@triton.jit
def spread(window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return the tile of scores of a window."""
    # Along the columns of the tile the index rises, whichever they are: then the compiler reads
    # all entries of a thread at constants from few addresses.
    if KEYS_FIRST:
        index = tl.arange(0, BLOCK_M)[None, :] - tl.arange(0, BLOCK_N)[:, None] + (BLOCK_N - 1)
    else:
        index = tl.arange(0, BLOCK_N)[None, :] - tl.arange(0, BLOCK_M)[:, None] + (BLOCK_M - 1)
    tile = tl.gather(window, tl.reshape(index, [BLOCK_M * BLOCK_N]), 0)
    if KEYS_FIRST:
        tile = tl.reshape(tile, [BLOCK_N, BLOCK_M])
    else:
        tile = tl.reshape(tile, [BLOCK_M, BLOCK_N])
    return tile


@triton.jit
def hide(
    logits, i0, j0, keys, near, far, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Return the logits with −inf where a key may not be seen or, with RAGGED, is not there."""
    i = i0 + tl.arange(0, BLOCK_M)
    j = j0 + tl.arange(0, BLOCK_N)
    if KEYS_FIRST:
        i, j = i[None, :], j[:, None]
    else:
        i, j = i[:, None], j[None, :]
    if RAGGED:
        logits = tl.where(j < keys, logits, -float("inf"))
    if left is not None:
        logits = tl.where(j - i >= near, logits, -float("inf"))
    if right is not None:
        logits = tl.where(j - i <= far, logits, -float("inf"))
    return logits


@triton.jit
def add_mask(
    logits, mask, i0, j0, queries, keys, stride_q, stride_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEYS_FIRST: tl.constexpr, KEY_MASK: tl.constexpr,
):  # fmt: skip
    """Return the logits with the caller's mask, boolean or added; KEY_MASK: one row for all."""
    i = i0 + tl.arange(0, BLOCK_M)
    j = j0 + tl.arange(0, BLOCK_N)
    if KEY_MASK:
        value = tl.load(mask + j.to(tl.int64) * stride_k, mask=j < keys, other=0)
    else:
        if KEYS_FIRST:
            i, j = i[None, :], j[:, None]
        else:
            i, j = i[:, None], j[None, :]
        places = mask + i.to(tl.int64) * stride_q + j.to(tl.int64) * stride_k
        value = tl.load(places, mask=(i < queries) & (j < keys), other=0)
    if mask.dtype.element_ty.is_floating():
        added = value.to(tl.float32) * LOG2E
    else:
        added = tl.where(value != 0, 0.0, -float("inf"))
    if KEY_MASK:
        if KEYS_FIRST:
            added = added[:, None]
        else:
            added = added[None, :]
    return logits + added


@triton.jit
def _mixed(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(
    seed, sequence, head, i0, j0, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return which weights of a tile are kept: `attention.dropout.kept`, number for number."""
    state = _mixed((tl.load(seed) + sequence).to(tl.uint32))
    state = _mixed(state ^ _mixed(head.to(tl.uint32)))
    i = (i0 + tl.arange(0, BLOCK_M)).to(tl.uint32)
    j = (j0 + tl.arange(0, BLOCK_N)).to(tl.uint32) * 0x9E3779B1
    row = _mixed(state ^ _mixed(i))
    if KEYS_FIRST:
        drawn = _mixed(row[None, :] ^ j[:, None])
    else:
        drawn = _mixed(row[:, None] ^ j[None, :])
    return (drawn & 0x7FFFFFFF).to(tl.int32) >= threshold
