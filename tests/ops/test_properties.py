"""What must hold for any input: translation, padding, packing, caching, agreement."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tisa
from budget import assert_within_budget, eager

BACKENDS = ("reference", "chunked", "sdpa")
seeds = st.integers(0, 2**31 - 1)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def draw(seed, *shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=dtype) for s in shapes]


def build(kind, heads, seed):
    torch.manual_seed(seed)
    return {
        "tisa": tisa.TISA,
        "tisa-v2": tisa.TISAv2,
        "t5": tisa.T5Buckets,
        "alibi": tisa.ALiBi,
        "kerple-log": tisa.KerpleLog,
        "kerple-power": tisa.KerplePower,
        "near-far": tisa.NearFar,
    }[kind](heads).double()


every_kind = pytest.mark.parametrize(
    "kind", ["tisa", "tisa-v2", "t5", "alibi", "kerple-log", "kerple-power", "near-far"]
)
few = settings(max_examples=8)


@every_kind
@every_backend
@few
@given(seed=seeds, length=st.integers(1, 12), shift=st.integers(0, 40), causal=st.booleans())
def test_shifting_all_positions_changes_nothing(kind, backend, seed, length, shift, causal):
    """The same tokens, `shift` places later: strangers before and after them are masked."""
    scoring = build(kind, 2, seed)
    tokens = draw(seed, *[(1, 2, length, 4)] * 3)
    whole = draw(seed + 1, *[(1, 2, length + shift + 3, 4)] * 3)
    inside = torch.zeros(length + shift + 3, dtype=torch.bool)
    inside[shift : shift + length] = True
    for stranger, token in zip(whole, tokens, strict=True):
        stranger[:, :, inside] = token
    alone = tisa.attention(*tokens, scoring(length), is_causal=causal, backend=backend)
    among = tisa.attention(
        *whole,
        scoring(len(inside)),
        attn_mask=inside[None, :],
        is_causal=causal,
        backend=backend,
    )
    torch.testing.assert_close(among[:, :, inside], alone)


@every_backend
@given(
    seed=seeds,
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    start=st.integers(-20, 20),
    causal=st.booleans(),
)
def test_moving_queries_and_keys_together_changes_nothing(
    backend, seed, queries, keys, start, causal
):
    """A shard: queries and keys cut out of a longer sequence see what they saw in it."""
    scoring = build("tisa", 2, seed)
    first = max(0, -start)
    query, key, value = draw(seed, *[(1, 2, n, 4) for n in (queries, keys, keys)])
    length = first + max(keys, start + queries)
    whole = [torch.zeros(1, 2, length, 4, dtype=torch.float64) for _ in range(3)]
    whole[0][:, :, first + start : first + start + queries] = query
    whole[1][:, :, first : first + keys] = key
    whole[2][:, :, first : first + keys] = value
    seen = torch.zeros(length, dtype=torch.bool)
    seen[first : first + keys] = True
    expected = tisa.attention(
        *whole, scoring(length), attn_mask=seen[None], is_causal=causal, backend="reference"
    )[:, :, first + start : first + start + queries]
    found = tisa.attention(
        query,
        key,
        value,
        scoring(queries, keys, query_start=start),
        query_start=start,
        is_causal=causal,
        backend=backend,
    )
    torch.testing.assert_close(found, expected)


@every_backend
@given(
    seed=seeds,
    length=st.integers(1, 12),
    padding=st.integers(1, 8),
    on_the_left=st.booleans(),
    causal=st.booleans(),
)
def test_padding_changes_nothing(backend, seed, length, padding, on_the_left, causal):
    scoring = build("tisa", 2, seed)
    tokens = draw(seed, *[(2, 2, length, 4)] * 3)
    pad = (0, 0, padding, 0) if on_the_left else (0, 0, 0, padding)
    padded = [torch.nn.functional.pad(t, pad, value=3.0) for t in tokens]
    seen = torch.nn.functional.pad(torch.ones(2, length, dtype=torch.bool), pad[2:])
    alone = tisa.attention(*tokens, scoring(length), is_causal=causal, backend=backend)
    found = tisa.attention(
        *padded,
        scoring(length + padding),
        attn_mask=seen[:, None, None, :],
        is_causal=causal,
        backend=backend,
    )
    first = padding if on_the_left else 0
    torch.testing.assert_close(found[:, :, first : first + length], alone)
    if on_the_left and causal:
        assert (found[:, :, :padding] == 0).all()


@every_backend
@given(
    seed=seeds,
    lengths=st.lists(st.integers(0, 9), min_size=0, max_size=5),
    more=st.integers(0, 3),
    unused=st.integers(0, 2),
    causal=st.booleans(),
    window=st.sampled_from([None, 2, (1, 3)]),
    heads=st.sampled_from([(4, 4), (4, 2)]),
)
def test_a_packed_batch_equals_its_separate_sequences(
    backend, seed, lengths, more, unused, causal, window, heads
):
    scoring = build("tisa", heads[0], seed)
    total = sum(lengths) + unused
    query, key, value = draw(seed, *[(total, h, 4) for h in (heads[0], heads[1], heads[1])])
    tensors = [t.requires_grad_() for t in (query, key, value)]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    longest = max(lengths, default=0) + more
    options = {"is_causal": causal, "window": window, "enable_gqa": heads[0] != heads[1]}
    found = tisa.attention(
        *tensors,
        scoring(longest),
        cu_seqlens=ends,
        max_seqlen=longest,
        backend=backend,
        **options,
    )
    assert found.shape == (total, heads[0], 4)
    expected = torch.zeros_like(found)
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        sequence = [t[first:last].transpose(0, 1).unsqueeze(0) for t in tensors]
        alone = tisa.attention(*sequence, scoring(last - first), backend="reference", **options)
        expected[first:last] = alone[0].transpose(0, 1)
    torch.testing.assert_close(found, expected)
    if sum(lengths):
        wanted = [*tensors, *scoring.parameters()]
        upstream = torch.randn_like(found)
        for a, b in zip(
            torch.autograd.grad(found, wanted, upstream),
            torch.autograd.grad(expected, wanted, upstream),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@every_kind
@every_backend
@few
@given(seed=seeds, length=st.integers(1, 12), window=st.sampled_from([None, 3]))
def test_decoding_with_a_cache_equals_one_causal_pass(kind, backend, seed, length, window):
    scoring = build(kind, 4, seed)
    query, key, value = draw(seed, (1, 4, length, 4), (1, 2, length, 4), (1, 2, length, 4))
    options = {"is_causal": True, "enable_gqa": True, "window": window}
    whole = tisa.attention(query, key, value, scoring(length), backend="reference", **options)
    static = torch.zeros(2, 1, 2, length + 5, 4, dtype=torch.float64)
    for n in range(1, length + 1):
        step = query[:, :, n - 1 : n]
        growing = tisa.attention(
            step, key[:, :, :n], value[:, :, :n], scoring(1, n), backend=backend, **options
        )
        torch.testing.assert_close(growing, whole[:, :, n - 1 : n])
        static[0, :, :, n - 1], static[1, :, :, n - 1] = key[:, :, n - 1], value[:, :, n - 1]
        position = torch.tensor(n - 1)
        fixed = tisa.attention(
            step,
            *static,
            scoring(1, length + 5, query_start=position),
            query_start=position,
            backend=backend,
            **options,
        )
        torch.testing.assert_close(fixed, whole[:, :, n - 1 : n])


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(
    seed=seeds,
    queries=st.integers(1, 70),
    keys=st.integers(1, 70),
    dim=st.sampled_from([1, 4, 16, 33]),
)
def test_backends_agree_within_the_error_budget(backend, dtype, seed, queries, keys, dim):
    shapes = [(2, 2, n, dim) for n in (queries, keys, keys)]
    qkv = [x.to(dtype) for x in draw(seed, *shapes)]
    (vector,) = draw(seed, (2, queries + keys - 1), dtype=torch.float32)

    def run(function, tensors, vector):
        leaves = [t.clone().requires_grad_() for t in (*tensors, vector)]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    exact = run(
        lambda *t: tisa.attention(*t, backend="reference"),
        [x.double() for x in qkv],
        vector.double(),
    )
    plain = run(eager, qkv, vector)
    found = run(lambda *t: tisa.attention(*t, backend=backend), qkv, vector)
    for got, true, simple in zip(found, exact, plain, strict=True):
        assert_within_budget(got, true, simple)


@every_backend
@pytest.mark.parametrize("kind", ["tisa", "tisa-asleep", "t5"])
@few
@given(seed=seeds, causal=st.booleans())
def test_a_band_changes_neither_values_nor_gradients(backend, seed, kind, causal):
    length = 150 if kind == "t5" else 60
    scoring = build("tisa" if kind == "tisa-asleep" else kind, 2, seed)
    if kind == "tisa-asleep":
        with torch.no_grad():
            scoring.kernel_amplitudes.zero_()
    qkv = draw(seed, *[(1, 2, length, 4)] * 3)
    results = []
    for band in (None, scoring.support(1e-9)):
        out = tisa.attention(*qkv, scoring(length), band=band, is_causal=causal, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(scoring.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert all(g.abs().sum() > 0 for g in results[1][1:2])
