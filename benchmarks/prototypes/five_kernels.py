"""A prototype, never timed: a backward pass of five products, deterministic.

The present backward pass computes S and dP twice, once for the query's gradient and once for those
of key and value: seven products. Here a program has BLOCK_N keys and walks the queries once; of
each tile it gives K and V their gradients in registers and the query its share,

    dQ[i, :] += dS[i, keys] · K,

through the copy engine, which adds in memory (float32, transposed: width × queries).

**Turns.** For the same result in every run the shares of a tile of queries are added in one order.
Programs of one head come in groups that run at the same time; within a group each begins
`stride` tiles of queries after the one before, so that nobody is at another's tile, and the order
of a tile is that in which programs get there: known beforehand. A counter for each tile of queries
says how many have added; a program waits for its own number. It counts up only one tile later,
when its own addition has long arrived. With `stride` 0 all begin at the first tile and follow each
other: that is how the interpreter can run it. Programs take their numbers from a counter in memory,
so that nobody waits for one that was never started.

The gradient of the scores: what lies beside the band is added up here; the diagonals of tiles in
the band are summed by a kernel of their own that computes those tiles again (`band_kernel`), as on
the first day of the present kernels.

What these kernels do not do: masks, dropout, packed sequences, causal masks and windows, grouped
heads, float32 on a GPU; lengths that are no multiples of BLOCK_M and BLOCK_N.
"""

import triton
import triton.language as tl

from tisa.ops.triton import scores, tiles
from tisa.ops.triton.arguments import CHANGING

BAND_TILE = tl.constexpr(64)


