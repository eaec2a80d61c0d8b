"""The whole backward pass of sequences that fit one tile, in one kernel.

A program takes one head and a share of the batch. For each sequence it computes the weights once
and all gradients from them; the gradient of the scores adds up over the share in registers, and is
summed along its diagonals once at the end. Nothing is recomputed and nothing is left for others to
read, which at these lengths costs more than the arithmetic.
"""

import triton
import triton.language as tl

from tisa.ops.triton.scores import all_parts, diagonal_sums, distances
from tisa.ops.triton.tiles import (
    CHANGING,
    FARTHEST,
    LOG2E,
    add_mask,
    band_distances,
    band_ends,
    hide,
    kept,
    place,
    score_window,
    spread,
    visible_distances,
)


@triton.jit(do_not_specialize=CHANGING)
def small_kernel(
    query, key, value, output, grad_output, scores, band, mask, seed, cu_seqlens, start_pointer,
    grad_statistics, statistics, grad_query, grad_key, grad_value, sums,
    grad_query_b, grad_query_h, grad_query_n, grad_key_b, grad_key_h, grad_key_n,
    grad_value_b, grad_value_h, grad_value_n, mask_b, mask_h, mask_q, mask_k, statistics_row,
    heads, sequences, programs, queries, keys, start, left, right, shift, span,
    scale, threshold, kept_scale,
    BLOCK: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, KEY_MASK: tl.constexpr, RAGGED: tl.constexpr, WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of query, key and value and the sums of a share of the batch.

    WHOLE: gradients are stored through descriptors, whose addresses take no registers; not so
    packed sequences, where a tile reaches into the next one.
    """
    head = tl.program_id(0) // programs
    scale2 = scale * LOG2E
    i = tl.arange(0, BLOCK)
    column = tl.arange(0, DIM)
    value_column = tl.arange(0, VALUE_DIM)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    all_queries = queries
    all_keys = keys
    for number in tl.range(tl.program_id(0) % programs, sequences, programs):
        _, _, batch, token, row, row_start, queries, keys, begin = place(
            number * heads + head, heads, cu_seqlens, start_pointer, start, all_queries, all_keys
        )
        near, far = visible_distances(begin, left, right)
        q = tl.reshape(query.load([batch, head, token, 0]), [BLOCK, DIM])
        grad = tl.reshape(grad_output.load([batch, head, token, 0]), [BLOCK, VALUE_DIM])
        o = tl.reshape(output.load([batch, head, token, 0]), [BLOCK, VALUE_DIM])
        places = row.to(tl.int64) * statistics_row + row_start + i
        norm = tl.load(statistics + places, mask=i < queries, other=float("inf"))
        dot = tl.sum(o.to(tl.float32) * grad.to(tl.float32), 1)
        if grad_statistics is not None:
            dot -= tl.load(grad_statistics + places, mask=i < queries, other=0.0) * LOG2E
        dot = tl.where(i < queries, dot, 0.0)
        k = tl.reshape(key.load([batch, head, token, 0]), [BLOCK, DIM])
        v = tl.reshape(value.load([batch, head, token, 0]), [BLOCK, VALUE_DIM])
        logits = tl.dot(q, tl.trans(k)) * scale2
        if scores is not None:
            # Not before the loop: there they would take registers that are spilled then. Nor does
            # the compiler move them, since it cannot know that this is 0.
            zero = tl.minimum(number, 0)
            one, other = band_ends(band, head)
            if band is None:
                # A band all the same: without one the assembler spills three times as much.
                one = zero - FARTHEST
                other = FARTHEST - zero
            low, high = band_distances(scores, scores, one, other, begin, shift, span)
            window = score_window(scores, head, zero, low, high, shift, span, BLOCK, BLOCK, False)
            logits += spread(window, BLOCK, BLOCK, False)
        logits = hide(logits, 0, 0, keys, near, far, left, right, BLOCK, BLOCK, False, RAGGED)
        if mask is not None:
            here = mask + batch.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h
            logits = add_mask(
                logits, here, 0, 0, queries, keys, mask_q, mask_k, BLOCK, BLOCK, False, KEY_MASK
            )
        p = tl.exp2(logits - norm[:, None])
        grad_p = tl.dot(grad, tl.trans(v))
        dropped = p
        if seed is not None:
            keep = kept(seed, batch, head, token, token, threshold, BLOCK, BLOCK, False)
            grad_p = tl.where(keep, grad_p * kept_scale, 0.0)
            dropped = tl.where(keep, p * kept_scale, 0.0)
        grad_v = tl.dot(tl.trans(dropped.to(grad.dtype)), grad)
        grad_logits = p * (grad_p - dot[:, None])
        total += grad_logits
        narrow = grad_logits.to(q.dtype)
        grad_k = tl.dot(tl.trans(narrow), q) * scale
        grad_q = tl.dot(narrow, k) * scale

        if WHOLE:
            grad_value.store(
                [batch, head, 0, 0], tl.reshape(grad_v.to(q.dtype), [1, 1, BLOCK, VALUE_DIM])
            )
            grad_key.store([batch, head, 0, 0], tl.reshape(grad_k.to(q.dtype), [1, 1, BLOCK, DIM]))
            grad_query.store(
                [batch, head, 0, 0], tl.reshape(grad_q.to(q.dtype), [1, 1, BLOCK, DIM])
            )
        else:
            spots = (token + i).to(tl.int64)[:, None]
            out = grad_value + batch.to(tl.int64) * grad_value_b + head.to(tl.int64) * grad_value_h
            out = out + spots * grad_value_n + value_column[None, :]
            inside = (i < keys)[:, None] & (value_column < VALUE_WIDTH)[None, :]
            tl.store(out, grad_v.to(q.dtype), mask=inside)
            out = grad_key + batch.to(tl.int64) * grad_key_b + head.to(tl.int64) * grad_key_h
            out = out + spots * grad_key_n + column[None, :]
            inside = (i < keys)[:, None] & (column < WIDTH)[None, :]
            tl.store(out, grad_k.to(q.dtype), mask=inside)
            out = grad_query + batch.to(tl.int64) * grad_query_b + head.to(tl.int64) * grad_query_h
            out = out + spots * grad_query_n + column[None, :]
            inside = (i < queries)[:, None] & (column < WIDTH)[None, :]
            tl.store(out, grad_q.to(q.dtype), mask=inside)
    if sums is not None:
        slots = diagonal_sums(total, 0, BLOCK, PARTS)
        is_first = tl.arange(0, BLOCK * PARTS // 2) // PARTS % PARTS == 0
        sums += tl.program_id(0).to(tl.int64) * (2 * BLOCK)
        for number in tl.static_range(4):
            spots = sums + distances(number, BLOCK, PARTS)
            tl.store(spots, all_parts(slots[number], BLOCK, PARTS), mask=is_first)
