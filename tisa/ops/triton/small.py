"""The whole backward pass of sequences that fit one tile, in one kernel.

A program takes one head and a share of the batch. For each sequence it computes the weights once
and all gradients from them; the gradient of the scores adds up over the share in registers, and is
summed along its diagonals once at the end. Nothing is recomputed and nothing is left for others to
read, which at these lengths costs more than the arithmetic.
"""

import triton
import triton.language as tl

from tisa.ops.triton import columns, scores, tiles
from tisa.ops.triton.arguments import CHANGING


@triton.jit
def written(gradient, tile, here, length, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Store the gradient of one sequence."""
    if WHOLE:
        tile = tl.reshape(tile.to(gradient.dtype), [1, 1, tile.shape[0], tile.shape[1]])
        gradient.store([here.batch, here.head, 0, 0], tile)
    else:
        tiles.store_rows(gradient, tile, here, 0, length, WIDTH)


@triton.jit(do_not_specialize=CHANGING)
def small_kernel(
    query, key, value, key_scores, output, grad_output, rules, statistics, grad_query, grad_key,
    grad_value, grad_key_scores, sums, heads, sequences, queries, keys, start, FIXED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of query, key and value and the sums of a share of the batch.

    WHOLE: gradients are stored through descriptors, whose addresses take no registers; not so
    packed sequences, where a tile reaches into the next one.
    """
    BLOCK: tl.constexpr = FIXED.BLOCK_M
    programs = tl.num_programs(0) // heads
    head = tl.program_id(0) // programs
    factor = columns.factor_of(tiles.in_units(rules.scale, FIXED), key_scores, FIXED)
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for number in tl.range(tl.program_id(0) % programs, sequences, programs):
        frame = tiles.frame_of(rules, queries, keys, start)
        here = tiles.place(number, head, heads, rules, frame)
        at = [here.batch, head, here.token, 0]
        q = tl.reshape(query.load(at), [BLOCK, FIXED.DIM])
        grad = tl.reshape(grad_output.load(at), [BLOCK, FIXED.VALUE_DIM])
        o = tl.reshape(output.load(at), [BLOCK, FIXED.VALUE_DIM])
        places = here.row.to(tl.int64) * statistics.row + here.row_start + i
        is_query = i < here.queries
        norm = tl.load(statistics.pointer + places, mask=is_query, other=float("inf"))
        dot = tl.sum(o.to(tl.float32) * grad.to(tl.float32), 1)
        if statistics.gradient is not None:
            lse_gradient = tl.load(statistics.gradient + places, mask=is_query, other=0.0)
            lse_gradient *= tiles.LOG2E
            dot -= lse_gradient
        dot = tl.where(is_query, dot, 0.0)
        k = tl.reshape(key.load(at), [BLOCK, FIXED.DIM])
        v = tl.reshape(value.load(at), [BLOCK, FIXED.VALUE_DIM])
        of_keys = columns.of_keys(key_scores, here, head, 0, FIXED)
        logits = (
            columns.with_keys(tl.dot(q, tl.trans(k)), of_keys, key_scores, rules.scale) * factor
        )
        if rules.scores is not None:
            # Not before the loop: there they would take registers that are spilled then. Nor does
            # the compiler move them, since it cannot know that this is 0.
            zero = tl.minimum(number, 0)
            ends = tiles.band_ends(rules, head)
            if rules.band is None:
                # A band all the same: without one the assembler spills three times as much.
                ends = (zero - tiles.FARTHEST, zero + tiles.FARTHEST)
            band = tiles.within_vector(ends, frame)
            logits += tiles.spread(tiles.score_window(rules, head, zero, band, frame, FIXED), FIXED)
        logits = tiles.hide(logits, rules, 0, 0, here.keys, frame, FIXED)
        if rules.mask is not None:
            logits = tiles.add_mask(logits, rules.mask, here, head, 0, 0, FIXED)
        p = tl.exp2(logits - norm[:, None])
        grad_p = tl.dot(grad, tl.trans(v))
        dropped = p
        if rules.dropout is not None:
            kept = tiles.kept(rules.dropout, here, head, 0, 0, rules.dropout.kept_scale, FIXED)
            grad_p *= kept
            dropped = p * kept
        grad_v = tl.dot(tl.trans(dropped.to(grad.dtype)), grad)
        grad_logits = p * (grad_p - dot[:, None])
        if FIXED.EXACT:
            # The output was rounded: rows of dS sum to what they must without it.
            mended = tl.sum(grad_logits, 1)
            if statistics.gradient is not None:
                mended -= lse_gradient
            grad_logits -= p * mended[:, None]
        total += grad_logits
        if grad_key_scores is not None:
            columns.store(grad_key_scores, tl.sum(grad_logits, 0), here, head, 0)
        narrow = grad_logits.to(q.dtype)
        grad_k = tl.dot(tl.trans(narrow), q) * rules.scale
        grad_q = tl.dot(narrow, k) * rules.scale
        written(grad_value, grad_v, here, here.keys, FIXED.VALUE_WIDTH, FIXED.WHOLE)
        written(grad_key, grad_k, here, here.keys, FIXED.WIDTH, FIXED.WHOLE)
        written(grad_query, grad_q, here, here.queries, FIXED.WIDTH, FIXED.WHOLE)
    if sums is not None:
        slots = scores.diagonal_sums(total, 0, BLOCK, FIXED.PARTS)
        is_first = tl.arange(0, BLOCK * FIXED.PARTS // 2) // FIXED.PARTS % FIXED.PARTS == 0
        sums += tl.program_id(0).to(tl.int64) * (2 * BLOCK)
        for number in tl.static_range(4):
            spots = sums + scores.distances(number, BLOCK, FIXED.PARTS)
            tl.store(spots, scores.all_parts(slots[number], BLOCK, FIXED.PARTS), mask=is_first)
