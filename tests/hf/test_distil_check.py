"""Distillation cannot hurt: held-out texts, the best state, rates, broad kernels."""

from itertools import pairwise

import pytest
import torch

import tisa.hf
from tiny import original, token_lists
from tisa.hf.calibration import Tokens, tokens_of
from tisa.hf.distillation_loss import Check, batches_by, divided, score_of
from tisa.hf.distillation_state import FALLS, PATIENCE, State
from tisa.hf.folder import _divided
from tisa.parameters import is_score

TOKENS = token_lists(24)


def converted(model, **settings):
    torch.manual_seed(3)
    given = dict(init="reference", calibration=TOKENS) | settings
    return tisa.hf.convert(model, **given)


def scores(model):
    return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if is_score(n)])


def silent(told):
    """Show no bar."""


def losses_on(made, model, sequences):
    held = tokens_of(sequences, model)
    return Check(batches_by(held, model, 0, 2048, False), model, None, 1.0, 0).losses(made.eval())


# What is trained on has other words than what is checked on: what helps the one harms the other.
LOW = [[2, *(4 + token % 20 for token in text[1:-1]), 3] for text in TOKENS]
HIGH = [[2, *(30 + token % 30 for token in text[1:-1]), 3] for text in TOKENS]


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param(dict(scores_lr=0.05), marks=pytest.mark.full),
        dict(scores_lr=3.0, fold_lr=1.0),
    ],
)
def test_what_harms_held_out_texts_is_not_kept(rates):
    model = original("bert").base_model
    settings = dict(steps=6, progress=silent) | rates
    made, unchecked = converted(model), converted(model)
    before = losses_on(made, model, HIGH)
    tisa.hf.distil(made, model, LOW, held_out=HIGH, **settings)
    after = losses_on(made, model, HIGH)
    assert all(after[name] <= before[name] * (1 + 1e-5) for name in before)
    tisa.hf.distil(unchecked, model, LOW, check=False, **settings)
    worst = losses_on(unchecked, model, HIGH)
    if "fold_lr" in rates:
        # Without the check it would have been harmed.
        assert max(worst[name] / before[name] for name in before) > 1.05


def test_where_everything_hurts_the_start_stays():
    """Positions are kept and scores are zero: nothing is nearer to the original than that."""
    model, told = original("bert"), []
    made = converted(model, positions="keep", init="zero", calibration=None)
    before = scores(made)
    tisa.hf.distil(made, model, TOKENS, steps=12, mask_token_id=5, progress=told.append)
    assert torch.equal(scores(made), before)
    assert told[-1].held_out == 1.0
    # The smallest rate from the beginning, and after four checks in vain a smaller one.
    assert [told[0].share, told[-1].share] == pytest.approx([0.1, 0.03])


@pytest.mark.full
def test_the_best_state_is_the_one_that_is_left():
    model, told = original("bert").base_model, []
    made = converted(model)
    _, held = divided(tokens_of(TOKENS, model))
    start = losses_on(made, model, [one.ids for one in held])
    tisa.hf.distil(made, model, TOKENS, steps=30, progress=told.append)
    end = losses_on(made, model, [one.ids for one in held])
    assert score_of(end, start) == pytest.approx(told[-1].held_out, rel=1e-4)
    assert told[-1].held_out < 1
    # It never rises.
    assert all(a.held_out >= b.held_out for a, b in pairwise(told))


@pytest.mark.full
def test_a_rate_that_is_too_high_is_not_taken():
    model, shares = original("bert").base_model, {}
    for rate in (0.002, 3.0):
        told = []
        tisa.hf.distil(
            converted(model), model, TOKENS, steps=6, scores_lr=rate, fold_lr=rate / 10,
            progress=told.append,
        )  # fmt: skip
        shares[rate] = told[0].share
    assert shares[0.002] == 1.0
    assert shares[3.0] < 1.0


