"""The fused kernels with keys that a window does not hide, interpreted, against float64."""

import pytest
import torch

import tisa
from cases import Case
from test_always import CASES
from test_triton import assert_close
from tisa.ops import triton as backend

pytestmark = pytest.mark.skipif(
    not backend.interpreted(), reason="with a GPU the kernels are compiled: test_gpu_always.py"
)


def results(case, places, name, dtype, **more):
    """Return the output, the log-sum-exp and every gradient."""
    qkv, scoring, options = case.make(dtype)
    if "key_scores" in options:
        exact = torch.promote_types(dtype, torch.float32)
        options["key_scores"] = options["key_scores"].detach().to(exact).requires_grad_()
    vector = scoring and scoring(case.queries, case.keys, query_start=options.get("query_start"))
    vector = vector if vector is None else vector.detach().requires_grad_()
    options |= dict(always=torch.tensor(places, dtype=torch.int64), return_lse=True)
    outputs = tisa.attention(*qkv, vector, backend=name, **options | more)
    generator = torch.Generator().manual_seed(3)
    total = sum(
        (torch.where(torch.isfinite(o), o, 0.0) * torch.randn(o.shape, generator=generator)).sum()
        for o in outputs
    )
    wanted = [x for x in (*qkv, vector, options.get("key_scores")) if x is not None]
    return [*outputs, *torch.autograd.grad(total, wanted)]


@pytest.fixture(autouse=True)
def _by_the_kernels(request, monkeypatch):
    """Nothing is joined by PyTorch where the kernels can do it."""
    if "dropout" not in request.node.name:
        monkeypatch.delattr("tisa.ops.always.joined")


QUICK = ("ends of padded sequences", "causal, grouped heads")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
def test_values_and_gradients(name):
    case, places = CASES[name]
    expected = results(case, places, "reference", torch.float64)
    assert_close(results(case, places, "triton", torch.float32), expected, 5e-6)


BANDS = {"no band": None, "band": [[-9, 7], [40, 45], [-99, 99], [-200, -100]]}


@pytest.mark.full
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_over_several_tiles(band, causal):
    """A window inside of tiles, edges of a band that keys far away train."""
    case = Case("", 100, 150, batch=1, key_heads=2, rounding=torch.float16)
    more = dict(window=(5, 9), is_causal=causal)
    if BANDS[band] is not None:
        more["band"] = torch.tensor(BANDS[band], dtype=torch.int32)
    places = [[0, 149, 70]]
    expected = results(case, places, "reference", torch.float64, **more)
    assert_close(results(case, places, "triton", torch.float16, **more), expected, 4e-3)


def packed(name, dtype, band=None):
    generator = torch.Generator().manual_seed(1)
    ends = torch.tensor([0, 5, 5, 75, 90], dtype=torch.int32)
    places = torch.tensor([[0, 4], [-1, -1], [0, 69], [0, 14]], dtype=torch.int32)
    qkv = [torch.randn(95, h, 16, generator=generator).half().to(dtype).requires_grad_()
           for h in (4, 2, 2)]  # fmt: skip
    exact = torch.promote_types(dtype, torch.float32)
    scores = torch.randn(4, 139, generator=generator).to(exact).requires_grad_()
    of_keys = torch.randn(95, 4, generator=generator).to(exact).requires_grad_()
    out, lse = tisa.attention(
        *qkv, scores, cu_seqlens=ends, max_seqlen=70, enable_gqa=True, window=3, always=places,
        key_scores=of_keys, return_lse=True, backend=name,
        band=None if band is None else torch.tensor(band, dtype=torch.int32),
    )  # fmt: skip
    total = out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()
    return [out, lse, *torch.autograd.grad(total, (*qkv, scores, of_keys))]


@pytest.mark.parametrize(
    ("band", "dtype"),
    [
        ("band", torch.float16),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("no band", torch.float16), ("band", torch.float32))
        ),
    ],
)
def test_packed_sequences(band, dtype):
    expected = packed("reference", torch.float64, BANDS[band])
    found = packed("triton", dtype, BANDS[band])
    assert_close(found, expected, 5e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.full
def test_decoding_without_gradients():
    """One query against a long cache, which parts of the keys are read for side by side."""
    case = Case("", 1, 600, batch=1)
    qkv, scoring, _ = case.make()
    given = dict(window=7, always=torch.tensor([[0, 3]]), is_causal=True)
    with torch.no_grad():
        expected = tisa.attention(*qkv, scoring, backend="reference", **given)
        half = [x.half() for x in qkv]
        found = tisa.attention(*half, scoring.float(), backend="triton", **given)
    assert_close([found], [expected], 4e-3)


@pytest.mark.full
def test_gradients_of_the_query_alone():
    case, places = CASES["both ends"]
    found = []
    for name, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        qkv, scoring, options = case.make(dtype)
        inputs = [qkv[0], *(x.detach() for x in qkv[1:])]
        out = tisa.attention(*inputs, scoring(20).detach(), backend=name,
                             always=torch.tensor(places), **options)  # fmt: skip
        found.append(torch.autograd.grad(out.square().sum(), qkv[0]))
    assert_close(found[1], found[0], 5e-6)


@pytest.mark.full
def test_with_dropout_they_are_joined_as_elsewhere():
    torch.manual_seed(0)
    ones = torch.ones(1, 1, 4, 8, requires_grad=True)
    always, dropped = torch.tensor([[0, 3]]), []
    for _ in range(30):
        out = tisa.attention(ones * 0, ones * 0, ones, window=0, always=always, dropout_p=0.5,
                             backend="triton")  # fmt: skip
        dropped.append(out.detach()[0, 0, :, 0])
    # Of two weights of a half or three of a third; those that are kept count twice.
    assert set(torch.stack(dropped)[:, 0].tolist()) == {0.0, 1.0, 2.0}
