import pytest
import torch

import tisa
from tisa.ops.dropout import kept


def ids(n):
    return torch.arange(n)


def test_share_of_kept_weights():
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        keep = kept(
            torch.tensor(7, dtype=torch.int32), p,
            batch=ids(3), head=ids(4), query=ids(200), key=ids(300),
        )  # fmt: skip
        assert keep.shape == (3, 4, 200, 300)
        assert abs(keep.double().mean() - (1 - p)) < 0.002


def test_entries_are_independent():
    def draw(seed):
        seed = torch.tensor(seed, dtype=torch.int32)
        return kept(seed, 0.5, batch=ids(2), head=ids(2), query=ids(256), key=ids(256)).double()

    first, second = draw(1), draw(2)
    noise = 4 / 256  # four standard deviations of a correlation over 256² entries
    pairs = {
        "seeds": (first, second),
        "batch": (first[0], first[1]),
        "heads": (first[:, 0], first[:, 1]),
        "queries": (first[..., 1:, :], first[..., :-1, :]),
        "keys": (first[..., 1:], first[..., :-1]),
        "diagonals": (first[..., 1:, 1:], first[..., :-1, :-1]),
        "transposed": (first, first.transpose(-1, -2)),
    }
    for name, (a, b) in pairs.items():
        assert abs(((a - 0.5) * (b - 0.5)).mean() * 4) < noise, name
    # No row and no column is unusually full.
    for axis in (-1, -2):
        share = first.mean(axis)
        assert (share - 0.5).abs().max() < 6 * 0.5 / 16


def dropped_out(backend, seed=5, p=0.4, **options):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 4, n, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (150, 170, 170)
    )
    vector = torch.randn(4, 319, dtype=torch.float64, generator=generator).requires_grad_()
    out = tisa.attention(query, key, value, vector, dropout_p=p, backend=backend, **options)
    return [out, *torch.autograd.grad(out.square().sum(), (query, key, value, vector))]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 20}])
def test_chunked_drops_the_entries_that_the_reference_drops(options):
    for a, b in zip(
        dropped_out("chunked", **options), dropped_out("reference", **options), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_seeds_decide(backend):
    first, again, other = (dropped_out(backend, seed)[0] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    # Two calls after one seed draw twice.
    torch.manual_seed(5)
    qkv = [torch.ones(1, 1, 40, 8) for _ in range(3)]
    twice = [tisa.attention(*qkv, torch.ones(1, 79), dropout_p=0.5, backend=backend) for _ in "ab"]
    assert not torch.equal(*twice)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_gradient_belongs_to_the_mask_of_the_forward_pass(backend):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 5, 3, dtype=torch.float64, generator=generator) for _ in range(3)]
    tensors.append(torch.randn(2, 9, dtype=torch.float64, generator=generator))

    def run(*inputs):
        torch.manual_seed(11)
        return tisa.attention(*inputs, dropout_p=0.3, backend=backend)

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_mean_is_kept(backend):
    value = torch.rand(1, 2, 512, 4)
    query = key = torch.zeros_like(value)
    exact = tisa.attention(query, key, value, backend="reference")
    vector = torch.zeros(2, 1023)
    drawn = tisa.attention(query, key, value, vector, dropout_p=0.25, backend=backend)
    assert (drawn - exact).abs().mean() > 1e-3
    torch.testing.assert_close(drawn.mean(2), exact.mean(2), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_everything_dropped(backend):
    out, *gradients = dropped_out(backend, p=1.0)
    assert (out == 0).all()
    assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_log_sum_exp_is_that_before_dropout(backend):
    qkv = [torch.randn(1, 1, 9, 4) for _ in range(3)]
    _, expected = tisa.attention(*qkv, return_lse=True, backend=backend)
    _, found = tisa.attention(*qkv, return_lse=True, dropout_p=0.5, backend=backend)
    torch.testing.assert_close(found, expected)


def test_activation_checkpointing_draws_the_same_entries():
    from torch.utils.checkpoint import checkpoint

    tensors = [torch.randn(1, 2, 9, 4).requires_grad_() for _ in range(3)]
    vector = torch.randn(2, 17).requires_grad_()

    def run(*inputs):
        return tisa.attention(*inputs, vector, dropout_p=0.5, backend="chunked").square().sum()

    torch.manual_seed(3)
    expected = torch.autograd.grad(run(*tensors), [*tensors, vector])
    torch.manual_seed(3)
    recomputed = checkpoint(run, *tensors, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(recomputed, [*tensors, vector]), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_reference_drops_under_torch_func_what_it_drops_without():
    tensors = [torch.randn(1, 2, 9, 4) for _ in range(3)]

    def loss(query):
        return tisa.attention(query, *tensors[1:], dropout_p=0.5, backend="reference").sum()

    query = tensors[0].clone().requires_grad_()
    torch.manual_seed(3)
    (expected,) = torch.autograd.grad(loss(query), query)
    torch.manual_seed(3)
    torch.testing.assert_close(torch.func.grad(loss)(tensors[0]), expected)
