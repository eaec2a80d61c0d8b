"""Scoring functions as a GPU computes them: every head's scores in one launch, gradients in one.

Parameters come in one row of numbers, parameter after parameter, each (heads of all layers, its
numbers a head). A program has one head and BLOCK offsets. Backwards it leaves what its offsets give
to each number in a row of its own; what adds up these rows has the same order in every run.

The formulas are those of the modules, whose tests these are tested against, with their derivatives
written out. On a CPU and in a compiled graph the modules themselves are taken (`layers.py`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Fixed(NamedTuple):
    """What the compiler knows: the function, and its settings."""

    KIND: str
    BLOCK: int
    # The first offset's last part is read on the device (a static cache).
    LATE: bool = False
    KERNELS: int = 0
    # TISA v2 and ALiBi: heads of one layer, those with positions, slopes.
    HEADS: int = 0
    POSITIONAL: int = 0
    VIEW: float = 0.0
    RATIO: float = 0.0
    # T5: buckets, those of a side, the distance from which on the last one holds all.
    BUCKETS: int = 0
    PER_SIDE: int = 0
    FARTHEST: int = 0
    BIDIRECTIONAL: bool = False


class Numbers(NamedTuple):
    """One head's parameters among those of all, and where its gradients go."""

    pointer: Any
    heads: Any
    head: Any
    table: Any
    sums: Any


@triton.jit
def number(p, BEFORE: tl.constexpr, COUNT: tl.constexpr, index):
    """Return one number of a parameter that has BEFORE numbers a head before it, and COUNT."""
    return tl.load(p.pointer + BEFORE * p.heads + p.head * COUNT + index)


@triton.jit
def give(p, BEFORE: tl.constexpr, COUNT: tl.constexpr, index, value):
    """Store the gradient of that number."""
    tl.store(p.sums + BEFORE * p.heads + p.head * COUNT + index, value)


