"""Attention forward: one program for BLOCK_M queries of one head, keys streamed past them."""

import triton
import triton.language as tl

from tisa.ops.triton import columns, tiles
from tisa.ops.triton.arguments import CHANGING


@triton.jit(do_not_specialize=CHANGING)
def forward_kernel(
    query, key, value, key_scores, rules, output, statistics, counts, queries, keys, start,
    FIXED: tl.constexpr,
):  # fmt: skip
    """Write the output and, for each query, the logarithm of its sum of weights to base 2.

    The scale is not negative; NEGATIVE says that the caller's was. Without key scores it is that of
    `tiles.in_units`.
    With SPLIT the largest logit and one over the sum of weights are written instead.
    """
    BLOCK_M: tl.constexpr = FIXED.BLOCK_M
    BLOCK_N: tl.constexpr = FIXED.BLOCK_N
    VALUE_DIM: tl.constexpr = FIXED.VALUE_DIM
    tile = tl.program_id(0) % counts.tiles
    if FIXED.BACKWARDS:
        tile = counts.tiles - 1 - tile
    frame = tiles.frame_of(rules, queries, keys, start)
    unit = tl.program_id(0) // counts.tiles
    here = tiles.place(unit // counts.heads, unit % counts.heads, counts.heads, rules, frame)
    i0 = tile * BLOCK_M
    if i0 >= here.queries:
        return
    key_head = here.head // FIXED.GROUP
    ends = tiles.band_ends(rules, here.head)
    q = tl.reshape(query.load([here.batch, here.head, here.token + i0, 0]), [BLOCK_M, FIXED.DIM])
    if FIXED.NEGATIVE:
        q = -q
    band = tiles.band_of(rules, ends, frame)
    edges = tiles.edge_scores(rules, here.head, band, frame, FIXED)
    r = tiles.ranges(i0, here.keys, frame.near, frame.far, band.low, band.high, BLOCK_M, BLOCK_N)
    factor = columns.factor_of(rules.scale, key_scores, FIXED)
    total = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for phase in tl.static_range(2):
        of_keys = columns.of_tile(key_scores, here, here.head, 0, r, phase == 0, FIXED)
        for number in tl.range(0, tiles.count_of(r, phase == 0)):
            if phase == 0:
                j0 = tiles.plain_tile(number, r) * BLOCK_N
                edge = tl.where(number < r.b - r.a, edges.below, edges.above)
            else:
                j0 = tiles.other_tile(number, r) * BLOCK_N
            j0 = tl.multiple_of(j0, BLOCK_N)
            if phase == 1 and rules.scores is not None:
                window = tiles.score_window(rules, here.head, j0 - i0, band, frame, FIXED)
            at = [here.batch, key_head, here.token + j0, 0]
            k = tl.reshape(key.load(at), [BLOCK_N, FIXED.DIM])
            logits = tl.dot(q, tl.trans(k), input_precision=FIXED.PRECISION)
            logits = columns.with_keys(logits, of_keys, key_scores, rules.scale)
            after = number + 1
            of_keys = columns.of_tile(key_scores, here, here.head, after, r, phase == 0, FIXED)
            if phase == 0 and rules.mask is None and not FIXED.SPLIT:
                # What is added and the maximum are one number per row: one multiply-add each. It
                # rounds otherwise than the backward pass does, which shows in float32.
                new_peak = tl.maximum(peak, tl.max(logits, 1) * factor + edge)
                finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                p = tl.exp2(logits * factor + (edge - finite)[:, None])
            else:
                logits = logits * factor
                if phase == 0:
                    logits += edge
                else:
                    if rules.scores is not None:
                        logits += tiles.spread(window, FIXED)
                    logits = tiles.hide(logits, rules, i0, j0, here.keys, frame, FIXED)
                if rules.mask is not None:
                    logits = tiles.add_mask(logits, rules.mask, here, here.head, i0, j0, FIXED)
                new_peak = tl.maximum(peak, tl.max(logits, 1))
                finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                p = tiles.power(logits - finite[:, None], FIXED)
            shrink = tiles.power(peak - finite, FIXED)
            weight = weight * shrink + tl.sum(p, 1)
            total = total * shrink[:, None]
            peak = new_peak
            if rules.dropout is not None:
                p *= tiles.kept(rules.dropout, here, here.head, i0, j0, 1.0, FIXED)
            v = tl.reshape(value.load(at), [BLOCK_N, VALUE_DIM])
            total = tl.dot(p.to(v.dtype), v, total, input_precision=FIXED.PRECISION)

    blind = weight == 0
    weight = tl.where(blind, 1.0, weight)
    i = i0 + tl.arange(0, BLOCK_M)
    # +inf makes every weight 0 when it is computed again: of blind queries and past the last one.
    peak = tl.where(blind | (i >= here.queries), float("inf"), peak)
    places = statistics.pointer + here.row.to(tl.int64) * statistics.row + here.row_start + i
    if FIXED.SPLIT:
        tl.store(places, peak)
        tl.store(places + statistics.size, 1.0 / weight)
    else:
        tl.store(places, peak + tl.log2(weight))
    total = total / weight[:, None]
    if rules.dropout is not None:
        total = total * rules.dropout.kept_scale
    tiles.store_rows(output, total, here, i0, here.queries, FIXED.VALUE_WIDTH)
