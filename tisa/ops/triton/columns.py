"""What is added to a whole column of logits: the score of its key (`key_scores`).

It is added to q · k · scale, and the sum is brought into the kernel's units as a whole: a
multiply-add each, the second of which a tile has anyway. The numbers of a tile are asked for one
tile ahead, into registers. Through shared memory the compiler would have all warps wait for each
other once more per tile (78 instructions more per tile of 64 × 64, not 40).
"""

import triton
import triton.language as tl

from tisa.ops.triton import tiles


@triton.jit
def of_keys(key_scores, place, head, j0, FIXED: tl.constexpr):
    """Return what the keys of a tile add to their logits, 0 past the end."""
    if key_scores is None:
        return 0.0
    else:
        j = j0 + tl.arange(0, FIXED.BLOCK_N)
        found = tl.load(_row(key_scores, place, head) + j, mask=j < place.keys, other=0.0)
        return _along(found, FIXED)


@triton.jit
def of_tile(key_scores, place, head, number, r, PLAIN: tl.constexpr, FIXED: tl.constexpr):
    """Return what the keys of the number-th plain tile of a row add, or of the number-th other one.

    Anything where there is no such tile.
    """
    if key_scores is None:
        return 0.0
    else:
        BLOCK_N: tl.constexpr = FIXED.BLOCK_N
        if PLAIN:
            tile = tiles.plain_tile(number, r)
        else:
            tile = tiles.other_tile(number, r)
        j0 = tl.multiple_of(tl.maximum(tl.minimum(tile, r.last - 1), 0) * BLOCK_N, BLOCK_N)
        spots = _row(key_scores, place, head) + j0 + tl.arange(0, BLOCK_N)
        if not FIXED.RAGGED:
            found = tl.load(spots)
        elif PLAIN:
            # It has all its keys; what is no tile of this row may not have them.
            found = tl.load(spots, mask=j0 + BLOCK_N <= place.keys, other=0.0)
        else:
            j = j0 + tl.arange(0, BLOCK_N)
            found = tl.load(spots, mask=j < place.keys, other=0.0)
        return _along(found, FIXED)


@triton.jit
def _row(key_scores, place, head):
    # `problem.loadable_keys` has seen to it, so that several are one load.
    stride = tl.multiple_of(key_scores.head, 4)
    row = key_scores.pointer + tl.cast(place.batch, tl.int64) * tl.multiple_of(key_scores.batch, 4)
    return row + head.to(tl.int64) * stride + place.token


@triton.jit
def _along(found, FIXED: tl.constexpr):
    if FIXED.KEYS_FIRST:
        return found[:, None]
    else:
        return found[None, :]


@triton.jit
def with_keys(logits, added, key_scores, scale):
    """Return the products of a tile, scaled where the keys add to them: with what they add."""
    if key_scores is None:
        return logits
    else:
        return logits * scale + added


@triton.jit
def factor_of(scale, key_scores, FIXED: tl.constexpr):
    """Return what brings the result of `with_keys` into the kernel's units; `scale` is in them."""
    if key_scores is None:
        return scale
    else:
        return tiles.in_units(1.0, FIXED)


@triton.jit
def store(gradient, found, place, head, j0):
    """Store a number for each key of a tile, up to the end of its sequence."""
    j = j0 + tl.arange(0, found.shape[0])
    spots = gradient.pointer + tl.cast(place.batch, tl.int64) * gradient.batch
    spots += head.to(tl.int64) * gradient.head + place.token
    tl.store(spots + j, found, mask=j < place.keys)
