"""A card says what is so: licence, use, and of length only what was measured."""

import re

import pytest

import tisa.hf
from tiny import original, token_lists
from tisa.hf.card import card_of, licence_of

CARDS = {
    "---\nlanguage: en\nlicense: apache-2.0\ntags:\n- x\n---\n# A model\n": "apache-2.0",
    '---\nlicense: "cc-by-sa-4.0"  \n---\n': "cc-by-sa-4.0",
    "---\nlicense: mit\n---": "mit",
    "---\ntags:\n- x\n---\nlicense: mit\n---\n": None,
    "---\nlicense: mit\nother: [\n": None,
    "---\nlicense: <b>mine</b>\n---\n": None,
    "license: mit\n": None,
    "": None,
}


@pytest.mark.parametrize("text", CARDS)
def test_the_licence_is_what_the_card_of_the_original_names(text, tmp_path):
    (tmp_path / "README.md").write_text(text)
    assert licence_of(tmp_path) == CARDS[text]
    (tmp_path / "README.md").unlink()
    assert licence_of(tmp_path) is None


@pytest.mark.parametrize("positions", ["keep", "replace", "extend"])
def test_a_card_has_title_base_licence_and_no_promise(positions):
    model = original("bert")
    model.config.name_or_path = "somebody/stock"
    made = tisa.hf.convert(
        model, init="zero", positions=positions,
        **({} if positions == "keep" else {"calibration": token_lists()}),
    )  # fmt: skip
    card = card_of(made)
    assert "\nbase_model: somebody/stock\n" in card
    assert "\n# stock with translation-invariant self-attention\n" in card
    assert "Licence: that of the model that it was made from" in card
    assert "license:" not in card
    assert ("which does not say how well: see below" in card) == (positions != "keep")
    assert not re.search(r"no limit|unlimited|any length at no cost", card)
    assert "SentenceTransformer" not in card
    made.config.tisa["made_from"]["license"] = "mit"
    card = card_of(made)
    assert "\nlicense: mit\n" in card.partition("---\n\n#")[0]
    assert "Licence: mit, as the card of the model says" in card
