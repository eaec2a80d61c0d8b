"""A score for each key in the fused kernels, interpreted: every promise, against float64.

Key scores are an added mask with one row for all queries. The reference is given that mask, so that
nothing of theirs is compared with itself.
"""

from itertools import pairwise

import pytest
import torch

import tisa
from tisa.offsets import to_matrix
from tisa.ops import triton as backend

pytestmark = pytest.mark.skipif(
    not backend.interpreted(), reason="with a GPU the kernels are compiled: test_gpu_fused.py"
)
TOLERANCE = {torch.float16: 4e-3, torch.float32: 5e-6}


def assert_close(found, expected, tolerance):
    """Differences against the largest number of all: some gradients are 0 by cancellation."""
    finite = [torch.isfinite(x) for x in expected]
    largest = [float(x[f].detach().abs().max()) for x, f in zip(expected, finite, strict=True)]
    for got, want, there, size in zip(found, expected, finite, largest, strict=True):
        assert torch.equal(torch.isfinite(got), there)
        error = float((got.double() - want)[there].detach().abs().max())
        assert error <= tolerance * max(size, 0.1 * max(largest))


def drawn(dtype, *, queries=9, keys=9, batch=2, heads=2, key_heads=2, dim=16, scores=True):
    """Return query, key, value, scores (or None) and key scores: the same numbers in any dtype."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape, dtype=dtype):
        x = torch.randn(shape, generator=generator).half()
        return x.to(dtype).requires_grad_()

    qkv = [normal(batch, n, length, dim) for n, length in (
        (heads, queries), (key_heads, keys), (key_heads, keys))]  # fmt: skip
    of_offsets = normal(heads, queries + keys - 1, dtype=wide) if scores else None
    # As the gates of a Forgetting Transformer are: a sum that grows.
    of_keys = normal(batch, heads, keys, dtype=wide).detach().cumsum(-1).requires_grad_()
    return [*qkv, of_offsets, of_keys]


def as_mask(of_keys, mask):
    """Return an added mask of key scores and of another mask, boolean or added."""
    rows = of_keys.unsqueeze(2)
    if mask is None:
        return rows
    if mask.dtype == torch.bool:
        return rows.masked_fill(~mask, -torch.inf)
    return rows + mask.to(of_keys)


def results(name, dtype, sizes, *, mask=None, band=None, **options):
    """Return output, log-sum-exp and every gradient."""
    leaves = drawn(dtype, **sizes)
    *given, of_keys = leaves
    if band is not None:
        options["band"] = torch.tensor(band, dtype=torch.int32)
    if name == "triton":
        options |= {"key_scores": of_keys, "attn_mask": mask}
    else:
        options["attn_mask"] = as_mask(of_keys, mask)
    torch.manual_seed(5)
    out, lse = tisa.attention(
        *given, backend=name, return_lse=True,
        enable_gqa=given[0].shape[1] != given[1].shape[1], **options,
    )  # fmt: skip
    # The log-sum-exp of a query that sees nothing is −inf.
    total = out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()
    wanted = [x for x in leaves if x is not None]
    return [out, lse, *torch.autograd.grad(total, wanted)]


def seen(batch, heads, queries, keys):
    """Return a boolean mask; of several queries one sees nothing."""
    drawn = torch.rand(batch, heads, queries, keys, generator=torch.Generator().manual_seed(4))
    return (drawn > 0.4) & (torch.arange(queries) < max(1, queries - 1))[:, None]


BLOCKS = {"queries": 70, "keys": 131, "batch": 1}
CASES = {
    "plain": ({"queries": 33, "keys": 45}, {}),
    "no scores": ({"queries": 70, "keys": 70, "scores": False}, {}),
    "one key": ({"queries": 5, "keys": 1}, {}),
    "one query, one key": ({"queries": 1, "keys": 1}, {}),
    "causal": ({"queries": 33, "keys": 45}, {"is_causal": True}),
    "causal: blind rows": ({"queries": 45, "keys": 33}, {"is_causal": True}),
    "grouped, causal": (
        {"queries": 40, "keys": 40, "heads": 4, "batch": 1}, {"is_causal": True}),
    "window": ({"queries": 90, "keys": 90, "batch": 1}, {"window": (20, 9)}),
    "several blocks": (BLOCKS, {}),
    "several blocks, causal, no scores": (BLOCKS | {"scores": False}, {"is_causal": True}),
    "several blocks, band": (BLOCKS, {"band": [[-9, 7], [40, 45]]}),
    "start": ({"queries": 20, "keys": 50}, {"query_start": 7, "is_causal": True}),
    "dropout": ({"queries": 20, "keys": 17, "batch": 1}, {"dropout_p": 0.3}),
    "dropout, several blocks": (BLOCKS, {"dropout_p": 0.3}),
    "padding": ({"queries": 30, "keys": 40}, {"mask": seen(2, 1, 1, 40)}),
    "mask": ({"queries": 30, "keys": 40}, {"mask": seen(2, 2, 30, 40)}),
    "added mask, several blocks": (
        BLOCKS, {"mask": torch.randn(70, 131, generator=torch.Generator().manual_seed(2))}),
    "scale": ({}, {"scale": -0.7}),
    "odd widths": ({"dim": 20}, {}),
}  # fmt: skip
# The paths of the kernels, once each; the others are the same again, heavy.
OFTEN = {
    torch.float16: ["no scores", "one key", "grouped, causal", "several blocks, band", "dropout",
                    "padding", "scale"],
    torch.float32: ["plain", "causal: blind rows"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in often else pytest.mark.full)
        for dtype, often in OFTEN.items() for name in CASES
    ],
    ids=str,
)  # fmt: skip
def test_values_and_gradients(name, dtype):
    sizes, options = CASES[name]
    if sizes.get("heads") == 4:
        sizes = sizes | {"key_heads": 2}
    expected = results("reference", torch.float64, sizes, **options)
    found = results("triton", dtype, sizes, **options)
    assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.full)], ids=str
)
def test_packed_batches(dtype, key_heads):
    ends = [0, 5, 5, 40, 60]

    def run(kind):
        generator = torch.Generator().manual_seed(1)
        wide = torch.promote_types(kind, torch.float32)
        leaves = [
            torch.randn(63, *rest, generator=generator).half().to(to).requires_grad_()
            for *rest, to in (
                (2, 16, kind), (key_heads, 16, kind), (key_heads, 16, kind), (2, wide))
        ]  # fmt: skip
        scores = torch.randn(2, 69, generator=generator).half().to(wide).requires_grad_()
        if kind == torch.float64:
            out = one_by_one(*leaves, scores, ends)
        else:
            out = tisa.attention(
                *leaves[:3], scores, key_scores=leaves[3], backend="triton",
                cu_seqlens=torch.tensor(ends, dtype=torch.int32), max_seqlen=35,
                enable_gqa=key_heads == 1, is_causal=True,
            )  # fmt: skip
        return [out, *torch.autograd.grad(out.square().sum(), [*leaves, scores])]

    expected, found = run(torch.float64), run(dtype)
    assert_close(found, expected, TOLERANCE[dtype])
    # Tokens after the last sequence.
    assert all((x[60:] == 0).all() for x in found[:5])


def one_by_one(query, key, value, of_keys, scores, ends):
    """Return causal attention of each sequence by itself, from the formula."""
    outputs = []
    for begin, end in pairwise(ends):
        n, longest = end - begin, (scores.shape[1] + 1) // 2
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        logits = q @ k.mT / q.shape[-1] ** 0.5 + of_keys[begin:end].T[:, None]
        logits = logits + to_matrix(scores[:, longest - n : longest + n - 1], n, n) if n else logits
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        outputs.append((logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat([*outputs, torch.zeros_like(query[ends[-1] :])])


DECODING = {
    "one query": ({"queries": 1, "heads": 2}, {"is_causal": True}),
    "grouped, three queries": ({"queries": 3, "heads": 4, "key_heads": 2}, {"is_causal": True}),
    "window, mask": (
        {"queries": 3, "heads": 2}, {"window": (300, 0), "mask": seen(2, 1, 1, 700)}),
    "static cache": ({"queries": 3, "heads": 2}, {"is_causal": True, "query_start": 300}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in DECODING),
        ("one query", torch.float32),
        *(pytest.param(n, torch.float32, marks=pytest.mark.full) for n in list(DECODING)[1:]),
    ],
    ids=str,
)
def test_decoding(name, dtype):
    sizes, options = DECODING[name]
    mask = options.get("mask")
    options = {k: v for k, v in options.items() if k != "mask"} | {"enable_gqa": True}
    found = []
    with torch.no_grad():
        for how, kind in (("reference", torch.float64), ("triton", dtype)):
            *given, of_keys = drawn(kind, keys=700, **sizes)
            if how == "triton":
                more = {"key_scores": of_keys, "attn_mask": mask}
            else:
                more = {"attn_mask": as_mask(of_keys, mask)}
            found.append(tisa.attention(*given, backend=how, return_lse=True, **options, **more))
    assert_close(found[1], found[0], TOLERANCE[dtype])


@pytest.mark.parametrize("keys", [40, pytest.param(140, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_minus_infinity_hides_a_key(dtype, keys):
    *given, of_keys = drawn(dtype, queries=20, keys=keys, batch=1, scores=False)
    hidden = torch.arange(keys) % 3 == 0
    hidden = torch.stack([hidden, torch.ones_like(hidden)])[None]
    found = []
    for options in (
        {"key_scores": of_keys.masked_fill(hidden, -torch.inf)},
        {"key_scores": of_keys, "attn_mask": ~hidden[:, :, None]},
    ):
        out = tisa.attention(*given, backend="triton", **options)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*given[:3], of_keys])])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
        assert not want.isnan().any()
    # The second head sees nothing.
    assert (found[0][0][:, 1] == 0).all()
    assert (found[0][4][hidden] == 0).all()
    assert found[0][4].abs().max() > 0


def test_key_scores_that_lie_in_any_way():
    *given, of_keys = drawn(torch.float16, queries=7, keys=13, scores=False)
    one = of_keys.detach()[:1, :1].contiguous()
    ways = {
        "as a projection leaves it": of_keys.detach().mT.contiguous().mT,
        "every second": torch.stack([of_keys.detach(), torch.zeros_like(of_keys)], -1)[..., 0],
        "an odd start": torch.cat([torch.zeros(2, 2, 1), of_keys.detach()], -1)[..., 1:],
        "expanded": one.expand(2, 2, 13),
    }
    for way, lying in ways.items():
        found = []
        for x in (lying, lying.contiguous()):
            leaf = x.detach().requires_grad_()
            out = tisa.attention(*given, key_scores=leaf, backend="triton")
            found.append([out, *torch.autograd.grad(out.square().sum(), [*given[:3], leaf])])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), way


@pytest.mark.parametrize("wanted", [[4], [0], [3, 4], [1]])
def test_gradients_of_some_inputs_alone(wanted):
    found = []
    for some in (wanted, range(5)):
        leaves = drawn(torch.float16, queries=20, keys=70, batch=1)
        given = [x if i in some else x.detach() for i, x in enumerate(leaves)]
        out = tisa.attention(*given[:4], key_scores=given[4], backend="triton")
        found.append(torch.autograd.grad(out.square().sum(), [given[i] for i in wanted]))
    # All together, short sequences have a kernel of their own.
    assert_close(*found, 1e-3)


def test_a_call_that_is_known_is_not_taken_for_one_with_key_scores():
    *given, of_keys = (x.detach() for x in drawn(torch.float16))
    run = lambda **more: tisa.attention(*given, backend="triton", **more)  # noqa: E731
    # From the third time on a call is repeated.
    plain = [run() for _ in range(3)]
    gated = [run(key_scores=of_keys) for _ in range(3)]
    other = run(key_scores=of_keys * 2)
    assert torch.equal(plain[2], run())
    assert torch.equal(gated[0], gated[2])
    assert not torch.equal(plain[2], gated[2])
    assert not torch.equal(gated[2], other)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sums_of_gates_over_thousands_round_as_in_eager_code(dtype):
    """Numbers of −2,000: a query's own part of the sum is in the peak, and leaves with that."""
    query, key, value, _, _ = drawn(dtype, queries=60, keys=60, batch=1, scores=False)
    gates = torch.rand(1, 2, 60, generator=torch.Generator().manual_seed(3)) * 3
    of_keys = gates.cumsum(-1) + 2000
    found = []
    for name, kind in (("reference", torch.float64), ("triton", dtype)):
        leaves = [x.detach().to(kind).requires_grad_() for x in (query, key, value)]
        leaf = of_keys.to(torch.promote_types(kind, torch.float32)).requires_grad_()
        more = {"key_scores": leaf} if name == "triton" else {"attn_mask": leaf.unsqueeze(2)}
        out = tisa.attention(*leaves, is_causal=True, backend=name, **more)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, leaf])])
    # A logit of 2,000 has its last digit at 1.2e-4, in eager float32 too.
    assert_close(found[1], found[0], {torch.float16: 4e-3, torch.float32: 3e-4}[dtype])
