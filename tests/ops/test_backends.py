"""Every backend over every promise: against the formula, against the reference, by gradcheck."""

import numpy as np
import pytest
import torch

import formulas
import tisa
from budget import assert_within_budget, eager
from cases import CASES, EMPTY, KEYED, Case, hidden_two_ways, leaves
from tisa.ops import blocks

# FlexAttention has no float64 and no gradients on the CPU: test_flex.py has what it can do here.
BACKENDS = ["reference", "chunked", "sdpa"]
ALL = [*CASES, *KEYED]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def by_formula(case, qkv, scoring, options):
    """Return output and log-sum-exp of a whole batch from `formulas.attention`."""
    query, key, value = (x.detach().numpy() for x in qkv)
    out = np.zeros((case.batch, case.heads, case.queries, case.value_dim))
    lse = np.zeros((case.batch, case.heads, case.queries))
    mask = options.get("attn_mask")
    if mask is not None:
        mask = np.broadcast_to(mask.numpy(), (case.batch, case.heads, case.queries, case.keys))
    window = options.get("window", (None, None))
    window = (window, window) if isinstance(window, int) else window
    start = options.get("query_start")
    for b in range(case.batch):
        for h in range(case.heads):
            f = None
            if scoring is not None:
                kernels = [p[h].tolist() for p in scoring.parameters()]
                f = lambda k, kernels=kernels: formulas.tisa(*kernels, k)  # noqa: E731
            g = h * case.key_heads // case.heads
            out[b, h], lse[b, h] = formulas.attention(
                query[b, h],
                key[b, g],
                value[b, g],
                f,
                mask=None if mask is None else mask[b, h],
                key_scores=options["key_scores"][b, h].tolist()
                if "key_scores" in options
                else None,
                causal=options.get("is_causal", False),
                scale=options.get("scale"),
                start=None if start is None else int(start),
                window=window,
            )
    return torch.from_numpy(out), torch.from_numpy(lse)


@named([case for case in ALL if case.queries * case.keys < 5000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_equal_the_formula(backend, case):
    qkv, scoring, options = case.make()
    expected, expected_lse = by_formula(case, qkv, scoring, options)
    found = case.call(backend, qkv, scoring, options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    if backend != "sdpa":
        found, lse = case.call(backend, qkv, scoring, options | {"return_lse": True})
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-10)


def gradients(case, backend, dtype=torch.float64, **more):
    """Return the output and every gradient, the scoring function's parameters included."""
    qkv, scoring, options = case.make(dtype)
    found = case.call(backend, qkv, scoring, options | more)
    outputs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(3)
    wanted = leaves(qkv, scoring, options)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    # The log-sum-exp of a query that sees nothing is −inf: nothing flows through it.
    total = sum(
        (torch.where(torch.isfinite(o), o, 0.0) * g).sum()
        for o, g in zip(outputs, upstream, strict=True)
    )
    return [*outputs, *torch.autograd.grad(total, wanted)]


@named(ALL)
@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_gradients_equal_the_reference(backend, case):
    expected, found = gradients(case, "reference"), gradients(case, backend)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert torch.isfinite(a).all()


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_nothing_comes_back_through_the_log_sum_exp_of_a_blind_query(backend):
    case = Case("", 5, 5)
    qkv, scoring, _ = case.make()
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    _, lse = tisa.attention(*qkv, scoring(5), attn_mask=mask, return_lse=True, backend=backend)
    # The derivative of (−inf)² is −inf; torch.where multiplies it by 0.
    total = torch.where(lse.isinf(), 0.0, lse**2).sum()
    for gradient in torch.autograd.grad(total, [*qkv[:2], *scoring.parameters()]):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lowest_number_of_a_dtype_hides_as_false_does(backend, mask_dtype, dtype):
    expected, found = hidden_two_ways(backend, dtype, mask_dtype)
    assert torch.equal(found, expected)
    assert (found[0, :, :2] == 0).all()


MASKS = {"whole": (2, 4, 9, 11), "heads": (4, 9, 11), "keys": (2, 1, 1, 11), "queries": (9, 1),
         "batch": (2, 1, 1, 1)}  # fmt: skip


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_gradient_of_a_mask(backend, shape, monkeypatch):
    # Blocks of few queries and heads: their parts of the gradient are added up.
    monkeypatch.setattr(blocks, "CPU_BLOCK", (60, 4))
    found = []
    for name in ("reference", backend):
        case = Case("", 9, 11, key_heads=2, options={"is_causal": True})
        qkv, scoring, options = case.make()
        mask = torch.randn(MASKS[shape], generator=torch.Generator().manual_seed(8)).double()
        mask.view(-1)[0] = torch.finfo(torch.float32).min
        mask.requires_grad_()
        out = case.call(name, qkv, scoring, options | {"attn_mask": mask})
        upstream = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
        found.append(torch.autograd.grad(out, [mask, *qkv], upstream))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_auto_keeps_the_scores_where_a_mask_needs_a_gradient():
    """In half precision a dense bias would round them: off by 1.1 of 3.8 at scores of 10,000."""
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 33, 16).bfloat16() for _ in range(3)]
    vector, mask = torch.randn(2, 65) * 1e4, torch.randn(33, 33).requires_grad_()
    vector = vector + torch.arange(65) * 0.5
    exact = tisa.attention(*(x.double() for x in qkv), vector, attn_mask=mask, backend="reference")
    found = tisa.attention(*qkv, vector, attn_mask=mask)
    assert (found.double() - exact).abs().max() < 0.02