@triton.jit
def log1p(x):
    """Return log(1 + x), also where 1 + x rounds to 1."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * (x / tl.where(y == 1, 1.0, y - 1)))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x))."""
    return tl.where(x > 20, x, log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def sign(x):
    """Return −1, 0 or 1."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def bumps(p, k, FIRST: tl.constexpr, S: tl.constexpr):
    """Return TISA's kernels, whose parameters begin after FIRST numbers a head."""
    total = k * 0
    for s in tl.static_range(S):
        u = k - number(p, FIRST + 2 * S, S, s)
        sharpness = tl.abs(number(p, FIRST + S, S, s))
        total += number(p, FIRST, S, s) * tl.exp(-sharpness * (u * u))
    return total


@triton.jit
def bumps_backward(p, k, grad, FIRST: tl.constexpr, S: tl.constexpr):
    """Store the gradients of TISA's kernels."""
    for s in tl.static_range(S):
        a = number(p, FIRST, S, s)
        b = number(p, FIRST + S, S, s)
        u = k - number(p, FIRST + 2 * S, S, s)
        part = grad * tl.exp(-tl.abs(b) * (u * u))
        give(p, FIRST, S, s, tl.sum(part))
        give(p, FIRST + S, S, s, -sign(b) * a * tl.sum(part * (u * u)))
        give(p, FIRST + 2 * S, S, s, 2 * a * tl.abs(b) * tl.sum(part * u))


@triton.jit
def slope(p, FIXED: tl.constexpr):
    """Return TISA v2's slope of a head; 0 of a head without positions."""
    head = p.head % FIXED.HEADS
    steep = FIXED.VIEW * tl.exp(-head.to(tl.float64) * FIXED.RATIO)
    return tl.where(head < FIXED.POSITIONAL, steep, 0.0)


@triton.jit
def step(p, s, D, S: tl.constexpr):
    """Return one of TISA v2's steps: a, its width and whether that is held, D − o, sigmoid."""
    a = number(p, 0, S, s)
    away = D - number(p, S, S, s)
    width = number(p, 2 * S, S, s)
    held = tl.abs(width) < 1e-3
    width = tl.where(width < 0, tl.minimum(width, -1e-3), tl.maximum(width, 1e-3))
    return a, width, held, away, tl.sigmoid(sign(a) * away / width)


@triton.jit
def soft_steps(p, D, S: tl.constexpr):
    """Return TISA v2's sum of steps above its floor."""
    total = D * 0
    for s in tl.static_range(S):
        a, _width, _held, _away, share = step(p, s, D, S)
        total += tl.abs(a) * share
    return total + tl.abs(number(p, 3 * S, 1, 0)) + 1e-8


@triton.jit
def soft_steps_backward(p, D, grad, S: tl.constexpr, FIXED: tl.constexpr):
    """Store the gradients of TISA v2."""
    grad = tl.where(p.head % FIXED.HEADS < FIXED.POSITIONAL, grad / soft_steps(p, D, S), 0.0)
    for s in tl.static_range(S):
        a, width, held, away, share = step(p, s, D, S)
        give(p, 0, S, s, sign(a) * tl.sum(grad * share))
        # |a| · sign(a) = a.
        steep = grad * (a * share * (1 - share) / width)
        give(p, S, S, s, -tl.sum(steep))
        give(p, 2 * S, S, s, tl.where(held, 0.0, -tl.sum(steep * away / width)))
    give(p, 3 * S, 1, 0, sign(number(p, 3 * S, 1, 0)) * tl.sum(grad))


@triton.jit
def bucket_of(p, offset, FIXED: tl.constexpr):
    """Return the bucket of each offset."""
    if FIXED.BIDIRECTIONAL:
        distance = tl.abs(offset)
    else:
        distance = tl.maximum(-offset, 0)
    bucket = tl.load(p.table + tl.minimum(distance, FIXED.FARTHEST))
    if FIXED.BIDIRECTIONAL:
        bucket += FIXED.PER_SIDE * (offset > 0).to(tl.int32)
    return bucket


@triton.jit
def decay(p, k, FIRST: tl.constexpr):
    """Return what NearFar's decay is made of: both strengths, the rate, ρ·k, the logarithm."""
    before = number(p, 0, 2, 0)
    after = number(p, 0, 2, 1)
    rate = number(p, 2, 1, 0)
    far = softplus(rate) * k
    return before, after, rate, far, log1p(far * far)


@triton.jit
def power_of(distance, exponent):
    """Return distance^exponent and log(distance), 0 and 0 at distance 0, in float64."""
    log = tl.log(tl.maximum(distance, 1.0).to(tl.float64))
    return tl.where(distance > 0, tl.exp(log * exponent), 0.0), log


@triton.jit(do_not_specialize=["heads", "span", "first"])
def scores_kernel(
    numbers, table, scores, start, heads, span, first, FIXED: tl.constexpr
):  # fmt: skip
    """Write BLOCK scores of one head."""
    place = tl.program_id(1) * FIXED.BLOCK + tl.arange(0, FIXED.BLOCK)
    offset = place + first
    if FIXED.LATE:
        offset -= tl.load(start).to(tl.int32)
    p = Numbers(numbers, heads, tl.program_id(0), table, numbers)
    k = offset.to(scores.dtype.element_ty)
    if FIXED.KIND == "TISA":
        found = bumps(p, k, 0, FIXED.KERNELS)
    elif FIXED.KIND == "NearFar":
        before, after, _rate, _far, log = decay(p, k, 0)
        strength = softplus(tl.where(k < 0, before, after))
        found = bumps(p, k, 3, FIXED.KERNELS) - strength * log / 2
    elif FIXED.KIND == "TISAv2":
        near = tl.where(
            p.head % FIXED.HEADS < FIXED.POSITIONAL, tl.log(soft_steps(p, -k, FIXED.KERNELS)), 0.0
        )
        found = near - slope(p, FIXED).to(k.dtype) * tl.abs(k)
    elif FIXED.KIND == "KerpleLog":
        log = log1p(softplus(number(p, 1, 1, 0)) * tl.abs(k))
        found = -softplus(number(p, 0, 1, 0)) * log
    elif FIXED.KIND == "KerplePower":
        exponent = 2 * tl.sigmoid(number(p, 1, 1, 0).to(tl.float64))
        power, log = power_of(tl.abs(k), exponent)
        found = -softplus(number(p, 0, 1, 0)) * power
    else:
        found = number(p, 0, FIXED.BUCKETS, bucket_of(p, offset, FIXED))
    spots = scores + p.head.to(tl.int64) * span + place
    tl.store(spots, found.to(scores.dtype.element_ty), mask=place < span)


@triton.jit(do_not_specialize=["total", "heads", "span", "first"])
def gradients_kernel(
    numbers, table, gradient, sums, start, total, heads, span, first, FIXED: tl.constexpr
):  # fmt: skip
    """Write what BLOCK scores of one head give to its parameters, in this block's row."""
    place = tl.program_id(1) * FIXED.BLOCK + tl.arange(0, FIXED.BLOCK)
    offset = place + first
    if FIXED.LATE:
        offset -= tl.load(start).to(tl.int32)
    sums += tl.program_id(1).to(tl.int64) * total
    p = Numbers(numbers, heads, tl.program_id(0), table, sums)
    k = offset.to(gradient.dtype.element_ty)
    spots = gradient + p.head.to(tl.int64) * span + place
    grad = tl.load(spots, mask=place < span, other=0.0)
    if FIXED.KIND == "TISA":
        bumps_backward(p, k, grad, 0, FIXED.KERNELS)
    elif FIXED.KIND == "NearFar":
        before, after, rate, far, log = decay(p, k, 0)
        half = grad * log / -2
        give(p, 0, 2, 0, tl.sigmoid(before) * tl.sum(tl.where(k < 0, half, 0.0)))
        give(p, 0, 2, 1, tl.sigmoid(after) * tl.sum(tl.where(k < 0, 0.0, half)))
        strength = softplus(tl.where(k < 0, before, after))
        by_rate = grad * strength * (-far * k / (1 + far * far))
        give(p, 2, 1, 0, tl.sigmoid(rate) * tl.sum(by_rate))
        bumps_backward(p, k, grad, 3, FIXED.KERNELS)
    elif FIXED.KIND == "TISAv2":
        soft_steps_backward(p, -k, grad, FIXED.KERNELS, FIXED)
    elif FIXED.KIND == "KerpleLog":
        one = number(p, 0, 1, 0)
        other = number(p, 1, 1, 0)
        distance = tl.abs(k)
        reach = softplus(other) * distance
        give(p, 0, 1, 0, -tl.sigmoid(one) * tl.sum(grad * log1p(reach)))
        by_rate = tl.sum(grad * (distance / (1 + reach)))
        give(p, 1, 1, 0, -softplus(one) * tl.sigmoid(other) * by_rate)
    elif FIXED.KIND == "KerplePower":
        one = number(p, 0, 1, 0)
        half = tl.sigmoid(number(p, 1, 1, 0).to(tl.float64))
        power, log = power_of(tl.abs(k), 2 * half)
        give(p, 0, 1, 0, -tl.sigmoid(one) * tl.sum(grad * power))
        by_exponent = tl.sum(grad * power * log)
        give(p, 1, 1, 0, -softplus(one) * 2 * half * (1 - half) * by_exponent)
    else:
        bucket = bucket_of(p, offset, FIXED)
        for index in range(FIXED.BUCKETS):
            give(p, 0, FIXED.BUCKETS, index, tl.sum(tl.where(bucket == index, grad, 0.0)))


@triton.jit(do_not_specialize=["heads"])
def bands_kernel(
    numbers, bands, heads, eps, FARTHEST: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the bands of BLOCK heads, as `TISA.support` has them."""
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = head < heads
    low = head.to(numbers.dtype.element_ty) * 0 + FARTHEST
    high = -low
    strange = low * 0
    for s in tl.static_range(S):
        spots = numbers + head * S + s
        a = tl.abs(tl.load(spots, mask=there, other=0.0))
        b = tl.abs(tl.load(spots + heads * S, mask=there, other=1.0))
        c = tl.load(spots + 2 * heads * S, mask=there, other=0.0)
        # NaN if a number is none, or its square is not finite.
        strange += (a + b + c * c) * 0
        b = tl.minimum(tl.maximum(b, 1.1754943508222875e-38), 1e30)
        level = tl.log(tl.maximum(a, 1.0) * (S / eps))
        log_b = tl.log(b)
        by_b = 2 * (level + tl.abs(log_b) + 2)
        by_c = by_b
        for _ in tl.static_range(3):
            by_b = tl.maximum(by_b, 2.0)
            by_b = (level - log_b - 1 + tl.log(by_b)) / (1 - 1 / by_b)
            by_c = tl.maximum(by_c, 2.0)
            by_c = (level + log_b / 2 + 0.1931471805599453 + tl.log(by_c) / 2) / (1 - 0.5 / by_c)
        x = tl.maximum(tl.maximum(by_b, by_c), tl.maximum(level, 1.0))
        reach = tl.sqrt(x / b)
        low = tl.minimum(low, c - reach)
        high = tl.maximum(high, c + reach)
    low = tl.where(strange == strange, tl.floor(low), -FARTHEST)
    high = tl.where(strange == strange, tl.ceil(high), FARTHEST)
    low = tl.minimum(tl.maximum(low, -FARTHEST), FARTHEST)
    high = tl.minimum(tl.maximum(high, -FARTHEST), FARTHEST)
    tl.store(bands + 2 * head, low.to(tl.int32), mask=there)
    tl.store(bands + 2 * head + 1, high.to(tl.int32), mask=there)
