"""The gradient of the query, and with it what the other gradients need.

One kernel for the query and one for key and value (backward_key.py) rather than one with atomics,
so that every sum has one order. Both compute the weights again from the statistics of the forward
pass. This one also leaves behind `delta`, for each query Σ output · gradient − (gradient of the
log-sum-exp), and sums dS along its diagonals for the gradient of the scores.
"""

import triton
import triton.language as tl

from tisa.ops.triton.scores import (
    all_parts,
    clear,
    diagonal_sums,
    diagonals,
    distances,
    outside,
)
from tisa.ops.triton.tiles import (
    CHANGING,
    LOG2E,
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
    rows,
    score_window,
    spread,
    visible_distances,
)


@triton.jit
def query_tile(
    sum_below, sum_above, sum_inside, sums, first_diagonal, end_diagonal,
    head, batch, token, row, row_start, i0, queries, keys, near, far, low, high, below, above,
    query, key, value, output, grad_output, scores, mask, seed,
    grad_statistics, statistics, delta, grad_query,
    query_b, query_h, query_n, output_b, output_h, output_n, upstream_b, upstream_h, upstream_n,
    grad_b, grad_h, grad_n, mask_b, mask_h, mask_q, mask_k, statistics_row, statistics_size,
    left, right, shift, span, scale, threshold, kept_scale,
    BLOCK: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, GROUP: tl.constexpr, KEY_MASK: tl.constexpr, RAGGED: tl.constexpr,
    BOTH_SIDES: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write delta and the gradient of BLOCK queries; return the sums of a program with theirs."""
    i = i0 + tl.arange(0, BLOCK)
    places = row.to(tl.int64) * statistics_row + row_start + i
    norm = tl.load(statistics + places)
    if SPLIT:
        log_weight = tl.load(statistics + statistics_size + places)
    left_over = queries - i0
    o = rows(
        output, batch, head, token + i0, left_over, output_b, output_h, output_n,
        BLOCK, VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    grad = rows(
        grad_output, batch, head, token + i0, left_over, upstream_b, upstream_h, upstream_n,
        BLOCK, VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    if grad_query is not None or sums is not None:
        q = rows(
            query, batch, head, token + i0, left_over, query_b, query_h, query_n, BLOCK, DIM, WIDTH
        )
    dot = tl.sum(o.to(tl.float32) * grad.to(tl.float32), 1)
    if grad_statistics is not None:
        dot -= tl.load(grad_statistics + places, mask=i < queries, other=0.0) * LOG2E
    tl.store(delta + places, dot)
    if grad_query is None and sums is None:
        return sum_below, sum_above, sum_inside

    first, a, b, c, d, last = ranges(i0, keys, near, far, low, high, BLOCK, BLOCK)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h
    scale2 = scale * LOG2E
    key_head = head // GROUP
    total = tl.zeros([BLOCK, DIM], tl.float32)
    # The upper half of a tile's diagonals is the lower half of the next tile's: it waits for that.
    SLOT: tl.constexpr = PARTS * BLOCK // 2
    spot = distances(0, BLOCK, PARTS)
    is_first = tl.arange(0, SLOT) // PARTS % PARTS == 0
    waiting = -1
    low_part = tl.zeros([SLOT], tl.float32)
    high_part = tl.zeros([SLOT], tl.float32)
    for phase in tl.static_range(2):
        count = (b - a) + (d - c) if phase == 0 else (a - first) + (c - b) + (last - d)
        for number in tl.range(0, count):
            if phase == 0:
                j0 = plain_tile(number, a, b, c) * BLOCK
                edge = tl.where(number < b - a, below, above)
            else:
                j0 = other_tile(number, first, a, b, c, d) * BLOCK
                edge = 0.0
            j0 = tl.multiple_of(j0, BLOCK)
            if phase == 1 and sums is not None:
                diagonal = (j0 - i0) // BLOCK
                is_inside = (diagonal >= first_diagonal) & (diagonal < end_diagonal)
                here = sums + (diagonal - first_diagonal) * BLOCK + spot
                # Asked for now, needed at the end.
                old_low = tl.load(here, mask=is_first & is_inside, other=0.0)
                old_high = tl.load(here + BLOCK // 2, mask=is_first & is_inside, other=0.0)
            if phase == 1 and scores is not None:
                window = score_window(
                    scores, head, j0 - i0, low, high, shift, span, BLOCK, BLOCK, False
                )
            k = tl.reshape(key.load([batch, key_head, token + j0, 0]), [BLOCK, DIM])
            v = tl.reshape(value.load([batch, key_head, token + j0, 0]), [BLOCK, VALUE_DIM])
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
            grad_p = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            if phase == 1:
                if scores is not None:
                    logits += spread(window, BLOCK, BLOCK, False)
                logits = hide(
                    logits, i0, j0, keys, near, far, left, right, BLOCK, BLOCK, False, RAGGED
                )
            if mask is not None:
                logits = add_mask(
                    logits, mask, i0, j0, queries, keys, mask_q, mask_k,
                    BLOCK, BLOCK, False, KEY_MASK,
                )  # fmt: skip
            if SPLIT:
                p = tl.exp2(((logits + edge) - norm[:, None]) - log_weight[:, None])
            else:
                p = tl.exp2(logits + (edge - norm)[:, None])
            if seed is not None:
                keep = kept(
                    seed, batch, head, token + i0, token + j0, threshold, BLOCK, BLOCK, False
                )
                grad_p = tl.where(keep, grad_p * kept_scale, 0.0)
            grad_logits = p * (grad_p - dot[:, None])
            if grad_query is not None:
                total = tl.dot(grad_logits.to(k.dtype), k, total, input_precision=PRECISION)
            if sums is not None:
                if j0 + BLOCK - 1 - i0 <= low:
                    sum_below += tl.sum(grad_logits, 1)
                if BOTH_SIDES:  # noqa: SIM102 (one is for the compiler)
                    if j0 - i0 - (BLOCK - 1) >= high:
                        sum_above += tl.sum(grad_logits, 1)
                if phase == 1:  # noqa: SIM102
                    if is_inside:
                        lowest, lower, upper, highest = diagonal_sums(
                            grad_logits, tl.minimum(diagonal * diagonal, 0), BLOCK, PARTS
                        )
                        old_low += all_parts(low_part + lowest, BLOCK, PARTS)
                        old_high += all_parts(high_part + lower, BLOCK, PARTS)
                        tl.store(here, old_low, mask=is_first)
                        tl.store(here + BLOCK // 2, old_high, mask=is_first)
                        sum_inside += (lowest + lower) + (upper + highest)
                        low_part = upper
                        high_part = highest
                        waiting = diagonal + 1 - first_diagonal

    if sums is not None:  # noqa: SIM102
        if waiting >= 0:
            here = sums + waiting * BLOCK + spot
            old_low = tl.load(here, mask=is_first) + all_parts(low_part, BLOCK, PARTS)
            old_high = tl.load(here + BLOCK // 2, mask=is_first)
            tl.store(here, old_low, mask=is_first)
            tl.store(
                here + BLOCK // 2, old_high + all_parts(high_part, BLOCK, PARTS), mask=is_first
            )
    if grad_query is not None:
        column = tl.arange(0, DIM)
        grad_query += batch.to(tl.int64) * grad_b + head.to(tl.int64) * grad_h
        places = grad_query + (token + i).to(tl.int64)[:, None] * grad_n + column[None, :]
        inside = (i < queries)[:, None] & (column < WIDTH)[None, :]
        tl.store(places, (total * scale).to(grad_query.dtype.element_ty), mask=inside)
    return sum_below, sum_above, sum_inside


@triton.jit(do_not_specialize=CHANGING)
def query_kernel(
    query, key, value, output, grad_output, scores, band, mask, seed, cu_seqlens, start_pointer,
    grad_statistics, statistics, delta, grad_query, sums, sides,
    query_b, query_h, query_n, output_b, output_h, output_n, upstream_b, upstream_h, upstream_n,
    grad_b, grad_h, grad_n, mask_b, mask_h, mask_q, mask_k, statistics_row, statistics_size,
    heads, sequences, tiles, programs, slots, queries, keys, start, left, right, shift, span,
    scale, threshold, kept_scale,
    BLOCK: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, GROUP: tl.constexpr, KEY_MASK: tl.constexpr, RAGGED: tl.constexpr,
    BACKWARDS: tl.constexpr, BOTH_SIDES: tl.constexpr, PARTS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write delta, the query's gradient and a program's sums for the gradient of the scores.

    `grad_query` or `sums` may be None; without both only delta is computed. A program takes
    some of a head's tiles of queries, all of one head so that their sums are one. `sides` holds for
    each program what lies below the band, and with BOTH_SIDES what lies above it; otherwise what
    lies in it, from which that follows (`scores.entry_kernel`).
    """
    head = tl.program_id(0) // programs
    own_start = start
    if start_pointer is not None:
        own_start = tl.load(start_pointer).to(tl.int32)
    near, far = visible_distances(own_start, left, right)
    one, other = band_ends(band, head)
    low, high = band_distances(scores, band, one, other, own_start, shift, span)
    below, above = edge_scores(scores, head, low, high, shift, span)
    first_diagonal, diagonal_count = 0, 0
    if sums is not None:
        first_diagonal, diagonal_count = diagonals(low, high, near, far, queries, keys, BLOCK)
        sums += tl.program_id(0).to(tl.int64) * slots * (BLOCK // 2)
        clear(sums, diagonal_count, BLOCK)
        # Other threads add to them than have cleared them.
        tl.debug_barrier()
    sum_below = tl.zeros([BLOCK], tl.float32)
    sum_above = tl.zeros([BLOCK], tl.float32)
    sum_inside = tl.zeros([BLOCK * PARTS // 2], tl.float32)
    for begin in tl.range(0, sequences * tiles, programs):
        # There and back again, so that nobody has only long rows of a causal mask.
        number = tl.program_id(0) % programs
        back = begin // programs % 2 == 1
        item = begin + tl.where(back, programs - 1 - number, number)
        is_there = item < sequences * tiles
        item = tl.minimum(item, sequences * tiles - 1)
        tile = item % tiles
        if BACKWARDS:
            tile = tiles - 1 - tile
        _, _, batch, token, row, row_start, some_queries, some_keys, _ = place(
            item // tiles * heads + head, heads, cu_seqlens, None, own_start, queries, keys
        )
        if is_there & (tile * BLOCK < some_queries):
            sum_below, sum_above, sum_inside = query_tile(
                sum_below, sum_above, sum_inside, sums,
                first_diagonal, first_diagonal + diagonal_count,
                head, batch, token, row, row_start, tile * BLOCK, some_queries, some_keys,
                near, far, low, high, below, above,
                query, key, value, output, grad_output, scores, mask, seed,
                grad_statistics, statistics, delta, grad_query,
                query_b, query_h, query_n, output_b, output_h, output_n,
                upstream_b, upstream_h, upstream_n, grad_b, grad_h, grad_n,
                mask_b, mask_h, mask_q, mask_k, statistics_row, statistics_size,
                left, right, shift, span, scale, threshold, kept_scale,
                BLOCK, DIM, VALUE_DIM, WIDTH, VALUE_WIDTH, GROUP, KEY_MASK, RAGGED,
                BOTH_SIDES, PARTS, SPLIT, PRECISION,
            )  # fmt: skip
    if sides is not None:
        tl.debug_barrier()
        some_below, some_above = outside(sums, first_diagonal, diagonal_count, low, high, BLOCK)
        sides += tl.program_id(0) * 2
        tl.store(sides, tl.sum(sum_below, 0) + some_below)
        if BOTH_SIDES:
            tl.store(sides + 1, tl.sum(sum_above, 0) + some_above)
        else:
            tl.store(sides + 1, tl.sum(sum_inside, 0) - some_below - some_above)
