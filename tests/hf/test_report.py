"""The page of a conversion: captions are those of the curves, names cannot run script."""

import re
from html import unescape

import pytest
import torch

import tisa
from tiny import original, shake
from tisa.hf.folder import Done
from tisa.hf.report import REACH, curves_of, head_of, page


@pytest.fixture
def done():
    stock = original("bert")
    made = shake(tisa.hf.convert(stock, positions="keep", init="zero"))
    stock.config.name_or_path = "models/<script>alert(1)<script>"
    return Done(stock, made, {"<b>accuracy</b>": 0.5}, {"<b>accuracy</b>": 0.25})


def check(told, curve):
    """The caption's numbers are the curve's, and its offset that of the largest score above 0."""
    low, high, at = re.fullmatch(
        r"(\S+) … (\S+), (?:largest positive score at (\S+)|no positive score)", told
    ).groups()
    assert float(low.replace("−", "-")) == pytest.approx(float(curve.min()), abs=0.00501)
    assert float(high.replace("−", "-")) == pytest.approx(float(curve.max()), abs=0.00501)
    if at is None:
        assert curve.max() <= 0
    else:
        offset = int(at.replace("−", "-"))
        assert curve[offset + REACH] == curve.max() > 0


def test_every_caption_says_what_its_curve_does(done):
    text = page(done)
    captions = re.findall(r"<figcaption>head (\d+): (.*?)</figcaption>", text)
    curves = [curve for layer in curves_of(done.converted) for curve in layer]
    assert len(captions) == len(curves) == text.count('class="head"') > 0
    for (_, told), curve in zip(captions, curves, strict=True):
        check(unescape(told), curve)


@pytest.mark.parametrize("kind", ["a dip deeper than its peak", "a dip alone", "zero"])
def test_the_largest_score_is_not_the_deepest(kind):
    curve = torch.zeros(2 * REACH + 1)
    if kind != "zero":
        curve[REACH] = -5.0
    if kind == "a dip deeper than its peak":
        curve[REACH + 3] = 2.0
    found = head_of(1, 1, curve)
    check(found["told"], curve)
    if kind == "a dip deeper than its peak":
        assert found["told"] == "−5.00 … 2.00, largest positive score at +3"
        assert found["peak"] == 3


def test_names_cannot_run_script(done):
    text = page(done)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;script&gt;, converted" in text
    assert "&lt;b&gt;accuracy&lt;/b&gt;</td><td>0.5000</td><td>0.2500</td>" in text
