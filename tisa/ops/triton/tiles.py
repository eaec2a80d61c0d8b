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

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Packed sequences stand this much further apart in the statistics than their tokens do: rows of the
# last tile past the end have a place of their own, and each sequence starts at 16 bytes.
ROW_PADDING = tl.constexpr(132)
# Added to a logit, a number this low hides.
HIDDEN = tl.constexpr(2.0**127)
# Beyond every distance; sums of two of them still fit an int32.
FARTHEST = tl.constexpr(2**29)


class Frame(NamedTuple):
    """Numbers of the whole call: lengths, query_start, visible distances, the score vector's."""

    queries: Any
    keys: Any
    start: Any
    near: Any
    far: Any
    shift: Any
    span: Any


class Place(NamedTuple):
    """Where one (sequence, head) lies and how long it is.

    The coordinates of its first row in (batch, heads, length, dim); the row of the statistics and
    the first place in it; lengths.
    """

    batch: Any
    head: Any
    token: Any
    row: Any
    row_start: Any
    queries: Any
    keys: Any


class Band(NamedTuple):
    """The distances at the ends of a head's band."""

    low: Any
    high: Any


class Edges(NamedTuple):
    """The scores below and above the band, in the kernel's units."""

    below: Any
    above: Any


class Ranges(NamedTuple):
    """The kinds of tiles along a row, in tiles: see above."""

    first: Any
    a: Any
    b: Any
    c: Any
    d: Any
    last: Any


@triton.jit
def in_units(x, FIXED: tl.constexpr):
    """Return what is added to the logits in their units: those of log 2, or with SPLIT their own.

    In float32 a product with log2 e would round scores of 1e4 once more than eager code does.
    """
    if FIXED.SPLIT:
        return x
    else:
        return x * LOG2E


@triton.jit
def power(logits, FIXED: tl.constexpr):
    """Return e to the power of differences of logits, which are in the units of `in_units`."""
    if FIXED.SPLIT:
        return tl.exp2(logits * LOG2E)
    else:
        return tl.exp2(logits)


@triton.jit
def frame_of(rules, queries, keys, start):
    """Return the numbers of the whole call; of packed sequences, of the longest."""
    if rules.cu_seqlens is not None:
        start = 0
    elif rules.start is not None:
        start = tl.load(rules.start).to(tl.int32)
    near = -FARTHEST
    far = FARTHEST
    if rules.left is not None:
        near = tl.maximum(start - rules.left, -FARTHEST)
    if rules.right is not None:
        far = tl.minimum(start + rules.right, FARTHEST)
    return Frame(queries, keys, start, near, far, queries - 1, queries + keys - 1)


@triton.jit
def place(sequence, head, heads, rules, frame):
    """Return where one (sequence, head) lies."""
    if rules.cu_seqlens is not None:
        token = tl.load(rules.cu_seqlens + sequence)
        length = tl.load(rules.cu_seqlens + sequence + 1) - token
        row_start = (token + 3) // 4 * 4 + sequence * ROW_PADDING
        row_start = tl.multiple_of(row_start, 4)
        return Place(sequence * 0, head, token, head, row_start, length, length)
    else:
        return Place(sequence, head, 0, sequence * heads + head, 0, frame.queries, frame.keys)


@triton.jit
def row_places(tensor, place, i, column):
    """Return the addresses of some columns of some rows of one head."""
    pointer = tensor.pointer + tl.cast(place.batch, tl.int64) * tensor.batch
    pointer += place.head.to(tl.int64) * tensor.head
    return pointer + i.to(tl.int64)[:, None] * tensor.row + column[None, :]


