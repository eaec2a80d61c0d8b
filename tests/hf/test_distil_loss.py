"""What a distillation's loss counts, against its formula; models tell what they were given."""

from collections import Counter

import numpy as np
import pytest
import torch

import formulas
import tisa.hf
from tiny import original, token_lists

# Stands in none of the texts.
MASK = 0
TEXTS = {
    "padded": token_lists(14),
    "plain": [[*text[:7], 3] for text in token_lists(14)],
    "one token is masked or none": [[*text[:3], 3] for text in token_lists(14)],
}


def seen_by(model):
    """Return a list that fills with what the model is given and what it returns."""
    seen = []

    def look(module, arguments, given, returned):
        seen.append((given["input_ids"], given["attention_mask"].bool(), returned))

    model.register_forward_hook(look, with_kwargs=True)
    return seen


def distilled(model, texts, **settings):
    """Return the losses of models that stay as they are, and what both were given and returned."""
    torch.manual_seed(3)
    converted = tisa.hf.convert(model, positions="replace", init="reference", calibration=texts)
    ours, theirs = seen_by(converted), seen_by(model)
    still = dict(scores_lr=0.0, fold_lr=0.0, check=False, progress=lambda told: None)
    settings = still | settings
    losses = tisa.hf.distil(converted, model, texts, **settings)
    steps = list(zip(losses, ours, theirs, strict=True))
    for _, (ids, real, _), (others, seen, _) in steps:
        assert torch.equal(ids, others)
        assert torch.equal(real, seen)
        assert torch.equal(real, ids != 1)
    return steps


def numbers(tensor):
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("texts", TEXTS)
def test_masked_tokens_count_ten_times_and_padding_never(texts):
    steps = distilled(original("bert"), TEXTS[texts], steps=8, mask_token_id=MASK, batch_tokens=60)
    shares = []
    for loss, (ids, real, ours), (_, _, theirs) in steps:
        masked = (ids == MASK).numpy()
        wanted = formulas.distilled_logits(
            numbers(ours.logits), numbers(theirs.logits), real.numpy(), masked
        )
        assert loss == pytest.approx(wanted, rel=1e-4)
        inner = real.clone()
        inner[:, 0] = False
        inner[torch.arange(len(real)), real.sum(1) - 1] = False
        assert not (masked & ~inner.numpy()).any()
        shares.append((masked.sum(), inner.sum()))
    chosen, possible = np.array(shares, dtype=int).sum(0)
    assert 0.05 < chosen / possible < 0.3
    assert any(not real.all() for _, (_, real, _), _ in steps) == (texts == "padded")


@pytest.mark.parametrize("pooled_weight", [0.0, 2.5])
@pytest.mark.parametrize("texts", ["padded", "plain"])
def test_without_a_mask_token_hidden_states_and_their_means_count(texts, pooled_weight):
    model = original("bert").base_model
    steps = distilled(model, TEXTS[texts], steps=4, batch_tokens=60, pooled_weight=pooled_weight)
    for loss, (_, real, ours), (_, _, theirs) in steps:
        hidden = numbers(ours.last_hidden_state), numbers(theirs.last_hidden_state)
        wanted = formulas.distilled_hidden(*hidden, real.numpy(), pooled_weight)
        assert loss == pytest.approx(wanted, rel=1e-4)


def test_by_length_every_length_has_as_many_steps():
    texts = [*token_lists(9), *([2, *range(20, 20 + n), 3] for n in (2, 30, 31, 32))]

    def batches(**settings):
        steps = distilled(original("bert"), texts, steps=12, batch_tokens=40, **settings)
        return [ids for _, (ids, _, _), _ in steps]

    def lengths(found):
        return Counter((ids.shape[1] - 1).bit_length() for ids in found)

    # Without it, every text once and then again: eight batches of three lengths.
    plain, spread = batches(), batches(by_length=True)
    assert sum(len(ids) for ids in plain[:8]) == len(texts)
    assert all(map(torch.equal, plain[8:], plain[:4]))
    assert len(set(lengths(plain[:8]).values())) > 1
    assert set(lengths(spread).values()) == {4}
    assert {str(ids) for ids in spread} == {str(ids) for ids in plain}