@triton.jit
def rank_of(tile, number, group, members, stride):
    """Return how many of a group's members add to a tile of queries before this one."""
    if stride == 0:
        return number
    first = tl.minimum(tile // stride, members - 1)
    return tl.where(number <= first, first - number, first + members - number)


@triton.jit
def _arrive(turn):
    """Count up when this program's additions have arrived in memory: the next one may add.

    In one piece, with its own barrier: the compiler pipelines no loop in which it sees one.
    """
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred is_first;
        .reg .u32 thread;
        cp.async.bulk.wait_group 0;
        fence.proxy.async;
        bar.sync 0;
        mov.u32 thread, %tid.x;
        setp.eq.u32 is_first, thread, 0;
        @is_first red.release.gpu.global.add.s32 [$1], 1;
        mov.s32 $0, 0;
        }
        """,
        "=r,l",
        [turn],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait_for(turn, number):
    """Wait until so many have added to a tile of queries; after seconds, end in an error."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred early;
        .reg .pred hung;
        .reg .s32 seen;
        .reg .u32 tries;
        mov.u32 tries, 0;
        AGAIN:
        ld.acquire.gpu.global.s32 seen, [$1];
        add.u32 tries, tries, 1;
        setp.gt.u32 hung, tries, 4000000;
        @hung trap;
        setp.lt.s32 early, seen, $2;
        @early bra AGAIN;
        fence.proxy.async;
        mov.s32 $0, seen;
        }
        """,
        "=r,l,r",
        [turn, number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=[*CHANGING, "group", "stride"])
def five_kernel(
    query, key, value, grad_output, partial, rules, statistics, delta, grad_key, grad_value, turns,
    sides, counts, group, stride, queries, keys, start,
    FIXED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_N keys and values, add to those of all queries.

    `turns`: a counter for each tile of queries; one that nobody looks at; the programs' counter.
    """
    BLOCK_M: tl.constexpr = FIXED.BLOCK_M
    BLOCK_N: tl.constexpr = FIXED.BLOCK_N
    DIM: tl.constexpr = FIXED.DIM
    VALUE_DIM: tl.constexpr = FIXED.VALUE_DIM
    frame = tiles.frame_of(rules, queries, keys, start)
    steps = queries // BLOCK_M
    units = tl.num_programs(0) // counts.tiles
    nobody = turns + units * steps
    if INTERPRETED:
        ticket = tl.program_id(0)
    else:
        ticket = tl.atomic_add(nobody + 1, 1)
    unit = ticket // counts.tiles
    tile = ticket % counts.tiles
    here = tiles.place(unit // counts.heads, unit % counts.heads, counts.heads, rules, frame)
    turns += unit * steps
    before = tile // group * group
    number = tile - before
    members = tl.minimum(group, counts.tiles - before)
    j0 = tile * BLOCK_N
    ends = tiles.band_ends(rules, here.head)
    at = [here.batch, here.head, j0, 0]
    k = tl.reshape(key.load(at), [BLOCK_N, DIM])
    v = tl.reshape(value.load(at), [BLOCK_N, VALUE_DIM])
    grad_k = tl.zeros([BLOCK_N, DIM], tl.float32)
    grad_v = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)
    band = tiles.band_of(rules, ends, frame)
    edges = tiles.edge_scores(rules, here.head, band, frame, FIXED)
    r = tiles.ranges(
        j0, here.queries, -frame.far, -frame.near, -band.high, -band.low, BLOCK_N, BLOCK_M
    )
    scale = tiles.in_units(rules.scale, FIXED)
    below = tl.zeros([BLOCK_N], tl.float32)
    above = tl.zeros([BLOCK_N], tl.float32)
    inside = scores.diagonals(band, frame, BAND_TILE)
    last = nobody
    for step in tl.range(0, steps):
        row = step + stride * number
        row = tl.where(row >= steps, row - steps, row)
        i0 = tl.multiple_of(row * BLOCK_M, BLOCK_M)
        is_above = (row >= r.a) & (row < r.b)
        is_below = (row >= r.c) & (row < r.d)
        edge = tl.where(is_above, edges.above, tl.where(is_below, edges.below, 0.0))
        at = [here.batch, here.head, i0, 0]
        q = tl.reshape(query.load(at), [BLOCK_M, DIM])
        grad = tl.reshape(grad_output.load(at), [BLOCK_M, VALUE_DIM])
        norm = tl.reshape(statistics.load([here.row, i0]), [BLOCK_M])
        dot = tl.reshape(delta.load([here.row, i0]), [BLOCK_M])
        logits = tl.dot(k, tl.trans(q), input_precision=FIXED.PRECISION)
        grad_p = tl.dot(v, tl.trans(grad), input_precision=FIXED.PRECISION)
        logits = logits * scale + (edge - norm)[None, :]
        if rules.scores is not None:  # noqa: SIM102 (one is for the compiler)
            if not (is_above | is_below):
                window = tiles.score_window(rules, here.head, j0 - i0, band, frame, FIXED)
                logits += tiles.spread(window, FIXED)
        p = tl.exp2(logits)
        grad_logits = p * (grad_p - dot[None, :])
        rounded = grad_logits.to(q.dtype)
        grad_v = tl.dot(p.to(grad.dtype), grad, grad_v, input_precision=FIXED.PRECISION)
        grad_k = tl.dot(rounded, q, grad_k, input_precision=FIXED.PRECISION)
        share = tl.dot(tl.trans(k), rounded, input_precision=FIXED.PRECISION)
        if sides is not None:
            # By tiles of the band's kernel: what lies in one of those is summed there.
            summed = tl.sum(grad_logits, 1)
            diagonal = (j0 + tl.arange(0, BLOCK_N)) // BAND_TILE - i0 // BAND_TILE
            below += tl.where(diagonal < inside.first, summed, 0.0)
            above += tl.where(diagonal >= inside.end, summed, 0.0)
        at = [here.batch, here.head, 0, i0]
        share = tl.reshape(share, [1, 1, DIM, BLOCK_M])
        if INTERPRETED:
            partial.store(at, partial.load(at) + share)
        else:
            # What was added one tile ago has arrived by now.
            _arrive(last)
            _wait_for(turns + row, before + rank_of(row, number, group, members, stride))
            partial.atomic_add(at, share)
        last = turns + row
    if not INTERPRETED:
        _arrive(last)
    tiles.store_rows(grad_key, grad_k * rules.scale, here, j0, here.keys, FIXED.WIDTH)
    tiles.store_rows(grad_value, grad_v, here, j0, here.keys, FIXED.VALUE_WIDTH)
    if sides is not None:
        # All sequences of a head beside each other.
        sequences = units // counts.heads
        place = (here.head * sequences + here.batch) * counts.tiles + tile
        tl.store(sides + place * 2, tl.sum(below, 0))
        tl.store(sides + place * 2 + 1, tl.sum(above, 0))