def test_auto_under_functional_transforms_is_the_reference():
    qkv = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    vector, tangent = torch.randn(2, 9), torch.randn(2, 9)

    def loss(vector, backend="auto"):
        return tisa.attention(*qkv, vector, backend=backend).square().sum()

    expected = torch.func.jvp(lambda v: loss(v, "reference"), (vector,), (tangent,))[1]
    assert expected != 0
    torch.testing.assert_close(torch.func.jvp(loss, (vector,), (tangent,))[1], expected)
    gradient = torch.func.grad(loss)(vector)
    torch.testing.assert_close((gradient * tangent).sum(), expected, rtol=1e-4, atol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(vector, tangent)
        found = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(found, expected)
    for backend in ("chunked", "sdpa"):
        for transform in (
            lambda f: torch.func.jvp(f, (vector,), (tangent,)),
            lambda f: torch.func.grad(f)(vector),
            lambda f: torch.vmap(f)(vector[None]),
        ):
            with pytest.raises(ValueError, match="forward-mode"):
                transform(lambda v, b=backend: loss(v, b))


def test_auto_under_functional_transforms_trains_and_differentiates_twice():
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))

    # An ensemble, as torch.func.stack_module_state has it: every parameter asks for a gradient.
    scoring = tisa.TISA(2, 3).double()
    stacked = {name: torch.stack([p, p]) for name, p in scoring.named_parameters()}

    def member(parameters):
        vector = torch.func.functional_call(scoring, parameters, (5,))
        return tisa.attention(query, key, value, vector)

    for found in torch.vmap(member)(stacked):
        torch.testing.assert_close(found, tisa.attention(query, key, value, scoring(5)))

    def loss(query, backend="auto"):
        return tisa.attention(query, key, value, backend=backend).square().sum()

    def twice(backend):
        once = torch.func.grad(lambda q: loss(q, backend))
        return torch.func.grad(lambda q: once(q).square().sum())(query)

    torch.testing.assert_close(twice("auto"), twice("reference"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [0, 1000, 60_000])
def test_sdpa_keeps_the_scores_that_count(dtype, start):
    """Shards far from their keys: every score is large, and only their differences matter."""
    qkv = [torch.randn(1, 4, 64, 16).to(dtype) for _ in range(3)]
    vector = tisa.ALiBi(4)(64, query_start=start)
    exact = tisa.attention(*(x.double() for x in qkv), vector, backend="reference")
    found = tisa.attention(*qkv, vector, query_start=start, backend="sdpa")
    assert (found.double() - exact).abs().max() < 0.03


@named(ALL)
def test_gradients_through_the_log_sum_exp(case):
    expected = gradients(case, "reference", return_lse=True)
    found = gradients(case, "chunked", return_lse=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert not a.isnan().any()


SMALL = [case for case in ALL if case.queries * case.keys < 130]


@named(SMALL)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend, case):
    case = Case(**vars(case) | {"batch": 1, "dim": 3, "value_dim": 2})
    qkv, scoring, options = case.make()
    vector = ()
    if scoring is not None:
        start = options.get("query_start")
        vector = (scoring(case.queries, case.keys, query_start=start).detach().requires_grad_(),)
    for_keys = options.pop("key_scores", None)

    def run(for_keys, *tensors):
        return tisa.attention(*tensors, key_scores=for_keys, backend=backend, **options)

    if for_keys is None:
        assert torch.autograd.gradcheck(run, (None, *qkv, *vector), fast_mode=True)
        return
    # What is −inf has no derivative to be measured.
    scored = torch.isfinite(for_keys.detach())
    given = for_keys.detach().masked_fill(~scored, 0.0).requires_grad_()

    def hiding(given, *tensors):
        return run(torch.where(scored, given, -torch.inf), *tensors)

    assert torch.autograd.gradcheck(hiding, (given, *qkv, *vector), fast_mode=True)


def test_gradcheck_of_every_scoring_function_through_every_backend():
    for build in (tisa.TISA, tisa.TISAv2, tisa.T5Buckets, tisa.ALiBi, tisa.KerpleLog,
                  tisa.KerplePower, tisa.NearFar):  # fmt: skip
        scoring = build(2).double()
        names = [name for name, _ in scoring.named_parameters()]
        start = [p.detach().clone() for p in scoring.parameters()]
        qkv = [torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (5, 7, 7)]
        for backend in BACKENDS:

            def run(*values, scoring=scoring, names=names, qkv=qkv, backend=backend):
                parameters = dict(zip(names, values, strict=True))
                vector = torch.func.functional_call(scoring, parameters, (5, 7))
                return tisa.attention(*qkv, vector, backend=backend)

            values = [value.clone().requires_grad_() for value in start]
            assert torch.isfinite(run(*values)).all()
            if values:
                assert torch.autograd.gradcheck(run, values)


def test_double_backward_of_the_reference():
    case = Case("", 3, 4, batch=1, heads=2, key_heads=1, dim=2, value_dim=2, mask="dense")
    qkv, scoring, options = case.make()
    vector = scoring(3, 4).detach().requires_grad_()
    run = lambda *tensors: tisa.attention(*tensors, backend="reference", **options)  # noqa: E731
    assert torch.autograd.gradgradcheck(run, (*qkv, vector))


@named(EMPTY)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_empty_inputs(backend, case):
    qkv, scoring, options = case.make()
    found = case.call(backend, qkv, scoring, options)
    assert found.shape == (case.batch, case.heads, case.queries, case.value_dim)
    assert (found == 0).all()
    found.sum().backward()
    for tensor in leaves(qkv, scoring, options):
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(1, 1), (7, 7), (64, 64), (129, 200)])
@pytest.mark.parametrize("height", [1.0, 30.0])
def test_error_budget(backend, dtype, size, height):
    queries, keys = size
    qkv = [torch.randn(2, 3, n, 16).to(dtype) for n in (queries, keys, keys)]
    vector = torch.randn(3, queries + keys - 1) * height
    upstream = torch.randn(2, 3, queries, 16).to(dtype)

    def run(function, tensors, vector):
        tensors = [t.clone().requires_grad_() for t in (*tensors, vector)]
        out = function(*tensors)
        return [out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))]

    def operator(name):
        return lambda *tensors: tisa.attention(*tensors, backend=name)

    doubled = [x.double() for x in qkv]
    exact = run(operator("reference"), doubled, vector.double())
    plain = run(eager, qkv, vector)
    found = run(operator(backend), qkv, vector)
    names = ("output", "query", "key", "value", "scores")
    for name, got, true, simple in zip(names, found, exact, plain, strict=True):
        assert_within_budget(got, true, simple, name=name)
    assert found[0].dtype == dtype
    assert found[4].dtype == torch.float32


