"""The whole backward pass of sequences that fit one tile, in one kernel.

A program takes one head and a share of the batch. For each sequence it computes the weights once
and all gradients from them; the gradient of the scores adds up over the share in registers, and is
summed along its diagonals once at the end. Nothing is recomputed and nothing is left for others to
read, which at these lengths costs more than the arithmetic.
"""

import triton
import triton.language as tl

from tisa.attention.triton.scores import store_diagonal_sums
from tisa.attention.triton.tiles import (
    CHANGING,
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
    BLOCK: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_MASK: tl.constexpr, RAGGED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of query, key and value and the sums of a share of the batch.

    Keys are taken HALF at a time (all, or half of them): registers are what is scarce. WHOLE:
    gradients are stored through descriptors, whose addresses take none; not so packed sequences,
    where a tile reaches into the next one.
    """
    head = tl.program_id(0) // programs
    scale2 = scale * LOG2E
    i = tl.arange(0, BLOCK)
    j = tl.arange(0, HALF)
    column = tl.arange(0, DIM)
    value_column = tl.arange(0, VALUE_DIM)
    total = tl.zeros([BLOCK, HALF], tl.float32)
    second_total = tl.zeros([BLOCK, HALF], tl.float32)
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
        grad_q = tl.zeros([BLOCK, DIM], tl.float32)
        for half in tl.static_range(BLOCK // HALF):
            j0 = half * HALF
            k = tl.reshape(key.load([batch, head, token + j0, 0]), [HALF, DIM])
            v = tl.reshape(value.load([batch, head, token + j0, 0]), [HALF, VALUE_DIM])
            logits = tl.dot(q, tl.trans(k)) * scale2
            if scores is not None:
                # Not before the loop: there they would take registers that are spilled then.
                one, other = band_ends(band, head)
                low, high = band_distances(scores, band, one, other, begin, shift, span)
                window = score_window(scores, head, j0, low, high, shift, span, BLOCK, HALF, False)
                logits += spread(window, BLOCK, HALF, False)
            logits = hide(logits, 0, j0, keys, near, far, left, right, BLOCK, HALF, False, RAGGED)
            if mask is not None:
                here = mask + batch.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h
                logits = add_mask(
                    logits, here, 0, j0, queries, keys, mask_q, mask_k,
                    BLOCK, HALF, False, KEY_MASK,
                )  # fmt: skip
            p = tl.exp2(logits - norm[:, None])
            grad_p = tl.dot(grad, tl.trans(v))
            dropped = p
            if seed is not None:
                keep = kept(seed, batch, head, token, token + j0, threshold, BLOCK, HALF, False)
                grad_p = tl.where(keep, grad_p * kept_scale, 0.0)
                dropped = tl.where(keep, p * kept_scale, 0.0)
            grad_v = tl.dot(tl.trans(dropped.to(grad.dtype)), grad)
            grad_logits = p * (grad_p - dot[:, None])
            if half == 0:
                total += grad_logits
            else:
                second_total += grad_logits
            narrow = grad_logits.to(q.dtype)
            grad_k = tl.dot(tl.trans(narrow), q) * scale
            grad_q = tl.dot(narrow, k, grad_q)

            if WHOLE:
                grad_value.store(
                    [batch, head, j0, 0], tl.reshape(grad_v.to(q.dtype), [1, 1, HALF, VALUE_DIM])
                )
                grad_key.store(
                    [batch, head, j0, 0], tl.reshape(grad_k.to(q.dtype), [1, 1, HALF, DIM])
                )
            else:
                spots = (token + j0 + j).to(tl.int64)[:, None]
                there = (j0 + j < keys)[:, None]
                out = grad_value + batch.to(tl.int64) * grad_value_b
                out += head.to(tl.int64) * grad_value_h
                out = out + spots * grad_value_n + value_column[None, :]
                inside = there & (value_column < VALUE_WIDTH)[None, :]
                tl.store(out, grad_v.to(q.dtype), mask=inside)
                out = grad_key + batch.to(tl.int64) * grad_key_b + head.to(tl.int64) * grad_key_h
                out = out + spots * grad_key_n + column[None, :]
                tl.store(out, grad_k.to(q.dtype), mask=there & (column < WIDTH)[None, :])
        grad_q = (grad_q * scale).to(q.dtype)
        if WHOLE:
            grad_query.store([batch, head, 0, 0], tl.reshape(grad_q, [1, 1, BLOCK, DIM]))
        else:
            out = grad_query + batch.to(tl.int64) * grad_query_b + head.to(tl.int64) * grad_query_h
            out = out + (token + i).to(tl.int64)[:, None] * grad_query_n + column[None, :]
            inside = (i < queries)[:, None] & (column < WIDTH)[None, :]
            tl.store(out, grad_q, mask=inside)
    if sums is not None:
        # As the tiles of a diagonal kernel: number 0 and, with two halves, number 1.
        COUNT: tl.constexpr = BLOCK // HALF
        sums += tl.program_id(0).to(tl.int64) * (COUNT * (COUNT + 1) * HALF)
        store_diagonal_sums(total, sums, BLOCK, HALF)
        if COUNT == 2:
            store_diagonal_sums(second_total, sums + (COUNT + 1) * HALF, BLOCK, HALF)
