import math

import pytest
import torch

import formulas
import tisa
from tisa.testing.scores import *  # noqa: F403

HEADS = 3


def mirrored(scoring):
    """Steps that face the other way: the formula allows negative widths."""
    torch.nn.init.uniform_(scoring.step_widths, -8.0, -2.0)
    torch.nn.init.normal_(scoring.step_amplitudes)
    return scoring


EVERY = {
    "tisa": lambda: tisa.TISA(HEADS, 4),
    "tisa-zero": lambda: tisa.TISA(HEADS, 4, init="zero"),
    "tisa-none": lambda: tisa.TISA(HEADS, 0),
    "tisa-v2": lambda: tisa.TISAv2(HEADS, 4, shortest_view=16, longest_view=64),
    "tisa-v2-agnostic": lambda: tisa.TISAv2(HEADS, 4, num_agnostic_heads=1),
    "tisa-v2-mirrored": lambda: mirrored(tisa.TISAv2(HEADS, 4)),
    "t5": lambda: tisa.T5Buckets(HEADS),
    "t5-causal": lambda: tisa.T5Buckets(HEADS, bidirectional=False),
    "alibi": lambda: tisa.ALiBi(HEADS),
    "kerple-log": lambda: tisa.KerpleLog(HEADS),
    "kerple-power": lambda: tisa.KerplePower(HEADS),
    "near-far": lambda: tisa.NearFar(HEADS, 4),
}
OFFSETS = [-1000, -200, -129, -128, -113, -91, -17, -8, -1, 0, 1, 2, 7, 8, 16, 90, 91, 128, 700]


@pytest.fixture(params=EVERY)
def scoring(request):
    return EVERY[request.param]()