@named([case for case in ALL if case.batch * case.queries * case.keys < 50_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_error_budget_of_every_case(backend, dtype, case):
    """In the model's precision, against eager code that is given the bias ready-made."""
    drawn, scoring, options = case.make()
    tensors = dict(zip(("query", "key", "value"), (x.to(dtype) for x in drawn), strict=True))
    tensors["offset_scores"] = None
    if scoring is not None:
        tensors["offset_scores"] = scoring.float()(
            case.queries, case.keys, query_start=options.get("query_start")
        )
    if "key_scores" in options:
        tensors["key_scores"] = options.pop("key_scores").float()

    def run(function, exact=False):
        leaves = {
            name: (t.detach().double() if exact else t.detach().clone()).requires_grad_()
            for name, t in tensors.items()
            if t is not None
        }
        out = function(**leaves)
        upstream = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
        return [out, *torch.autograd.grad(out, list(leaves.values()), upstream)]

    def masked_eager(query, key, value, offset_scores=None, key_scores=None):
        group = case.heads // case.key_heads
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        added = mask if key_scores is None else mask + key_scores.unsqueeze(2)
        return eager(query, key, value, offset_scores, scale=options.get("scale"), mask=added)

    # What may be seen, and float masks, read off the formula's side of the options.
    start = options.get("query_start", case.keys - case.queries)
    offset = torch.arange(case.keys)[None, :] - torch.arange(case.queries)[:, None] - start
    window = options.get("window", (None, None))
    left, right = (window, window) if isinstance(window, int) else window
    mask = torch.zeros(case.queries, case.keys)
    for hidden in (
        offset > 0 if options.get("is_causal") else None,
        offset < -left if left is not None else None,
        offset > right if right is not None else None,
    ):
        if hidden is not None:
            mask = mask.masked_fill(hidden, -torch.inf)
    if "attn_mask" in options:
        given = options["attn_mask"]
        mask = mask.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else mask + given
    operator = lambda name: lambda **t: tisa.attention(**t, backend=name, **options)  # noqa: E731
    exact = run(operator("reference"), exact=True)
    plain = run(masked_eager)
    found = run(operator(backend))
    for got, true, simple in zip(found, exact, plain, strict=True):
        assert_within_budget(got, true, simple)


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_close_scores_stay_apart_in_half_precision(backend, dtype):
    """Only the scores tell keys apart, by 1/1,000 from one to the next; in bfloat16 they merge."""
    n = 4096
    query = key = torch.zeros(1, 1, 1, 16, dtype=dtype).expand(1, 1, n, 16)
    value = torch.zeros(1, 1, n, 2, dtype=dtype)
    value[0, 0, ::2, 0], value[0, 0, 1::2, 1] = 1, 1  # the even keys' share, the odd keys' share
    vector = torch.zeros(1, n)
    vector[0] = 300 + torch.arange(n) * 1e-3 + torch.arange(n) % 2 * 0.25
    found = tisa.attention(query[:, :, :1], key, value, vector, backend=backend)
    even, odd = (vector[0, i::2].double().exp().sum() for i in (0, 1))
    expected = torch.stack((even, odd)) / (even + odd)
    torch.testing.assert_close(found[0, 0, 0].double(), expected, rtol=5e-3, atol=0)


NARROW = torch.tensor([[-2, 3], [0, 0], [-100, 1], [5, 100]], dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"query_start": 4}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_band_holds_the_score_of_its_edge(backend, options):
    """On scores that are not constant outside it: the band's meaning, not only its promise."""
    case = Case("", 7, 9)
    qkv, _, _ = case.make()
    vector = torch.randn(4, 15, dtype=torch.float64)
    first = -6 - options.get("query_start", 2)  # the offset of entry 0
    entries = torch.arange(15)
    entries = torch.stack(
        [entries.clamp(*(max(0, min(14, int(end) - first)) for end in band)) for band in NARROW]
    )
    results = []
    for by_hand in (True, False):
        leaf = vector.clone().requires_grad_()
        scores = leaf.gather(1, entries) if by_hand else leaf
        band = None if by_hand else NARROW
        out = tisa.attention(*qkv, scores, band=band, backend=backend, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), (*qkv, leaf))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    plain = tisa.attention(*qkv, vector, backend=backend, **options)
    assert not torch.allclose(plain, results[0][0])


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_packed_with_everything(backend):
    """Log-sum-exp, band, window, grouped heads: as the sequences alone; dropout: as each other."""
    ends = torch.tensor([0, 4, 4, 11, 20], dtype=torch.int32)
    tensors = [torch.randn(20, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    vector = torch.randn(4, 19, dtype=torch.float64)
    # Bands that the shortest sequence reaches too.
    band = NARROW[[0, 1, 2, 0]]
    options = {"enable_gqa": True, "window": (5, 3), "band": band, "return_lse": True}
    out, lse = tisa.attention(
        *tensors, vector, cu_seqlens=ends, max_seqlen=10, backend=backend, **options
    )
    assert lse.shape == (20, 4)
    for first, last in ((0, 4), (4, 11), (11, 20)):
        alone = [t[first:last].transpose(0, 1).unsqueeze(0) for t in tensors]
        n = last - first
        expected = tisa.attention(*alone, vector[:, 10 - n : 9 + n], backend="reference", **options)
        torch.testing.assert_close(out[first:last], expected[0][0].transpose(0, 1))
        torch.testing.assert_close(lse[first:last], expected[1][0].transpose(0, 1))


def test_packed_dropout_is_that_of_the_reference():
    ends = torch.tensor([0, 30, 50, 90], dtype=torch.int32)
    tensors = [torch.randn(90, 4, 8, dtype=torch.float64) for _ in range(3)]
    vector = torch.randn(4, 79, dtype=torch.float64)
    found = []
    for backend in ("reference", "chunked"):
        torch.manual_seed(6)
        found.append(tisa.attention(*tensors, vector, cu_seqlens=ends, max_seqlen=40,
                                    dropout_p=0.4, backend=backend))  # fmt: skip
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("height", [3.0, 15.0, 1e4])
def test_a_product_is_not_summed_on_top_of_large_scores(backend, height):
    torch.manual_seed(0)
    # With such strides PyTorch adds up the product term by term, in its place.
    qkv = [torch.randn(1, 1, 7, 128)[..., ::2] for _ in range(3)]
    vector = torch.randn(1, 13).sign() * height
    exact, found = (
        tisa.attention(*(x.to(dtype) for x in (*qkv, vector)), backend=backend)
        for dtype in (torch.float64, torch.float32)
    )
    assert_within_budget(found, exact, eager(*qkv, vector))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_give_no_nan(backend, dtype):
    qkv = [torch.randn(1, 2, 33, 16).to(dtype).requires_grad_() for _ in range(3)]
    for height in (300.0, 1e5, -1e5):
        vector = (torch.rand(2, 65) * height).requires_grad_()
        of_keys = {"key_scores": torch.rand(1, 2, 33) * height}
        for options in ({}, {"is_causal": True}, {"window": 3}, of_keys):
            out = tisa.attention(*qkv, vector, backend=backend, **options)
            assert torch.isfinite(out).all()
            for gradient in torch.autograd.grad(out.sum(), [*qkv, vector]):
                assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_do_not_matter(backend):
    def laid_out(*shape):
        yield torch.randn(*shape)
        yield torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        yield torch.randn(*shape[:2], shape[2] * 2, shape[3])[:, :, ::2]
        yield torch.randn(*shape[:3], shape[3] * 3)[..., shape[3] : 2 * shape[3]]
        yield torch.randn(1, shape[1], 1, shape[3]).expand(*shape)

    wide = torch.randn(17, 4)
    for_keys = [torch.randn(2, 9, 4).transpose(1, 2), torch.randn(2, 4, 18)[..., ::2],
                torch.randn(4, 1).expand(2, 4, 9)]  # fmt: skip
    for query in laid_out(2, 4, 9, 8):
        for number, key in enumerate(laid_out(2, 2, 9, 8)):
            tensors, scores = [query, key, key * 2, wide.T], for_keys[number % 3]
            contiguous = [t.contiguous() for t in tensors]
            found = tisa.attention(*tensors, key_scores=scores, enable_gqa=True, backend=backend)
            expected = tisa.attention(
                *contiguous, key_scores=scores.contiguous(), enable_gqa=True, backend="reference"
            )
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_autocast_casts_as_sdpa_does(backend, dtype):
    qkv = [torch.randn(2, 3, 17, 16).requires_grad_() for _ in range(3)]
    scoring = tisa.TISA(3)
    with torch.autocast("cpu", dtype=dtype):
        found = tisa.attention(*qkv, scoring(17), backend=backend)
        found.float().sum().backward()
    assert found.dtype == dtype
    cast = [x.detach().to(dtype) for x in qkv]
    expected = tisa.attention(*cast, scoring(17), backend="reference")
    plain = eager(*cast, scoring(17))
    assert_within_budget(found, expected, plain)
    assert all(x.grad.dtype == torch.float32 for x in qkv)
    assert all(p.grad.abs().sum() > 0 for p in scoring.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_needed_gets_a_gradient(backend):
    tensors = [torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)]
    tensors += [torch.randn(2, 11), torch.randn(1, 2, 6)]

    def loss(name, *inputs, key_scores):
        return tisa.attention(*inputs, key_scores=key_scores, backend=name).square().sum()

    for chosen in range(5):
        inputs = [t.clone().requires_grad_(i == chosen) for i, t in enumerate(tensors)]
        whole = [t.clone().requires_grad_() for t in tensors]
        (found,) = torch.autograd.grad(
            loss(backend, *inputs[:4], key_scores=inputs[4]), inputs[chosen]
        )
        expected = torch.autograd.grad(loss("reference", *whole[:4], key_scores=whole[4]), whole)[
            chosen
        ]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_result_every_time(backend):
    results = []
    for _ in range(3):
        case = Case("", 261, 261, key_scores="gates", options={"is_causal": True})
        results.append(gradients(case, backend, torch.float32))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_functional_transforms_of_the_reference():
    query, key, value = (torch.randn(5, 2, 3, 6, 4, dtype=torch.float64) for _ in range(3))
    vectors = torch.randn(5, 3, 11, dtype=torch.float64)
    run = lambda *tensors: tisa.attention(*tensors, backend="reference", is_causal=True)  # noqa: E731
    stacked = torch.vmap(run)(query, key, value, vectors)
    each = torch.stack([run(*t) for t in zip(query, key, value, vectors, strict=True)])
    torch.testing.assert_close(stacked, each)
    loss = lambda vector: run(query[0], key[0], value[0], vector).square().sum()  # noqa: E731
    per_vector = torch.vmap(torch.func.grad(loss))(vectors)
    one = vectors[2].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(one), one)
    torch.testing.assert_close(per_vector[2], expected)
    _, tangent = torch.func.jvp(loss, (vectors[2],), (torch.ones_like(vectors[2]),))
    torch.testing.assert_close(tangent, expected.sum())
