"""`window` and `sinks` of converted models: implementations, padding, packing, caches, files."""

import pytest
import torch

import tiny
import tisa.hf
from tiny import inputs, logits, original, shake
from tisa.hf import core

ENCODERS = [name for name in tiny.FAMILIES if name not in tiny.DECODERS]
QUICK = [("bert", "ends"), ("mpnet", "global")]
WINDOWS = [
    (n, sinks) if (n, sinks) in QUICK else pytest.param(n, sinks, marks=pytest.mark.full)
    for n in ENCODERS
    for sinks in (None, "ends", "global")
]


def made(name, dtype=torch.float64, **settings):
    settings = {"window": 2, "sinks": "ends"} | settings
    model = tisa.hf.convert(original(name), positions="keep", init="zero", **settings)
    return shake(model.to(dtype))


def pairs(real, window, sinks, see_all, causal):
    """Return which query sees which key, one pair at a time."""
    batch, length = real.shape
    seen = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        there = [i for i in range(length) if real[b, i]]
        ends = {there[0], there[-1]} if sinks else set()
        for i in range(length):
            for j in there:
                near = abs(i - j) <= window or j in ends or (see_all and i in ends)
                seen[b, i, j] = near and not (causal and j > i)
    return seen


def by_pairs(name, given, causal=False, window=2, sinks=True, see_all=False):
    """Return logits of the model without a window, told by a mask who sees whom."""
    whole = made(name, window=None, sinks=None)
    whole.set_attn_implementation("eager")
    mask = pairs(given["attention_mask"].bool(), window, sinks, see_all, causal)
    added = core.additive(mask.unsqueeze(1), torch.float64)
    return whole(input_ids=given["input_ids"], attention_mask=added).logits


def on_the_left():
    given = inputs(2, 12, padded=False)
    given["input_ids"][0, :4], given["attention_mask"][0, :4] = 1, 0
    return given


GIVEN = {
    "right": lambda: inputs(3, 11),
    "left": on_the_left,
    "whole": lambda: inputs(2, 9, padded=False),
    "within the window": lambda: inputs(2, 3, padded=False),
    "one token": lambda: inputs(1, 1, padded=False),
}


@pytest.mark.parametrize(("name", "sinks"), WINDOWS)
def test_it_is_the_model_with_a_mask(name, sinks):
    """Outputs and the gradient of every parameter, the scores' among them."""
    model = made(name, sinks=sinks)
    for way, of in GIVEN.items():
        given = of()
        real = given["attention_mask"].bool()
        expected = by_pairs(name, given, sinks=sinks is not None, see_all=sinks == "global")[real]
        for implementation in tiny.implementations(name):
            model.set_attn_implementation(implementation)
            found = model(**given).logits[real]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        if way != "right":
            continue
        found = []
        for implementation in ("tisa", "eager"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            model(**given).logits[real].square().mean().backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", pytest.param("mpnet", marks=pytest.mark.full)])
def test_packed_sequences_have_ends_of_their_own(name):
    model = made(name)
    lengths = [7, 1, 9]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(5, 60, (1, n), generator=generator) for n in lengths]
    with torch.no_grad():
        first = 2 * (name == "mpnet")
        alone = torch.cat([model(input_ids=part).logits for part in parts], 1)
        places = first + torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
        given = dict(input_ids=torch.cat(parts, 1), position_ids=places)
        ends = torch.tensor([0, 7, 8, 17], dtype=torch.int32)
        for implementation in tiny.implementations(name):
            model.set_attn_implementation(implementation)
            for told in ({}, {"tisa_packed": (ends, 9)}):
                found = model(**given, **told).logits
                torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
def test_a_decoder_reads_on_from_its_cache(name):
    """With caches of either kind, padded on the left, as without any."""
    model = made(name, torch.float32)
    given = on_the_left()
    real = given["attention_mask"].bool()
    places = (given["attention_mask"].cumsum(1) - 1).clamp_min(0)
    whole = made(name, torch.float32, window=None, sinks=None)
    whole.set_attn_implementation("eager")
    mask = core.additive(pairs(real, 2, True, False, True).unsqueeze(1), torch.float32)
    ids = given["input_ids"]
    expected = whole(input_ids=ids, attention_mask=mask, position_ids=places).logits
    for implementation in tiny.IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        found = model(**given, position_ids=places).logits
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
        settings = dict(max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=1)
        settings |= dict(output_logits=True, return_dict_in_generate=True)
        made_of = {}
        for cache in (False, True, "static"):
            more = {"cache_implementation": cache} if cache == "static" else {"use_cache": cache}
            done = model.generate(**given, **settings, **more, disable_compile=True)
            made_of[cache] = torch.stack(done.logits)
        for cache in (True, "static"):
            torch.testing.assert_close(made_of[cache], made_of[False], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", pytest.param("mpnet", marks=pytest.mark.full)])
def test_it_is_saved_and_loaded(name, tmp_path):
    model = made(name, torch.float32, sinks="global" if name == "mpnet" else "ends")
    tisa.hf.save(model, tmp_path)
    again = tisa.hf.load(str(tmp_path)).eval()
    described = again.config.tisa
    assert (described["format"], described["window"]) == (4, 2)
    assert torch.equal(logits(again, **inputs()), logits(model, **inputs()))
    card = (tmp_path / "README.md").read_text()
    assert "up to 2 tokens away, and the first and the last one." in card
    assert ("These two see all." in card) == (name == "mpnet")


def test_it_is_a_row_for_all_queries_that_is_asked_for():
    """A padded batch makes no mask of all pairs."""
    model = made("bert", torch.float32)
    heard = []
    owner = model.bert.encoder.layer[0].attention.self
    owner.register_forward_pre_hook(lambda m, args, kwargs: heard.append((args, kwargs)),
                                    with_kwargs=True)  # fmt: skip
    logits(model, **inputs(3, 11))
    masks = [x for x in (*heard[0][0], *heard[0][1].values()) if getattr(x, "ndim", 0) == 4]
    assert [tuple(mask.shape) for mask in masks] == [(3, 1, 1, 11)]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("bert", {"window": -1}, "window must be a whole number from 0, got -1"),
        ("bert", {"window": True}, "window must be a whole number from 0, got True"),
        ("bert", {"window": None}, 'sinks is for a window, got "ends"'),
        ("bert", {"sinks": "first"}, 'sinks must be "ends", "global" or None'),
        ("gpt2", {"sinks": "global"}, "is for encoders"),
    ],
)
def test_what_cannot_be_says_why(name, settings, words):
    with pytest.raises(ValueError, match=words):
        made(name, **settings)


def test_flex_attention_has_none():
    owner = made("bert", torch.float32).bert.encoder.layer[0].attention.self
    some = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match="has no window with sinks"):
        tisa.hf.implementations.flex(owner, some, some, some, None)