@triton.jit
def rows(tensor, place, first, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return BLOCK queries of one head from the first on, zeros past the last.

    For what a program reads once. Through a descriptor one such tile would be waited for before the
    next is asked for; these are under way together.
    """
    i = tl.arange(0, BLOCK)
    column = tl.arange(0, DIM)
    spots = row_places(tensor, place, place.token + first + i, column)
    there = (i < place.queries - first)[:, None]
    if WIDTH < DIM:
        there = there & (column < WIDTH)[None, :]
    return tl.load(spots, mask=there, other=0.0)


@triton.jit
def store_rows(tensor, tile, place, first, length, WIDTH: tl.constexpr):
    """Store a tile as rows of one head from the first on, up to the length of its sequence."""
    i = first + tl.arange(0, tile.shape[0])
    column = tl.arange(0, tile.shape[1])
    inside = (i < length)[:, None] & (column < WIDTH)[None, :]
    spots = row_places(tensor, place, place.token + i, column)
    tl.store(spots, tile.to(tensor.pointer.dtype.element_ty), mask=inside)


@triton.jit
def band_ends(rules, head):
    """Return the ends of a head's band as they stand in memory.

    Kernels load them first of all and read them last: other loads run meanwhile.
    """
    one = 0
    other = 0
    if rules.band is not None:
        one = tl.load(rules.band + head * 2)
        other = tl.load(rules.band + head * 2 + 1)
    return one, other


@triton.jit
def within_vector(ends, frame):
    """Return the distances of a band that stands in memory, within the score vector."""
    low = -frame.shift
    high = frame.span - 1 - frame.shift
    # The band may stand anywhere: in int64, no sum overflows.
    at_low = tl.minimum(ends[0], ends[1]).to(tl.int64) + frame.start
    at_high = tl.maximum(ends[0], ends[1]).to(tl.int64) + frame.start
    new_low = tl.minimum(tl.maximum(at_low, low), high).to(tl.int32)
    return Band(new_low, tl.minimum(tl.maximum(at_high, low), high).to(tl.int32))


@triton.jit
def band_of(rules, ends, frame):
    """Return the band; without one the whole vector, without scores nothing."""
    if rules.scores is None:
        return Band(FARTHEST, -FARTHEST)
    elif rules.band is None:
        return Band(-frame.shift, frame.span - 1 - frame.shift)
    else:
        return within_vector(ends, frame)


@triton.jit
def edge_scores(rules, head, band, frame, FIXED: tl.constexpr):
    """Return the scores below and above the band, in the kernel's units."""
    below = 0.0
    above = 0.0
    if rules.scores is not None:
        row = rules.scores + head.to(tl.int64) * frame.span + frame.shift
        below = in_units(tl.load(row + band.low), FIXED)
        above = in_units(tl.load(row + band.high), FIXED)
    return Edges(below, above)


@triton.jit
def ranges(
    position, length, near, far, low, high,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the kinds of tiles along a row, in tiles of STEP keys.

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
    return Ranges(first, a, b, c, d, last)


@triton.jit
def count_of(r, PLAIN: tl.constexpr):
    """Return how many tiles are plain, or how many are not."""
    if PLAIN:
        return (r.b - r.a) + (r.d - r.c)
    else:
        return (r.a - r.first) + (r.c - r.b) + (r.last - r.d)


@triton.jit
def plain_tile(number, r):
    """Return the number-th plain tile."""
    return tl.where(number < r.b - r.a, r.a + number, r.c + number - (r.b - r.a))


@triton.jit
def other_tile(number, r):
    """Return the number-th tile that is not plain."""
    in_band = number - (r.a - r.first)
    after = in_band - (r.c - r.b)
    return tl.where(in_band < 0, r.first + number, tl.where(after < 0, r.b + in_band, r.d + after))


@triton.jit
def score_window(rules, head, distance, band, frame, FIXED: tl.constexpr):
    """Return the scores that a tile is made of: one for each distance in it.

    `distance` is that of its first query and first key. Clamping to the band is what holds the
    scores constant outside.
    """
    WIDTH: tl.constexpr = 2 * max(FIXED.BLOCK_M, FIXED.BLOCK_N)
    if FIXED.KEYS_FIRST:
        reach = distance + (FIXED.BLOCK_N - 1) - tl.arange(0, WIDTH)
    else:
        reach = distance - (FIXED.BLOCK_M - 1) + tl.arange(0, WIDTH)
    reach = tl.minimum(tl.maximum(reach, band.low), band.high)
    row = rules.scores + head.to(tl.int64) * frame.span + frame.shift
    return in_units(tl.load(row + reach), FIXED)


@triton.jit
def places_in(i0, j0, FIXED: tl.constexpr):
    """Return the queries and keys of a tile that begins at i0, j0, along its axes."""
    i = i0 + tl.arange(0, FIXED.BLOCK_M)
    j = j0 + tl.arange(0, FIXED.BLOCK_N)
    if FIXED.KEYS_FIRST:
        return i[None, :], j[:, None]
    else:
        return i[:, None], j[None, :]


@triton.jit
def spread(window, FIXED: tl.constexpr):
    """Return the tile of scores of a window."""
    i, j = places_in(0, 0, FIXED)
    # Along the columns of the tile the index rises, whichever they are: then the compiler reads
    # all entries of a thread at constants from few addresses.
    if FIXED.KEYS_FIRST:
        index = i - j + (FIXED.BLOCK_N - 1)
    else:
        index = j - i + (FIXED.BLOCK_M - 1)
    tile = tl.gather(window, tl.reshape(index, [FIXED.BLOCK_M * FIXED.BLOCK_N]), 0)
    return tl.reshape(tile, index.shape)


@triton.jit
def hide(logits, rules, i0, j0, keys, frame, FIXED: tl.constexpr):
    """Return the logits with −inf where a key may not be seen or, with RAGGED, is not there."""
    i, j = places_in(i0, j0, FIXED)
    if FIXED.RAGGED:
        logits = tl.where(j < keys, logits, -float("inf"))
    if rules.left is not None:
        logits = tl.where(j - i >= frame.near, logits, -float("inf"))
    if rules.right is not None:
        logits = tl.where(j - i <= frame.far, logits, -float("inf"))
    return logits


@triton.jit
def added_by(mask, value, FIXED: tl.constexpr):
    """Return what a mask's entries add to the logits."""
    if mask.pointer.dtype.element_ty.is_floating():
        # As `call.hides_below` has it: the lowest number of a dtype hides as −inf does.
        if mask.pointer.dtype.element_ty == tl.float16:
            seen = value > -65504.0
        else:
            seen = value > -HIDDEN
        return tl.where(seen, in_units(value.to(tl.float32), FIXED), -float("inf"))
    else:
        return tl.where(value != 0, 0.0, -float("inf"))


@triton.jit
def add_mask(logits, mask, place, head, i0, j0, FIXED: tl.constexpr):
    """Return the logits with the caller's mask, boolean or added."""
    pointer = (
        mask.pointer + tl.cast(place.batch, tl.int64) * mask.batch + head.to(tl.int64) * mask.head
    )
    if FIXED.KEY_MASK:
        j = j0 + tl.arange(0, FIXED.BLOCK_N)
        value = tl.load(pointer + j.to(tl.int64) * mask.key, mask=j < place.keys, other=0)
    else:
        i, j = places_in(i0, j0, FIXED)
        spots = pointer + i.to(tl.int64) * mask.query + j.to(tl.int64) * mask.key
        value = tl.load(spots, mask=(i < place.queries) & (j < place.keys), other=0)
    added = added_by(mask, value, FIXED)
    if FIXED.KEY_MASK:
        if FIXED.KEYS_FIRST:
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
def kept(dropout, place, head, i0, j0, factor, FIXED: tl.constexpr):
    """Return the factor for weights of a tile that are kept, 0 for the others: `ops.dropout.kept`.

    Number for number. To multiply by it takes half the instructions of choosing in half precision.
    """
    state = _mixed((tl.load(dropout.seed) + place.batch).to(tl.uint32))
    state = _mixed(state ^ _mixed(head.to(tl.uint32)))
    i = (place.token + i0 + tl.arange(0, FIXED.BLOCK_M)).to(tl.uint32)
    j = (place.token + j0 + tl.arange(0, FIXED.BLOCK_N)).to(tl.uint32) * 0x85EBCA6B
    row = state + i * 0x9E3779B1
    row = (row ^ (row >> 16)) * 0x7FEB352D
    if FIXED.KEYS_FIRST:
        drawn = row[None, :] ^ j[:, None]
    else:
        drawn = row[:, None] ^ j[None, :]
    drawn = drawn * 0x7FEB352D
    drawn = (drawn ^ (drawn >> 15)) * 0x846CA68B
    return tl.where(drawn >= tl.cast(dropout.threshold, tl.uint32) * 2, factor, 0.0)
