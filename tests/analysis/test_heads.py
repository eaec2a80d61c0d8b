"""Heads, kernels, word and position terms, spectrum: truths put in, truths that come out."""

import itertools

import pytest
import torch

import tisa
from tisa.analysis.correlation import correlation_interval
from tisa.analysis.families import PositionModel
from tisa.analysis.heads import analyse_heads, block_means, positional_attention
from tisa.analysis.kernels import fit_heads
from tisa.analysis.reading import TERMS, read_table, term_variances
from tisa.analysis.spectrum import principal_components
from tisa.offsets import offset_range, to_matrix


def known_heads(n):
    """A table and heads whose F̂_P is exactly f(j − i) of known kernels."""
    scoring = tisa.TISA(2, 2)
    with torch.no_grad():
        scoring.kernel_amplitudes.copy_(torch.tensor([[3.0, -1.5], [0.8, 0.4]]))
        scoring.kernel_sharpness.copy_(torch.tensor([[0.5, 0.02], [0.05, 0.9]]))
        scoring.kernel_offsets.copy_(torch.tensor([[-1.0, 6.0], [4.0, -9.0]]))
        wanted = to_matrix(scoring(n), n, n)
    # One-hot positions: queries are √d · I, keys the columns of F.
    query = (torch.eye(n) * n**0.5).expand(2, n, n).contiguous()
    return scoring, torch.eye(n), query, wanted.mT.contiguous(), wanted


def test_a_table_built_from_known_kernels_gives_them_back():
    n = 48
    scoring, table, query, key, wanted = known_heads(n)
    torch.testing.assert_close(positional_attention(table, query, key), wanted)
    heads = analyse_heads(table, query, key)
    assert heads.r2.min() == pytest.approx(1, abs=1e-6)
    assert heads.null.max() < 0.2
    torch.testing.assert_close(heads.curves, scoring(n).detach(), atol=1e-5, rtol=1e-5)
    offsets = offset_range(n, n)
    fits = fit_heads(heads.curves, offsets, largest=2, weights=(n - offsets.abs()).float())
    found = fits.kernels[2]
    order = found.amplitude.abs().argsort(1, descending=True)
    for mine, known in (
        (found.amplitude, scoring.kernel_amplitudes),
        (found.sharpness, scoring.kernel_sharpness),
        (found.offset, scoring.kernel_offsets),
    ):
        torch.testing.assert_close(
            mine.gather(1, order).float(), known.detach(), atol=0.01, rtol=0.01
        )
    assert fits.r2[2].min() > 0.9999
    assert (fits.r2[1:] >= fits.r2[:-1] - 1e-9).all()
    torch.testing.assert_close(fits.curves(2).float(), heads.curves, atol=1e-2, rtol=1e-2)


def test_strength_is_the_deviation_within_rows():
    _, table, query, key, wanted = known_heads(30)
    heads = analyse_heads(table, query, key, null_draws=0)
    expected = wanted.var(2, correction=0).mean(1).sqrt()
    torch.testing.assert_close(heads.strength, expected, atol=1e-5, rtol=1e-4)
    assert heads.null.isnan().all()
    # What all keys of a row have in common is not strength.
    ones = torch.ones(1, 30, 1)
    same = analyse_heads(torch.randn(30, 30), torch.randn(1, 30, 1), ones * 0, null_draws=0)
    assert same.strength.item() == 0


def test_what_a_decoder_never_sees_does_not_count():
    n = 30
    scoring, table, query, _, wanted = known_heads(n)
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    noise = torch.where(seen, wanted, 9 * torch.randn(2, n, n))
    heads = analyse_heads(table, query, noise.mT.contiguous(), causal=True)
    assert heads.r2.min() == pytest.approx(1, abs=1e-6)
    assert heads.off_diagonal.min() == pytest.approx(1, abs=1e-6)
    assert heads.null.max() < 0.3
    torch.testing.assert_close(heads.curves, scoring(n).detach()[:, :n], atol=1e-5, rtol=1e-5)
    rows = [[wanted[h, i, : i + 1].var(correction=0) for i in range(n)] for h in range(2)]
    torch.testing.assert_close(heads.strength, torch.tensor(rows).mean(1).sqrt())
    # With a main diagonal of its own: only `off_diagonal` leaves it out.
    bump = noise + 50 * torch.randn(n).diag()
    bumped = analyse_heads(table, query, bump.mT.contiguous(), causal=True, null_draws=0)
    assert bumped.off_diagonal.min() == pytest.approx(1, abs=1e-5)
    assert bumped.r2.max() < 0.5


