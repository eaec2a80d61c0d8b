"""A prototype, never timed: the fused kernels with parabolas in place of smooth tails.

Outside of a head's band (`ScoringFunction.parabola_support`) the scores of 16 queries × 64 keys are
a parabola in x − y, the key's and the query's place around the middle. For one query that is

    (A − By + Cy²)·1 + (B − 2Cy)·x + C·x²,

a product of a row of numbers (of this query) and three rows that are the same in every tile. So the
tensor units add it: to queries × 64 and 64 × keys of the product QKᵀ come queries × 16 and
16 × keys, numbers of the first split into parts of bfloat16. A *table* holds those rows for each
distance between a query and the first key of a tile; a tile of it comes in as keys do. Columns 0 to
7 are for the tile's first 64 keys, 8 to 15 for the next 64.

Backwards, the query kernel multiplies dS of such a tile with 1, x, x² in the same way and adds what
comes out up over each 16 queries: moments, of which three numbers return to the three entries of
the score vector that the parabola went through (`entry_kernel`).

What these kernels do not do: masks, dropout, packed sequences, windows, grouped heads, float32 to
the last digit; lengths that are no multiples of 64. What they share with the present ones
(tisa/ops/triton) they take from there.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tisa.ops.triton import scores, tiles
from tisa.ops.triton.arguments import CHANGING
from tisa.ops.triton.backward_key import add_scores
from tisa.ops.triton.backward_query import query_delta

# Queries that share a parabola, keys of one; offsets from its middle to its ends and outer nodes.
GROUP, STEP = tl.constexpr(16), tl.constexpr(64)
REACH, SPREAD = tl.constexpr(39), tl.constexpr(34)
# The constant's part of the table is smaller by this: float16 ends at 65,504.
UNIT = tl.constexpr(32)
# Numbers that the moments of a tile are kept in: 8 for each group.
MOMENTS = tl.constexpr(32)


class Sums(NamedTuple):
    """What a program has for the gradient of the scores: diagonals (scores.py), and moments."""

    diagonals: Any
    moments: Any


@triton.jit
def middle(group, frame):
    """Return the entry of the score vector at the middle of a group of the table."""
    return frame.span - 1 - REACH - group * GROUP


@triton.jit
def _parabola(row_scores, row, frame, there):
    """Return the three numbers of some rows of the table."""
    entry = middle(row // GROUP, frame)
    y = (row % GROUP - GROUP // 2).to(tl.float32)
    at = tl.load(row_scores + entry, mask=there, other=0.0)
    before = tl.load(row_scores + entry - SPREAD, mask=there, other=0.0)
    after = tl.load(row_scores + entry + SPREAD, mask=there, other=0.0)
    slope = (after - before) * (0.5 / SPREAD)
    curve = (after - 2.0 * at + before) * (0.5 / (SPREAD * SPREAD))
    return at - slope * y + curve * y * y, slope - 2.0 * curve * y, curve


@triton.jit(do_not_specialize=CHANGING)
def table_kernel(vector, table, factor, queries, keys, ROWS: tl.constexpr):
    """Write ROWS rows of a head's table; `factor` brings scores to the units of q·k."""
    frame = tiles.Frame(queries, keys, 0, 0, 0, queries - 1, queries + keys - 1)
    rows = queries + keys - STEP
    head = (tl.program_id(0) // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (tl.program_id(0) % tl.cdiv(rows, ROWS)) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, 16)[None, :]
    # The next 64 keys are as much nearer to the end.
    of = row - column // 8 * STEP
    c0, c1, c2 = _parabola(vector + head * frame.span, of, frame, (of >= 0) & (row < rows))
    part = column % 8
    value = tl.where(part < 3, c0 * (1.0 / UNIT), tl.where(part < 5, c1, c2)) * factor
    dtype: tl.constexpr = table.dtype.element_ty
    high = value.to(dtype)
    rest = value - high.to(tl.float32)
    second = rest.to(dtype)
    third = (rest - second.to(tl.float32)).to(dtype)
    is_high = (part == 0) | (part == 3) | (part == 5) | (part == 6)
    written = tl.where(is_high, high, tl.where(part == 2, third, second))
    tl.store(table + (head * rows + row) * 16 + column, written, mask=row < rows)


@triton.jit
def table_tile(table, head, i0, j0, frame, ROWS: tl.constexpr):
    """Return the rows of the table for a tile that begins at i0, j0."""
    return tl.reshape(table.load([head, i0 - j0 + frame.keys - STEP, 0]), [ROWS, 16])


@triton.jit
def table_basis(basis, FIXED: tl.constexpr):
    """Return what a tile of the table is multiplied with (`smooth_tails.basis`): 16 × keys.

    Or keys × 16. From memory: computed here, the assembler computes parts of it again and again in
    the middle of products.
    """
    tile = basis.load([0, 0])
    if FIXED.KEYS_FIRST:
        return tile
    else:
        return tl.trans(tile)


@triton.jit
def whole_vector(frame):
    """Return the band that holds nothing: tiles that are not plain have their own scores."""
    return tiles.Band(-frame.shift, frame.span - 1 - frame.shift)


@triton.jit(do_not_specialize=CHANGING)
def forward_kernel(
    query, key, value, table, basis, rules, output, statistics, counts, queries, keys, start,
    FIXED: tl.constexpr,
):  # fmt: skip
    """Write output and statistics: the present kernel, one product more in the plain tiles."""
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
    ends = tiles.band_ends(rules, here.head)
    q = tl.reshape(query.load([here.batch, here.head, i0, 0]), [BLOCK_M, FIXED.DIM])
    band = tiles.band_of(rules, ends, frame)
    whole = whole_vector(frame)
    r = tiles.ranges(i0, here.keys, frame.near, frame.far, band.low, band.high, BLOCK_M, BLOCK_N)
    powers = table_basis(basis, FIXED)
    total = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for phase in tl.static_range(2):
        for number in tl.range(0, tiles.count_of(r, phase == 0)):
            if phase == 0:
                j0 = tiles.plain_tile(number, r) * BLOCK_N
            else:
                j0 = tiles.other_tile(number, r) * BLOCK_N
            j0 = tl.multiple_of(j0, BLOCK_N)
            if phase == 1:
                window = tiles.score_window(rules, here.head, j0 - i0, whole, frame, FIXED)
            at = [here.batch, here.head, j0, 0]
            k = tl.reshape(key.load(at), [BLOCK_N, FIXED.DIM])
            if phase == 0:
                u = table_tile(table, here.head, i0, j0, frame, BLOCK_M)
                logits = tl.dot(u, powers, input_precision=FIXED.PRECISION)
                logits = tl.dot(q, tl.trans(k), logits, input_precision=FIXED.PRECISION)
                new_peak = tl.maximum(peak, tl.max(logits, 1) * rules.scale)
                finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                p = tiles.power(logits * rules.scale - finite[:, None], FIXED)
            else:
                logits = tl.dot(q, tl.trans(k), input_precision=FIXED.PRECISION)
                logits = logits * rules.scale + tiles.spread(window, FIXED)
                logits = tiles.hide(logits, rules, i0, j0, here.keys, frame, FIXED)
                new_peak = tl.maximum(peak, tl.max(logits, 1))
                finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                p = tiles.power(logits - finite[:, None], FIXED)
            shrink = tiles.power(peak - finite, FIXED)
            weight = weight * shrink + tl.sum(p, 1)
            total = total * shrink[:, None]
            peak = new_peak
            v = tl.reshape(value.load(at), [BLOCK_N, VALUE_DIM])
            total = tl.dot(p.to(v.dtype), v, total, input_precision=FIXED.PRECISION)
    i = i0 + tl.arange(0, BLOCK_M)
    peak = tl.where(i >= here.queries, float("inf"), peak)
    places = statistics.pointer + here.row.to(tl.int64) * statistics.row + i
    if FIXED.SPLIT:
        tl.store(places, peak)
        tl.store(places + statistics.size, 1.0 / weight)
    else:
        tl.store(places, peak + tl.log2(weight))
    tiles.store_rows(output, total / weight[:, None], here, i0, here.queries, FIXED.VALUE_WIDTH)


@triton.jit
def moment_columns(FIXED: tl.constexpr):
    """Return what dS is multiplied with, keys × 8, and by what rows then count, queries × 8.

    Columns: 1, x, x² in two parts; 1 and x again, for rows times y; 1, for rows times y².
    """
    column = tl.arange(0, 8)[None, :]
    x = tl.arange(0, FIXED.BLOCK_N)[:, None] % STEP - STEP // 2
    square = x * x
    high = square // 4 * 4
    is_x = (column == 1) | (column == 5)
    value = tl.where(is_x, x, tl.where(column == 2, high, 1))
    value = tl.where(column == 3, square - high, tl.where(column == 7, 0, value))
    y = tl.arange(0, FIXED.BLOCK_M)[:, None] % GROUP - GROUP // 2
    weight = tl.where(column < 4, 1, tl.where(column < 6, y, y * y))
    return value.to(tl.float32), weight.to(tl.float32)


@triton.jit
def query_gradient(
    own, here, i0, frame, band, inside, sums, key, value, table, basis, rules,
    grad_query, FIXED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of BLOCK queries, add theirs to the program's sums."""
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    DIM: tl.constexpr = FIXED.DIM
    PARTS: tl.constexpr = FIXED.PARTS
    r = tiles.ranges(i0, here.keys, frame.near, frame.far, band.low, band.high, BLOCK, BLOCK)
    whole = whole_vector(frame)
    scale = tiles.in_units(rules.scale, FIXED)
    total = tl.zeros([BLOCK, DIM], tl.float32)
    SLOT: tl.constexpr = PARTS * BLOCK // 2
    spot = scores.distances(0, BLOCK, PARTS)
    is_first = tl.arange(0, SLOT) // PARTS % PARTS == 0
    moment = tl.reshape(tl.arange(0, MOMENTS), [BLOCK // GROUP, 8])
    waiting = -1
    low_part = tl.zeros([SLOT], tl.float32)
    high_part = tl.zeros([SLOT], tl.float32)
    for phase in tl.static_range(2):
        if phase == 0:
            # Not once for all tiles: the other loop needs their place in shared memory.
            powers = table_basis(basis, FIXED)
            columns, weights = moment_columns(FIXED)
            columns = columns.to(own.q.dtype)
        for number in tl.range(0, tiles.count_of(r, phase == 0)):
            if phase == 0:
                j0 = tiles.plain_tile(number, r) * BLOCK
            else:
                j0 = tiles.other_tile(number, r) * BLOCK
            j0 = tl.multiple_of(j0, BLOCK)
            if phase == 0:
                u = table_tile(table, here.head, i0, j0, frame, BLOCK)
                # Groups of the table lie as its rows do: this tile's are its first row's over 16.
                first = (i0 - j0 + frame.keys - STEP) // GROUP * 8
                old_moments = tl.load(sums.moments + first + moment)
            else:
                diagonal = (j0 - i0) // BLOCK
                is_inside = (diagonal >= inside.first) & (diagonal < inside.end)
                slot = sums.diagonals + (diagonal - inside.first) * BLOCK + spot
                old_low = tl.load(slot, mask=is_first & is_inside, other=0.0)
                old_high = tl.load(slot + BLOCK // 2, mask=is_first & is_inside, other=0.0)
                window = tiles.score_window(rules, here.head, j0 - i0, whole, frame, FIXED)
            at = [here.batch, here.head, j0, 0]
            k = tl.reshape(key.load(at), [BLOCK, DIM])
            v = tl.reshape(value.load(at), [BLOCK, FIXED.VALUE_DIM])
            if phase == 0:
                logits = tl.dot(u, powers, input_precision=FIXED.PRECISION)
                logits = tl.dot(own.q, tl.trans(k), logits, input_precision=FIXED.PRECISION)
                logits = logits * scale
            else:
                logits = tl.dot(own.q, tl.trans(k), input_precision=FIXED.PRECISION) * scale
            grad_p = tl.dot(own.grad, tl.trans(v), input_precision=FIXED.PRECISION)
            if phase == 1:
                logits += tiles.spread(window, FIXED)
                logits = tiles.hide(logits, rules, i0, j0, here.keys, frame, FIXED)
            if FIXED.SPLIT:
                p = tiles.power(logits - own.norm[:, None], FIXED) * own.share[:, None]
            else:
                p = tl.exp2(logits - own.norm[:, None])
            grad_logits = p * (grad_p - own.dot[:, None])
            rounded = grad_logits.to(k.dtype)
            total = tl.dot(rounded, k, total, input_precision=FIXED.PRECISION)
            if phase == 0:
                summed = tl.dot(rounded, columns, input_precision=FIXED.PRECISION) * weights
                summed = tl.sum(tl.reshape(summed, [BLOCK // GROUP, GROUP, 8]), 1)
                tl.store(sums.moments + first + moment, old_moments + summed)
            elif is_inside:
                lowest, lower, upper, highest = scores.diagonal_sums(
                    grad_logits, tl.minimum(diagonal * diagonal, 0), BLOCK, PARTS
                )
                old_low += scores.all_parts(low_part + lowest, BLOCK, PARTS)
                old_high += scores.all_parts(high_part + lower, BLOCK, PARTS)
                tl.store(slot, old_low, mask=is_first)
                tl.store(slot + BLOCK // 2, old_high, mask=is_first)
                low_part = upper
                high_part = highest
                waiting = diagonal + 1 - inside.first
    if waiting >= 0:
        slot = sums.diagonals + waiting * BLOCK + spot
        old_low = tl.load(slot, mask=is_first) + scores.all_parts(low_part, BLOCK, PARTS)
        old_high = tl.load(slot + BLOCK // 2, mask=is_first)
        tl.store(slot, old_low, mask=is_first)
        old_high += scores.all_parts(high_part, BLOCK, PARTS)
        tl.store(slot + BLOCK // 2, old_high, mask=is_first)
    tiles.store_rows(grad_query, total * rules.scale, here, i0, here.queries, FIXED.WIDTH)


@triton.jit
def numbers_of_moments(frame):
    """Return how many numbers the moments of one program take: 8 for each group of the table."""
    return (frame.queries + frame.keys - STEP) // GROUP * 8


@triton.jit(do_not_specialize=CHANGING)
def query_kernel(
    query, key, value, table, basis, rules, returned, written, moments, counts, sequences, programs,
    queries, keys, start, FIXED: tl.constexpr,
):  # fmt: skip
    """Write delta, the query's gradient and a program's sums: the present kernel, with moments."""
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    head = tl.program_id(0) // programs
    frame = tiles.frame_of(rules, queries, keys, start)
    ends = tiles.band_ends(rules, head)
    band = tiles.band_of(rules, ends, frame)
    inside = scores.diagonals(band, frame, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    diagonals = written.sums + program * scores.numbers_of_sums(frame, BLOCK)
    scores.clear(diagonals, inside, BLOCK)
    moments += program * numbers_of_moments(frame)
    number_of = numbers_of_moments(frame)
    for begin in tl.range(0, number_of, 512):
        place = begin + tl.arange(0, 512)
        tl.store(moments + place, tl.zeros([512], tl.float32), mask=place < number_of)
    tl.debug_barrier()
    items = sequences * counts.tiles
    for begin in tl.range(0, items, programs):
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
        # Moments are read by other threads than wrote them.
        tl.debug_barrier()
        if is_there:
            own = query_delta(here, i0, query, returned, written, FIXED)
            query_gradient(
                own, here, i0, frame, band, inside, Sums(diagonals, moments), key, value,
                table, basis, rules, written.query, FIXED,
            )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def key_kernel(
    query, key, value, table, basis, grad_output, rules, statistics, shares, delta,
    grad_key, grad_value, counts, queries, keys, start, FIXED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_N keys and values: the present kernel, one product more."""
    BLOCK_M: tl.constexpr = FIXED.BLOCK_M
    BLOCK_N: tl.constexpr = FIXED.BLOCK_N
    DIM: tl.constexpr = FIXED.DIM
    VALUE_DIM: tl.constexpr = FIXED.VALUE_DIM
    frame = tiles.frame_of(rules, queries, keys, start)
    unit = tl.program_id(0) // counts.tiles
    here = tiles.place(unit // counts.heads, unit % counts.heads, counts.heads, rules, frame)
    j0 = tl.program_id(0) % counts.tiles * BLOCK_N
    ends = tiles.band_ends(rules, here.head)
    at = [here.batch, here.head, j0, 0]
    k = tl.reshape(key.load(at), [BLOCK_N, DIM])
    v = tl.reshape(value.load(at), [BLOCK_N, VALUE_DIM])
    grad_k = tl.zeros([BLOCK_N, DIM], tl.float32)
    grad_v = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)
    band = tiles.band_of(rules, ends, frame)
    whole = whole_vector(frame)
    r = tiles.ranges(
        j0, here.queries, -frame.far, -frame.near, -band.high, -band.low, BLOCK_N, BLOCK_M
    )
    scale = tiles.in_units(rules.scale, FIXED)
    powers = table_basis(basis, FIXED)
    past = queries + keys
    for phase in tl.static_range(1 if FIXED.ONE_LOOP else 2):
        begin = r.first if FIXED.ONE_LOOP else 0
        end = r.last
        if not FIXED.ONE_LOOP:
            end = tiles.count_of(r, phase == 0)
        for number in tl.range(begin, end):
            plain = phase == 0
            if FIXED.ONE_LOOP:
                i0 = number * BLOCK_M
                plain = ((number >= r.a) & (number < r.b)) | ((number >= r.c) & (number < r.d))
            elif phase == 0:
                i0 = tiles.plain_tile(number, r) * BLOCK_M
            else:
                i0 = tiles.other_tile(number, r) * BLOCK_M
            i0 = tl.multiple_of(i0, BLOCK_M)
            at = [here.batch, here.head, i0, 0]
            q = tl.reshape(query.load(at), [BLOCK_M, FIXED.DIM])
            grad = tl.reshape(grad_output.load(at), [BLOCK_M, FIXED.VALUE_DIM])
            norm = tl.reshape(statistics.load([here.row, i0]), [BLOCK_M])
            dot = tl.reshape(delta.load([here.row, i0]), [BLOCK_M])
            if FIXED.ONE_LOOP or phase == 0:
                # Past its end the table is 0.
                row = i0 - j0 + frame.keys - STEP
                if FIXED.ONE_LOOP:
                    row = tl.where(plain, row, past)
                u = tl.reshape(table.load([here.head, row, 0]), [BLOCK_M, 16])
                logits = tl.dot(powers, tl.trans(u), input_precision=FIXED.PRECISION)
                logits = tl.dot(k, tl.trans(q), logits, input_precision=FIXED.PRECISION)
            else:
                logits = tl.dot(k, tl.trans(q), input_precision=FIXED.PRECISION)
            grad_p = tl.dot(v, tl.trans(grad), input_precision=FIXED.PRECISION)
            if FIXED.SPLIT:
                logits = logits * scale
            else:
                logits = logits * scale - norm[None, :]
            if FIXED.ONE_LOOP:
                if not plain:
                    logits = add_scores(logits, rules, here.head, i0, j0, whole, frame, FIXED)
            elif phase == 1:
                logits = add_scores(logits, rules, here.head, i0, j0, whole, frame, FIXED)
            if FIXED.SPLIT:
                share = tl.reshape(shares.load([here.row, i0]), [BLOCK_M])
                p = tiles.power(logits - norm[None, :], FIXED) * share[None, :]
            else:
                p = tl.exp2(logits)
            grad_logits = p * (grad_p - dot[None, :])
            grad_v = tl.dot(p.to(grad.dtype), grad, grad_v, input_precision=FIXED.PRECISION)
            grad_k = tl.dot(grad_logits.to(q.dtype), q, grad_k, input_precision=FIXED.PRECISION)
            if FIXED.ONE_LOOP:
                # 0, which the compiler does not know: without it the assembler serialises the
                # products of this loop (C7515).
                grad_k += tl.minimum(number, 0).to(tl.float32)
    tiles.store_rows(grad_key, grad_k * rules.scale, here, j0, here.keys, FIXED.WIDTH)
    tiles.store_rows(grad_value, grad_v, here, j0, here.keys, FIXED.VALUE_WIDTH)


@triton.jit
def _given_back(
    moments, lowest, programs, each, frame, OFFSET: tl.constexpr, ENTRIES: tl.constexpr
):
    """Return what ENTRIES entries get from the parabolas whose middle is OFFSET before them.

    A parabola goes through f(c) and f(c ± r): dA is the sum of dS, dB and dC its moments, and

        f(c): dA − dC/r²        f(c ± r): ±dB/2r + dC/2r².
    """
    COUNT: tl.constexpr = ENTRIES // GROUP
    top = frame.span - 1 - REACH + OFFSET
    group = scores._floor(top - lowest - ENTRIES + GROUP, GROUP)
    place = group * 8 + tl.arange(0, COUNT * 8)
    there = (place >= 0) & (place < each)
    total = tl.zeros([COUNT * 8], tl.float32)
    ahead = tl.arange(0, 32)[:, None]
    for begin in tl.range(0, programs, 32):
        read = there[None, :] & (begin + ahead < programs)
        row = (begin + ahead).to(tl.int64) * each
        total += tl.sum(tl.load(moments + row + place[None, :], mask=read, other=0.0), 0)
    # Σ dS; Σ dS·(x − y) = 1 − 4; Σ dS·(x − y)² = 2 + 3 − 2·5 + 6, by columns.
    column = tl.arange(0, COUNT * 8) % 8
    first = tl.where(column == 1, 1.0, tl.where(column == 4, -1.0, 0.0))
    second = tl.where((column == 2) | (column == 3) | (column == 6), 1.0, 0.0)
    second = tl.where(column == 5, -2.0, second)
    if OFFSET == 0:
        weight = tl.where(column == 0, 1.0, second * (-1.0 / (SPREAD * SPREAD)))
    else:
        weight = first * (0.5 / OFFSET) + second * (0.5 / (SPREAD * SPREAD))
    found = tl.sum(tl.reshape(total * weight, [COUNT, 8]), 1)
    entry = lowest + tl.arange(0, ENTRIES)[:, None]
    at = top - (group + tl.arange(0, COUNT))[None, :] * GROUP
    return tl.sum(tl.where(entry == at, found[None, :], 0.0), 1)


@triton.jit(do_not_specialize=CHANGING)
def entry_kernel(
    sums, moments, grad_scores, rules, programs, queries, keys, start,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ENTRIES entries: diagonals' sums and what parabolas give back."""
    frame = tiles.frame_of(rules, queries, keys, start)
    blocks = tl.cdiv(frame.span, ENTRIES)
    head = tl.program_id(0) // blocks
    lowest = (tl.program_id(0) % blocks) * ENTRIES
    entry = lowest + tl.arange(0, ENTRIES)
    band = tiles.band_of(rules, tiles.band_ends(rules, head), frame)
    inside = scores.diagonals(band, frame, BLOCK)
    several = inside.end - inside.first
    c = entry - frame.shift - (inside.first - 1) * BLOCK
    there = (c >= 0) & (c < (several + 1) * BLOCK) & (several > 0)
    each = scores.numbers_of_sums(frame, BLOCK)
    sums += (head * programs).to(tl.int64) * each
    total = tl.zeros([ENTRIES], tl.float32)
    ahead = tl.arange(0, 32)[:, None]
    for begin in tl.range(0, programs, 32):
        read = there[None, :] & (begin + ahead < programs)
        row = (begin + ahead).to(tl.int64) * each
        total += tl.sum(tl.load(sums + row + c[None, :], mask=read, other=0.0), 0)
    each = numbers_of_moments(frame)
    moments += (head * programs).to(tl.int64) * each
    total += _given_back(moments, lowest, programs, each, frame, 0, ENTRIES)
    total += _given_back(moments, lowest, programs, each, frame, SPREAD, ENTRIES)
    total += _given_back(moments, lowest, programs, each, frame, -SPREAD, ENTRIES)
    places = grad_scores + head.to(tl.int64) * frame.span + entry
    tl.store(places, total, mask=entry < frame.span)