def by_formula(module, k):
    """Return the score of each head for one offset, from `formulas` and the module's numbers."""
    numbers = {name: p.detach().double().tolist() for name, p in module.named_parameters()}
    match module:
        case tisa.TISA():
            names = ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets")
            return [formulas.tisa(*(numbers[n][h] for n in names), k) for h in range(HEADS)]
        case tisa.TISAv2():
            positional = HEADS - module.num_agnostic_heads
            views = (module.shortest_view, module.longest_view)
            slopes = formulas.tisa_v2_slopes(positional, *views)
            names = ("step_amplitudes", "step_offsets", "step_widths", "floors")
            found = [
                formulas.tisa_v2(*(numbers[n][h] for n in names), slopes[h], k)
                for h in range(positional)
            ]
            return found + [0.0] * module.num_agnostic_heads
        case tisa.T5Buckets(bidirectional=True):
            return [row[formulas.t5_bucket_bidirectional(k)] for row in numbers["bucket_scores"]]
        case tisa.T5Buckets():
            return [row[formulas.t5_bucket_causal(k)] for row in numbers["bucket_scores"]]
        case tisa.ALiBi():
            return [-slope * abs(k) for slope in formulas.alibi_slopes(HEADS)]
        case tisa.KerpleLog():
            r1, r2 = ([formulas.softplus(x) for x in numbers[n]] for n in ("raw_r1", "raw_r2"))
            return [-r1[h] * math.log(1 + r2[h] * abs(k)) for h in range(HEADS)]
        case tisa.KerplePower():
            r1 = [formulas.softplus(x) for x in numbers["raw_r1"]]
            r2 = [2 / (1 + math.exp(-x)) for x in numbers["raw_r2"]]
            return [-r1[h] * abs(k) ** r2[h] for h in range(HEADS)]
        case tisa.NearFar():
            kernels = [numbers[f"near.kernel_{n}"] for n in ("amplitudes", "sharpness", "offsets")]
            sides = [[formulas.softplus(x) for x in row] for row in numbers["raw_strengths"]]
            rates = [formulas.softplus(x) for x in numbers["raw_rates"]]
            return [
                formulas.near_far(*(p[h] for p in kernels), *sides[h], rates[h], k)
                for h in range(HEADS)
            ]
    raise AssertionError(f"no formula for {module}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_scores_equal_the_formula(scoring, dtype, tolerance):
    scoring.to(dtype)
    found = scoring.scores(torch.tensor(OFFSETS))
    assert found.dtype == dtype
    expected = torch.tensor([by_formula(scoring, k) for k in OFFSETS], dtype=torch.float64).T
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_built_under_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        modules = [build() for build in EVERY.values()]
        assert all(module(5).dtype == torch.float32 for module in modules)
        assert all(p.dtype == torch.float32 for m in modules for p in m.parameters())
    finally:
        torch.set_default_dtype(torch.float32)


def test_all_8191_offsets_stay_distinct_in_bfloat16():
    scoring = tisa.TISA(1, 1).to(torch.bfloat16)
    with torch.no_grad():
        scoring.kernel_amplitudes.fill_(1.0)
        scoring.kernel_sharpness.fill_(1e-8)
        scoring.kernel_offsets.fill_(-10_000.0)
    for module in (scoring, tisa.ALiBi(1).bfloat16(), tisa.KerpleLog(1).bfloat16()):
        vector = module(4096)
        assert vector.shape == (1, 8191)
        # Even functions have each value twice, but for the one in the middle.
        assert len(vector[0].unique()) == (8191 if module is scoring else 4096)


@pytest.mark.parametrize("eps", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize("scale", [1e-4, 0.01, 0.1, 1.0, 30.0])
def test_support_bounds_the_score_and_every_derivative(eps, scale):
    scoring = tisa.TISA(4, 3).double()
    with torch.no_grad():
        scoring.kernel_amplitudes.copy_(torch.randn(4, 3) * torch.tensor([0.0, 1.0, 50.0]))
        scoring.kernel_sharpness.copy_(torch.randn(4, 3) * scale)
        scoring.kernel_sharpness.abs_().clamp_(min=scale / 20)
        scoring.kernel_offsets.normal_(0, 20)
    band = scoring.support(eps)
    assert band.dtype == torch.int32
    assert band.shape == (4, 2)
    for h in range(4):
        low, high = band[h].tolist()
        steps = torch.unique(torch.logspace(0, 4, 60).long())
        outside = torch.cat((low - steps, torch.tensor([low, high]), high + steps))
        assert scoring.scores(outside)[h].abs().max() <= eps
        for k in outside[::7]:
            gradients = torch.autograd.grad(scoring.scores(k)[h], list(scoring.parameters()))
            assert all(g.abs().max() <= eps * 1.001 for g in gradients)


def test_support_is_not_needlessly_wide():
    scoring = tisa.TISA(1, 1)
    with torch.no_grad():
        scoring.kernel_amplitudes.fill_(1.0)
        scoring.kernel_sharpness.fill_(0.1)
        scoring.kernel_offsets.fill_(3.0)
    low, high = scoring.support(1e-3)[0].tolist()
    # u²·exp(−0.1·u²), the largest of the three derivatives, is 1e-3 at u = 10.8.
    assert abs(10.8**2 * math.exp(-0.1 * 10.8**2) - 1e-3) < 1e-5
    assert (low, high) == (-8, 14)


def test_support_sees_a_kernel_that_sleeps():
    scoring = tisa.TISA(2, 2, init="zero")
    awake = tisa.TISA(2, 2)
    awake.load_state_dict(scoring.state_dict())
    with torch.no_grad():
        awake.kernel_amplitudes.fill_(1.0)
    assert torch.equal(scoring.support(1e-3), awake.support(1e-3))
    width = scoring.support(1e-3)[:, 1] - scoring.support(1e-3)[:, 0]
    assert (width > 10).all()


def test_support_of_flat_and_of_needle_kernels():
    scoring = tisa.TISA(2, 1)
    with torch.no_grad():
        scoring.kernel_offsets.fill_(0.0)
        scoring.kernel_sharpness.copy_(torch.tensor([[0.0], [1e30]]))
    band = scoring.support(1e-3)
    assert band[0].tolist() == [-(2**30), 2**30]
    assert band[1].tolist() == [-1, 1]
    assert tisa.TISA(2, 0).support(1e-3).tolist() == [[0, 0], [0, 0]]


EXTREMES = [0.0, -0.0, 1e-45, -1e-38, 1e-20, 0.1, -3.0, 700.0, 1e9, 1e19, -2e19, 1e38, -3e38]
STRANGE = [torch.nan, torch.inf, -torch.inf]


def drawn(scoring, generator, numbers):
    """Return the module with parameters out of these numbers."""
    with torch.no_grad():
        for parameter in scoring.parameters():
            chosen = torch.randint(len(numbers), parameter.shape, generator=generator)
            parameter.copy_(torch.tensor(numbers)[chosen])
    return scoring


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bands_are_offsets_whatever_the_parameters(scoring, dtype):
    generator = torch.Generator().manual_seed(0)
    for numbers in (EXTREMES, EXTREMES + STRANGE, STRANGE):
        for _ in range(10):
            band = drawn(scoring, generator, numbers).band(dtype)
            if band is not None:
                assert (band[:, 0] <= band[:, 1]).all()
                assert band.abs().max() <= 2**30


@pytest.mark.parametrize("number", STRANGE)
@pytest.mark.parametrize("name", ["kernel_amplitudes", "kernel_sharpness", "kernel_offsets"])
@pytest.mark.parametrize("kernels", [1, 3])
def test_the_band_of_a_head_with_a_number_that_is_none_is_everything(number, name, kernels):
    torch.manual_seed(0)
    scoring = tisa.TISA(3, kernels)
    before = scoring.support(1e-3)
    with torch.no_grad():
        getattr(scoring, name)[1, 0] = number
    band = scoring.support(1e-3)
    assert band[1].tolist() == [-(2**30), 2**30]
    assert torch.equal(band[::2], before[::2])


def test_support_bounds_extreme_kernels():
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(-3000, 3000, 7)
    narrow = 0
    for _ in range(100):
        scoring = drawn(tisa.TISA(1, 2), generator, EXTREMES)
        low, high = scoring.support(1e-3)[0].tolist()
        outside = offsets[(offsets < low) | (offsets > high)]
        narrow += len(outside) > 0
        # In float64 nothing overflows.
        exact = scoring.double()
        for k in outside[::20]:
            found = exact.scores(k)[0]
            gradients = torch.autograd.grad(found, list(exact.parameters()))
            assert all(x.abs().max() <= 1.001e-3 for x in (found, *gradients))
    assert narrow > 5


@pytest.mark.parametrize(("bidirectional", "ends"), [(True, [-91, 91]), (False, [-113, 0])])
def test_support_of_buckets_is_exact(bidirectional, ends):
    scoring = tisa.T5Buckets(2, bidirectional=bidirectional)
    assert scoring.support(1e-3).tolist() == [ends, ends]
    far = torch.tensor([ends[0], ends[0] - 1, -5000])
    assert len(scoring.buckets(far).unique()) == 1
    assert scoring.buckets(torch.tensor(ends[0] + 1)) != scoring.buckets(torch.tensor(ends[0]))
    ahead = torch.tensor([ends[1], ends[1] + 1, 5000])
    assert len(scoring.buckets(ahead).unique()) == 1


def test_no_band_for_tails_that_fall_for_ever():
    for name in ("tisa-v2", "alibi", "kerple-log", "kerple-power", "near-far"):
        assert EVERY[name]().support(1e-3) is None


def test_buckets_equal_the_published_formula_everywhere():
    k = torch.arange(-3000, 3001)
    both = [formulas.t5_bucket_bidirectional(x) for x in k.tolist()]
    past = [formulas.t5_bucket_causal(x) for x in k.tolist()]
    assert tisa.T5Buckets(1).buckets(k).tolist() == both
    assert tisa.T5Buckets(1, bidirectional=False).buckets(k).tolist() == past
    assert sorted(set(both)) == [b for b in range(32) if b != 16]


def test_buckets_of_other_sizes_are_monotone_and_complete():
    for buckets, distance in [(4, 8), (8, 20), (64, 1000), (10, 33)]:
        scoring = tisa.T5Buckets(1, buckets, distance, bidirectional=False)
        found = scoring.buckets(-torch.arange(5 * distance))
        assert (found.diff() >= 0).all()
        assert found.unique().tolist() == list(range(buckets))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("compiling", [False, True])
def test_a_buckets_gradient_is_the_sum_over_its_offsets(bidirectional, compiling, monkeypatch):
    scoring = tisa.T5Buckets(2, bidirectional=bidirectional)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    queries, keys = 1500, 2000
    upstream = torch.randn(2, queries + keys - 1)
    vector = scoring(queries, keys)
    assert vector.is_contiguous()
    assert not [n for n in nodes(vector) if "Index" in n]
    (found,) = torch.autograd.grad(vector, scoring.bucket_scores, upstream)
    place = scoring.buckets(tisa.offsets.offset_range(queries, keys))
    assert torch.equal(vector, scoring.bucket_scores[:, place])
    exact = torch.zeros(2, 32, dtype=torch.float64).index_add_(1, place, upstream.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def nodes(tensor):
    """Return the names of all steps of a tensor's backward pass."""
    found, waiting = [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.append(node.name())
            waiting += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 25])
def test_alibi_slopes(heads):
    expected = torch.tensor(formulas.alibi_slopes(heads), dtype=torch.float64)
    torch.testing.assert_close(tisa.ALiBi(heads).double().slopes(), expected, rtol=1e-14, atol=0)


def test_author_weights_give_the_author_scores():
    state = {
        "kernel_offsets": torch.randn(4, 3, dtype=torch.float64) * 5,
        "kernel_amplitudes": torch.randn(4, 3, dtype=torch.float64),
        "kernel_sharpness": torch.randn(4, 3, dtype=torch.float64) * 0.2,
    }
    expected = formulas.published_tisa_matrix(
        state["kernel_amplitudes"].numpy(),
        state["kernel_sharpness"].numpy(),
        state["kernel_offsets"].numpy(),
        12,
    )
    exact = tisa.TISA.from_reference(state)
    torch.testing.assert_close(exact.matrix(12), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
    single = tisa.TISA.from_reference({name: value.float() for name, value in state.items()})
    assert single.kernel_amplitudes.dtype == torch.float32
    torch.testing.assert_close(
        single.matrix(12).double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6
    )
    half = tisa.TISA.from_reference({name: value.bfloat16() for name, value in state.items()})
    assert half.kernel_offsets.dtype == torch.float32


def test_zero_init_changes_nothing_and_wakes_up():
    scoring = tisa.TISA(2, 3, init="zero")
    assert (scoring(9) == 0).all()
    optimizer = torch.optim.SGD(scoring.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        ((scoring(9) - 1) ** 2).sum().backward()
        assert (scoring.kernel_amplitudes.grad != 0).all()
        assert ((scoring.kernel_sharpness.grad != 0).any()) == (step > 0)
        optimizer.step()
    assert (tisa.T5Buckets(2, init="zero")(9) == 0).all()
    near_far = tisa.NearFar(2, init="zero")
    assert (near_far.near(9) == 0).all()
    assert (near_far(9)[:, :8] < 0).all()


def test_reference_init_has_the_published_distribution():
    scoring = tisa.TISA(1000, 20)
    for p, mean, deviation in [
        (scoring.kernel_amplitudes, 0.1, 0.01),
        (scoring.kernel_sharpness, 0.1, 0.01),
        (scoring.kernel_offsets, 0.0, 5.0),
    ]:
        assert abs(p.mean() - mean) < deviation / 20
        assert abs(p.std() / deviation - 1) < 0.05
    kerple = tisa.KerpleLog(5000)
    assert abs(kerple.r1.mean() - 1.0) < 0.05
    assert abs(kerple.r2.mean() - 0.5) < 0.03


def test_kernel_dropout_drops_whole_kernels_in_training_only():
    scoring = tisa.TISAv2(4, 6, kernel_dropout=0.5)
    with torch.no_grad():
        scoring.step_amplitudes.fill_(3.0)
    assert not torch.equal(scoring(33), scoring(33))
    scoring.eval()
    assert torch.equal(scoring(33), scoring(33))
    scoring.train()
    # Still one curve per head: the matrix is Toeplitz.
    matrix = scoring.matrix(9)
    assert torch.equal(matrix[:, 1:, 1:], matrix[:, :-1, :-1])


def test_decay_holds_distant_tokens_down():
    far = torch.tensor([-(10**6), 10**6])
    scoring = tisa.NearFar(4)
    assert (scoring.scores(far) < scoring.scores(torch.tensor([-100, 100]))).all()
    assert (tisa.TISA(4).scores(far) == 0).all()


def test_parameter_counts_of_the_paper():
    def count(module):
        return sum(p.numel() for p in module.parameters())

    assert 12 * count(tisa.TISA(12, 5)) == 2160
    assert count(tisa.TISA(12, 5)) == 180
    assert count(tisa.T5Buckets(12)) == 384
    assert count(tisa.ALiBi(12)) == 0


def test_scores_stay_finite_in_odd_places():
    odd = torch.tensor([-(2**24), 0, 2**24])
    for build in EVERY.values():
        module = build()
        for p in module.parameters():
            for value in (0.0, 1e4, -1e4):
                saved = p.detach().clone()
                with torch.no_grad():
                    p.fill_(value)
                assert not module.scores(odd).isnan().any(), module
                with torch.no_grad():
                    p.copy_(saved)
