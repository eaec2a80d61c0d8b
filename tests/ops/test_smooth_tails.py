"""The prototype with parabolas in place of smooth tails, interpreted: against float64."""

from pathlib import Path

import pytest
import torch

import tisa
from tisa.offsets import to_matrix
from tisa.ops import triton as backend

pytestmark = [
    pytest.mark.skipif(not backend.interpreted(), reason="with a GPU: compare.py checks"),
    pytest.mark.full,  # Prototypes: nothing that is shipped depends on them.
]
PROTOTYPES = Path(__file__).parents[2] / "benchmarks/prototypes"


@pytest.fixture(autouse=True)
def prototypes(monkeypatch):
    monkeypatch.syspath_prepend(PROTOTYPES)


def drawn(queries, keys, dtype, heads=2):
    generator = torch.Generator().manual_seed(0)
    lengths = (queries, keys, keys, queries)
    return [torch.randn(1, heads, n, 16, generator=generator).to(dtype) for n in lengths]


def exact(query, key, value, matrix, causal):
    logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + matrix
    if causal:
        queries, keys = logits.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).logical_not()
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(-1) @ value


def near_far(heads=2):
    torch.manual_seed(1)
    return tisa.NearFar(heads, 3)


def assert_close(found, expected, tolerance):
    for number, (got, want) in enumerate(zip(found, expected, strict=True)):
        error = (got.double() - want).detach().abs().max()
        assert error <= tolerance * want.detach().abs().max().clamp_min(1e-2), number


BANDS = {"both sides": [[-70, 30], [-1, 130]], "right alone": [[-10_000, 0], [-64, 10_000]]}


@pytest.mark.parametrize(
    ("sizes", "causal", "ends"),
    [
        ((192, 256), False, "both sides"),
        ((192, 256), True, "right alone"),
        pytest.param((256, 256), True, "both sides", marks=pytest.mark.full),
        pytest.param((320, 192), False, "right alone", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_values_and_gradients(sizes, causal, ends):
    """Against the same parabolas in float64, and autograd's adjoint of them."""
    import smooth_tails

    *qkv, grad = drawn(*sizes, torch.float32)
    vector = near_far()(*sizes).detach()
    band = torch.tensor(BANDS[ends], dtype=torch.int32)
    leaves = [x.double().requires_grad_() for x in (*qkv, vector)]
    matrix = smooth_tails.held(leaves[3], band, *sizes)
    assert not torch.equal(matrix, to_matrix(leaves[3], *sizes))
    want = exact(*leaves[:3], matrix, causal)
    expected = [want, *torch.autograd.grad(want, leaves, grad.double())]
    leaves = [x.clone().requires_grad_() for x in (*qkv, vector)]
    out = smooth_tails.attention(*leaves, band, causal=causal)
    assert_close([out, *torch.autograd.grad(out, leaves, grad)], expected, 5e-6)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.full), True])
def test_half_precision(causal):
    """Tiles of 128 keys, numbers of the table in two and three parts: against the curve itself."""
    import smooth_tails

    *qkv, grad = drawn(256, 256, torch.float16)
    vector = -0.3 * torch.arange(-255, 256).abs() + torch.tensor([[50.0], [-7000.0]])
    leaves = [x.double().requires_grad_() for x in (*qkv, vector)]
    want = exact(*leaves[:3], to_matrix(leaves[3], 256, 256), causal)
    expected = [want, *torch.autograd.grad(want, leaves, grad.double())]
    leaves = [x.clone().requires_grad_() for x in (*qkv, vector)]
    out = smooth_tails.attention(*leaves, torch.zeros(2, 2, dtype=torch.int32), causal=causal)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    # Parabolas keep of the gradient what smooth curves can tell apart (its sum is 0).
    smooth = torch.arange(511) / 255 - 1
    for gradients in (found, expected):
        total = gradients.pop().double()
        gradients += [(total * smooth**power).sum(-1) for power in (1, 2)]
    assert_close(found, expected, 4e-3)


def test_the_parabolas_are_the_scores_where_the_band_says_so():
    import smooth_tails

    scoring = near_far().double()
    band = smooth_tails.band_for(scoring, torch.bfloat16)
    n = 1024
    vector = scoring(n).detach()
    wrong = (smooth_tails.held(vector, band, n, n) - to_matrix(vector, n, n)).abs().max()
    assert 0 < wrong <= torch.finfo(torch.bfloat16).eps / 16