def test_worse_at_one_length_is_worse():
    start = {4: 0.2, 9: 1.0}
    assert score_of({4: 0.1, 9: 1.0}, start) == pytest.approx(0.75)
    assert score_of({4: 0.1, 9: 1.001}, start) == float("inf")
    assert score_of({4: float("nan"), 9: 0.5}, start) == float("inf")
    assert score_of({4: 1e-9, 9: 0.5}, {4: 0.0, 9: 1.0}) == float("inf")
    assert score_of({4: 0.0, 9: 0.5}, {4: 0.0, 9: 1.0}) == pytest.approx(0.75)


@pytest.mark.parametrize("count", [2, 3, 8, 12, 1000])
def test_held_out_texts_are_of_all_lengths_and_not_trained_on(count):
    texts = [Tokens(list(range(n + 3))) for n in torch.randperm(count).tolist()]
    train, held = divided(texts)
    ids = [{tuple(one.ids) for one in some} for some in (train, held)]
    assert not ids[0] & ids[1]
    assert len(train) + len(held) == count or len(held) == 64
    assert train
    assert 1 <= len(held) <= max(1, min(64, count // 8 + 1))
    lengths = sorted(len(one.ids) for one in held)
    assert lengths[0] < 3 + max(8, count / 8)
    assert lengths[-1] > count - max(8, count / 8)


def test_a_step_is_a_share_of_a_kernels_sharpness():
    model = original("bert").base_model
    made = converted(model)
    sharp = next(p for n, p in made.named_parameters() if n.endswith("kernel_sharpness"))
    with torch.no_grad():
        sharp[:, 0], sharp[:, 1], sharp[:, 2] = 1e-3, 2.0, -0.05
    before = {n: p.detach().clone() for n, p in made.named_parameters() if is_score(n)}
    tisa.hf.distil(made, model, TOKENS, steps=1, check=False, progress=silent)
    for name, p in made.named_parameters():
        if name.endswith("kernel_sharpness"):
            # Adam's first step is the rate, up or down.
            moved = (p.detach() / before[name]).log().abs()
            assert moved.max() == pytest.approx(0.05, rel=1e-3)
        elif name in before:
            rate = 0.05 if "offset_scores" in name else 0.002
            assert (p.detach() - before[name]).abs().max() == pytest.approx(rate, rel=1e-2)


def test_a_damped_state_goes_back_to_the_best_and_ends():
    weight = torch.nn.Parameter(torch.zeros(1))
    state = State({"offset_scores.x": weight}, 0.1, 0.1, None, {})
    with torch.no_grad():
        weight.fill_(1.0)
    state.checked(0.5)
    for fall in range(FALLS + 1):
        assert not state.ended
        for _ in range(PATIENCE):
            with torch.no_grad():
                weight.fill_(9.0)
            state.checked(0.5)
        assert weight.item() == 1.0
        assert state.share == pytest.approx(0.3 ** (fall + 1))
    assert state.ended


def test_what_cannot_be_checked_is_refused():
    model = original("bert").base_model
    with pytest.raises(ValueError, match="texts must be two or more, one of them to check on"):
        tisa.hf.distil(converted(model), model, TOKENS[:1], steps=1)
    with pytest.raises(TypeError, match="lengths are for a list of texts"):
        tisa.hf.distil(converted(model), model, TOKENS, steps=1, lengths=(4, 20))
    with pytest.raises(ValueError, match="lengths must end at 64, the original takes up to 64"):
        tisa.hf.distil(converted(model), model, ["a b c"] * 9, steps=1, lengths=(4, 99))


def test_the_command_checks_on_texts_of_no_other_use():
    used, checked = _divided([str(i) for i in range(20)])
    assert checked == ["1", "9", "17"]
    assert sorted([*used, *checked], key=int) == [str(i) for i in range(20)]
    assert _divided(["a", "b"]) == (["a"], ["b"])
    with pytest.raises(ValueError, match="texts must be four or more to distil"):
        _divided(["a"])
