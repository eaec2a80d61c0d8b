"""Every position method again, from its paper, pair of tokens by pair of tokens in float64.

`OUTPUTS[name](layer, x)` is the output of a `tisa.SelfAttention` for one sequence x, (length,
hidden), as the formulas have it. It reads the layer's numbers and shares no code with `tisa`.
"""

import math

import numpy as np
from scipy.integrate import solve_ivp

import formulas


def numbers(layer):
    return {name: p.detach().double().numpy() for name, p in layer.named_parameters()}


def attend(layer, x, *, logit=None, added=None, turn=None, value=None):
    """Return the attention output; `logit(h, i, j, q_i, k_j)` is q·k/√d unless given.

    `added` (3, length, hidden) goes onto q, k and v; `turn(vector, position)` rotates a head's q
    and k; `value(h, i, j)` is added to v_j for query i.
    """
    p, heads, n = numbers(layer), layer.attention.num_attention_heads, len(x)
    d = x.shape[1] // heads
    projected = []
    for kind in ("query", "key", "value"):
        if f"attention.{kind}.weight" in p:
            weight, bias = p[f"attention.{kind}.weight"], p.get(f"attention.{kind}.bias", 0.0)
            projected.append(x @ weight.T + bias)
        else:
            projected.append(np.zeros_like(x))
    if added is not None:
        projected = [a + b for a, b in zip(projected, added, strict=True)]
    q, k, v = (a.reshape(n, heads, d) for a in projected)
    logit = logit or (lambda h, i, j, q_i, k_j: q_i @ k_j / math.sqrt(d))
    out = np.zeros((n, heads, d))
    for h in range(heads):
        for i in range(n):
            row = np.zeros(n)
            for j in range(n):
                q_i, k_j = q[i, h], k[j, h]
                if turn is not None:
                    q_i, k_j = turn(q_i, i), turn(k_j, j)
                row[j] = logit(h, i, j, q_i, k_j)
            weights = np.exp(row - row.max())
            weights /= weights.sum()
            for j in range(n):
                out[i, h] += weights[j] * (v[j, h] + (value(h, i, j) if value else 0.0))
    return out.reshape(n, -1) @ p["attention.output.weight"].T + p["attention.output.bias"]


def scored(layer, x, f):
    """Return attention with f(h, key − query) added to the logits."""
    d = x.shape[1] // layer.attention.num_attention_heads

    def logit(h, i, j, q_i, k_j):
        return q_i @ k_j / math.sqrt(d) + f(h, j - i)

    return attend(layer, x, logit=logit)


