"""The gradient of the query, and with it what the other gradients need.

One kernel for the query and one for key and value (backward_key.py) rather than one with atomics,
so that every sum has one order. Both compute the weights again from the statistics of the forward
pass. This one also leaves behind `delta`, for each query Σ output · gradient − (gradient of the
log-sum-exp), and sums dS along its diagonals for the gradient of the scores.

In half precision the output has been rounded, and so no row of dS sums to what it must. For the
gradient of key scores, of which gates take cumulative sums, that is more than is left of it: with
EXACT delta is mended by what a row sums to, and left behind when the row is done.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tisa.ops.triton import columns, scores, tiles
from tisa.ops.triton.arguments import CHANGING


class Sums(NamedTuple):
    """What a program has summed of dS: below the band, above it, inside."""

    below: Any
    above: Any
    inside: Any


class Own(NamedTuple):
    """The queries of a tile: theirs, the gradient that comes back, statistics, delta."""

    q: Any
    grad: Any
    norm: Any
    # With SPLIT: what a weight relative to the row's largest is multiplied by.
    share: Any
    dot: Any
    # What a row of dS sums to: the gradient of its log-sum-exp.
    total: Any


@triton.jit
def query_delta(here, i0, query, returned, written, FIXED: tl.constexpr):
    """Write delta of BLOCK queries; return what was read for it, and what the gradient reads."""
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    statistics = returned.statistics
    i = i0 + tl.arange(0, BLOCK)
    places = here.row.to(tl.int64) * statistics.row + here.row_start + i
    norm = tl.load(statistics.pointer + places)
    share = norm
    if FIXED.SPLIT:
        share = tl.load(statistics.pointer + statistics.size + places)
    o = tiles.rows(returned.output, here, i0, BLOCK, FIXED.VALUE_DIM, FIXED.VALUE_WIDTH)
    grad = tiles.rows(returned.gradient, here, i0, BLOCK, FIXED.VALUE_DIM, FIXED.VALUE_WIDTH)
    # Before delta is written: no load is moved up past a store.
    q = tiles.rows(query, here, i0, BLOCK, FIXED.DIM, FIXED.WIDTH)
    dot = tl.sum(o.to(tl.float32) * grad.to(tl.float32), 1)
    total = 0.0
    if statistics.gradient is not None:
        gradient = tl.load(statistics.gradient + places, mask=i < here.queries, other=0.0)
        total = tiles.in_units(gradient, FIXED)
        dot -= total
    if not FIXED.EXACT:
        tl.store(written.delta + places, dot)
    return Own(q, grad, norm, share, dot, total)


@triton.jit
def query_gradient(
    found, own, here, i0, frame, band, edges, inside, sums, key, value, key_scores, rules,
    returned, written, FIXED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of BLOCK queries; return the sums of a program with theirs.

    `inside`: the diagonals that have sums of their own, which lie at `sums`.
    """
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    DIM: tl.constexpr = FIXED.DIM
    PARTS: tl.constexpr = FIXED.PARTS
    grad_query = written.query
    sum_row = tl.zeros([BLOCK, 4], tl.float32)
    sum_below, sum_above, sum_inside = found.below, found.above, found.inside
    r = tiles.ranges(i0, here.keys, frame.near, frame.far, band.low, band.high, BLOCK, BLOCK)
    factor = columns.factor_of(tiles.in_units(rules.scale, FIXED), key_scores, FIXED)
    key_head = here.head // FIXED.GROUP
    total = tl.zeros([BLOCK, DIM], tl.float32)
    # The upper half of a tile's diagonals is the lower half of the next tile's: it waits for that.
    SLOT: tl.constexpr = PARTS * BLOCK // 2
    spot = scores.distances(0, BLOCK, PARTS)
    is_first = tl.arange(0, SLOT) // PARTS % PARTS == 0
    waiting = -1
    low_part = tl.zeros([SLOT], tl.float32)
    high_part = tl.zeros([SLOT], tl.float32)
    for phase in tl.static_range(2):
        of_keys = columns.of_tile(key_scores, here, here.head, 0, r, phase == 0, FIXED)
        for number in tl.range(0, tiles.count_of(r, phase == 0)):
            if phase == 0:
                j0 = tiles.plain_tile(number, r) * BLOCK
                edge = tl.where(number < r.b - r.a, edges.below, edges.above)
            else:
                j0 = tiles.other_tile(number, r) * BLOCK
                edge = 0.0
            j0 = tl.multiple_of(j0, BLOCK)
            if phase == 1 and sums is not None:
                diagonal = (j0 - i0) // BLOCK
                is_inside = (diagonal >= inside.first) & (diagonal < inside.end)
                slot = sums + (diagonal - inside.first) * BLOCK + spot
                # Asked for now, needed at the end.
                old_low = tl.load(slot, mask=is_first & is_inside, other=0.0)
                old_high = tl.load(slot + BLOCK // 2, mask=is_first & is_inside, other=0.0)
            if phase == 1 and rules.scores is not None:
                window = tiles.score_window(rules, here.head, j0 - i0, band, frame, FIXED)
            at = [here.batch, key_head, here.token + j0, 0]
            k = tl.reshape(key.load(at), [BLOCK, DIM])
            v = tl.reshape(value.load(at), [BLOCK, FIXED.VALUE_DIM])
            logits = tl.dot(own.q, tl.trans(k), input_precision=FIXED.PRECISION)
            logits = columns.with_keys(logits, of_keys, key_scores, rules.scale) * factor
            after = number + 1
            of_keys = columns.of_tile(key_scores, here, here.head, after, r, phase == 0, FIXED)
            grad_p = tl.dot(own.grad, tl.trans(v), input_precision=FIXED.PRECISION)
            if phase == 1:
                if rules.scores is not None:
                    logits += tiles.spread(window, FIXED)
                logits = tiles.hide(logits, rules, i0, j0, here.keys, frame, FIXED)
            elif FIXED.SPLIT:
                # As the forward pass adds up, so that large numbers are rounded alike.
                logits += edge
            if rules.mask is not None:
                logits = tiles.add_mask(logits, rules.mask, here, here.head, i0, j0, FIXED)
            if FIXED.SPLIT:
                p = tiles.power(logits - own.norm[:, None], FIXED) * own.share[:, None]
            else:
                p = tl.exp2(logits + (edge - own.norm)[:, None])
            if rules.dropout is not None:
                kept = tiles.kept(
                    rules.dropout, here, here.head, i0, j0, rules.dropout.kept_scale, FIXED
                )
                grad_p *= kept
            grad_logits = p * (grad_p - own.dot[:, None])
            if grad_query is not None:
                total = tl.dot(grad_logits.to(k.dtype), k, total, input_precision=FIXED.PRECISION)
            if FIXED.EXACT:
                # As the tensor units leave a row, in the registers of four threads: added up by
                # each of them, and over all four once in the end.
                quads = tl.reshape(grad_logits, [BLOCK, BLOCK // 8, 4, 2])
                sum_row += tl.sum(tl.sum(quads, 3), 1)
            if sums is not None:
                if j0 + BLOCK - 1 - i0 <= band.low:
                    sum_below += tl.sum(grad_logits, 1)
                if FIXED.BOTH_SIDES:  # noqa: SIM102 (one is for the compiler)
                    if j0 - i0 - (BLOCK - 1) >= band.high:
                        sum_above += tl.sum(grad_logits, 1)
                if phase == 1:  # noqa: SIM102
                    if is_inside:
                        lowest, lower, upper, highest = scores.diagonal_sums(
                            grad_logits, tl.minimum(diagonal * diagonal, 0), BLOCK, PARTS
                        )
                        old_low += scores.all_parts(low_part + lowest, BLOCK, PARTS)
                        old_high += scores.all_parts(high_part + lower, BLOCK, PARTS)
                        tl.store(slot, old_low, mask=is_first)
                        tl.store(slot + BLOCK // 2, old_high, mask=is_first)
                        sum_inside += (lowest + lower) + (upper + highest)
                        low_part = upper
                        high_part = highest
                        waiting = diagonal + 1 - inside.first

    if sums is not None:  # noqa: SIM102
        if waiting >= 0:
            slot = sums + waiting * BLOCK + spot
            old_low = tl.load(slot, mask=is_first) + scores.all_parts(low_part, BLOCK, PARTS)
            old_high = tl.load(slot + BLOCK // 2, mask=is_first)
            tl.store(slot, old_low, mask=is_first)
            tl.store(
                slot + BLOCK // 2,
                old_high + scores.all_parts(high_part, BLOCK, PARTS),
                mask=is_first,
            )
    if FIXED.EXACT:
        statistics = returned.statistics
        places = here.row.to(tl.int64) * statistics.row + here.row_start + i0
        tl.store(
            written.delta + places + tl.arange(0, BLOCK), own.dot + tl.sum(sum_row, 1) - own.total
        )
    if grad_query is not None:
        tiles.store_rows(grad_query, total * rules.scale, here, i0, here.queries, FIXED.WIDTH)
    return Sums(sum_below, sum_above, sum_inside)


@triton.jit(do_not_specialize=CHANGING)
def query_kernel(
    query, key, value, key_scores, rules, returned, written, counts, sequences, programs,
    queries, keys, start, FIXED: tl.constexpr,
):  # fmt: skip
    """Write delta, the query's gradient and a program's sums for the gradient of the scores.

    `written.query` or `written.sums` may be None; without both only delta is computed (but EXACT
    takes the whole row for it). A program
    takes some of a head's tiles of queries, all of one head so that their sums are one.
    `written.sides` holds for each program what lies below the band, and with BOTH_SIDES what lies
    above it; otherwise what lies in it, from which that follows (`scores.entry_kernel`).
    """
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    head = tl.program_id(0) // programs
    frame = tiles.frame_of(rules, queries, keys, start)
    ends = tiles.band_ends(rules, head)
    band = tiles.band_of(rules, ends, frame)
    edges = tiles.edge_scores(rules, head, band, frame, FIXED)
    inside = scores.Diagonals(0, 0)
    sums = written.sums
    if sums is not None:
        inside = scores.diagonals(band, frame, BLOCK)
        sums += tl.program_id(0).to(tl.int64) * scores.numbers_of_sums(frame, BLOCK)
        scores.clear(sums, inside, BLOCK)
        # Other threads add to them than have cleared them.
        tl.debug_barrier()
    found = Sums(
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK * FIXED.PARTS // 2], tl.float32),
    )
    items = sequences * counts.tiles
    for begin in tl.range(0, items, programs):
        # There and back again, so that nobody has only long rows of a causal mask.
        number = tl.program_id(0) % programs
        back = begin // programs % 2 == 1
        item = begin + tl.where(back, programs - 1 - number, number)
        is_there = item < items
        item = tl.minimum(item, items - 1)
        tile = item % counts.tiles
        if FIXED.BACKWARDS:
            tile = counts.tiles - 1 - tile
        here = tiles.place(item // counts.tiles, head, counts.heads, rules, frame)
        i0 = tile * BLOCK
        if is_there & (i0 < here.queries):
            own = query_delta(here, i0, query, returned, written, FIXED)
            if written.query is not None or sums is not None or FIXED.EXACT:
                found = query_gradient(
                    found, own, here, i0, frame, band, edges, inside, sums,
                    key, value, key_scores, rules, returned, written, FIXED,
                )  # fmt: skip
    if written.sides is not None:
        tl.debug_barrier()
        some_below, some_above = scores.outside(sums, inside, band, BLOCK)
        sides = written.sides + tl.program_id(0) * 2
        tl.store(sides, tl.sum(found.below, 0) + some_below)
        if FIXED.BOTH_SIDES:
            tl.store(sides + 1, tl.sum(found.above, 0) + some_above)
        else:
            tl.store(sides + 1, tl.sum(found.inside, 0) - some_below - some_above)
