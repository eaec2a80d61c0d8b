"""The gradients of key and value: one program for BLOCK_N of them, queries streamed past."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tisa.ops.triton import columns, tiles
from tisa.ops.triton.arguments import CHANGING


class Tile(NamedTuple):
    """The keys and values of a program, from key `j0` on; their gradients so far."""

    j0: Any
    k: Any
    v: Any
    grad_k: Any
    grad_v: Any


class KeyScores(NamedTuple):
    """What keys add to their logits; where the gradient of that goes."""

    scores: Any
    gradient: Any


class Streamed(NamedTuple):
    """What comes past, through descriptors: a row for each query."""

    query: Any
    gradient: Any
    statistics: Any
    shares: Any
    delta: Any


@triton.jit
def add_scores(logits, rules, head, i0, j0, band, frame, FIXED: tl.constexpr):
    """Return the logits of a tile, keys first, with its scores added and the unseen hidden."""
    if rules.scores is not None:
        window = tiles.score_window(rules, head, j0 - i0, band, frame, FIXED)
        logits += tiles.spread(window, FIXED)
    # Keys past the end have gradients that nobody stores: never RAGGED.
    return tiles.hide(logits, rules, i0, j0, 0, frame, FIXED)


@triton.jit
def key_tile(
    tile, here, head, row, ends, frame, key_scores, streamed, rules, FIXED: tl.constexpr
):  # fmt: skip
    """Return the gradients of one tile of keys and values with one query head's part added.

    Write the gradient of the keys' scores, which are this head's alone.
    """
    BLOCK_M: tl.constexpr = FIXED.BLOCK_M
    BLOCK_N: tl.constexpr = FIXED.BLOCK_N
    j0, grad_k, grad_v = tile.j0, tile.grad_k, tile.grad_v
    grad_of_keys = tl.zeros([BLOCK_N], tl.float32)
    of_keys = columns.of_keys(key_scores.scores, here, head, j0, FIXED)
    band = tiles.band_of(rules, ends, frame)
    edges = tiles.edge_scores(rules, head, band, frame, FIXED)
    # Down a column distances fall: what is above the band comes first.
    r = tiles.ranges(
        j0, here.queries, -frame.far, -frame.near, -band.high, -band.low, BLOCK_N, BLOCK_M
    )
    factor = columns.factor_of(tiles.in_units(rules.scale, FIXED), key_scores.scores, FIXED)
    for phase in tl.static_range(1 if FIXED.ONE_LOOP else 2):
        begin = r.first if FIXED.ONE_LOOP else 0
        end = r.last
        if not FIXED.ONE_LOOP:
            end = tiles.count_of(r, phase == 0)
        for number in tl.range(begin, end):
            if FIXED.ONE_LOOP:
                i0 = number * BLOCK_M
                in_first = (number >= r.a) & (number < r.b)
                plain = in_first | ((number >= r.c) & (number < r.d))
                edge = tl.where(plain, tl.where(in_first, edges.above, edges.below), 0.0)
            elif phase == 0:
                i0 = tiles.plain_tile(number, r) * BLOCK_M
                edge = tl.where(number < r.b - r.a, edges.above, edges.below)
            else:
                i0 = tiles.other_tile(number, r) * BLOCK_M
                edge = 0.0
            i0 = tl.multiple_of(i0, BLOCK_M)
            at = [here.batch, head, here.token + i0, 0]
            q = tl.reshape(streamed.query.load(at), [BLOCK_M, FIXED.DIM])
            grad = tl.reshape(streamed.gradient.load(at), [BLOCK_M, FIXED.VALUE_DIM])
            norm = tl.reshape(streamed.statistics.load([row, here.row_start + i0]), [BLOCK_M])
            dot = tl.reshape(streamed.delta.load([row, here.row_start + i0]), [BLOCK_M])
            logits = tl.dot(tile.k, tl.trans(q), input_precision=FIXED.PRECISION)
            grad_p = tl.dot(tile.v, tl.trans(grad), input_precision=FIXED.PRECISION)
            logits = columns.with_keys(logits, of_keys, key_scores.scores, rules.scale)
            if FIXED.SPLIT:
                # As the forward pass adds up, so that large numbers are rounded alike.
                logits = logits * factor + edge
            else:
                logits = logits * factor + (edge - norm)[None, :]
            if FIXED.ONE_LOOP:
                if not plain:
                    logits = add_scores(logits, rules, head, i0, j0, band, frame, FIXED)
            elif phase == 1:
                logits = add_scores(logits, rules, head, i0, j0, band, frame, FIXED)
            if rules.mask is not None:
                logits = tiles.add_mask(logits, rules.mask, here, head, i0, j0, FIXED)
            if FIXED.SPLIT:
                share = tl.reshape(streamed.shares.load([row, here.row_start + i0]), [BLOCK_M])
                p = tiles.power(logits - norm[None, :], FIXED) * share[None, :]
            else:
                p = tl.exp2(logits)
            dropped = p
            if rules.dropout is not None:
                kept = tiles.kept(
                    rules.dropout, here, head, i0, j0, rules.dropout.kept_scale, FIXED
                )
                grad_p *= kept
                dropped = p * kept
            grad_logits = p * (grad_p - dot[None, :])
            if key_scores.gradient is not None:
                grad_of_keys += tl.sum(grad_logits, 1)
            grad_v = tl.dot(dropped.to(grad.dtype), grad, grad_v, input_precision=FIXED.PRECISION)
            grad_k = tl.dot(grad_logits.to(q.dtype), q, grad_k, input_precision=FIXED.PRECISION)
    if key_scores.gradient is not None:
        columns.store(key_scores.gradient, grad_of_keys, here, head, j0)
    return grad_k, grad_v


@triton.jit(do_not_specialize=CHANGING)
def key_kernel(
    query, key, value, key_scores, grad_output, rules, statistics, shares, delta, grad_key,
    grad_value, grad_key_scores, counts, queries, keys, start, FIXED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_N keys and values, summed over the query heads they serve.

    ONE_LOOP: plain and other tiles in one loop, which needs fewer registers. The assembler
    serialises the matrix units in it for some widths; those take two loops (configs.py).
    """
    BLOCK_N: tl.constexpr = FIXED.BLOCK_N
    GROUP: tl.constexpr = FIXED.GROUP
    DIM: tl.constexpr = FIXED.DIM
    VALUE_DIM: tl.constexpr = FIXED.VALUE_DIM
    frame = tiles.frame_of(rules, queries, keys, start)
    unit = tl.program_id(0) // counts.tiles
    here = tiles.place(unit // counts.heads, unit % counts.heads, counts.heads, rules, frame)
    j0 = tl.program_id(0) % counts.tiles * BLOCK_N
    if j0 >= here.keys:
        return
    ends = tiles.band_ends(rules, here.head * GROUP)
    at = [here.batch, here.head, here.token + j0, 0]
    k = tl.reshape(key.load(at), [BLOCK_N, DIM])
    v = tl.reshape(value.load(at), [BLOCK_N, VALUE_DIM])
    grad_k = tl.zeros([BLOCK_N, DIM], tl.float32)
    grad_v = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)
    streamed = Streamed(query, grad_output, statistics, shares, delta)
    of_keys = KeyScores(key_scores, grad_key_scores)
    if GROUP == 1:
        tile = Tile(j0, k, v, grad_k, grad_v)
        grad_k, grad_v = key_tile(
            tile, here, here.head, here.row, ends, frame, of_keys, streamed, rules, FIXED
        )
    else:
        for member in tl.range(0, GROUP):
            head = here.head * GROUP + member
            ends = tiles.band_ends(rules, head)
            row = head
            if rules.cu_seqlens is None:
                row = here.batch * counts.heads * GROUP + head
            tile = Tile(j0, k, v, grad_k, grad_v)
            grad_k, grad_v = key_tile(
                tile, here, head, row, ends, frame, of_keys, streamed, rules, FIXED
            )
    tiles.store_rows(grad_key, grad_k * rules.scale, here, j0, here.keys, FIXED.WIDTH)
    tiles.store_rows(grad_value, grad_v, here, j0, here.keys, FIXED.VALUE_WIDTH)
