"""Few queries against many keys: one new token and its cache.

A program for the queries of one key head would leave most of the chip idle, so the keys are cut
into parts, a program for each, and a second kernel adds up what the parts found. All query heads
that share the key head are rows of one tile: the cache is read once.
"""

import triton
import triton.language as tl

from tisa.ops.triton import tiles
from tisa.ops.triton.arguments import CHANGING


@triton.jit(do_not_specialize=CHANGING)
def decode_kernel(
    query, key, value, key_scores, rules, totals, weights, key_heads, parts, part, queries, keys,
    start, FIXED: tl.constexpr,
):  # fmt: skip
    """Write what `part` keys contribute: a maximum, a sum and a weighted sum for each row."""
    ROWS: tl.constexpr = FIXED.BLOCK_M
    BLOCK_N: tl.constexpr = FIXED.BLOCK_N
    VALUE_DIM: tl.constexpr = FIXED.VALUE_DIM
    unit = tl.program_id(0) // parts
    batch = unit // key_heads
    key_head = unit % key_heads
    row = tl.arange(0, ROWS)
    there = row < FIXED.GROUP * queries
    head = key_head * FIXED.GROUP + tl.where(there, row // queries, 0)
    i = row % queries
    frame = tiles.frame_of(rules, queries, keys, start)
    mask = rules.mask
    if rules.scores is not None:
        band = tiles.band_of(rules, tiles.band_ends(rules, head), frame)
        low = tl.zeros([ROWS], tl.int32) + band.low
        high = tl.zeros([ROWS], tl.int32) + band.high
        rows_of_scores = rules.scores + head.to(tl.int64) * frame.span + frame.shift
    if key_scores is not None:
        rows_of_keys = key_scores.pointer + batch.to(tl.int64) * key_scores.batch
        rows_of_keys += head.to(tl.int64) * key_scores.head
    dim = tl.arange(0, FIXED.DIM)
    places = batch.to(tl.int64) * query.batch + head.to(tl.int64) * query.head
    places += i.to(tl.int64) * query.row
    q = tl.load(
        query.pointer + places[:, None] + dim[None, :],
        mask=there[:, None] & (dim < FIXED.WIDTH)[None, :], other=0.0,
    )  # fmt: skip

    begin = tl.program_id(0) % parts * part
    end = tl.minimum(tl.minimum(begin + part, keys), queries + frame.far)
    begin = tl.maximum(begin, tl.maximum(frame.near, 0) // BLOCK_N * BLOCK_N)
    total = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    for j0 in tl.range(begin, end, BLOCK_N):
        k = tl.reshape(key.load([batch, key_head, j0, 0]), [BLOCK_N, FIXED.DIM])
        logits = tl.dot(q, tl.trans(k), input_precision=FIXED.PRECISION) * rules.scale
        j = j0 + tl.arange(0, BLOCK_N)
        d = j[None, :] - i[:, None]
        if rules.scores is not None:
            reach = tl.minimum(tl.maximum(d, low[:, None]), high[:, None])
            found = tl.load(rows_of_scores[:, None] + reach, mask=there[:, None])
            logits += tiles.in_units(found, FIXED)
        if key_scores is not None:
            inside = there[:, None] & (j < keys)[None, :]
            found = tl.load(rows_of_keys[:, None] + j[None, :], mask=inside, other=0.0)
            logits += tiles.in_units(found, FIXED)
        seen = there[:, None] & (j < keys)[None, :]
        if rules.left is not None:
            seen = seen & (d >= frame.near)
        if rules.right is not None:
            seen = seen & (d <= frame.far)
        logits = tl.where(seen, logits, -float("inf"))
        if mask is not None:
            spots = (
                mask.pointer
                + batch.to(tl.int64) * mask.batch
                + (head.to(tl.int64) * mask.head + i.to(tl.int64) * mask.query)[:, None]
            )
            found = tl.load(spots + j.to(tl.int64)[None, :] * mask.key, mask=seen, other=0)
            logits += tiles.added_by(mask, found, FIXED)
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        p = tiles.power(logits - finite[:, None], FIXED)
        shrink = tiles.power(peak - finite, FIXED)
        weight = weight * shrink + tl.sum(p, 1)
        v = tl.reshape(value.load([batch, key_head, j0, 0]), [BLOCK_N, VALUE_DIM])
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision=FIXED.PRECISION)
        peak = new_peak

    place = tl.program_id(0).to(tl.int64) * ROWS + row
    tl.store(weights + place * 2, peak)
    tl.store(weights + place * 2 + 1, weight)
    column = tl.arange(0, VALUE_DIM)
    tl.store(totals + place[:, None] * VALUE_DIM + column[None, :], total)


@triton.jit(do_not_specialize=CHANGING)
def merge_kernel(
    totals, weights, output, statistics, heads, parts, queries,
    PARTS: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Write one query's output and statistics from its parts, at most PARTS."""
    ROWS: tl.constexpr = FIXED.BLOCK_M
    GROUP: tl.constexpr = FIXED.GROUP
    VALUE_DIM: tl.constexpr = FIXED.VALUE_DIM
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
    share = tiles.power(peaks - tl.where(peak == -float("inf"), 0.0, peak), FIXED)
    weight = tl.sum(share * sums, 0)
    column = tl.arange(0, VALUE_DIM)
    parted = tl.load(
        totals + place[:, None] * VALUE_DIM + column[None, :], mask=there[:, None], other=0.0
    )
    total = tl.sum(parted * share[:, None], 0)
    blind = weight == 0
    weight = tl.where(blind, 1.0, weight)
    peak = tl.where(blind, float("inf"), peak)
    where = unit.to(tl.int64) * statistics.row + i
    if FIXED.SPLIT:
        tl.store(statistics.pointer + where, peak)
        tl.store(statistics.pointer + statistics.size + where, 1.0 / weight)
    else:
        tl.store(statistics.pointer + where, peak + tl.log2(weight))
    spot = batch.to(tl.int64) * output.batch + head.to(tl.int64) * output.head
    spot += i.to(tl.int64) * output.row
    total = (total / weight).to(output.pointer.dtype.element_ty)
    tl.store(output.pointer + spot + column, total, mask=column < FIXED.VALUE_WIDTH)
