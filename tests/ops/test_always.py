"""Keys that a window does not hide: against the formula and, gradients, the reference."""

import numpy as np
import pytest
import torch

import formulas
import tisa
from cases import Case, leaves
from test_memory import Largest
from tisa.ops import blocks

# By name: the case, and the places of each of its two sequences.
CASES = {
    "both ends": (Case("", 20, 20, options={"window": 3}), [[0, 19], [0, 19]]),
    "ends of padded sequences": (
        Case("", 20, 20, mask="right padding", options={"window": 2}), [[0, 19], [0, 17]],
    ),
    "padded on the left": (
        Case("", 20, 20, mask="left padding", options={"window": 2}), [[0, 19], [2, 19]],
    ),
    "within the window": (Case("", 4, 4, options={"window": 9}), [[0, 3], [0, 3]]),
    "one token": (Case("", 1, 1, options={"window": 2}), [[0, 0], [0, 0]]),
    "named twice, no keys, none": (
        Case("", 9, 9, options={"window": 1}), [[4, 4, -1, 9], [-1, -1, -1, -1]],
    ),
    "no places": (Case("", 9, 9, options={"window": 1}), [[], []]),
    "no window": (Case("", 9, 9), [[0, 8], [3, 3]]),
    "causal, grouped heads": (
        Case("", 12, 12, key_heads=2, options={"window": (2, None), "is_causal": True}),
        [[0, 11], [5, 1]],
    ),
    "fewer queries, static cache": (
        Case("", 3, 20, options={"window": 2, "query_start": torch.tensor(9)}), [[0, 19], [7, 8]],
    ),
    "no scores": (Case("", 9, 11, scores=False, options={"window": 1}), [[0, 10], [2, 3]]),
    "scores of keys, a float mask, wider values": (
        Case("", 9, 11, value_dim=5, key_scores="drawn", mask="float with -inf",
             options={"window": (1, 2)}),
        [[0, 10], [1, 5]],
    ),
    "nobody sees anything": (Case("", 5, 5, mask="nothing", options={"window": 1}), [[0, 4]] * 2),
    "a dense mask, more queries": (
        Case("", 11, 6, key_heads=1, mask="dense", options={"window": 1, "scale": -0.4}),
        [[0, 5], [2, 1]],
    ),
}  # fmt: skip
NAMED = pytest.mark.parametrize("name", CASES)


def made(name, dtype=torch.float64):
    case, places = CASES[name]
    qkv, scoring, options = case.make(dtype)
    return case, qkv, scoring, options | {"always": torch.tensor(places, dtype=torch.int64)}


def by_formula(case, qkv, scoring, options):
    query, key, value = (x.detach().numpy() for x in qkv)
    out = np.zeros((case.batch, case.heads, case.queries, case.value_dim))
    lse = np.zeros(out.shape[:3])
    mask = options.get("attn_mask")
    if mask is not None:
        mask = np.broadcast_to(mask.numpy(), (case.batch, case.heads, case.queries, case.keys))
    window, keyed = options.get("window", (None, None)), options.get("key_scores")
    start = options.get("query_start")
    for b in range(case.batch):
        for h in range(case.heads):
            f = None
            if scoring is not None:
                kernels = [p[h].tolist() for p in scoring.parameters()]
                f = lambda k, kernels=kernels: formulas.tisa(*kernels, k)  # noqa: E731
            g = h * case.key_heads // case.heads
            out[b, h], lse[b, h] = formulas.attention(
                query[b, h], key[b, g], value[b, g], f,
                mask=None if mask is None else mask[b, h],
                key_scores=None if keyed is None else keyed[b, h].tolist(),
                causal=options.get("is_causal", False), scale=options.get("scale"),
                start=None if start is None else int(start),
                window=(window, window) if isinstance(window, int) else window,
                always=options["always"][b].tolist(),
            )  # fmt: skip
    return torch.from_numpy(out), torch.from_numpy(lse)


