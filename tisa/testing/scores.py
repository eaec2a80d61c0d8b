"""What every scoring function keeps to: vectors, gradients, precision, devices, bands."""

import pickle
from typing import Any

import pytest
import torch

from tisa.scoring import ScoringFunction


def test_gradients_of_every_parameter(scoring: ScoringFunction) -> None:
    scoring.double()
    parameters = dict(scoring.named_parameters())
    # Away from the places where |b| and sign(a) have no derivative.
    for p in parameters.values():
        torch.nn.init.normal_(p, 0.7, 0.2)

    def run(*values: torch.Tensor) -> Any:
        return torch.func.functional_call(
            scoring, dict(zip(parameters, values, strict=True)), (6, 9)
        )

    values = tuple(p.detach().requires_grad_() for p in parameters.values())
    if values and any(v.numel() for v in values):
        assert torch.autograd.gradcheck(run, values)
        assert torch.autograd.gradgradcheck(run, values)
    assert run(*values).shape == (scoring.num_attention_heads, 14)


@pytest.mark.parametrize(("queries", "keys"), [(5, None), (3, 7), (7, 3), (1, 9), (0, 4), (4, 0)])
@pytest.mark.parametrize("start", [None, 11, -3])
def test_vector_matrix_and_scores_agree(
    scoring: ScoringFunction, queries: int, keys: int | None, start: int | None
) -> None:
    vector = scoring(queries, keys, query_start=start)
    matrix = scoring.matrix(queries, keys, query_start=start)
    count = queries if keys is None else keys
    first = count - queries if start is None else start
    i, j = torch.arange(queries)[:, None], torch.arange(count)[None, :]
    dense = scoring.scores(j - (i + first))
    assert vector.shape == (scoring.num_attention_heads, max(0, queries + count - 1))
    torch.testing.assert_close(matrix, dense)
    assert scoring.scores(torch.tensor(5)).shape == (scoring.num_attention_heads,)
    assert scoring.scores(torch.zeros(2, 3, 4, dtype=torch.int32)).shape == (
        scoring.num_attention_heads,
        2,
        3,
        4,
    )


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: torch.nn.Sequential(m).half()[0],
        lambda m: m.double().bfloat16(),
    ],
)
def test_half_casts_leave_parameters_and_scores_alone(scoring: ScoringFunction, cast: Any) -> None:
    before = scoring(9)
    state = {name: value.clone() for name, value in scoring.state_dict().items()}
    cast(scoring)
    after = scoring(9)
    assert after.dtype == torch.float32
    assert torch.equal(before, after)
    for name, value in scoring.state_dict().items():
        assert torch.equal(value, state[name])
        assert value.dtype == torch.float32


def test_double_and_back(scoring: ScoringFunction) -> None:
    before = scoring(9)
    assert scoring.double()(9).dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in scoring.parameters())
    torch.testing.assert_close(scoring.float()(9), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_touch_scores(scoring: ScoringFunction, dtype: torch.dtype) -> None:
    vector, matrix = scoring(64), scoring.matrix(8)
    with torch.autocast("cpu", dtype=dtype):
        for found, expected in ((scoring(64), vector), (scoring.matrix(8), matrix)):
            assert found.dtype == torch.float32
            assert torch.equal(found, expected)


def test_parameters_that_became_half_on_another_way_still_give_float32_scores(
    scoring: ScoringFunction,
) -> None:
    scoring._place.data = scoring._place.data.bfloat16()
    for p in scoring.parameters():
        p.data = p.data.bfloat16()
    assert scoring(9).dtype == torch.float32


def test_state_dict_round_trip_and_pickle(scoring: ScoringFunction) -> None:
    # What is no parameter is made anew with the function: a saved model has no place for it.
    assert set(scoring.state_dict()) == {name for name, _ in scoring.named_parameters()}
    copy = pickle.loads(pickle.dumps(scoring))
    assert torch.equal(copy(7), scoring(7))
    with torch.no_grad():
        for p in copy.parameters():
            p.add_(1.0)
    copy.load_state_dict(scoring.state_dict())
    assert torch.equal(copy(7), scoring(7))


def test_parameters_can_be_assigned_to_a_skeleton(scoring: Any) -> None:
    weights, expected = scoring.state_dict(), scoring(7)
    skeleton: Any = torch.nn.Sequential(pickle.loads(pickle.dumps(scoring)).to("meta"))
    skeleton.load_state_dict({f"0.{name}": p for name, p in weights.items()}, assign=True)
    assert torch.equal(skeleton[0](7), expected)
    found, wanted = (one.band(torch.float32) for one in (skeleton[0], scoring))
    assert (found is None) == (wanted is None)
    assert found is None or torch.equal(found, wanted)


def test_moves_to_another_device(scoring: Any) -> None:
    scoring.to("meta")
    assert scoring(5).device.type == "meta"
    band = scoring.support(1e-3)
    assert band is None or band.device.type == "meta"
    restored = scoring.to_empty(device="cpu")
    reset: Any = getattr(restored, "reset_parameters", None)
    if reset is not None:
        reset()
        assert torch.isfinite(restored(5)).all()


@pytest.mark.parametrize("eps", [1e-2, 1e-4])
def test_outside_its_band_nothing_changes(scoring: ScoringFunction, eps: float) -> None:
    """Attention that skips what is outside computes the same, and trains every parameter."""
    band = scoring.double().support(eps)
    if band is None:
        return
    assert band.dtype == torch.int32
    assert band.shape == (scoring.num_attention_heads, 2)
    steps = torch.tensor([0, 1, 2, 7, 30, 200, 3000])
    for head, (low, high) in enumerate(band.tolist()):
        assert low <= high
        for outside in (low - steps, high + steps):
            found = [_with_slopes(scoring, head, k) for k in outside]
            for numbers in zip(*found, strict=True):
                values = torch.stack(numbers)
                assert ((values - values[0]).abs() <= 2.001 * eps).all()


def _with_slopes(scoring: ScoringFunction, head: int, k: torch.Tensor) -> list[torch.Tensor]:
    """Return a head's score at an offset, and its derivative by every parameter."""
    parameters = list(scoring.parameters())
    found = scoring.scores(k)[head]
    if not parameters or not found.requires_grad:
        return [found]
    slopes = torch.autograd.grad(found, parameters, allow_unused=True)
    return [found.detach(), *(slope for slope in slopes if slope is not None)]
