"""Parabolas in place of the tails of every scoring function: against the functions in float64."""

import pytest
import torch

import tisa
from tisa.scoring import parabolas

HEADS, REACH = 6, 39
HEAVY = ("tisa, broad", "tisa v2, steps", "near far, slow", "t5")
FARTHEST = 6000
EPS = {name: torch.finfo(getattr(torch, name)).eps / 16 for name in ("bfloat16", "float16")}


def broad(scoring):
    """Kernels as a fit has them: half-widths from 3 to 1,000 offsets, amplitudes up to 4."""
    with torch.no_grad():
        widths = torch.logspace(0.5, 3, scoring.kernel_sharpness.numel())
        scoring.kernel_sharpness.copy_(
            (1 / widths[torch.randperm(len(widths))] ** 2).view(HEADS, -1)
        )
        scoring.kernel_amplitudes.normal_(0, 2)
        scoring.kernel_offsets.normal_(0, 30)
    return scoring


def slow(scoring):
    """Rates from 1e-4 to 10."""
    rates = torch.logspace(-4, 1, HEADS)
    raw = scoring.raw_r2 if hasattr(scoring, "raw_r2") else scoring.raw_rates
    torch.nn.init.uniform_(raw)
    raw.data.copy_(rates + torch.log(-torch.expm1(-rates)))
    return scoring


def floored(scoring):
    """Steps over floors from 1e-3 to 3, of widths on either side of 1."""
    torch.nn.init.normal_(scoring.step_amplitudes)
    torch.nn.init.normal_(scoring.step_widths, 0.0, 3.0)
    scoring.floors.data.copy_(torch.logspace(-3, 0.5, HEADS))
    return scoring


EVERY = {
    "tisa": lambda: tisa.TISA(HEADS, 4),
    "tisa, broad": lambda: broad(tisa.TISA(HEADS, 4)),
    "tisa v2": lambda: tisa.TISAv2(HEADS, 4),
    "tisa v2, steps": lambda: floored(tisa.TISAv2(HEADS, 4, num_agnostic_heads=1)),
    "t5": lambda: tisa.T5Buckets(HEADS),
    "alibi": lambda: tisa.ALiBi(HEADS),
    "kerple log": lambda: tisa.KerpleLog(HEADS),
    "kerple log, slow": lambda: slow(tisa.KerpleLog(HEADS)),
    "kerple power": lambda: tisa.KerplePower(HEADS),
    "near far": lambda: tisa.NearFar(HEADS, 4),
    "near far, slow": lambda: slow(tisa.NearFar(HEADS, 4)),
}  # fmt: skip


def curves(scoring, offsets):
    """Return the scores and their derivatives by each parameter of a head: heads × offsets."""

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = scoring

        def forward(self, k):
            return self.inner.scores(k)

    outer = Scores()
    named = {name: p.detach() for name, p in outer.named_parameters()}

    def scores(values):
        return torch.func.functional_call(outer, values, (offsets,))

    yield scores(named)
    for name, value in named.items():
        columns = value.reshape(HEADS, -1).shape[1]
        for column in range(columns):
            tangent = torch.zeros(HEADS, columns, dtype=value.dtype)
            tangent[:, column] = 1
            tangents = {n: torch.zeros_like(v) for n, v in named.items()}
            tangents[name] = tangent.reshape(value.shape)
            yield torch.func.jvp(scores, (named,), (tangents,))[1]


def errors(curve):
    """Return the largest error of the parabola over each stretch: heads × stretches."""
    r = parabolas.spread(REACH)
    stretches = curve.unfold(-1, 2 * REACH + 1, 1)
    ends = (stretches[..., REACH - r], stretches[..., REACH], stretches[..., REACH + r])
    a, b, c = (x.unsqueeze(-1) for x in parabolas.coefficients(*ends, REACH))
    t = torch.arange(-REACH, REACH + 1)
    return (a + b * t + c * t * t - stretches).abs().amax(-1)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full) if n in HEAVY else n for n in EVERY],
)
def test_parabolas_hold_outside_of_the_band(name, dtype):
    torch.manual_seed(7)
    scoring, eps = EVERY[name]().double(), EPS[dtype]
    band = scoring.parabola_support(eps, REACH)
    assert band.dtype == torch.int32
    offsets = torch.arange(-FARTHEST, FARTHEST + 1)
    outside = (offsets <= band[:, :1]) | (offsets >= band[:, 1:])
    # A stretch lies on one side of the band.
    one_side = (offsets[2 * REACH :] <= band[:, :1]) | (offsets[: -2 * REACH] >= band[:, 1:])
    assert outside.any()
    for number, curve in enumerate(curves(scoring, offsets)):
        allowed = torch.full_like(curve[:, 2 * REACH :], eps)
        if number > 0:
            # Derivatives: beside the largest one so far out; a bump's, beside its largest.
            size = curve.abs()
            if "power" in name:
                size = size.unfold(-1, 2 * REACH + 1, 1).amax(-1)
            else:
                size = size.amax(-1, keepdim=True).expand_as(allowed)
            allowed = allowed * size.clamp_min(1)
        wrong = torch.where(one_side, errors(curve) / allowed, 0.0)
        assert wrong.max() <= 1 + 1e-6, (number, wrong.amax(-1))


def test_bands_are_narrow_enough_to_be_worth_it():
    """A decay of strength 1: 2r/k³ bends less than 4.9e-4 from offset 218 on."""
    torch.manual_seed(0)
    eps = EPS["bfloat16"]
    assert parabolas.bend(REACH) == pytest.approx(2 * 34**3 / 27**0.5 / 6)
    kerple = tisa.KerpleLog(1)
    torch.nn.init.constant_(kerple.raw_r1, 0.5413248546)
    low, high = kerple.parabola_support(eps, REACH)[0].tolist()
    assert -low == high <= 218
    scoring = tisa.NearFar(1, 0)
    torch.nn.init.constant_(scoring.raw_strengths, 0.5413248546)
    low, high = scoring.parabola_support(eps, REACH)[0].tolist()
    assert -low == high <= 275
    assert tisa.ALiBi(2).parabola_support(eps, REACH).tolist() == [[0, 0], [0, 0]]
    # A kernel 1,000 offsets wide is a parabola everywhere, where it is constant only from 3,500 on.
    wide = tisa.TISA(1, 1)
    for p, value in zip(wide.parameters(), (1.0, 1e-6, 0.0), strict=True):
        torch.nn.init.constant_(p, value)
    assert wide.parabola_support(eps, REACH).tolist() == [[0, 0]]
    assert wide.support(eps)[0, 1] > 3500


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [n for n in EVERY if n not in ("t5", "alibi")])
def test_a_head_that_diverged_is_never_a_parabola(name, strange):
    torch.manual_seed(0)
    scoring = EVERY[name]()
    sound = scoring.parabola_support(1e-3, REACH)
    for parameter in scoring.parameters():
        with torch.no_grad():
            before = parameter.clone()
            parameter.view(HEADS, -1)[1, 0] = strange
            band = scoring.parabola_support(1e-3, REACH)
            parameter.copy_(before)
        if not torch.isfinite(scoring.scores(torch.tensor([1])))[1]:
            assert band[1, 0] <= -FARTHEST
            assert band[1, 1] >= FARTHEST
        assert torch.equal(band[[0, 2]], sound[[0, 2]])