@NAMED
def test_values_equal_the_formula(name):
    expected = by_formula(*made(name))
    for backend in ("reference", "chunked", "sdpa"):
        case, qkv, scoring, options = made(name)
        if backend == "sdpa":
            found = (case.call(backend, qkv, scoring, options),)
        else:
            found = case.call(backend, qkv, scoring, options | {"return_lse": True})
        for one, other in zip(found, expected, strict=False):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def gradients(name, backend):
    case, qkv, scoring, options = made(name)
    outputs = case.call(backend, qkv, scoring, options | {"return_lse": backend != "sdpa"})
    outputs = (outputs,) if backend == "sdpa" else outputs
    generator = torch.Generator().manual_seed(3)
    total = sum(
        (torch.where(torch.isfinite(o), o, 0.0) * torch.randn(o.shape, generator=generator)).sum()
        for o in outputs[: 1 if backend == "sdpa" else 2]
    )
    return torch.autograd.grad(total, leaves(qkv, scoring, options))


@NAMED
def test_gradients_equal_those_of_the_reference(name, monkeypatch):
    monkeypatch.setattr(blocks, "CPU_BLOCK", (60, 4))
    for a, b in zip(gradients(name, "chunked"), gradients(name, "reference"), strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_score_at_a_places_own_offset_is_trained():
    """A token that one key alone reaches from far away gives that offset its gradient."""
    query, key = torch.zeros(1, 1, 9, 2).double(), torch.zeros(1, 1, 9, 2).double()
    value = torch.eye(9).double()[None, None]
    vector = torch.zeros(1, 17).double().requires_grad_()
    output = tisa.attention(
        query, key, value, vector, window=0, always=torch.tensor([[0]]), backend="chunked"
    )
    # Query 7 sees itself and key 0, at offset −7: half each.
    (gradient,) = torch.autograd.grad(output[0, 0, 7, 0], vector)
    expected = torch.zeros(1, 17).double()
    expected[0, 8], expected[0, 1] = -0.25, 0.25
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_those_alone(backend, causal):
    generator = torch.Generator().manual_seed(0)
    lengths, total = [7, 1, 0, 12], 22
    ends = torch.tensor([0, 7, 8, 8, 20], dtype=torch.int32)
    places = torch.tensor([[0, 6], [0, 0], [0, -1], [0, 11]], dtype=torch.int32)
    qkv = [torch.randn(total, 4, 8, generator=generator).double() for _ in range(3)]
    qkv = [x[:, : 4 if n == 0 else 2].requires_grad_() for n, x in enumerate(qkv)]
    scoring = Case("").make_scoring().double()
    options = dict(window=2, is_causal=causal, enable_gqa=True, backend=backend)
    packed = tisa.attention(*qkv, scoring, cu_seqlens=ends, max_seqlen=13, always=places, **options)
    parts, first = [], 0
    for length, own in zip(lengths, places, strict=True):
        alone = [x[first : first + length].transpose(0, 1)[None] for x in qkv]
        options["backend"] = "reference"
        if length:
            parts.append(tisa.attention(*alone, scoring, always=own[None], **options)[0])
        first += length
    expected = torch.cat([part.transpose(0, 1) for part in parts])
    torch.testing.assert_close(packed[:first], expected, rtol=1e-10, atol=1e-10)
    assert not packed[first:].any()
    upstream = torch.randn(expected.shape, generator=generator).double()
    wanted = [*qkv, *scoring.parameters()]
    found = torch.autograd.grad((packed[:first] * upstream).sum(), wanted)
    for one, other in zip(
        found, torch.autograd.grad((expected * upstream).sum(), wanted), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_dropout_drops_the_places_weights_too():
    """Of ones every weight counts alike: what is kept is what the dropout left."""
    torch.manual_seed(0)
    zeros, always = torch.zeros(1, 1, 4000, 1), torch.tensor([[0]])
    output = tisa.attention(zeros, zeros, zeros + 1, window=0, always=always, dropout_p=0.25,
                            backend="chunked")[0, 0, 1:, 0]  # fmt: skip
    # Two weights of a half, each kept as two thirds or dropped.
    shares = [
        (torch.isclose(output, torch.tensor(float(v)))).float().mean() for v in (0, 2 / 3, 4 / 3)
    ]
    assert torch.allclose(torch.stack(shares), torch.tensor([1 / 16, 6 / 16, 9 / 16]), atol=0.04)


def test_memory_is_not_that_of_all_pairs():
    qkv = [torch.randn(1, 2, 1000, 4, requires_grad=True) for _ in range(3)]
    with Largest() as seen:
        tisa.attention(
            *qkv, tisa.ALiBi(2), window=8, always=torch.tensor([[0, 999]])
        ).sum().backward()
    assert seen.elements < 1000**2 / 2
