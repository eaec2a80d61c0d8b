"""Few queries against many keys: one new token and its cache.

A program for the queries of one key head would leave most of the chip idle, so the keys are cut
into parts, a program for each, and a second kernel adds up what the parts found. All query heads
that share the key head are rows of one tile: the cache is read once.
"""

import triton
import triton.language as tl

from tisa.ops.triton.tiles import CHANGING, FARTHEST, LOG2E


@triton.jit(do_not_specialize=CHANGING)
def decode_kernel(
    query, key, value, scores, band, mask, start_pointer, totals, weights,
    query_b, query_h, query_n, mask_b, mask_h, mask_q, mask_k,
    key_heads, parts, part, queries, keys, start, left, right, shift, span, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what `part` keys contribute: a maximum, a sum and a weighted sum for each row."""
    unit = tl.program_id(0) // parts
    batch = unit // key_heads
    key_head = unit % key_heads
    row = tl.arange(0, ROWS)
    there = row < GROUP * queries
    head = key_head * GROUP + tl.where(there, row // queries, 0)
    i = row % queries
    if start_pointer is not None:
        start = tl.load(start_pointer).to(tl.int32)
    near = -FARTHEST
    far = FARTHEST
    if left is not None:
        near = tl.maximum(start - left, -FARTHEST)
    if right is not None:
        far = tl.minimum(start + right, FARTHEST)
    if scores is not None:
        low = tl.zeros([ROWS], tl.int32) - shift
        high = low + span - 1
        if band is not None:
            one = tl.load(band + head * 2)
            other = tl.load(band + head * 2 + 1)
            at_low = tl.minimum(one, other).to(tl.int64) + start
            at_high = tl.maximum(one, other).to(tl.int64) + start
            new_low = tl.minimum(tl.maximum(at_low, low), high).to(tl.int32)
            high = tl.minimum(tl.maximum(at_high, low), high).to(tl.int32)
            low = new_low
        rows_of_scores = scores + head.to(tl.int64) * span + shift
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b
    dim = tl.arange(0, DIM)
    places = batch.to(tl.int64) * query_b + head.to(tl.int64) * query_h + i.to(tl.int64) * query_n
    q = tl.load(
        query + places[:, None] + dim[None, :],
        mask=there[:, None] & (dim < WIDTH)[None, :], other=0.0,
    )  # fmt: skip

    begin = tl.program_id(0) % parts * part
    end = tl.minimum(tl.minimum(begin + part, keys), queries + far)
    begin = tl.maximum(begin, tl.maximum(near, 0) // BLOCK_N * BLOCK_N)
    total = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    for j0 in tl.range(begin, end, BLOCK_N):
        k = tl.reshape(key.load([batch, key_head, j0, 0]), [BLOCK_N, DIM])
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        j = j0 + tl.arange(0, BLOCK_N)
        d = j[None, :] - i[:, None]
        if scores is not None:
            reach = tl.minimum(tl.maximum(d, low[:, None]), high[:, None])
            logits += tl.load(rows_of_scores[:, None] + reach, mask=there[:, None]) * LOG2E
        seen = there[:, None] & (j < keys)[None, :]
        if left is not None:
            seen = seen & (d >= near)
        if right is not None:
            seen = seen & (d <= far)
        logits = tl.where(seen, logits, -float("inf"))
        if mask is not None:
            spots = mask + head.to(tl.int64)[:, None] * mask_h + i.to(tl.int64)[:, None] * mask_q
            found = tl.load(spots + j.to(tl.int64)[None, :] * mask_k, mask=seen, other=0)
            if mask.dtype.element_ty.is_floating():
                logits += found.to(tl.float32) * LOG2E
            else:
                logits = tl.where(found != 0, logits, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        p = tl.exp2(logits - finite[:, None])
        shrink = tl.exp2(peak - finite)
        weight = weight * shrink + tl.sum(p, 1)
        v = tl.reshape(value.load([batch, key_head, j0, 0]), [BLOCK_N, VALUE_DIM])
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
        peak = new_peak

    place = tl.program_id(0).to(tl.int64) * ROWS + row
    tl.store(weights + place * 2, peak)
    tl.store(weights + place * 2 + 1, weight)
    column = tl.arange(0, VALUE_DIM)
    tl.store(totals + place[:, None] * VALUE_DIM + column[None, :], total)


@triton.jit(do_not_specialize=CHANGING)
def merge_kernel(
    totals, weights, output, statistics, output_b, output_h, output_n, statistics_row,
    statistics_size, heads, parts, queries,
    ROWS: tl.constexpr, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write one query's output and statistics from its parts."""
    i = tl.program_id(0) % queries
    unit = tl.program_id(0) // queries
    batch = unit // heads
    head = unit % heads
    row = (head % GROUP) * queries + i
    number = tl.arange(0, PARTS)
    first = (unit // GROUP).to(tl.int64) * parts
    place = (first + number) * ROWS + row
    there = number < parts
    peaks = tl.load(weights + place * 2, mask=there, other=-float("inf"))
    sums = tl.load(weights + place * 2 + 1, mask=there, other=0.0)
    peak = tl.max(peaks, 0)
    share = tl.exp2(peaks - tl.where(peak == -float("inf"), 0.0, peak))
    weight = tl.sum(share * sums, 0)
    column = tl.arange(0, VALUE_DIM)
    parted = tl.load(
        totals + place[:, None] * VALUE_DIM + column[None, :], mask=there[:, None], other=0.0
    )
    total = tl.sum(parted * share[:, None], 0)
    blind = weight == 0
    weight = tl.where(blind, 1.0, weight)
    peak = tl.where(blind, float("inf"), peak)
    where = unit.to(tl.int64) * statistics_row + i
    if SPLIT:
        tl.store(statistics + where, peak)
        tl.store(statistics + statistics_size + where, tl.log2(weight))
    else:
        tl.store(statistics + where, peak + tl.log2(weight))
    spot = batch.to(tl.int64) * output_b + head.to(tl.int64) * output_h + i.to(tl.int64) * output_n
    total = (total / weight).to(output.dtype.element_ty)
    tl.store(output + spot + column, total, mask=column < VALUE_WIDTH)
