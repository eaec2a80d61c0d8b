"""The fused kernels, interpreted on the CPU: every promise, against float64.

On a GPU test_gpu.py runs them as they are; test_triton_compiled.py compiles them without one.
"""

import sys
from itertools import product

import pytest
import torch

import tisa
from budget import assert_within_budget, eager
from cases import CASES, EMPTY, KEYED, Case, hidden_two_ways, leaves
from tisa.ops import triton as backend
from tisa.ops.triton import configs, plan, plan_backward
from tisa.ops.triton.problem import Inputs, Problem, statistics_shape

pytestmark = pytest.mark.skipif(
    not backend.interpreted(), reason="with a GPU the kernels are compiled: test_gpu.py"
)


def results(case, name, dtype, **more):
    """Return the output, the log-sum-exp if asked for, and every gradient."""
    qkv, scoring, options = case.make(dtype)
    if "key_scores" in options:
        exact = torch.promote_types(dtype, torch.float32)
        options["key_scores"] = options["key_scores"].detach().to(exact).requires_grad_()
    found = case.call(name, qkv, scoring, options | more)
    outputs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(3)
    wanted = leaves(qkv, scoring, options)
    total = sum(
        (torch.where(torch.isfinite(o), o, 0.0) * torch.randn(o.shape, generator=generator)).sum()
        for o in outputs
    )
    return [*outputs, *torch.autograd.grad(total, wanted)]


def assert_close(found, expected, tolerance):
    """Differences against the largest number of all: some gradients are 0 by cancellation."""

    def largest(x):
        return float(x.detach().double().abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0

    scale = max(map(largest, expected))
    for got, want in zip(found, expected, strict=True):
        assert not got.isnan().any()
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite)
        error = largest(torch.where(finite, got.double() - want.double(), 0.0))
        assert error <= tolerance * max(largest(want), 0.1 * scale)


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        # Heavy, and mostly the same again: test_triton_key_scores.py. Float32 has not the digits of
        # large ones.
        *(pytest.param(c, marks=pytest.mark.full) for c in KEYED if c.key_scores != "large"),
    ],
    ids=lambda case: case.name,
)
def test_values_and_gradients(case):
    expected = results(case, "reference", torch.float64, return_lse=True)
    found = results(case, "triton", torch.float32, return_lse=True)
    assert_close(found, expected, 5e-6)


@pytest.mark.parametrize("case", EMPTY, ids=lambda case: case.name)
def test_nothing_to_do(case):
    expected = results(case, "reference", torch.float64)
    for got, want in zip(results(case, "triton", torch.float32), expected, strict=True):
        assert torch.equal(got.double(), want)


HALF = ["plain", "causal, more queries: blind rows", "several blocks", "several blocks, causal",
        "window over several blocks", "grouped heads", "left padding mask"]  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.name in HALF], ids=lambda case: case.name)
def test_half_precision(case):
    case = Case(**vars(case) | {"rounding": torch.float16})
    expected = results(case, "reference", torch.float64)
    assert_close(results(case, "triton", torch.float16), expected, 4e-3)


def packed(name, dtype, *, band=None, gqa=1, **options):
    generator = torch.Generator().manual_seed(1)
    ends = torch.tensor([0, 5, 5, 75, 90], dtype=torch.int32)

    def drawn(heads):
        x = torch.randn(95, heads, 16, generator=generator).half().to(dtype)
        return x.requires_grad_()

    query, key, value = drawn(4), drawn(4 // gqa), drawn(4 // gqa)
    scores = torch.randn(4, 139, generator=generator).to(
        torch.promote_types(dtype, torch.float32)
    ).requires_grad_()  # fmt: skip
    torch.manual_seed(5)
    out, lse = tisa.attention(
        query, key, value, scores, cu_seqlens=ends, max_seqlen=70, enable_gqa=gqa > 1,
        band=None if band is None else torch.tensor(band, dtype=torch.int32),
        return_lse=True, backend=name, **options,
    )  # fmt: skip
    total = out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()
    return [out, lse, *torch.autograd.grad(total, (query, key, value, scores))]


BANDS = [None, [[-9, 7], [40, 45], [-69, 69], [-200, -100]]]


@pytest.mark.parametrize("band", BANDS, ids=["no band", "band"])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param({}, torch.float32, marks=pytest.mark.full),
        ({}, torch.float16),
        ({"is_causal": True}, torch.float16),
        ({"gqa": 2}, torch.float32),
        ({"dropout_p": 0.3}, torch.float16),
    ],
    ids=str,
)
def test_packed_batches(options, band, dtype):
    expected = packed("chunked", torch.float64, band=band, **options)
    found = packed("triton", dtype, band=band, **options)
    assert_close(found, expected, 5e-6 if dtype == torch.float32 else 4e-3)
    assert (found[0][90:] == 0).all()