def test_long_curves_are_fitted_on_fewer_offsets():
    n = 3000
    offsets = offset_range(n, n)
    curve = 2 * torch.exp(-1e-5 * (offsets.double() + 300) ** 2)
    fits = fit_heads(curve[None].float(), offsets, largest=1)
    assert len(fits.offsets) < 2400
    assert fits.kernels[1].offset.item() == pytest.approx(-300, abs=1)


def test_block_means_of_factors_are_block_means_of_the_product():
    a, b = torch.randn(2, 12, 5).unbind()
    small = block_means(a, 4) @ block_means(b, 4).T
    torch.testing.assert_close(small, (a @ b.T).reshape(4, 3, 4, 3).mean((1, 3)))
    assert block_means(a, 100).shape == a.shape


def little_model(eps=1e-12):
    width, heads, dim = 6, 2, 4
    return PositionModel(
        name="little",
        family="BERT",
        positions=torch.randn(5, width),
        leading_rows=0,
        special_first=None,
        grid=None,
        words=torch.randn(7, width),
        constant=torch.randn(width),
        eps=eps,
        query=torch.randn(1, heads, width + 1, dim),
        key=torch.randn(1, heads, width + 1, dim),
        raw_query=torch.randn(heads, width, dim),
        raw_key=torch.randn(heads, width, dim),
        through=torch.cat((torch.eye(width), torch.zeros(1, width))),
        projected=False,
        causal=False,
    )


def test_the_parts_of_the_input_add_up():
    model = little_model()
    reading = read_table(model)
    x = model.positions[:, None] + model.words[None] + model.constant
    x = torch.nn.functional.layer_norm(x, x.shape[-1:])
    torch.testing.assert_close(reading.table[:, :-1], x.mean(1))
    total = ((x - x.mean((0, 1))) ** 2).sum(-1).mean()
    between = ((x.mean(1) - x.mean((0, 1))) ** 2).sum(-1).mean()
    assert reading.share_position == pytest.approx(float(between / total), rel=1e-4)
    assert reading.share_position + reading.share_word + reading.share_rest == pytest.approx(1)
    assert reading.share_rest > 0
    # Where nothing normalises, nothing but the two parts is there.
    assert read_table(little_model(eps=None)).share_rest == pytest.approx(0, abs=1e-5)


def test_term_variances_are_those_of_all_pairs():
    """Every word at every place, as query and as key, with the additive input: counted out."""
    model = little_model()
    reading = read_table(model)
    mean = reading.table.mean(0)
    words = torch.cat((reading.words, torch.zeros(7, 1)), 1)
    inputs = torch.stack(
        [mean + (p - mean) + w for p, w in itertools.product(reading.table, words)]
    )
    found = term_variances(model, reading)
    assert found.shape == (2, len(TERMS))
    for head in range(2):
        logits = (inputs @ model.query[0, head]) @ (inputs @ model.key[0, head]).T / 2
        seen = logits.var(1, correction=0).mean()
        assert float(found[head].sum()) == pytest.approx(float(seen), rel=1e-3)


def test_components_of_a_circle_turn():
    n, cycles = 120, 5
    angle = torch.arange(n) * 2 * torch.pi * cycles / n
    circle = torch.stack((angle.cos(), angle.sin()), 1) @ torch.randn(2, 16)
    found = principal_components(circle)
    assert found.dimensions(0.9) <= 2
    assert found.dimensions(0.999) == 2
    assert found.frequencies[:2].tolist() == [cycles, cycles]
    assert found.purity[:2].min() > 0.99
    round_circle = (
        torch.stack((angle.cos(), angle.sin()), 1) @ torch.linalg.qr(torch.randn(9, 2))[0].T
    )
    turning = principal_components(round_circle)
    assert turning.step_r2 == pytest.approx(1, abs=1e-6)
    assert turning.periods[0][0] == pytest.approx(n / cycles, rel=1e-4)
    assert turning.still_r2 < turning.step_r2
    random = principal_components(torch.randn(n, 40))
    assert random.step_r2 < 0.8
    assert random.dimensions(0.9) > 20


def test_correlation_and_its_interval():
    x = torch.arange(8.0)
    y = x + torch.tensor([0.3, -0.4, 0.1, 0.8, -0.9, 0.2, 0.5, -0.1])
    r, low, high = correlation_interval(x, y)
    assert low < r < high < 1
    assert r == pytest.approx(float(torch.corrcoef(torch.stack((x, y)))[0, 1]), abs=1e-6)
    assert correlation_interval(x[:3], y[:3])[1:] == (-1.0, 1.0)
    # Seven times 77.7 have a deviation above 0, by rounding.
    assert correlation_interval(x[:7], torch.full((7,), 77.7)) is None
    assert correlation_interval(torch.full((7,), 77.7), x[:7]) is None
    assert correlation_interval(x[:1], y[:1]) is None
