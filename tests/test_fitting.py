import pytest
import torch

import formulas
import tisa
from tisa.fitting import BROADEST, SHARPEST, Kernels, explained, fit_kernels, fit_path

OFFSETS = torch.arange(-40, 41)


def sorted_by_offset(kernels):
    order = kernels.offset.argsort(1)
    return Kernels(*(part.gather(1, order) for part in kernels))


def known(*heads):
    """Return kernels from (a, b, c) per kernel, heads with equally many."""
    return Kernels(*torch.tensor(heads, dtype=torch.float64).unbind(-1))


TRUTHS = {
    "a spike and a slope": known([[9.8, 3.0, -1.0], [-2.0, 2e-3, 25.0]]),
    "a bump with side lobes": known([[3.0, 0.2, 1.5], [-1.0, 0.05, -4.0], [0.8, 0.02, 9.0]]),
    "two heads": known([[1.0, 0.1, -5.0], [2.0, 0.5, 5.0]], [[-1.0, 0.3, 0.0], [4.0, 0.01, -20.0]]),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_known_kernels_are_found_again(name):
    truth = sorted_by_offset(TRUTHS[name])
    found = sorted_by_offset(fit_kernels(truth.curve(OFFSETS), OFFSETS, truth.offset.shape[1]))
    for part, expected in zip(found, truth, strict=True):
        assert part.dtype == torch.float64
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


def test_a_curve_is_that_of_the_formula_and_of_the_scoring_function():
    truth = TRUTHS["two heads"]
    curve = truth.curve(OFFSETS)
    expected = [
        [formulas.tisa(*(part[h].tolist() for part in truth), k) for k in OFFSETS.tolist()]
        for h in range(2)
    ]
    torch.testing.assert_close(curve, torch.tensor(expected, dtype=torch.float64))
    scoring = tisa.TISA(2, 2).double()
    with torch.no_grad():
        scoring.kernel_amplitudes.copy_(truth.amplitude)
        scoring.kernel_sharpness.copy_(truth.sharpness)
        scoring.kernel_offsets.copy_(truth.offset)
    torch.testing.assert_close(scoring.scores(OFFSETS), curve)


def test_each_kernel_more_explains_no_less_and_five_explain_a_real_looking_head():
    k = OFFSETS.double()
    spike = 6.0 * (OFFSETS == -1)
    slope = torch.where(k > 0, -0.5 * torch.log1p(k.abs()), -0.1 * torch.log1p(k.abs()))
    dip = -1.5 * (OFFSETS == 0)
    curves = torch.stack((spike + slope + dip, slope, torch.sin(k / 4) * torch.exp(-k.abs() / 15)))
    path = fit_path(curves, OFFSETS, 5)
    assert [kernels.offset.shape for kernels in path] == [(3, s) for s in range(6)]
    shares = torch.stack([explained(curves, OFFSETS, kernels) for kernels in path])
    assert (shares.diff(dim=0) >= -1e-9).all()
    assert (shares[5] > 0.96).all(), shares
    last = fit_kernels(curves, OFFSETS, 5)
    assert all(torch.equal(a, b) for a, b in zip(last, path[-1], strict=True))
    assert (last.sharpness >= BROADEST).all()
    assert (last.sharpness <= SHARPEST).all()


def test_heads_do_not_disturb_each_other():
    torch.manual_seed(1)
    curves = torch.randn(4, 81).cumsum(-1)
    alone = fit_kernels(curves[2:3], OFFSETS, 3)
    together = fit_kernels(curves, OFFSETS, 3)
    torch.testing.assert_close(
        together.curve(OFFSETS)[2:3], alone.curve(OFFSETS), rtol=1e-5, atol=1e-5
    )


def test_weights_say_where_the_fit_must_be_good():
    curve = torch.where(OFFSETS < 0, torch.sin(OFFSETS / 2.0), 3.0)[None]
    weights = (OFFSETS < 0).double()
    kernels = fit_kernels(curve, OFFSETS, 4, weights=weights)
    assert explained(curve, OFFSETS, kernels, weights=weights) > explained(curve, OFFSETS, kernels)
    broken = curve.clone()
    broken[:, OFFSETS >= 0] = float("nan")
    same = fit_kernels(broken, OFFSETS, 4, weights=weights)
    assert all(torch.equal(a, b) for a, b in zip(kernels, same, strict=True))


def test_a_constant_may_be_left_out():
    truth = known([[2.0, 0.1, 3.0]])
    curve = truth.curve(OFFSETS) + 7.0
    kernels = fit_kernels(curve, OFFSETS, 1, up_to_constant=True)
    for part, expected in zip(kernels, truth, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)
    assert explained(curve, OFFSETS, kernels, up_to_constant=True) > 1 - 1e-8
    assert explained(curve, OFFSETS, kernels) < 0


@pytest.mark.parametrize("curve", [torch.zeros(2, 81), torch.full((2, 81), 3.0)])
def test_flat_curves_and_one_offset(curve):
    kernels = fit_kernels(curve, OFFSETS, 3)
    assert all(torch.isfinite(part).all() for part in kernels)
    assert (kernels.curve(OFFSETS) - curve).abs().max() < 0.3
    one = fit_kernels(torch.tensor([[2.5]]), torch.tensor([0]), 2)
    torch.testing.assert_close(one.curve(torch.tensor([0])), torch.tensor([[2.5]]).double())


@pytest.mark.parametrize("span", [11, 101, 1023])
def test_a_flat_curve_is_explained_by_the_constant(span):
    # Rounding must not decide: a flat head has R² 1, at every height and length.
    curves = torch.randn(20, 1).expand(20, span)
    offsets = torch.arange(span) - span // 2
    nothing = fit_kernels(curves, offsets, 0)
    assert (explained(curves, offsets, nothing, up_to_constant=True) == 1).all()


def test_long_ranges_and_one_sided_ones():
    past = torch.arange(-1023, 1)
    truth = known([[4.0, 1e-4, -100.0], [3.0, 1.0, -2.0]])
    kernels = fit_kernels(truth.curve(past), past, 2)
    assert explained(truth.curve(past), past, kernels) > 1 - 1e-8


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kernels": -1}, "num_kernels"),
        ({"offsets": OFFSETS[1:]}, "offsets"),
        ({"offsets": OFFSETS.float()}, "integer"),
        ({"weights": torch.zeros(81)}, "weights"),
        ({"weights": -torch.ones(81)}, "weights"),
        ({"weights": torch.ones(7)}, "weights"),
        ({"curves": torch.full((1, 81), float("inf"))}, "finite"),
        ({"curves": torch.zeros(81)}, "curves"),
    ],
)
def test_wrong_calls_are_refused(change, words):
    call = {"curves": torch.zeros(1, 81), "offsets": OFFSETS, "num_kernels": 1, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        fit_kernels(**call)
