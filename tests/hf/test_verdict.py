"""What is said of lengths is what was measured, and of others nothing is said."""

import re

import pytest

import tisa.hf
from tiny import original, token_lists
from tisa.hf.card import card_of
from tisa.hf.verdict import KEPT, RECOMMENDED, Verdict

NEAR, FAIR, FAR = KEPT, RECOMMENDED, RECOMMENDED - 1e-6
CASES = {
    "near everywhere": ({16: NEAR, 512: 1.0}, 512, 512),
    "fair at the end": ({16: NEAR, 128: NEAR - 1e-6, 512: FAIR}, 16, 512),
    "far at the end": ({16: 1.0, 128: FAIR, 512: FAR}, 16, 128),
    "near again after a gap counts for nothing": ({16: NEAR, 64: FAR, 512: NEAR}, 16, 16),
    "fair from the beginning": ({16: FAIR}, None, 16),
    "far from the beginning": ({16: FAR, 64: NEAR}, None, None),
    "no number": ({16: float("nan"), 64: NEAR}, None, None),
}


@pytest.mark.parametrize("limit", [None, 512])
@pytest.mark.parametrize("name", CASES)
def test_only_measured_lengths_are_named(name, limit):
    cosines, kept, recommended = CASES[name]
    after = {f"cosine to original at {n} tokens": value for n, value in cosines.items()}
    verdict = Verdict.of({"order-match": 0.5, **dict(reversed(after.items()))}, limit)
    assert verdict.cosines == cosines
    assert (verdict.up_to(KEPT), verdict.up_to(RECOMMENDED)) == (kept, recommended)
    said = " ".join(verdict.told())
    named = {int(n) for n in re.findall(r"(?:to|beyond|than|at most) (\d+) tokens", said)}
    assert named == {kept, recommended, limit or max(cosines)} - {None}
    assert ("Recommended up to" in said) == (recommended is not None)
    assert ("cut a text into pieces" in said) == (recommended is not None)
    assert ("Kept up to" in said) == (kept is not None)
    # What each length costs is always told, and nothing is called free of that.
    assert all(f"{value:.4f} at {n}" in said for n, value in cosines.items())
    assert ("`tisa-lab long`" in said) == (limit is None)


def test_a_config_keeps_it():
    verdict = Verdict({64: 0.98765432, 8: 1.0}, None)
    again = Verdict.read(verdict.written())
    assert again == Verdict({8: 1.0, 64: 0.9877}, None)
    assert list(again.cosines) == [8, 64]


def test_the_card_says_it_or_that_nothing_was_measured():
    made = tisa.hf.convert(original("bert"), init="zero", calibration=token_lists())
    assert "No length was measured, so none is recommended" in card_of(made)
    verdict = Verdict({16: 0.99, 64: 0.96}, None)
    made.config.tisa["measured"] = verdict.written()
    card = card_of(made)
    for line in verdict.told():
        assert f"- {line}\n" in card
    assert "pieces of at most 64 tokens" in card
    # Of a model that is trained on, what was measured before is not so any more.
    tisa.hf.distil(made, original("bert"), token_lists(), steps=1, progress=lambda told: None)
    assert "No length was measured" in card_of(made)
