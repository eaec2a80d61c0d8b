"""Keys that the window does not hide (`always`), added to what the other kernels have done.

The forward kernel has left an output and a sum of weights for the keys inside the window. Here the
few others are added in place, so that output and statistics are those of all keys. With these the
kernels of the backward pass find the true weights, and what they leave is the windowed part of
each gradient; the other part is added here. A key that the window shows is not counted again.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tisa.ops.triton import tiles
from tisa.ops.triton.arguments import CHANGING


class Kind(NamedTuple):
    """How many places each sequence has, and whether later keys are hidden."""

    COUNT: int
    CAUSAL: bool


class Parts(NamedTuple):
    """What the tiles of queries leave: of dS and, for each place, of the gradients of its key.

    `by_query`: (sequences, heads, COUNT, queries); `by_key`: (sequences, heads, COUNT, tiles,
    WIDTH + VALUE_WIDTH + 1).
    """

    by_query: Any
    by_key: Any


@triton.jit
def key_row(tensor, here, head, j, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return one row of keys or values."""
    column = tl.arange(0, DIM)
    pointer = tensor.pointer + tl.cast(here.batch, tl.int64) * tensor.batch
    pointer += head.to(tl.int64) * tensor.head + (here.token + j).to(tl.int64) * tensor.row
    return tl.load(pointer + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def place_of(always, sequence, NUMBER: tl.constexpr, keys, KIND: tl.constexpr):
    """Return a place, 0 where there is no such key, and whether it counts: once if named twice."""
    places = always + sequence * KIND.COUNT
    j = tl.load(places + NUMBER)
    counts = (j >= 0) & (j < keys)
    for before in tl.static_range(NUMBER):
        counts = counts & (tl.load(places + before) != j)
    return tl.where(counts, j, 0).to(tl.int32), counts


@triton.jit
def place_logits(
    q, k, key_scores, rules, here, i, j, counts, frame, band, KIND: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    """Return the logits of one key, in the kernel's units; −inf where it adds nothing."""
    logits = tl.sum(q * k[None, :], 1) * rules.scale
    if key_scores is not None:
        pointer = key_scores.pointer + tl.cast(here.batch, tl.int64) * key_scores.batch
        logits += tl.load(pointer + here.head.to(tl.int64) * key_scores.head + here.token + j)
    logits = tiles.in_units(logits, FIXED)
    distance = j - i
    if rules.scores is not None:
        reach = tl.minimum(tl.maximum(distance, band.low), band.high)
        row = rules.scores + here.head.to(tl.int64) * frame.span + frame.shift
        logits += tiles.in_units(tl.load(row + reach), FIXED)
    if rules.mask is not None:
        mask = rules.mask
        pointer = mask.pointer + tl.cast(here.batch, tl.int64) * mask.batch
        pointer += here.head.to(tl.int64) * mask.head + j.to(tl.int64) * mask.key
        value = tl.load(pointer + i.to(tl.int64) * mask.query, mask=i < here.queries, other=0)
        logits += tiles.added_by(mask, value, FIXED)
    seen = counts & ((distance < frame.near) | (distance > frame.far))
    if KIND.CAUSAL:
        seen = seen & (distance <= frame.start)
    return tl.where(seen & (i < here.queries), logits, -float("inf"))


@triton.jit(do_not_specialize=CHANGING)
def join_kernel(
    query, key, value, key_scores, rules, always, output, statistics, counts, queries, keys, start,
    KIND: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Add the keys to the output and the statistics of BLOCK queries."""
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    COUNT: tl.constexpr = KIND.COUNT
    frame = tiles.frame_of(rules, queries, keys, start)
    unit = tl.program_id(0) // counts.tiles
    sequence = unit // counts.heads
    here = tiles.place(sequence, unit % counts.heads, counts.heads, rules, frame)
    i0 = tl.program_id(0) % counts.tiles * BLOCK
    if i0 >= here.queries:
        return
    band = tiles.band_of(rules, tiles.band_ends(rules, here.head), frame)
    i = i0 + tl.arange(0, BLOCK)
    places = statistics.pointer + here.row.to(tl.int64) * statistics.row + here.row_start + i
    peak = tl.load(places)
    blind = peak == float("inf")
    peak = tl.where(blind, -float("inf"), peak)
    weight = tl.where(blind, 0.0, 1.0)
    if FIXED.SPLIT:
        weight = tl.where(blind, 0.0, 1.0 / tl.load(places + statistics.size))
    q = tiles.rows(query, here, i0, BLOCK, FIXED.DIM, FIXED.WIDTH).to(tl.float32)
    total = tiles.rows(output, here, i0, BLOCK, FIXED.VALUE_DIM, FIXED.VALUE_WIDTH)
    total = total.to(tl.float32) * weight[:, None]
    key_head = here.head // FIXED.GROUP
    for number in tl.static_range(COUNT):
        j, counted = place_of(always, sequence, number, here.keys, KIND)
        k = key_row(key, here, key_head, j, FIXED.DIM, FIXED.WIDTH)
        v = key_row(value, here, key_head, j, FIXED.VALUE_DIM, FIXED.VALUE_WIDTH)
        logits = place_logits(
            q, k, key_scores, rules, here, i, j, counted, frame, band, KIND, FIXED
        )
        new_peak = tl.maximum(peak, logits)
        finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        p = tiles.power(logits - finite, FIXED)
        shrink = tiles.power(peak - finite, FIXED)
        weight = weight * shrink + p
        total = total * shrink[:, None] + p[:, None] * v[None, :]
        peak = new_peak
    blind = weight == 0
    weight = tl.where(blind, 1.0, weight)
    peak = tl.where(blind, float("inf"), peak)
    inside = i < here.queries
    if FIXED.SPLIT:
        tl.store(places, peak, mask=inside)
        tl.store(places + statistics.size, 1.0 / weight, mask=inside)
    else:
        tl.store(places, peak + tl.log2(weight), mask=inside)
    tiles.store_rows(output, total / weight[:, None], here, i0, here.queries, FIXED.VALUE_WIDTH)


@triton.jit(do_not_specialize=CHANGING)
def part_kernel(
    query, key, value, key_scores, rules, always, returned, grad_query, left, counts,
    queries, keys, start, KIND: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Add the keys' part to the gradient of BLOCK queries; leave what theirs are made of."""
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    COUNT: tl.constexpr = KIND.COUNT
    DIM: tl.constexpr = FIXED.DIM
    WIDTH: tl.constexpr = FIXED.WIDTH + FIXED.VALUE_WIDTH + 1
    frame = tiles.frame_of(rules, queries, keys, start)
    unit = tl.program_id(0) // counts.tiles
    sequence = unit // counts.heads
    here = tiles.place(sequence, unit % counts.heads, counts.heads, rules, frame)
    tile = tl.program_id(0) % counts.tiles
    i0 = tile * BLOCK
    if i0 >= here.queries:
        return
    band = tiles.band_of(rules, tiles.band_ends(rules, here.head), frame)
    i = i0 + tl.arange(0, BLOCK)
    inside = i < here.queries
    statistics = returned.statistics
    places = here.row.to(tl.int64) * statistics.row + here.row_start + i
    norm = tl.load(statistics.pointer + places)
    share = norm
    if FIXED.SPLIT:
        share = tl.load(statistics.pointer + statistics.size + places)
    o = tiles.rows(returned.output, here, i0, BLOCK, FIXED.VALUE_DIM, FIXED.VALUE_WIDTH)
    grad = tiles.rows(returned.gradient, here, i0, BLOCK, FIXED.VALUE_DIM, FIXED.VALUE_WIDTH)
    grad = grad.to(tl.float32)
    dot = tl.sum(o.to(tl.float32) * grad, 1)
    if statistics.gradient is not None:
        back = tl.load(statistics.gradient + places, mask=inside, other=0.0)
        dot -= tiles.in_units(back, FIXED)
    q = tiles.rows(query, here, i0, BLOCK, FIXED.DIM, FIXED.WIDTH).to(tl.float32)
    total = tl.zeros([BLOCK, DIM], tl.float32)
    key_head = here.head // FIXED.GROUP
    column = tl.arange(0, FIXED.DIM)
    of_value = tl.arange(0, FIXED.VALUE_DIM)
    for number in tl.static_range(COUNT):
        j, counted = place_of(always, sequence, number, here.keys, KIND)
        k = key_row(key, here, key_head, j, FIXED.DIM, FIXED.WIDTH)
        v = key_row(value, here, key_head, j, FIXED.VALUE_DIM, FIXED.VALUE_WIDTH)
        logits = place_logits(
            q, k, key_scores, rules, here, i, j, counted, frame, band, KIND, FIXED
        )
        p = tiles.power(logits - norm, FIXED)
        if FIXED.SPLIT:
            p = p * share
        p = tl.where(inside, p, 0.0)
        by_logit = tl.where(inside, p * (tl.sum(grad * v[None, :], 1) - dot), 0.0)
        total += by_logit[:, None] * k[None, :]
        row = (unit * COUNT + number).to(tl.int64)
        if left.by_query is not None:
            tl.store(left.by_query + row * queries + i, by_logit, mask=inside)
        if left.by_key is not None:
            spot = left.by_key + (row * counts.tiles + tile) * WIDTH
            of_key = tl.sum(by_logit[:, None] * q, 0) * rules.scale
            tl.store(spot + column, of_key, mask=column < FIXED.WIDTH)
            mixed = tl.sum(p[:, None] * grad, 0)
            tl.store(spot + FIXED.WIDTH + of_value, mixed, mask=of_value < FIXED.VALUE_WIDTH)
            tl.store(spot + WIDTH - 1, tl.sum(by_logit, 0))
    if grad_query is not None:
        old = tiles.rows(grad_query, here, i0, BLOCK, FIXED.DIM, FIXED.WIDTH).to(tl.float32)
        tiles.store_rows(grad_query, old + total * rules.scale, here, i0, here.queries, FIXED.WIDTH)


@triton.jit
def add_row(tensor, here, head, j, added, WIDTH: tl.constexpr):
    """Add to one row of a gradient of keys or values."""
    column = tl.arange(0, added.shape[0])
    pointer = tensor.pointer + tl.cast(here.batch, tl.int64) * tensor.batch
    pointer += head.to(tl.int64) * tensor.head + (here.token + j).to(tl.int64) * tensor.row
    old = tl.load(pointer + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(
        pointer + column, (old + added).to(tensor.pointer.dtype.element_ty), mask=column < WIDTH
    )


@triton.jit(do_not_specialize=CHANGING)
def of_key_kernel(
    rules, always, left, grad_key, grad_value, grad_key_scores, counts, queries, keys, start,
    KIND: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Add up, in one order, what the tiles have left for the keys of one sequence and key head."""
    STEP: tl.constexpr = 16
    COUNT: tl.constexpr = KIND.COUNT
    GROUP: tl.constexpr = FIXED.GROUP
    DIM: tl.constexpr = FIXED.DIM
    VALUE_DIM: tl.constexpr = FIXED.VALUE_DIM
    WIDTH: tl.constexpr = FIXED.WIDTH + FIXED.VALUE_WIDTH + 1
    key_heads = counts.heads // FIXED.GROUP
    sequence = tl.program_id(0) // key_heads
    key_head = tl.program_id(0) % key_heads
    frame = tiles.frame_of(rules, queries, keys, start)
    here = tiles.place(sequence, key_head, counts.heads, rules, frame)
    column = tl.arange(0, FIXED.DIM)
    of_value = tl.arange(0, FIXED.VALUE_DIM)
    present = tl.cdiv(here.queries, FIXED.BLOCK_M)
    for number in tl.static_range(COUNT):
        j, counted = place_of(always, sequence, number, here.keys, KIND)
        if counted:
            by_key = tl.zeros([STEP, DIM], tl.float32)
            by_value = tl.zeros([STEP, VALUE_DIM], tl.float32)
            for one in tl.static_range(GROUP):
                head = key_head * FIXED.GROUP + one
                row = ((sequence * counts.heads + head) * COUNT + number).to(tl.int64)
                of_head = tl.zeros([STEP], tl.float32)
                for first in tl.range(0, present, STEP):
                    tile = first + tl.arange(0, STEP)
                    there = tile < present
                    spot = left.by_key + (row * counts.tiles + tile) * WIDTH
                    by_key += tl.load(
                        spot[:, None] + column[None, :],
                        mask=there[:, None] & (column < FIXED.WIDTH)[None, :], other=0.0,
                    )  # fmt: skip
                    by_value += tl.load(
                        spot[:, None] + FIXED.WIDTH + of_value[None, :],
                        mask=there[:, None] & (of_value < FIXED.VALUE_WIDTH)[None, :], other=0.0,
                    )  # fmt: skip
                    of_head += tl.load(spot + WIDTH - 1, mask=there, other=0.0)
                if grad_key_scores is not None:
                    pointer = grad_key_scores.pointer
                    pointer += tl.cast(here.batch, tl.int64) * grad_key_scores.batch
                    pointer += head.to(tl.int64) * grad_key_scores.head + here.token + j
                    tl.store(pointer, tl.load(pointer) + tl.sum(of_head, 0))
            add_row(grad_key, here, key_head, j, tl.sum(by_key, 0), FIXED.WIDTH)
            add_row(grad_value, here, key_head, j, tl.sum(by_value, 0), FIXED.VALUE_WIDTH)


@triton.jit(do_not_specialize=CHANGING)
def of_score_kernel(
    rules, always, left, grad_scores, counts, sequences, queries, keys, start,
    STEP: tl.constexpr, KIND: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Add dS of the keys to the gradient of one head's scores; outside the band to its edges."""
    COUNT: tl.constexpr = KIND.COUNT
    head = tl.program_id(0)
    frame = tiles.frame_of(rules, queries, keys, start)
    band = tiles.band_of(rules, tiles.band_ends(rules, head), frame)
    row = grad_scores + head.to(tl.int64) * frame.span + frame.shift
    below = tl.zeros([STEP], tl.float32)
    above = tl.zeros([STEP], tl.float32)
    for first in tl.range(-frame.shift, frame.span - frame.shift, STEP):
        distance = first + tl.arange(0, STEP)
        total = tl.zeros([STEP], tl.float32)
        for sequence in tl.range(0, sequences):
            here = tiles.place(sequence, head, counts.heads, rules, frame)
            for number in tl.static_range(COUNT):
                j, counted = place_of(always, sequence, number, here.keys, KIND)
                i = j - distance
                there = counted & (i >= 0) & (i < here.queries)
                part = ((sequence * counts.heads + head) * COUNT + number).to(tl.int64)
                total += tl.load(left.by_query + part * queries + i, mask=there, other=0.0)
        inside = (distance >= band.low) & (distance <= band.high)
        below += tl.where(distance < band.low, total, 0.0)
        above += tl.where(distance > band.high, total, 0.0)
        old = tl.load(row + distance, mask=inside, other=0.0)
        tl.store(row + distance, old + total, mask=inside)
    # Other threads may have written the edges.
    tl.debug_barrier()
    tl.store(row + band.low, tl.load(row + band.low) + tl.sum(below, 0))
    tl.debug_barrier()
    tl.store(row + band.high, tl.load(row + band.high) + tl.sum(above, 0))