def batch(name, dtype, queries, keys, *, band=None, **options):
    """Attention whose inputs lie as a projection leaves them: (batch, length, heads, dim)."""
    generator = torch.Generator().manual_seed(1)
    # Of many blocks one alone: the interpreter takes long for each.
    size = 1 if queries * keys > 10_000 else 2
    leaves = [
        torch.randn(size, n, 3, 16, generator=generator).half().to(dtype).requires_grad_()
        for n in (queries, keys, keys)
    ]
    scores = torch.randn(3, queries + keys - 1, generator=generator) * 3
    scores = scores.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    torch.manual_seed(5)
    out = tisa.attention(
        *(x.transpose(1, 2) for x in leaves), scores, backend=name,
        band=None if band is None else torch.tensor(band, dtype=torch.int32), **options,
    )  # fmt: skip
    upstream = torch.randn(out.shape, generator=generator).half().to(dtype)
    return [out, *torch.autograd.grad(out, [*leaves, scores], upstream)]


BANDED = [
    (150, 150, [[-9, 7], [40, 45], [-69, 69]], {}),
    (150, 70, [[-9, 7], [40, 45], [300, 400]], {}),
    (70, 190, [[5, -3], [-400, -300], [-(2**30), 2**30]], {"query_start": 17}),
    (150, 150, [[-9, 7], [40, 45], [0, 0]], {"window": (50, 60)}),
    (130, 130, [[0, 0], [1, 1], [-64, 64]], {}),
    (1, 300, [[-1, 0], [5, 7], [-300, -200]], {}),
    (70, 200, None, {"query_start": -40}),
    (200, 70, None, {"is_causal": True}),
    (128, 128, [[-9, 7], [40, 45], [0, 0]], {}),
    (64, 50, [[-9, 7], [40, 45], [0, 0]], {"is_causal": True}),
]


@pytest.mark.parametrize(
    ("queries", "keys", "band", "options", "dtype", "dropout_p"),
    [
        *((*one, torch.float32, 0.0) for one in BANDED),
        *((*one, torch.float16, 0.2) for one in BANDED[-3:]),
        # The same paths again, heavy.
        *(pytest.param(*one, torch.float16, 0.2, marks=pytest.mark.full) for one in BANDED[:-3]),
    ],
    ids=str,
)
def test_bands_and_dropout(queries, keys, band, options, dropout_p, dtype):
    options = options | {"dropout_p": dropout_p}
    expected = batch("reference", torch.float64, queries, keys, band=band, **options)
    found = batch("triton", dtype, queries, keys, band=band, **options)
    assert_close(found, expected, 5e-6 if dtype == torch.float32 else 6e-3)