def sinusoidal(layer, x):
    d = x.shape[1]
    table = np.zeros_like(x)
    if layer.position.variant == "author":
        for position in range(len(x)):
            for c in range(d // 2):
                angle = position / 10000 ** (c / (d // 2 - 1))
                table[position, c], table[position, d // 2 + c] = math.sin(angle), math.cos(angle)
        return attend(layer, x + table)
    for position in range(len(x)):
        for c in range(d):
            angle = position / 10000 ** (2 * (c // 2) / d)
            table[position, c] = math.sin(angle) if c % 2 == 0 else math.cos(angle)
    return attend(layer, x + table)


def absolute(layer, x):
    return attend(layer, x + numbers(layer)["position.table.weight"][: len(x)])


def shaw(layer, x):
    p, k = numbers(layer), layer.position.max_distance
    keys, values = p["position.key_table"][0], p["position.value_table"][0]
    d = keys.shape[-1]
    if len(keys) == 1:
        keys, values = (np.repeat(table, len(x[0]) // d, axis=0) for table in (keys, values))

    def clipped(i, j):
        return min(max(j - i, -k), k) + k

    return attend(
        layer, x,
        logit=lambda h, i, j, q_i, k_j: q_i @ (k_j + keys[h, clipped(i, j)]) / math.sqrt(d),
        value=lambda h, i, j: values[h, clipped(i, j)],
    )  # fmt: skip


def t5(layer, x):
    table = numbers(layer)["position.scoring.0.bucket_scores"]
    return scored(layer, x, lambda h, k: table[h][formulas.t5_bucket_bidirectional(k)])


def floater_vectors(layer, length):
    """Return p for (q, k, v) and every position, by an adaptive solver of high order."""
    p = numbers(layer)
    first = p["position.flow.first.weight"], p["position.flow.first.bias"]
    second = p["position.flow.second.weight"], p["position.flow.second.bias"]

    def h(t, state):
        inner = np.maximum(first[0] @ np.append(state, t) + first[1], 0)
        return second[0] @ np.append(inner, t) + second[1]

    times = np.arange(length) * 0.01
    return np.stack([
        solve_ivp(h, (0, times[-1]), start, "DOP853", times, rtol=1e-12, atol=1e-12).y.T
        for start in p["position.starts"][0]
    ])  # fmt: skip


def floater(layer, x):
    return attend(layer, x, added=floater_vectors(layer, len(x)))


def synthesizer(layer, x):
    p = {name.removeprefix("position."): value for name, value in numbers(layer).items()}
    d = x.shape[1] // layer.attention.num_attention_heads
    by_author = layer.position.variant == "author"

    def synthetic(h, i, j, q_i):
        if "logits" in p:
            return p["logits"][0, h, i, j]
        if "query_factors" in p:
            place = j if by_author else i
            return p["query_factors"][0, h, place] @ p["key_factors"][0, h, j]
        if by_author:
            own = x[i] @ p["first_weight"][0, h] if "first_weight" in p else q_i
            return np.maximum(own, 0) @ p["second_weight"][0, 0][:, j]
        inner = np.maximum(x[i] @ p["first_weight"][0, h] + p["first_bias"][0, h, 0], 0)
        return inner @ p["second_weight"][0, h][:, j] + p["second_bias"][0, h, 0, j]

    def logit(h, i, j, q_i, k_j):
        if "gates" not in p:
            return synthetic(h, i, j, q_i)
        gates = np.append(p["gates"][0, 0], 0.0) if by_author else p["gates"][0, h]
        gates = np.exp(gates) / np.exp(gates).sum()
        return gates[0] * synthetic(h, i, j, q_i) + gates[1] * q_i @ k_j / math.sqrt(d)

    return attend(layer, x, logit=logit)


def tupe(layer, x):
    p, heads, n = numbers(layer), layer.attention.num_attention_heads, len(x)
    d = x.shape[1] // heads
    table = p["position.table.weight"][: n + 1]
    centred = table - table.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    normed = normed * p["position.norm.weight"] + p["position.norm.bias"]
    sides = []
    for side in ("query", "key"):
        weight, bias = p[f"position.to_{side}.weight"], p[f"position.to_{side}.bias"]
        sides.append((normed @ weight.T + bias).reshape(n + 1, heads, d))
    between = np.einsum("ihd,jhd->hij", *sides) / math.sqrt(2 * d)
    # [CLS] to others is row 0 with itself, others to [CLS] row 1 with itself.
    to_others, to_cls = between[:, 0, 0].copy(), between[:, 1, 1].copy()
    buckets = p.get("position.scoring.bucket_scores")
    variant, own = layer.position.variant, p.get("position.cls_scores", np.zeros((2, heads)))

    def positional(h, i, j):
        relative = 0.0 if buckets is None else buckets[h][formulas.t5_bucket_bidirectional(j - i)]
        if i > 0 and j > 0:
            return between[h, i + 1, j + 1] + relative
        reset = to_others[h] + own[0, h] if i == 0 else to_cls[h] + own[1, h]
        return reset + relative if variant == "before" else reset

    def logit(h, i, j, q_i, k_j):
        return q_i @ k_j / math.sqrt(2 * d) + positional(h, i, j)

    return attend(layer, x, logit=logit)


def rotary_rates(d, n, *, scaling="none", factor=1.0, original_length=16, ramp="paper", p=1.0):
    """Return the rates of n positions' pairs, one by one, and the temperature."""
    rates = [10000 ** (-2 * i / d) for i in range(d // 2)]
    s, length = factor, original_length
    if scaling == "linear":
        rates = [rate / s for rate in rates]
    if scaling == "dynamic_ntk":
        s = max(1.0, factor * n / length - (factor - 1))
    if scaling in ("ntk", "dynamic_ntk"):
        rates = [(10000 * s ** (d / (d - 2))) ** (-2 * i / d) for i in range(d // 2)]
    if scaling == "yarn":
        for i, rate in enumerate(rates):
            turns = length * rate / (2 * math.pi)
            kept = 0.0 if turns < 1 else 1.0 if turns > 32 else (turns - 1) / 31
            if ramp == "author":
                low, high = (d * math.log(length / (t * 2 * math.pi)) / (2 * math.log(10000))
                             for t in (32, 1))  # fmt: skip
                low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
                kept = 1 - min(max((i - low) / max(high - low, 0.001), 0), 1)
            rates[i] = (1 - kept) * rate / s + kept * rate
    temperature = 0.1 * math.log(s) + 1 if scaling == "yarn" else 1.0
    return [rate if i < int(p * d / 2) else 0.0 for i, rate in enumerate(rates)], temperature


def rotary(layer, x, **scaling):
    d = x.shape[1] // layer.attention.num_attention_heads
    rates, temperature = rotary_rates(d, len(x), **scaling)

    def turn(vector, position):
        turned = np.zeros(d)
        for i in range(d // 2):
            one, two = (2 * i, 2 * i + 1) if layer.position.interleaved else (i, i + d // 2)
            angle = position * rates[i]
            turned[one] = vector[one] * math.cos(angle) - vector[two] * math.sin(angle)
            turned[two] = vector[one] * math.sin(angle) + vector[two] * math.cos(angle)
        return turned * temperature

    return attend(layer, x, turn=turn)


def scoring_numbers(layer):
    prefix = "position.scoring.0."
    return {
        name.removeprefix(prefix): value.tolist()
        for name, value in numbers(layer).items()
        if name.startswith(prefix)
    }


def tisa(layer, x):
    p = scoring_numbers(layer)
    a, b, c = (p[f"kernel_{name}"] for name in ("amplitudes", "sharpness", "offsets"))
    return scored(layer, x, lambda h, k: formulas.tisa(a[h], b[h], c[h], k))


def near_far(layer, x):
    return scored(layer, x, near_far_in(layer, "position.scoring.0."))


def tisa_v2(layer, x):
    p, heads = scoring_numbers(layer), layer.attention.num_attention_heads
    slopes = formulas.tisa_v2_slopes(heads, 64.0, 4096.0)
    names = ("step_amplitudes", "step_offsets", "step_widths", "floors")
    return scored(layer, x, lambda h, k: formulas.tisa_v2(*(p[n][h] for n in names), slopes[h], k))


def alibi(layer, x):
    slopes = formulas.alibi_slopes(layer.attention.num_attention_heads)
    return scored(layer, x, lambda h, k: -slopes[h] * abs(k))


def near_far_in(layer, prefix):
    """Return f(h, k) of a near-far curve whose numbers have that prefix."""
    p = {n.removeprefix(prefix): v.tolist() for n, v in numbers(layer).items()
         if n.startswith(prefix)}  # fmt: skip
    kernels = [p[f"near.kernel_{name}"] for name in ("amplitudes", "sharpness", "offsets")]
    sides = [[formulas.softplus(r) for r in row] for row in p["raw_strengths"]]
    rates = [formulas.softplus(r) for r in p["raw_rates"]]
    return lambda h, k: formulas.near_far(*(a[h] for a in kernels), *sides[h], rates[h], k)


def forgetting(layer, x, step, gate="position.gates.0", f=None):
    """Return causal attention in which each token l takes step(w·x_l + b) from all before it."""
    p, d = numbers(layer), x.shape[1] // layer.attention.num_attention_heads
    w, b = p[f"{gate}.weight"], p.get(f"{gate}.bias", np.zeros(len(p[f"{gate}.weight"])))

    def logit(h, i, j, q_i, k_j):
        if j > i:
            return -math.inf
        taken = sum(step(w[h] @ x[between] + b[h]) for between in range(j + 1, i + 1))
        return q_i @ k_j / math.sqrt(d) - taken + (f(h, j - i) if f else 0.0)

    return attend(layer, x, logit=logit)


def forgotten(z):
    """Return −log f of a forget gate f = σ(z)."""
    return -math.log(1 / (1 + math.exp(-z)))


def fox(layer, x):
    return forgetting(layer, x, forgotten)


def cable(layer, x):
    by_author = layer.position.variant == "author"
    return forgetting(layer, x, formulas.softplus if by_author else lambda z: max(z, 0.0))


def near_far_fox(layer, x):
    curve = near_far_in(layer, "position.curve.scoring.0.")
    return forgetting(layer, x, forgotten, "position.gate.gates.0", curve)


def at_least_a_hundredth(r):
    return max(r, 0.01)


def kerple_log(layer, x):
    p = scoring_numbers(layer)
    kept = formulas.softplus
    if layer.position.scoring[0].variant == "author":
        kept = at_least_a_hundredth
    r1, r2 = ([kept(r) for r in p[n]] for n in ("raw_r1", "raw_r2"))
    return scored(layer, x, lambda h, k: -r1[h] * math.log(1 + r2[h] * abs(k)))


def kerple_power(layer, x):
    p = scoring_numbers(layer)
    r1 = [formulas.softplus(r) for r in p["raw_r1"]]
    r2 = [2 / (1 + math.exp(-r)) for r in p["raw_r2"]]
    if layer.position.scoring[0].variant == "author":
        r1, r2 = ([min(at_least_a_hundredth(r), most) for r in p[n]]
                  for n, most in (("raw_r1", math.inf), ("raw_r2", 2.0)))  # fmt: skip
    return scored(layer, x, lambda h, k: -r1[h] * abs(k) ** r2[h])


def fire(layer, x):
    p = {name.removeprefix("position."): value for name, value in numbers(layer).items()}
    c, threshold = abs(p["rates"][0]), abs(p["multipliers"][0] * layer.position.initial_length)
    d = x.shape[1] // layer.attention.num_attention_heads

    def psi(distance):
        return math.log(c * distance + 1)

    def f(h, share):
        total = p["outer_biases"][0, h]
        for a, b, w in zip(p["inner_weights"][0], p["inner_biases"][0], p["outer_weights"][0, h],
                           strict=True):  # fmt: skip
            total += w * max(a * share + b, 0.0)
        return total

    def logit(h, i, j, q_i, k_j):
        return q_i @ k_j / math.sqrt(d) + f(h, psi(abs(i - j)) / (psi(max(threshold, i)) + 1e-6))

    return attend(layer, x, logit=logit)


OUTPUTS = {
    "none": attend,
    "sinusoidal": sinusoidal,
    "absolute": absolute,
    "shaw": shaw,
    "t5": t5,
    "floater": floater,
    "synthesizer-random": synthesizer,
    "synthesizer-factorised": synthesizer,
    "synthesizer-dense": synthesizer,
    "synthesizer-random-mixed": synthesizer,
    "synthesizer-factorised-mixed": synthesizer,
    "synthesizer-dense-mixed": synthesizer,
    "tupe-a": tupe,
    "tupe-r": tupe,
    "rotary": rotary,
    "tisa": tisa,
    "alibi": alibi,
    "kerple-log": kerple_log,
    "kerple-power": kerple_power,
    "tisa-v2": tisa_v2,
    "near-far": near_far,
    "fire": fire,
    "fox": fox,
    "cable": cable,
    "near-far-fox": near_far_fox,
}
