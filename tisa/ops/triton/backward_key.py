"""The gradients of key and value: one program for BLOCK_N of them, queries streamed past."""

import triton
import triton.language as tl

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
    score_window,
    spread,
    visible_distances,
)


@triton.jit
def add_scores(
    logits, scores, head, i0, j0, near, far, low, high, left, right, shift, span,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the logits of a tile, keys first, with its scores added and the unseen hidden."""
    if scores is not None:
        window = score_window(scores, head, j0 - i0, low, high, shift, span, BLOCK_M, BLOCK_N, True)
        logits += spread(window, BLOCK_M, BLOCK_N, True)
    # Keys past the end have gradients that nobody stores.
    return hide(logits, i0, j0, 0, near, far, left, right, BLOCK_M, BLOCK_N, True, False)


@triton.jit
def key_kernel_head(
    grad_k, grad_v, k, v, query, grad_output, scores, band, one, other, mask, seed,
    statistics, log_weights,
    delta, batch, token, row, row_start, head, j0, queries, keys, start, left, right, shift, span,
    mask_b, mask_h, mask_q, mask_k, scale2, threshold, kept_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_MASK: tl.constexpr, ONE_LOOP: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of one tile of keys and values with one query head's part added."""
    near, far = visible_distances(start, left, right)
    low, high = band_distances(scores, band, one, other, start, shift, span)
    below, above = edge_scores(scores, head, low, high, shift, span)
    # Down a column distances fall: what is above the band comes first.
    first, a, b, c, d, last = ranges(j0, queries, -far, -near, -high, -low, BLOCK_N, BLOCK_M)
    if mask is not None:
        mask += batch.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h
    for phase in tl.static_range(1 if ONE_LOOP else 2):
        begin = first if ONE_LOOP else 0
        end = last
        if not ONE_LOOP:
            end = (b - a) + (d - c) if phase == 0 else (a - first) + (c - b) + (last - d)
        for number in tl.range(begin, end):
            if ONE_LOOP:
                i0 = number * BLOCK_M
                in_first = (number >= a) & (number < b)
                plain = in_first | ((number >= c) & (number < d))
                edge = tl.where(plain, tl.where(in_first, above, below), 0.0)
            elif phase == 0:
                i0 = plain_tile(number, a, b, c) * BLOCK_M
                edge = tl.where(number < b - a, above, below)
            else:
                i0 = other_tile(number, first, a, b, c, d) * BLOCK_M
                edge = 0.0
            i0 = tl.multiple_of(i0, BLOCK_M)
            q = tl.reshape(query.load([batch, head, token + i0, 0]), [BLOCK_M, DIM])
            grad = tl.reshape(grad_output.load([batch, head, token + i0, 0]), [BLOCK_M, VALUE_DIM])
            norm = tl.reshape(statistics.load([row, row_start + i0]), [BLOCK_M])
            dot = tl.reshape(delta.load([row, row_start + i0]), [BLOCK_M])
            logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            grad_p = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            if SPLIT:
                # As the forward pass adds up, so that large scores are rounded alike.
                logits = logits * scale2 + edge
            else:
                logits = logits * scale2 + (edge - norm)[None, :]
            if ONE_LOOP:
                if not plain:
                    logits = add_scores(
                        logits, scores, head, i0, j0, near, far, low, high, left, right,
                        shift, span, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
            elif phase == 1:
                logits = add_scores(
                    logits, scores, head, i0, j0, near, far, low, high, left, right,
                    shift, span, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            if mask is not None:
                logits = add_mask(
                    logits, mask, i0, j0, queries, keys, mask_q, mask_k,
                    BLOCK_M, BLOCK_N, True, KEY_MASK,
                )  # fmt: skip
            if SPLIT:
                log_weight = tl.reshape(log_weights.load([row, row_start + i0]), [BLOCK_M])
                logits = (logits - norm[None, :]) - log_weight[None, :]
            p = tl.exp2(logits)
            dropped = p
            if seed is not None:
                keep = kept(
                    seed, batch, head, token + i0, token + j0, threshold, BLOCK_M, BLOCK_N, True
                )
                grad_p = tl.where(keep, grad_p * kept_scale, 0.0)
                dropped = tl.where(keep, p * kept_scale, 0.0)
            grad_logits = p * (grad_p - dot[None, :])
            grad_v = tl.dot(dropped.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
            grad_k = tl.dot(grad_logits.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=CHANGING)
def key_kernel(
    query, key, value, grad_output, scores, band, mask, seed, cu_seqlens, start_pointer,
    statistics, log_weights, delta, grad_key, grad_value,
    grad_key_b, grad_key_h, grad_key_n, grad_value_b, grad_value_h, grad_value_n,
    mask_b, mask_h, mask_q, mask_k,
    key_heads, tiles, queries, keys, start, left, right, shift, span,
    scale, threshold, kept_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, GROUP: tl.constexpr, KEY_MASK: tl.constexpr,
    ONE_LOOP: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_N keys and values, summed over the query heads they serve.

    ONE_LOOP: plain and other tiles in one loop, which needs fewer registers. The assembler
    serialises the matrix units in it for some widths; those take two loops (configs.py).
    """
    tile = tl.program_id(0) % tiles
    unit = tl.program_id(0) // tiles
    sequence, key_head, batch, token, _, row_start, queries, keys, start = place(
        unit, key_heads, cu_seqlens, start_pointer, start, queries, keys
    )
    j0 = tile * BLOCK_N
    if j0 >= keys:
        return
    one, other = band_ends(band, key_head * GROUP)
    k = tl.reshape(key.load([batch, key_head, token + j0, 0]), [BLOCK_N, DIM])
    v = tl.reshape(value.load([batch, key_head, token + j0, 0]), [BLOCK_N, VALUE_DIM])
    grad_k = tl.zeros([BLOCK_N, DIM], tl.float32)
    grad_v = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)
    scale2 = scale * LOG2E
    if GROUP == 1:
        row = key_head if cu_seqlens is not None else unit
        grad_k, grad_v = key_kernel_head(
            grad_k, grad_v, k, v, query, grad_output, scores, band, one, other, mask, seed,
            statistics, log_weights, delta, batch, token, row, row_start, key_head, j0, queries,
            keys, start, left, right, shift, span, mask_b, mask_h, mask_q, mask_k, scale2,
            threshold, kept_scale, BLOCK_M, BLOCK_N, DIM, VALUE_DIM, KEY_MASK, ONE_LOOP, SPLIT,
            PRECISION,
        )  # fmt: skip
    else:
        for member in tl.range(0, GROUP):
            head = key_head * GROUP + member
            one, other = band_ends(band, head)
            row = head if cu_seqlens is not None else sequence * key_heads * GROUP + head
            grad_k, grad_v = key_kernel_head(
                grad_k, grad_v, k, v, query, grad_output, scores, band, one, other, mask, seed,
                statistics, log_weights, delta, batch, token, row, row_start, head, j0, queries,
                keys, start, left, right, shift, span, mask_b, mask_h, mask_q, mask_k, scale2,
                threshold, kept_scale, BLOCK_M, BLOCK_N, DIM, VALUE_DIM, KEY_MASK, ONE_LOOP,
                SPLIT, PRECISION,
            )  # fmt: skip

    j = j0 + tl.arange(0, BLOCK_N)
    column = tl.arange(0, DIM)
    grad_key += batch.to(tl.int64) * grad_key_b + key_head.to(tl.int64) * grad_key_h
    places = grad_key + (token + j).to(tl.int64)[:, None] * grad_key_n + column[None, :]
    inside = (j < keys)[:, None] & (column < WIDTH)[None, :]
    tl.store(places, (grad_k * scale).to(grad_key.dtype.element_ty), mask=inside)
    column = tl.arange(0, VALUE_DIM)
    grad_value += batch.to(tl.int64) * grad_value_b + key_head.to(tl.int64) * grad_value_h
    places = grad_value + (token + j).to(tl.int64)[:, None] * grad_value_n + column[None, :]
    inside = (j < keys)[:, None] & (column < VALUE_WIDTH)[None, :]
    tl.store(places, grad_v.to(grad_value.dtype.element_ty), mask=inside)