SCORING = {
    "tisa": lambda: tisa.TISA(2),
    "tisa, amplitudes 0": lambda: tisa.TISA(2, init="zero"),
    "tisa v2": lambda: tisa.TISAv2(2),
    "t5": lambda: tisa.T5Buckets(2, max_distance=40),
    "near and far": lambda: tisa.NearFar(2),
    "alibi": lambda: tisa.ALiBi(2),
    "kerple": lambda: tisa.KerpleLog(2),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in SCORING),
        ("tisa", torch.float32),
        pytest.param("t5", torch.float32, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_band_changes_nothing_more_than_rounding_does(name, dtype):
    torch.manual_seed(1)
    scoring = SCORING[name]()
    if "0" not in name:
        with torch.no_grad():
            for parameter in scoring.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    ends = name.startswith(("tisa, ", "t5")) or name == "tisa"
    # What never rests has no band that leaves something out, however long the input is.
    length = 200 if ends and dtype == torch.float16 else 100
    if ends:
        assert (scoring.band(dtype).abs() < length / 2).all()
    qkv = [torch.randn(1, 2, length, 16).to(dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(1, 2, length, 16).to(dtype)
    found = []
    for band in (scoring.band(dtype), None):
        out = tisa.attention(*qkv, scoring(length), band=band, backend="triton")
        wanted = [*qkv, *(p for p in scoring.parameters() if p.requires_grad)]
        found.append([out, *torch.autograd.grad(out, wanted, upstream)])
    # The order of the sums differs too.
    assert_close(*found, 5e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


def test_constants_beside_the_band_receive_their_sides_gradient():
    qkv = [torch.randn(1, 1, 150, 16).double() for _ in range(3)]
    band = torch.tensor([[-10, 20]], dtype=torch.int32)
    vector = torch.randn(1, 299).double()
    gradients = []
    for name, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        leaf = vector.clone().to(dtype).requires_grad_()
        out = tisa.attention(*(x.to(dtype) for x in qkv), leaf, band=band, backend=name)
        out.square().sum().backward()
        gradients.append(leaf.grad.double())
    exact, found = gradients
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    outside = torch.ones(299, dtype=torch.bool)
    outside[149 - 10 : 149 + 21] = False
    assert (found[0, outside] == 0).all()
    assert found[0, 149 - 10].abs() > 1e-3
    assert found[0, 149 + 20].abs() > 1e-3


DECODING = {
    "plain": ({}, {}),
    "grouped heads": ({"key_heads": 2}, {}),
    "one key head": ({"key_heads": 1}, {}),
    "three queries": ({"queries": 3}, {}),
    "window": ({}, {"window": (100, None)}),
    "static cache": ({"queries": 3}, {"query_start": 300}),
    "static cache, start on the device": ({}, {"query_start": torch.tensor(300)}),
    "no scores": ({"scores": False}, {}),
    "padding": ({"mask": "left padding"}, {}),
    "added mask": ({"mask": "float", "key_heads": 1}, {}),
    "blind": ({}, {"query_start": -5}),
    "odd widths": ({"dim": 20, "value_dim": 5}, {}),
}


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("banded", [False, True])
def test_decoding(name, dtype, banded):
    sizes, options = DECODING[name]
    case = Case(
        name, **({"queries": 1, "keys": 700} | sizes), options={"is_causal": True} | options
    )
    case.rounding = dtype
    qkv, scoring, options = case.make(torch.float64)
    if banded and scoring is not None:
        options = options | {"band": torch.tensor([[-30, -2]] * 4, dtype=torch.int32)}
    options = options | {"return_lse": True}
    with torch.no_grad():
        expected = case.call("reference", qkv, scoring, options)
        if scoring is not None:
            scoring.float()
        found = case.call("triton", [x.to(dtype) for x in qkv], scoring, options)
    inputs = Inputs(*(x.to(dtype) for x in qkv), *[None] * 7, 0, 0, None, 0, 1.0, 0.0)
    assert Problem(inputs).decodes
    assert_close(found, expected, 5e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("length", "size"),
    # Between the smallest and the largest scores: heavy, and nothing new.
    [*product((1, 17), (1.0, 30.0, 300.0)), (129, 300.0),
     *(pytest.param(129, size, marks=pytest.mark.full) for size in (1.0, 30.0))],
)  # fmt: skip
def test_errors_stay_within_the_budget(dtype, length, size):
    torch.manual_seed(length)
    qkv = [torch.randn(2, 2, length, 32).to(dtype) for _ in range(3)]
    vector = torch.randn(2, 2 * length - 1) * size / 3
    upstream = torch.randn(2, 2, length, 32).to(dtype)

    def run(formula, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        score = vector.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        out = formula(*leaves, score)
        return [out, *torch.autograd.grad(out, [*leaves, score], upstream.to(dtype))]

    exact = run(lambda *x: tisa.attention(*x, backend="reference"), torch.float64)
    plain = run(eager, dtype)
    found = run(lambda *x: tisa.attention(*x, backend="triton"), dtype)
    for name, *three in zip(("output", "q", "k", "v", "scores"), found, exact, plain, strict=True):
        assert_within_budget(*three, name=name)


def test_weights_of_float32_are_found_again_to_the_last_digit():
    # Each query sees one key alone, by logits of up to 480, of which the last digit is 3e-5.
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(1, 1, 40, 5), dim=-1) * 40
    query = keys * torch.linspace(20, 60, 40)[:, None] * 5**0.5 / 200
    value = torch.randn(1, 1, 40, 5, requires_grad=True)
    tisa.attention(query, keys, value, backend="triton").sum().backward()
    exact = tisa.attention(query.double(), keys.double(), value.double(), backend="reference")
    (expected,) = torch.autograd.grad(exact.sum(), value)
    error = (value.grad - expected).abs().max() / expected.max()
    assert error < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_ten_thousand_are_rounded_once_as_eager_code_does(seed):
    torch.manual_seed(seed)
    inputs = [torch.randn(1, 8, n, 16) for n in (64, 2, 2)] + [torch.randn(8, 65).sign() * 1e4]

    def run(formula, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = formula(*leaves)
        return out.detach().double(), torch.autograd.grad(out.sum(), leaves[2])[0].double()

    exact = run(lambda *x: tisa.attention(*x, backend="reference"), torch.float64)
    found = run(lambda *x: tisa.attention(*x, backend="triton"), torch.float32)
    for got, want, plain in zip(found, exact, run(eager, torch.float32), strict=True):
        assert (got - want).abs().max() <= 1.1 * (plain - want).abs().max()


@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_forward_and_backward_kernels_of_float32_round_alike(width):
    made = launched((True, True, True, True), dtype=torch.float32, width=width)
    for name in ("forward_kernel", "query_kernel", "key_kernel"):
        # From 64 queries on, Hopper multiplies with another instruction.
        assert made[name]["FIXED"].BLOCK_M < 64
        assert made[name]["enable_fp_fusion"] is False
    assert "enable_fp_fusion" not in launched((True, True, True, True))["key_kernel"]


def launched(needs, *, dtype=torch.bfloat16, width=16):
    """Return the kernels of a forward and a backward pass by name, with their arguments."""
    query = torch.empty(2, 4, 300, width, device="meta", dtype=dtype)
    scores = torch.empty(4, 599, device="meta")
    band = torch.empty(4, 2, dtype=torch.int32, device="meta")
    problem = Problem(
        Inputs(query, query, query, scores, None, band, *[None] * 4, 0, 0, None, None, 1.0, 0.0)
    )
    statistics = torch.empty(statistics_shape(query, None), device="meta")
    wanted = [
        x if need else None for x, need in zip((query, query, query, scores), needs, strict=True)
    ]
    needs = (*needs, False)
    scratch = torch.empty(plan_backward.scratch_numbers(problem, needs), device="meta")
    upstream = plan_backward.Upstream(query, None, query, statistics)
    launches = plan.forward(problem, query, statistics)
    launches += plan_backward.backward(problem, upstream, plan_backward.Gradients(*wanted), scratch)
    return {launch.kernel.__name__: launch.arguments for launch in launches}


def test_only_what_is_needed_is_launched():
    assert list(launched((True, True, True, False))) == [
        "forward_kernel",
        "query_kernel",
        "key_kernel",
    ]
    alone = launched((False, False, False, True))
    assert list(alone) == ["forward_kernel", "query_kernel", "entry_kernel"]
    assert alone["query_kernel"]["written"].query is None
    frozen = launched((True, True, True, False))
    assert frozen["query_kernel"]["written"].sides is None


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (3,), (0, 3), (0, 1, 2)])
def test_gradients_of_some_inputs_alone(frozen):
    def run(name, dtype, some):
        torch.manual_seed(0)
        leaves = [torch.randn(1, 2, 100, 16).to(dtype) for _ in range(3)]
        leaves.append(torch.randn(2, 199).to(dtype))
        wanted = [x.requires_grad_() for i, x in enumerate(leaves) if i not in some]
        out = tisa.attention(*leaves, backend=name)
        return [out, *torch.autograd.grad(out.square().sum(), wanted)]

    expected = run("reference", torch.float64, frozen)
    assert_close(run("triton", torch.float32, frozen), expected, 5e-6)


def test_tensors_that_no_descriptor_can_read_are_copied():
    base = torch.randn(2, 3, 40, 33)
    views = {
        "odd start": base[..., 1:],
        "odd width": base[..., :7],
        "strided": base[..., ::2],
        "transposed": torch.randn(2, 3, 16, 40).transpose(2, 3),
        "expanded": torch.randn(1, 1, 40, 16).expand(2, 3, 40, 16),
    }
    for name, query in views.items():
        vector = torch.randn(3, 79)
        leaf = query.detach().requires_grad_()
        out = tisa.attention(leaf, leaf, leaf, vector, backend="triton")
        out.sum().backward()  # whose gradient is expanded too
        other = query.detach().double().requires_grad_()
        exact = tisa.attention(other, other, other, vector, backend="reference")
        exact.sum().backward()
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_output_lies_as_the_query_does():
    query = torch.randn(2, 40, 3, 16).transpose(1, 2)
    out = tisa.attention(query, query, query, torch.randn(3, 79), backend="triton")
    assert out.stride() == query.stride()


def test_a_negative_scale_and_scores_of_minus_infinity():
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 90, 16) for _ in range(3)]
    vector = torch.randn(2, 179)
    vector[:, 100:] = -torch.inf
    vector[:, :30] = -torch.inf
    band = torch.tensor([[-80, 40], [-20, 20]], dtype=torch.int32)
    for options in ({"scale": -0.3}, {"scale": 0.0}, {"band": band}):
        out = tisa.attention(*qkv, vector, backend="triton", **options)
        exact = tisa.attention(*(x.double() for x in qkv), vector, backend="reference", **options)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "chunked", "sdpa", "triton"])