@triton.jit(do_not_specialize=CHANGING)
def finish_kernel(partial, grad_query, counts, scale, queries, FIXED: tl.constexpr):
    """Write the query's gradient: turned over, scaled, rounded."""
    BLOCK_M: tl.constexpr = FIXED.BLOCK_M
    unit = tl.program_id(0) // counts.tiles
    i0 = tl.program_id(0) % counts.tiles * BLOCK_M
    batch, head = unit // counts.heads, unit % counts.heads
    here = tiles.Place(batch, head, 0, unit, 0, queries, queries)
    tile = tl.reshape(partial.load([batch, head, 0, i0]), [FIXED.DIM, BLOCK_M])
    tiles.store_rows(grad_query, tl.trans(tile) * scale, here, i0, queries, FIXED.WIDTH)


@triton.jit(do_not_specialize=CHANGING)
def band_kernel(
    query, key, value, grad_output, rules, statistics, delta, sums, sides, counts, sequences,
    programs, queries, keys, start, FIXED: tl.constexpr,
):  # fmt: skip
    """Write a program's sums along diagonals (scores.py): tiles in the band alone, no other."""
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    PARTS: tl.constexpr = FIXED.PARTS
    SLOT: tl.constexpr = PARTS * BLOCK // 2
    head = tl.program_id(0) // programs
    frame = tiles.frame_of(rules, queries, keys, start)
    band = tiles.band_of(rules, tiles.band_ends(rules, head), frame)
    inside = scores.diagonals(band, frame, BLOCK)
    sums += tl.program_id(0).to(tl.int64) * scores.numbers_of_sums(frame, BLOCK)
    scores.clear(sums, inside, BLOCK)
    tl.debug_barrier()
    scale = tiles.in_units(rules.scale, FIXED)
    spot = scores.distances(0, BLOCK, PARTS)
    is_first = tl.arange(0, SLOT) // PARTS % PARTS == 0
    items = sequences * counts.tiles
    for item in tl.range(tl.program_id(0) % programs, items, programs):
        here = tiles.place(item // counts.tiles, head, counts.heads, rules, frame)
        i0 = item % counts.tiles * BLOCK
        at = [here.batch, here.head, i0, 0]
        q = tl.reshape(query.load(at), [BLOCK, FIXED.DIM])
        grad = tl.reshape(grad_output.load(at), [BLOCK, FIXED.VALUE_DIM])
        norm = tl.reshape(statistics.load([here.row, i0]), [BLOCK])
        dot = tl.reshape(delta.load([here.row, i0]), [BLOCK])
        first = tl.maximum(inside.first + i0 // BLOCK, 0)
        last = tl.minimum(inside.end + i0 // BLOCK, keys // BLOCK)
        for number in tl.range(first, last):
            j0 = tl.multiple_of(number * BLOCK, BLOCK)
            window = tiles.score_window(rules, here.head, j0 - i0, band, frame, FIXED)
            at = [here.batch, here.head, j0, 0]
            k = tl.reshape(key.load(at), [BLOCK, FIXED.DIM])
            v = tl.reshape(value.load(at), [BLOCK, FIXED.VALUE_DIM])
            logits = tl.dot(q, tl.trans(k), input_precision=FIXED.PRECISION) * scale
            grad_p = tl.dot(grad, tl.trans(v), input_precision=FIXED.PRECISION)
            logits += tiles.spread(window, FIXED)
            p = tl.exp2(logits - norm[:, None])
            grad_logits = p * (grad_p - dot[:, None])
            diagonal = number - i0 // BLOCK
            lowest, lower, upper, highest = scores.diagonal_sums(
                grad_logits, tl.minimum(diagonal * diagonal, 0), BLOCK, PARTS
            )
            slot = sums + (diagonal - inside.first) * BLOCK + spot
            _add(slot, scores.all_parts(lowest, BLOCK, PARTS), is_first)
            _add(slot + BLOCK // 2, scores.all_parts(lower, BLOCK, PARTS), is_first)
            _add(slot + BLOCK, scores.all_parts(upper, BLOCK, PARTS), is_first)
            _add(slot + BLOCK * 3 // 2, scores.all_parts(highest, BLOCK, PARTS), is_first)
    tl.debug_barrier()
    below, above = scores.outside(sums, inside, band, BLOCK)
    tl.store(sides + tl.program_id(0) * 2, below)
    tl.store(sides + tl.program_id(0) * 2 + 1, above)


@triton.jit
def _add(places, found, there):
    tl.store(places, tl.load(places, mask=there, other=0.0) + found, mask=there)
