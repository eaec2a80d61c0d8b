"""The page of a conversion: captions are those of the curves, names cannot run script."""

import re
from html import unescape

import pytest
import torch

import tisa
from page_numbers import other, told, untraced
from tiny import original, shake, token_lists
from tisa.hf import report
from tisa.hf.folder import Done
from tisa.hf.report import REACH, curves_of, head_of, page
from tisa.pages import page as made_page
from tisa.pages.kit import _environment


@pytest.fixture
def done():
    stock = original("bert")
    made = tisa.hf.convert(stock, init="reference", calibration=token_lists())
    made = shake(made)
    stock.config.name_or_path = "models/<script>alert(1)<script>"
    after = {"<b>accuracy</b>": 0.25, "cosine to original at 16 tokens": 0.97}
    return Done(
        stock, made, {"<b>accuracy</b>": 0.5, "cosine to original at 16 tokens": 1.0}, after
    )


def check(said, curve):
    """The caption's numbers are the curve's, and its offset that of the one largest score."""
    low, high, at = re.fullmatch(
        r"(\S+) … (\S+), (largest positive score at \S+|largest at several .*|no positive score)",
        said,
    ).groups()
    assert float(low.replace("−", "-")) == pytest.approx(float(curve.min()), abs=0.00501)
    assert float(high.replace("−", "-")) == pytest.approx(float(curve.max()), abs=0.00501)
    largest = [k - REACH for k, score in enumerate(curve.tolist()) if score == curve.max()]
    if curve.max() <= 0:
        assert at == "no positive score"
    elif len(largest) > 1:
        assert at == "largest at several offsets"
    else:
        assert at.split()[-1].replace("−", "-") == f"{largest[0]:+d}".replace("+0", "0")


def test_every_caption_says_what_its_curve_does(done):
    text = page(done)
    captions = re.findall(r"<figcaption>head (\d+): (.*?)</figcaption>", text)
    curves = [curve for layer in curves_of(done.converted) for curve in layer]
    assert len(captions) == len(curves) == text.count('class="head"') > 0
    for (_, said), curve in zip(captions, curves, strict=True):
        check(unescape(said), curve)


CURVES = {
    "a dip deeper than its peak": ({0: -5.0, 3: 2.0}, 0.0, 3),
    "a dip alone": ({0: -5.0}, 0.0, None),
    "below 0 everywhere": ({-7: -0.5}, -2.0, -7),
    "zero": ({}, 0.0, None),
    "flat": ({}, 1.5, None),
    "two peaks": ({-4: 1.0, 4: 1.0}, 0.0, None),
}


@pytest.mark.parametrize("kind", CURVES)
def test_the_largest_score_is_neither_the_deepest_nor_one_of_many(kind):
    places, level, peak = CURVES[kind]
    curve = torch.full((2 * REACH + 1,), level)
    for offset, score in places.items():
        curve[REACH + offset] = score
    found = head_of(1, 1, curve)
    check(found["told"], curve)
    assert found["peak"] == peak
    assert (peak is None) == ("largest at several offsets" in heads_of([found]))
    if kind == "a dip deeper than its peak":
        assert found["told"] == "−5.00 … 2.00, largest positive score at +3"


def heads_of(heads):
    """Return the pictures of these heads, as the demo has them."""
    template = _environment().get_template("tisa.pages/heads.html").module
    return template.heads({"heads": heads})


def test_every_number_in_a_sentence_follows_what_is_told(done, monkeypatch):
    given = {}
    with monkeypatch.context() as patch:
        patch.setattr(report, "made_page", lambda _, **values: given.update(values) or "")
        page(done)
    before, after = (
        told(made_page("tisa.hf/report.html", **values)) for values in (given, other(given))
    )
    literals = ["The level far away is 0", "the largest one above 0", "ACL 2021"]
    assert untraced(before, after, literals) == []
    # What it is told: numbers of the model itself.
    table = done.original.bert.embeddings.position_embeddings.weight
    assert given["tisa"]["replaced_parameters"] == table.numel() == 64 * 32
    assert given["count"] == 2 * 4 * 5 * 3 + 3 * 32
    (lead,) = (text for text in before if "kernels per head" in text)
    assert lead.endswith("5 kernels per head. Replaced: 2,048 position parameters, by 216.")


def test_the_verdict_is_on_the_page(done):
    text = unescape(page(done))
    for line in done.verdict.told():
        assert f"<li>{line}</li>" in text
    assert "Recommended up to 16 tokens" in text
    nothing = page(Done(done.original, done.converted, {}, {}))
    assert "Up to which length" not in nothing


def test_names_cannot_run_script(done):
    text = page(done)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;script&gt;, converted" in text
    assert "&lt;b&gt;accuracy&lt;/b&gt;</td><td>0.5000</td><td>0.2500</td>" in text
