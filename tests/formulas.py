"""The mathematics again, in float64 and as literally as possible; shares no code with `tisa`."""

import math

import numpy as np


def tisa(a, b, c, k):
    return sum(
        a_s * math.exp(-abs(b_s) * (k - c_s) ** 2) for a_s, b_s, c_s in zip(a, b, c, strict=True)
    )


def published_tisa_matrix(amplitudes, sharpness, offsets, n):
    """Return what the author's published code adds to the logits, (heads, n, n).

    Its tensors are (kernels, heads); entry (i, j) is f(i − j − 1).
    """
    kernels, heads = amplitudes.shape
    matrix = np.zeros((heads, n, n))
    for h in range(heads):
        for i in range(n):
            for j in range(n):
                x = i - j - 1
                matrix[h, i, j] = sum(
                    amplitudes[s, h] * math.exp(-abs(sharpness[s, h]) * (offsets[s, h] - x) ** 2)
                    for s in range(kernels)
                )
    return matrix


def tisa_v2(a, o, w, floor, slope, k):
    D = -k
    steps = sum(
        abs(a_s) / (1 + math.exp(-math.copysign(1, a_s) * (D - o_s) / w_s))
        for a_s, o_s, w_s in zip(a, o, w, strict=True)
    )
    return math.log(steps + abs(floor) + 1e-8) - slope * abs(D)


def tisa_v2_slopes(heads, shortest, longest):
    views = np.geomspace(shortest, longest, heads)
    return [-math.log(1e-8) / (view / 2) for view in views]


def t5_bucket_bidirectional(k):
    """Return T5's bucket for 32 buckets and max distance 128, from method.md's description."""
    m = abs(k)
    bucket = m if m < 8 else min(15, 8 + math.floor(8 * math.log(m / 8) / math.log(16) + 1e-9))
    return bucket + (16 if k > 0 else 0)


def t5_bucket_causal(k):
    m = max(-k, 0)
    return m if m < 16 else min(31, 16 + math.floor(16 * math.log(m / 16) / math.log(8) + 1e-9))


def alibi_slopes(heads):
    """Return ALiBi's slopes by the published recursion."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: heads - closest]


def softplus(x):
    return math.log1p(math.exp(x))


def near_far(a, b, c, before, after, rate, k):
    decay = (before if k < 0 else after) * math.log(1 + (rate * k) ** 2) / 2
    return tisa(a, b, c, k) - decay


def attention(
    q, k, v, f=None, *, mask=None, key_scores=None, causal=False, scale=None, start=None,
    window=(None, None), always=(),
):  # fmt: skip
    """Return output and log-sum-exp of one batch element and one head, row by row.

    `f` is a function of the offset key − query; `key_scores` has a number for each key. The window
    hides no key whose place is in `always`.
    """
    queries, keys = len(q), len(k)
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    start = keys - queries if start is None else start
    out, lse = np.zeros((queries, v.shape[1])), np.full(queries, -np.inf)
    for i in range(queries):
        seen, logits = [], []
        for j in range(keys):
            offset = j - (i + start)
            far = window[0] is not None and offset < -window[0]
            far |= window[1] is not None and offset > window[1]
            hidden = (causal and offset > 0) or (far and j not in always)
            bias = 0.0 if f is None else f(offset)
            bias += 0.0 if key_scores is None else float(key_scores[j])
            if mask is not None:
                if mask.dtype == bool:
                    hidden |= not mask[i, j]
                else:
                    # The lowest number of float32 or bfloat16.
                    hidden |= mask[i, j] < -1.8e38
                    bias += float(mask[i, j])
            if hidden or bias == -np.inf:
                continue
            seen.append(j)
            logits.append(float(np.dot(q[i], k[j])) * scale + bias)
        if seen:
            peak = max(logits)
            weights = np.exp(np.array(logits) - peak)
            lse[i] = peak + math.log(weights.sum())
            out[i] = (weights / weights.sum()) @ v[seen]
    return out, lse


def diagonal_sums(matrix):
    """Return the sum of each diagonal, offsets key − query from the lowest to the highest."""
    queries, keys = matrix.shape
    sums = np.zeros(queries + keys - 1)
    for i in range(queries):
        for j in range(keys):
            sums[j - i + queries - 1] += matrix[i, j]
    return sums


def toeplitz_r2(matrix, kept):
    """Return R² of the fit that gives each entry its diagonal's mean, `kept` entries alone."""
    i, j = np.nonzero(kept)
    entries = matrix[i, j]
    fit = np.array([entries[j - i == k].mean() for k in j - i])
    return 1 - ((entries - fit) ** 2).sum() / ((entries - entries.mean()) ** 2).sum()


def log_softmax(x):
    return (
        x
        - x.max(-1, keepdims=True)
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))[..., None]
    )


def distilled_logits(student, teacher, real, masked):
    """Return the mean divergence of real tokens, of which masked ones count ten times."""
    total = count = 0.0
    for text, token in np.argwhere(real):
        ours, theirs = (log_softmax(x[text, token]) for x in (student, teacher))
        times = 10 if masked[text, token] else 1
        total += times * sum(math.exp(t) * (t - o) for t, o in zip(theirs, ours, strict=True))
        count += times
    return total / count


def distilled_hidden(student, teacher, real, pooled_weight):
    """Return the relative squared error, and 1 − cosine of each text's mean, over real tokens."""
    error = sum(np.sum((student[p] - teacher[p]) ** 2) for p in map(tuple, np.argwhere(real)))
    size = sum(np.sum(teacher[p] ** 2) for p in map(tuple, np.argwhere(real)))
    apart = []
    for ours, theirs, seen in zip(student, teacher, real, strict=True):
        a, b = ours[seen].mean(0), theirs[seen].mean(0)
        apart.append(1 - a @ b / math.sqrt((a @ a) * (b @ b)))
    return error / size + pooled_weight * sum(apart) / len(apart)
