"""Attention forward: one program for BLOCK_M queries of one head, keys streamed past them."""

import triton
import triton.language as tl

from tisa.ops.triton.tiles import (
    CHANGING,
    add_mask,
    band_distances,
    band_ends,
    edge_scores,
    hide,
    kept,
    other_tile,
    place,
    plain_tile,
    ranges,
    score_window,
    spread,
    visible_distances,
)


@triton.jit(do_not_specialize=CHANGING)
def forward_kernel(
    query, key, value, scores, band, mask, seed, cu_seqlens, start_pointer, output, statistics,
    output_b, output_h, output_n, mask_b, mask_h, mask_q, mask_k, statistics_row, statistics_size,
    heads, tiles, queries, keys, start, left, right, shift, span,
    scale, threshold, kept_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, GROUP: tl.constexpr, KEY_MASK: tl.constexpr,
    RAGGED: tl.constexpr, BACKWARDS: tl.constexpr, NEGATIVE: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the output and, for each query, the logarithm of its sum of weights to base 2.

    `scale` is not negative and includes log2 e; NEGATIVE says that the caller's was. SPLIT keeps
    the two terms of the logarithm apart. BACKWARDS starts the tiles with the most keys first.
    """
    tile = tl.program_id(0) % tiles
    if BACKWARDS:
        tile = tiles - 1 - tile
    unit = tl.program_id(0) // tiles
    _, head, batch, token, row, row_start, queries, keys, start = place(
        unit, heads, cu_seqlens, start_pointer, start, queries, keys
    )
    i0 = tile * BLOCK_M
    if i0 >= queries:
        return
    key_head = head // GROUP
    one, other = band_ends(band, head)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h
    q = tl.reshape(query.load([batch, head, token + i0, 0]), [BLOCK_M, DIM])
    if NEGATIVE:
        q = -q
    near, far = visible_distances(start, left, right)
    low, high = band_distances(scores, band, one, other, start, shift, span)
    below, above = edge_scores(scores, head, low, high, shift, span)
    first, a, b, c, d, last = ranges(i0, keys, near, far, low, high, BLOCK_M, BLOCK_N)
    total = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for phase in tl.static_range(2):
        count = (b - a) + (d - c) if phase == 0 else (a - first) + (c - b) + (last - d)
        for number in tl.range(0, count):
            if phase == 0:
                j0 = plain_tile(number, a, b, c) * BLOCK_N
                edge = tl.where(number < b - a, below, above)
            else:
                j0 = other_tile(number, first, a, b, c, d) * BLOCK_N
            j0 = tl.multiple_of(j0, BLOCK_N)
            if phase == 1 and scores is not None:
                window = score_window(
                    scores, head, j0 - i0, low, high, shift, span, BLOCK_M, BLOCK_N, False
                )
            k = tl.reshape(key.load([batch, key_head, token + j0, 0]), [BLOCK_N, DIM])
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if phase == 0 and mask is None:
                # What is added and the maximum are one number per row: one multiply-add each.
                new_peak = tl.maximum(peak, tl.max(logits, 1) * scale + edge)
                finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                p = tl.exp2(logits * scale + (edge - finite)[:, None])
            else:
                logits = logits * scale
                if phase == 0:
                    logits += edge
                else:
                    if scores is not None:
                        logits += spread(window, BLOCK_M, BLOCK_N, False)
                    logits = hide(
                        logits, i0, j0, keys, near, far, left, right,
                        BLOCK_M, BLOCK_N, False, RAGGED,
                    )  # fmt: skip
                if mask is not None:
                    logits = add_mask(
                        logits, mask, i0, j0, queries, keys, mask_q, mask_k,
                        BLOCK_M, BLOCK_N, False, KEY_MASK,
                    )  # fmt: skip
                new_peak = tl.maximum(peak, tl.max(logits, 1))
                finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                p = tl.exp2(logits - finite[:, None])
            shrink = tl.exp2(peak - finite)
            weight = weight * shrink + tl.sum(p, 1)
            total = total * shrink[:, None]
            peak = new_peak
            if seed is not None:
                keep = kept(
                    seed, batch, head, token + i0, token + j0, threshold, BLOCK_M, BLOCK_N, False
                )
                p = tl.where(keep, p, 0.0)
            v = tl.reshape(value.load([batch, key_head, token + j0, 0]), [BLOCK_N, VALUE_DIM])
            total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)

    blind = weight == 0
    weight = tl.where(blind, 1.0, weight)
    i = i0 + tl.arange(0, BLOCK_M)
    # +inf makes every weight 0 when it is computed again: of blind queries and past the last one.
    peak = tl.where(blind | (i >= queries), float("inf"), peak)
    places = statistics + row.to(tl.int64) * statistics_row + row_start + i
    if SPLIT:
        tl.store(places, peak)
        tl.store(places + statistics_size, tl.log2(weight))
    else:
        tl.store(places, peak + tl.log2(weight))
    total = total / weight[:, None]
    if seed is not None:
        total = total * kept_scale
    column = tl.arange(0, VALUE_DIM)
    output += batch.to(tl.int64) * output_b + head.to(tl.int64) * output_h
    places = output + (token + i).to(tl.int64)[:, None] * output_n + column[None, :]
    inside = (i < queries)[:, None] & (column < VALUE_WIDTH)[None, :]
    tl.store(places, total.to(output.dtype.element_ty), mask=inside)