def test_a_window_without_an_end(name):
    qkv, vector = [torch.randn(1, 2, 20, 16) for _ in range(3)], torch.randn(2, 39)
    expected = tisa.attention(*qkv, vector, backend=name)
    for window in (2**31, sys.maxsize, 10**30):
        found = tisa.attention(*qkv, vector, window=window, backend=name)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_lowest_number_of_a_dtype_hides_as_false_does(mask_dtype):
    expected, found = hidden_two_ways("triton", torch.float32, mask_dtype)
    assert torch.equal(found, expected)
    assert (found[0, :, :2] == 0).all()


def test_refusals_give_a_reason():
    qkv = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    for change, options, reason in (
        (lambda x: x.double(), {}, "no float64"),
        (lambda x: x.bfloat16(), {}, "interpreter"),
        (lambda x: x.repeat(1, 1, 1, 65), {}, "at most 256 wide"),
        (lambda x: x, {"attn_mask": torch.zeros(5, 5).requires_grad_()}, "gradient for attn_mask"),
    ):
        with pytest.raises(ValueError, match=reason):
            tisa.attention(*(change(x) for x in qkv), backend="triton", **options)
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda v: tisa.attention(*qkv, v, backend="triton").sum())(
            torch.randn(2, 9)
        )


def test_a_second_derivative_is_refused():
    leaf = torch.randn(1, 1, 5, 4).requires_grad_()
    out = tisa.attention(leaf, leaf, leaf, backend="triton")
    (gradient,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()


def test_checkpointing():
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 40, 16).requires_grad_() for _ in range(3)]
    scoring = tisa.TISA(2)

    def run(query, key, value):
        return tisa.attention(query, key, value, scoring(40), dropout_p=0.3, backend="triton")

    found = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(run, *qkv, use_reentrant=False)
        else:
            out = run(*qkv)
        found.append(torch.autograd.grad(out.square().sum(), [*qkv, *scoring.parameters()]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("keys", [100, 5000])
def test_every_configuration_keeps_the_rules(width, size, keys):
    for causal in (False, True):
        for copy_engine in (False, True):
            # Checked where they are made.
            configs.config(width, size, keys, causal=causal, copy_engine=copy_engine)
